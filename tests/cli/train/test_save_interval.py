"""--save-every auto: the interval follows from the measured save time and the given rate; measured
beside expected."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minidist.cli import main
from minidist.cli.train import save_interval
from minidist.cli.train.save_interval import FIRST, SaveInterval, duration, summary
from minidist.cli.train.saving import Saves
from minidist.comm.transports.threads import run_threads
from minidist.parallel.state.manifest import checkpoints, read_manifest, step_of
from minidist.survive.interval import goodput

TINY = ["train", "--batch", "4", "--context", "8", "--layers", "1", "--width", "8", "--heads", "2"]
# an interruption every 1,000 s: √(2 · 0.5 · 1000) = 31.6 s
STEP = 0.1
SAVE = 0.5
PER_DAY = 86.4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that a test sets."""
    now = SimpleNamespace(seconds=1000.0)
    names = ("time", "monotonic", "perf_counter")
    monkeypatch.setattr(
        save_interval, "time", SimpleNamespace(**dict.fromkeys(names, lambda: now.seconds))
    )
    return now


def settings(every: int | str, clock: Any, before: dict[str, Any] | None = None) -> Any:
    args = SimpleNamespace(save_every=every, interruptions_per_day=PER_DAY)
    resume = before and SimpleNamespace(about={"metrics": {"interval": before}})
    return SimpleNamespace(args=args, begun=clock.seconds - 4, resume=resume)


def train(interval: SaveInterval, steps: range, clock: Any) -> list[int]:
    """Steps and saves of a run; the steps that were saved."""
    saved: list[int] = []
    world = SimpleNamespace(
        ledger=SimpleNamespace(control=lambda: pytest.MonkeyPatch.context()),
        # another rank stands still for longer
        all_reduce=lambda values, op: values * [3, 1],
    )
    for step in steps:
        clock.seconds += STEP
        interval.worked()
        if interval.due(step):
            clock.seconds += SAVE / 3
            interval.saved(step, SAVE / 3, STEP, world)  # type: ignore[arg-type]
            clock.seconds += SAVE * 2 / 3
            interval.stood_still()
            saved.append(step)
    return saved


def test_the_interval_is_known_after_the_first_save(clock: Any) -> None:
    saves = Saves()
    interval = SaveInterval(settings("auto", clock), saves, 0)
    assert (interval.steps, interval.announcement()) == (0, None)
    assert train(interval, range(1, 1001), clock) == [FIRST, FIRST + 316, FIRST + 632, FIRST + 948]
    expected = goodput(31.6, save=SAVE, between=1000, restart=4)
    assert interval.announcement() == (
        "a save takes 500 ms, an interruption comes every 16.7 min on average: saving every 316 "
        f"steps (31.6 s), expected goodput {expected:.2%}"
    )
    assert interval.announcement() is None
    record = interval.record()
    assert record["measured"] == pytest.approx(100 / 102) and record[
        "lost_seconds"
    ] == pytest.approx(0, abs=1e-6)
    assert record["expected"] == record["expected_at_first"] == pytest.approx(expected)
    assert "goodput 98.04% in 1.7 min, expected 96.4" in summary(record)


def test_a_resumed_run_knows_it_at_once_and_counts_what_it_lost(clock: Any) -> None:
    first = SaveInterval(settings("auto", clock), Saves(), 0)
    assert train(first, range(1, 322), clock) == [5, 321]
    about = json.loads(json.dumps(first.about()))
    train(first, range(322, 422), clock)  # ten seconds of work, lost; then seven until it goes on
    clock.seconds += 7
    second = SaveInterval(settings("auto", clock, about), Saves(), 321)
    assert second.steps == 316 and second.announcement()
    assert train(second, range(322, 638), clock) == [637]
    record = second.record()
    assert (record["interruptions"], record["lost_seconds"]) == (1, pytest.approx(17))
    assert (record["work_seconds"], record["saving_seconds"]) == (
        pytest.approx(63.7),
        pytest.approx(1.5),
    )
    assert record["measured"] == pytest.approx(63.7 / (63.7 + 1.5 + 17))


def test_a_given_interval_stays_and_the_better_one_is_told(clock: Any) -> None:
    interval = SaveInterval(settings(100, clock), Saves(), 0)
    train(interval, range(1, 101), clock)
    line = interval.announcement()
    assert line is not None and "saving every 100 steps (10 s)" in line
    assert "; --save-every auto: every 316 steps (31.6 s), 96." in line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0025, "2.5 ms"), (12, "12 s"), (5400, "1.5 h"), (90, "1.5 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_that_saves_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run knows the interval at its start."""
    # without matplotlib, which takes a second
    monkeypatch.setattr(
        "minidist.cli.train.run_folder.draw_loss",
        lambda path, losses, **options: path.write_text(str(losses)),
    )
    (tmp_path / "book.txt").write_text("a quick brown fox jumps over 16 dogs.\n" * 40)
    run = tmp_path / "run"
    assert (
        main(
            [
                *TINY,
                "-n",
                "2",
                "--transport",
                "threads",
                "--steps",
                "12",
                "--data",
                str(tmp_path / "book.txt"),
                "--save-every",
                "auto",
                "--interruptions-per-day",
                "50000",
                "--out",
                str(run),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.count("an interruption comes every 1.73 s on average: saving every ") == 1
    assert (
        said.count("expected goodput ")
        == said.count("(at 50000 interruptions a day, a save every ")
        == 1
    )
    saved = json.loads((run / "metrics.json").read_text())["checkpoint"]
    assert saved["steps"][0] == FIRST and saved["steps"][-1] == 12
    told = saved["goodput"]
    assert 0 < told["measured"] <= 1 and 0 < told["expected"] < 1
    assert told["interval_steps"] >= 1 and told["interruptions"] == 0
    assert (
        len(
            read_manifest(checkpoints(run)[-1])["about"]["metrics"]["interval"][
                "standstill_seconds"
            ]
        )
        >= 1
    )
    assert main(["train", "--resume", str(run), "--steps", "14"]) == 0
    said = capsys.readouterr().out
    assert (
        said.index("an interruption comes every") < said.index("step 13")
        and "1 interruption and all else" in said
    )
    assert step_of(checkpoints(run)[-1]) == 14


def test_ranks_agree_on_the_slowest(clock: Any) -> None:
    def steps(world: Any) -> tuple[float, int]:
        interval = SaveInterval(settings("auto", clock), Saves(), 0)
        interval.saved(5, 0.1 * (world.rank + 1), STEP, world)
        return interval.save_seconds, interval.steps

    assert run_threads(steps, (), 3, 20.0) == [(pytest.approx(0.3), 245)] * 3


@pytest.mark.soak
@pytest.mark.parametrize(
    "more", [[], ["--save-async"], ["--elastic", "1:2", "--max-restarts", "1"]]
)
def test_a_run_that_is_killed_between_its_saves(more: list[str], tmp_path: Path) -> None:
    """It goes on with the same bits, knows its interval, and counts what was lost."""
    (tmp_path / "book.txt").write_text("a quick brown fox jumps over 16 dogs.\n" * 40)
    words = [
        sys.executable,
        "-m",
        "minidist",
        *TINY,
        "-n",
        "2",
        "--steps",
        "300",
        "--data",
        "book.txt",
        "--quiet",
    ]
    subprocess.run([*words, "--out", "alone"], cwd=tmp_path, check=True)
    words += [*more, "--save-every", "auto", "--interruptions-per-day", "20000", "--out", "run"]
    run = subprocess.Popen(words, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(checkpoints(tmp_path / "run")) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    run.kill()
    run.wait()
    subprocess.run(
        [sys.executable, "-m", "minidist", "train", "--resume", "run", "--quiet"],
        cwd=tmp_path,
        check=True,
    )
    alone, resumed = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("alone", "run")
    )
    assert (
        resumed["weights_sha256"] == alone["weights_sha256"]
        and resumed["losses"] == alone["losses"]
    )
    told = resumed["checkpoint"]["goodput"]
    assert told["interruptions"] == 1 and told["lost_seconds"] > 0.1 and told["measured"] < 0.98


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--save-every", "auto"], "add --interruptions-per-day N"),
        (["--interruptions-per-day", "3"], "nothing is saved without --save-every"),
        (["--save-every", "often"], "'often' is not a whole number of at least 1, nor auto"),
        (["--save-every", "auto", "--interruptions-per-day", "0"], "'0' is not a number above 0"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
