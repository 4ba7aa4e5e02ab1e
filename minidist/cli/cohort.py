"""`minidist cohort grades/`: one table of many results.json files, and below it what to teach again:
how many have each hole right, and what the others are told most often.

A file is of one student and one part of the course. The student is the file's stem; of a file
called results.json, the name of its folder. Of several files of one student and part, the one with
the most points counts.
"""

import argparse
import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from minidist.cli.gradescope import HoleTest, Results, read_results
from minidist.comm.health.failure import say_line
from minidist.console import exactly, fail, plural, readable, shown, write_json, written
from minidist.errors import ConfigError
from minidist.files import as_utf8, check_writable
from minidist.lessons.page import page_console
from minidist.reading import visible

RESULTS = "results.json"
NO_PART = "results"  # the part of a file that does not name one
TOLD = 3  # the most frequent lines that are printed per hole
LONGEST = 200  # letters of a printed line


@dataclass(frozen=True)
class Handed:
    """The results of one student for one part of the course."""

    student: str
    part: str
    results: Results


@dataclass(frozen=True)
class HoleCount:
    """The results of a cohort in one test.

    Attributes: told: the first lines of output of students who do not have the test right, the
                most frequent first.
    """

    part: str
    name: str
    right: int
    students: int
    told: tuple[tuple[str, int], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist cohort` to the parser."""
    parser.add_argument(
        "places",
        nargs="+",
        metavar="FILE_OR_FOLDER",
        help="results files, as `minidist check --gradescope` writes them; of a folder, all *.json "
        "files in it and in its folders",
    )
    parser.add_argument("--csv", metavar="FILE", help="write a line per student: the points")
    parser.add_argument("--json", metavar="FILE", help="write points and tests as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns: 0, or 1 if a file could not be read. Raises: ConfigError."""
    check_writable("--csv", args.csv)
    check_writable("--json", args.json)
    handed: list[Handed] = []
    bad: dict[str, str] = {}
    for file in _files(args.places):
        try:
            results = read_results(file)
        except (OSError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            bad[str(file)] = str(why)
            say_line(f"minidist cohort: {visible(readable(f'{file}: {why}'))}")
            continue
        handed.append(Handed(student_of(file), results.part or NO_PART, results))
    points = points_of(handed)
    parts = sorted({one.part for one in handed})
    counts = [*count_tests(best_of(handed))]
    _show(points, parts, counts)
    if args.csv:
        with written("--csv", args.csv) as draft:
            draft.write_bytes(as_utf8(_as_csv(points, parts)))
    if args.json:
        write_json(args.json, _as_json(points, counts, bad))
    return 1 if bad else 0


def _files(places: Sequence[str]) -> Iterator[Path]:
    """Yield each results file once, in order. Raises: ConfigError for a folder without any."""
    seen: set[Path] = set()
    for place in map(Path, places):
        inside = sorted(place.rglob("*.json")) if place.is_dir() else [place]
        if not inside:
            fail(f"{shown(str(place))} has no results files, whose names end in .json")
        for file in inside:
            if file not in seen:
                seen.add(file)
                yield file


def student_of(file: Path) -> str:
    """Return the student whose results a file has."""
    return file.absolute().parent.name if file.name == RESULTS else file.stem


def best_of(handed: Sequence[Handed]) -> list[Handed]:
    """Return the results with the most points, one per student and part."""
    best: dict[tuple[str, str], Handed] = {}
    for one in handed:
        key = one.student, one.part
        if key not in best or one.results.points > best[key].results.points:
            best[key] = one
    return [best[key] for key in sorted(best)]


def points_of(handed: Sequence[Handed]) -> dict[str, dict[str, float]]:
    """Return {student: {part: points}}."""
    points: dict[str, dict[str, float]] = {}
    for one in best_of(handed):
        points.setdefault(one.student, {})[one.part] = one.results.points
    return points


def count_tests(handed: Sequence[Handed]) -> Iterator[HoleCount]:
    """Yield how many students have each test right, by part, in the order of the files."""
    tests: dict[tuple[str, str], list[HoleTest]] = {}
    for one in sorted(handed, key=lambda one: one.part):
        for test in one.results.tests:
            tests.setdefault((one.part, test.name), []).append(test)
    for (part, name), each in tests.items():
        wrong = [test for test in each if not is_right(test)]
        told = Counter(first_line(test.output) for test in wrong)
        # Equally frequent lines are sorted by their text, so that the table is always the same.
        ordered = sorted(told.items(), key=lambda line: (-line[1], line[0]))
        yield HoleCount(part, name, len(each) - len(wrong), len(each), tuple(ordered[:TOLD]))


def is_right(test: HoleTest) -> bool:
    """Return whether a test has all its points; one without points, whether it passed."""
    if test.score is None or not test.max_score:
        return test.status == "passed"
    return test.score >= test.max_score


def first_line(output: str) -> str:
    """Return the first line of an output, of bounded length."""
    lines = output.strip().splitlines()
    return visible(lines[0].strip())[:LONGEST] if lines else "(no output)"


def _show(
    points: Mapping[str, Mapping[str, float]], parts: Sequence[str], counts: Sequence[HoleCount]
) -> None:
    console = page_console()
    table = Table(
        Column("student", overflow="fold"),
        *(Column(escape(visible(part)), justify="right") for part in parts),
        Column("total", justify="right"),
        title=plural(len(points), "student"),
        title_justify="left",
        header_style="bold cyan",
    )
    for student, mine in points.items():
        cells = [exactly(mine[part]) if part in mine else "" for part in parts]
        table.add_row(escape(visible(student)), *cells, exactly(sum(mine.values())))
    console.print(table)
    if not counts:
        return
    table = Table(
        "part",
        Column("test", overflow="fold"),
        Column("right", justify="right"),
        Column("told most often", overflow="fold"),
        title="What to teach again",
        title_justify="left",
        header_style="bold cyan",
    )
    for count in counts:
        told = "\n".join(f"{times} × {line}" for line, times in count.told)
        share = f"{count.right} of {count.students}"
        name = escape(visible(count.name)[:LONGEST])
        table.add_row(escape(visible(count.part)), name, share, escape(told))
    console.print(table)


def _as_csv(points: Mapping[str, Mapping[str, float]], parts: Sequence[str]) -> str:
    """Return the points as CSV: an empty cell where a student handed nothing in."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["student", *parts, "total"])
    for student, mine in points.items():
        writer.writerow([student, *(mine.get(part, "") for part in parts), sum(mine.values())])
    return text.getvalue()


def _as_json(
    points: Mapping[str, Mapping[str, float]],
    counts: Sequence[HoleCount],
    bad: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "students": [
            {"student": student, "points": dict(mine), "total": sum(mine.values())}
            for student, mine in points.items()
        ],
        "tests": [
            {
                "part": count.part,
                "test": count.name,
                "right": count.right,
                "students": count.students,
                "told": [{"line": line, "times": times} for line, times in count.told],
            }
            for count in counts
        ],
        "unread": dict(bad),
    }
