"""Grades exercise 23: paths of steps on a made-up clock, their bounds and causes, and a link with priorities."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from minidist.grading import Result, expect, load_module
from minidist.observe.step_bound import lower_bound, plain_critical_path
from minidist.observe.step_record import StepRecord
from minidist.observe.what_if import Change, predict
from minidist.observe.why import exposed_of

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "23")
STEP = lab.Job()
PATHS = {"a step whose last bucket is waited for": STEP, "a step whose link is too slow": replace(STEP, bandwidth=5e8),
         "a step with a slower rank": replace(STEP, slow=1.5),
         "ZeRO-3 without prefetch": replace(STEP, strategy="zero3", ahead=0, slow=1.1)}
BOUNDS = {"the last bucket is late": STEP, "the link is too slow": replace(STEP, bandwidth=5e8),
          "one bucket in the middle is late": replace(STEP, late={3: 0.030}), "one late bucket at the begin":
          replace(STEP, late={0: 0.070})}
WHOLE = replace(STEP, bucket=STEP.layers * STEP.layer_bytes)

CUT_FROM = (plain_critical_path,)
ANSWERS = {5: "max(call + alone for call, alone in zip(asked, seconds))", 6: "min(asked) + sum(seconds)",
           7: "came - asked", 8: "begin - came",
           9: "min((call for call in left if came[call] <= now), key=lambda call: urgency[call])"}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """The path, hole by hole; then bound, causes and priorities."""
    yield from _paths(exercise)
    yield from _bounds(exercise)
    yield from _causes(exercise)
    yield from _priorities(exercise)


def rounded(path: Any) -> list[tuple[Any, ...]]:
    """The parts of a path in milliseconds; of what two ranks do alike, either may be named."""
    return [(part[0], round(1e3 * part[2], 6), round(1e3 * part[3], 6)) for part in path]


def walked(exercise: ModuleType, record: StepRecord) -> Any:
    """The student's path, given up where it turns in a circle."""
    steps, before = 0, record.before

    class Counted(StepRecord):
        @property
        def begin(self) -> float:
            nonlocal steps
            steps += 1
            if steps > 1000:
                raise RuntimeError("the path never reaches the begin of the step; `now` has to go back in each round")
            return min(start for start, _ in self.windows)

    assert before is not None
    return exercise.plain_critical_path(Counted(record.windows, record.calls, record.waits, record.work))


def _paths(exercise: ModuleType) -> Iterator[Result]:
    advice = {"a step whose last bucket is waited for": ("a path that misses the call", "the rank stood still for a "
              "call that ended after its wait began: section 1 (holes 2 and 3)"),
              "a step whose link is too slow": ("a path that misses the queue", "the last call that was waited for, "
              "then those before it on the link: section 1 (holes 2 and 3)"),
              "a step with a slower rank": ("a path through the wrong rank", "the last rank to end; and a call begins "
              "when its last rank has asked for it: section 1 (holes 1 and 4)"),
              "ZeRO-3 without prefetch": ("a path with gaps", "each part ends where the next one begins: section 1")}
    for name, job in PATHS.items():
        record = lab.run(job)
        yield expect(name, rounded(plain_critical_path(record)), rounded(walked(exercise, record)), *advice[name])


def _bounds(exercise: ModuleType) -> Iterator[Result]:
    for name, job in BOUNDS.items():
        record = lab.run(job)
        asked = [call.came for call in record.calls]
        found = exercise.shortest_step(asked, [call.alone for call in record.calls], record.waits[0][0].start,
                                       job.update)
        yield expect(f"the bound: {name}", f"{1e3 * lower_bound(record):.3f} ms", f"{1e3 * float(found):.3f} ms",
                     "a bound that is none", "the longest chain, or all transfers behind the first moment: section 1 "
                     "(holes 5 and 6)")


def _causes(exercise: ModuleType) -> Iterator[Result]:
    """Of the wait for one bucket: the library's causes of the same wait."""
    cases = {"one bucket, a slower rank": (replace(WHOLE, slow=1.5), 0, "slower rank"),
             "one bucket, ranks alike": (WHOLE, 0, "late bucket"),
             "two buckets, the first one large": (replace(STEP, layers=2, bucket=4_000_000, late={0: 0.002},
                                                          bandwidth=5e8), 1, "link busy")}
    for name, (job, number, cause) in cases.items():
        record = lab.run(job)
        call = record.calls[number]
        wait = next(wait for wait in record.waits[0] if wait.call is call)
        right = {kind: 0.0 for kind in ("slower rank", "link busy", "late bucket")}
        for row in exposed_of(record):
            if row.rank == 0 and row.waited == call.name:
                right[row.cause] = right.get(row.cause, 0.0) + row.seconds
        found = exercise.causes(wait.stop - wait.start, call.ranks[0].asked, call.came, call.begin)
        yield expect(f"causes of a wait: {name}", in_ms(right), in_ms(found), f"not the share of a {cause}",
                     "own request, last request, begin of the transfer: section 2 (holes 7 and 8)")


def in_ms(found: dict[str, float]) -> dict[str, float]:
    """Milliseconds, as they are printed."""
    return {cause: round(1e3 * seconds, 3) + 0.0 for cause, seconds in found.items()}


def _priorities(exercise: ModuleType) -> Iterator[Result]:
    """Backward and the next forward, which each layer's gradients let begin; the library predicts the same."""
    for bandwidth in (1e9, 5e8, 2.5e8):
        job = replace(STEP, bandwidth=bandwidth)
        right = predict(lab.first_come(job, 4), Change(priority=True))
        found = lab.scheduled(job, 4, priority=True, serve=exercise.soonest_needed_first)
        yield expect(f"priorities over {bandwidth / 1e9:g} GB/s", f"{1e3 * right:.3f} ms", f"{1e3 * found:.3f} ms",
                     "not the most urgent call", "of the calls that have come, the lowest urgency: section 6 (hole 9)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "23", *sys.argv[1:]]))
