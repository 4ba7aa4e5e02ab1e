"""Exercise 17: filled rightly it passes, and each wrong filling fails under its name; the lesson's
formulas hold."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.grading import load_module
from minidist.lessons.lab import state_difference

RIGHT = right("17")
WRONG = {
    "the same number is divided for every axis": {2: "rank"},
    "a place beyond the axis": {1: "rank // shape[axis]", 2: "rank % shape[axis]"},
    "those that agree on the axis": {3: "coordinates(other, shape)[axis] == mine[axis]"},
    "all ranks": {3: "True"},
    "not itself": {
        3: "other != rank and all(coordinates(other, shape)[n] == mine[n] for n in shape if n "
        "!= axis)"
    },
    "shards of one layer see different tokens": {
        4: "dp.size * tp.size",
        5: "dp.rank * tp.size + tp.rank",
    },
    "dp times too large": {4: "1", 5: "0"},
    "your code raised": {5: "dp.size"},
    "all replicas read the same rows": {5: "0"},
    "no rank reads the last": {4: "dp.size + 1"},
    "the stages see different tokens": {
        4: "dp.size * pp.size",
        5: "dp.rank * pp.size + pp.rank",
    },
    "a mean of partial sums": {6: "tp.all_reduce(inner @ down) / tp.size"},
    "added up over the replicas": {6: "dp.all_reduce(inner @ down)"},
    "hidden numbers are added up before": {6: "tp.all_reduce(inner) @ down"},
    "the output has the wrong sign": {6: "-tp.all_reduce(inner @ down)"},
    "a mean of the input's gradients": {7: "tp.all_reduce(dinner @ up.T) / tp.size"},
    "gradient is added up over the replicas": {7: "dp.all_reduce(dinner @ up.T)"},
    "hidden gradients are added up before": {7: "tp.all_reduce(dinner) @ up.T"},
    "the weights did not change": {8: "weights = weights - lr * dp.all_reduce(gradient)"},
    "uphill": {8: "weights += lr * dp.all_reduce(gradient)"},
    "the learning rate is missing": {8: "weights -= dp.all_reduce(gradient)"},
    "the sum is multiplied": {8: "weights -= lr * dp.size * dp.all_reduce(gradient)"},
    "partial sums are not added up": {6: "inner @ down"},
    "f forgotten": {7: "dinner @ up.T"},
    "a mean": {8: "weights -= lr * dp.all_reduce(gradient) / dp.size"},
    "nothing was added up": {8: "weights -= lr * gradient"},
    "alike counts several times": {9: "sum(float((grad ** 2).sum()) for grad in whole)"},
    "hold alike is missing": {9: "0.0"},
    "each number counts dp times": {10: 'mesh["dp", "pp", "tp"].all_reduce(np.array([squares]))'},
    "tp ranks hold alike is missing": {
        9: "sum(float((g ** 2).sum()) for g in whole) if mesh['tp'].rank == 1 else 0.0"
    },
    "only this rank's part": {10: "np.array([squares])"},
    "the parts of the other ranks of tp": {10: 'mesh["pp"].all_reduce(np.array([squares]))'},
    "and replicas count again": {10: 'mesh["dp", "tp"].all_reduce(np.array([squares]))'},
    "the other stages are missing": {10: 'mesh["tp"].all_reduce(np.array([squares]))'},
    "the other way round": {11: "sorted(sent, key=sent.get, reverse=True)"},
    "as they stood": {11: "list(sent)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("17", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("17", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("17", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_17.py line" in result.results[-1].line()
    )


@pytest.fixture(scope="module")
def lab() -> Any:
    return load_module(lessons.find("17").part("experiments.py"), "17")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dp": 3, "pp": 1, "tp": 2}, {}),
        ({"dp": 2, "pp": 2, "tp": 2}, {"zero": 1}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_what_each_axis_sends_is_the_formula(
    lab: Any, shape: dict[str, int], options: dict[str, Any]
) -> None:
    """Under six ranks, that halve nothing evenly, and eight."""
    plan = lab.plan_of(shape, **options)
    result = md.run(lambda world: lab.train(world, plan, steps=1), size=plan.size)[0]
    assert result["sent"] == lab.formula(plan)


@pytest.mark.soak
def test_the_same_with_experts_divided(lab: Any) -> None:
    """Equal to one process, and each axis as the formula has it: experts are added up over dp, the
    rest over ep too."""
    (alone,) = md.run(lambda world: lab.train(world, md.Plan(), steps=1, config=lab.MIXED), size=1)
    *_, plan = lab.expert_plans(8)
    result = md.run(lambda world: lab.train(world, plan, steps=1, config=lab.MIXED), size=8)[0]
    assert result["rows"] and state_difference(result["weights"], alone["weights"]) < 1e-10
    assert result["sent"] == lab.formula(plan, lab.MIXED, rows=result["rows"])


def test_the_axis_that_is_inside_a_machine_sends_nothing_between_machines(lab: Any) -> None:
    shape = {"dp": 2, "pp": 1, "tp": 2}
    traffic = lab.formula(lab.plan_of(shape))
    for order, crossing in ((("dp", "tp"), "dp"), (("tp", "dp"), "tp")):
        (crossed,) = md.run(
            lambda world, order=order: lab.crossing(world, shape, order, (2,)), size=4
        )[0]
        assert {axis: nbytes for axis, nbytes in crossed.items() if nbytes} == {
            crossing: traffic[crossing]
        }


def test_the_notes_two_groups_are_the_storys_tables() -> None:
    """N0:447 and N0:466, from a recorded step on four of five ranks."""
    lesson = load_module(lessons.find("17").part("lesson.py"), "17")
    told = lessons.find("17").part("README.md").read_text()
    rows = list[Any]()

    def run(group: Any) -> None:
        lesson.two_groups(
            group,
            SimpleNamespace(
                table=lambda title, heads, found, note="": (
                    None if group.rank else rows.extend(found)
                )
            ),
        )

    md.run(run, size=5)
    assert len(rows) == 6 and [row[-1] for row in rows[4:]] == ["ok", "ok"]
    for row in [*rows[:4], *(row[:4] for row in rows[4:])]:
        assert "| " + " | ".join(row) + " |" in told


def test_numbers_behind_the_table_of_activations_are_the_tables() -> None:
    story = lessons.find("17").part("README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\S+) \| [\d.]+ KiB \| ([\d.]+) KiB \|", story, re.MULTILINE))
    said = re.search(r"(\S+) holds (\d+) KiB where (\S+) holds (\d+)", story)
    assert said is not None
    for plan, number in ((said[1], said[2]), (said[3], said[4])):
        assert round(float(rows[plan])) == int(number), plan
