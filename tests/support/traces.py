"""Hand-made traces of training steps, and a flat cluster to replay them on."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from minidist.observe.events import Await, Busy, Event, GroupCall, Memory, Start
from minidist.parallel.pipeline.instructions import (
    COMPUTES,
    SENDS,
    Instruction,
    Schedule,
    received_as,
    sent_as,
)


class Job(NamedTuple):
    """What `replay` takes of a job: a trace a role, roles, and who is in whose group."""

    traces: list[list[Event]]
    role_of: list[int]
    members: Callable[[str, int], tuple[int, ...]]

    @property
    def each(self) -> list[list[Event]]:
        """A trace for each rank."""
        return [self.traces[role] for role in self.role_of]


class Ids:
    """Numbers the calls of one trace."""

    def __init__(self) -> None:
        self.last = -1

    def start(self, call: GroupCall) -> Start:
        """The call begins in the background."""
        self.last += 1
        return Start(self.last, call)

    def blocking(self, call: GroupCall) -> list[Event]:
        """The call, and the wait for it."""
        return [self.start(call), Await(self.last)]


def instructions_trace(
    schedule: Schedule, rank: int, *, layers: int = 0, nbytes: int = 1 << 20
) -> Iterator[Event]:
    """A pipeline rank's instructions as events; with `layers` each compute is so many pieces with a
    call along tp."""
    ids = Ids()
    for one in schedule.lists[rank]:
        if isinstance(one, COMPUTES):
            for _ in range(layers or 1):
                yield Busy(_work(one), one.word, one.microbatch)
                yield Memory("activations", 8)
                if layers:
                    yield from ids.blocking(GroupCall("tp", "all_reduce", "ring", nbytes))
        elif isinstance(one, SENDS):
            yield ids.start(
                GroupCall(
                    "pp", "send", "direct", nbytes, peer=schedule.rank_of(received_as(one).stage)
                )
            )
        else:
            call = GroupCall(
                "pp", "recv", "direct", nbytes, peer=schedule.rank_of(sent_as(one).stage)
            )
            yield from ids.blocking(call)
    if layers:
        first = ids.start(GroupCall("dp", "reduce_scatter", "ring", 50 * nbytes, name="bucket 0"))
        yield from [
            first,
            *ids.blocking(GroupCall("dp", "reduce_scatter", "ring", 20 * nbytes, name="bucket 1")),
        ]
        yield from [
            Await(first.id),
            Busy("update", "update"),
            *ids.blocking(GroupCall("dp", "all_gather", "ring", 70 * nbytes)),
            *ids.blocking(GroupCall("world", "all_reduce", "tree", 8)),
        ]


def _work(one: Instruction) -> Any:
    return type(one).__name__


def grid(
    schedule: Schedule, *, dp: int = 1, tp: int = 1, layers: int = 0, alike: bool = False
) -> Job:
    """A job dp × pp × tp, tp innermost; a role for each stage and tensor rank, or if these are
    alike for each stage."""
    pp = schedule.ranks
    each = 1 if alike else tp
    traces = [
        list(instructions_trace(schedule, stage, layers=layers))
        for stage in range(pp)
        for _ in range(each)
    ]

    def members(axis: str, rank: int) -> tuple[int, ...]:
        data = rank // (pp * tp)
        stage = rank // tp % pp
        tensor = rank % tp
        return {
            "tp": tuple((data * pp + stage) * tp + one for one in range(tp)),
            "pp": tuple((data * pp + one) * tp + tensor for one in range(pp)),
            "dp": tuple((one * pp + stage) * tp + tensor for one in range(dp)),
            "world": tuple(range(dp * pp * tp)),
        }[axis]

    return Job(traces, [rank % (pp * tp) * each // tp for rank in range(dp * pp * tp)], members)


def node_cost(
    call: GroupCall, group: tuple[int, ...], *, node: int = 4, slow: tuple[Any, ...] = ()
) -> Any:
    """Seconds and loads of a ring over nodes of `node` ranks with one network link each way; `slow`
    takes 3 times."""
    loads: dict[Any, float] = {}
    for one, other in zip(group, group[1:] + group[:1], strict=True):
        ways = (
            [("out", one // node), ("in", other // node)]
            if one // node != other // node
            else [("up", one), ("down", other)]
        )
        for way in ways:
            loads[way] = min(1.0, loads.get(way, 0.0) + 0.6)
    rate = 4e10 if ("out", group[0] // node) in loads else 4e11
    return (1e-5 + call.nbytes / rate) * (3 if slow in loads else 1), loads
