"""A lesson as a Jupyter notebook: `minidist lesson 07 --notebook DIR` writes DIR/07_ddp.ipynb.

Of the story each section is a cell, with its pictures inside, so that the file needs nothing else.
Behind the sections "Run it" and "Break it" stand cells that run the lesson; the exercise is a cell
that grades itself, and behind it, closed, the plain version. cli/notebook.py has the magic commands
that these cells use.
"""

import ast
import base64
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from types import FunctionType, ModuleType
from typing import Any

from minidist.grading import load_module
from minidist.lessons import Lesson
from minidist.lessons.phrases import phrases_of, with_tasks
from minidist.lessons.slides import without_links

NAME = "minidist"
MAGIC = "minidist.cli.notebook"
RANKS = 4
TEXTS = {
    "en": {
        "install": "# On a hosted notebook this cell installs minidist first.",
        "threads": "# ranks as threads of one process",
        "processes": f"# {RANKS} processes over shared memory",
        "exercise": "Fill the holes, and run the cell: it is graded. Run it again after each change.",
        "plain": "**The plain version.** The next cell is closed: open it when you have filled the "
        "holes that it answers. Change it, and run it: the check shows what breaks.",
        "closed": "The plain version",
        "option": "",
    },
    "zh": {
        "install": "# 在云端的笔记本里，这个单元先安装 minidist。",
        "threads": "# 各 rank 是同一进程的线程",
        "processes": f"# {RANKS} 个进程，经共享内存通信",
        "exercise": "填好空，运行这个单元，就会评分。每次修改后再运行一次。",
        "plain": "**朴素版本。** 下一个单元是折叠的：先填好它所回答的空，再打开。改一改再运行，"
        "评分会指出哪里坏了。",
        "closed": "朴素版本",
        "option": " --language zh",
    },
}
"""{language: {what: the words around the cells}}."""

Cell = dict[str, Any]


def notebook_of(lesson: Lesson, language: str = "en") -> dict[str, Any]:
    """Return a lesson as a notebook of format 4.5: the content of its JSON file."""
    cells = [*_cells(lesson, language)]
    for number, cell in enumerate(cells):
        cell["id"] = f"{lesson.number}-{number:02}"
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def notebook_text(lesson: Lesson, language: str = "en") -> str:
    """Return the text of a lesson's .ipynb file."""
    return json.dumps(notebook_of(lesson, language), indent=1, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------- cells


def _cells(lesson: Lesson, language: str) -> Iterator[Cell]:
    words = TEXTS[language]
    story = lesson.story(language).read_text(encoding="utf-8")
    first, *others = re.split(r"^(?=## )", story, flags=re.MULTILINE)
    yield _markdown(first, lesson)
    yield _code(_install(words["install"]))
    for section in others:
        yield _markdown(section, lesson)
        commands = _commands(section)
        if f"lessons/{lesson.folder.name}/lesson.py" in commands:
            yield from _runs(commands, lesson, words)
        if f"minidist lesson {lesson.number} --copy" in commands:
            yield from _exercise(lesson, language)


def _markdown(text: str, lesson: Lesson) -> Cell:
    """Return a cell of text, whose pictures it carries."""
    pictures = {
        name: {"image/png": base64.b64encode(lesson.part(name).read_bytes()).decode()}
        for name in re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", text)
        if lesson.part(name).is_file()
    }
    for name in pictures:
        text = text.replace(f"]({name})", f"](attachment:{name})")
    # an installed package has no pictures: their words stay, and what draws them
    drawn = rf"*\1* (`minidist lesson {lesson.number} --figure`)"
    text = re.sub(r"!\[([^\]]*)\]\((?!attachment:)[^)]*\)", drawn, text)
    cell = _cell("markdown", without_links(text).rstrip())
    return {**cell, "attachments": pictures} if pictures else cell


def _code(source: str, **about: Any) -> Cell:
    return {**_cell("code", source, **about), "execution_count": None, "outputs": []}


def _cell(kind: str, source: str, **about: Any) -> Cell:
    return {"cell_type": kind, "metadata": about, "source": source.splitlines(keepends=True)}


def _install(comment: str) -> str:
    """Return the first cell of code: it installs minidist where it is not, and loads the magic
    commands."""
    return f"""{comment}
from importlib.util import find_spec

if find_spec("{NAME}") is None:
    %pip install -q "{_requirement()}"

%load_ext {MAGIC}"""


def _requirement() -> str:
    """Return what pip installs: from the project's repository if this installation knows it, else
    from a package index."""
    try:
        urls = metadata(NAME).get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    source = [url.partition(", ")[2] for url in urls if url.startswith("Source, ")]
    return f"{NAME} @ git+{source[0]}" if source else NAME


def _commands(section: str) -> str:
    """Return the commands that a section shows: its code blocks without a language, or of a shell."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return "\n".join(blocks)


def _runs(commands: str, lesson: Lesson, words: dict[str, str]) -> Iterator[Cell]:
    """Yield the cells that run a lesson as a section's commands do: whole, or with one --break
    each."""
    script = re.escape(f"lessons/{lesson.folder.name}/lesson.py")
    names = re.findall(rf"{script} --break ([\w-]+)", commands)
    for name in dict.fromkeys(names):
        yield _code(f"%minidist lesson {lesson.number} --break {name}")
    if not names:
        yield _code(f"{words['threads']}\n%minidist lesson {lesson.number} -n 1")
        yield _code(f"{words['processes']}\n%minidist lesson {lesson.number} -n {RANKS}")


def _exercise(lesson: Lesson, language: str) -> Iterator[Cell]:
    """Yield the exercise and the plain version, each with what it is for."""
    words = TEXTS[language]
    exercise = lesson.part("exercise.py").read_text(encoding="utf-8")
    if language == "zh":
        exercise = with_tasks(exercise, phrases_of(lesson).say)
    yield _cell("markdown", words["exercise"])
    yield _code(f"%%exercise {lesson.number}{words['option']}\n{exercise.rstrip()}")
    if plain := plain_source(lesson):
        yield _cell("markdown", words["plain"])
        closed = {"jupyter": {"source_hidden": True}, "cellView": "form"}
        yield _code(f"%%plain {lesson.number}\n#@title {words['closed']}\n{plain}", **closed)


def plain_source(lesson: Lesson) -> str:
    """Return the plain versions from which an exercise is cut, behind the imports that they need; ""
    if it is cut from none."""
    check = load_module(lesson.part("check.py"), lesson.number)
    parts = getattr(check, "CUT_FROM", ())
    if not parts:
        return ""
    sources = [inspect.getsource(part).rstrip() for part in parts]
    return "\n\n\n".join(["\n".join(_imports(parts)), *sources])


def _imports(parts: tuple[Any, ...]) -> list[str]:
    """Return the statements that import every name of their modules which these functions use."""
    own = {part.__name__ for part in parts}
    found = set[str]()
    for part in parts:
        module = importlib.import_module(part.__module__)
        used = {node.id for node in ast.walk(_tree(part)) if isinstance(node, ast.Name)}
        for name in (used & vars(module).keys()) - own:
            found.add(_import(name, vars(module)[name], module))
    return ["from __future__ import annotations", *sorted(found)]


def _tree(part: Any) -> ast.AST:
    return ast.parse(inspect.getsource(part))


def _import(name: str, value: Any, module: ModuleType) -> str:
    """Return the statement that imports a name of a module, from where it was made if that is
    known."""
    if isinstance(value, ModuleType):
        package, _, last = value.__name__.rpartition(".")
        if last == name:
            return f"from {package} import {name}" if package else f"import {name}"
        return f"import {value.__name__} as {name}"
    home = getattr(value, "__module__", None)
    is_there = isinstance(value, type | FunctionType) and home and value.__name__ == name
    return f"from {home if is_there else module.__name__} import {name}"
