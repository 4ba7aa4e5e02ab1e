"""Two ways to write to shared memory: the bytes are those of the sources in both, and the quicker way is found out."""

import numpy as np
import pytest

from minidist.comm.transports.claim import LONG_BYTES, ROUND, TRIAL, Writer


class Clock:
    """Seconds that writes seem to take: those that find their target claimed, and those that do not."""

    def __init__(self, plain: float, claimed: float) -> None:
        self.costs, self.now, self.looks = (plain, claimed), 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        if self.looks % 2 == 0:
            self.now += self.costs[TRIAL[(self.looks // 2 - 1) % len(TRIAL)]]
        return self.now


def sources(rng: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    return [rng.integers(1, 255, length, np.uint8) for length in lengths]


@pytest.mark.parametrize("lengths", [[0], [1, 0, 63], [4096, 4097], [LONG_BYTES - 1], [LONG_BYTES],
                                     [3, 2 * LONG_BYTES + 5, 0, 4099, 64]])
def test_the_bytes_are_those_of_the_sources_in_every_round_and_nothing_behind_them_changes(lengths: list[int]):
    rng, writer = np.random.default_rng(0), Writer(Clock(2.0, 1.0))
    for _ in range(2 * len(TRIAL)):     # the trial, then as many that claim
        arrays, target = sources(rng, lengths), np.full(sum(lengths) + 100, 255, np.uint8)
        assert writer.write(target[7:], arrays) == sum(lengths)
        np.testing.assert_array_equal(target[7:7 + sum(lengths)], np.concatenate(arrays))
        assert (target[:7] == 255).all() and (target[7 + sum(lengths):] == 255).all()
    assert writer.claims == (sum(lengths) >= LONG_BYTES)


def test_other_dtypes_are_written_byte_for_byte():
    values, target = np.array([np.nan, -0.0, 1e300] * LONG_BYTES), np.zeros(24 * LONG_BYTES, np.uint8)
    writer = Writer()
    for _ in range(len(TRIAL)):
        target[:] = 0
        writer.write(target, [values[:5], values[5:]])
        assert target.tobytes() == values.tobytes()


def test_the_quicker_way_is_taken_and_found_out_anew_in_every_round():
    clock = Clock(plain=2.0, claimed=1.0)
    writer, target, array = Writer(clock), np.empty(LONG_BYTES, np.uint8), np.ones(LONG_BYTES, np.uint8)

    def write(count: int) -> None:
        for _ in range(count):
            writer.write(target, [array])

    write(len(TRIAL) - 1)
    assert not writer.claims        # not yet known
    write(1)
    assert writer.claims
    clock.costs = (1.0, 2.0)
    write(ROUND - len(TRIAL))
    assert writer.claims and clock.looks == 2 * len(TRIAL)  # time is told in trials only
    write(len(TRIAL))
    assert not writer.claims
    write(ROUND)
    assert not writer.claims and clock.looks == 6 * len(TRIAL)


def test_the_ways_are_compared_by_byte_and_short_writes_do_not_count():
    clock = Clock(plain=1.0, claimed=3.0)
    writer, target = Writer(clock), np.empty(8 * LONG_BYTES, np.uint8)
    for claims in TRIAL:    # claiming takes three times as long for eight times as much
        writer.write(target, [np.ones(LONG_BYTES - 1, np.uint8)])
        writer.write(target, [np.ones(LONG_BYTES * (8 if claims else 1), np.uint8)])
    assert writer.claims and clock.looks == 2 * len(TRIAL)


def test_each_way_is_tried_as_often_at_odd_and_at_even_turns():
    for turn in (0, 1):
        assert sum(TRIAL[turn::2]) == len(TRIAL) // 4
