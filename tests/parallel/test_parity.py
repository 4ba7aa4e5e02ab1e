"""Parallel equals serial: every strategy on several numbers of ranks, over every transport.

A row of `tests/support/parity.py` says what a strategy trains. What more a chapter demands of the
same training (bytes, memory, who holds what), and its planted bugs, are in the chapter's tests.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import parity
import pytest
from parity import (
    CONTEXT_SEQUENCE,
    EIGHT_RANKS,
    EIGHT_RANKS_OF_EXPERTS,
    PIPELINE_TENSOR,
    PLANS,
    THREE_REPLICAS,
    UNEVEN_PLANS,
    check_parity,
    text_of,
)
from plans import SCHEDULES
from planted import Bug, check_caught

from minidist.parallel.hybrid.plan import Plan

THREADS = ("threads",)
PROCESSES = ("tcp", "shm", "mpi")
ALL = ("threads", "threads-unbuffered", *PROCESSES)


def cases(
    strategy: str, sizes: Iterable[int], transports: Iterable[str] = THREADS, *, soak: bool = False
) -> list[Any]:
    """Return a case for each size over each transport."""
    marks = [pytest.mark.soak] if soak else []
    return [
        pytest.param(strategy, size, transport, marks=marks)
        for size in sizes
        for transport in transports
    ]


def plan_cases(
    plan: dict[str, Any], transports: Iterable[str] = THREADS, *, soak: bool = False
) -> list[Any]:
    """Return a case of a plan over each transport."""
    return cases(text_of(plan), [Plan(**plan).size], transports, soak=soak)


STAGES = (1, 2, 3)

SHORT_CASES = [
    *cases("DDP", [2, 3, 4]),
    *cases("DDP", [3], ["shm", "tcp", "threads-unbuffered"]),
    *(case for stage in STAGES for case in cases(f"ZeRO-{stage}", [5, 1, 2])),
    *(case for stage in STAGES for case in cases(f"ZeRO-{stage}", [3], ["tcp"], soak=True)),
    *cases("DDP, 3 passes", [1]),
    *cases("DDP, 2 passes", [3]),
    *cases("DDP, 2 passes", [3], ["tcp"], soak=True),
    *cases("ZeRO-1, 4 passes", [2]),
    *cases("ZeRO-2, 2 passes", [3]),
    *cases("ZeRO-3, 3 passes", [2]),
    *cases("tensor", [2, 3, 4, 5]),
    *cases("tensor, key heads shared", [3], ["tcp"], soak=True),
    *cases("sequence, key heads shared", [3], ["tcp"], soak=True),
    *cases("ring, key heads shared", [3], ["tcp"], soak=True),
    *cases("experts", [3], ["tcp"], soak=True),
    *cases("interleaved", [2], ["tcp", "threads-unbuffered", "shm"]),
    *cases("model parallel", [3], ["threads-unbuffered", "tcp"]),
    *cases("model parallel", [3], ["shm", "mpi"], soak=True),
    # every third plan; the soak takes all
    *(case for number, plan in enumerate(PLANS) for case in plan_cases(plan, soak=number % 3 > 0)),
    *(
        case
        for plan in UNEVEN_PLANS
        for case in cases(f"{text_of(plan)}, uneven", [Plan(**plan).size], soak=True)
    ),
    *plan_cases(THREE_REPLICAS, soak=True),
    # tests/parallel/test_over_mpi.py has the first two, too
    *plan_cases(PIPELINE_TENSOR, ["tcp"], soak=True),
    *plan_cases(CONTEXT_SEQUENCE, ["mpi"], soak=True),
]


@pytest.mark.parametrize(("strategy", "size", "transport"), SHORT_CASES)
def test_equals_one_process(strategy: str, size: int, transport: str) -> None:
    check_parity(strategy, size, transport)


LONG_CASES = [
    *cases("DDP", [1, 2, 3, 4, 5], ALL),
    *(case for stage in STAGES for case in cases(f"ZeRO-{stage}", [1, 2, 3, 4, 5], ALL)),
    *cases("DDP and ZeRO, 3 passes", [1, 2, 3, 4, 5], ALL),
    *(
        case
        for stage in STAGES
        for case in cases(f"ZeRO-{stage}, copies", [4], ["threads-unbuffered", "tcp", "shm"])
    ),
    *(
        case
        for stage in STAGES
        for case in cases(f"ZeRO-{stage}, all options", [4], ["threads-unbuffered", *PROCESSES])
    ),
    *cases("ZeRO-3, units freed", [3], ["mpi"]),
    *cases("ZeRO-3, units kept", [3], ["mpi"]),
    *(
        case
        for strategy in ("tensor", "sequence", "ring", "all-to-all")
        for case in cases(strategy, [2, 3, 4, 5], ALL)
    ),
    *cases("experts", [1, 2, 3, 4], ALL),
    *(case for schedule in SCHEDULES for case in cases(schedule, [2, 3, 4, 5], ALL)),
    *cases("model parallel", [4], ["threads", "tcp", "shm"]),
    *plan_cases(EIGHT_RANKS, ["threads-unbuffered", *PROCESSES]),
    *plan_cases(EIGHT_RANKS_OF_EXPERTS, ["threads-unbuffered", *PROCESSES]),
]


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "size", "transport"), LONG_CASES)
def test_equals_one_process_after_twenty_steps(strategy: str, size: int, transport: str) -> None:
    check_parity(strategy, size, transport, long=True)


# ----------------------------------------------------------------------- the check sees differences


def changed(change: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """Return a wrong training, whose ranks' results go through `change`; one process is right."""

    def wrong(right: Any, world: Any, strategy: str, long: bool, alone: bool) -> Any:
        found = right(world, strategy, long, alone)
        if not alone:
            change(world, found[-1])
        return found

    return wrong


def last_bit(world: Any, found: dict[str, Any]) -> None:
    if world.rank == 1:
        weight = found["weights"]["norm.weight"]
        weight[0] = np.nextafter(weight[0], 2.0)


def all_weights(world: Any, found: dict[str, Any]) -> None:
    found["weights"]["norm.weight"] += 1e-9


def one_nan(world: Any, found: dict[str, Any]) -> None:
    found["weights"]["norm.weight"][0] = np.nan


def last_loss(world: Any, found: dict[str, Any]) -> None:
    found["losses"][-1] *= 1 + 1e-11


def loss_of_one_rank(world: Any, found: dict[str, Any]) -> None:
    if world.rank == 1:
        found["losses"][0] = np.nextafter(found["losses"][0], 9.0)


def one_load(world: Any, found: dict[str, Any]) -> None:
    found["loads"][0, 0, 0] += 1


BUGS = [
    Bug(
        change.__name__.replace("_", " "),
        parity,
        "train",
        changed(change),
        {"strategy": strategy},
        also=((parity, "over_threads", lambda right, *job: right.__wrapped__(*job)),),
    )
    for change, strategy in (
        (last_bit, "DDP"),
        (all_weights, "DDP"),
        (one_nan, "DDP"),
        (last_loss, "DDP"),
        (loss_of_one_rank, "DDP"),
        (one_load, "experts"),
    )
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_difference_is_seen(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_parity, size=2, transport="threads"), monkeypatch)
