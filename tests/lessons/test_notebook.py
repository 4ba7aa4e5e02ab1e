"""A lesson as a notebook: what it holds, and that every cell runs."""

import ast
import builtins
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from filling import fill, right

from minidist import lessons
from minidist.lessons import find
from minidist.lessons.notebook import notebook_text, plain_source

LESSONS = lessons.every_lesson()
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
QUICK = ("03", "13")


def read(number: str, language: str = "en") -> Any:
    return nbformat.reads(notebook_text(find(number), language), as_version=4)


def run(notebook: Any, folder: Path) -> Any:
    """The notebook after all its cells have run in a kernel of this Python."""
    nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


def printed(cell: Any) -> str:
    """What a cell has printed, without colours."""
    parts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    ]
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(parts))


def cell_with(notebook: Any, text: str) -> Any:
    (found,) = [cell for cell in notebook.cells if cell.source.startswith(text)]
    return found


@each_lesson
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_notebook_holds_the_whole_lesson(lesson: lessons.Lesson, language: str) -> None:
    notebook = read(lesson.number, language)
    nbformat.validate(notebook)
    story = lesson.story(language).read_text(encoding="utf-8")
    told = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert re.findall("^## .*$", told, re.MULTILINE) == re.findall("^## .*$", story, re.MULTILINE)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", told)
    assert pictures and all(name.startswith("attachment:") for name in pictures)
    assert not re.search(r"(?<!!)\[[^\]\n]*\]\([^)\s]*\)", told), "a link to what is not there"
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for name in set(re.findall(r"lesson\.py --break ([\w-]+)", story)):
        assert f"%minidist lesson {lesson.number} --break {name}" in code
    assert f"%minidist lesson {lesson.number} -n 4" in code
    assert code.count("\n%%") + code.startswith("%%") == 1 + bool(plain_source(lesson))


@each_lesson
def test_the_plain_version_of_a_notebook_imports_what_it_needs(lesson: lessons.Lesson) -> None:
    source = plain_source(lesson)
    there = dict(vars(builtins))
    exec(compile(source, "cell", "exec"), there)
    tree = ast.parse(source)
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used - own - there.keys() == set()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number",
    [
        number if number in QUICK else pytest.param(number, marks=pytest.mark.soak)
        for number in (lesson.number for lesson in LESSONS)
    ],
)
def test_a_notebook_runs(number: str, tmp_path: Path) -> None:
    """As it comes, then with the right code in its holes; the plain version passes both times."""
    notebook = read(number, "zh" if number in QUICK[:1] else "en")
    exercise = cell_with(notebook, "%%exercise")
    exercise.source = fill(exercise.source.partition("\n")[2], right(number))
    exercise.source = f"%%exercise {number}\n{exercise.source}"
    run(notebook, tmp_path)
    assert "passed: all" in printed(exercise), printed(exercise)
    if plain_source(find(number)):
        assert "passed: all" in printed(cell_with(notebook, "%%plain"))


SNIPPETS = """import minidist as md
%load_ext minidist.cli.notebook

def stuck(group):
    return group.recv(src=(group.rank + 1) % group.size)

try:
    md.run(stuck, size=2)
except md.errors.DeadlockError as error:
    print(error)
"""


def test_what_goes_wrong_in_a_cell_is_told_with_its_line(tmp_path: Path) -> None:
    plain = cell_with(read("03"), "%%plain").source
    exercise = cell_with(read("03", "zh"), "%%exercise").source
    wrong = plain.replace("group.rank - step - 1", "group.rank - step", 1)
    assert wrong != plain
    sources = [SNIPPETS, wrong, exercise]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    run(notebook, tmp_path)
    deadlock, broken, unfilled = map(printed, notebook.cells)
    assert "waits for 1 at Cell In[1]:5" in deadlock and "/tmp/" not in deadlock
    assert "not yet" in broken
    line = 1 + exercise[: exercise.index("hole(\n")].count("\n")
    assert f"exercise_03.py 第 {line} 行" in unfilled


def test_a_notebook_is_written_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minidist", "lesson", "03", "--notebook", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert json.loads((tmp_path / "03_ring.ipynb").read_text(encoding="utf-8"))["nbformat"] == 4
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "already there" in again.stderr
