"""The documents for users, and the commands, programs and outputs in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from imports import ROOT

TWINS = [
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").rglob("*.zh.md")),
    *sorted((ROOT / "lessons").glob("*.zh.md")),
]
"""The Chinese twins, which have the same commands: minidist.lessons.twins."""

USERS = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").rglob("*.md")} - {*TWINS}),
    ROOT / "lessons/README.md",
]
"""The documents whose commands a test runs."""

NEEDS = {
    "a GPU": "pytest -m gpu",
    "two GPUs": "has not run yet, and docs/howto/gpus.md says so",
    "two hosts": "pytest -m cluster",
    "Slurm": "pytest -m cluster",
    "Docker": "tests/clusters/test_image.py, which follows the Dockerfile without Docker",
    "Kubernetes": "tests/launch/test_job_files.py, on the variables of its pods",
    "root": "pytest -m cluster",
    "a clone and a network": ".ci/run installs",
    "a clone and Sphinx": "tests/site/test_pages.py",
    "Jupyter": "tests/lessons/test_notebook.py, in a kernel without a browser",
    "a clone": "tests/lessons/test_drawn.py, tests/lessons/test_printed.py, "
    "tests/benchmarks/test_gpu_script.py",
    "several minutes": "tests/benchmarks/test_gpu_script.py",
    "PyTorch": "tests/test_from_torch.py, where the extra `bench` is installed",
    "a published model": "tests/cli/test_sample_weights.py, with a small model under the same names",
    "a tracker": "tests/observe/test_follow.py, with stand-ins for the trackers",
    "a running job": "tests/observe/test_exporter.py, tests/comm/flight/test_dumps.py",
}
"""{what a command says that it needs: where else it is tested}."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REMARK = re.compile(r"\s+# .*$")


@dataclass
class Command:
    """A command of a ```sh block.

    Attributes: text    as it is typed, on one line
                remark  the comments above it, and the comment on its line, with " | " between them
                output  lines that the document shows of what it prints; "…" stands for anything
    """

    text: str
    remark: str
    output: list[str] = field(default_factory=list)

    @property
    def needs(self) -> str:
        """Return what the command needs besides a laptop, or ""."""
        found = re.search(r"(?:^|\| )needs (\w+(?: \w+)*)", self.remark)
        if found is None:
            return ""
        known = [need for need in NEEDS if found[1].startswith(need)]
        assert known, f"{self.text}: needs {found[1]}, which is none of {[*NEEDS]}"
        return known[0]

    @property
    def status(self) -> int:
        """Return the exit status that the document states (0 where it states none)."""
        found = re.search(r"ends with (\d+)", self.remark)
        return int(found[1]) if found else 0


@dataclass
class File:
    """A program or a table that the document tells its reader to save."""

    name: str
    text: str


def parts(text: str, *, strict: bool = True) -> list[Command | File]:
    """Return the commands and files of a document, in its order.

    A ```text block behind a command belongs to it. A ```python, ```bash or ```csv block is a file;
    its first line names it. Unless `strict`, other blocks are left out; else they are refused.
    """
    found: list[Command | File] = []
    for language, body in BLOCK.findall(text):
        if language == "sh":
            found += _commands(body)
        elif language in ("python", "csv", "bash"):
            name = re.match(r"(?:#!.*\n)?# ([\w.]+)\n", body)
            if name is None and not strict:
                continue
            assert name, f"the first line of a {language} block names its file: {body[:60]!r}"
            found.append(File(name[1], body))
        elif language == "text" and found and isinstance(found[-1], Command):
            found[-1].output += [line for line in body.splitlines() if line.strip()]
        else:
            assert language == "text" or not strict, f"a block that no test reads: {body[:60]!r}"
    return found


def _commands(body: str) -> Iterator[Command]:
    above: list[str] = []
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            above.append(line.lstrip("# "))
        elif line.strip():
            behind = REMARK.search(line)
            remark = behind[0].strip("# ") if behind else ""
            yield Command(" ".join(REMARK.sub("", line).split()), " | ".join([*above, remark]))
            above = []


# ------------------------------------------------------------------------------------ small sizes

ADDED = {
    "train": "--steps=3 --batch=8 --context=16 --width=32 --validate=8",
    "storm": "--no-compare",
    "watch": "--once",
    "bench all-reduce": "--rounds=1",
    "bench step": "--rounds=1 --steps=1 --layers=2 --width=32 --context=16 --batch=4",
    "bench overlap-step": "--rounds=1 --steps=1 --layers=2 --width=32 --context=16 --only=tcp",
    "bench overlap": "--rounds=1 --bytes=64KiB",
    "bench save": "--rounds=1 --every=2 --saves=2 --layers=1 --width=32",
    "bench compress": "--rounds=1 --steps=4 --bandwidths=100Mbit --width=32 --ways=fp16 --ranks=2",
    "bench calibrate": "--ranks=2 --rounds=1 --only=threads --sizes=256B:1KiB",
}
"""{command: options that its test adds, where the document does not give them}."""

SHORTER = {
    "--steps 20": "--steps 3",
    "--local-steps 25 --outer nesterov": "--local-steps 5 --steps 10 --outer nesterov",
    "--save-every 100": "--save-every 2",
    "--minutes 0.5 --every 5": "--minutes 0.1 --every 2",
    "--sizes 1KiB:64MiB -n 2,4": "--sizes 1KiB:2KiB -n 2",
    "--zero 0,1,2,3 -n 2,4": "--zero 0,3 -n 2",
    "--layers 32": "--layers 4",
    "--offload all --device-memory 16MiB": "--offload all --device-memory 3MiB",
    "--layers 4 --width 128 --heads 4 --batch 8 --run 3": "--layers 1 --width 32 --heads 4 "
    "--sequence 32 --vocab 256 --batch 4 --run 1",
    "h100:16x8 --model llama3-70b --batch 256": "h100:1x4 --model gpt2 --batch 8",
    "h100:128x8 --model llama3-70b --batch 1024": "h100:4x8 --model gpt2 --batch 128",
    "--plan dp=16,pp=8,tp=8": "--plan dp=2,pp=4,tp=4",
}
"""{words of a command: what stands for them in its test}."""


def small(text: str) -> str:
    """Return a command with small sizes."""
    for long, short in SHORTER.items():
        text = re.sub(rf"{re.escape(long)}(?![\w.])", short, text)
    if resumed := re.search(r"--resume .*--steps (\d+)", text):
        return text.replace(f"--steps {resumed[1]}", f"--steps {3 + int(resumed[1]) // 500}")
    found = re.search(r"minidist (bench [\w-]+|\w+)", text)
    added = ADDED.get(found[1], "").split() if found and "--resume" not in text else []
    given = set(text.replace(" -n ", " --ranks ").replace("=", " ").split())
    return " ".join([text, *(one for one in added if one.partition("=")[0] not in given)])


# ---------------------------------------------------------------------------------------- anchors


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them, and those that it names."""
    outside = BLOCK.sub("", text)
    found = set(re.findall(r'<a id="([\w-]+)"></a>', outside))
    for heading in re.findall(r"^#+ (.+)$", outside, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def links(text: str) -> list[str]:
    """Return the targets of links and pictures outside code, without those to the network."""
    outside = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", outside) if "://" not in link]


def broken_links(document: Path) -> list[str]:
    """Return the links of a document that lead to no file, or to no heading of it."""
    text = document.read_text(encoding="utf-8")
    broken = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        there = target.exists()
        if there and anchor:
            there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not there:
            broken.append(link)
    return broken
