"""`minidist train --local-steps`: what it prints and writes, stopped and resumed, and its mistakes
in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.cli.train import saving
from minidist.cli.train.resume import options_of
from minidist.parallel.step.replicas import weights_digest

TINY = [
    "train",
    "--transport",
    "threads",
    "--batch",
    "6",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "2",
    "--dtype",
    "float64",
    "--steps",
    "8",
]
STREAMING = [
    "-n",
    "3",
    "--local-steps",
    "4",
    "--fragments",
    "2",
    "--delay",
    "1",
    "--mix",
    "0.5",
    "--outer-compress",
    "bf16:feedback=yes",
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    return file


def train(book: Path, out: Path, *options: str) -> dict[str, Any]:
    """Train; the metrics."""
    assert main([*TINY, *options, "--data", str(book), "--out", str(out)]) == 0
    return dict(json.loads((out / "metrics.json").read_text()))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-n", "3", "--local-steps", "4"], marks=pytest.mark.soak),
        STREAMING,
        pytest.param(["-n", "2", "--local-steps", "2", "--outer", "sgd"], marks=pytest.mark.soak),
        pytest.param(["--local-steps", "8"], marks=pytest.mark.soak),
    ],
)
def test_a_run(
    options: list[str], book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = train(book, tmp_path / "run", *options)
    printed, error = capfd.readouterr()
    assert error == "" and len(metrics["losses"]) == 8
    sent = sum(sum(rank["sent_bytes"].get("dp", {}).values()) for rank in metrics["ranks"])
    told = sum(sum(rank["messages"].get("dp", {}).values()) for rank in metrics["ranks"])
    assert [sent, told] == [metrics["formula"]["sent_bytes"], metrics["formula"]["messages"]]
    every = metrics["plan"]["local_steps"]
    assert (f"what each rank sent for outer gradients in {every} steps" in printed) == (
        metrics["size"] > 1
    )
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert weights_digest(weights) == metrics["weights_sha256"] and np.isfinite(
        metrics["validation_loss"]
    )
    held = {
        name: metrics["ranks"][0]["memory"][name]["now"] / metrics["parameter_bytes"]
        for name in ("parameters", "gradients", "optimizer")
    }
    momentum = metrics["plan"]["outer"] == "nesterov"
    assert held == {"parameters": 2, "gradients": 1, "optimizer": 2 + momentum}
    assert f"16 + 8 + {16 + 8 * momentum} = {40 + 8 * momentum} bytes a parameter" in printed


def test_a_line_says_what_was_sent_up_to_its_step(
    book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The loss of step 1 is read after step 2, the first that sends."""
    train(book, tmp_path / "run", "-n", "2", "--local-steps", "2")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 1 of 8") and lines[0].endswith(" 0 B sent so far")
    assert lines[-1].startswith("step 8 of 8") and " 0 B " not in lines[-1]


def test_workers_that_meet_the_server_by_themselves(
    book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = train(
        book,
        tmp_path / "run",
        "-n",
        "3",
        "--local-steps",
        "4",
        "--strategy",
        "parameter-server",
        "--asynchronous",
    )
    assert capfd.readouterr().err == "" and len(metrics["losses"]) == 8
    for rank, expected in zip(metrics["ranks"], metrics["formula"]["by_rank"], strict=True):
        assert [
            sum(rank[kind].get("dp", {}).values()) for kind in ("sent_bytes", "messages")
        ] == expected
    assert (
        weights_digest(load_file(tmp_path / "run" / "model.safetensors"))
        == metrics["weights_sha256"]
    )


# test_resume.py, and tests/parallel/compress/test_local_steps.py without the command
@pytest.mark.soak
def test_stopped_and_resumed_it_has_the_same_bits(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After step 5, when a fragment has set out and is not mixed in yet; a checkpoint exports the
    common weights."""
    whole = train(book, tmp_path / "whole", *STREAMING)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            saving.Saver, "stopping", lambda self: 15 if self.trainer.steps_done == 5 else 0
        )
        assert (
            main([*TINY, *STREAMING, "--data", str(book), "--out", str(run), "--save-every", "8"])
            == 75
        )
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    resumed = json.loads((run / "metrics.json").read_text())
    for key in ("losses", "weights_sha256", "validation_loss", "plan"):
        assert resumed[key] == whole[key], key
    sent = sum(sum(rank["sent_bytes"].get("dp", {}).values()) for rank in resumed["ranks"])
    assert (resumed["resumed_from"], sent) == (5, resumed["formula"]["sent_bytes"])
    capfd.readouterr()
    assert main(["checkpoint", str(run), "--export", str(tmp_path / "export.safetensors")]) == 0
    assert weights_digest(load_file(tmp_path / "export.safetensors")) == whole["weights_sha256"]
    # on fewer ranks
    assert main(["train", "--resume", str(run), "-n", "2", "--steps", "12", "--quiet"]) == 0
    assert len(json.loads((run / "metrics.json").read_text())["losses"]) == 12


def test_a_run_that_was_saved_as_an_elastic_job_continues_without_elastic(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of elastic jobs with local steps exist; on another number of ranks, too."""
    run = tmp_path / "run"
    was = {"elastic": "2:3", "max_restarts": 9, "spares": 1}
    with monkeypatch.context() as patch:
        patch.setattr(saving, "options_of", lambda args: options_of(args) | was)
        train(book, run, "-n", "3", "--local-steps", "4", "--save-every", "4")
    manifest = json.loads((run / "step-000008" / "manifest.json").read_text())
    assert manifest["about"]["options"]["elastic"] == "2:3"
    for ranks, steps in ((), 12), (("-n", "2"), 16):
        capfd.readouterr()
        assert main(["train", "--resume", str(run), *ranks, "--steps", str(steps), "--quiet"]) == 0
        assert ("continues without --elastic" in capfd.readouterr().err) == (not ranks)
        metrics = json.loads((run / "metrics.json").read_text())
        assert "elastic" not in metrics and len(metrics["losses"]) == steps
        assert len(metrics["ranks"]) == (2 if ranks else 3)


def test_a_run_of_ddp_goes_on_with_local_steps(
    book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is sent from then on is what local steps send; afterwards the run keeps them."""
    run = tmp_path / "run"
    before = train(book, run, "-n", "2", "--save-every", "8")
    assert (
        main(
            [
                "train",
                "--resume",
                str(run),
                "-n",
                "3",
                "--steps",
                "16",
                "--quiet",
                *STREAMING[2:],
                "--lr",
                "2e-4",
            ]
        )
        == 0
    )
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["losses"][:8] == before["losses"] and len(metrics["losses"]) == 16
    sent = sum(sum(rank["sent_bytes"].get("dp", {}).values()) for rank in metrics["ranks"])
    assert (metrics["resumed_from"], sent) == (8, metrics["formula"]["sent_bytes"])
    capfd.readouterr()
    for options, says in (
        (["--local-steps", "2"], "--local-steps: a resumed run keeps what it has (4)"),
        (["--lr", "1e-3"], "--lr: a resumed run keeps what it has (0.0002)"),
        (["--outer", "sgd"], "--outer: a resumed run keeps what it has (nesterov)"),
    ):
        assert main(["train", "--resume", str(run), "--steps", "24", *options]) == 2
        assert says in capfd.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--local-steps", "3"], "the last 2 would have no effect; choose 6 or 9"),
        (["--local-steps", "16"], "the last 8 would have no effect; choose 16"),
        (
            ["--local-steps", "4", "--verify"],
            "do not equal a run of one process; leave out --local-steps or --verify",
        ),
        (
            ["-n", "2", "--local-steps", "4", "--elastic", "1:2"],
            "--elastic with --local-steps is not offered: save with --save-every N",
        ),
        (
            ["-n", "7", "--local-steps", "4"],
            "--batch 6: with --local-steps each of 7 ranks trains on its own sequences",
        ),
        (
            ["-n", "4", "--plan", "tp=2,dp=2", "--local-steps", "4"],
            "with tp=2: each rank trains its own whole model",
        ),
        (["--fragments", "2"], "train separately between two sums; add local_steps=25"),
        (["--local-steps", "4", "--outer-compress", "3bit"], "choose one of none, fp16"),
        (["--local-steps", "4", "--outer", "adam"], "--outer"),
        (["--local-steps", "4", "--mix", "1"], "--mix"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str],
    says: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        word
        for word in TINY
        if "--elastic" not in options or word not in ("--transport", "threads")
    ]
    assert main([*words, *options, "--data", str(book)]) != 0
    error = capfd.readouterr().err
    assert says in error and error.count("\n") == 1 and "Traceback" not in error
