"""Fill the holes of an exercise, as a student would: rightly or wrongly."""

import ast
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from minidist import lessons
from minidist.grading import Grade, answer_key, grade, load_module
from minidist.lessons import Lesson
from minidist.lessons.phrases import phrases_of, translated


def fill(source: str, answers: Mapping[int, str]) -> str:
    """`source` with hole(n, …) replaced by answers[n]: an expression, or statements if the hole is
    a line by itself."""
    lines = source.splitlines(keepends=True)
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hole"
    ]
    for call in sorted(calls, key=lambda call: (-call.lineno, -call.col_offset)):
        number = call.args[0].value
        if number not in answers:
            continue
        first = call.lineno - 1
        last = call.end_lineno - 1
        before = lines[first].encode()[: call.col_offset].decode()
        after = lines[last].encode()[call.end_col_offset :].decode()
        code = textwrap.dedent(answers[number]).strip()
        if not before.strip():  # the hole is a statement
            code = textwrap.indent(code, before).lstrip()
        lines[first : last + 1] = [before + code + after]
    return "".join(lines)


def holes(source: str) -> set[int]:
    """The numbers of the holes that are left."""
    return {int(number) for number in re.findall(r"\bhole\((\d+)", source)}


def graded(number: str, answers: Mapping[int, str], folder: Path) -> Grade:
    """The grade of lesson `number`'s exercise filled with `answers`; all that it says has Chinese."""
    lesson = lessons.find(number)
    file = folder / f"exercise_{number}.py"
    file.write_text(
        fill(lesson.part("exercise.py").read_text(encoding="utf-8"), answers), encoding="utf-8"
    )
    found = grade(number, lesson.part("check.py"), file)
    assert english_left(lesson, found) == []
    return found


def english_left(lesson: Lesson, grade: Grade) -> list[str]:
    """What a grade still says in English, three words or more, to a student who reads Chinese; an
    error's own text may follow an advice."""
    told = list[str]()
    for result in translated(grade, phrases_of(lesson).say).results:
        is_error = result.mistake == "你的代码抛出了异常"
        told += [result.task, result.target, result.measured, result.mistake]
        told += [] if is_error else [result.advice.partition("；")[0]]
    return [text for text in told if re.search("[a-z]{2,} [a-z]{2,} [a-z]{2,}", text)]


def right(number: str) -> dict[int, str]:
    """The right code of every hole of lesson `number`'s exercise."""
    lesson = lessons.find(number)
    template = ast.parse(lesson.part("exercise.py").read_text(encoding="utf-8"))
    key = answer_key(load_module(lesson.part("check.py"), number), template)
    return {hole: "\n".join(map(ast.unparse, nodes)) for hole, nodes in sorted(key.items())}


def assert_named(number: str, mistake: str, wrong: Mapping[int, str], folder: Path) -> None:
    """The check fails, says `mistake`, and blames no hole but those that are `wrong`."""
    result = graded(number, {**right(number), **wrong}, folder)
    assert not result.passed
    said = result.results[-1]
    assert mistake in said.line(), said.line()
    assert said.holes and set(said.holes) <= set(wrong), said.line()
    assert {hole.number for hole in result.holes if hole.state == "wrong"} <= set(wrong)
