"""The records of all ranks' steps (observe/rank_steps.py) as one table, and streaks of steps in
which a rank stands out.

A streak is a sequence of steps; the rank stands out in most of them. Its length is the number of
steps in which the rank stands out minus the number of other steps; it ends where this is largest.
So one step of noise does not end a streak.

A rank is named only for a streak of length STREAK that lasts LONG seconds: one bad step, or a few
short ones, are more often caused by other work of the machine. If other ranks stand out sometimes
too, the streak must be so long that chance gives it in only RARELY of all runs, and LONGER times
the streaks of other ranks at other times. Processor time is weaker evidence if ranks share their
cores with other programs, because a rank may be on the slower core for a while; sharing is visible
as time in which a rank neither computes, reads nor calls. Then the streak needs BUSY_STREAK steps,
and BUSY_PART of all steps.
"""

import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.observe.rank_steps import RankSteps

# steps; seconds
STREAK = 5
LONG = 0.25
RARELY = 1e-4
# steps; part of all steps
BUSY_STREAK = 12
BUSY_PART = 0.25
BUSY = 0.1  # share of a step without a core: above it the ranks share their cores
LONGER = 2.0

Line = dict[str, Any]
Row = Mapping[int, Line]  # {rank: its line} of one step
Test = Callable[[Row], Collection[int]]
"""test(row) -> the ranks that stand out in this step"""


@dataclass(frozen=True)
class Streak:
    """Steps in which a rank stands out: `rows` by step, and the streak's `length` (see the
    module)."""

    rank: int
    rows: dict[int, Row]
    length: int

    @property
    def first(self) -> int:
        return next(iter(self.rows))

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        return self.first, next(reversed(self.rows))

    def median(self, value: Callable[[Line], float], *, of_others: bool = False) -> float:
        """Return the median over the steps of the rank's value, or of the other ranks' median."""
        return statistics.median(
            others(row, self.rank, value) if of_others else value(row[self.rank])
            for row in self.rows.values()
        )


class StepTable:
    """The recorded steps of all ranks, without the first recorded step (warm-up)."""

    def __init__(self, ranks: Mapping[int, RankSteps]) -> None:
        self.ranks = dict(ranks)
        self.first = min(
            (each.steps[0]["step"] for each in ranks.values() if each.steps), default=0
        )
        rows: defaultdict[int, dict[int, Line]] = defaultdict(dict)
        for rank, each in ranks.items():
            for line in each.steps:
                if line["step"] > self.first:
                    rows[line["step"]][rank] = line
        self.rows: dict[int, dict[int, Line]] = {step: rows[step] for step in sorted(rows)}

    def classes(self) -> list[list[int]]:
        """Return lists of two or more ranks that do the same kind of work."""
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for rank, each in self.ranks.items():
            alike[each.alike].append(rank)
        return [ranks for ranks in alike.values() if len(ranks) > 1]

    def streaks(
        self,
        test: Test,
        ranks: Collection[int],
        *,
        least: int = STREAK,
        long: float = LONG,
        together: bool = False,
        processor: bool = False,
    ) -> list[Streak]:
        """Return the longest streak of each rank of `ranks` that stands out, if it is long enough;
        over rows in which all of `ranks` have a line.

        Args:    together: all ranks stand out together, so they are not compared with each other.
                 processor: they stand out by their processor time.
        """
        rows = {
            step: {rank: row[rank] for rank in ranks}
            for step, row in self.rows.items()
            if set(ranks) <= set(row)
        }
        out = {step: set(test(row)) for step, row in rows.items()}
        times = Counter(rank for step in out for rank in out[step])
        longest = [_longest(rank, rows, out) for rank in sorted(times)]
        enough = (
            max(least, BUSY_STREAK, BUSY_PART * len(rows))
            if processor and self.shared(ranks)
            else least
        )
        return [
            streak
            for streak in longest
            if streak.length >= enough
            and sum(row[streak.rank]["seconds"] for row in streak.rows.values()) >= long
            and (
                together
                or streak.length
                >= max(
                    _by_chance(streak.rank, times, len(rows), len(ranks)),
                    _at_others(streak, longest),
                )
            )
        ]

    def shared(self, ranks: Collection[int]) -> bool:
        """Return whether the ranks share their cores: for more than BUSY of the median step they
        neither compute, read nor call."""
        parts = [
            1
            - (column("cpu")(line) + column("input")(line) + column("calls")(line))
            / max(1e-9, line["seconds"])
            for row in self.rows.values()
            for rank, line in row.items()
            if rank in ranks
        ]
        return bool(parts) and statistics.median(parts) > BUSY


def _by_chance(rank: int, times: Mapping[int, int], steps: int, ranks: int) -> float:
    """Return the streak length that occurs by chance in RARELY of runs, if every rank stands out as
    often as the other ranks do.

    The length is a random walk that goes up in a share u of all steps, and down in the rest: from
    one of its lowest points it reaches n with probability (u / (1 - u))^n.
    """
    usual = sum(count for other, count in times.items() if other != rank) / max(
        1, steps * (ranks - 1)
    )
    if not 0 < usual < 0.5:
        return math.inf if usual else 0.0
    return math.log(RARELY / (steps * ranks)) / math.log(usual / (1 - usual))


def _longest(rank: int, rows: Mapping[int, Row], out: Mapping[int, Collection[int]]) -> Streak:
    """Return the rank's longest streak: the sequence with the most steps in which it stands out,
    minus the steps in which it does not."""
    # steps in which it stands out, of the streak that may still grow
    since = list[int]()
    length = 0
    best = since
    steps = 0
    most = 0
    for step in rows:
        if rank in out[step]:
            since.append(step)
        length += 1 if rank in out[step] else -1
        if length <= 0:
            since = []
            length = 0
        elif length > most:
            best = since
            steps = len(since)
            most = length
    return Streak(rank, {step: rows[step] for step in best[:steps]}, most)


def _at_others(streak: Streak, longest: Sequence[Streak]) -> float:
    """Return LONGER times the longest streak of another rank at other steps: if ranks stand out in
    turn, no rank is the cause."""
    return LONGER * max(
        (other.length for other in longest if not streak.rows.keys() & other.rows.keys()), default=0
    )


def others(row: Row, rank: int, value: Callable[[Line], float]) -> float:
    """Return the median of the other ranks' value."""
    return statistics.median([value(line) for other, line in row.items() if other != rank])


def beside(row: Row, value: Callable[[Line], float]) -> dict[int, float]:
    """Return {rank: median of the other ranks' value}, for two or more ranks.

    Cost:    one sort for all ranks.
    """
    mine = {rank: value(line) for rank, line in row.items()}
    ordered = sorted(mine.values())
    count = len(row) - 1

    def without(place: int, at: int) -> float:
        """Return the value at a place of the sorted values without the one at `at`."""
        return ordered[place + (place >= at)]

    places = {rank: bisect_left(ordered, own) for rank, own in mine.items()}
    return {
        rank: (without((count - 1) // 2, at) + without(count // 2, at)) / 2
        for rank, at in places.items()
    }


def column(name: str) -> Callable[[Line], float]:
    """Return a function that gives a line's value of this name; 0.0 if it is not known."""
    return lambda line: float(line.get(name) or 0.0)


def known(row: Row, names: Sequence[str]) -> bool:
    """Return whether every rank has these values."""
    return all(line.get(name) is not None for line in row.values() for name in names)
