"""docs/measured/: a page per machine, from the files of results: newest first, each with its command,
its table and what was read from it.

The tables are those that the commands print. What was read from a result is written by hand, in
benchmarks/results/README.md, in the row of the result's file.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from minidist.bench.command import show_result
from minidist.cli.storm import storm_lines
from minidist.reference.headlines import headline
from minidist.reference.markdown import block, head, page, table

WIDTH = 200
UP = "../../benchmarks/results"
PAGES = {"AMD EPYC": "amd-epyc", "Intel(R) Xeon(R) Processor": "intel-xeon"}
"""{processor or GPU: the name of its page}; a new machine gets its name in lower case."""


@dataclass(frozen=True)
class Measured:
    """A file of results.

    Attributes: file    from the folder of results
                values  what it holds
                note    what was read from it, by hand; may be ""
    """

    file: str
    values: dict[str, Any]
    note: str

    @property
    def date(self) -> str:
        return str(self.values["machine"]["date"])

    @property
    def machine(self) -> str:
        """Return the name of the GPU, else of the processor."""
        gpu = self.values.get("run", {}).get("device")
        return str(gpu or self.values["machine"]["processor"])

    @property
    def title(self) -> str:
        """Return what was measured."""
        return str(self.values.get("what", "storm"))

    def anchor(self, results: list["Measured"]) -> str:
        """Return the anchor of its heading on the page of `results`: the second of equal headings
        has -1."""
        equal = [
            each for each in results if (each.title, each.date[:10]) == (self.title, self.date[:10])
        ]
        number = equal.index(self)
        return f"{self.title}-{self.date[:10]}" + (f"-{number}" if number else "")


def measured_pages(folder: Path) -> dict[str, str]:
    """Return {name: text} of the pages. Args: folder: that of the results."""
    by_machine: dict[str, list[Measured]] = {}
    for each in sorted(_results(folder), key=lambda each: (each.date, each.file), reverse=True):
        by_machine.setdefault(each.machine, []).append(each)
    pages = {
        f"{page_name(name)}.md": _page(name, all_, folder) for name, all_ in by_machine.items()
    }
    return {"README.md": _index(by_machine)} | pages


def page_name(machine: str) -> str:
    """Return the name of a machine's page, without its ending."""
    return PAGES.get(machine) or re.sub(r"\W+", "-", machine.lower()).strip("-")


def _results(folder: Path) -> Iterator[Measured]:
    notes = notes_by_file((folder / "README.md").read_text(encoding="utf-8"))
    for file in sorted(folder.rglob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        if "machine" in values:
            name = str(file.relative_to(folder))
            yield Measured(name, values, notes.get(name, ""))


def notes_by_file(text: str) -> dict[str, str]:
    """Return {file: what was read from it}, from the rows of tables whose first cell names files.

    `all-reduce-shm-amd.json`, `all-gather-…` stand for files with the same ending.
    """
    found: dict[str, str] = {}
    for row in re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", text, re.MULTILINE):
        ending = ""
        for name in re.findall(r"`([\w./…-]+)`", row[0]):
            if name.endswith(".json"):
                ending = name[name.find("-shm") :] if "-shm" in name else ""
                found[name] = row[1]
            elif name.endswith("-…"):
                found[name.removesuffix("-…") + ending] = row[1]
    return found


def _index(by_machine: dict[str, list[Measured]]) -> str:
    """Return the page that lists the machines."""
    lines = head(
        "Measured",
        "After this page you know where each measurement is, and how to make it on your machine.",
        "All contenders of a result took turns in one run, and figures are medians. Read the "
        "ratios, not the times, and single ratios with care: on virtual machines with two cores "
        "they change from run to run by a factor of up to two. `minidist bench` measures your "
        "machine: [measure this machine](../howto/measure.md).",
    )
    rows = []
    for machine, results in by_machine.items():
        newest = results[0].values["machine"]
        what = ", ".join(dict.fromkeys(each.title for each in results))
        link = f"[{machine}]({page_name(machine)}.md)"
        rows.append((link, str(newest["cores"]), results[0].date[:10], what))
    lines += table(["machine", "cores", "newest", "what"], rows)
    for machine, results in by_machine.items():
        lines += ["", f"## {machine}"]
        in_short = [
            (
                f"[{each.title}]({page_name(machine)}.md#{each.anchor(results)})",
                each.date[:10],
                told,
            )
            for each in results
            if (told := headline(each.values))
        ]
        lines += table(["what", "date", "in one line"], in_short)
    lines += [
        "",
        f"The files of all results, and what was read from each: [results]({UP}/README.md); "
        f"[on a GPU]({UP}/gpu/README.md).",
    ]
    return page(lines)


def _page(machine: str, results: list[Measured], folder: Path) -> str:
    """Return the page of a machine."""
    lines = head(
        f"Measured on {machine}",
        f"After this page you know what was measured on this machine: {machine}, "
        f"{results[0].values['machine']['cores']} cores. The newest result comes first.",
    )
    for each in results:
        about = each.values["machine"]
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        lines += ["", f"## {each.title}, {each.date[:10]}"]
        lines += block(command_of(each))
        lines += ["", f"Python {about['python']}, {versions}. [{each.file}]({UP}/{each.file})"]
        lines += ["", each.note] if each.note else []
        lines += block(table_of(each))
        picture = Path(each.file).with_suffix(".png")
        if (folder / picture).exists():
            lines += ["", f"![{each.title}]({UP}/{picture})"]
    return page(lines)


def command_of(result: Measured) -> str:
    """Return the command of a result, without the files that it wrote."""
    command = result.values["machine"]["command"]
    return re.sub(r" --(json|figure|resume) \S+", "", command)


def table_of(result: Measured) -> str:
    """Return the table that the command prints."""
    if "faults" in result.values:
        return "\n".join(storm_lines(result.values))
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, force_terminal=False)
    show_result(result.values, console)
    return stream.getvalue()
