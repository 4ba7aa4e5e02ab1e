"""Grades exercise 24: traces whose end is known by hand, then drawn ones; places, a ring, a
step."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isclose
from types import ModuleType

from minidist.errors import DeadlockError
from minidist.grading import Mistake, Result, expect
from minidist.nn import GPTConfig
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.replay import plain_replay
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.model_flops import flops_a_token
from minidist.simulate.placement import RankPlaces
from minidist.simulate.simulate import simulate
from minidist.simulate.walk import call_cost

MIB = 1 << 20
RING = GroupCall("dp", "all_reduce", "ring", MIB)
OTHER = RING._replace(axis="tp")
SEND, RECV = (
    GroupCall("pp", verb, "", MIB, peer=1 - rank) for rank, verb in enumerate(("send", "recv"))
)
BACK_SEND = SEND._replace(peer=0)  # from rank 1
BACK_RECV = RECV._replace(peer=1)  # on rank 0
CALL = 2.0  # seconds of each call
SMALL = GPTConfig(vocabulary=512, context=256, layers=2, width=256, heads=2, positions="rotary")

CUT_FROM = (plain_replay,)
ANSWERS = {
    5: "place * shape[axis] + coordinates[axis]",
    6: "2 * (size - 1) / size * nbytes * sharing / bandwidth",
    7: "tokens * flops_a_token / (seconds * devices * peak)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check one event after the other, then all together, then the formulas."""
    yield _at_once(exercise)
    yield _begins_together(exercise)
    yield _busy(exercise)
    yield _waits(exercise)
    yield from _begins(exercise)
    yield from _messages(exercise)
    yield _drawn(exercise)
    yield from _places(exercise)
    yield from _ring(exercise)
    yield _mfu(exercise)


def replayed(exercise: ModuleType, traces: Sequence[Sequence[Event]]) -> list[float]:
    """Return when each rank ends in the student's replay.

    Rank 1 takes twice as long for the same work.
    """
    return _ends(exercise.plain_replay, traces)


def _ends(replay: Callable[..., list[float]], traces: Sequence[Sequence[Event]]) -> list[float]:
    ranks = tuple(range(len(traces)))
    return replay(
        traces,
        lambda axis, rank: ranks,
        lambda rank, work: float(work) * (1 + (rank == 1)),
        lambda call, group: CALL,
    )


def _at_once(exercise: ModuleType) -> Result:
    """Check a message that comes before anything else."""
    return expect(
        "a message of 2 s, asked for at once",
        [0.0, 2.0],
        replayed(exercise, [[Start(1, SEND)], [Start(1, RECV), Await(1)]]),
        "a message that waits for the wrong rank",
        "a message begins when its sender has come, and the sender is the first of the pair: section "
        "1, step 2 (hole 1)",
        known={
            "your receiver does not wait": Mistake(
                [0.0, 0.0], "it continues at the end of the call: section 1, step 4 (hole 4)"
            )
        },
    )


def _begins_together(exercise: ModuleType) -> Result:
    """Check a collective that both ranks start at once."""
    trace: list[Event] = [Start(1, RING), Await(1)]
    return expect(
        "a call of 2 s that both ranks start at once",
        [2.0, 2.0],
        replayed(exercise, [trace, trace]),
        "a call that begins at another moment",
        "it begins when all have come: section 1, step 3 (hole 2); the ranks then continue at its "
        "end: step 4 (hole 4)",
    )


def _busy(exercise: ModuleType) -> Result:
    """Check work alone, without calls."""
    trace: list[Event] = [Busy(3, "forward"), Busy(1, "update")]
    return expect(
        "3 s and 1 s of work; rank 1 takes twice as long",
        [4.0, 8.0],
        replayed(exercise, [trace, trace]),
        "work of another length",
        "ask busy_seconds for this rank and this work: section 1, step 1 (hole 3)",
        known={
            "your code takes as long on every rank as on rank 0": [4.0, 4.0],
            "your code adds the clock once more": [7.0, 14.0],
            "your code exchanges rank and work": [0.0, 3.0],
        },
    )


def _waits(exercise: ModuleType) -> Result:
    """Check a call that ends before one rank waits for it, and after the other rank waits."""
    beside: list[list[Event]] = [
        [Start(1, RING), Busy(5, "backward"), Await(1)],
        [Start(1, RING), Await(1)],
    ]
    return expect(
        "a call of 2 s beside 5 s of work, and a call alone",
        [5.0, 2.0],
        replayed(exercise, beside),
        "a rank that continues at another moment",
        "a rank that comes late does not wait; one that comes early continues at the call's end: "
        "section 1, step 4 (hole 4)",
        known={
            "your code turns the clock of a late rank back": [2.0, 2.0],
            "your code adds the call's end to the rank's clock": [7.0, 2.0],
            "your code does not wait": [5.0, 0.0],
        },
    )


def _begins(exercise: ModuleType) -> Iterator[Result]:
    """Check that a call begins after the last rank has arrived and the call before has ended."""
    late: list[Event] = [Busy(1, "forward"), Start(1, RING), Await(1)]
    yield expect(
        "ranks come to a call after 1 s and after 2 s",
        [4.0, 4.0],
        replayed(exercise, [late, late]),
        "a call that does not wait for the last rank",
        "it begins when all have come: section 1 (hole 2)",
    )
    queue: list[Event] = [Start(1, RING), Start(2, RING), Await(2)]
    yield expect(
        "two calls of a group, started at once",
        [4.0, 4.0],
        replayed(exercise, [queue, queue]),
        "calls of one group at the same time",
        "a group's calls run one after another: section 1 (hole 2)",
    )
    three: list[Event] = [Start(1, RING), Start(2, RING), Start(3, RING), Await(3)]
    yield expect(
        "three calls of a group, started at once",
        [6.0, 6.0],
        replayed(exercise, [three, three]),
        "a call that does not wait for the call just before it",
        "a group's calls run one after another: section 1, step 3 (hole 2)",
    )
    spaced: list[Event] = [Start(1, RING), Await(1), Busy(1, "forward"), Start(2, RING), Await(2)]
    yield expect(
        "a call, then 1 s and 2 s of work, then another call",
        [6.0, 6.0],
        replayed(exercise, [spaced, spaced]),
        "a call that begins at another moment",
        "it begins when all have come and the call before has ended: the later of both: section 1, "
        "step 3 (hole 2)",
        known={
            "your code adds the end of the call before to the arrival": [8.0, 8.0],
            "your call begins when the first rank has come": [5.0, 5.0],
        },
    )
    both: list[Event] = [Start(1, RING), Start(2, OTHER), Await(1), Await(2)]
    yield expect(
        "calls of two groups, started at once",
        [2.0, 2.0],
        replayed(exercise, [both, both]),
        "a call that waits for another group's",
        "only the call before it in its own group holds it up: section 1 (hole 2)",
    )


def _messages(exercise: ModuleType) -> Iterator[Result]:
    """Check that a message begins when its sender arrives."""
    receives_first: list[list[Event]] = [
        [Start(1, BACK_RECV), Await(1)],
        [Busy(3, "forward"), Start(1, BACK_SEND)],
    ]
    for name, sender, receiver, right in (
        ("receiver", 0, 2, [0.0, 4.0]),
        ("sender", 3, 0, [3.0, 5.0]),
        ("sender is rank 1 and", 3, 0, [8.0, 6.0]),
    ):
        traces: list[list[Event]] = [
            [Busy(sender, "forward"), Start(1, SEND)],
            [Busy(receiver, "forward"), Start(1, RECV), Await(1)],
        ]
        if "rank 1" in name:
            traces = receives_first
        yield expect(
            f"a message whose {name} comes late",
            right,
            replayed(exercise, traces),
            "a message that waits for the wrong rank",
            "it begins when its sender comes, and its sender is the first of the pair: section "
            "1 (hole 1)",
        )


def _drawn(exercise: ModuleType) -> Result:
    """Check random traces of three ranks.

    The ranks make the same collectives in the same order, with different work between them.
    """
    chance = random.Random(24)
    traces: list[list[Event]] = [[], [], []]
    for number in range(12):
        for trace in traces:
            trace += [
                Busy(chance.randrange(4), "work"),
                Start(number, RING),
                Busy(chance.randrange(3), "work"),
            ]
            trace += [Await(number)] * chance.randrange(2)
    told = replayed(exercise, traces)
    try:
        replayed(exercise, [[Start(1, RING), Await(1)], []])
        told = []
    except DeadlockError:
        pass
    return expect(
        "three ranks, 12 calls, and a call that a rank never comes to",
        _ends(plain_replay, traces),
        told,
        "another order of events",
        "each event was right by itself in the tasks before; here they follow one another: section 1, "
        "steps 1 to 5",
    )


def _places(exercise: ModuleType) -> Iterator[Result]:
    """Check the place of every rank of a few plans."""
    cases = (
        ({"dp": 2, "tp": 4}, ("dp", "tp")),
        ({"dp": 2, "tp": 4}, ("tp", "dp")),
        ({"dp": 2, "pp": 3, "tp": 4}, ("pp", "tp", "dp")),
    )
    for shape, order in cases:
        right = RankPlaces(shape, order=order).places
        yield expect(
            f"{shape}, {order[-1]} innermost",
            right,
            [exercise.place_of(rank, shape, order) for rank in range(len(right))],
            "ranks on other devices",
            "as the digits of a number: the last axis counts ones: section 5 (hole 5)",
            known={
                wrong: [_place(rank, shape, order, further) for rank in range(len(right))]
                for wrong, further in MISPLACED.items()
            },
        )


def _place(
    rank: int, shape: dict[str, int], order: Sequence[str], further: Callable[[int, int, int], int]
) -> int:
    """Return where a rank lies if `further` takes the place one axis further in."""
    coordinates = dict[str, int]()
    for axis in reversed(list(shape)):
        rank, coordinates[axis] = divmod(rank, shape[axis])
    place = 0
    for axis in order:
        place = further(place, shape[axis], coordinates[axis])
    return place


MISPLACED: dict[str, Callable[[int, int, int], int]] = {
    "your code does not multiply the place of the axes further out": lambda place, size, own: (
        place + own
    ),
    "your code multiplies this axis, instead of those further out": lambda place, size, own: (
        place + size * own
    ),
    "your code counts ranks from 1, not from 0": lambda place, size, own: place * size + own + 1,
    "your code exchanges place and coordinate": lambda place, size, own: place * own + size,
}
"""{mistake: (place, size of the axis, coordinate) -> the place that is then found}."""


def _ring(exercise: ModuleType) -> Iterator[Result]:
    """Check a ring along the nodes, and a ring that goes to and fro between them.

    The walked messages are the answer key.
    """
    cluster = Cluster.parse("v100:2x8")
    for name, places, sharing in (
        ("node by node", range(16), 1),
        ("to and fro", [8 * (i % 2) + i // 2 for i in range(16)], 2),
    ):
        sent = call_cost(
            GroupCall("dp", "all_reduce", "ring", 64 * MIB), tuple(places), cluster
        ).link_bytes
        slowest = max(sent, key=lambda link: sent[link] / cluster.links[link].bandwidth)
        bandwidth = cluster.links[slowest].bandwidth
        right = sent[slowest] / bandwidth
        found = float(exercise.ring_seconds(16, 64 * MIB, bandwidth, sharing))
        n = 64 * MIB
        yield expect(
            f"64 MiB around 16 ranks, {name}",
            right,
            found,
            "not what the link carries",
            "a chunk is the P-th part, and what shares a link adds up: section 5 (hole 6)",
            known={
                "your code counts as if no other message shared the link": 2
                * 15
                / 16
                * n
                / bandwidth,
                "your code sends whole arrays": Mistake(
                    2 * 15 * n * sharing / bandwidth,
                    "in each step one chunk crosses the link, for each message that shares it: "
                    "section 5 (hole 6)",
                ),
                "your code goes round once; a ring all-reduce goes round twice": 15
                / 16
                * n
                * sharing
                / bandwidth,
                "your code makes a shared link faster, not slower": 2
                * 15
                / 16
                * n
                / (sharing * bandwidth),
                "your code counts P steps in each round, not P - 1": 2 * n * sharing / bandwidth,
            },
            same=partial(isclose, rel_tol=1e-6),
            show=_in_ms,
        )


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mfu(exercise: ModuleType) -> Result:
    """Check the MFU of a simulated step."""
    found = simulate(Plan(dp=2, precision="bf16"), SMALL, "h100:1x2", batch=4)
    tokens = found.tokens
    seconds = found.step_seconds
    flops = flops_a_token(SMALL)
    peak = found.cluster.device.peak("bfloat16")
    return expect(
        "the share of the peak that a step uses",
        found.mfu,
        float(exercise.mfu(tokens, seconds, flops, 2, peak)),
        "not the share of all devices' peak",
        "the model's FLOPs of the step, over what all devices could do in its time: section 2 (hole 7)",
        known={
            "your code compares with the peak of one device": 2 * found.mfu,
            "your code gives FLOPs a second, not yet a share of the peak": tokens * flops / seconds,
            "your code counts one token, not all": found.mfu / tokens,
            "your code does not divide by the seconds of the step": found.mfu * seconds,
            "your code counts the 6 FLOPs a weight twice: flops_a_token has them": 6 * found.mfu,
            "your fraction is upside down": 1 / found.mfu,
            "your code gives percent; a fraction is asked for": 100 * found.mfu,
        },
        same=partial(isclose, rel_tol=1e-9),
        show="{:.4g}".format,
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "24", *sys.argv[1:]]))
