"""train --adapt: a run over a slow link changes its plan once, trains on as another run does, and
tells gain and price; a run that gains nothing stays."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist.autograd.tensor import Tensor
from minidist.cli import main
from minidist.cli.train import command
from minidist.cli.train.adapting import SETTLE, WINDOW
from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed
from minidist.device.backend import is_simulated
from minidist.nn.gpt import Block
from minidist.observe.rank_steps import read_rank_steps
from minidist.observe.report.losses import section
from minidist.observe.report.run_files import read_run
from minidist.observe.step_log import read_step_log
from minidist.parallel.hybrid.plan import Plan

FAST = 1e-9  # seconds a byte
SLOW = 4e-7
SMALL = "--layers 2 --width 48 --heads 1 --context 8 --batch 2 --validate 4 --quiet"


def over_links(monkeypatch: pytest.MonkeyPatch, beta: Callable[[int], float]) -> None:
    """From now on threads train over links with beta(step) seconds a byte."""
    train = command._train_in_thread

    def slowly(world: Group, *args: Any) -> int:
        with delayed(world, alpha=1e-4, beta=beta(0)) as link:
            tell = link.tell_step

            def tell_step(step: int) -> None:
                link.transport.beta = beta(step)  # type: ignore[attr-defined]
                tell(step)

            link.tell_step = tell_step  # type: ignore[method-assign]
            return train(link, *args)

    monkeypatch.setattr(command, "_train_in_thread", slowly)


def trained(words: str, out: Path) -> dict[str, Any]:
    assert (
        main(["train", "-n", "2", "--transport", "threads", *words.split(), "--out", str(out)]) == 0
    )
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def test_a_run_over_a_slow_link_changes_its_plan_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over_links(monkeypatch, lambda step: SLOW)
    found = trained(f"{SMALL} --adapt --steps 40", tmp_path / "adapts")
    (change,) = found["adapt"]["changes"]
    assert change["from"]["dp"] == change["to"]["pp"] == 2
    assert (change["step"] - SETTLE) % WINDOW == 0
    assert change["left"] == 40 - change["step"]
    assert change["gain"] > change["price"]
    assert change["now"] > change["measured"]["step_seconds"]
    # the tables count the steps since
    assert found["steps"] == change["left"]
    assert found["plan"] == change["to"]
    sent = sum(sum(rank["sent_bytes"]["pp"].values()) for rank in found["ranks"])
    assert sent == found["formula"]["axes"]["pp"]
    assert not any("dp" in rank["sent_bytes"] for rank in found["ranks"])
    lines = read_step_log(tmp_path / "adapts" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 41)]
    assert {"dp", "pp"} <= lines[-1]["sent_bytes"].keys()
    assert [each.alike for each in read_rank_steps(tmp_path / "adapts").values()] == ["pp0", "pp1"]
    # the same training
    monkeypatch.undo()
    stayed = trained(f"{SMALL} --steps 40", tmp_path / "stays")
    assert np.allclose(found["losses"], stayed["losses"], rtol=1e-4)
    assert "adapt" not in stayed
    assert f"A change of plan {change['line']}." in section(read_run(tmp_path / "adapts")).lines


def test_a_run_that_gains_nothing_stays(tmp_path: Path) -> None:
    found = trained(f"{SMALL} --adapt --steps 20", tmp_path)
    assert found["adapt"]["questions"] >= 1
    assert found["adapt"]["changes"] == []
    assert found["steps"] == 20


def test_a_batch_that_the_planner_cannot_divide_keeps_its_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = trained(
        "--layers 1 --width 8 --heads 1 --context 8 --batch 3 --validate 4 --quiet --adapt --steps 12",
        tmp_path,
    )
    assert found["adapt"] == {"questions": 0, "changes": []}
    (line,) = capfd.readouterr().err.splitlines()
    assert "--adapt" in line and "batch of 4" in line


@pytest.mark.parametrize(
    "words",
    [
        "-n 2 --elastic 1:2",
        "-n 2 --strategy parameter-server --asynchronous",
        "-n 2 --local-steps 5 --steps 10",
        "-n 2 --compress 8bit",
        "-n 2 --plan pp=2 --schedule pipedream --clip 0",
        "-n 2 --dtype float64",
        "-n 1 --transport threads",
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = main(["train", "--adapt", *words.split(), "--out", str(tmp_path / "run")])
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--adapt" in line


# ------------------------------------------------------------------------------------------ the soak


def seconds_of(out: Path) -> float:
    """From the end of the first step to that of the last, with questions and changes."""
    lines = read_step_log(out / "metrics.jsonl")
    return float(lines[-1]["time"] - lines[0]["time"])


@pytest.mark.soak
def test_a_link_that_becomes_slow_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run that adapts ends before a run under either plan. Blocks sleep 40 ms a sequence, so
    that two ranks need no two cores."""
    over_links(monkeypatch, lambda step: FAST if step < 150 else 6e-7)
    forward = Block.forward

    def slowly(self: Block, x: Tensor, *args: Any) -> Tensor:
        y = forward(self, x, *args)
        if y.requires_grad and not is_simulated():
            time.sleep(0.04 / 3 * len(x.data))
            y.register_hook(lambda dy: time.sleep(0.08 / 3 * len(x.data)))
        return y

    monkeypatch.setattr(Block, "forward", slowly)
    words = (
        "--layers 4 --width 64 --heads 1 --context 32 --batch 2 --validate 4 --quiet --steps 210"
    )
    adapted = trained(f"{words} --adapt", tmp_path / "adapts")
    (change,) = adapted["adapt"]["changes"]
    assert 150 < change["step"] <= 150 + 4 * WINDOW
    before, after = Plan(**change["from"]), Plan(**change["to"])
    assert (before.dp, after.pp) == (2, 2)
    trained(f"{words} --plan dp=2", tmp_path / "before")
    trained(f"{words} --plan pp=2 --microbatches {after.pieces}", tmp_path / "after")
    seconds = {name: seconds_of(tmp_path / name) for name in ("adapts", "before", "after")}
    print(change["line"], change["measured"], seconds)
    assert seconds["adapts"] < min(seconds["before"], seconds["after"])
