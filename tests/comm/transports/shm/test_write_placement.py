"""Two places to write to in shared memory: the bytes are those of the sources in both, and the quicker is found out."""

import numpy as np
import pytest

from minidist.comm.transport import SHOWN_BYTES
from minidist.comm.transports.shm.write_placement import (
    COUNTED,
    FAR_BYTES,
    LONG_BYTES,
    NEAR_BYTES,
    ROUND,
    TRIAL,
    TURNS,
    Writer,
)

COUNTED_WAYS = TRIAL[COUNTED:]


class Clock:
    """Seconds that the writes of trials seem to take, near and far."""

    def __init__(self, near: float, far: float) -> None:
        self.costs, self.now, self.looks = (near, far), 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        if self.looks % 2 == 0:
            self.now += self.costs[COUNTED_WAYS[(self.looks // 2 - 1) % len(COUNTED_WAYS)]]
        return self.now


def memory() -> np.ndarray:
    return np.zeros(NEAR_BYTES + FAR_BYTES, np.uint8)


def write(writer: Writer, count: int, length: int = LONG_BYTES) -> list[int]:
    """Where so many writes went."""
    return [writer.write(turn % TURNS, [np.ones(length, np.uint8)])[0] for turn in range(count)]


@pytest.mark.parametrize("lengths", [[0], [1, 0, 63], [4096, 4097], [LONG_BYTES - 1], [LONG_BYTES],
                                     [3, 2 * LONG_BYTES + 5, 0, 4099, 64], [SHOWN_BYTES - 1, 1]])
def test_the_bytes_are_those_of_the_sources_and_those_written_before_stay(lengths: list[int]):
    rng, octets = np.random.default_rng(0), memory()
    writer, before = Writer(octets, Clock(2.0, 1.0)), np.empty(0, np.uint8)
    stop = start = 0
    for number in range(4 * len(TRIAL)):    # the trial, then as many that are far; long ones come round
        arrays = [rng.integers(0, 255, length, np.uint8) for length in lengths]
        last, (start, total) = slice(start, stop), writer.write(number % TURNS, arrays)
        stop = start + total
        assert total == sum(lengths) and stop <= len(octets)
        np.testing.assert_array_equal(octets[start:stop], np.concatenate(arrays))
        np.testing.assert_array_equal(octets[last], before)
        before = np.concatenate(arrays)
    assert writer.far == (sum(lengths) >= LONG_BYTES)


def test_other_dtypes_are_written_byte_for_byte():
    values, octets = np.array([np.nan, -0.0, 1e300] * LONG_BYTES)[:SHOWN_BYTES // 8], memory()
    writer = Writer(octets)
    for number in range(len(TRIAL)):
        start, total = writer.write(number % TURNS, [values[:5], values[5:]])
        assert octets[start:start + total].tobytes() == values.tobytes()


def test_near_is_the_same_memory_for_each_turn_and_far_goes_round():
    writer = Writer(memory(), Clock(near=2.0, far=1.0))
    assert write(writer, len(TRIAL))[:8] == [0, SHOWN_BYTES] * 4
    behind = NEAR_BYTES + 4 * LONG_BYTES        # the trial's far writes
    assert write(writer, 9, SHOWN_BYTES - 5) == [   # each begins on a cache line of its own
        *range(behind, behind + 7 * SHOWN_BYTES, SHOWN_BYTES), NEAR_BYTES, NEAR_BYTES + SHOWN_BYTES]


def test_who_goes_far_has_room_for_all_of_it_and_keeps_what_was_written():
    octets = memory()
    writer = Writer(octets, Clock(near=2.0, far=1.0))
    octets[NEAR_BYTES:] = 7     # stands for what nobody wrote to
    write(writer, len(TRIAL) - 1)
    assert writer.reached == 3 * LONG_BYTES
    write(writer, 1)
    assert writer.reached == FAR_BYTES
    assert (octets[NEAR_BYTES:NEAR_BYTES + 4 * LONG_BYTES] == 1).all()
    assert not octets[NEAR_BYTES + 4 * LONG_BYTES::4096].any()
    untried = Writer(memory(), Clock(near=1.0, far=2.0))
    write(untried, ROUND)
    assert untried.reached == 4 * LONG_BYTES


def test_far_has_to_be_clearly_quicker():
    for far, goes in ((0.9, False), (0.7, True)):
        writer = Writer(memory(), Clock(near=1.0, far=far))
        write(writer, len(TRIAL))
        assert writer.far == goes


def test_short_writes_are_near_and_not_timed():
    clock = Clock(near=2.0, far=1.0)
    writer = Writer(memory(), clock)
    write(writer, len(TRIAL))
    looks = clock.looks
    assert writer.far and write(writer, 4, LONG_BYTES - 1) == [0, SHOWN_BYTES] * 2 and clock.looks == looks


def test_the_quicker_way_is_taken_and_found_out_anew_in_every_round():
    clock = Clock(near=2.0, far=1.0)
    writer = Writer(memory(), clock)
    write(writer, len(TRIAL) - 1)
    assert not writer.far           # not yet known
    write(writer, 1)
    assert writer.far
    clock.costs = (1.0, 2.0)
    write(writer, ROUND - len(TRIAL))
    assert writer.far and clock.looks == 2 * len(COUNTED_WAYS)  # time is told in trials only
    write(writer, len(TRIAL))
    assert not writer.far
    write(writer, ROUND)
    assert not writer.far and clock.looks == 6 * len(COUNTED_WAYS)


def test_the_ways_are_compared_by_byte():
    writer = Writer(memory(), Clock(near=1.0, far=3.0))
    for number, far in enumerate(TRIAL):    # far takes three times as long for eight times as much
        writer.write(number % TURNS, [np.ones(LONG_BYTES * (8 if far else 1), np.uint8)])
    assert writer.far


def test_each_way_is_timed_as_often_at_odd_and_at_even_turns():
    for way in (False, True):
        turns = [number % TURNS for number in range(COUNTED, len(TRIAL)) if TRIAL[number] == way]
        assert len(turns) == 4 and turns.count(0) == turns.count(1)
