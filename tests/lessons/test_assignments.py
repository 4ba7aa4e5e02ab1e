"""The assignments: a right answer of each student passes, a wrong one is named, and no other
student's answer nor the repository's own code fits."""

import ast
import inspect
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from assigned import RIGHT
from filling import fill

from minidist import holes
from minidist.cli import main
from minidist.errors import ConfigError
from minidist.lessons import assignments
from minidist.lessons.assignments import assignment, pipeline, planning, ring
from minidist.lessons.assignments.draws import StudentDraw
from minidist.lessons.phrases import said
from minidist.parallel.pipeline.schedules import one_f_one_b
from minidist.reading import read_toml

STUDENTS = ("anna", "ben", "student 17")
WRONG = {
    1: {
        1: ("(rank + 1) % 5", "hole 1: the next rank"),
        2: ("(rank - step - 1) % 5", "wrong chunk"),
        3: ("(rank - step) % 5", "leftover"),
        4: ("np.array_split(x, 5)", "equal chunks"),
        5: ("x + 0", "messages of rank 0"),
        6: ("16 * n", "other bytes"),
    },
    2: {
        1: ("0", "other numbers"),
        2: ("[Forward(rank, n) for n in range(microbatches)]", "never does"),
        3: ("1 << 20", "other bytes"),
        4: ("1.0", "another time"),
        5: ("0.5", "another share"),
    },
    3: {
        1: ("{'dp': 16, 'pp': 1, 'tp': 1, 'zero': 1, 'rows': 1}", "hole 1:"),
        2: ("10 ** 9", "another number"),
        3: ("2 ** 30", "other bytes"),
        4: ("0.001", "another time"),
    },
}
"""{assignment: {hole: (a wrong answer, what is said of it)}}."""


@cache
def drawn(number: int, student: str, course: str = "") -> Any:
    module: Any = assignments.MODULES[number]
    return module.drawn(StudentDraw(f"assignment {number}", course, student))


def right(number: int, student: str) -> dict[int, str]:
    """The right code of each hole: an expression is returned, as the hole is."""
    return RIGHT[number](drawn(number, student))


def filled(number: int, student: str, answers: dict[int, str]) -> str:
    """A student's file with these answers."""
    return filled_text(assignment(number, student=student).task_file, answers)


def filled_text(text: str, answers: dict[int, str]) -> str:
    """A file with these answers; statements take the place of the whole `return`."""
    expressions = {hole: code for hole, code in answers.items() if "return" not in code}
    statements = {hole: code for hole, code in answers.items() if "return" in code}
    for hole in statements:
        text = text.replace(f"return hole({hole},", f"hole({hole},")
    return fill(text, answers if statements else expressions)


def results(number: int, student: str, text: str, folder: Path, *words: str) -> Any:
    """Grade a text by the command; its status, and the results file by hole."""
    folder.mkdir(exist_ok=True)
    file = folder / "answer.py"
    file.write_text(text, encoding="utf-8")
    marks = folder / "results.json"
    command = ["assignment", str(number), str(file), "--student", student]
    status = main([*command, "--gradescope", str(marks), *words])
    return status, json.loads(marks.read_text(encoding="utf-8"))


def by_hole(marks: Any) -> dict[int, float]:
    return {int(test["number"]): test["score"] for test in marks["tests"]}


# ------------------------------------------------------------------------------------------ draws


def test_a_draw_is_the_same_on_every_machine() -> None:
    """These numbers may never change: students have them in their files."""
    draw = StudentDraw("assignment 1", "autumn", "anna")
    assert [draw.below(1000) for _ in range(4)] == [52, 71, 345, 703]
    assert draw.shuffled(range(6)) == [1, 2, 4, 0, 3, 5]
    assert drawn(1, "anna") == ring.DrawnRing(
        (3, 4, 2, 1, 0), False, (1, 2, 0, 3, 4), (2, 2, 1, 1, 3), "maximum"
    )


def test_a_draw_differs_by_each_word() -> None:
    words = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("a", "b", "d"), ("b", "a", "c")]
    firsts = {StudentDraw(*each).below(1 << 100) for each in words}
    assert len(firsts) == len(words)


def test_a_draw_does_not_read_the_random_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    before = drawn(2, "anna")
    random.seed(3)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert drawn(2, "anna") == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_students_and_courses_have_other_tasks(number: int) -> None:
    tasks = {drawn(number, f"student {count}") for count in range(60)}
    assert len(tasks) > 45
    assert drawn(number, "anna", "autumn") != drawn(number, "anna", "spring")
    text = assignment(number, student="anna").task_file
    assert text == assignment(number, student="anna").task_file and "anna" in text


def test_every_draw_is_a_task_that_can_be_solved() -> None:
    for count in range(40):
        own: ring.DrawnRing = drawn(1, str(count))
        assert sorted(own.circle) == sorted(own.owned) == [*range(own.size)]
        assert any(own.next_of(rank) != (rank + 1) % own.size for rank in range(own.size))
        line: pipeline.DrawnPipeline = drawn(2, str(count))
        for microbatches in line.counts:
            twisted = pipeline.right_schedule(line, microbatches)  # proved
            plain = [[*one_f_one_b(rank, line.ranks, microbatches)] for rank in range(line.ranks)]
            if microbatches == line.microbatches:
                assert plain != [twisted.computes(rank) for rank in range(line.ranks)]
    assert {drawn(2, str(count)).twist for count in range(40)} == {*pipeline.TWISTS}


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("count", range(24))
def test_every_cluster_has_a_plan_and_none_of_data_ranks_alone(count: int) -> None:
    task: planning.PlanningTask = drawn(3, f"student {count}")
    assert task.fits[task.best] and task.limit < 80
    rows = task.plans.candidates
    alone = (rows.column("pp") == 1) & (rows.column("tp") == 1)
    assert alone.any() and not (task.fits & alone).any()
    assert task.plans.step_seconds[alone].min() < task.plans.step_seconds[task.best]


# ---------------------------------------------------------------------------------------- grading


@pytest.mark.sampled
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("student", STUDENTS)
def test_a_right_answer_passes(number: int, student: str, tmp_path: Path) -> None:
    text = filled(number, student, right(number, student))
    status, marks = results(number, student, text, tmp_path, "--points", "2.5")
    assert {*by_hole(marks).values()} == {2.5}, marks
    assert status == 0 and marks["extra_data"] == {"part": f"assignment {number}"}


@pytest.mark.parametrize(
    "number,hole,other,right_ones", [(1, 3, 6, {1, 2, 4}), (2, 3, 5, {1, 2, 4})]
)
def test_wrong_and_open_holes_are_marked_one_by_one(
    number: int, hole: int, other: int, right_ones: set[int], tmp_path: Path
) -> None:
    """`hole` is wrong, `other` is open; a hole that calls a wrong one may be wrong too."""
    code, words = WRONG[number][hole]
    answers = {**right(number, "anna"), hole: code}
    del answers[other]
    status, marks = results(number, "anna", filled(number, "anna", answers), tmp_path)
    said = {int(test["number"]): test["output"] for test in marks["tests"]}
    assert status == 1 and {one for one, score in by_hole(marks).items() if score} == right_ones
    assert words in said[hole] and said[hole].startswith(f"hole {hole}: "), said[hole]
    assert said[other] == "not filled yet" and marks["output"] == said[hole]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_wrong_answer_is_named(number: int) -> None:
    """The tasks of each hole, in this process."""
    for hole, (code, words) in WRONG[number].items():
        answers = {**right(number, "anna"), hole: code}
        module = ModuleType("answer")
        exec(filled(number, "anna", answers), module.__dict__)
        lines = [
            result.line()
            for result in first_failed(
                assignments.MODULES[number].tasks(drawn(number, "anna"))[hole], module
            )
        ]
        assert lines and (words in lines[0] or words.startswith("hole")), (hole, lines)


def test_a_ring_in_the_other_direction_is_seen_though_its_numbers_are_right() -> None:
    own = drawn(1, "anna")
    mirrored = RIGHT[1](replace(own, forward=not own.forward))
    module = ModuleType("answer")
    exec(filled(1, "anna", mirrored), module.__dict__)
    found = first_failed(assignment(1, student="anna").tasks[5], module)
    assert [result.mistake for result in found] == ["not this ring"], found


def test_a_slow_plan_and_one_that_does_not_fit_are_told_apart() -> None:
    task: planning.PlanningTask = drawn(3, "anna")
    seconds = task.plans.step_seconds
    slow = max(np.flatnonzero(task.fits), key=lambda row: seconds[row])
    large = int(np.argmax(task.plans.total))
    for row, mistake in ((slow, "there are faster plans"), (large, "it does not fit")):
        found = planned(task, int(row))
        assert [result.mistake for result in found] == [mistake], found
    near = 1.04 * float(seconds[task.best])
    assert all(planned(task, row) == [] for row in np.flatnonzero(task.fits & (seconds <= near)))


def planned(task: planning.PlanningTask, row: int) -> list[Any]:
    """What is wrong with a plan of the table."""
    numbers = task.plans.candidates.rows(*planning.CHOSEN)[row].tolist()
    module = ModuleType("answer")
    module.plan = lambda: dict(zip(planning.CHOSEN, numbers, strict=True))  # type: ignore[attr-defined]
    return first_failed(planning.tasks(task)[1], module)


def first_failed(tasks: Any, module: ModuleType) -> list[Any]:
    from minidist.grading import TaskFailed

    try:
        for result in tasks(module):
            if not result.passed:
                return [result]
    except TaskFailed as failed:
        return [failed.result]
    except Exception as error:  # as the grader takes it: a hole that raises is wrong
        return [error]
    return []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_answer_of_another_student_fails(number: int) -> None:
    module = ModuleType("answer")
    exec(filled(number, "ben", right(number, "ben")), module.__dict__)
    tasks = assignments.MODULES[number].tasks(drawn(number, "anna"))
    right_ones = [hole for hole, of_hole in tasks.items() if not first_failed(of_hole, module)]
    # a plan of another cluster may happen to be fast
    assert len(right_ones) <= (1 if number == 3 else 0), right_ones


def test_the_repositorys_ring_fails(tmp_path: Path) -> None:
    from minidist.comm.collectives.ring import (
        plain_all_gather,
        plain_all_reduce,
        plain_reduce_scatter,
    )

    size = drawn(1, "anna").size
    answers = {
        1: f"(rank + 1) % {size}",
        2: f"(rank - step - 1) % {size}",
        3: f"(rank - step) % {size}",
        4: f"np.array_split(x, {size})",
        5: "plain_all_reduce(group, x)",
        6: f"8 * 2 * {size - 1} * n // {size}",
    }
    sources = [
        inspect.getsource(part)
        for part in (plain_reduce_scatter, plain_all_gather, plain_all_reduce)
    ]
    text = (
        "from __future__ import annotations\n" + filled(1, "anna", answers) + "\n\n".join(sources)
    )
    status, marks = results(1, "anna", text, tmp_path)
    assert status == 1 and by_hole(marks) == dict.fromkeys(range(1, 7), 0.0), marks


@pytest.mark.parametrize("student", [f"s{count}" for count in range(3)])
def test_the_repositorys_1f1b_fails(student: str, tmp_path: Path) -> None:
    ranks = drawn(2, student).ranks
    answers = {
        1: f"min({ranks - 1} - rank, microbatches)",
        2: f"list(one_f_one_b(rank, {ranks}, microbatches))",
        3: f"min(microbatches, {ranks} - rank) << 20",
        4: f"3 * (microbatches + {ranks - 1})",
        5: f"{ranks - 1} / (microbatches + {ranks - 1})",
    }
    text = "from __future__ import annotations\n" + filled(2, student, answers)
    status, marks = results(2, student, text + inspect.getsource(one_f_one_b), tmp_path)
    assert status == 1 and not any(by_hole(marks).values()), marks


# --------------------------------------------------------------------------------- what is no answer


@pytest.mark.parametrize(
    "code,words",
    [
        ("def next_of(rank:\n", "SyntaxError"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("from minidist.lessons.assignments import assignment\n", "import of minidist.lessons"),
        ("import os\nos._exit(0)\n", "import of os"),
        ("while True: pass\n", "no end within 3 s"),
        ("print('passed')\n", "next_of"),
    ],
)
def test_a_file_without_an_answer_gets_no_points(code: str, words: str, tmp_path: Path) -> None:
    limit = "3" if "while" in code else "60"
    status, marks = results(1, "anna", code, tmp_path, "--limit", limit)
    assert status == 1 and by_hole(marks) == dict.fromkeys(range(1, 7), 0.0)
    assert words in marks["output"], marks["output"]


def test_a_copy_is_never_overwritten_and_names_its_grading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["assignment", "2", "--student", "Anna B", "--course", "25", "--copy", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "assignment_2.py --student 'Anna B' --course 25" in " ".join(said.split())
    assert main(words) == 2
    assert "is already there" in capsys.readouterr().err
    same = assignment(2, student="Anna B", course="25").task_file
    assert (tmp_path / "assignment_2.py").read_text(encoding="utf-8") == same


@pytest.mark.parametrize(
    "words,complaint",
    [
        (["1"], "--student ID"),
        (["1", "--student", "a"], "a FILE to grade, or --copy"),
        (["9", "--student", "a", "--copy", "."], "no assignment 9"),
        (["1", "--student", 'a"b', "--copy", "."], "--student"),
        (["1", "--student", "x" * 300, "--copy", "."], "--student"),
        (["1", "nowhere.py", "--student", "a"], "minidist assignment 1 --student a --copy"),
        (["1", "nowhere.py", "--student", "a", "--points", "2"], "--points goes with"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["assignment", *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1


def test_a_task_file_is_python_that_ruff_and_a_student_can_read(tmp_path: Path) -> None:
    for number in assignments.MODULES:
        for student in STUDENTS:
            file = tmp_path / f"{number}.py"
            file.write_text(assignment(number, student=student).task_file, encoding="utf-8")
            compile(file.read_text(), str(file), "exec")
            assert max(map(len, file.read_text().splitlines())) <= 110


def test_the_table_of_assignments_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assignment"]) == 0
    printed = capsys.readouterr().out
    assert all(title in printed for _, title in assignments.titles())


def test_there_is_no_fourth_assignment() -> None:
    with pytest.raises(ConfigError, match="1, 2, 3"):
        assignment(4, student="a")


# -------------------------------------------------------------------------------------- in Chinese

NUMBERS = {"ring": 1, "pipeline": 2, "planning": 3}


@pytest.mark.parametrize("module", [ring, pipeline, planning])
def test_what_an_assignment_says_is_there_in_chinese(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    chinese = read_toml(assignments.CHINESE)[name]
    assert {key: _gaps(text) for key, text in chinese.items()} == {
        key: _gaps(text) for key, text in module.TEXTS.items()
    }
    source = Path(module.__file__).read_text(encoding="utf-8")
    told = {*said(source)} - {*module.TEXTS, *module.TEXTS.values()}
    holes_told = [*holes.tasks(ast.parse(module.task_file(drawn(NUMBERS[name], "anna")))).values()]
    say = assignments.phrases().say
    english = [text for text in (*told, *holes_told) if "hole(" not in text and say(text) == text]
    # rows of a table, code, and a word in a docstring: English in both
    assert {*english} <= {
        "rank {}",
        "    {} {} s {} s {} MiB",
        " (two each)",
        "dp, pp, tp, zero, rows",
    }


def _gaps(text: str) -> list[str]:
    return sorted(re.findall(r"\$[a-z_]+|@STUDENT@|\{.*?\}", text))


def test_an_assignment_in_chinese_is_graded_in_chinese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The holes have other words, and the same answers pass."""
    file = tmp_path / "assignment_1.py"
    words = ["--student", "小明", "--language", "zh"]
    assert main(["assignment", "1", *words, "--copy", str(tmp_path)]) == 0
    text = file.read_text(encoding="utf-8")
    assert "小明 的作业 1" in text and "归约散射的一步中，一个 rank 发出哪一块？" in text
    answers = RIGHT[1](drawn(1, "小明"))
    file.write_text(filled_text(text, answers), encoding="utf-8")
    capsys.readouterr()
    assert main(["assignment", "1", str(file), *words]) == 0
    assert "作业 1 · 自己的环上的全归约" in capsys.readouterr().out
    file.write_text(filled_text(text, answers | {6: "16 * n"}), encoding="utf-8")
    assert main(["assignment", "1", str(file), *words]) == 1
    assert "字节数不同" in capsys.readouterr().out
