"""Chapter 23 · A rank's events on a line of work, along which starts and waits of calls can move.

trace    Busy 3 | Start a | Busy 2 | Await a | Busy 1
work     0 ......... 3 ......... 5 ......... 6              seconds of work, without waits
marks                Start a     Await a
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import cast

from minidist.errors import ConfigError
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.step_record import StepCall, StepRecord, group_call, only_work


class RankLine:
    """The work of one rank, and its marks (Start and Await) in order, each with the seconds of work
    before it."""

    def __init__(self, trace: Iterable[Event]) -> None:
        self.work: list[Busy] = []
        self.marks: list[tuple[float, Start | Await]] = []
        self.total = 0.0
        for event in trace:
            if isinstance(event, Busy):
                self.work.append(event)
                self.total += cast(float, event.work)
            elif isinstance(event, (Start, Await)):
                self.marks.append((self.total, event))

    def trace(self) -> list[Event]:
        """Return the events; marks at the same place keep their order."""
        events = list[Event]()
        now = 0.0
        todo = [(cast(float, busy.work), busy.name) for busy in reversed(self.work)]
        for place, mark in sorted(self.marks, key=lambda each: each[0]):
            while todo and now < place:
                seconds, name = todo.pop()
                first = min(seconds, place - now)
                events.append(Busy(first, name))
                now = place if first < seconds else now + seconds
                if first < seconds:
                    todo.append((seconds - first, name))
            events.append(mark)
        return events + [Busy(seconds, name) for seconds, name in reversed(todo)]

    def totals(self) -> dict[str, float]:
        """Return {name: seconds of work}."""
        found: dict[str, float] = {}
        for busy in self.work:
            found[busy.name] = found.get(busy.name, 0.0) + cast(float, busy.work)
        return found

    def scaled(self, factors: dict[str, float]) -> "RankLine":
        """Return the line with each piece of work multiplied by the factor of its name; marks stay
        between the same pieces."""
        return RankLine(
            event._replace(work=cast(float, event.work) * factors.get(event.name, 1.0))
            if isinstance(event, Busy)
            else event
            for event in self.trace()
        )

    def begin_of(self, name: str) -> float:
        """Return the work before the first piece of this name; the whole work if there is none."""
        before = 0.0
        for busy in self.work:
            if busy.name == name:
                return before
            before += cast(float, busy.work)
        return self.total

    def starts(self) -> dict[int, float]:
        """Return {call: work before its start}."""
        return {mark.id: place for place, mark in self.marks if isinstance(mark, Start)}

    def awaits(self) -> dict[int, float]:
        """Return {call: work before the first wait for it}."""
        return {mark.id: place for place, mark in reversed(self.marks) if isinstance(mark, Await)}

    def drop(self, calls: Iterable[int]) -> None:
        """Remove all marks of these calls."""
        gone = set(calls)
        self.marks = [(place, mark) for place, mark in self.marks if mark.id not in gone]


class StepLines:
    """The lines of all ranks and the calls by id, which what_if.py changes.

    Attributes: record; lines: one per rank; calls: id -> call; seconds: id -> seconds of the call.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.lines = [RankLine(only_work(trace)) for trace in record.traces()]
        self.calls = dict(enumerate(record.calls))
        self.seconds = {number: call.alone for number, call in self.calls.items()}

    def add(self, like: StepCall, name: str, nbytes: int, seconds: float) -> int:
        """Add a new call, with group, verb and ranks of a call of the step. Returns: its id."""
        number = max(self.calls) + 1
        self.calls[number] = StepCall(
            like.group,
            number,
            name,
            like.axis,
            like.verb,
            like.algorithm,
            like.where,
            nbytes,
            like.messages,
            dict(like.ranks),
        )
        self.seconds[number] = seconds
        return number

    def event(self, number: int) -> GroupCall:
        """Return the call as an event for the replay."""
        return group_call(self.calls[number])

    def traces(self) -> list[list[Event]]:
        """Return the events of each rank."""
        return [line.trace() for line in self.lines]

    def seconds_by_name(self) -> dict[str, float]:
        """Return {name of a call's event: seconds}, for StepRecord.replay."""
        return {self.event(number).name: seconds for number, seconds in self.seconds.items()}

    def in_background(self, verb: str) -> list[int]:
        """Return the calls of a verb that ran in the background, by group and number."""
        return [
            number
            for number, call in self.calls.items()
            if call.verb == verb and call.in_background
        ]


def without_straggler(job: StepLines, rank: int) -> None:
    """Reduce each kind of work of a rank to the median of the other ranks, if that is less.

    Raises:  ConfigError if there is no such rank, or no other.
    """
    others = [line.totals() for number, line in enumerate(job.lines) if number != rank]
    if not 0 <= rank < len(job.lines) or not others:
        raise ConfigError(
            f"without rank {rank}: the step has ranks 0 to {len(job.lines) - 1}; name one of "
            "several"
        )
    mine = job.lines[rank].totals()
    usual = {name: median(total.get(name, 0.0) for total in others) for name in mine}
    job.lines[rank] = job.lines[rank].scaled(
        {name: min(1.0, usual[name] / seconds) for name, seconds in mine.items() if seconds > 0}
    )


def prefetch(job: StepLines, ahead: int) -> None:
    """Start each gather of a unit `ahead` units before its turn, in forward and in backward, as
    ZeRO-3 does.

    Bytes limit it, not the number of units: with the unit in use, at most (1 + ahead) × the largest
    unit (zero3.py).
    """
    gathers = set(job.in_background("all_gather"))
    largest = max((job.calls[number].nbytes for number in gathers), default=0)
    for line in job.lines:
        backward = line.begin_of("backward")
        order = [
            (place, mark.id)
            for place, mark in line.marks
            if isinstance(mark, Await) and mark.id in gathers
        ]
        before: dict[int, list[int]] = {}  # gather -> gathers that start before the wait for it
        for phase in (
            [number for place, number in order if place < backward],
            [number for place, number in order if place >= backward],
        ):
            before.update(
                _sets_out(
                    phase, {number: job.calls[number].nbytes for number in phase}, largest, ahead
                )
            )
        moved = {number for group in before.values() for number in group}
        marks = list[tuple[float, Start | Await]]()
        for place, mark in line.marks:
            if isinstance(mark, Await):
                marks += [
                    (place, Start(number, job.event(number))) for number in before.pop(mark.id, [])
                ]
            if isinstance(mark, Await) or mark.id not in moved:
                marks.append((place, mark))
        line.marks = marks


def _sets_out(
    phase: Sequence[int], nbytes: dict[int, int], largest: int, ahead: int
) -> dict[int, list[int]]:
    """Return {gather: the gathers that start just before the wait for it}, in the order of the
    waits."""
    begun = set[int]()
    before = {}
    for place, number in enumerate(phase):
        group = [number]
        room = (1 + ahead) * largest - nbytes[number]
        for other in phase[place + 1 :]:
            room -= nbytes[other]
            if room < 0 or not ahead:
                break
            group.append(other)
        before[number] = [one for one in group if one not in begun]
        begun.update(group)
    return before
