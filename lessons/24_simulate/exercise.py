"""Exercise 24: traces on one clock; where ranks lie, what a ring takes there, and the used share of
the peak.

Copy this file (`minidist lesson 24 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 24 DIR/exercise_24.py`. A trace is a list of what one rank does, in order:

    Busy(work, name)       the rank computes; busy_seconds(rank, work) says how long
    Start(id, call)        the rank starts a call (call.axis, call.verb, …) and continues
    Await(id)              the rank waits until that call has ended
"""

from collections import Counter, defaultdict
from typing import Any

from minidist.errors import DeadlockError
from minidist.grading import hole
from minidist.observe.events import Await, Busy, Start


def plain_replay(traces, members, busy_seconds, call_seconds):
    """Return when each rank ends, in seconds, if links are never shared. No moves.

    Args:    traces: one a rank. members: (axis, rank) -> ranks of its group.
    Raises:  DeadlockError if ranks wait for calls that never begin.
    """
    came = defaultdict(dict)  # (group or pair, number) -> {rank: when it arrived}
    ended = {}  # (group or pair, number) -> when the call ended

    def start(rank, call, now, count):
        """Start a call; the last rank to start it computes its end. Return its key."""
        comers = group = tuple(members(call.axis, rank))
        if call.verb in ("send", "recv"):
            group = (rank, group[call.peer]) if call.verb == "send" else (group[call.peer], rank)
            comers = hole(
                1,
                "a message does not wait for its receiver: which ranks of the pair must arrive "
                "before it begins?",
                group,
            )
            call = call._replace(peer=1)  # the receiver's number in (sender, receiver)
        way = call.axis, group, call.verb in ("send", "recv")
        count[way] += 1
        if rank in comers:
            came[way, count[way]][rank] = now
            if len(came[way, count[way]]) == len(comers):
                begin = hole(
                    2,
                    "all ranks have arrived; when does the call begin? The previous call of its "
                    "group may still run, or there was none",
                    ended,
                    came[way, count[way]],
                )
                ended[way, count[way]] = begin + call_seconds(call, group)
        return way, count[way]

    def play(rank):
        now = 0.0
        count = Counter[Any]()
        started = dict[int, Any]()
        for event in traces[rank]:
            if isinstance(event, Busy):
                now += hole(3, "how long does this rank compute?", event.work)
            elif isinstance(event, Start):
                started[event.id] = start(rank, event.call, now, count)
            elif isinstance(event, Await):
                while started[event.id] not in ended:
                    yield
                now = hole(
                    4,
                    "the call has ended; when does the rank continue?",
                    now,
                    ended[started[event.id]],
                )
        ends[rank] = now

    ends = dict[int, float]()
    playing = [play(rank) for rank in range(len(traces))]
    before = (-1, -1)
    while len(ends) < len(traces):
        if before == (before := (len(ended), len(ends))):
            raise DeadlockError(
                f"ranks {[rank for rank in range(len(traces)) if rank not in ends]} wait for ever"
            )
        for one in playing:
            next(one, None)
    return [ends[rank] for rank in range(len(traces))]


def place_of(rank, shape, order):
    """Return the device on which a rank lies.

    Args:    shape: {axis: size}. Ranks are counted along its axes, the last one innermost.
             order: the same axes. Devices are counted along them, the last one innermost: it lies
             inside nodes.
    """
    coordinates = {}
    place = 0
    for axis in reversed(list(shape)):
        coordinates[axis] = rank % shape[axis]
        rank = rank // shape[axis]
    for axis in order:
        place = hole(5, "one axis further in (section 5)", place, shape[axis], coordinates[axis])
    return place


def ring_seconds(size, nbytes, bandwidth, sharing):
    """Return the seconds in which the busiest link of a ring all-reduce carries bytes.

    Args:    bandwidth: of that link, bytes per second. sharing: how many of the ring's messages cross
             it in each step.
    """
    return hole(6, "2(P-1) steps; what crosses the link in each? (section 5)", size, nbytes)


def mfu(tokens, seconds, flops_a_token, devices, peak):
    """Return the Model FLOPs Utilization of a step: the model's FLOPs over what all devices could
    do in that time.

    Args:    tokens, seconds: of a step. peak: FLOP/s of a device.
    """
    return hole(7, "a fraction between 0 and 1 (section 2)", tokens, seconds)
