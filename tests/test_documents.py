"""The documents: every path, link and anchor is there; every command and program works, and prints
what the document shows."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documents import (
    NEEDS,
    TWINS,
    USERS,
    Command,
    File,
    anchors,
    broken_links,
    parts,
    small,
)
from imports import ROOT

from minidist.cli import COMMANDS, _parser

DOCUMENTS = sorted(
    {
        *USERS,
        *TWINS,
        *(
            ROOT / name
            for name in (
                "CONTRIBUTING.md",
                "lessons/COLLECTIVES.md",
                "benchmarks/results/README.md",
                "benchmarks/results/gpu/README.md",
            )
        ),
    }
)
PLACEHOLDERS = ("NN_name", "name.")  # lessons/NN_name/, kernels/name.cu
MADE_BY_A_RUN = {
    "exercise_03.py",
    "assignment_1.py",
    "script.py",
}  # slurm.md names the program of hosts.md
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".md", ".json", ".png", ".sh", "/")


each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def paths_named(text: str) -> list[str]:
    """Words in backticks or code blocks that are a path into one of the project's folders, or a
    source file's name."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    code += re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    words = [word.rstrip(",.;:)") for part in code for word in part.split()]
    saved = {part.name for part in parts(text, strict=False) if isinstance(part, File)}
    inside = re.compile(r"(minidist|kernels|lessons|tests|benchmarks|\.ci)/[\w./-]*")
    return [
        word
        for word in words
        if (inside.fullmatch(word) or re.fullmatch(r"\w+\.(py|cu|cuh|h)", word))
        and not any(mark in word for mark in PLACEHOLDERS)
        and word not in MADE_BY_A_RUN | saved
    ]


@each_document
def test_every_path_exists(document: Path) -> None:
    named = paths_named(document.read_text(encoding="utf-8"))
    assert [path for path in named if "/" in path and not (ROOT / path).exists()] == []
    files = {
        path.name
        for folder in ("minidist", "benchmarks", "kernels", "lessons", "tests")
        for path in (ROOT / folder).rglob("*")
    }
    assert [path for path in named if "/" not in path and path not in files] == []


@each_document
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links(document) == []


def test_paths_are_found_in_text() -> None:
    text = (
        "`minidist/nn/gpt.py`, `no path`, `kernels/name.cu`\n```\npython "
        "lessons/03_ring/lesson.py\n```\n`select.py`"
    )
    assert paths_named(text) == ["minidist/nn/gpt.py", "select.py", "lessons/03_ring/lesson.py"]
    assert len(paths_named((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))) > 20


# ------------------------------------------------------------------------------ links and anchors


def test_an_anchor_is_made_as_github_makes_it(tmp_path: Path) -> None:
    text = "# `minidist train`\n## 9 What is it, and why?\n## 9 What is it, and why?\n"
    nine = "9-what-is-it-and-why"
    assert anchors(text) == {"minidist-train", nine, f"{nine}-1"}
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](#here) [b](#there) [c](page.md#here) [d](gone.md) [e](https://x.org/y)\n"
        "`[f](code.md)`\n```text\n[g](fence.md)\n```\n"
    )
    assert broken_links(page) == ["#there", "gone.md"]


def test_every_page_is_reached_from_the_readme() -> None:
    from documents import links

    reached: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            names = [link.partition("#")[0] for link in links(page.read_text(encoding="utf-8"))]
            ahead += [page.parent / name for name in names if name]
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - reached == set()


def test_every_page_begins_with_what_its_reader_can_do() -> None:
    """Pages of docs/ that are made from code say instead how they are made."""
    without = [
        path.relative_to(ROOT)
        for path in (ROOT / "docs").rglob("*.md")
        if not re.match(
            r"# [^\n]+\n\n(<!-- made by: |After this page you |This page says |读完本页，你能)",
            path.read_text(encoding="utf-8"),
        )
    ]
    assert without == []


# --------------------------------------------------------------------------------------- commands

USERS_BY_NAME = {str(path.relative_to(ROOT)): path for path in USERS}
WITH_PARTS = [
    name for name, path in USERS_BY_NAME.items() if parts(path.read_text(encoding="utf-8"))
]
OF_OTHERS = (
    *("eval", "python", "pip", "pytest", "curl", "docker", "kubectl", "jupyter"),
    *("mpirun", "srun", "sbatch", "torchrun"),
)
SCRIPTS = ("tests/clusters/up.sh", "benchmarks/gpu.sh")


def parse(text: str) -> None:
    """Parse each `minidist` command of a line as the command line does."""
    for one in re.split(r" && ", text):
        words = shlex.split(one)
        if "minidist" not in words:
            assert words[0] in (*OF_OTHERS, *SCRIPTS), one
            continue
        words = words[words.index("minidist") + 1 :]
        name = words[0]
        assert name in COMMANDS, one
        special = {"train": "cli.train.command", "bench": "bench.command"}
        module = importlib.import_module(f"minidist.{special.get(name, f'cli.{name}')}")
        _parser({name: module}).parse_args(words)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_every_command_can_be_parsed_also_at_small_sizes(name: str) -> None:
    for part in parts(USERS_BY_NAME[name].read_text(encoding="utf-8")):
        if isinstance(part, Command):
            parse(part.text)
            parse(small(part.text))
            assert part.needs in ("", *NEEDS)
        elif part.name.endswith(".sh"):
            for line in re.findall(r"^srun .*$", part.text, re.MULTILINE):
                parse(line)


def test_what_is_tested_elsewhere_is_tested_there() -> None:
    tests = re.findall(r"tests/[\w/]+\.py", " ".join(NEEDS.values()))
    assert tests and [test for test in tests if not (ROOT / test).exists()] == []


def test_a_wrong_option_in_a_document_is_found() -> None:
    with pytest.raises(ValueError, match="zer0"):
        parse("minidist train --zer0 1")
    with pytest.raises(AssertionError, match="trane"):
        parse("minidist trane")


def told(text: str, *, exactly: bool) -> str:
    """Return a text with single spaces; unless `exactly`, with # for each number."""
    plain = " ".join(text.split())
    return plain if exactly else re.sub(r"\d[\d,.]*", "#", plain)


def shown(line: str, printed: str) -> bool:
    """Return whether a text has a line; "…" in the line stands for anything."""
    return all(piece.strip() in printed for piece in line.split("…"))


def problems(found: list[Command | File], folder: Path) -> list[str]:
    """Return what goes wrong when a reader follows a document in an empty folder.

    A program's lines must be printed as they stand. Of the lines of a `minidist` command the
    numbers may differ, unless its remark says SAME_EVERYWHERE.
    """
    wrong = []
    (folder / "my_notes").mkdir()
    (folder / "my_notes" / "a.txt").write_text("This is a text of a user, for a model. " * 200)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for part in found:
        if isinstance(part, File):
            (folder / part.name).write_text(part.text, encoding="utf-8")
        elif not part.needs and not part.text.startswith("pip install"):
            command = small(part.text)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            printed = done.stdout + done.stderr
            if done.returncode != part.status:
                wrong.append(f"{command}: status {done.returncode}: {printed[-2000:]}")
            exactly = command.startswith("python ") or SAME_EVERYWHERE in part.remark
            wrong += [
                f"{command}: does not print {line!r} but {printed[-2000:]}"
                for line in part.output
                if not shown(told(line, exactly=exactly), told(printed, exactly=exactly))
            ]
    return wrong


SAME_EVERYWHERE = "these lines are the same on every machine"

QUICK = {
    "README.md",
    "docs/concepts/ledger-and-memory.md",
    "docs/concepts/never-hangs.md",
    "docs/howto/hosts.md",
    "docs/teaching/README.md",
}
"""Documents that the default run follows; the others take minutes."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in WITH_PARTS],
)
def test_who_follows_a_document_sees_what_it_shows(name: str, tmp_path: Path) -> None:
    """pip install lines are run by .ci/run."""
    text = USERS_BY_NAME[name].read_text(encoding="utf-8")
    assert problems(parts(text), tmp_path) == []


def test_a_document_that_is_wrong_is_found(tmp_path: Path) -> None:
    text = (
        "```python\n# one.py\nprint(6)\n```\n```sh\npython one.py\n```\n```text\n7\n```\n"
        "```sh\nminidist lesson 99    # ends with 1\n```\n```text\nthere is no lesson '12'\n```\n"
    )
    wrong = problems(parts(text), tmp_path)
    assert len(wrong) == 2
    assert "does not print '7'" in wrong[0]
    assert "status 2" in wrong[1]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("transport", ["threads", "tcp", "shm", "mpi"])
def test_the_program_of_quickstart_prints_the_sum_over_every_transport(
    transport: str, tmp_path: Path
) -> None:
    found = parts(USERS_BY_NAME["docs/quickstart.md"].read_text(encoding="utf-8"))
    program = next(part for part in found if isinstance(part, File))
    assert '"threads"' in program.text
    (tmp_path / program.name).write_text(program.text.replace("threads", transport, 1))
    done = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("array([6., 4.])") == 4
