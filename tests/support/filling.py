"""Fill the holes of an exercise, as a student would: rightly or wrongly."""

import ast
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from minidist import lessons
from minidist.grading import Grade, grade


def fill(source: str, answers: Mapping[int, str]) -> str:
    """`source` with hole(n, …) replaced by answers[n]: an expression, or statements if the hole is a line by itself."""
    lines = source.splitlines(keepends=True)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "hole"]
    for call in sorted(calls, key=lambda call: -call.lineno):
        number = call.args[0].value
        if number not in answers:
            continue
        first, last = call.lineno - 1, call.end_lineno - 1
        before, after = lines[first][:call.col_offset], lines[last][call.end_col_offset:]
        code = textwrap.dedent(answers[number]).strip()
        if not before.strip():  # the hole is a statement
            code = textwrap.indent(code, before).lstrip()
        lines[first:last + 1] = [before + code + after]
    return "".join(lines)


def holes(source: str) -> set[int]:
    """The numbers of the holes that are left."""
    return {int(number) for number in re.findall(r"\bhole\((\d+)", source)}


def graded(number: str, answers: Mapping[int, str], folder: Path) -> Grade:
    """The grade of lesson `number`'s exercise filled with `answers`."""
    lesson = lessons.find(number)
    file = folder / f"exercise_{number}.py"
    file.write_text(fill(lesson.part("exercise.py").read_text(encoding="utf-8"), answers), encoding="utf-8")
    return grade(number, lesson.part("check.py"), file)
