"""Assignment 2: 1F1B with a twist that is drawn.

Drawn: the stages, the microbatches, the seconds of a forward and of a backward of each stage, what
a stage keeps of a microbatch, and the twist: a rank with little memory, more forwards ahead, or
microbatches in pairs. The lists are proved and timed by schedule_checker.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isclose
from string import Template
from types import ModuleType
from typing import Any

from minidist.errors import ScheduleError
from minidist.grading import Result, Tasks, expect, judge
from minidist.lessons.assignments.draws import StudentDraw
from minidist.parallel.pipeline.instructions import Backward, Forward, Instruction, Schedule
from minidist.parallel.pipeline.schedule_checker import Times, check, clock_of, peak_held
from minidist.parallel.pipeline.schedules import of_orders

TITLE = "1F1B with a twist of your own"
TWISTS = ("little memory", "more ahead", "in pairs")


@dataclass(frozen=True)
class DrawnPipeline:
    """One student's pipeline.

    Attributes: forward, backward: seconds per microbatch of each stage; kept: bytes that a stage
                keeps of a microbatch from its forward to its backward; microbatches: an even
                number; twist: one of TWISTS; place, limit: with "little memory", the rank and how
                many microbatches it may hold; more: with "more ahead", how many forwards more.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept: tuple[int, ...]
    microbatches: int
    twist: str
    place: int
    limit: int
    more: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks; each has one stage."""
        return len(self.forward)

    @property
    def times(self) -> "StageTimes":
        """Return the seconds of each compute."""
        return StageTimes(forwards=self.forward, backwards=self.backward)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the numbers of microbatches for which the functions are graded."""
        return self.microbatches, 2, self.microbatches + 4

    def ahead(self, rank: int, microbatches: int) -> int:
        """Return how many forwards a rank does before its first turn of forward and backward."""
        after = self.ranks - 1 - rank  # as 1F1B has it
        if self.twist == "more ahead":
            after += self.more
        elif self.twist == "in pairs":
            after *= 2
        elif rank >= self.place:
            after = min(after, self.limit - 1)  # a later rank gets no more before it gives one back
        return min(after, microbatches)


@dataclass(frozen=True)
class StageTimes(Times):
    """Seconds of stages each of which has its own. Attributes: forwards, backwards: by stage."""

    forwards: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()

    def of(self, instruction: Instruction) -> float:
        """Return the seconds of a forward or a backward."""
        own = self.forwards if isinstance(instruction, Forward) else self.backwards
        return float(own[instruction.stage])


def drawn(draw: StudentDraw) -> DrawnPipeline:
    """Return a student's pipeline."""
    ranks = draw.between(4, 6)
    place = draw.below(ranks - 2)
    return DrawnPipeline(
        tuple(draw.between(1, 5) for _ in range(ranks)),
        tuple(draw.between(2, 9) for _ in range(ranks)),
        tuple(32 * draw.between(2, 20) << 20 for _ in range(ranks)),
        2 * draw.between(4, 7),
        draw.choice(TWISTS),
        place,
        draw.between(2, ranks - place - 1),  # fewer than 1F1B holds there
        draw.between(1, 2),
    )


TEXTS = {
    "task": """\
Assignment 2 of @STUDENT@: 1F1B with a twist of your own.

A pipeline of $ranks stages, one per rank, as in lesson 11. Per microbatch:

    stage   forward   backward   kept for the backward
$table

The schedule is 1F1B with one change:

$twist

A step has $microbatches microbatches. Your functions are also called with other even numbers of
them, also with fewer than there are stages. Messages take no time.

Replace each `hole(...)` by your own code; write more functions if you need them, and call your own
functions where they help. Each hole is graded alone.
""",
    "little memory": """\
    Rank $place has little memory: it holds the activations of at most $limit microbatches.
    All ranks still do as many forwards ahead as 1F1B has, where the memory of rank $place and an end
    without a deadlock allow it.""",
    "more ahead": """\
    Every rank does $more more forwards ahead than 1F1B has, if there are as many microbatches.""",
    "in pairs": """\
    Microbatches go in pairs: two forwards, then two backwards, wherever 1F1B does one and one.
    Rank r does two forwards ahead for each stage after its own.""",
}
"""The texts that a student reads. texts.zh.toml has them in Chinese."""

CODE = Template('''\

from minidist.grading import hole
from minidist.parallel.pipeline.instructions import Backward, Forward  # noqa: F401 - for hole 2


def ahead(rank, microbatches):
    """Return how many forwards `rank` does before its first turn of forward and backward$turn."""
    return hole(1, "how many forwards are ahead on a rank?", rank, microbatches)


def order(rank, microbatches):
    """Return the work of `rank` in order: a list of Forward(stage, microbatch) and
    Backward(stage, microbatch)."""
    return hole(2, "the order of a rank's work", rank, microbatches)


def peak_bytes(rank, microbatches):
    """Return the most bytes of activations that `rank` keeps at once. 1 MiB is 1 << 20 bytes."""
    return hole(3, "how many bytes of activations does a rank keep at its peak?", rank, microbatches)


def seconds(microbatches):
    """Return how long a step takes, from the first forward to the last backward."""
    return hole(4, "how long does a step take, if each rank continues as soon as it can?")


def bubble(microbatches):
    """Return the share of all ranks' time in which they are idle during a step."""
    return hole(5, "which share of the ranks' time is idle?", microbatches)
''')


def task_file(drawn: DrawnPipeline, texts: Mapping[str, str] = TEXTS) -> str:
    """Return the student's Python file with holes. Args: texts: TEXTS, or its Chinese."""
    rows = [
        f"    {stage:5} {forward:7} s {backward:8} s {kept >> 20:8} MiB"
        for stage, (forward, backward, kept) in enumerate(
            zip(drawn.forward, drawn.backward, drawn.kept, strict=True)
        )
    ]
    numbers = {"place": drawn.place, "limit": drawn.limit, "more": drawn.more}
    told = Template(texts["task"]).substitute(
        ranks=drawn.ranks,
        table="\n".join(rows),
        twist=Template(texts[drawn.twist]).substitute(numbers),
        microbatches=drawn.microbatches,
    )
    turn = " (two each)" if drawn.twist == "in pairs" else ""
    return f'"""{told}"""\n' + CODE.substitute(turn=turn)


def tasks(drawn: DrawnPipeline) -> dict[int, Tasks]:
    """Return what grades each hole."""
    return {
        1: lambda answer: _ahead(drawn, answer),
        2: lambda answer: _order(drawn, answer),
        3: lambda answer: _peak(drawn, answer),
        4: lambda answer: _seconds(drawn, answer),
        5: lambda answer: _bubble(drawn, answer),
    }


def right_schedule(drawn: DrawnPipeline, microbatches: int) -> Schedule:
    """Return the schedule of the task, proved: what the targets are computed from."""
    width = 2 if drawn.twist == "in pairs" else 1
    orders: list[list[Instruction]] = []
    for rank in range(drawn.ranks):
        forwards = [Forward(rank, number) for number in range(microbatches)]
        backwards = [Backward(rank, number) for number in range(microbatches)]
        ahead = drawn.ahead(rank, microbatches)
        order: list[Instruction] = [*forwards[:ahead]]
        for turn in range(0, microbatches, width):
            order += forwards[ahead + turn : ahead + turn + width]
            order += backwards[turn : turn + width]
        orders.append(order)
    return check(of_orders("the task's schedule", orders))


def _ahead(drawn: DrawnPipeline, answer: ModuleType) -> Iterator[Result]:
    ranks = range(drawn.ranks)
    for microbatches in drawn.counts:
        yield expect(
            f"forwards ahead on each rank, {microbatches} microbatches",
            [drawn.ahead(rank, microbatches) for rank in ranks],
            [answer.ahead(rank, microbatches) for rank in ranks],
            "other numbers",
            "1F1B has one for each stage after this one, and no more than there are microbatches; "
            "then the twist",
            known={
                "that is 1F1B without the twist": [
                    min(drawn.ranks - 1 - rank, microbatches) for rank in ranks
                ],
            },
        )


def _order(drawn: DrawnPipeline, answer: ModuleType) -> Iterator[Result]:
    for microbatches in drawn.counts:
        what = f"{microbatches} microbatches"
        right = right_schedule(drawn, microbatches)
        most = 4 * microbatches  # of a list that may never end
        orders = [[*islice(answer.order(rank, microbatches), most)] for rank in range(drawn.ranks)]
        strange = [one for order in orders for one in order if type(one) not in (Forward, Backward)]
        if strange:
            yield judge(
                f"your lists, {what}",
                False,
                "Forward and Backward",
                f"{strange[0]!r:.40}",
                "no instruction",
                "a list has Forward(stage, microbatch) and Backward(stage, microbatch)",
            )
        mine = Schedule("your list", drawn.ranks, microbatches, 1, of_orders("", orders).lists)
        try:
            check(mine)
            mistake = ""
        except ScheduleError as error:
            mistake = str(error)
        yield judge(
            f"your lists, {what}",
            not mistake,
            "proved",
            "refused" if mistake else "proved",
            mistake,
            "each microbatch once forward and once backward, nothing before its input",
        )
        yield expect(
            f"microbatches held, {what}",
            peak_held(right),
            peak_held(mine),
            "another schedule",
            "as many forwards ahead as hole 1 says, then the turns",
        )
        yield expect(
            f"seconds of a step, {what}",
            clock_of(right, drawn.times).length,
            clock_of(mine, drawn.times).length,
            "another schedule",
            "forwards and backwards in turn, each in the order of the microbatches",
        )
        changed = [rank for rank in range(drawn.ranks) if orders[rank] != right.computes(rank)]
        yield judge(
            f"order of each rank's work, {what}",
            not changed,
            "the schedule of the text",
            f"another on rank {changed[0]}" if changed else "the schedule of the text",
            "another schedule",
            "forwards ahead, then a forward and a backward in turn, then the backwards that are left",
        )


def _peak(drawn: DrawnPipeline, answer: ModuleType) -> Iterator[Result]:
    for microbatches in drawn.counts:
        held = peak_held(right_schedule(drawn, microbatches))
        yield expect(
            f"bytes kept at the peak of each rank, {microbatches} microbatches",
            [count * kept for count, kept in zip(held, drawn.kept, strict=True)],
            [answer.peak_bytes(rank, microbatches) for rank in range(drawn.ranks)],
            "other bytes",
            "the forwards ahead and the turn that runs, each with the bytes of this stage",
        )


def _seconds(drawn: DrawnPipeline, answer: ModuleType) -> Iterator[Result]:
    for microbatches in drawn.counts:
        yield expect(
            f"seconds of a step, {microbatches} microbatches",
            clock_of(right_schedule(drawn, microbatches), drawn.times).length,
            answer.seconds(microbatches),
            "another time",
            "a compute begins when its rank is free and its input is there",
            known={
                "that is the slowest stage alone": max(
                    map(sum, zip(drawn.forward, drawn.backward, strict=True))
                )
                * microbatches
            },
            same=partial(isclose, rel_tol=1e-6),
            show=_number,
        )


def _bubble(drawn: DrawnPipeline, answer: ModuleType) -> Iterator[Result]:
    for microbatches in drawn.counts:
        yield expect(
            f"bubble, {microbatches} microbatches",
            clock_of(right_schedule(drawn, microbatches), drawn.times).bubble,
            answer.bubble(microbatches),
            "another share",
            "idle time of all ranks over the time of all ranks",
            known={
                "that is the formula of equal stages": (drawn.ranks - 1)
                / (microbatches + drawn.ranks - 1)
            },
            same=partial(isclose, abs_tol=1e-4),
            show=_number,
        )


def _number(value: Any) -> str:
    return f"{value:.6g}"
