"""Every path that a document names is there."""

import re

import pytest
from imports import ROOT

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "lessons/README.md",
    "lessons/COLLECTIVES.md",
    "benchmarks/results/README.md",
    "benchmarks/results/gpu/README.md",
]
PLACEHOLDERS = ("NN_name", "name.")  # lessons/NN_name/, kernels/name.cu
MADE_BY_A_RUN = {"exercise_03.py", "script.py", "program.py"}
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".md", ".json", ".png", ".sh", "/")


def paths_named(text: str) -> list[str]:
    """Words in backticks or code blocks that are a path into one of the project's folders, or a
    source file's name."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    code += re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    words = [word.rstrip(",.;:)") for part in code for word in part.split()]
    inside = re.compile(r"(minidist|kernels|lessons|tests|benchmarks|\.ci)/[\w./-]*")
    return [
        word
        for word in words
        if (inside.fullmatch(word) or re.fullmatch(r"\w+\.(py|cu|cuh|h)", word))
        and not any(mark in word for mark in PLACEHOLDERS)
        and word not in MADE_BY_A_RUN
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_exists(name: str) -> None:
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
    named = paths_named(text)
    assert [path for path in named if "/" in path and not (ROOT / path).exists()] == []
    files = {
        path.name
        for folder in ("minidist", "benchmarks", "kernels", "lessons", "tests")
        for path in (ROOT / folder).rglob("*")
    }
    assert [path for path in named if "/" not in path and path not in files] == []


def test_paths_are_found_in_text() -> None:
    text = (
        "`minidist/nn/gpt.py`, `no path`, `kernels/name.cu`\n```\npython "
        "lessons/03_ring/lesson.py\n```\n`select.py`"
    )
    assert paths_named(text) == ["minidist/nn/gpt.py", "select.py", "lessons/03_ring/lesson.py"]
    assert len(paths_named((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))) > 20
