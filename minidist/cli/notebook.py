"""The magic commands of a lesson's notebook; `%load_ext minidist.cli.notebook` adds them.

%minidist lesson 07 -n 4    what `minidist lesson 07 -n 4` does
%%exercise 07               grade the functions of this cell, as `minidist check 07 FILE` does
%%plain 07                  run the tasks of the same check on the plain version as it stands in
                            this cell
"""

import ast
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from minidist import holes, lessons
from minidist.cli import main
from minidist.cli.check import show
from minidist.errors import ConfigError
from minidist.grading import Grade, answer_key, load_module, run_check
from minidist.lessons import Lesson


def load_ipython_extension(shell: Any) -> None:
    """Add the magic commands to a notebook (`%load_ext` calls this)."""
    command = f"{shlex.quote(sys.executable)} -m minidist"
    shell.register_magic_function(
        lambda line: shell.system(f"{command} {line}"), "line", "minidist"
    )
    shell.register_magic_function(grade_exercise, "cell", "exercise")
    shell.register_magic_function(run_plain, "cell", "plain")


def grade_exercise(line: str, cell: str) -> None:
    """Write a cell as exercise_NN.py and grade it as `minidist check NN` does. Its lines keep their
    numbers. Args: line: the lesson's number, and options of `minidist check`."""
    number, *options = _words(line)
    file = Path(f"exercise_{number}.py")
    file.write_text(f"# %%exercise {line}\n{cell}", encoding="utf-8")
    main(["check", number, str(file), *options])


def run_plain(line: str, cell: str) -> None:
    """Run the tasks of a lesson's check on the functions of a cell; what the exercise has beside them
    is right already. Args: line: the lesson's number."""
    lesson = lessons.find(_words(line)[0])
    file = Path(f"plain_{lesson.number}.py")
    file.write_text(f"# %%plain {line}\n{cell}", encoding="utf-8")
    check = load_module(lesson.part("check.py"), lesson.number)
    results = run_check(check.grade, lambda: _with_right_code(lesson, check, file), file)
    show(Grade(lesson.number, str(file), tuple(results)), f"Lesson {lesson.number}")


def _words(line: str) -> list[str]:
    """Return the words behind a magic command. Raises: ConfigError if there is none."""
    if not (words := line.split()):
        raise ConfigError("which lesson? give its number: %%exercise 07")
    return words


def _with_right_code(lesson: Lesson, check: ModuleType, file: Path) -> ModuleType:
    """Return an exercise whose holes are filled with the right code, and in which the functions of
    `file` take the place of those with the same names."""
    template = ast.parse(lesson.part("exercise.py").read_text(encoding="utf-8"))
    module = load_module(file, lesson.number)
    own = dict(vars(module))
    exec(
        compile(holes.filled(template, answer_key(check, template)), str(file), "exec"),
        vars(module),
    )
    vars(module).update(own)
    return module
