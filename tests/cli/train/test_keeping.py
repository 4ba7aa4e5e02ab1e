"""`minidist train --keep-activations` and `--activation-memory`: options, traffic by formula,
metrics."""

import json
from pathlib import Path
from typing import Any

import pytest

from minidist.cli import main

SMALL = [
    "--steps",
    "5",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--quiet",
    "--transport",
    "threads",
    "--dtype",
    "float64",
]


def metrics(folder: Path, *options: str) -> dict[str, Any]:
    """metrics.json of a run on a short text that is equal to a serial one."""
    file = folder / "metrics.json"
    book = folder / "book.txt"
    book.write_text("to be or not to be, that is the question\n" * 50)
    assert (
        main(
            [
                "train",
                *SMALL,
                "--data",
                str(book),
                *options,
                "--verify",
                "--out",
                str(folder / "run"),
                "--json",
                str(file),
            ]
        )
        == 0
    )
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def sent(found: dict[str, Any], axis: str) -> int:
    return sum(sum(rank["sent_bytes"].get(axis, {}).values()) for rank in found["ranks"])


def test_all_three_ways(tmp_path: Path) -> None:
    found = metrics(
        tmp_path,
        "-n",
        "2",
        "--plan",
        "tp=2",
        "--checkpoint-blocks",
        "--keep-activations",
        "8bit,shard,offload",
    )
    assert sent(found, "tp") == found["formula"]["axes"]["tp"]
    kept = found["ranks"][0]["kept_inputs"]
    assert kept["input_bytes"] == 5 * 2 * 4 * 16 * 16 * 8
    assert kept["kept_bytes"] == 5 * 2 * 4 * 16 * (16 + 4) // 2
    assert kept["moved_bytes"] == {
        way: kept["kept_bytes"] for way in ("device to host", "host to device")
    }
    assert kept["host_bytes"] == kept["kept_bytes"] // 5


@pytest.mark.soak
def test_a_budget(tmp_path: Path) -> None:
    found = metrics(tmp_path, "-n", "2", "--plan", "tp=2", "--activation-memory", "1GiB")
    assert found["activation_choice"] == ["none", "none"]
    assert sent(found, "tp") == found["formula"]["axes"]["tp"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--keep-activations", "8bit"], "no block keeps only its input"),
        (
            ["--keep-activations", "8bit", "--checkpoint-blocks", "--verify", "--dtype", "float32"],
            "add --dtype float64",
        ),
        (
            ["--keep-activations", "zip", "--checkpoint-blocks"],
            "choose whole, or one or several of",
        ),
        (["--activation-memory", "1MiB", "--checkpoint-blocks"], "leave one of the two out"),
        (
            ["--activation-memory", "8KiB"],
            "activation memory: with every block computed again a rank needs",
        ),
    ],
    ids=str,
)
def test_wrong_options_are_refused_in_a_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *SMALL, *options, "--out", str(tmp_path / "run")]) != 0
    assert says in " ".join(capsys.readouterr().err.split())
