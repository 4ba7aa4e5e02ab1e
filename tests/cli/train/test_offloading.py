"""`minidist train --offload`, as a user runs it: within a limit, with mistakes, and ended in the
middle."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.device import account

TINY = [
    "train",
    "--steps",
    "3",
    "--batch",
    "4",
    "--context",
    "8",
    "--layers",
    "6",
    "--width",
    "16",
    "--heads",
    "2",
    "--dtype",
    "float64",
]
MINIDIST = [sys.executable, "-m", "minidist"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text("".join(f"Line {i}: the quick brown fox jumps.\n" for i in range(60)))
    return file


def start(options: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command, begun in `folder`."""
    return subprocess.Popen(
        [*MINIDIST, *options],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "Agg"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.soak
def test_two_ranks_within_a_limit_and_as_one_process(book: Path, tmp_path: Path) -> None:
    """The file and the screen show what moved and what lies where; ZeRO-3 is used without being
    asked; nothing is left."""
    (tmp_path / "disk").mkdir()
    process = start(
        [
            *TINY,
            "-n",
            "2",
            "--data",
            str(book),
            "--out",
            "run",
            "--verify",
            "--offload",
            "all",
            "--offload-dir",
            "disk",
            "--device-memory",
            "220KiB",
            "--checkpoint-blocks",
        ],
        tmp_path,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["plan"]["zero"] == 3 and metrics["plan"]["device_memory"] == 220 << 10
    assert metrics["verify"]["largest"] <= 1e-10
    state = 32 * metrics["parameters"] // 2
    for rank in metrics["ranks"]:
        assert (
            rank["moved_bytes"] == rank["moved_formula"] and rank["moved_bytes"]["disk to host"] > 0
        )
        assert rank["memory"]["total"]["peak"] <= 220 << 10
        assert state - 8 * 32 <= rank["disk_bytes"] <= state + 4 * 4096 * 16
    assert "what rank 0 moved in a step" in out and "0 + 0 + 0 = 0 bytes a parameter" in out
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--offload", "all", "--zero", "2"], "use zero=3"),
        (["--offload", "disk"], "choose from"),
        (["--offload", "all", "--offload-dir", "absent"], "absent is not there"),
        (["--offload", "optimizer", "--offload-dir", "disk"], "only --offload all has files"),
        (["--device-memory", "much"], "write 4096, 64KiB"),
        (["--device-memory", "100KiB"], "do not fit under the limit of 102,400"),
        (["--device-memory", "700KiB"], "of 4 sequences at once, need "),
        (["--offload", "all", "--device-memory", "60KiB"], "two units at work"),
        (["-n", "2", "--offload", "optimizer"], "use zero=1, 2 or 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    options: list[str],
    says: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main([*TINY, "--data", str(book), *options])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert (
        printed.err.startswith("minidist train: ")
        and says in printed.err
        and printed.err.count("\n") == 1
    )
    assert os.listdir(tmp_path) == []


def test_a_limit_met_in_the_first_step_leaves_nothing(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By gradients, which come on top of what is known; the run folder, made before, and those
    above it go again."""
    monkeypatch.chdir(tmp_path)
    options = [*TINY, "--data", str(book), "--out", "runs/one"]
    with account.use(account.MemoryAccount()):  # where nothing is left of other tests
        assert main([*options, "--steps", "1", "--json", "one.json"]) == 0
    peak = json.loads((tmp_path / "one.json").read_text())["ranks"][0]["memory"]["total"]["peak"]
    capsys.readouterr()
    with account.use(account.MemoryAccount()):
        assert main([*options[:-1], "more/of/them", "--device-memory", str(peak - 1)]) == 2
    assert "more for gradients do not fit" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["one.json", "runs"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(
    signal_number: int, book: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    process = start(
        [
            *TINY,
            "--steps",
            "100000",
            "--data",
            str(book),
            "--out",
            "run",
            "--offload",
            "all",
            "--offload-dir",
            "disk",
        ],
        tmp_path,
    )
    assert process.stdout is not None
    try:
        while "step" not in (line := process.stdout.readline()) or "of" not in line:
            assert line or process.poll() is None, process.communicate()
        open_files = []
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            with suppress(FileNotFoundError):  # one that was closed meanwhile
                open_files.append(os.readlink(f"/proc/{process.pid}/fd/{fd}"))
        assert any(
            name.startswith(str(tmp_path / "disk")) and "(deleted)" in name for name in open_files
        )
        assert os.listdir(tmp_path / "disk") == []
    finally:
        process.send_signal(signal_number)
        process.communicate(timeout=60)
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.soak
def test_a_real_model_four_times_over_the_limit(tmp_path: Path) -> None:
    """9.5 million parameters, 145 MiB of state, on a device of 36 MiB: the weights of a run without
    a limit."""
    begin = time.monotonic()
    process = start(
        [
            "train",
            "--steps",
            "4",
            "--layers",
            "12",
            "--width",
            "256",
            "--batch",
            "2",
            "--context",
            "32",
            "--out",
            "run",
            "--offload",
            "all",
            "--device-memory",
            "36MiB",
            "--verify",
            "--quiet",
        ],
        tmp_path,
    )
    _, err = process.communicate(timeout=1800)
    assert (process.returncode, err) == (0, ""), time.monotonic() - begin
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 16 * metrics["parameters"] > 4 * (36 << 20)
    assert metrics["ranks"][0]["memory"]["total"]["peak"] <= 36 << 20
    assert metrics["verify"]["largest"] == 0.0
