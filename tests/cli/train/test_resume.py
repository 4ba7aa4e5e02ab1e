"""`minidist train --save-every`, stopped and resumed: the same bits as a run that nothing happened to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.cli.train import saving
from minidist.survive.manifest import checkpoints, read_manifest, step_of

TINY = ["train", "--quiet", "--batch", "4", "--context", "8", "--layers", "2", "--width", "8", "--heads", "2",
        "--dtype", "float64"]
STEPS, STOP = 7, 4


@pytest.fixture(autouse=True)
def _no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which takes a second."""
    monkeypatch.setattr("minidist.cli.train.run_folder.draw_loss",
                        lambda path, losses, **options: path.write_text(str(len(losses))))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text("".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50)))
    return file


def train(*options: object) -> int:
    return main([*TINY, *map(str, options)])


def metrics_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "metrics.json").read_text()))


def steps_in(run: Path) -> list[int | None]:
    return [step_of(folder) for folder in checkpoints(run)]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From now on a rank is told to stop when so many steps are done."""
    monkeypatch.setattr(saving.Saver, "stopping", lambda self: 15 if self.trainer.steps_done == step else 0)


def soak(*options: str) -> Any:
    return pytest.param(options, marks=pytest.mark.soak)


@pytest.mark.parametrize("options", [
    ("-n", "4", "--plan", "dp=2,tp=2", "--zero", "1", "--dropout", "0.1"),
    ("--dtype", "float32", "--precision", "fp16", "--tied"),
    ("--strategy", "data-parallel", "--replicas", "2"),
    soak(), soak("-n", "3"), soak("-n", "2", "--zero", "2", "--accumulate", "2"),
    soak("-n", "3", "--strategy", "parameter-server", "--servers", "2"),
    soak("-n", "2", "--dtype", "float32", "--precision", "fp8", "--zero", "3"),
    soak("-n", "2", "--dtype", "float32", "--precision", "bf16", "--plan", "pp=2", "--schedule", "zb-h1"),
    soak("-n", "4", "--plan", "dp=2,ep=2", "--experts", "4", "--balance", "bias", "--gate-noise", "0.1"),
    soak("-n", "4", "--plan", "cp=2,tp=2", "--zero", "3", "--sequence-parallel"),
    soak("-n", "2", "--zero", "2", "--offload", "optimizer"), soak("-n", "2", "--offload", "all"),
    soak("--optimizer", "sgd", "--lr-schedule", "constant", "--positions", "learned", "--checkpoint-blocks")])
def test_a_run_that_was_stopped_and_resumed_has_the_same_bits(options: tuple[str, ...], book: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              capfd: pytest.CaptureFixture[str]) -> None:
    words = [*options, "--transport", "threads", "--data", book, "--steps", STEPS]
    assert train(*words, "--out", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, STOP)
        assert train(*words, "--out", tmp_path / "run", "--save-every", 3, "--keep", 2) == 75
    assert steps_in(tmp_path / "run") == [3, STOP] and not (tmp_path / "run" / "metrics.json").exists()
    assert f"told to stop after step {STOP} of {STEPS}, saved in " in capfd.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    whole, run = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "run")
    for key in ("losses", "weights_sha256", "validation_loss", "plan", "skipped_steps"):
        assert run[key] == whole[key], key
    assert (run["resumed_from"], run["steps"], run["checkpoint"]["steps"]) == (STOP, STEPS - STOP, [6, STEPS])
    assert (whole["resumed_from"], whole["steps"], whole["checkpoint"]) == (None, STEPS, None)
    assert steps_in(tmp_path / "run") == [6, STEPS]
    assert_measured_is_formula(run)


def assert_measured_is_formula(metrics: dict[str, Any]) -> None:
    """Bytes are of the steps of the resumed job alone."""
    for axis, expected in metrics["formula"].get("axes", {}).items():
        assert sum(sum(rank["sent_bytes"].get(axis, {}).values()) for rank in metrics["ranks"]) == expected
    if "by_rank" in metrics["formula"]:
        for rank, counts in zip(metrics["ranks"], metrics["formula"]["by_rank"], strict=True):
            assert sum(rank["sent_bytes"].get("dp", {}).values()) == counts[0]
    for rank in metrics["ranks"]:
        assert rank.get("moved_bytes") == rank.get("moved_formula")
    _ = np, load_file, read_manifest
