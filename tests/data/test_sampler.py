"""DistributedSampler: who gets which sample."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.data import DistributedSampler
from minidist.errors import ConfigError

lengths = st.integers(0, 40)
sizes = st.integers(1, 8)
batches = st.integers(1, 12)


def shares(length: int, size: int, batch: int, **options: object) -> list[list[np.ndarray]]:
    """Return what each rank gets: a list of steps each."""
    return [
        list(DistributedSampler(length, group_size=size, rank=rank, batch=batch, **options))  # type: ignore[arg-type]
        for rank in range(size)
    ]


def end_to_end(ranks: list[list[np.ndarray]]) -> list[int]:
    """All samples in the order of the epoch: step by step, rank by rank."""
    return [int(sample) for step in zip(*ranks, strict=True) for share in step for sample in share]


@given(length=lengths, size=sizes, batch=batches, seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_ranks_together_see_each_sample_once_in_an_order_that_knows_no_ranks(
    length: int, size: int, batch: int, seed: int, epoch: int
) -> None:
    alone = end_to_end(shares(length, 1, batch, seed=seed, epoch=epoch))
    together = shares(length, size, batch, seed=seed, epoch=epoch)
    assert sorted(alone) == list(range(length))
    assert end_to_end(together) == alone
    for step in zip(*together, strict=True):  # as many steps on every rank
        counts = [len(share) for share in step]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
        assert 1 <= sum(counts) <= batch


@given(length=lengths, size=sizes, batch=batches)
def test_drop_and_repeat_only_touch_the_last_batch(length: int, size: int, batch: int) -> None:
    kept = end_to_end(shares(length, size, batch))
    dropped = end_to_end(shares(length, size, batch, last="drop"))
    repeated = end_to_end(shares(length, size, batch, last="repeat"))
    assert dropped == kept[: length // batch * batch]
    extra = -length % batch
    assert len(repeated) == length + extra and repeated[:length] == kept
    assert repeated[length:] == (kept * batch)[:extra]


@given(length=lengths, batch=batches, last=st.sampled_from(["keep", "drop", "repeat"]))
def test_len_is_the_number_of_steps(length: int, batch: int, last: str) -> None:
    for rank in range(3):
        sampler = DistributedSampler(length, group_size=3, rank=rank, batch=batch, last=last)  # type: ignore[arg-type]
        assert len(sampler) == len(list(sampler))


def test_seed_and_epoch_choose_the_order() -> None:
    sampler = DistributedSampler(50, group_size=1, rank=0, batch=50, seed=1)
    first = list(sampler)[0]
    assert np.array_equal(list(sampler)[0], first)
    sampler.set_epoch(1)
    second = list(sampler)[0]
    sampler.set_epoch(0)
    assert np.array_equal(list(sampler)[0], first) and not np.array_equal(first, second)
    other = DistributedSampler(50, group_size=1, rank=0, batch=50, seed=2)
    assert not np.array_equal(list(other)[0], first)
    assert sorted(first) == sorted(second) == list(range(50)) != list(first)
    plain = DistributedSampler(5, group_size=1, rank=0, batch=2, shuffle=False)
    assert [share.tolist() for share in plain] == [[0, 1], [2, 3], [4]]


def test_every_place_is_as_likely() -> None:
    """Where sample 0 ends up in an epoch: mean and spread of a uniform place, over 400 epochs."""
    places = [
        int(
            np.flatnonzero(
                DistributedSampler(20, group_size=1, rank=0, batch=20, epoch=epoch).order() == 0
            )[0]
        )
        for epoch in range(400)
    ]
    assert abs(np.mean(places) - 9.5) < 4 * 5.77 / 20 and abs(np.std(places) - 5.77) < 0.6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 2}, "rank 2 is not in a group of 2"),
        ({"rank": -1}, "rank -1"),
        ({"batch": 0}, "batches of 0"),
        ({"length": -1}, "-1 samples"),
        ({"group_size": 0}, "for 0 ranks"),
        ({"last": "pad"}, "keep, drop or repeat"),
    ],
)
def test_bad_sizes(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DistributedSampler(**{"length": 5, "group_size": 2, "rank": 0, "batch": 3, **options})  # type: ignore[arg-type]


def test_sizes_of_a_small_dtype_are_whole_numbers() -> None:
    length: Any = np.uint8(200)
    batch: Any = np.int8(64)
    small = DistributedSampler(length, group_size=2, rank=1, batch=batch)
    plain = DistributedSampler(200, group_size=2, rank=1, batch=64)
    assert len(small) == len(plain) == 4
    assert [part.tolist() for part in small] == [part.tolist() for part in plain]
