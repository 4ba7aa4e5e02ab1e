"""Exercise 02: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, fill, graded, right

import minidist as md
from minidist.comm.cost import critical_path, volume
from minidist.comm.cost.link_model import LinkCost
from minidist.grading import grade, load_module
from minidist.lessons import find

STORY = find("02").part("README.md").read_text(encoding="utf-8")
RIGHT = right("02")
WRONG = {
    "root ignored": {1: "group.rank", 3: "place + distance", 4: "place - distance"},
    "the root is told": {2: "True"},
    "waits for a rank that never sends": {4: "root"},
    "a partner is left out": {
        5: "(group.rank + 1) % group.size",
        6: "(group.rank - 1) % group.size",
    },
    "sends to the rank it hears from": {6: "(group.rank + step) % group.size"},
    "partners do not match": {6: "(group.rank - 1) % group.size"},
    "the loop never ends": {7: "True"},
    "never ends: all ranks must leave": {8: "distance"},
    "waits for a rank that never sends: the array goes": {2: "place + distance < group.size - 1"},
    "sends to the rank it hears from: a rank sends": {5: "(group.rank - step) % group.size"},
    "left too early": {7: "distance < group.size // 2"},
    "more steps than needed": {8: "distance + 1"},
    "ranks take different numbers of steps": {7: "distance < group.size - group.rank"},
    "as many steps as ranks": {9: "2 * (size - 1) * (alpha + nbytes * beta)"},
    "half of the way": {9: "levels * (alpha + nbytes * beta)"},
    "whole tensors round the ring": {10: "2 * (size - 1) * (alpha + nbytes * beta)"},
}


def test_what_pairwise_and_bruck_wait_for_on_64_ranks() -> None:
    """What the fold on more algorithms says, by the formulas that lesson and ledgers are compared
    with."""
    pairwise, bruck = (volume.FORMULAS["all_to_all", way] for way in ("pairwise", "bruck"))
    assert (pairwise.steps, bruck.steps) == ("1", "ceil(log2 P)")
    told = " ".join(STORY[STORY.index("*bruck* is an all_to_all") :].split())
    assert "With 64 ranks a rank sends 6 messages instead of pairwise's 63." in told
    assert "the library's pairwise waits one α, and bruck 6." in told


def test_the_last_table_is_exact_on_its_clock() -> None:
    """Its seconds are those of the α–β model, whatever the machine is doing; and so are its
    winners."""
    lesson = load_module(find("02").part("lesson.py"), "02")
    link = LinkCost("link", 2, lesson.SMALL_LINK["alpha"], 0.0, lesson.SMALL_LINK["beta"], 0.0, 0.0)
    names = ("naive", "tree", "ring", "direct", "pairwise", "doubling", "halving-doubling")
    for nbytes, best in ((512, "direct"), (32768, "direct"), (524288, "pairwise")):
        clock = {name: lesson.on_the_clock(4, name, nbytes, **lesson.SMALL_LINK) for name in names}
        told = {
            name: link.seconds(critical_path.PATHS["all_reduce", name](4).work(nbytes))
            for name in names
        }
        assert clock == pytest.approx(told, rel=1e-9) and min(clock, key=clock.__getitem__) == best


def test_the_letters_of_the_costs_are_told_before_they_are_used() -> None:
    told = STORY.index("Letters, here and in all lessons: **P** ranks")
    assert [
        use for use in ("`(P-1) n`", "waits one α", "α–β model") if STORY.index(use) < told
    ] == []


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("02", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize(
    ("right_line", "wrong_line", "said"),
    [
        (
            "    received = list(parts)",
            "    parts = [np.asarray(part, float) for part in parts]\n    received = list(parts)",
            "part 0: returned dtype float64, expected int8",
        ),
        (
            "    return x\n",
            "    return np.array(x, np.float64)\n",
            "rank 0: returned dtype float64, expected int8",
        ),
    ],
)
def test_a_filling_for_floats_only_fails(
    right_line: str, wrong_line: str, said: str, tmp_path: Path
) -> None:
    lesson = find("02")
    source = fill(lesson.part("exercise.py").read_text(encoding="utf-8"), RIGHT)
    assert right_line in source
    file = tmp_path / "exercise_02.py"
    file.write_text(source.replace(right_line, wrong_line, 1), encoding="utf-8")
    result = grade("02", lesson.part("check.py"), file)
    assert not result.passed
    line = result.results[-1].line()
    assert "not for every array" in line and said in line


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("02", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("02", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_02.py line" in result.results[-1].line()
    )


def test_figure_and_tables_have_one_clock() -> None:
    """The last arrow of each all-reduce ends when table 4's clock says; n is all that a rank
    brings."""
    lesson = load_module(find("02").part("lesson.py"), "02")
    panels = md.run(lesson.record_family, size=4)[0]
    for panel in panels:
        if panel["verb"] == "all_reduce":
            last = max(message["stop"] for message in panel["messages"])
            assert last == pytest.approx(
                lesson.on_the_clock(4, panel["algorithm"], 8000, alpha=1.0, beta=0.0)
            )
    (pairwise,) = [
        panel["messages"]
        for panel in panels
        if (panel["verb"], panel["algorithm"]) == ("all_to_all", "pairwise")
    ]
    assert [message["part"] for message in pairwise] == 12 * [0.25]
