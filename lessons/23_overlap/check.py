"""Grades exercise 23: paths of steps on a virtual clock, their bounds and causes, and a link with
priorities."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from minidist.grading import Mistake, Result, expect, judge, load_module, variant
from minidist.lessons.checking import Lane, timelines
from minidist.observe.events import Busy
from minidist.observe.step_bound import lower_bound, plain_critical_path
from minidist.observe.step_record import StepRecord
from minidist.observe.what_if import Change, predict
from minidist.observe.why import exposed_of

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "23")
STEP = lab.Job()
BOUNDS = {
    "the last bucket is late": STEP,
    "the link is too slow": replace(STEP, bandwidth=5e8),
    "one bucket in the middle is late": replace(STEP, late={3: 0.030}),
    "the first bucket is late": replace(STEP, late={0: 0.070}),
}
BOUND_ADVICE = (
    "the longest chain, or all transfers behind the first moment: section 1 (holes 5 and 6)"
)
WHOLE = replace(STEP, bucket=STEP.layers * STEP.layer_bytes)

CUT_FROM = (plain_critical_path,)
ANSWERS = {
    5: "max(call + alone for call, alone in zip(asked, seconds))",
    6: "min(asked) + sum(seconds)",
    7: "came - asked",
    8: "begin - came",
    9: "min((call for call in left if came[call] <= now), key=lambda call: urgency[call])",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the path, hole by hole, then the bound, the causes and the priorities."""
    yield from _paths(exercise)
    yield from _bounds(exercise)
    yield from _causes(exercise)
    yield from _priorities(exercise)


def paths() -> Iterator[tuple[str, StepRecord, str, str]]:
    """Yield the name, the record, the mistake and the advice of each path."""
    yield (
        "a step whose last bucket is waited for",
        lab.run(STEP),
        "a path that misses the call",
        "the rank stood still for a call that ended after its wait began: section 1 (holes 2 "
        "and 3)",
    )
    yield (
        "a step whose link is too slow",
        lab.run(replace(STEP, bandwidth=5e8)),
        "a path that misses the queue",
        "the last call that was waited for, then those before it on the link: section 1 (holes "
        "2 and 3)",
    )
    yield (
        "a step with a slower rank",
        lab.run(replace(STEP, slow=1.5)),
        "a path through the wrong rank",
        "it begins at the last rank to end: section 1 (hole 1)",
    )
    yield (
        "backward slow on rank 1, the update on rank 0",
        two_slow(),
        "a path that stays on its rank",
        "a call begins when its last rank has asked for it: section 1 (hole 4)",
    )
    yield (
        "rank 1 begins first, rank 0 ends last",
        early(),
        "a path through the wrong rank",
        "not the rank whose step was the longest, but the last to end: section 1 (hole 1)",
    )
    yield (
        "a step that ends with a call",
        ends_waiting(),
        "a path that misses the last call",
        "a call that ends as the step does belongs to it: section 1 (hole 2)",
    )
    yield (
        "ZeRO-1, whose later weights are there in time",
        lab.run(replace(STEP, strategy="zero1")),
        "a path through a call for which no rank stood still",
        "it had ended before the wait began: section 1 (hole 2)",
    )
    yield (
        "a step whose last call ends on the other rank only later",
        ends_elsewhere(),
        "a path that misses the last call",
        "this rank has stood still until its own wait stopped: section 1, step 2 (hole 2)",
    )
    yield (
        "ZeRO-3 without prefetch",
        lab.run(replace(STEP, strategy="zero3", ahead=0, slow=1.1)),
        "a path with gaps",
        "each part ends where the next one begins: section 1",
    )


def two_slow() -> StepRecord:
    """Return a record in which rank 1 arrives last at the buckets, and rank 0 ends last."""
    programs = [lab.Program(STEP, 1.0), lab.Program(STEP, 1.5)]
    for program in programs:
        lab.ddp(program)
    programs[0].events[-1] = Busy(0.010, "optimizer")
    record: StepRecord = lab.play([program.events for program in programs], STEP)
    return record


def ends_waiting() -> StepRecord:
    """Return a record of DDP without an update: nothing follows the wait for the last bucket."""
    programs = [lab.Program(STEP, 1.0), lab.Program(STEP, 1.0)]
    for program in programs:
        lab.ddp(program)
        program.events.pop()
    record: StepRecord = lab.play([program.events for program in programs], STEP)
    return record


def early() -> StepRecord:
    """Return a record in which rank 1 begins 30 ms before rank 0, and rank 0 ends last.

    Rank 1 thus has the longer step.
    """
    record = two_slow()
    begin, end = record.windows[1]
    return StepRecord(
        [record.windows[0], (begin - 0.030, end)], record.calls, record.waits, record.work
    )


def ends_elsewhere() -> StepRecord:
    """Return a record of DDP whose last call still runs when this rank's step has ended.

    The call then runs only on the other rank.
    """
    record: StepRecord = lab.run(STEP)
    record.calls[-1].end += 2 * STEP.update
    return record


Part = tuple[Any, ...]

NOBODY = "a call that ended before the wait for it began held up nobody"

MISREAD = {
    "the path begins on the rank whose step was the longest": (
        "lambda one: record.windows[one][1]",
        "lambda one: record.windows[one][1] - record.windows[one][0]",
        "it begins on the rank that ends last: section 1, step 1 (hole 1)",
    ),
    "the path begins on the rank that began last": (
        "lambda one: record.windows[one][1]",
        "lambda one: record.windows[one][0]",
        "it begins on the rank that ends last: section 1, step 1 (hole 1)",
    ),
    "the path always begins on the rank with the highest number": (
        "lambda one: record.windows[one][1]",
        "lambda one: one",
        "it begins on the rank that ends last: section 1, step 1 (hole 1)",
    ),
    "a call that ends just now is left out": (
        "wait.start < min(wait.call.end, wait.stop) <= now",
        "wait.start < min(wait.call.end, wait.stop) < now",
        "a call that ends as the step does belongs to it: section 1, step 2 (hole 2)",
    ),
    "a call that was hidden is taken, too": (
        "wait.start < min(wait.call.end, wait.stop) <= now",
        "wait.stop <= now",
        "it had ended before the wait began: section 1, step 2 (hole 2)",
    ),
    "a call is left out that ends on the other rank only later": (
        "wait.start < min(wait.call.end, wait.stop) <= now",
        "wait.start < wait.call.end <= now",
        "this rank has stood still only until its wait stopped: section 1, step 2 (hole 2)",
    ),
    "the first wait is taken, not the last": (
        "held[-1]",
        "held[0]",
        "the path walks back from the end: section 1, step 4 (hole 3)",
    ),
    "the path stays on its rank": (
        "rank, now = call.last_rank, call.begin",
        "rank, now = rank, call.begin",
        "a call begins when its last rank has asked for it: section 1, step 6 (hole 4)",
    ),
    "the path goes on to the other rank, whoever asked last": (
        "rank, now = call.last_rank, call.begin",
        "rank, now = 1 - rank, call.begin",
        "a call begins when its last rank has asked for it: section 1, step 6 (hole 4)",
    ),
    "the path always goes on to rank 0": (
        "rank, now = call.last_rank, call.begin",
        "rank, now = 0, call.begin",
        "a call begins when its last rank has asked for it: section 1, step 6 (hole 4)",
    ),
}
"""What is done wrongly: {mistake: (code of the plain version, other code, advice)}."""


def rounded(path: Any, *, ranks: bool) -> list[Part]:
    """Return the parts of a path in milliseconds.

    Without `ranks` the parts name no rank: where ranks do the same, either may be named.
    """
    return [
        (part[0], part[1] if ranks else "", round(1e3 * part[2], 6), round(1e3 * part[3], 6))
        for part in path
    ]


def _parts(found: list[Part], other: list[Part]) -> str:
    """Return as text the first part that only `found` has, and the number of its parts."""
    at = next(
        (at for at, part in enumerate(found) if at >= len(other) or part != other[at]),
        len(found) - 1,
    )
    if at < 0:
        return "no parts"
    name, rank, start, stop = found[at]
    who = f"rank {rank}" if name == "work" and rank not in ("", None) else str(name)
    return f"{len(found)} parts, of which part {at + 1} is {who} from {start:g} to {stop:g} ms"


class Counted(StepRecord):
    """A record that raises RuntimeError if a path turns in a circle."""

    asked = 0

    @property
    def begin(self) -> float:
        self.asked += 1
        if self.asked > 1000:
            raise RuntimeError(
                "the path never reaches the begin of the step; `now` has to go back in each round"
            )
        return super().begin


def counted(record: StepRecord) -> Counted:
    """Return the record as a Counted record."""
    return Counted(record.windows, record.calls, record.waits, record.work)


def _paths(exercise: ModuleType) -> Iterator[Result]:
    for name, record, mistake, advice in paths():
        ranks = len(set(record.windows)) > 1
        right = rounded(plain_critical_path(record), ranks=ranks)
        found = rounded(exercise.plain_critical_path(counted(record)), ranks=ranks)
        yield judge(
            name,
            found == right,
            _parts(right, found),
            _parts(found, right),
            mistake,
            advice,
            signs={
                **{
                    wrong: Mistake(partial(_reads_so, record, ranks, old, new, found), why)
                    for wrong, (old, new, why) in MISREAD.items()
                },
                NOBODY: Mistake(
                    _too_many(record, right, found),
                    "keep a wait only if the rank stood still in it: section 1, step 2 (hole 2)",
                ),
            },
        )


def _too_many(record: StepRecord, right: list[Part], found: list[Part]) -> bool:
    """Return whether a path has all calls of the right one, and others for which no rank stood
    still."""
    held = {
        wait.call.name
        for waits in record.waits
        for wait in waits
        if wait.call is not None and wait.start < min(wait.call.end, wait.stop)
    }
    calls = {call.name for call in record.calls}
    mine = {part[0] for part in found} & calls
    due = {part[0] for part in right} & calls
    return due < mine and bool((mine - due) - held)


def _reads_so(record: StepRecord, ranks: bool, old: str, new: str, found: list[Part]) -> bool:
    """Return whether the plain version with `new` in place of `old` finds this path."""
    try:
        wrong = variant(plain_critical_path, old, new)(counted(record))
    except RuntimeError:
        return False
    return rounded(wrong, ranks=ranks) == found


def _bounds(exercise: ModuleType) -> Iterator[Result]:
    yield from _drawn_bounds(exercise)
    for name, job in BOUNDS.items():
        record = lab.run(job)
        asked = [call.came for call in record.calls]
        found = exercise.shortest_step(
            asked, [call.alone for call in record.calls], record.waits[0][0].start, job.update
        )
        yield expect(
            f"the bound: {name}",
            f"{1e3 * lower_bound(record):.3f} ms",
            f"{1e3 * float(found):.3f} ms",
            "a bound that is none",
            BOUND_ADVICE,
        )


class Draw(NamedTuple):
    """Calls of a step, in milliseconds: the arguments of shortest_step."""

    asked: list[int]
    seconds: list[int]
    backward: int
    after: int


CHAIN_ADVICE = (
    "the work before a call, and the same call's transfer; of all calls the longest: section 1 "
    "(hole 5)"
)
LINK_ADVICE = (
    "the work before the first call, then all calls one after the other: section 1 (hole 6)"
)


def _bound(draw: Draw) -> tuple[int, dict[str, tuple[int, str]]]:
    """Return the bound, and {mistake: (the bound that it gives, advice)} of wrong chains and links."""
    both = [call + alone for call, alone in zip(draw.asked, draw.seconds, strict=True)]
    chain = max(both)
    link = draw.asked[0] + sum(draw.seconds)

    def bound(chain: int, link: int) -> int:
        return max(draw.backward, chain, link) + draw.after

    chains = {
        "the transfer alone, without the work before its call": max(draw.seconds),
        "the latest request and the longest transfer are of two calls": max(draw.asked)
        + max(draw.seconds),
        "the chain of the last call, not the longest one": both[-1],
        "the chain of the first call, not the longest one": both[0],
        "the shortest chain, not the longest one": min(both),
        "what follows the wait is counted twice": chain + draw.after,
    }
    links = {
        "the calls alone, without the work before the first one": sum(draw.seconds),
        "the link is busy from its first call on, not from its last": max(draw.asked)
        + sum(draw.seconds),
        "of the work before the calls only that before the first counts": sum(both),
        "the link carries all calls, not only the longest": min(draw.asked) + max(draw.seconds),
    }
    wrong = {name: (bound(its, link), CHAIN_ADVICE) for name, its in chains.items()}
    wrong |= {name: (bound(chain, its), LINK_ADVICE) for name, its in links.items()}
    return bound(chain, link), wrong


def _drawn_bounds(exercise: ModuleType) -> Iterator[Result]:
    """Check the bound of random calls; each of the bounds is the largest in some of them."""
    chance = np.random.default_rng(23)
    kinds = {"quick calls": 3, "slow calls": 40}
    draws = list[tuple[str, Draw]]()
    for kind, longest in kinds.items():
        for _ in range(30):
            asked = np.cumsum(chance.integers(1, 20, 5)).tolist()
            seconds = chance.integers(1, longest + 1, 5).tolist()
            seconds[chance.integers(5)] += int(chance.integers(60))
            backward = int(chance.integers(asked[-1] + 10))
            draws.append((kind, Draw(asked, seconds, backward, int(chance.integers(10)))))
    found = [exercise.shortest_step(*draw) for _, draw in draws]
    keys = [_bound(draw) for _, draw in draws]

    def always(wrong: str) -> bool:
        return found == [mistakes[wrong][0] for _, mistakes in keys]

    for kind in kinds:
        its = [at for at, (one, _) in enumerate(draws) if one == kind]
        at = next((at for at in its if found[at] != keys[at][0]), its[-1])
        draw = draws[at][1]
        right, mistakes = keys[at]
        yield expect(
            f"the bound of {kind} asked for at {draw.asked}, of {draw.seconds}",
            right,
            found[at],
            "a bound that is none",
            BOUND_ADVICE,
            signs={
                wrong: Mistake(partial(always, wrong), why) for wrong, (_, why) in mistakes.items()
            },
        )


def _causes(exercise: ModuleType) -> Iterator[Result]:
    """Check the causes of the wait for one bucket against the library's causes of this wait."""
    cases = {
        "one bucket, a slower rank": (replace(WHOLE, slow=1.5), 0, "slower rank"),
        "one bucket, ranks alike": (WHOLE, 0, "late bucket"),
        "two buckets, over a slow link": (
            replace(STEP, layers=2, late={0: 0.002}, bandwidth=5e8),
            1,
            "link busy",
        ),
    }
    for name, (job, number, cause) in cases.items():
        record = lab.run(job)
        call = record.calls[number]
        wait = next(wait for wait in record.waits[0] if wait.call is call)
        right = {kind: 0.0 for kind in ("slower rank", "link busy", "late bucket")}
        for row in exposed_of(record):
            if row.rank == 0 and row.waited == call.name:
                right[row.cause] = right.get(row.cause, 0.0) + row.seconds
        found = exercise.causes(wait.stop - wait.start, call.ranks[0].asked, call.came, call.begin)
        waited = wait.stop - wait.start
        own = call.ranks[0].asked
        given = {"asked": own, "came": call.came, "begin": call.begin}
        yield expect(
            f"causes of a wait: {name}",
            in_ms(right),
            in_ms(found),
            f"not the share of a {cause}",
            "own request, last request, begin of the transfer: section 2 (holes 7 and 8)",
            known={
                wrong: Mistake(in_ms(_shared(waited, given, *amounts)), why)
                for wrong, (amounts, why) in MISCOUNTED.items()
            },
            show=_shares,
        )


MISCOUNTED = {
    "the queue is counted from this rank's request": (
        (("came", "asked"), ("begin", "asked")),
        "until the last rank has asked, the wait is the slower rank's: count from there (hole 8)",
    ),
    "the queue is counted backwards": (
        (("came", "asked"), ("came", "begin")),
        "the transfer begins after the last request, not before it (hole 8)",
    ),
    "nothing is booked on the link": (
        (("came", "asked"), ("came", "came")),
        "between the last request and the begin of the transfer the call stood in the queue (hole 8)",
    ),
    "the slower rank is counted backwards": (
        (("asked", "came"), ("begin", "came")),
        "the last request comes after this rank's, not before it (hole 7)",
    ),
    "nothing is booked on the slower rank": (
        (("came", "came"), ("begin", "came")),
        "between this rank's request and the last one the others waited (hole 7)",
    ),
    "the slower rank is counted until the transfer begins": (
        (("begin", "asked"), ("begin", "came")),
        "the slower rank holds the call up only until its own request (hole 7)",
    ),
}
"""{mistake: (the two moments of each amount, why)}."""


def _shared(
    waited: float, given: dict[str, float], slow: tuple[str, str], queue: tuple[str, str]
) -> dict[str, float]:
    """Return how a wait divides into its causes with these amounts."""
    slower = min(waited, given[slow[0]] - given[slow[1]])
    busy = min(waited - slower, given[queue[0]] - given[queue[1]])
    return {"slower rank": slower, "link busy": busy, "late bucket": waited - slower - busy}


def _shares(found: dict[str, float]) -> str:
    """Return causes and milliseconds as text for a student."""
    return ", ".join(f"{cause} {amount:.1f} ms" for cause, amount in found.items())


def in_ms(found: dict[str, float]) -> dict[str, float]:
    """Return the amounts in milliseconds, as they are printed."""
    return {cause: round(1e3 * seconds, 3) + 0.0 for cause, seconds in found.items()}


URGENCY_ADVICE = "of the calls that have come, the lowest urgency: section 6 (hole 9)"


def _priorities(exercise: ModuleType) -> Iterator[Result]:
    """Check random calls, then a backward and the next forward against the library's prediction.

    A layer's forward can begin when the layer's gradients have arrived.
    """
    yield _drawn_calls(exercise)
    for bandwidth in (1e9, 5e8, 2.5e8):
        job = replace(STEP, bandwidth=bandwidth)
        right = predict(lab.first_come(job, 4), Change(priority=True))
        found = lab.scheduled(job, 4, priority=True, serve=exercise.soonest_needed_first)
        yield expect(
            f"priorities over {bandwidth / 1e9:g} GB/s",
            f"{1e3 * right:.3f} ms",
            f"{1e3 * found:.3f} ms",
            "not the most urgent call",
            URGENCY_ADVICE,
        )


def _drawn_calls(exercise: ModuleType) -> Result:
    """Check thirty links with five calls each; report the first link that is served wrongly."""
    chance = np.random.default_rng(9)
    calls = [
        (
            chance.integers(0, 12, 5).tolist(),
            chance.integers(1, 9, 5).tolist(),
            chance.permutation(5).tolist(),
        )
        for _ in range(30)
    ]
    served = [exercise.soonest_needed_first(*map(list, each)) for each in calls]
    ends = [served_by(most_urgent, *each) for each in calls]
    at = next((at for at in range(30) if served[at] != ends[at]), 29)
    came, seconds, urgency = calls[at]

    def always(choose: Callable[..., int]) -> bool:
        return served == [served_by(choose, *each) for each in calls]

    return expect(
        f"ends of calls that come at {came}, take {seconds}, urgency {urgency}",
        ends[at],
        served[at],
        "not the most urgent call",
        URGENCY_ADVICE,
        signs={
            wrong: Mistake(partial(always, choose), URGENCY_ADVICE)
            for wrong, choose in CHOSEN_WRONGLY.items()
        },
        picture=lambda: _drawn_link(ends[at], served[at], seconds),
    )


def _drawn_link(right: list[float], yours: Any, seconds: list[int]) -> str:
    """Return both timelines of the link, or "" if the student's ends tell no starts."""
    numbers = isinstance(yours, Sequence) and len(yours) == len(seconds)
    if not numbers or not all(isinstance(end, int | float | np.number) for end in yours):
        return ""
    starts = [end - alone for end, alone in zip(yours, seconds, strict=True)]
    # A NaN fails both comparisons.
    if not all(
        start >= 0 and end <= 2 * max(right) for start, end in zip(starts, yours, strict=True)
    ):
        return ""
    return timelines(_lanes(right, seconds), _lanes(yours, seconds))


def _lanes(ends: Sequence[float], seconds: list[int]) -> list[Lane]:
    """Return the one lane of the link: c2 is call 2."""
    calls = enumerate(zip(ends, seconds, strict=True))
    return [("link", [(f"c{call}", end - alone, end) for call, (end, alone) in calls])]


def served_by(
    choose: Callable[..., int], came: list[float], seconds: list[float], urgency: list[float]
) -> list[float]:
    """Return when each call has ended; a link that is free waits for the first call to come.

    Args:    choose: (calls that have come, calls that are left, came, seconds, urgency) -> the call
             that has the link next.
    """
    ends = [0.0] * len(came)
    left = set(range(len(came)))
    now = 0.0
    while left:
        now = max(now, min(came[call] for call in left))
        there = [call for call in left if came[call] <= now]
        chosen = choose(there, left, came, seconds, urgency)
        now += seconds[chosen]
        ends[chosen] = now
        left.remove(chosen)
    return ends


def most_urgent(
    there: list[int],
    left: set[int],
    came: list[float],
    seconds: list[float],
    urgency: list[float],
) -> int:
    """Return the call with the lowest urgency of those that have come."""
    return min(there, key=urgency.__getitem__)


CHOSEN_WRONGLY: dict[str, Callable[..., int]] = {
    "the call that came first has the link, not the most urgent one": (
        lambda there, left, came, seconds, urgency: min(there, key=came.__getitem__)
    ),
    "a call has the link before it is asked for": (
        lambda there, left, came, seconds, urgency: min(left, key=urgency.__getitem__)
    ),
    "the least urgent call has the link: the lowest number is the most urgent": (
        lambda there, left, came, seconds, urgency: max(there, key=urgency.__getitem__)
    ),
    "the shortest call has the link, not the most urgent one": (
        lambda there, left, came, seconds, urgency: min(there, key=seconds.__getitem__)
    ),
}
"""{mistake: which call the link then serves}."""


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "23", *sys.argv[1:]]))
