"""One message a step of each link: both ends keep the same one, with when it left and when it
came."""

import time

import numpy as np
import pytest
from helpers import run

import minidist as md
from minidist.comm.flight.message_times import MOST, SHORT, MessageTimes
from minidist.comm.handle import Handle
from minidist.comm.observers import ObservedTransfer


class Done(Handle):
    """A receive whose message is, or is not, there before the wait."""

    def __init__(self, was_there):
        self.was_there = was_there

    def wait(self):
        self.was_there = True

    def done(self):
        return self.was_there


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["threads", "tcp", "auto"])
@pytest.mark.parametrize("size", [2, 3])
def test_both_ends_keep_the_same_message(transport, size):
    def job(world):
        world.ledger.times = MessageTimes(world.rank, world.size)
        steps = []
        for _ in range(4):
            for numbers in (7, 900, 3):
                world.all_reduce(np.ones(numbers), algorithm="ring")
            world.all_gather(np.ones(5), algorithm="ring")
            steps.append(world.ledger.times.take())
        world.ledger.times = None
        return steps

    steps = md.run(job, size=size, transport=transport)
    for step in range(4):
        sent = {(rank, *row[:4]) for rank in range(size) for row in steps[rank][step]["out"]}
        came = {
            (row[0], rank, *row[1:4]) for rank in range(size) for row in steps[rank][step]["in"]
        }
        assert {(src, dst, *rest) for src, dst, *rest in sent} >= came
        assert {
            row[3] for row in (r for rank in range(size) for r in steps[rank][step]["out"])
        } <= ({8 * 900 // size, 8 * 450} if step % 2 == 0 else {8, 16, 8 * 1})
    assert any(steps[rank][step]["in"] for rank in range(size) for step in range(4))
    for rank in range(size):
        for row in (row for step in steps[rank] for row in step["in"]):
            assert 0 < row[4] <= row[5] < 1e6 * time.perf_counter()


def test_a_header_that_only_compares_calls_is_counted_at_neither_end():
    """A tree's reduce begins with one."""

    def job(world):
        world.ledger.times = times = MessageTimes(world.rank, world.size)
        for numbers in (3, 4):
            world.reduce(np.ones(numbers), algorithm="tree")
        return times.take()

    root, other = run(job, size=2)
    assert [row[1:4] for row in root["in"]] == [row[1:4] for row in other["out"]]


def test_an_arrival_is_known_by_the_wait_or_by_the_header_of_a_short_message():
    times = MessageTimes(0, 4)
    sizes = {1: SHORT + 1, 2: SHORT, 3: SHORT + 1}
    waited, short, long = (times.posted(9, peer, nbytes) for peer, nbytes in sizes.items())
    ObservedTransfer(Done(False), [waited]).wait()
    short.accepted(SHORT)
    for arrival in (short, long):
        ObservedTransfer(Done(True), [arrival]).wait()
    assert [row[0] for row in times.take()["in"]] == [1, 2]


def test_the_largest_of_even_steps_and_the_smallest_of_odd_ones():
    times = MessageTimes(0, 2)
    for _ in range(2):
        for nbytes in (30, 10, 40, 40, 0):
            times.sent(9, 1, nbytes)
        (row,) = times.take()["out"]
        assert row[:4] in ([1, 9, 3, 40], [1, 9, 7, 10])


def test_of_many_ranks_each_step_tells_of_some_links_and_all_have_their_turn():
    size = 5 * MOST
    senders = [MessageTimes(rank, size) for rank in range(size)]
    told = set()
    for _ in range(5):
        for rank, times in enumerate(senders[:3]):
            for peer in range(size):
                times.sent(1, peer, 8)
            rows = times.take()["out"]
            assert len(rows) <= MOST and rank not in [row[0] for row in rows]
            told |= {(rank, row[0]) for row in rows}
    assert len(told) == 3 * (size - 1)
