"""Delayed links keep a transport's promises, and take the time they say: α a message that waits, β
a byte sent."""

import threading
import time

import conformance
import numpy as np
import pytest
from helpers import lateness, run

from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.transports.throttled import Delayed, delayed
from minidist.errors import ConfigError, PeerLostError

ALPHA = 0.02  # seconds: long beside what a busy machine adds


def slowly(world, checks):
    with delayed(world, alpha=1e-4, beta=1e-9) as slow:
        for check in checks:
            check(slow)
            slow.barrier()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("transport", ["threads-unbuffered", "tcp", "shm"])
def test_the_promises_of_a_transport(transport):
    """All but that of limits: those are the transport's below."""
    checks = [check for check in conformance.PEACEFUL if check is not conformance.limit_ends_a_wait]
    run(slowly, checks, size=3, transport=transport)


def seconds_of(world, algorithm, nbytes, alpha, beta):
    with delayed(world, alpha=alpha, beta=beta) as slow:
        x = np.ones(nbytes // 4, np.float32)
        slow.all_reduce(x, algorithm=algorithm)  # the first one makes threads and connections
        world.barrier()
        started = time.monotonic()
        total = slow.all_reduce(x, algorithm=algorithm)
        assert (total == world.size).all()
        return time.monotonic() - started


@pytest.mark.sampled
@pytest.mark.parametrize(
    "algorithm", ["tree", "ring", "direct", "pairwise", "doubling", "halving-doubling"]
)
@pytest.mark.parametrize(
    ("alpha", "beta"), [(ALPHA, 0.0), (0.0, 2 * ALPHA / (1 << 14))], ids=["waits", "bytes"]
)
def test_an_algorithm_takes_as_long_as_its_path_says(algorithm, alpha, beta):
    """critical_path.py against the clock: a call is never faster than its path, and at its best
    hardly slower."""
    nbytes = 1 << 14
    cost = LinkCost("threads", 4, alpha, 0.0, beta, 0.0, 0.0)
    path = PATHS["all_reduce", algorithm](4)
    predicted = cost.seconds(path.work(nbytes))
    for _ in range(5):  # a busy machine holds up one call or another, not each
        with lateness() as late:
            taken = max(run(seconds_of, algorithm, nbytes, alpha, beta, size=4))
        assert 0.98 * predicted <= taken
        # who sends, and who receives
        if taken < 1.5 * predicted + ALPHA + 2 * path.messages * max(late):
            return
    pytest.fail(f"{taken:.3f} s for {predicted:.3f} s, five times")


def test_a_started_call_runs_while_the_caller_computes():
    def body(world):
        with delayed(world, alpha=0.1, beta=0.0) as slow:
            pending = slow.start_all_reduce(np.ones(4), algorithm="direct")
            processor = time.process_time()
            started = time.monotonic()
            while time.monotonic() - started < 0.05:
                time.sleep(0.01)
            pending.wait()
            return time.process_time() - processor, time.monotonic() - started, pending.done()

    for processor, wall, done in run(body, size=2):
        assert done
        assert wall > 0.09
        assert processor < 0.08  # of all threads of both ranks: nobody spins for 0.1 s


def test_both_groups_may_be_used_at_once():
    def body(world):
        with delayed(world, alpha=0.05, beta=0.0) as slow:
            pending = slow.start_all_reduce(np.full(3, 1.0))
            quick = world.all_reduce(np.full(3, 10.0))
            return quick.tolist(), pending.wait().tolist()

    assert run(body, size=2) == [([20.0] * 3, [2.0] * 3)] * 2


def test_the_ports_thread_ends_and_the_transport_below_lives_on():
    def body(world):
        with delayed(world, alpha=0.0, beta=0.0) as slow:
            slow.barrier()
        names = [thread.name for thread in threading.enumerate()]
        return f"rank {world.rank} port" in names, world.all_reduce(1).item()

    assert run(body, size=2) == [(False, 2)] * 2


def test_an_abort_ends_a_message_that_is_held():
    """The transport below aborts, as a job's control connection does when a rank is lost."""

    def body(world):
        with delayed(world, alpha=10.0, beta=0.0) as slow:
            started = time.monotonic()
            pending = slow.start_send(np.ones(3), dst=1 - world.rank)
            world.transport.abort(PeerLostError("rank 7 is gone", 7))
            with pytest.raises(PeerLostError, match="rank 7 is gone"):
                pending.wait()
            return time.monotonic() - started

    assert max(run(body, size=2)) < 5


def test_a_message_that_is_held_is_no_deadlock():
    """Both ranks wait longer than it takes to call a wait hopeless, for messages that no transport
    has seen yet."""

    def body(world):
        with delayed(world, alpha=0.8, beta=0.0) as slow:
            return slow.exchange(np.full(2, world.rank), dst=1 - world.rank, src=1 - world.rank)[0]

    assert run(body, size=2) == [1, 0]


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1.0, "beta": 0.0}, {"alpha": 0.0, "beta": float("nan")}]
)
def test_a_delay_is_a_number_of_seconds(wrong):
    with pytest.raises(ConfigError, match="choose a number of seconds from 0 up"):
        Delayed(None, **wrong)
