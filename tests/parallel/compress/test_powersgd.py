"""PowerSGD: the paper's algorithm, exact where the rank is large enough, and alive after zeros."""

import numpy as np
import pytest
from summing import gradients, sum_by

from minidist.device.backend import random_normal
from minidist.parallel.compress.powersgd import orthonormal

SHAPE = (12, 10)


def reference(given: list[np.ndarray], rank: int) -> np.ndarray:
    """Algorithms 1 and 2 of the paper for one matrix, each rank's error that of its own projection:
    (steps, n)."""
    errors = np.zeros((len(given), *SHAPE))
    q = random_normal("p0/powersgd/0", 0, range(SHAPE[1] * rank), "float64").reshape(SHAPE[1], rank)
    sums = []
    for gradient in zip(*given, strict=True):
        errors += np.reshape(gradient, errors.shape)
        p = np.linalg.qr(sum(error @ q for error in errors))[0]
        q = sum(error.T @ p for error in errors)
        sums.append((p @ q.T).reshape(-1))
        errors -= np.array([p @ (error.T @ p).T for error in errors])
        signs = np.ones(rank)  # of a column of p: both signs give the same product
        q = q * signs
    return np.array(sums)


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equals_the_paper(rank: int) -> None:
    given = [gradients(number, 10, 120) for number in range(3)]
    sums = sum_by(f"powersgd:rank={rank}", 3, given=given.__getitem__, shapes=(SHAPE,))
    np.testing.assert_allclose(sums.results[0], reference(given, rank), rtol=1e-8, atol=1e-10)


def test_exact_where_the_rank_is_large_enough() -> None:
    """Gradients that are products of rank 3 need no more than 3 columns; and a square matrix at
    full rank travels."""
    random = np.random.default_rng(1)
    basis = random.normal(size=(40, 3))
    given = [
        np.stack([(basis @ random.normal(size=(3, 30))).reshape(-1) for _ in range(4)])
        for _ in range(3)
    ]
    sums = sum_by("powersgd:rank=3", 3, given=given.__getitem__, shapes=((40, 30),))
    # beside its largest number: rounding grows with how alike the three random columns are
    total = sum(given)
    np.testing.assert_allclose(sums.results[0], total, rtol=0, atol=1e-11 * np.abs(total).max())
    whole = sum_by(
        "powersgd:rank=12", 3, given=lambda rank: gradients(rank, 4, 120), shapes=(SHAPE,)
    )
    np.testing.assert_allclose(
        whole.results[0], sum(gradients(rank, 4, 120) for rank in range(3)), rtol=1e-13
    )
    assert ("worker", 0) not in whole.errors[0]  # the matrix travels as it is: nothing to keep


def test_two_columns_of_a_full_projection_lose_nothing() -> None:
    """rank = min(a, b) of a thin matrix (2, 60) with r (a + b) > a b would be no gain; of (3, 60)
    at 2 some is lost."""
    given = [gradients(rank, 6, 180) for rank in range(2)]
    sums = sum_by("powersgd:rank=2", 2, given=given.__getitem__, shapes=((3, 60),))
    assert np.abs(sums.results[0] - sum(given)).max() > 0.1


def test_orthonormal_columns() -> None:
    p = np.random.default_rng(2).normal(size=(50, 6)) * 10.0 ** np.arange(-6, 0)
    kept = orthonormal(p.copy())
    np.testing.assert_allclose(kept.T @ kept, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(kept @ (kept.T @ p), p, atol=1e-12)
    twice = orthonormal(np.stack([p[:, 0], p[:, 0] * 2, np.zeros(50)], axis=1))
    np.testing.assert_allclose(twice.T @ twice, np.diag([1.0, 0, 0]), atol=1e-12)


def test_alive_after_gradients_of_zero() -> None:
    """An expert that no token chose for a step: its Q must not become zero for ever."""
    given = [gradients(rank, 5, 120) for rank in range(2)]
    for numbers in given:
        numbers[:2] = 0
    sums = sum_by("powersgd:rank=2", 2, given=given.__getitem__, shapes=(SHAPE,))
    assert not sums.results[0][:2].any()
    assert np.linalg.matrix_rank(sums.results[0][2].reshape(SHAPE)) == 2


def test_warm_start_finds_the_strongest_directions() -> None:
    """The same gradient again and again: after some steps the product is the best of its rank."""
    random = np.random.default_rng(3)
    u, s, v = np.linalg.svd(random.normal(size=(20, 30)), full_matrices=False)
    matrix = (u * (s * 0.5 ** np.arange(20))) @ v
    sums = sum_by(
        "powersgd:rank=2,feedback=no",
        2,
        given=lambda rank: np.repeat(matrix.reshape(1, -1), 30, axis=0),
        shapes=((20, 30),),
    )
    u, s, v = np.linalg.svd(2 * matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]
    np.testing.assert_allclose(sums.results[0][-1].reshape(20, 30), best, atol=1e-3 * s[0])
    assert np.abs(sums.results[0][0].reshape(20, 30) - best).max() > 1e-2 * s[0]
