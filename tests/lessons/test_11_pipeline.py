"""Exercise 11: filled rightly it passes, and each wrong filling fails under its name; the notes'
chart is what we say."""

import re
from pathlib import Path
from typing import Any

import pytest
from filling import assert_named, graded, right

from minidist import lessons
from minidist.cli.check import show
from minidist.errors import ScheduleError
from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons.page import Page
from minidist.parallel.pipeline.instructions import Backward, Forward
from minidist.parallel.pipeline.schedule_checker import Clock, Times, broken, check_spans, clock_of
from minidist.parallel.pipeline.schedules import make_schedule, of_orders

RIGHT = right("11")
WRONG = {
    "nothing was kept for backward": {1: "pass"},
    "the backward of one microbatch alone": {1: "kept = [(x, y)]"},
    "there is nothing to send to rank 0": {1: "kept.append((inputs, y))"},
    "backward needs the output with its tape": {1: "kept.append((x, y.data))"},
    "keep both, in the order (x, y)": {1: "kept.append((y, x))"},
    "only the last rank's y is a loss": {2: "y.grad"},
    "backward takes an array, not a tensor": {2: "tensor(group.recv(src=group.rank + 1))"},
    "it returned no message": {7: "Forward(stage - 1, microbatch) if stage else None"},
    "stage 0's gradient is 2 times the right one": {2: "2.0 * group.recv(src=group.rank + 1)"},
    "stage 0's gradient is another one": {3: "group.send(x.data, dst=group.rank - 1)"},
    "that tensor has no gradient": {3: "group.send(y.grad, dst=group.rank - 1)"},
    "the ranks wait for each other": {3: "group.recv(src=group.rank - 1)"},
    "that is GPipe: all forwards first": {4: "microbatches"},
    "the other way round": {4: "min(rank, microbatches)"},
    "the one of the first turn is not ahead": {4: "min(ranks - rank, microbatches)"},
    "more than there are microbatches": {4: "ranks - 1 - rank"},
    "[4, 3, 2, 1], target [2, 2, 2, 1]: more than there are": {10: "ranks - rank"},
    "none is ahead": {4: "0"},
    "does the forward of microbatch 0 on stage 0 twice": {
        5: "order.append(Forward(rank, microbatch))"
    },
    "the forward of microbatch 2 on stage 0 is missing": {
        5: "if microbatch + first < microbatches - 1:\n    "
        "order.append(Forward(rank, microbatch + first))"
    },
    "before its input is there": {6: "[Backward(rank, microbatches - 1 - microbatch)]"},
    "the first stage reads the batch": {7: "RecvActivation(stage, microbatch)"},
    "a forward needs the other kind": {7: "RecvGradient(stage, microbatch) if stage else None"},
    "the number of the stage that receives": {
        7: "RecvActivation(stage - 1, microbatch) if stage else None"
    },
    "another microbatch's message": {
        8: "RecvGradient(stage, microbatch + 1) if stage < ranks - 1 else None"
    },
    "it would use what has not come": {
        8: "RecvGradient(stage, microbatch) if stage < ranks - 2 else None"
    },
    "idle time over busy time": {9: "(ranks - 1) / microbatches"},
    "the whole step is shorter": {9: "(ranks - 1) / (microbatches + ranks)"},
    "the share in which a rank computes": {9: "microbatches / (microbatches + ranks - 1)"},
    "that is GPipe, which holds all": {10: "microbatches"},
    "the one in work is held": {10: "min(microbatches, ranks - 1 - rank)"},
    "the last rank holds least": {10: "min(microbatches, rank + 1)"},
    "not what the list holds": {10: "1 + rank * 0 + (ranks > 2) * 7"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("11", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("11", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("11", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_11.py line" in result.results[-1].line()
    )


@pytest.fixture(scope="module")
def lab() -> Any:
    return load_module(lessons.find("11").part("experiments.py"), "11")


@pytest.mark.soak  # tests/parallel/pipeline/test_pipedream.py counts the copies
def test_what_pipedream_keeps_is_what_the_lesson_says(capsys: pytest.CaptureFixture[str]) -> None:
    lesson = load_module(lessons.find("11").part("lesson.py"), "11")
    run(lambda group: lesson.pipedream(group, Page(group)), size=2)
    printed = capsys.readouterr().out
    assert printed.count("ok") == 2 and "off" not in printed


def test_the_notes_chart_breaks_all_its_backward_dependencies(lab: Any) -> None:
    """12 of 12 between stages; drawn it is 22 long with 27 % idle, done in that order 28 with 43
    %."""
    spans = lab.notes_spans()
    pairs = broken(spans)
    assert len(spans) == 32 and len(pairs) == 12
    assert all(
        isinstance(one.instruction, Backward) and other.rank == one.rank + 1 for one, other in pairs
    )
    with pytest.raises(ScheduleError, match="12 dependencies are broken"):
        check_spans(spans)
    drawn = Clock(4, tuple(spans))
    right = clock_of(of_orders("notes", lab.orders_of(spans)), Times(2.0, 2.0))
    assert (drawn.length, round(drawn.bubble, 2), right.length, round(right.bubble, 2)) == (
        22,
        0.27,
        28,
        0.43,
    )


@pytest.mark.parametrize(
    ("stage", "microbatch", "forward", "backward"),
    [(0, 4, 1, 4), (1, 9, 7, 9)],
)
def test_which_weights_a_microbatch_meets_in_pipedream(
    stage: int, microbatch: int, forward: int, backward: int
) -> None:
    """Each backward before it in the stage's list has made an update."""
    order = make_schedule("pipedream", 4, 16).computes(stage)

    def updates_before(instruction: Any) -> int:
        return sum(isinstance(each, Backward) for each in order[: order.index(instruction)])

    found = updates_before(Forward(stage, microbatch)), updates_before(Backward(stage, microbatch))
    assert found == (forward, backward)
    told = (
        "When stage 0 does forward 4, it has done only backward 0: it lacks three updates. Between "
        "a microbatch's forward and its backward a stage does one backward of a microbatch ahead "
        "for each stage after its own."
    )
    story = lessons.find("11").part("README.md").read_text(encoding="utf-8")
    assert told in " ".join(story.split())


def test_a_list_that_holds_too_much_is_drawn_beside_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = "if microbatch + first < microbatches:\n    order.insert(0, Forward(rank, microbatch + first))"
    result = graded("11", {**RIGHT, 5: late}, tmp_path)
    show(result, "Pipeline")
    right, yours = re.findall(r"  stage 0 \|(.*)", capsys.readouterr().out)
    assert right.startswith("F0 |B0 ") and yours.startswith("F2 |F1 |F0 |B0 ")
    assert not any(task.picture for task in result.results[:-1])
