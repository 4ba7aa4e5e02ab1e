"""The records of all ranks' steps (observe/rank_steps.py) as one table, and streaks in which a rank
stands out.

A streak is a stretch of steps in most of which the rank stands out: its length is their number,
less one for each of the others, and it is cut where that is the most. So one step of noise does not
end it.

A rank is named only for a streak of STREAK that lasts LONG seconds: one bad step, or a few short
ones, say more of the machine's other work than of the rank. Where other ranks stand out now and
then, too, the streak must be so long that it comes about by chance in RARELY of all runs, and
LONGER than theirs at other times. Processor time says less where ranks share their cores with
others, which shows by the time that they could have run and did not: a rank may be on the slower
core for a while. There it takes BUSY_STREAK steps, and BUSY_PART of all.
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
BUSY = 0.1  # the part of a step in which a rank had no core, from which it is shared
LONGER = 2.0

Line = dict[str, Any]
Row = Mapping[int, Line]  # {rank: its line} of one step
Test = Callable[[Row], Collection[int]]
"""test(row) -> the ranks that stand out in this step"""


@dataclass(frozen=True)
class Streak:
    """Steps in which a rank stands out: their rows, by step; between them it does not in at most as
    many."""

    rank: int
    rows: dict[int, Row]
    length: int

    @property
    def first(self) -> int:
        return next(iter(self.rows))

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last."""
        return self.first, next(reversed(self.rows))

    def median(self, value: Callable[[Line], float], *, of_others: bool = False) -> float:
        """The median over its steps of a rank's value, or of the others' median."""
        return statistics.median(
            others(row, self.rank, value) if of_others else value(row[self.rank])
            for row in self.rows.values()
        )


class StepTable:
    """All ranks' steps. The first step that a rank has recorded is left out: it warms up."""

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
        """Ranks that do the same kind of work, of each kind two or more."""
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
        """For each of `ranks` that stands out, the longest streak; of rows in which all of `ranks`
        have a line.

        Args:    together: the ranks stand out together, so that one says nothing of another.
                 processor: they do so by their processor time.
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
        """Whether they have no core of their own: for BUSY of the middle step they do not compute,
        read or call."""
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
    """The length of which one of all ranks has a streak in RARELY of such runs, if all stand out as
    the others do.

    The length is a walk that goes up in a part u of all steps, and else down: from one of its
    lowest points it reaches n with probability (u / (1 - u))^n.
    """
    usual = sum(count for other, count in times.items() if other != rank) / max(
        1, steps * (ranks - 1)
    )
    if not 0 < usual < 0.5:
        return math.inf if usual else 0.0
    return math.log(RARELY / (steps * ranks)) / math.log(usual / (1 - usual))


def _longest(rank: int, rows: Mapping[int, Row], out: Mapping[int, Collection[int]]) -> Streak:
    """The rank's longest streak: the stretch of steps in which it stands out the most often beyond
    half of them."""
    # of the stretch that may still grow: the steps in which it stands out
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
    """LONGER times the longest streak of another rank at other steps: if ranks stand out in turn,
    none is to blame."""
    return LONGER * max(
        (other.length for other in longest if not streak.rows.keys() & other.rows.keys()), default=0
    )


def others(row: Row, rank: int, value: Callable[[Line], float]) -> float:
    """The median of the other ranks' value."""
    return statistics.median([value(line) for other, line in row.items() if other != rank])


def beside(row: Row, value: Callable[[Line], float]) -> dict[int, float]:
    """{rank: the median of the other ranks' value}, of two ranks or more. Cost: one sort, however
    many ranks."""
    mine = {rank: value(line) for rank, line in row.items()}
    ordered = sorted(mine.values())
    count = len(row) - 1

    def without(place: int, at: int) -> float:
        """The value at a place of the sorted others: `at` is left out."""
        return ordered[place + (place >= at)]

    places = {rank: bisect_left(ordered, own) for rank, own in mine.items()}
    return {
        rank: (without((count - 1) // 2, at) + without(count // 2, at)) / 2
        for rank, at in places.items()
    }


def column(name: str) -> Callable[[Line], float]:
    """The value of a line under a name; 0.0 where it is not known."""
    return lambda line: float(line.get(name) or 0.0)


def known(row: Row, names: Sequence[str]) -> bool:
    """Whether every rank has these values."""
    return all(line.get(name) is not None for line in row.values() for name in names)
