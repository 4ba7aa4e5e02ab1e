"""Digests of batches: what they see, and how much of a large batch they read."""

import time
from typing import Any

import numpy as np
import pytest

from minidist.data import rank_batch
from minidist.data.rank_batch import (
    RankBatch,
    check_digests,
    digest_of,
    rows_of_all,
    targets_in,
    with_digests,
)
from minidist.errors import MismatchError

IDS = np.arange(24).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        IDS + 1,
        IDS[::-1],
        IDS.astype(np.int32),
        IDS.astype(">i8"),
        IDS[:3],
        IDS[:, :5],
        IDS.reshape(6, 4),
        IDS[:0],
    ],
)
def test_a_digest_sees_numbers_shape_and_dtype(other: np.ndarray) -> None:
    assert digest_of(other, 0) != digest_of(IDS, 0)


@pytest.mark.parametrize(
    "same", [IDS.copy(), np.asfortranarray(IDS), np.repeat(IDS, 2, axis=0)[::2]]
)
def test_a_digest_does_not_see_strides(same: np.ndarray) -> None:
    assert digest_of(same, 3) == digest_of(IDS, 3)


def test_a_digest_is_a_whole_number_that_float64_holds() -> None:
    rng = np.random.default_rng(0)
    for step in range(50):
        digest = digest_of(rng.integers(0, 99, (3, 5)), step)
        assert digest == int(digest) and 0 <= digest < 2**52


def test_each_row_of_a_large_batch_counts_in_some_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step reads more than its window."""
    monkeypatch.setattr(rank_batch, "WINDOW_BYTES", 3 * 6 * 8 + 7)
    rows = np.arange(60).reshape(10, 6)
    for row in range(10):
        other = rows.copy()
        other[row, 2] += 1
        seen = [step for step in range(8) if digest_of(other, step) != digest_of(rows, step)]
        assert 1 <= len(seen) <= 4


def test_what_a_step_reads_is_bounded() -> None:
    """A step reads only its window of a batch of 64 MB, so it takes not much more than one of 256
    KB."""
    large, small = (np.zeros((rows, 1024), np.int64) for rows in (8192, 32))

    def seconds(batch: np.ndarray) -> float:
        begun = time.thread_time()
        for step in range(20):
            digest_of(batch, step)
        return time.thread_time() - begun

    assert min(seconds(large) for _ in range(5)) < 20 * min(seconds(small) for _ in range(5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda inputs, targets: (inputs + 1, targets),
            "rank 7: the batch's inputs differ from rank 5's; pass every",
        ),
        (
            lambda inputs, targets: (inputs, targets + 1),
            "rank 7: the batch's targets differ from rank 5's; pass every",
        ),
        (
            lambda inputs, targets: (inputs[:3], targets[:3]),
            "rank 7: the batch's inputs and targets have another shape",
        ),
    ],
)
def test_the_rank_that_differs_from_most_is_named(change: Any, words: str) -> None:
    digests = np.array(
        [with_digests(batch, 0).digests for batch in ((IDS, IDS), (IDS, IDS), change(IDS, IDS))]
    )
    with pytest.raises(MismatchError, match=words):
        check_digests(digests, [5, 6, 7])


def test_rows_and_targets_of_the_global_batch() -> None:
    assert (rows_of_all((IDS, IDS), 3), targets_in((IDS, IDS))) == ([2, 1, 1], 24)
    own = RankBatch((IDS, IDS))
    own.rows = (4, 0, 2)
    assert (rows_of_all(own, 3), targets_in(own)) == ([4, 0, 2], 36)
