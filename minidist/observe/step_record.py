"""Chapter 23 · A recorded step: the collectives and waits of all ranks, and their events for the
replay.

    compute          forward | backward: layer 2 | layer 1 | wait for a | wait for b | optimizer
    asked for                                    a         b
    communication                                | a ................ | b ........ |

Each rank asks for a call. The call begins when the last rank has asked for it and the previous call
of its group has ended. It ends when it ends on the last rank; another rank may continue before. A
rank waits for a call from the moment when its program blocks until it continues. All other time is
work. A replay without changes ends on each rank at the recorded time.

    record = record_step(timelines, step)       # from timelines that followed waits
    replayed = record.replay()                  # the same step from its events; what_if.py changes
                                                # them first

notes: N2 §11.1
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from minidist.errors import ConfigError
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.overlap import Interval, subtract, union, waiting, working
from minidist.observe.replay import Replayed, replay
from minidist.observe.timeline import Span, Timeline

NO_CORE = "no core"
"""Time after a call had ended on all ranks, in which the waiting program did not run yet."""
IN_A_WAIT = "in a wait"
"""Time in which the program waited, until another thread of the rank asked for a call."""
NO_WORK = (NO_CORE, IN_A_WAIT)
"""Names of Busy events that are not work."""


class Asked(NamedTuple):
    """A call on one rank: when the program asked for it, when it began and ended, in seconds."""

    asked: float
    start: float
    stop: float
    blocking: bool  # the program waited during the whole call


@dataclass(eq=False)
class StepCall:
    """A collective of the step, on all its ranks. Compared by identity.

    Attributes: group, number  its group, and its place among the calls of the group
                nbytes         sent by the rank that sends most; messages: sent by this rank
                where          the line of the program that asked for it
                ranks          rank -> the call on this rank
                begin          when all ranks had asked for it and the group's link was free
                end            when it ended on the last rank
    """

    group: str
    number: int
    name: str
    axis: str
    verb: str
    algorithm: str
    where: str
    nbytes: int
    messages: int
    ranks: dict[int, Asked] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0

    @property
    def last_rank(self) -> int:
        """The rank that asked for the call last."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].asked)

    @property
    def came(self) -> float:
        """Seconds at which the last rank asked for the call."""
        return self.ranks[self.last_rank].asked

    @property
    def alone(self) -> float:
        """Seconds of the transfer itself."""
        return self.end - self.begin

    @property
    def in_background(self) -> bool:
        """True if the call ran in the background on all ranks, and is not one of scalars."""
        return self.axis != "control" and not any(one.blocking for one in self.ranks.values())

    @property
    def key(self) -> str:
        """Its unique name in the replay."""
        return f"{self.name} #{self.number} of {self.group}"


class StepWait(NamedTuple):
    """A wait of a rank from start to stop.

    `call`: the call that it waits for. None if that is no collective, or if the wait ended before
    the last rank arrived, so that the rank waited for no other rank.
    """

    name: str
    start: float
    stop: float
    call: StepCall | None


@dataclass
class StepRecord:
    """The record of one step of all ranks, in seconds of one clock.

    Attributes: windows  (begin, end) of the step on each rank
                calls    the calls that ran in the step, by group and number
                waits    the waits of each rank, in order; they do not overlap
                work     the named pieces of work of each rank, in order: (name, start, stop)
    """

    windows: list[Interval]
    calls: list[StepCall]
    waits: list[list[StepWait]]
    work: list[list[tuple[str, float, float]]]

    @property
    def begin(self) -> float:
        """Seconds at which the first rank began."""
        return min(start for start, _ in self.windows)

    @property
    def seconds(self) -> float:
        """Seconds from the first rank's begin to the last rank's end."""
        return max(stop for _, stop in self.windows) - self.begin

    def exposed(self, rank: int) -> float:
        """Return the seconds in which a rank waited."""
        return sum(wait.stop - wait.start for wait in self.waits[rank])

    def before(self, call: StepCall) -> StepCall | None:
        """Return the previous call of its group, if that delayed the call; else None."""
        place = self.calls.index(call)
        other = self.calls[place - 1] if place else None
        return (
            other
            if other is not None and other.group == call.group and call.begin > call.came
            else None
        )

    def members(self, axis: str, rank: int) -> list[int]:
        """Return the ranks of a group; `axis` is the group's id, perhaps with "/" and a call's name
        after it."""
        group = axis.partition("/")[0]
        return sorted({one for call in self.calls if call.group == group for one in call.ranks})

    def traces(self) -> list[list[Event]]:
        """Return the events of each rank. The work of a Busy is its seconds; the id of a call is
        its index in `calls`."""
        return [self._trace(rank) for rank in range(len(self.windows))]

    def _trace(self, rank: int) -> list[Event]:
        """Return a rank's events from the common begin to the end of its step."""
        events = list[Event]()
        now = self.begin
        pieces = self._pieces(rank)
        for at, event, wait in self._points(rank):
            events += _busy_between(pieces, now, at)
            now = max(now, at)
            if wait is None or wait.call is None:
                events.append(event)
                continue
            ended = max(now, wait.call.end)
            goes_on = max(now, wait.stop)
            events.append(Await(event.id, max(0.0, ended - goes_on)))
            if goes_on > ended:
                events.append(Busy(goes_on - ended, NO_CORE))
            now = goes_on
        return [*events, *self._busy(rank, now, self.windows[rank][1])]

    def _points(self, rank: int) -> list[tuple[float, Start | Await, StepWait | None]]:
        """Return when a rank asks for its calls and when it waits for them, in order.

        A rank asks for the calls of a group in their order. If another thread asks for calls during
        a wait, the wait counts from the last of these calls on, so that no call is asked for later
        than recorded.
        """
        starts = dict[StepCall, float]()
        latest = dict[str, float]()
        for call in self.calls:
            if rank in call.ranks:
                asked = max(self._asked(call, rank), latest.get(call.group, self.begin))
                starts[call] = latest[call.group] = asked
        moments = sorted(starts.values())
        places = {call: place for place, call in enumerate(self.calls)}
        points: list[tuple[float, Start | Await, StepWait | None]] = [
            (asked, Start(places[call], group_call(call)), None) for call, asked in starts.items()
        ]
        for wait in self.waits[rank]:
            if wait.call is not None and wait.call in starts:
                inside = moments[: bisect_left(moments, wait.stop)][-1:]
                at = max(wait.start, starts[wait.call], *inside)
                points.append((at, Await(places[wait.call]), wait))
        return sorted(points, key=lambda point: (point[0], isinstance(point[1], Await)))

    def _asked(self, call: StepCall, rank: int) -> float:
        """Return when a rank asked for a call, within the step's begin and the rank's end."""
        return min(max(call.ranks[rank].asked, self.begin), self.windows[rank][1])

    def _busy(self, rank: int, start: float, stop: float) -> Iterator[Busy]:
        """Yield a rank's work between two moments; nothing if `stop` is not after `start`."""
        yield from _busy_between(self._pieces(rank), start, stop)

    def _pieces(self, rank: int) -> list[tuple[str, float, float]]:
        """Return a rank's named pieces of work and its waits for calls, by their begins."""
        waits = [
            (IN_A_WAIT, wait.start, wait.stop) for wait in self.waits[rank] if wait.call is not None
        ]
        before = ("before the step", -float("inf"), self.windows[rank][0])
        return sorted([before, *self.work[rank], *waits], key=lambda piece: piece[1])

    def replay(
        self,
        traces: Sequence[Sequence[Event]] | None = None,
        seconds: dict[str, float] | None = None,
    ) -> Replayed:
        """Replay the step from its events or from changed events.

        Args:    traces: one per rank; seconds: of calls by their names in the events (default: as
                 recorded).
        """
        chosen = {call.key: call.alone for call in self.calls} if seconds is None else seconds
        return replay(
            self.traces() if traces is None else traces,
            range(len(self.windows)),
            self.members,
            lambda rank, work: cast(float, work),
            lambda call, group: (chosen[call.name], {}),
            folded=False,
        )


def _busy_between(
    pieces: Sequence[tuple[str, float, float]], start: float, stop: float
) -> Iterator[Busy]:
    """Yield the pieces between two moments without overlap; "other" is the time between them."""
    now = start
    for name, begin, end in pieces:
        if begin >= stop:
            break
        if end <= now or end <= begin:
            continue
        if begin > now:
            yield Busy(begin - now, "other")
            now = begin
        last = min(end, stop)
        if last > now:
            yield Busy(last - now, name)
            now = last
    if now < stop:
        yield Busy(stop - now, "other")


def only_work(trace: Sequence[Event]) -> list[Event]:
    """Return the events without each Busy that is not work."""
    return [event for event in trace if not isinstance(event, Busy) or event.name not in NO_WORK]


def group_call(call: StepCall) -> GroupCall:
    """Return the call as an event; its axis is its group."""
    return GroupCall(call.group, call.verb, call.algorithm, call.nbytes, name=call.key)


# ------------------------------------------------------------------------------- from the timelines


def record_step(timelines: Sequence[Timeline], step: int) -> StepRecord:
    """Return the record of one step.

    Args:    timelines: of all ranks, on one clock; they followed waits (`Timeline.follow(ledger,
             waits=True)`).
    Raises:  ConfigError if a rank's timeline lacks the step.
    """
    windows = []
    for rank, timeline in enumerate(timelines):
        found = [
            span
            for span in timeline.spans
            if span.name == "step" and span.details.get("step") == step
        ]
        if not found:
            raise ConfigError(
                f"step {step} is not in the timeline of rank {rank}, which has "
                f"{len(timeline.spans)} spans; choose another step, or record more"
            )
        windows.append((found[-1].start, found[-1].stop))
    calls = _calls(timelines, windows)
    known = {(call.group, call.number): call for call in calls}
    waits = [
        _waits(timeline, rank, windows[rank], known) for rank, timeline in enumerate(timelines)
    ]
    work = [_work(timeline, windows[rank], waits[rank]) for rank, timeline in enumerate(timelines)]
    return StepRecord(windows, calls, waits, work)


def _calls(timelines: Sequence[Timeline], windows: Sequence[Interval]) -> list[StepCall]:
    """Return the calls that ran in the step, by group and number, with their begins and ends."""
    found: dict[tuple[str, int], StepCall] = {}
    for rank, timeline in enumerate(timelines):
        for span in timeline.spans:
            if span.row == "communication" and "group" in span.details:
                _add(found, rank, span)
    begin = min(start for start, _ in windows)
    calls = [
        call
        for _, call in sorted(found.items())
        if any(
            windows[rank][0] < one.stop and one.asked < windows[rank][1]
            for rank, one in call.ranks.items()
        )
    ]
    held = dict[str, float]()  # group -> when its last call frees the link
    for call in calls:
        free = held.get(call.group, begin)
        came = max(min(one.asked, windows[rank][1]) for rank, one in call.ranks.items())
        call.begin = max(came, free)
        call.end = held[call.group] = max(call.begin, *(one.stop for one in call.ranks.values()))
    return calls


def _add(found: dict[tuple[str, int], StepCall], rank: int, span: Span) -> None:
    """Add a call on one rank to the record of this call on the other ranks."""
    about = span.details
    key = about["group"], about["sequence"]
    name = f"{span.name} of scalars" if about["axis"] == "control" else span.name
    call = found.setdefault(
        key,
        StepCall(
            *key, name, about["axis"], about["verb"], about["algorithm"], about["where"], 0, 0
        ),
    )
    call.nbytes, call.messages = max(
        (call.nbytes, call.messages), (about["nbytes"], about["messages"])
    )
    call.ranks[rank] = Asked(span.start - about["queued"], span.start, span.stop, about["blocking"])


def _waits(
    timeline: Timeline, rank: int, window: Interval, known: dict[tuple[str, int], StepCall]
) -> list[StepWait]:
    """Return a rank's waits in its step: for calls, and with their own names all other waits."""
    found = [
        (span.start, span.stop, known.get((span.details["group"], span.details["sequence"])))
        for span in timeline.spans
        if span.row == "waits"
    ]
    found += [
        (one.asked, one.stop, call)
        for call in known.values()
        if (one := call.ranks.get(rank)) is not None and one.blocking
    ]
    waits = []
    now = window[0]
    for start, stop, call in sorted(found, key=lambda wait: wait[:2]):
        if start < window[1] and stop > window[0] and call is not None:
            since = max(start, now)
            now = max(min(stop, window[1]), since)
            if now >= call.begin:
                waits.append(StepWait(call.name, since, now, call))
            elif now > since:  # the rank waited for no other rank
                waits.append(StepWait(call.name, since, now, None))
    of_calls = union((wait.start, wait.stop) for wait in waits)
    for span in waiting(timeline):
        inside = [(max(span.start, window[0]), min(span.stop, window[1]))]
        if inside[0][0] < inside[0][1]:
            waits += [StepWait(span.name, *rest, None) for rest in subtract(inside, of_calls)]
            of_calls = union([*of_calls, *inside])
    return sorted(waits, key=lambda wait: wait[1:3])


def _work(
    timeline: Timeline, window: Interval, waits: Sequence[StepWait]
) -> list[tuple[str, float, float]]:
    """Return the named pieces of work without the waits in them; of nested spans the innermost
    gives the name."""
    free = subtract([window], union((wait.start, wait.stop) for wait in waits))
    spans = [span for span in working(timeline) if span.stop > window[0] and span.start < window[1]]
    edges = sorted({edge for span in spans for edge in (span.start, span.stop)})
    pieces = []
    for start, stop in free:
        cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            around = [span for span in spans if span.start <= begin and end <= span.stop]
            if around:
                pieces.append((max(around, key=lambda span: span.start).name, begin, end))
    elsewhere = [(wait.name, wait.start, wait.stop) for wait in waits if wait.call is None]
    return sorted([*pieces, *elsewhere], key=lambda piece: piece[1])
