"""Chapter 23 · Causes of a rank's waits: each exposed millisecond of a recorded step, its call,
line and cause.

A rank waits for call c. Before c, a chain of calls may have held the link without a pause; the
first call of the chain began when the last rank had asked for it:

    link     | d (first) .......... | e ............ | c .......... |
             last rank asks for d                                   |
    rank     work .......................... | waits for c ........ | work

Each cause has a cost in seconds: the extra time of a slow transfer, the delay of a late rank, the
time of a call in the queue. Causes are charged in this order, each up to what is left of the wait,
and over all waits of the rank never more than its cost. Without a cause, the wait may shrink by
less than the charged seconds, because another cause may take its place.

    no core           c had ended, and no core was free to continue the program
    slow transfer     a call of the chain took longer than calls of as many bytes
    slower rank       the first call of the chain began late, because another rank asked for it late
    order             a call went before c, but is waited for after c
    link busy         other calls held the link when c was ready
    no prefetch       c could have started sooner: its weights were ready
    late bucket       c started as soon as possible, but too late to be hidden
    needed at once    the program asked for c and waited for it: there was nothing to compute
    no collective     the rank waited for a message, a disk or a copy

notes: N2 §11.1
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from minidist.errors import ConfigError
from minidist.observe.step_bound import lower_bound, path_of
from minidist.observe.step_record import NO_CORE, StepCall, StepRecord, StepWait
from minidist.observe.timeline import Timeline

CAUSES = (
    NO_CORE,
    "slow transfer",
    "slower rank",
    "order",
    "link busy",
    "no prefetch",
    "late bucket",
    "needed at once",
    "no collective",
)
SLOW = 1.25
SLOW_SECONDS = 1e-3
"""A transfer is slow if it takes SLOW times its expected seconds, and SLOW_SECONDS more than
them."""


@dataclass(frozen=True)
class Exposed:
    """Seconds of a rank's wait that have one cause.

    Attributes: call    the call that caused the wait: late, slow or out of turn; where: the line
                        that asked for it
                waited  the call that the rank waited for, from `start` on (seconds from the step's
                        begin)
                by      the late rank, for "slower rank"
    """

    rank: int
    call: str
    verb: str
    where: str
    cause: str
    seconds: float
    waited: str
    start: float
    by: int | None = None


def exposed_of(record: StepRecord) -> list[Exposed]:
    """Return every exposed second of every rank, with its cause; the sum of a rank is
    `record.exposed(rank)`."""
    expected = expected_seconds(record.calls)
    return [
        row
        for rank in range(len(record.windows))
        for row in _RankCauses(record, rank, expected).rows()
    ]


def expected_seconds(calls: Sequence[StepCall]) -> dict[StepCall, float]:
    """Return the expected seconds of each call by its bytes: a Theil-Sen line through the calls of
    the same group, verb and axis."""
    kinds: dict[tuple[str, str, str], list[StepCall]] = defaultdict(list)
    for call in calls:
        kinds[call.group, call.verb, call.axis].append(call)
    expected = {}
    for alike in kinds.values():
        slopes = [
            (one.alone - other.alone) / (one.nbytes - other.nbytes)
            for place, one in enumerate(alike)
            for other in alike[:place]
            if one.nbytes != other.nbytes
        ]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        level = median(call.alone - slope * call.nbytes for call in alike)
        expected.update({call: level + slope * call.nbytes for call in alike})
    return expected


class _RankCauses:
    """The causes of a rank's waits, and the seconds that each may still be charged with."""

    def __init__(self, record: StepRecord, rank: int, expected: dict[StepCall, float]) -> None:
        self.record = record
        self.rank = rank
        self.waits = record.waits[rank]
        slow = {
            call: call.alone - seconds
            for call, seconds in expected.items()
            if call.alone > max(SLOW * seconds, seconds + SLOW_SECONDS)
        }
        self._slow = defaultdict(float, slow)
        self._moved = {call: call.alone - slow.get(call, 0.0) for call in record.calls}
        self._blamed: list[tuple[float, str, float]] = []  # (begin of the wait, cause, seconds)
        self._needed = {wait.call: wait.start for wait in reversed(self.waits)}

    def rows(self) -> list[Exposed]:
        """Return the rows of all waits, in order."""
        return [
            row
            for wait in self.waits
            for row in (
                [
                    Exposed(
                        self.rank,
                        wait.name,
                        "",
                        "",
                        "no collective",
                        wait.stop - wait.start,
                        wait.name,
                        wait.start - self.record.begin,
                    )
                ]
                if wait.call is None
                else self._of(wait, wait.call)
            )
        ]

    def _of(self, wait: StepWait, call: StepCall) -> list[Exposed]:
        """Return the rows of the wait for a call."""
        rows = list[Exposed]()
        left = wait.stop - wait.start

        def blame(one: StepCall, cause: str, most: float) -> float:
            """Charge a cause with the rest of the wait, at most `most`. Returns: the seconds."""
            nonlocal left
            if (seconds := min(left, most)) <= 0:
                return 0.0
            left -= seconds
            self._blamed.append((wait.start, cause, seconds))
            rows.append(
                Exposed(
                    self.rank,
                    one.name,
                    one.verb,
                    one.where,
                    cause,
                    seconds,
                    wait.name,
                    wait.start - self.record.begin,
                    one.last_rank if cause == "slower rank" else None,
                )
            )
            return seconds

        blame(call, NO_CORE, wait.stop - max(wait.start, call.end))
        chain = self._chain(call)
        for one in chain:
            self._slow[one] -= blame(one, "slow transfer", self._slow[one])
        asked = chain[0].ranks[self.rank].asked
        blame(chain[0], "slower rank", chain[0].came - asked - self._since(asked, "slower rank"))
        for one in chain[:-1]:
            if self._needed.get(one, float("inf")) > self._needed[call]:
                self._moved[one] -= blame(one, "order", min(self._moved[one], self._queue(call)))
        blame(call, "link busy", self._queue(call))
        blame(call, self._unavoidable(call), left)
        return rows

    def _queue(self, call: StepCall) -> float:
        """Return the seconds of a call in the queue of its link, without the seconds already
        charged to other causes."""
        return (
            call.begin - call.came - self._since(call.came, "slow transfer", "order", "link busy")
        )

    def _since(self, moment: float, *causes: str) -> float:
        """Return the seconds charged to these causes in waits since a moment; without the causes,
        all later events would be earlier by these seconds."""
        return sum(
            seconds for start, cause, seconds in self._blamed if start >= moment and cause in causes
        )

    def _chain(self, call: StepCall) -> list[StepCall]:
        """Return the calls that held the link without a pause up to the end of `call`, with it."""
        chain = [call]
        while (before := self.record.before(chain[0])) is not None:
            chain.insert(0, before)
        return chain

    def _unavoidable(self, call: StepCall) -> str:
        """Return the cause of a late call that no other call delayed."""
        mine = call.ranks[self.rank]
        if mine.blocking or call.axis == "control":
            return "needed at once"
        return (
            "no prefetch"
            if call.verb == "all_gather" and self._could_leave(mine.asked)
            else "late bucket"
        )

    def _could_leave(self, asked: float) -> bool:
        """Return whether the weights of a gather asked for at this moment were ready earlier: the
        rank has computed since its last update."""
        since = [
            (name, max(start, self.record.windows[self.rank][0]), min(stop, asked))
            for name, start, stop in self.record.work[self.rank]
            if start < asked
        ]
        updates = [stop for name, _, stop in since if name == "optimizer"]
        seconds = sum(
            stop - start for name, start, stop in since if start >= max(updates, default=0.0)
        )
        return seconds > SLOW_SECONDS / 10


def typical_step(timelines: Sequence[Timeline]) -> int:
    """Return the step of median length among the steps that all ranks have recorded whole, without
    the first.

    Raises:  ConfigError if there is none.
    """
    longest: dict[int, float] = {}
    for timeline in timelines:
        found = {
            span.details["step"]: span.stop - span.start
            for span in timeline.spans
            if span.name == "step"
        }
        longest = {
            step: max(seconds, longest.get(step, 0.0))
            for step, seconds in found.items()
            if timeline is timelines[0] or step in longest
        }
    for step in set[int]().union(*(timeline.cut_steps() for timeline in timelines)):
        longest.pop(step, None)
    steps = sorted(longest)[1:] or sorted(longest)
    if not steps:
        raise ConfigError("no step was recorded whole on all ranks; make at least one")
    return sorted(steps, key=longest.__getitem__)[len(steps) // 2]


def why(record: StepRecord) -> dict[str, Any]:
    """Return the report for metrics.json: seconds of the step, its lower bound, waits of the ranks,
    the critical path.

    Returns: {"seconds", "bound", "replayed", "computing", "exposed": one per rank, "causes",
             "rows", "path", and for the picture "work": one list per rank, "calls"}. All times are
             in seconds; moments count from the step's begin.
    """
    rows = exposed_of(record)
    replayed = record.replay()
    computing = [
        stop - start - record.exposed(rank) for rank, (start, stop) in enumerate(record.windows)
    ]
    causes = {cause: sum(row.seconds for row in rows if row.cause == cause) for cause in CAUSES}
    return {
        "seconds": record.seconds,
        "bound": lower_bound(record),
        "replayed": max(stops[-1] for stops in replayed.stops),
        "computing": computing,
        "exposed": [record.exposed(rank) for rank in range(len(record.windows))],
        "causes": {cause: seconds for cause, seconds in causes.items() if seconds},
        "rows": [asdict(row) for row in sorted(rows, key=lambda row: -row.seconds)],
        "path": path_of(record, replayed),
        "work": [
            [[name, start - record.begin, stop - record.begin] for name, start, stop in pieces]
            for pieces in record.work
        ],
        "calls": [
            {
                "name": call.name,
                "verb": call.verb,
                "begin": call.begin - record.begin,
                "end": call.end - record.begin,
            }
            for call in record.calls
        ],
    }
