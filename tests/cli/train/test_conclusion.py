"""After the last step: the results come first, and what is made of them fails by itself; nobody is
hurried."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers import becomes_unhurried
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.cli.train import command, run_folder
from minidist.cli.train import metrics as train_metrics
from minidist.comm.group import Group
from minidist.errors import MismatchError
from minidist.observe.timeline import Timeline
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.replicas import weights_digest

TINY = [
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
    "2",
    "--validate",
    "4",
]
SLOW = """import time
from minidist.cli.train import command
init, sample = command.init, command.sample
command.init = lambda **options: init(limit=5.0, **options)
command.sample = lambda *args, **options: (time.sleep(8.0), sample(*args, **options))[1]
"""
"""A sitecustomize.py: waits last 5 s at most, and rank 0 works alone for 8 s."""
THREADS = ["-n", "2", "--transport", "threads"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(60))
    )
    return file


def train(book: Path, folder: Path, *options: str) -> tuple[int, str]:
    """Train two threads; the exit status and stderr."""
    error = io.StringIO()
    with redirect_stderr(error), redirect_stdout(io.StringIO()):
        status = main(
            ["train", *TINY, *THREADS, "--data", str(book), "--out", str(folder), *options]
        )
    return status, error.getvalue()


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("a mistake of\nseveral lines")


def require_results(folder: Path) -> dict[str, Any]:
    """The metrics of a run whose weights are there."""
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["losses"]) == 4
    assert weights_digest(load_file(folder / "model.safetensors")) == metrics["weights_sha256"]
    assert {name: run_folder.sha256(folder / name) for name in metrics["files"]} == metrics["files"]
    return metrics


PIECES = {
    "the explanation": (command, "why", "--why"),
    "the chosen step": (command, "typical_step", "--why"),
    "its picture": (run_folder, "draw_why", "why.png"),
    "the loss's picture": (run_folder, "draw_loss", "loss.png"),
    "the trace": (run_folder, "write_perfetto", "trace.json"),
    "the gathering": (Timeline, "collect", "trace.json"),
    "the sample": (command, "sample", "the sample"),
    "the report": (command, "print_report", "the report"),
    "the formulas": (train_metrics, "gradient_formula", "the comparison with formulas"),
    "the validation": (Trainer, "evaluate", "the validation"),
}


@pytest.mark.parametrize("piece", PIECES)
def test_what_is_made_of_the_results_fails_alone_and_in_one_line(
    piece: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name, what = PIECES[piece]

    def late_and_broken(*_: Any, **__: Any) -> Any:
        require_results(tmp_path)  # they are on the disk before the piece begins
        return broken()

    # tests/observe/test_why.py draws it
    monkeypatch.setattr(run_folder, "draw_why", lambda path, *_: path.touch())
    monkeypatch.setattr(home, name, late_and_broken)
    status, error = train(book, tmp_path, "--why")
    lines = error.splitlines()
    assert status == 0 and lines[0].startswith(f"minidist train: {what} failed: KeyError: "), error
    assert len(lines) == 1
    metrics = require_results(tmp_path)
    assert (metrics["validation_loss"] is None) == (piece == "the validation")
    assert ("why" in metrics) == (
        piece not in ("the explanation", "the chosen step", "the gathering")
    )
    for look in (["diagnose"], ["report"], ["watch", "--once"], ["sample", "--tokens", "3"]):
        with redirect_stdout(io.StringIO()):
            assert main([look[0], str(tmp_path), *look[1:]]) == 0, look


def test_a_run_needs_no_mpi4py(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = metadata.version

    def without(name: str) -> str:
        if name in ("mpi4py", "mpich"):
            raise metadata.PackageNotFoundError(name)
        return usual(name)

    monkeypatch.setattr(metadata, "version", without)
    assert train(book, tmp_path) == (0, "")
    metrics = require_results(tmp_path)
    assert [*metrics["versions"]] == ["python", "minidist", "numpy"] and metrics["formula"]


@pytest.mark.parametrize("name", ["evaluate", "check_replicas"])
def test_an_error_of_one_rank_among_all_costs_no_results(
    name: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others send in that work, so the job ends; what the rank has met is told, whichever error
    ends it."""
    usual: Callable[..., Any] = getattr(Trainer, name)
    monkeypatch.setattr(
        Trainer, name, lambda self, *args: (broken if self.world.rank else usual)(self, *args)
    )
    words = ["train", *TINY, *THREADS, "--data", str(book), "--out", str(tmp_path)]
    with pytest.raises((KeyError, MismatchError)):
        main(words)
    require_results(tmp_path)
    told = "minidist train: rank 1: the validation failed: KeyError: "
    assert name != "evaluate" or capsys.readouterr().err.startswith(told)


def test_a_verification_that_fails_is_no_success(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minidist.cli.train.verify.train_alone", broken)
    status, error = train(book, tmp_path, "--verify", "--dtype", "float64")
    assert (
        status == 1
        and error.startswith("minidist train: --verify failed: KeyError")
        and error.count("\n") == 1
    )
    require_results(tmp_path)


@pytest.mark.parametrize("slow", ["sample", "write_results", "write_views"])
def test_ranks_wait_as_long_as_rank_0_works_alone(
    slow: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 goes on only when the limit of the other's wait is a day."""
    worlds = list[Group]()
    usual = getattr(command, slow)
    waited = []
    build = Trainer.__init__

    def noted(self: Trainer, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        worlds.append(self.world)

    def patient(*args: Any, **options: Any) -> Any:
        (other,) = (world.transport for world in worlds if world.rank == 1)
        waited.append(becomes_unhurried(other))
        return usual(*args, **options)

    monkeypatch.setattr(Trainer, "__init__", noted)
    monkeypatch.setattr(command, slow, patient)
    assert train(book, tmp_path) == (0, "")
    assert waited == [True]
    assert {world.transport.limit for world in worlds} == {command.WAIT_LIMIT}


@pytest.mark.soak
@pytest.mark.parametrize(
    "by", [["mpirun", "-n", "2"], [sys.executable, "-m", "minidist", "launch", "-n", "2"]]
)
def test_a_sample_may_take_longer_than_the_limit(by: list[str], book: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    run = [sys.executable, "-m", "minidist"] if by[0] == "mpirun" else ["-m", "minidist"]
    done = subprocess.run(
        [*by, *run, "train", *TINY, "--data", str(book), "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
