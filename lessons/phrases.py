"""The Chinese of what the code of a lesson says: the tasks of its holes, and the messages of its check.

The code says everything in English. zh.toml beside it has the Chinese of each text by the English;
{} stands for what the run fills in, and {0}, {1} are used where Chinese has another order:

    [check]
    "{} of {} layers have a gradient" = "{1} 层中有 {0} 层有梯度"

    [filled]                             what fills a gap, or is put together while the check runs
    "{} cuts" = "{} 个阶段边界"

    [figure]                             the words of its pictures
    "Idle" = "空闲"

lessons/zh.toml has what several lessons say.

    python -m minidist.lessons.phrases 10    # texts without Chinese, and Chinese that nothing says
"""

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from minidist import holes, lessons
from minidist.grading import HOLES, Grade, Result
from minidist.lessons import Lesson
from minidist.reading import read_toml

FILE = "zh.toml"
GAP = "{}"  # what a run fills in
ERROR = "{} ({} line {})"  # the text of an exception, and where it was raised
LEAST = 3  # words that a phrase with gaps must have of its own, to tell the text of an exception
HOLES_ZH = re.compile(r"[：，,:]? ?（空 [^）]*）")

Say = Callable[[str], str]
"""Returns a text in the reader's language."""


class Phrases:
    """The Chinese of texts. Args: chinese: {English: Chinese}, with gaps."""

    def __init__(self, chinese: dict[str, str]) -> None:
        every = dict(chinese)
        # the grader takes "(hole 2)" out of an advice where it names the hole itself
        every |= {
            HOLES.sub("", english).strip().rstrip(":"): HOLES_ZH.sub("", text).strip().rstrip("：")
            for english, text in chinese.items()
            if HOLES.search(english)
        }
        self._whole = {english: text for english, text in every.items() if GAP not in english}
        gapped = sorted((e for e in every if GAP in e), key=lambda e: -len(e.replace(GAP, "")))
        self._gapped = [(english, _pattern(english), every[english]) for english in gapped]

    def say(self, text: str, *, least: int = 0) -> str:
        """Return a text in Chinese; the text itself if it has none.

        Args:    least: only phrases with so many words of their own beside the gaps: "{} of {}" must
                 not tell "list index out of range".
        """
        if text in self._whole:
            return self._whole[text]
        for english, pattern, chinese in self._gapped:
            if len(re.findall("[A-Za-z]+", english)) < least:
                continue
            if (found := pattern.fullmatch(text)) is not None:
                fewest = LEAST if english == ERROR else 0
                return _filled(chinese, [self.say(part, least=fewest) for part in found.groups()])
        return text


def _pattern(english: str) -> re.Pattern[str]:
    """Return what matches a text whose gaps are filled in; a group is what fills one.

    A gap behind an opening bracket is filled within this bracket: the "{}" of "({} line {})".
    """
    told = re.escape(english).replace(re.escape("(" + GAP), r"\(([^()]+?)")
    told = told.replace(re.escape(GAP), "(.+?)")
    return re.compile(told, re.DOTALL)


def _filled(chinese: str, parts: list[str]) -> str:
    """Return a Chinese text with its gaps filled in: {} in order, {1} by number."""
    following = iter(parts)
    return re.sub(
        r"\{(\d*)\}",
        lambda gap: parts[int(gap[1])] if gap[1] else next(following),
        chinese,
    )


def phrases_of(lesson: Lesson) -> Phrases:
    """Return the phrases of a lesson, and those of several lessons."""
    return folder_phrases(lesson.folder)


@cache
def folder_phrases(folder: Path) -> Phrases:
    """Return the phrases of a folder's zh.toml, and those of several lessons."""
    return Phrases(_flat(_read(lessons.FOLDER)) | _flat(_read(folder)))


def figure_phrases(folder: Path) -> Phrases | None:
    """Return the phrases of a lesson's pictures; None if they are not in Chinese yet."""
    shared = _read(lessons.FOLDER).get("figure", {})
    tables = _read(folder)
    return Phrases(shared | tables["figure"]) if "figure" in tables else None


def _read(folder: Path) -> dict[str, dict[str, str]]:
    """Return the tables of one zh.toml; none if the folder has none."""
    file = folder / FILE
    return read_toml(file) if file.is_file() else {}


def _flat(tables: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the phrases of all tables."""
    return {english: chinese for table in tables.values() for english, chinese in table.items()}


# ---------------------------------------------------------------------------- what shows the phrases


def translated(grade: Grade, say: Say) -> Grade:
    """Return a grade whose results are told in the reader's language."""
    return replace(
        grade,
        results=tuple(_told(result, say) for result in grade.results),
        holes=tuple(
            replace(hole, result=hole.result and _told(hole.result, say)) for hole in grade.holes
        ),
    )


def _told(result: Result, say: Say) -> Result:
    return replace(
        result,
        task=say(result.task),
        target=say(result.target),
        measured=say(result.measured),
        mistake=say(result.mistake),
        advice=say(result.advice),
    )


def with_tasks(exercise: str, say: Say) -> str:
    """Return the text of an exercise whose holes tell their tasks in the reader's language."""
    lines = exercise.splitlines(keepends=True)
    calls = [node for node in ast.walk(ast.parse(exercise)) if isinstance(node, ast.Call)]
    places = [call.args[1] for call in calls if holes.number_of(call)]
    for place in sorted(places, key=lambda node: (-node.lineno, -node.col_offset)):
        first, last = place.lineno - 1, (place.end_lineno or place.lineno) - 1
        before = lines[first].encode()[: place.col_offset].decode()
        after = lines[last].encode()[place.end_col_offset :].decode()
        task = say(str(ast.literal_eval(place)))
        lines[first : last + 1] = [before + json.dumps(task, ensure_ascii=False) + after]
    return "".join(lines)


# -------------------------------------------------------------------------------- what the code says


def said(source: str) -> list[str]:
    """Return the texts in a check's code that a student may read, each once, with gaps.

    Left out are docstrings, code as text, and single words, which are names.
    """
    tree = ast.parse(source)
    unread = {id(part) for node in ast.walk(tree) for part in _unread(node)}
    found = [_text(node) for node in ast.walk(tree) if id(node) not in unread]
    return [*dict.fromkeys(text for text in found if _is_told(text))]


def _unread(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in `node` that are no texts of their own."""
    if isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.Constant):
                yield value
            elif isinstance(value, ast.FormattedValue) and value.format_spec is not None:
                yield from ast.walk(value.format_spec)
    elif isinstance(node, ast.Assert) or (isinstance(node, ast.Assign) and _is_answers(node)):
        yield from ast.walk(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value


def _is_answers(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ANSWERS"


def _text(node: ast.AST) -> str:
    """Return a string of code, with gaps; empty if the node is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(value.value) if isinstance(value, ast.Constant) else GAP for value in node.values
        )
    return ""


def _is_told(text: str) -> bool:
    """Return whether a student reads this text: words, not code and no regular expression."""
    words = text.replace(GAP, "")
    if " " not in text.strip() or "\\" in text or not re.search("[A-Za-z]{2}", words):
        return False
    try:
        ast.parse(text)
    except SyntaxError:
        return True
    return not re.search(r"[(\[=._+*]", words)


def texts_of(lesson: Lesson) -> list[str]:
    """Return what a lesson's holes and its check say."""
    exercise = ast.parse(lesson.part("exercise.py").read_text(encoding="utf-8"))
    check = lesson.part("check.py").read_text(encoding="utf-8")
    return [*holes.tasks(exercise).values(), *said(check)]


def faults(lesson: Lesson) -> Iterator[str]:
    """Yield each text of a lesson without Chinese, each Chinese one that nothing says, and each whose
    gaps differ."""
    texts = texts_of(lesson)
    check = lesson.part("check.py").read_text(encoding="utf-8")
    shared = _flat(_read(lessons.FOLDER))
    tables = _read(lesson.folder)
    kept = _flat(tables)
    yield from (f"no Chinese: {text}" for text in texts if text not in {**shared, **kept})
    yield from (
        f"nothing says: {english}"
        for english in kept.keys() - {*tables.get("filled", ()), *tables.get("figure", ())}
        if english not in texts and f'"{english}"' not in check
    )
    yield from gap_faults({**shared, **kept})


def gap_faults(chinese: dict[str, str]) -> Iterator[str]:
    """Yield each phrase whose two languages have other gaps."""
    for english, text in chinese.items():
        gaps = sorted(re.findall(r"\{(\d*)\}", text))
        count = english.count(GAP)
        if gaps not in ([""] * count, [str(place) for place in range(count)]):
            yield f"gaps: {english} = {text}"


def main() -> int:
    """Print the faults of the lessons that are named, or of all; return 1 if there is any."""
    parser = argparse.ArgumentParser(prog="python -m minidist.lessons.phrases", description=__doc__)
    parser.add_argument("lesson", nargs="*", help="a lesson's number, e.g. 10")
    numbers = parser.parse_args().lesson
    chosen = [lessons.find(number) for number in numbers] or lessons.every_lesson()
    found = [f"{lesson.number}: {fault}" for lesson in chosen for fault in faults(lesson)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
