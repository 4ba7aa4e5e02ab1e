"""Records on disk and their buffers: what is written is read, in order, through few buffers; lanes
keep their pace."""

import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.device.account import MemoryAccount
from minidist.errors import ConfigError, DiskError, TimeoutError
from minidist.parallel.memory.disk import PAGE, Disk, Pool
from minidist.parallel.memory.transfer_lanes import Pace, TransferLane
from minidist.parallel.step.recorder import Silent
from minidist.parallel.zero.shards import MemoryTraffic


def disk(buffers: int = 2, **options: object) -> Disk:
    """With an account of its own."""
    return Disk(
        None, MemoryTraffic(), buffers=buffers, recorder=Silent(), memory=MemoryAccount(), **options
    )  # type: ignore


@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    buffers=st.integers(1, 3),
    dtype=st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_what_is_written_is_read(counts: list[int], buffers: int, dtype: type) -> None:
    """Also right behind the write, through one buffer, of any dtype and of nothing at all."""
    place = disk(buffers)
    record = place.new_record("some")
    values = {}
    for number, count in enumerate(counts):
        record.add(str(number), dtype, count)
        values[str(number)] = (np.arange(count) + number).astype(dtype)
    assert all(region.offset % PAGE == 0 for region in record.regions.values())
    loan = place.lend(record)
    for key, array in values.items():
        assert loan.arrays[key].ctypes.data % PAGE == 0
        loan.arrays[key][...] = array
    place.start_write(loan, list(values))
    back = place.start_read(record, list(values))
    for key, array in values.items():
        np.testing.assert_array_equal(back.wait().arrays[key], array)
    back.end()
    place.close()


def test_a_region_is_zero_until_it_is_written() -> None:
    place = disk()
    record = place.new_record("some")
    record.add("m", np.float32, 1000)
    loan = place.start_read(record, ["m"])
    assert not loan.wait().arrays["m"].any()
    loan.end()
    place.close()


def test_buffers_are_bounded_and_one_is_left_for_who_must_have_it() -> None:
    place = disk(2)
    record = place.new_record("some")
    record.add("w", np.float32, 10)
    first = place.lend(record)
    assert not place.has_spare()  # nobody reads ahead with the last one
    second = place.lend(record)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(place.lend(record)))
    thread.start()
    time.sleep(0.02)
    assert not waited
    second.end()
    thread.join(20)
    assert waited
    first.end()
    place.close()


def test_who_waits_for_a_buffer_in_vain_is_told() -> None:
    pool = Pool(1, PAGE, "cpu", MemoryAccount())
    pool.take()
    with pytest.raises(TimeoutError, match="none of 1 buffers became free in 0.01 s"):
        pool.take(limit=0.01)


def test_too_little_room_is_told_with_the_need(tmp_path: Path) -> None:
    place = disk(who="rank 3")
    with pytest.raises(
        DiskError,
        match=r"rank 3 needs 1,000,000,000,000,000,000 bytes in .*are free; free some space",
    ):
        place.require(10**18)
    place.close()


def test_a_lane_takes_its_time_and_counts() -> None:
    traffic = MemoryTraffic()
    lane = TransferLane(
        "host", "disk", traffic, recorder=Silent(), pace=Pace(latency=0.01, per_byte=1e-5)
    )
    start = time.monotonic()
    with traffic.during_step():
        one, other = (lane.start("write", 1000, lambda n=n: n) for n in (1, 2))
    assert (one.wait(), other.wait()) == (1, 2) and time.monotonic() - start >= 0.04
    lane.start("write", 5, lambda: None).wait()
    assert (traffic.step, traffic.other) == ({"host to disk": 2000}, {"host to disk": 5})
    with pytest.raises(ZeroDivisionError):
        lane.start("write", 5, lambda: 1 // 0).wait()
    lane.close()
    with pytest.raises(ConfigError, match="latency is -1"):
        Pace(latency=-1)
