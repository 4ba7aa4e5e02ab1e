"""The blocks of the documents that show what a command prints, and the command that prints each.

A line before the block names the command, and how the title of the table, or the line above the
text, begins:

    <!-- printed by: python lessons/04_topology/lesson.py; all_reduce on tori -->     the same on every machine
    <!-- measured by: python lessons/20_offload/lesson.py; After two steps -->        differs by run, or takes minutes
    <!-- by hand: rates that the makers state -->                                     nothing prints it

A block is a Markdown table, or a fence of `text`. A table shows the columns that its head names, of
all rows that the command writes with --json. The text is what stands below its line, up to an empty
line. Without a title the command itself writes what stands between the mark and `<!-- end -->`.
`drawn.py` is the command that makes blocks again; `printed.json` keeps their age.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

from minidist import lessons
from minidist.errors import ConfigError
from minidist.files import scratch, whole
from minidist.launch.own_python import module_command
from minidist.lessons.stamps import ROOT, Stamp, digest_of, digests, label, modules_of, shown_code

STAMPS = lessons.FOLDER / "printed.json"
LIMIT = 600.0  # seconds for a command, on a busy machine
MARK = re.compile(r" *<!-- (?:(printed|measured) by: ([^;]+)(?:; (.+))?|by hand: .+) -->")
END = "<!-- end -->"
COMMANDS = ("```", "```sh", "```bash", "```console")
COMMAND = re.compile(
    r"\s*(#|$|(python|minidist|mpirun|srun|pip|benchmarks/\S+) |[A-Z_]+=\S+ (python|mpirun) |status=)"
)
UNIT = r"(%|[mnµ]?s|[KMGT]i?B(/s)?|billion|times|[nF])"
FIGURE = re.compile(
    rf"\W*(\d+\.\d+( ?{UNIT})?|\d{{1,3}}(,\d{{3}})+( ?{UNIT})?|\d+ ?{UNIT})\W*([,;:] .*)?"
)
ROUNDING = re.compile(r"\b(\d(?:\.\d+)?e[-+]\d\d)\b")
LAST_DIGIT = 1e-15  # errors below this are of the last digit of a float64 near 1


@dataclass(frozen=True)
class PrintedBlock:
    """Lines of a document that a command prints."""

    line: int
    """Line number of its mark, counted from 1."""
    title: str
    """"" where the command itself writes the lines."""
    lines: tuple[str, ...]
    """Without the fence around a text."""
    first: int
    """The index of the first line."""

    @property
    def is_table(self) -> bool:
        """Return whether the block is a table, not a text."""
        return self.lines[0].lstrip().startswith("|")


@dataclass(frozen=True)
class Printout:
    """A command, and the blocks of one document that it prints."""

    document: Path
    command: str
    measured: bool

    @property
    def blocks(self) -> list[PrintedBlock]:
        """Return the blocks that the document has now."""
        return marked_blocks(self.document)[self.command, self.measured]

    @property
    def name(self) -> str:
        """Return its name in printed.json and in messages."""
        return (
            f"{label(self.document)}, {'measured' if self.measured else 'printed'} by "
            f"{self.command}"
        )

    @cached_property
    def script(self) -> Path | None:
        """Return the script of a lesson that the command runs."""
        found = [
            ROOT / word
            for word in shlex.split(self.command)
            if word.endswith(".py") and (ROOT / word).is_file()
        ]
        return found[0] if found else None

    @property
    def folder(self) -> Path:
        """Return the lesson's folder."""
        return (self.script or self.document).parent

    def stamp(self) -> Stamp:
        """Return the stamp of blocks that were printed, or looked at, just now."""
        code = shown_code(self.script) if self.script else sorted(modules_of(self.folder.name))
        return {
            "code": digests(code),
            "blocks": {
                block.title or "page": digest_of("\n".join(block.lines).encode())
                for block in self.blocks
            },
        }

    def fresh(self) -> dict[PrintedBlock, list[str]]:
        """Run the command. Returns: the lines that each block should have, but for what the command
        itself writes.

        Raises: ConfigError if the command fails, or does not print what a block shows.
        """
        with scratch(prefix="minidist-printed-") as folder:
            file = folder / "tables.json"
            output = run_command(
                self.command, folder, file if any(block.title for block in self.blocks) else None
            )
            tables = (
                json.loads(file.read_text(encoding="utf-8"))["tables"] if file.is_file() else []
            )
        try:
            return {
                block: table_lines(block, tables) if block.is_table else text_lines(block, output)
                for block in self.blocks
                if block.title
            }
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    def renew(self) -> bool:
        """Print the blocks again, in place, and say which have changed. Returns: whether the
        command could do so."""
        print(f"{self.name} …", flush=True)
        try:
            fresh = self.fresh()
        except ConfigError as error:
            print(error)
            return False
        lines = self.document.read_text(encoding="utf-8").split("\n")
        for block in sorted(fresh, key=lambda block: -block.first):
            if not alike(block.lines, fresh[block]):
                print(f"{label(self.document)}:{block.line}: {block.title}: changed")
                lines[block.first : block.first + len(block.lines)] = fresh[block]
        if fresh:
            with whole(self.document) as draft:
                draft.write_text("\n".join(lines), encoding="utf-8")
        return True


# ---------------------------------------------------------------------------- what a command prints


def run_command(command: str, folder: Path, file: Path | None) -> str:
    """Run `python …` or `minidist …` in `folder`. Returns: what it prints; its tables are in
    `file`.

    Raises: ConfigError, one line, if it fails or takes too long.
    """
    first, *rest = shlex.split(command)
    programs = {"python": [sys.executable], "minidist": module_command("minidist")}
    if first not in programs:
        raise ConfigError(
            f"{command}: a printed block's command begins with one of {', '.join(programs)}"
        )
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in rest]
    try:
        ended = subprocess.run(
            [*programs[first], *words, *(["--json", str(file)] if file else [])],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command}: still running after {LIMIT:g} seconds") from None
    if ended.returncode:
        told = ended.stdout.strip().splitlines() or ["nothing printed"]
        raise ConfigError(f"{command}: status {ended.returncode}: {told[-1]}")
    return ended.stdout


def only(title: str, told: list[str]) -> int:
    """Return the index of the only line that begins with `title`.

    Raises: ConfigError if none does, or several do.
    """
    found = [index for index, line in enumerate(told) if line.startswith(title)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} titles begin with {title!r}, not one")
    return found[0]


def cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def plain(cell: str) -> str:
    """Return a cell without the marks of bold and code."""
    return re.sub(r"[`*]", "", cell)


def cell_of(value: Any) -> str:
    """Return a printed value as a cell of a Markdown table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", r"\|")


def table_lines(block: PrintedBlock, tables: list[dict[str, Any]]) -> list[str]:
    """Return the block's table, by its head's columns. A cell keeps its bold or code if its text
    stays.

    Raises: ConfigError if there is no such table, or it has no such column.
    """
    table = tables[only(block.title, [str(table["title"]) for table in tables])]
    left = [plain(cell_of(column)) for column in table["columns"]]
    columns = list[int]()
    for head in map(plain, cells(block.lines[0])):
        if head not in left:
            raise ConfigError(
                f"the table {table['title']!r} has no column {head!r}, or too few of that name; "
                f"its columns: {', '.join(map(repr, table['columns']))}"
            )
        columns.append(left.index(head))
        left[columns[-1]] = "\0"
    before = {plain(cell): cell for line in block.lines[2:] for cell in cells(line)}
    rows = [[cell_of(row[column]) for column in columns] for row in table["rows"]]
    space = block.lines[0][: len(block.lines[0]) - len(block.lines[0].lstrip())]
    written = [f"{space}| {' | '.join(before.get(cell, cell) for cell in row)} |" for row in rows]
    return [*block.lines[:2], *(re.sub(r"\|  (?=\|)", "| ", line) for line in written)]


def text_lines(block: PrintedBlock, output: str) -> list[str]:
    """Return the lines below the block's title, up to an empty line.

    Raises: ConfigError if the output has no such title.
    """
    lines = output.splitlines()
    below = lines[only(block.title, lines) + 1 :]
    return dedent("\n".join(below[: below.index("") if "" in below else None])).splitlines()


def alike(before: tuple[str, ...], after: list[str]) -> bool:
    """Return whether the texts are the same.

    Rounding errors, such as 2.8e-06, depend on the processor: a factor of 10 is allowed. An error of
    the last digit of float64 may be none there; where the document has none, there may be none.
    """
    texts = "\n".join(line.rstrip() for line in before), "\n".join(line.rstrip() for line in after)
    errors = [[float(number) for number in ROUNDING.findall(text)] for text in texts]
    return len({ROUNDING.sub("", text) for text in texts}) == 1 and all(
        now <= 10 * shown and (shown <= 10 * now or (now == 0.0 and shown < LAST_DIGIT))
        for shown, now in zip(*errors, strict=True)
    )


# ------------------------------------------------------------------------------------ the documents


def documents() -> list[Path]:
    """Return every English document of the repository."""
    return sorted(
        path
        for path in (
            *ROOT.glob("*.md"),
            *lessons.FOLDER.rglob("*.md"),
            *(ROOT / "benchmarks").rglob("*.md"),
        )
        if not path.name.endswith(".zh.md")  # twins.py holds its blocks to the English ones'
    )


def every_printout() -> list[Printout]:
    """Return what commands print in the documents."""
    return [
        Printout(document, command, measured)
        for document in documents()
        for command, measured in marked_blocks(document)
    ]


def marked_blocks(document: Path) -> dict[tuple[str, bool], list[PrintedBlock]]:
    """Return {(command, whether it measures): the blocks of a document that it prints}."""
    found = dict[tuple[str, bool], list[PrintedBlock]]()
    lines = document.read_text(encoding="utf-8").split("\n")
    for index, line in enumerate(lines):
        mark = MARK.fullmatch(line)
        if mark and mark[1]:
            found.setdefault((mark[2], mark[1] == "measured"), []).append(
                block_at(lines, index, mark[3] or "")
            )
    return found


def block_at(lines: list[str], mark: int, title: str) -> PrintedBlock:
    """Return the block below a mark.

    Raises: ConfigError if there is none.
    """
    first = last = mark + 1
    if not title:
        last = lines.index(END, first) if END in lines[first:] else first
    elif lines[first].strip() == "```text":
        first, last = first + 1, first + 1
        while last < len(lines) and lines[last].strip() != "```":
            last += 1
    else:
        while last < len(lines) and lines[last].lstrip().startswith("|"):
            last += 1
    if last == first:
        raise ConfigError(
            f"line {mark + 1}: the mark needs a table, a fence of text, or without a title {END}"
        )
    return PrintedBlock(mark + 1, title, tuple(lines[first:last]), first)


def unmarked(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) of each block that shows output and has no mark."""
    lines = text.split("\n")
    fence = ""
    marked_until = ""
    for index, line in enumerate(lines):
        before = lines[index - 1] if index else ""
        mark = MARK.fullmatch(line)
        marked = MARK.fullmatch(before)
        if marked_until:
            marked_until = "" if line.strip() == marked_until else marked_until
        elif mark and mark[1] and not mark[3]:
            marked_until = END
        elif marked and line.lstrip().startswith("```"):
            marked_until = "```"
        elif line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
            if fence == "```text":
                yield index + 1, "a fence of text is what a program prints: it needs a mark"
        elif fence in COMMANDS and not before.endswith("\\") and not COMMAND.match(line):
            yield (
                index + 1,
                "a fence without a language holds commands; what they print goes into a fence "
                "of text",
            )
        elif (
            not fence and line.startswith("    ") and re.search(r"[│┃━]|\w(Error|Warning): ", line)
        ):
            yield index + 1, "what a program prints goes into a fence of text, with a mark"
        elif (
            not fence
            and line.lstrip().startswith("|")
            and not before.lstrip().startswith("|")
            and not marked
            and shows_figures(lines[index:])
        ):
            yield index + 1, "a table of figures needs a mark"


def shows_figures(lines: list[str]) -> bool:
    """Return whether the table at the beginning of these lines has a cell that is a number with a
    fraction or a unit."""
    rows = list(takewhile(lambda line: line.lstrip().startswith("|"), lines))
    return any(FIGURE.fullmatch(cell) for row in rows[2:] for cell in cells(row))
