"""The learning rate of `minidist train`, and updates for a number of tokens."""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from minidist.cli import main
from minidist.cli.train import saving
from minidist.parallel.state.manifest import checkpoints, read_manifest

TINY = [
    "train",
    "--steps",
    "4",
    "--batch",
    "5",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--dtype",
    "float64",
    "--quiet",
]


def train(folder: Path, *words: str) -> dict[str, Any]:
    """Train on two ranks as threads; the run's metrics."""
    text = folder / "book.txt"
    text.write_text(
        "".join(
            f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(120)
        )
    )
    assert (
        main(
            [
                *TINY,
                "-n",
                "2",
                "--transport",
                "threads",
                "--data",
                str(text),
                "--out",
                str(folder / "run"),
                "--json",
                str(folder / "metrics.json"),
                *words,
            ]
        )
        == 0
    )
    return json.loads((folder / "metrics.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        (
            ["--lr-schedule", "linear", "--lr-floor", "0"],
            {"name": "linear", "floor": 0.0, "warmup": 1, "total": 4},
        ),
        pytest.param(
            ["--lr-schedule", "wsd", "--lr-decay", "2", "--warmup", "0"],
            {"name": "wsd", "decay": 2, "warmup": 0},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["--lr-schedule", "step", "--lr-every", "2", "--lr-factor", "0.5"],
            {"name": "step", "every": 2, "factor": 0.5},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["--lr-schedule", "inverse-sqrt"], {"name": "inverse-sqrt"}, marks=pytest.mark.soak
        ),
    ],
)
def test_schedules(words: list[str], recorded: dict[str, Any], tmp_path: Path) -> None:
    """On two ranks as on one; the checkpoint says which rates."""
    metrics = train(tmp_path, "--verify", "--save-every", "4", *words)
    assert metrics["verify"]["largest"] <= 1e-10
    saved = read_manifest(checkpoints(tmp_path / "run")[0])["about"]["learning_rate"]
    assert saved | recorded == saved


def test_tokens_make_passes(tmp_path: Path) -> None:
    """5 sequences of 16 tokens a pass: 200 tokens are three passes of 15 sequences."""
    for name in ("tokens", "passes"):
        (tmp_path / name).mkdir()
    tokens = train(tmp_path / "tokens", "--accumulate-tokens", "200")
    passes = train(tmp_path / "passes", "--batch", "15", "--accumulate", "3")
    assert tokens["plan"]["accumulate"] == 3
    assert (
        tokens["weights_sha256"] == passes["weights_sha256"]
        and tokens["losses"] == passes["losses"]
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr-decay", "2"], "--lr-decay is for --lr-schedule wsd, not cosine"),
        (["--lr-schedule", "wsd", "--lr-decay", "9"], "a decay of 9 steps does not fit a run of 4"),
        (["--warmup", "5"], "a warm-up of 5 steps does not fit a run of 4"),
    ],
)
def test_what_does_not_fit(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) != 0
    assert says in capsys.readouterr().err


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [],
            "the learning rate jumps from 0.000425 to 0.00392 in step 21: cosine over 200 "
            "steps, and it was over 20; its warm-up stays 1 step",
        ),
        (["--lr-schedule", "constant"], None),
        (["--lr-schedule", "wsd"], "in step 21: wsd over 200 steps, and it was over 20"),
        (["--lr-schedule", "step"], None),
        (["--lr-schedule", "inverse-sqrt"], None),
    ],
)
def test_a_run_with_more_steps_tells_the_jump_of_its_rate(
    words: list[str], says: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--save-every", "20", "--steps", "20", *words)
    before = manifest_of(tmp_path)
    told = [
        resume_until(tmp_path, 20),
        resume_until(tmp_path, 22, "--steps", "200"),
        resume_until(tmp_path, 24),
    ]
    assert told[0] == told[2] == ""
    lines = told[1].splitlines()
    assert len(lines) == (0 if says is None else 1) and (says is None or says in lines[0])
    now = manifest_of(tmp_path)
    derived = {"wsd": {"decay": 4}, "step": {"every": 6}}.get(before["name"], {})
    assert now == {**before, "total": 200, **derived}


def manifest_of(folder: Path) -> dict[str, Any]:
    """The rate that the newest checkpoint records."""
    found: dict[str, Any] = read_manifest(checkpoints(folder / "run")[-1])["about"]["learning_rate"]
    return found


def resume_until(folder: Path, step: int, *more: str) -> str:
    """Go on, and stop after so many steps; what was said before that."""
    error = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(error):
        patch.setattr(
            saving.Saver, "stopping", lambda self: 15 if self.trainer.steps_done == step else 0
        )
        main(["train", "--resume", str(folder / "run"), "--quiet", *more])
    return "".join(
        line for line in error.getvalue().splitlines(keepends=True) if "told to stop" not in line
    )
