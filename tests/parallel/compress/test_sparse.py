"""top-k and threshold: what the papers' algorithms give, and what momentum without masking does."""

from functools import partial

import numpy as np
import pytest
from summing import gradients, sum_by

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.errors import CommError
from minidist.parallel.compress.sparse import TopK, count_of, pack, unpack
from minidist.parallel.step.scheme import GradientRun

N = 257


def reference(
    given: list[np.ndarray], *, density: float, momentum: float = 0.0, masking: bool = True
) -> np.ndarray:
    """Deep Gradient Compression, algorithm 4, for all ranks: the sums (steps, n)."""
    u, v = np.zeros((2, len(given), given[0].shape[1]))
    k = count_of(density, u.shape[1])
    sums = []
    for gradient in zip(*given, strict=True):
        total = np.zeros(u.shape[1])
        for rank, own in enumerate(gradient):
            u[rank] = momentum * u[rank] + own
            v[rank] += u[rank]
            mask = np.zeros(len(own), bool)
            mask[np.argsort(-np.abs(v[rank]), kind="stable")[:k]] = True
            total[mask] += v[rank][mask]
            v[rank][mask] = 0
            if masking:
                u[rank][mask] = 0
        sums.append(total)
    return np.array(sums)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "masking": False}])
def test_equals_the_paper(options: dict[str, float]) -> None:
    given = [gradients(rank, 20, N) for rank in range(3)]
    text = "top-k:density=0.05" + "".join(f",{name}={value}" for name, value in options.items())
    sums = sum_by(text.replace("False", "no"), 3, given=given.__getitem__)
    np.testing.assert_allclose(
        sums.results[0], reference(given, density=0.05, **options), rtol=1e-13, atol=1e-13
    )


def test_without_masking_it_is_another_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: masking is asked for, and left out. The test above then fails."""
    made = TopK.__init__
    monkeypatch.setattr(
        TopK,
        "__init__",
        lambda self, density, **options: made(self, density, **{**options, "masking": False}),
    )
    given = [gradients(rank, 20, N) for rank in range(3)]
    sums = sum_by("top-k:density=0.05,momentum=0.9", 3, given=given.__getitem__)
    assert not np.allclose(sums.results[0], reference(given, density=0.05, momentum=0.9), rtol=1e-3)


def test_threshold_equals_strom() -> None:
    given = [gradients(rank, 10, N) for rank in range(2)]
    residuals = np.zeros((2, N))
    wanted = []
    for step in range(10):
        residuals += [rank[step] for rank in given]
        mask = np.abs(residuals) >= 3.0
        assert mask.sum(axis=1).max() < N / 2
        wanted.append(np.where(mask, residuals, 0).sum(axis=0))
        residuals[mask] = 0
    np.testing.assert_allclose(
        sum_by("threshold:value=3", 2, given=given.__getitem__).results[0], wanted, rtol=1e-13
    )


def test_a_threshold_of_nothing_sends_half() -> None:
    """No payload is larger than the numbers themselves would be (float32)."""
    sums = sum_by("threshold:value=0", 2, kind="float32", steps=1)
    assert sums.bytes_on() == 2 * (4 + 8 * 129)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("text", ["top-k:density=0.05,momentum=0.5", "threshold:value=1"])
def test_a_reduce_scatter_gives_the_same_bits(text: str, verb: str) -> None:
    whole = sum_by(text, 3, steps=5)
    parts = sum_by(text, 3, steps=5, verb="reduce_scatter")
    np.testing.assert_array_equal(np.concatenate(parts.results, axis=1), whole.results[0])


def test_warm_up_falls_in_equal_ratios() -> None:
    scheme = TopK(0.01, warmup=4)
    densities = []
    for _ in range(7):
        scheme.begin_step()
        densities.append(scheme.present_density())
    np.testing.assert_allclose(
        densities, [0.25 * 0.04 ** (step / 4) for step in range(4)] + [0.01] * 3
    )


def test_errors_follow_the_loss_scale() -> None:
    def job(world: object) -> list[np.ndarray]:
        results = []
        scales = (1.0, 8.0, 8.0, 2.0)
        for scaled in (False, True):
            scheme = TopK(0.1, momentum=0.5)
            parameter = Parameter(np.zeros(40))
            scheme.attach([GradientRun.whole([parameter], world, "all_reduce")])  # type: ignore[arg-type]
            for step, scale in enumerate(scales):
                scale = scale if scaled else 1.0
                bucket = gradients(world.rank, 4, 40)[step] * scale  # type: ignore[attr-defined]
                scheme.begin_step(scale)
                scheme.start_all_reduce(0, bucket).wait()
                results.append(bucket / scale)
        return results

    results = md.run(job, size=2)[0]
    np.testing.assert_allclose(results[4:], results[:4], rtol=1e-13)


def test_payloads() -> None:
    positions = np.array([3, 9])
    values = np.array([0.5, -2.0])
    stream = np.concatenate([pack(positions, values), pack(positions[:0], values[:0])])
    found, numbers, stop = unpack(stream, 0, np.dtype(np.float64), 10)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(numbers, values)
    assert (stop, unpack(stream, stop, np.dtype(np.float64), 10)[2]) == (28, 32)
    for wrong, size in ((stream, 1), (stream[:20], 10)):
        with pytest.raises(CommError, match="2 pairs"):
            unpack(wrong, 0, np.dtype(np.float64), size)


@pytest.mark.soak
def test_random_k_without_feedback_is_right_on_average() -> None:
    given = partial(lambda rank: np.repeat(gradients(rank, 1, N), 3000, axis=0))
    wanted = gradients(0, 1, N)[0] + gradients(1, 1, N)[0]
    sums = sum_by("random-k:density=0.2,feedback=no", 2, given=given).results[0]
    # of the mean: each number is 0 or 5 times itself
    deviation = 2 * np.abs(wanted) / np.sqrt(3000)
    assert np.abs(sums.mean(axis=0) - wanted).max() < 5 * deviation.max()
    assert (np.count_nonzero(sums, axis=1) == round(0.2 * N)).all()
