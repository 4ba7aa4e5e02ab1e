"""Rules about a rank for which the others wait, by its own activity: computing, reading, or other
threads in its process.

    cause                   a rank stands out in a step if                                  named from
    late reader             its wait for data, beyond the others', takes READS of the step  a fifth of a step
    uneven data             it has MORE times the others' targets, and more processor time  x 1.3
    slow compute            its own processor time, a target, is SLOW times the others'     x 1.5
                            in each step, and SLOW_USUALLY times in the middle one;
                            the others are in calls longer, by WAITED of its extra time
    hogs the interpreter    its other threads take as much as its own, the others' few      HOGS of a step

Each test must hold in a streak of steps (step_table.py). The other ranks wait for such a rank
inside their calls; it waits least itself.
"""

from collections.abc import Callable, Sequence

from minidist.observe.diagnose.fault import CERTAIN, LIKELY, Fault, span
from minidist.observe.diagnose.step_table import (
    STREAK,
    Line,
    Row,
    StepTable,
    Streak,
    beside,
    column,
    known,
)

READS = 0.2
MORE = 1.3
SLOW = 1.2
SLOW_USUALLY = 1.3
HOGS = 0.02
COSTS = 1.1  # times the others' processor time: uneven data with less costs nothing
WAITED = 0.5  # part of its extra time; below it no rank waits for it: its core is only slower
LEAST = 0.002  # seconds per step: smaller differences are ignored
PART = 0.002  # of a step: smaller differences are ignored
SURE = 10  # steps: a rank that stands out in as many is named as certain

_seconds, _cpu, _input, _calls, _other, _tokens = (
    column(name) for name in ("seconds", "cpu", "input", "calls", "others", "tokens")
)


def laggards(table: StepTable) -> list[Fault]:
    """Return the ranks that stand out, each with the first cause that fits; longest streaks
    first."""
    found: dict[int, tuple[int, Fault]] = {}
    for ranks in table.classes():
        for test, tell in (
            (_reads, _late_reader),
            (_has_more, _uneven_data),
            (_hogs, _hog),
            (_computes, _slow),
        ):
            for streak in table.streaks(test, ranks, processor=test is _computes):
                if (fault := tell(streak)) is not None:
                    found.setdefault(streak.rank, (len(streak.rows), fault))
    return [fault for _, fault in sorted(found.values(), key=lambda pair: -pair[0])] or _all_read(
        table
    )


def _reads(row: Row) -> list[int]:
    theirs = beside(row, _input)
    return [
        rank
        for rank, line in row.items()
        if _input(line) - 2 * theirs[rank] >= max(LEAST, READS * _seconds(line))
    ]


def _has_more(row: Row) -> list[int]:
    if not known(row, ["tokens"]):
        return []
    theirs = beside(row, _tokens)
    return [rank for rank, line in row.items() if _tokens(line) >= MORE * theirs[rank]]


def _computes(row: Row) -> list[int]:
    per = _per_token if known(row, ["tokens"]) else _cpu
    theirs = beside(row, per)
    whole = beside(row, _cpu)
    return [
        rank
        for rank, line in row.items()
        if per(line) >= SLOW * theirs[rank]
        and _cpu(line) - whole[rank] >= max(LEAST, PART * _seconds(line))
    ]


def _per_token(line: Line) -> float:
    return _cpu(line) / max(1.0, _tokens(line))


def _hogs(row: Row) -> list[int]:
    theirs = beside(row, _other)
    return [
        rank
        for rank, line in row.items()
        if _other(line) >= max(_cpu(line), HOGS * _seconds(line), 3 * theirs[rank] + LEAST)
    ]


def _sure(streak: Streak) -> str:
    return CERTAIN if len(streak.rows) >= SURE else LIKELY


def _steps(streak: Streak) -> str:
    (first, last) = streak.steps
    count = len(streak.rows)
    if count == last - first + 1:
        return f"in {count} steps in a row, from step {first} on"
    return f"in {count} of the {last - first + 1} steps from {first} to {last}"


def _compared(streak: Streak, value: Callable[[Line], float], what: str) -> str:
    return (
        f"{what}: {span(streak.median(value))} a step, the others' "
        f"{span(streak.median(value, of_others=True))}"
    )


def _waits_least(streak: Streak) -> str:
    return (
        f"it is in calls for {streak.median(_calls) / streak.median(_seconds):.0%} of a step, "
        f"the others for {streak.median(_calls, of_others=True) / streak.median(_seconds):.0%}: "
        "they wait for it"
    )


def _late_reader(streak: Streak) -> Fault:
    return Fault(
        "late reader",
        (streak.rank,),
        "",
        f"rank {streak.rank} waits for its data {_steps(streak)}",
        (_compared(streak, _input, "its wait for data"), _waits_least(streak)),
        _sure(streak),
        "look at its disk, at its share of the files and at its preprocessing; read ahead in a "
        "thread",
        streak.steps,
    )


def _uneven_data(streak: Streak) -> Fault | None:
    mine = streak.median(_tokens)
    theirs = streak.median(_tokens, of_others=True)
    if streak.median(_cpu) < COSTS * streak.median(_cpu, of_others=True):
        return None
    return Fault(
        "uneven data",
        (streak.rank,),
        "",
        f"rank {streak.rank} has {mine / max(1.0, theirs):.2f} times the others' targets "
        f"{_steps(streak)}",
        (
            f"its targets: {mine:,.0f} a step, the others' {theirs:,.0f}",
            _compared(streak, _cpu, "its processor time"),
            _waits_least(streak),
        ),
        _sure(streak),
        "divide the batch by targets, not by sequences or files; sort by length within a batch",
        streak.steps,
    )


def _slow(streak: Streak) -> Fault | None:
    times = streak.median(_cpu) / max(1e-9, streak.median(_cpu, of_others=True))
    more = streak.median(_cpu) - streak.median(_cpu, of_others=True)
    if (
        times < SLOW_USUALLY
        or streak.median(_calls, of_others=True) - streak.median(_calls) < WAITED * more
    ):
        return None
    return Fault(
        "slow compute",
        (streak.rank,),
        "",
        f"rank {streak.rank} computes {times:.2f} times as long as the others {_steps(streak)}",
        (_compared(streak, _cpu, "its own processor time"), _waits_least(streak)),
        _sure(streak),
        f"look at what rank {streak.rank} alone computes, at its core's clock and heat, and at "
        "its BLAS",
        streak.steps,
    )


def _hog(streak: Streak) -> Fault:
    lines = [row[streak.rank].get("busy") for row in streak.rows.values()]
    where = max(set(filter(None, lines)), key=lines.count, default="")
    return Fault(
        "hogs the interpreter",
        (streak.rank,),
        where,
        f"other threads of rank {streak.rank}'s process take its processor time {_steps(streak)}",
        (
            _compared(streak, _other, "processor time of its other threads"),
            _compared(streak, _seconds, "seconds"),
        ),
        _sure(streak),
        "move that thread's work to another process: threads of Python share one interpreter",
        streak.steps,
    )


def _all_read(table: StepTable) -> list[Fault]:
    """Return the finding that every rank waits for data, and none longer than the others."""
    ranks = list(table.ranks)

    def test(row: Row) -> Sequence[int]:
        late = all(_input(line) >= max(LEAST, 2 * READS * _seconds(line)) for line in row.values())
        return ranks if late else ()

    streaks = table.streaks(test, ranks, least=2 * STREAK, together=True)
    if len(streaks) < len(ranks) or not ranks:
        return []
    return [
        Fault(
            "late reader",
            tuple(ranks),
            "",
            "all ranks wait for their data " + _steps(streaks[0]),
            tuple(
                f"rank {s.rank}: {span(s.median(_input))} of a step of {span(s.median(_seconds))}"
                for s in streaks[:4]
            ),
            _sure(streaks[0]),
            "read ahead in a thread; look at the shared disk",
            streaks[0].steps,
        )
    ]
