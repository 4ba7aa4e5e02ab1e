"""`minidist train --attention-pattern`: on one rank and on a ring, from a file, through a
checkpoint, and to a text."""

import json
from pathlib import Path

import pytest

from minidist.cli import main

TINY = [
    "--batch",
    "2",
    "--context",
    "150",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--dtype",
    "float64",
    "--validate",
    "2",
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(
            f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(120)
        )
    )
    return file


def test_from_a_file_through_a_checkpoint_to_a_text(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ring of two ranks equals one process and sends what the formula says; the file may go once
    the run has begun."""
    monkeypatch.chdir(tmp_path)
    Path("mask").write_text("1\n11\n101\n")
    words = ["train", *TINY, "--data", str(book), "--out", "run", "--save-every", "2"]
    assert (
        main(
            [
                *words,
                "--steps",
                "2",
                "-n",
                "2",
                "--transport",
                "threads",
                "--plan",
                "cp=2",
                "--verify",
                "--attention-pattern",
                "block:mask",
            ]
        )
        == 0
    )
    assert ", attention rows (3), " in capsys.readouterr().out
    metrics = json.loads(Path("run/metrics.json").read_text())
    assert metrics["config"]["attention_pattern"] == "rows:1/3/5"
    assert metrics["verify"]["compared"] < 1e-10
    sent = sum(
        sum(verbs.values())
        for rank in metrics["ranks"]
        for axis, verbs in rank["sent_bytes"].items()
        if axis == "cp"
    )
    assert sent == metrics["formula"]["axes"]["cp"] > 0
    Path("mask").unlink()
    assert (
        main(["train", "--resume", "run", "--steps", "3", "--plan", "dp=1", "-n", "1", "--quiet"])
        == 0
    )
    again = json.loads(Path("run/metrics.json").read_text())
    assert again["losses"][:2] == metrics["losses"] and len(again["losses"]) == 3
    assert again["config"]["attention_pattern"] == "rows:1/3/5"
    assert main(["sample", "run", "--prompt", "Line ", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("Line ")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("local:100", "write local:128"),
        ("block:nowhere", "No such file"),
        ("dense", "'dense' is not a pattern"),
    ],
)
def test_a_mistake_is_one_line(
    pattern: str, says: str, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["train", *TINY, "--data", str(book), "--attention-pattern", pattern])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status and says in printed.err and printed.err.count("\n") == 1
