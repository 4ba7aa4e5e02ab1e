"""minidist bench overlap-step: shares, and the recorded step of the figure."""

import argparse
import json

import pytest

from minidist.bench.overlap_step import Contender
from minidist.bench.what_if import applies, change, text_of
from minidist.cli import main
from minidist.observe.what_if import Change


def test_changes_are_read_and_written():
    asked = change("bucket=1MiB,alpha=1e-4,bandwidth=250MB,ahead=0,order=forward,priority=on")
    assert asked == Change(1 << 20, 1e-4, 250_000_000, 0, "forward", True)
    assert change(text_of(asked)) == asked
    assert text_of(change("ahead=2")) == "ahead=2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bucket",
        "bucket=0",
        "bucket=many",
        "ahead=-1",
        "order=sideways",
        "speed=2",
        "alpha=nan",
        "priority=maybe",
    ],
)
def test_what_is_no_change_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no change of a step; write bucket=1MiB"):
        change(text)


def test_a_change_applies_where_there_is_what_it_changes():
    ddp = Contender("ddp", "delayed")
    zero3 = Contender("zero3", "delayed", 1)
    tcp = Contender("ddp", "tcp")
    assert applies(change("bucket=1MiB"), ddp) and not applies(change("bucket=1MiB"), zero3)
    assert applies(change("ahead=2"), zero3) and not applies(change("ahead=2"), ddp)
    assert applies(change("alpha=1e-4"), ddp) and not applies(change("alpha=1e-4"), tcp)


def test_what_if_asks_for_why(capsys):
    assert main(["bench", "overlap-step", "--what-if", "ahead=2"]) == 2
    assert "add --why" in capsys.readouterr().err


@pytest.mark.soak
def test_overlap_of_a_step(tmp_path, capsys):
    """ZeRO-3 with prefetch off and on over delayed links: shares, and the step that the figure
    shows."""
    file = tmp_path / "step.json"
    picture = tmp_path / "step.png"
    assert (
        main(
            [
                "bench",
                "overlap-step",
                "--strategy",
                "zero3",
                "--only",
                "delayed",
                "--layers",
                "2",
                "--width",
                "16",
                "--context",
                "8",
                "--rounds",
                "1",
                "--steps",
                "1",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == [
        "zero3, prefetch off, delayed",
        "zero3, prefetch on, delayed",
    ]
    for row in result["rows"]:
        assert 0 <= row["share"] <= 1 and 0 < row["communication"] < row["step_seconds"]
        for spans in row["steps"]:  # each rank's: six units, gathered twice
            assert (
                sum(
                    span["details"].get("verb") == "all_gather"
                    and span["details"]["axis"] != "control"
                    for span in spans
                )
                == 2 * 6
            )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "prefetch off" in capsys.readouterr().out


@pytest.mark.soak
def test_why_and_what_if(tmp_path, capsys):
    """Every second in which a rank stood still has a cause; each change that applies is predicted,
    and run."""
    file = tmp_path / "why.json"
    picture = tmp_path / "why.png"
    assert (
        main(
            [
                "bench",
                "overlap-step",
                "--strategy",
                "ddp,zero3",
                "--only",
                "delayed",
                "--layers",
                "2",
                "--width",
                "16",
                "--context",
                "8",
                "--rounds",
                "1",
                "--steps",
                "2",
                "--why",
                "--what-if",
                "bucket=64KiB",
                "--what-if",
                "ahead=2",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        why = row["why"]
        assert why["step"] in (1, 2) and sum(why["causes"].values()) == pytest.approx(
            sum(why["exposed"])
        )
        [told] = row["what_if"]
        assert told["predicted"] > 0 and told["measured"] > 0
    assert [row["what_if"][0]["change"] for row in rows] == ["bucket=65536", "ahead=2", "ahead=2"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "what if (ms a step)" in capsys.readouterr().out
