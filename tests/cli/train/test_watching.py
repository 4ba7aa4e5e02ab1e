"""minidist train --watch."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from minidist.cli import main
from minidist.cli.train.progress import line_report
from minidist.cli.train.watching import Watched

TINY = [
    "train",
    "--steps",
    "4",
    "--batch",
    "4",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "1",
    "-n",
    "2",
    "--transport",
    "threads",
]


def test_a_run_that_is_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("a b c d e f g\n" * 200)
    run = tmp_path / "run"
    assert (
        main(
            [
                *TINY,
                "--data",
                str(tmp_path / "book.txt"),
                "--out",
                str(run),
                "--watch",
                "--save-every",
                "4",
            ]
        )
        == 0
    )
    printed = capfd.readouterr()
    assert (
        printed.err == ""
        and "\nrunning: step 4 of 4  loss " in printed.out
        and "compute " in printed.out
    )
    assert printed.out.index("running: ") < printed.out.index("training loss")
    assert main([*TINY, "--out", str(tmp_path / "other"), "--watch", "--quiet"]) == 2
    assert (
        capfd.readouterr().err
        == "minidist train: --watch: --quiet prints nothing; leave out one of the two\n"
    )


def test_a_view_that_cannot_run_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are printed all the same."""
    told: list[str] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    shown = Watched(tmp_path, line_report(4, told.append))
    assert shown._view is not None
    shown._view.wait(10)
    shown.line("step 2 is saved")
    shown.step(1, 2.0, 3.0, 4)
    shown.close()
    shown.close()
    assert told == ["step 2 is saved"] and Console(file=io.StringIO()).file
