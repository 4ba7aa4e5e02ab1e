"""`minidist train --compress`: bytes beside the formula, what they would be without, and mistakes
in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from minidist.cli import main
from minidist.cli.train.compressed_traffic import saving, sent_by

TINY = [
    "train",
    "--transport",
    "threads",
    "--steps",
    "4",
    "--batch",
    "6",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--threads",
    "1",
]


def trained(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """The metrics of a run on a short text, and what it printed."""
    book = folder.parent / "book.txt"
    book.write_text("to be or not to be, that is the question\n" * 50)
    assert main([*TINY, "--data", str(book), *options, "--out", str(folder)]) == 0
    return json.loads(
        (folder / "metrics.json").read_text(encoding="utf-8")
    ), capsys.readouterr().out


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("options", "known"),
    [
        (["-n", "3", "--compress", "8bit:block=16"], True),
        (["-n", "2", "--zero", "1", "--compress", "4bit"], True),
        (["-n", "4", "--plan", "dp=2,tp=2", "--compress", "fp16"], True),
        (["-n", "3", "--compress", "threshold:value=0.01"], False),
    ],
)
def test_bytes_beside_the_formula(
    options: list[str], known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, printed = trained(options, tmp_path / "run", capsys)
    formula = metrics["formula"]
    sent = sum(sent_by(rank, "sent_bytes") for rank in metrics["ranks"])
    assert metrics["plan"]["compress"] == metrics["options"]["compress"] == options[-1]
    assert formula["sent_bytes"] == (sent if known else None)
    assert saving(metrics) in printed
    along = sum(sent_by(rank, "sent_bytes", formula["plain"]) for rank in metrics["ranks"])
    assert f"{sum(formula['plain'].values()) / along:.1f} times fewer" in printed
    if "axes" not in formula:
        assert f"{sent // 4:,}" in printed and "by formula" in printed


@pytest.mark.soak
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "-n",
        "3",
        "--compress",
        "4bit:block=16",
        "--lr-schedule",
        "constant",
        "--save-every",
        "2",
    ]
    straight, _ = trained(options, tmp_path / "straight", capsys)
    assert (
        main(
            [
                "train",
                "--resume",
                str(tmp_path / "straight" / "step-000002"),
                "--transport",
                "threads",
                "--out",
                str(tmp_path / "again"),
            ]
        )
        == 0
    )
    again = json.loads((tmp_path / "again" / "metrics.json").read_text(encoding="utf-8"))
    assert again["resumed_from"] == 2 and again["weights_sha256"] == straight["weights_sha256"]
    assert again["losses"] == straight["losses"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["-n", "2", "--compress", "zip"],
            "compress 'zip': there is no scheme 'zip'; choose one of none, fp16, bf16",
        ),
        (["-n", "2", "--compress", "8bit", "--zero", "3"], "which sends weights in every pass"),
        (
            ["-n", "1", "--compress", "8bit"],
            "which has no ranks that sum gradients; use dp=2, or compress=none",
        ),
        (
            ["-n", "2", "--compress", "8bit", "--verify"],
            "compressed gradients are not those of one process",
        ),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
