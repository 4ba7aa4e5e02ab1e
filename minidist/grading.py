"""Exercises with holes, and the grading of them.

    exercise.py   functions whose missing pieces are `hole(2, "which chunk arrives?")`; a student replaces each call
    check.py      `grade(exercise)` runs the student's functions and yields one Result a task: target beside measured
    the library   is the answer key: check.py asks it for the right values, so that answers cannot drift

A check stops at the first task that fails, because later tasks would only repeat the same mistake. Whatever the
student's code does (an exception, a hang, a wrong value) becomes a Result, never a traceback of ours.
"""

import ast
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minidist.errors import ConfigError, MinidistError, TimeoutError

NOT_FILLED = "not filled yet"       # the mistake of a Result that met a hole


class HoleError(MinidistError):
    """A hole of an exercise that is not filled yet."""


def hole(number: int, task: str, *given: Any) -> Any:
    """Mark the place of a student's code, which replaces the whole call.

    Args:    task: what is missing. given: the values that the code needs.
    Raises:  HoleError, always.
    """
    raise HoleError(f"fill hole {number}: {task}")


@dataclass(frozen=True)
class Result:
    """One graded task: target and measured; if it failed, the name of the mistake and what to read again."""

    task: str
    passed: bool
    target: str
    measured: str
    mistake: str = ""
    advice: str = ""

    def line(self) -> str:
        """The result as one line: `bytes sent: 3.5 MiB, target 3.0 MiB: whole tensors: read section 3 again`."""
        if self.passed:
            return f"{self.task}: {self.measured} ok"
        if self.mistake == NOT_FILLED:
            return f"{self.advice}; {self.measured}"
        tail = ": ".join(part for part in (self.mistake, self.advice) if part)
        return f"{self.task}: {self.measured}, target {self.target}: {tail}"


@dataclass(frozen=True)
class Grade:
    """All results of one exercise."""

    lesson: str
    file: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether there was a task and every task passed."""
        return bool(self.results) and all(result.passed for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """The grade for `--json`."""
        return {**asdict(self), "passed": self.passed}


def expect(task: str, target: Any, measured: Any, mistake: str = "", advice: str = "") -> Result:
    """A Result that passes if `measured` equals `target`; `mistake` and `advice` are for the other case."""
    return Result(task, bool(measured == target), str(target), str(measured), mistake, advice)


def load_module(path: Path, name: str) -> ModuleType:
    """Run the Python file at `path` as a module of its own, which no import statement finds.

    Args:    name: the lesson's number or folder.
    Raises:  ConfigError if there is no such file; any error that the file itself raises.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; copy the exercise first: minidist lesson {name[:2]} --copy DIR")
    label = f"minidist_lesson_{name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; expected something like exercise.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module  # dataclasses look their module up while it is being made
    spec.loader.exec_module(module)
    return module


def require_python(file: Path, advice: str) -> None:
    """Raise ConfigError unless `file` is the text of a Python module, though perhaps one that does not parse."""
    name = str(file) if len(str(file)) < 200 else f"{str(file)[:40]}…"
    try:
        if b"\0" in (source := file.read_bytes()):
            raise ValueError("it has null bytes")
        importlib.util.decode_source(source)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError):
            why = f"there is no file {name}" if not os.path.exists(file) else f"cannot read {name}: {error.strerror}"
        else:
            why = f"{name} is no Python text: {error}"
        raise ConfigError(f"{why}; {advice}") from None
    if file.suffix != ".py":
        raise ConfigError(f"{name} is not a Python file, whose name ends in .py; {advice}")


def grade(number: str, check_file: Path, exercise_file: Path) -> Grade:
    """Grade `exercise_file` by `grade(exercise)` of `check_file`, up to the first task that fails.

    Args:    number: the lesson's number, "03".
    Raises:  ConfigError if a file is missing or no Python file. Errors of the student's code become a failed Result.
    """
    require_python(exercise_file, f"start with: minidist lesson {number} --copy DIR")
    check = load_module(check_file, number)
    results: list[Result] = []
    try:
        exercise = load_module(exercise_file, number)
        for result in check.grade(exercise):
            results.append(result)
            if not result.passed:
                break
    except (Exception, SystemExit) as error:    # whatever the student's code raises becomes part of the grade
        results.append(explain(error, exercise_file))
    return Grade(number, str(exercise_file), tuple(results))


def explain(error: BaseException, exercise_file: Path) -> Result:
    """An error of a student's code as a failed Result that names its line."""
    chain = [error]         # the error and its causes, outermost first
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    hole_met = next((cause for cause in reversed(chain) if isinstance(cause, HoleError)), None)
    unparsed = next((cause for cause in chain if isinstance(cause, SyntaxError)), None)
    where = next(filter(None, (_at(cause, exercise_file) for cause in reversed(chain))), "")
    if hole_met:
        task = re.sub(r"^rank \d+: ", "", str(hole_met))
        told = "no holes left", _open_holes(exercise_file), NOT_FILLED, f"{task}{where}"
    elif unparsed:
        told = "Python that parses", "a syntax error", "SyntaxError", f"line {unparsed.lineno}: {unparsed.msg}"
    elif isinstance(error, TimeoutError):
        told = "an end", "no end within the limit", "it waits for ever", str(error)
    else:
        told = "no error", type(chain[-1]).__name__, "your code raised", f"{chain[-1]}{where}"
    return Result("your code", False, *told)


def _open_holes(exercise_file: Path) -> str:
    """How many calls of `hole` the file still has: "6 holes left"."""
    tree = ast.parse(exercise_file.read_text(encoding="utf-8"))
    count = sum(isinstance(node, ast.Call) and ast.unparse(node.func) == "hole" for node in ast.walk(tree))
    return f"{count} hole{'s' * (count != 1)} left"


def _at(error: BaseException, file: Path) -> str:
    """` (exercise.py line 31)`: the last line of `file` in the traceback of `error`; empty if there is none."""
    whole = file.absolute()     # as in tracebacks
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == whole]
    return f" ({file.name} line {lines[-1]})" if lines else ""


def totals(ledger: Any) -> tuple[int, int]:
    """(messages, bytes) that `ledger` has counted on all axes but `control`."""
    rows = [row for row in ledger.rows() if row["axis"] != "control"]
    return sum(row["messages"] for row in rows), sum(row["nbytes"] for row in rows)


def sent_since(ledger: Any, before: tuple[int, int]) -> tuple[int, int]:
    """(messages, bytes) sent since `totals` returned `before`."""
    messages, nbytes = totals(ledger)
    return messages - before[0], nbytes - before[1]
