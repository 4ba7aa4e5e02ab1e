"""follow: each step once and in order, while a run writes and after it has ended; the programs of the
documents that give steps to a tracker."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from documents import File, parts
from imports import ROOT

from minidist.errors import ConfigError
from minidist.observe import follow as follow_module
from minidist.observe.follow import follow
from minidist.observe.live.run_now import DIED, FINISHED, RUNNING
from minidist.observe.step_log import STEP_LOG

Calls = list[tuple[Any, ...]]


def write(run: Path, *steps: int, time: float = 1.0) -> None:
    """Append a line for each step; its loss is 1/step."""
    with open(run / STEP_LOG, "a", encoding="utf-8") as log:
        for step in steps:
            line = {"step": step, "loss": 1 / step, "time": time, "tokens_per_second": 8.0}
            log.write(json.dumps({**line, "seconds": 0.5, "joules": 2.0}) + "\n")


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list, from which a run takes what happens until each next look; then it has ended."""
    happens: list[Any] = []

    def look(looking: Any) -> SimpleNamespace:
        return SimpleNamespace(state=RUNNING if happens else FINISHED)

    monkeypatch.setattr(follow_module.Looking, "look", look)
    monkeypatch.setattr(follow_module.time, "sleep", lambda seconds: happens.pop(0)())
    return happens


def test_a_run_that_has_ended_is_read_to_its_end(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    assert [(step["step"], step["loss"]) for step in follow(tmp_path)] == [
        (1, 1),
        (2, 0.5),
        (3, 1 / 3),
    ]


def test_a_step_comes_once_while_the_run_writes(tmp_path: Path, live: list[Any]) -> None:
    write(tmp_path, 1)
    live += [lambda: write(tmp_path, 2, 3), lambda: None, lambda: write(tmp_path, 4)]
    assert [step["step"] for step in follow(tmp_path)] == [1, 2, 3, 4]


def test_a_step_that_is_made_again_comes_again(tmp_path: Path, live: list[Any]) -> None:
    write(tmp_path, 1, 2, 3)
    live.append(lambda: write(tmp_path, 3, 4, time=9.0))
    assert [step["step"] for step in follow(tmp_path)] == [1, 2, 3, 3, 4]


def test_the_last_lines_of_a_run_that_dies_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is written between a look and the reading of the log is not lost."""

    def look(looking: Any) -> SimpleNamespace:
        write(tmp_path, 1, 2)
        return SimpleNamespace(state=DIED)

    monkeypatch.setattr(follow_module.Looking, "look", look)
    assert [step["step"] for step in follow(tmp_path)] == [1, 2]


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        next(follow(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="nothing of a run is here"):
        next(follow(tmp_path))


# --------------------------------------------------------------------------------------- trackers


def followed(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program of the document on a run."""
    page = (ROOT / "docs/howto/look-at-a-run.md").read_text(encoding="utf-8")
    [program] = [part for part in parts(page) if isinstance(part, File) and part.name == name]
    (run / name).write_text(program.text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [name, str(run)])
    runpy.run_path(str(run / name), run_name="__main__")


class Tracked:
    """A stand-in for a tracker's run or writer."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.config = SimpleNamespace(update=lambda values: calls.append(("config", values)))

    def __enter__(self) -> "Tracked":
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("end",))

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls.append((step, values))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))


def test_the_steps_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda folder: Tracked(calls)  # type: ignore[attr-defined]
    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, board.__name__, board)
    write(tmp_path, 1, 2)
    followed("to_tensorboard.py", tmp_path, monkeypatch)
    assert [call[0::2] for call in calls if call[0] == "loss"] == [("loss", 1), ("loss", 2)]
    assert len(calls) == 7 and calls[-1] == ("end",)


def test_the_steps_reach_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    wandb = ModuleType("wandb")
    wandb.init = lambda *, project, name: Tracked(calls)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, 1, 2)
    finished = {"losses": [1.0, 0.5], "validation_loss": None, "options": {"lr": 0.1}}
    (tmp_path / "metrics.json").write_text(json.dumps(finished))
    followed("to_wandb.py", tmp_path, monkeypatch)
    assert calls == [
        (1, {"loss": 1.0, "tokens/s": 8.0}),
        (2, {"loss": 0.5, "tokens/s": 8.0}),
        ("config", {"lr": 0.1}),
        ("end",),
    ]
