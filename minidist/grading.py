"""Exercises with holes, and the grading of them.

    exercise.py   functions whose missing pieces are `hole(2, "which chunk arrives?")`; a student
                  replaces each call
    check.py      `grade(exercise)` runs the student's functions and yields one Result per task:
                  the target and the measured value
    the library   is the answer key: check.py asks it for the right values, so that answers stay
                  up to date

A check is a measure and a table: what it runs and reads, and the mistakes that are known by what
they give (`Known`) or by what the answer shows (`Signs`). `expect` and `judge` make a Result of both;
`minidist/lessons/checking.py` has what checks that start ranks share.

A check stops at the first task that fails, because later tasks would only repeat the same mistake.
Then each hole is graded separately: the student's answer to it, and the right code in all the
others. So the wrong hole is named, and filled holes are graded before all holes are filled. The
right code is from check.py: `CUT_FROM` lists the plain versions that the exercise is cut from;
`ANSWERS`, {hole: code}, holds the code that the plain versions do not have.

Any problem in the student's code (an exception, a hang, a wrong value) becomes a Result, never a
traceback of ours.
"""

import ast
import importlib.util
import inspect
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from minidist import holes
from minidist.errors import ConfigError, MinidistError, TimeoutError
from minidist.files import read_regular
from minidist.own_work import borrowed

MOST_SOURCE = 1 << 24  # bytes of a Python file
NOT_FILLED = "not filled yet"  # the mistake of a Result that reached a hole


class HoleError(MinidistError):
    """A hole of an exercise that is not filled yet."""


def hole(number: int, task: str, *given: Any) -> Any:
    """Mark the place of a student's code, which replaces the whole call.

    Args:    task: the missing code, in words. given: the values that the code needs.
    Raises:  HoleError, always.
    """
    raise HoleError(f"fill hole {number}: {task}")


@dataclass(frozen=True)
class Result:
    """One graded task: target and measured; if it failed, the name of the mistake and the section
    to read again."""

    task: str
    passed: bool
    target: str
    measured: str
    mistake: str = ""
    advice: str = ""
    holes: tuple[int, ...] = ()  # the holes with the mistake, if known
    picture: str = ""  # a wrong answer's run beside the right one, as lines of text

    def line(self, say: Callable[[str], str] = str) -> str:
        """Return the result as one line: `bytes sent: 3.5 MiB, target 3.0 MiB: whole tensors: read
        section 3 again`. `say` tells the words between its parts in the reader's language."""
        colon = say(": ")
        if self.passed:
            return f"{self.task}{colon}{self.measured} ok"
        if self.mistake in (NOT_FILLED, say(NOT_FILLED)):
            return f"{self.advice}{say('; ')}{self.measured}"
        blamed = say(holes_text(self.holes)) if self.holes else ""
        compared = f"{self.measured}{say(', ')}{say('target')} {self.target}"
        parts = (blamed, self.task, compared, self.mistake, self.advice)
        return colon.join(part for part in parts if part)


class TaskFailed(MinidistError):
    """A task that failed so that nothing more can be measured: `result` ends the check."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.line())
        self.result = result


@dataclass(frozen=True)
class HoleGrade:
    """The grade of one hole, with the right code in all the others or by tasks of its own: `state`
    is "right", "wrong" or "open"."""

    number: int
    state: str
    result: Result | None = None  # what was wrong


@dataclass(frozen=True)
class Grade:
    """All results of one exercise, up to the first mistake; then its holes one by one, unless every
    task passed. Without holes and not passed: the mistake lies outside the holes."""

    lesson: str
    file: str
    results: tuple[Result, ...]
    holes: tuple[HoleGrade, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether there was a task and every task passed."""
        return bool(self.results) and all(result.passed for result in self.results)

    def summary(self, say: Callable[[str], str] = str) -> str:
        """Return the state of the holes in the reader's language: `2 of 6 holes left: 3 (wrong), 5`;
        empty if nothing is known of them."""
        left = [
            f"{hole.number}{say(' (wrong)') if hole.state == 'wrong' else ''}"
            for hole in self.holes
            if hole.state != "right"
        ]
        return (
            say(f"{len(left)} of {len(self.holes)} holes left: {', '.join(left)}") if left else ""
        )

    def other_mistakes(self) -> list[Result]:
        """Return the mistakes of holes that the last result does not tell: without the holes of one
        mistake that several make together, because each alone gives another one."""
        told = self.results[-1] if self.results else None
        together = told.holes if told and len(told.holes) > 1 else ()
        return [
            hole.result
            for hole in self.holes
            if hole.result and hole.result != told and hole.number not in together
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the grade for `--json`."""
        return {**asdict(self), "passed": self.passed}


class Mistake(NamedTuple):
    """A known mistake: the value that shows it, and its own advice instead of the task's."""

    by: Any  # what it gives, in a table of Known; whether the answer shows it, in a table of Signs
    advice: str


Known = Mapping[str, Any]
"""Mistakes known by what they give, tried from the first: {name: wrong value}.

    {"the biases forgotten": 12 * h * h + 4 * h,
     "averaged twice": lambda: trained(1 / size),              computed only for a wrong answer
     "nothing was pulled": Mistake(start, "section 1 (hole 3)")}
"""

Signs = Mapping[str, Any]
"""Mistakes known by what the answer shows, tried from the first: {name: whether it shows it}.

    {"rows are lost": len(covered) < rows, "a row twice": len(covered) > rows}
"""


def named(
    mistake: str,
    advice: str,
    *,
    known: Known | None = None,
    gives: Callable[[Any], Any] = bool,
    signs: Signs | None = None,
) -> tuple[str, str]:
    """Return the name and the advice of the first known mistake that a wrong answer shows; `mistake`
    and `advice` if it shows none.

    Args:    gives: gives(value) tells whether the answer is this wrong value of `known`.
    """
    for table, fits in ((known, gives), (signs, bool)):
        for name, entry in (table or {}).items():
            by, own = entry if isinstance(entry, Mistake) else (entry, advice)
            if fits(by() if callable(by) else by):
                return name, own
    return mistake, advice


def judge(
    task: str,
    passed: Any,
    target: str,
    measured: str,
    mistake: str = "",
    advice: str = "",
    *,
    signs: Signs | None = None,
) -> Result:
    """Return the Result of a task that the check itself has measured.

    Args:    target, measured: as a student reads them. signs: what names the mistake. mistake,
             advice: if none of them holds.
    """
    if passed:
        mistake = advice = ""
    else:
        mistake, advice = named(mistake, advice, signs=signs)
    return Result(task, bool(passed), target, measured, mistake, advice)


def expect(
    task: str,
    target: Any,
    measured: Any,
    mistake: str = "",
    advice: str = "",
    *,
    known: Known | None = None,
    signs: Signs | None = None,
    same: Callable[[Any, Any], Any] = operator.eq,
    show: Callable[[Any], str] = str,
    picture: Callable[[], str] | None = None,
) -> Result:
    """Return a Result that passes if `measured` equals `target`.

    Args:    known, signs: what names the mistake, in this order. mistake, advice: if neither does.
             same: same(measured, value) tells whether two values are equal. show: makes the text of
             both values that a student reads. picture: draws a wrong answer's run beside the right
             one.
    """
    passed = bool(same(measured, target))
    if passed:
        mistake = advice = ""
    else:
        mistake, advice = named(
            mistake,
            advice,
            known=known,
            gives=lambda wrong: same(measured, wrong),
            signs=signs,
        )
    drawn = "" if passed or picture is None else picture()
    return Result(task, passed, show(target), show(measured), mistake, advice, picture=drawn)


def load_module(path: Path, name: str) -> ModuleType:
    """Run the Python file at `path` as a module of its own, which no import statement finds.

    Args:    name: the lesson's number or folder.
    Raises:  ConfigError if there is no such file; any error that the file itself raises.
    """
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}; copy the exercise first: minidist lesson {name[:2]} "
            "--copy DIR"
        )
    label = f"minidist_lesson_{name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"{path} is not a Python file; give a file whose name ends in .py, for example exercise.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module  # dataclasses look their module up while it is being made
    # not by the loader: its cache takes a file of the same size and second for the old one
    exec(compile(path.read_bytes(), str(path.absolute()), "exec"), module.__dict__)
    return module


def require_python(file: Path, advice: str) -> None:
    """Raise ConfigError unless `file` is the text of a Python module, though perhaps one that does
    not parse."""
    name = str(file) if len(str(file)) < 200 else f"{str(file)[:40]}…"
    try:
        if b"\0" in (source := read_regular(file, most=MOST_SOURCE)):
            raise ValueError("it has null bytes")
        importlib.util.decode_source(source)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError):
            why = (
                f"there is no file {name}"
                if not os.path.exists(file)
                else f"cannot read {name}: {error.strerror}"
            )
        else:
            why = f"{name} is not Python source: {error}"
        raise ConfigError(f"{why}; {advice}") from None
    if file.suffix != ".py":
        raise ConfigError(f"{name} is not a Python file: its name must end in .py; {advice}")


def require_own_file(number: str, exercise_file: Path) -> None:
    """Raise ConfigError unless an exercise is there and is Python text."""
    require_python(exercise_file, f"start with: minidist lesson {number} --copy DIR")


def grade(number: str, check_file: Path, exercise_file: Path) -> Grade:
    """Grade `exercise_file` by `grade(exercise)` of `check_file`, up to the first task that fails;
    then hole by hole. A check that has TASKS grades each hole by its own.

    Args:    number: the lesson's number, "03".
    Raises:  ConfigError if a file is missing or no Python file. Errors of the student's code become
             a failed Result.
    """
    require_own_file(number, exercise_file)
    check = load_module(check_file, number)
    template_file = check_file.with_name("exercise.py")
    template = (
        ast.parse(template_file.read_text(encoding="utf-8")) if template_file.is_file() else None
    )
    if template is not None and (found := _not_own(exercise_file, template)) is not None:
        return Grade(number, str(exercise_file), (found,))
    if hasattr(check, "TASKS"):
        return _by_tasks(check.TASKS, exercise_file, number)
    results = run_check(check.grade, lambda: load_module(exercise_file, number), exercise_file)
    graded = tuple[HoleGrade, ...]()
    if not (results and results[-1].passed) and template is not None:
        graded = _by_hole(check, template, exercise_file, number, results[-1])
        results = [*results[:-1], _blamed(results[-1], graded)]
    return Grade(number, str(exercise_file), tuple(results), graded)


def _not_own(exercise_file: Path, template: ast.Module) -> Result | None:
    """Return the Result of an answer that is not the student's work (own_work.py); None if it is."""
    try:
        student = ast.parse(exercise_file.read_text(encoding="utf-8"))
    except SyntaxError:
        return None  # explained where it is run
    if (found := borrowed(student, template)) is None:
        return None
    line, what = found
    return Result(
        "your own work",
        False,
        "code of your own",
        what,
        f"{exercise_file.name} line {line} uses what an answer may not",
        "write the hole yourself: an answer has the imports of its exercise, NumPy, and the verbs of "
        "the objects that it gets",
    )


Tasks = Callable[[ModuleType], Iterable[Result]]
"""What grades an exercise: it runs the student's functions and yields a Result per task."""


def run_check(
    tasks: Tasks, exercise: Callable[[], ModuleType], exercise_file: Path
) -> list[Result]:
    """Return the results of the tasks up to the first that failed."""
    results: list[Result] = []
    try:
        for result in tasks(exercise()):
            results.append(result)
            if not result.passed:
                break
    except TaskFailed as failed:
        results.append(failed.result)
    # whatever the student's code raises becomes part of the grade
    except (Exception, SystemExit) as error:
        results.append(explain(error, exercise_file))
    return results


def _by_tasks(tasks: Mapping[int, Tasks], exercise_file: Path, number: str) -> Grade:
    """Return the grade of an exercise each of whose holes has tasks of its own."""
    try:
        exercise = load_module(exercise_file, number)
    except (Exception, SystemExit) as error:  # the mistake lies outside the holes
        return Grade(number, str(exercise_file), (explain(error, exercise_file),))
    passed: list[Result] = []
    wrong: list[Result] = []
    still_open: list[Result] = []
    graded: list[HoleGrade] = []
    for hole_number, of_hole in tasks.items():
        *before, last = run_check(of_hole, lambda: exercise, exercise_file)
        passed += [*before, last] if last.passed else before
        if last.passed:
            graded.append(HoleGrade(hole_number, "right"))
        elif last.mistake == NOT_FILLED:
            still_open.append(last)
            graded.append(HoleGrade(hole_number, "open"))
        else:
            wrong.append(replace(last, holes=(hole_number,)))
            graded.append(HoleGrade(hole_number, "wrong", wrong[-1]))
    first = [*wrong, *still_open][:1]
    return Grade(number, str(exercise_file), (*passed, *first), tuple(graded))


def answer_key(check: ModuleType, template: ast.Module) -> dict[int, holes.Nodes]:
    """Return the right code of each hole of a lesson's exercise, from the check's CUT_FROM and
    ANSWERS."""
    sources = [inspect.getsource(part) for part in getattr(check, "CUT_FROM", ())]
    return holes.right_code(template, sources, getattr(check, "ANSWERS", {}))


def _by_hole(
    check: ModuleType, template: ast.Module, exercise_file: Path, number: str, first: Result
) -> tuple[HoleGrade, ...]:
    """Return the grade of each hole; none if the file cannot be parsed. `first`: the first mistake
    of the whole."""
    try:
        student = ast.parse(exercise_file.read_text(encoding="utf-8"))
    except SyntaxError:
        return ()
    answers = holes.answers_of(template, student, answer_key(check, template))

    def without(replaced: Iterable[holes.Answer]) -> Result | None:
        """Return the first mistake that is left with the right code in place of these."""
        module = holes.corrected(student, replaced)
        run = partial(run_module, module, exercise_file, number)
        last = run_check(check.grade, run, exercise_file)[-1]
        return None if last.passed else last

    doubtful = [answer for answer in answers if not answer.is_right_code]
    filled = [answer for answer in doubtful if not answer.is_open]
    # an exercise as it comes has no mistake outside the holes: its check need not run again
    if any(not answer.is_open for answer in answers) and without(answers):
        return ()  # the mistake lies outside the holes
    wrong: dict[tuple[int, ...], Result] = {}
    for answer in filled:
        others = [other for other in doubtful if other is not answer]
        result = without(others) if others else first
        wrong |= {answer.holes: result} if result else {}
    if len(wrong) > 1 and not any(answer.is_open for answer in answers):
        # an answer that is right together with another unusual one: the author meant both
        alone = [
            answer.holes for answer in answers if answer.holes in wrong and not without([answer])
        ]
        wrong = {held: wrong[held] for held in alone[:1] or wrong}
    states = {
        hole: (
            "open" if answer.is_open else "wrong" if answer.holes in wrong else "right",
            wrong.get(answer.holes),
        )
        for answer in answers
        for hole in answer.holes
    }
    asked = holes.tasks(template)
    return tuple(
        HoleGrade(hole, state, result and _told(result, (hole,), asked[hole]))
        for hole, (state, result) in sorted(states.items())
    )


def _told(result: Result, blamed: tuple[int, ...], task: str) -> Result:
    """Return a mistake of hole `blamed`: as the check names it, unless the check's text is about
    other holes."""
    named = _suspected(result)
    advice = HOLES.sub("", result.advice).strip().rstrip(":")
    if named and not named & set(blamed):
        return replace(result, mistake="", advice=task, holes=blamed)
    return replace(result, advice=advice, holes=blamed)


def _suspected(result: Result) -> set[int]:
    """Return the holes that the check suspects of a mistake."""
    spans = re.findall(r"(\d+)(?: to (\d+))?", " ".join(HOLES.findall(result.advice)))
    return {hole for first, last in spans for hole in range(int(first), int(last or first) + 1)}


HOLES = re.compile(r"[:,]? ?\(holes? [^)]*\)")
"""What a check says of the holes that it suspects."""


def _blamed(result: Result, graded: tuple[HoleGrade, ...]) -> Result:
    """Return the first mistake of the whole exercise, assigned to the holes that are wrong; an open
    hole is named only if none is wrong."""
    wrong = [hole for hole in graded if hole.result]
    if not wrong:
        return result
    for hole in wrong:
        # this hole alone gives the same, so the other wrong holes have no part in it
        if hole.result and _seen(hole.result) == _seen(result):
            return hole.result
    numbers = tuple(hole.number for hole in wrong)
    suspected = tuple(number for number in numbers if number in _suspected(result))
    several = _told(result, suspected if len(suspected) > 1 else numbers, "")
    told_apart = len(wrong) > 1 and several.mistake and result.mistake != NOT_FILLED
    return several if told_apart else wrong[0].result or result


def _seen(result: Result) -> tuple[str, str, str]:
    """Return what tells two mistakes apart, whatever their holes."""
    return result.task, result.target, result.measured


def holes_text(numbers: tuple[int, ...]) -> str:
    """Return `hole 2`, or `holes 2, 3`."""
    return f"hole{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def run_module(tree: ast.Module, file: Path, name: str) -> ModuleType:
    """Run a module's code as if it were in `file`; return the module.

    Raises:  any error of the code.
    """
    module = ModuleType(f"minidist_lesson_{name}_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(tree, str(file.absolute()), "exec"), module.__dict__)
    return module


def explain(error: BaseException, exercise_file: Path) -> Result:
    """Return an error of a student's code as a failed Result that names its line; of a chain, the
    error raised last."""
    chain = [error]  # the error and its causes, outermost first
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    hole_met = next((cause for cause in reversed(chain) if isinstance(cause, HoleError)), None)
    unparsed = next((cause for cause in chain if isinstance(cause, SyntaxError)), None)
    lines = [_at(cause, exercise_file) for cause in ([hole_met] if hole_met else chain)]
    where = next(filter(None, lines), "")
    if hole_met:
        task = re.sub(r"^rank \d+: ", "", str(hole_met))
        told = "no holes left", _open_holes(exercise_file), NOT_FILLED, f"{task}{where}"
    elif unparsed:
        told = (
            "Python that parses",
            "a syntax error",
            "SyntaxError",
            f"line {unparsed.lineno}: {unparsed.msg}",
        )
    elif isinstance(error, TimeoutError):
        told = "an end", "no end within the limit", "it waits for ever", str(error)
    else:
        told = "no error", type(error).__name__, "your code raised", f"{error}{where}"
    return Result("your code", False, *told)


def _open_holes(exercise_file: Path) -> str:
    """Return the number of calls of `hole` that the file still has: "6 holes left"."""
    tree = ast.parse(exercise_file.read_text(encoding="utf-8"))
    count = sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "hole" for node in ast.walk(tree)
    )
    return f"{count} hole{'s' * (count != 1)} left"


def _at(error: BaseException, file: Path) -> str:
    """Return ` (exercise.py line 31)`: the last line of `file` in the traceback of `error`; empty
    if there is none."""
    whole = file.absolute()  # as in tracebacks
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == whole
    ]
    return f" ({file.name} line {lines[-1]})" if lines else ""


def variant(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a plain version with `new` in place of its code `old`: the result of a mistake, so
    that a check can name it."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{function.__name__} has {old!r} {source.count(old)} times"
    names: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace(old, new),
        function.__globals__,
        names,
    )
    changed: Callable[..., Any] = names[function.__name__]
    return changed


def totals(ledger: Any) -> tuple[int, int]:
    """Return (messages, bytes) that `ledger` has counted on all axes except `control`."""
    rows = [row for row in ledger.rows() if row["axis"] != "control"]
    return sum(row["messages"] for row in rows), sum(row["nbytes"] for row in rows)


def sent_since(ledger: Any, before: tuple[int, int]) -> tuple[int, int]:
    """Return (messages, bytes) sent since `totals` returned `before`."""
    messages, nbytes = totals(ledger)
    return messages - before[0], nbytes - before[1]
