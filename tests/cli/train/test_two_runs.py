"""Two runs of one host: the same command twice gives the same bits; one that is killed touches
nothing of the other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_left

from minidist.cli import main
from minidist.cli.train.run_folder import claim, run_folder
from minidist.errors import ConfigError
from minidist.launch.limits import RUN_FOLDER
from minidist.parallel.state.manifest import checkpoints

MINIDIST = [sys.executable, "-m", "minidist"]
TINY = [
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
    "--dtype",
    "float64",
    "--zero",
    "1",
    "--quiet",
]
BY = [
    pytest.param([*MINIDIST, "train", "-n", "2", "--transport", "tcp"], id="tcp"),
    pytest.param([*MINIDIST, "train", "-n", "2", "--transport", "shm"], id="shm"),
    pytest.param(["mpirun", "-n", "2", *MINIDIST, "train"], id="mpirun"),
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    return file


def test_a_run_folder_is_one_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with run_folder(folder):
        with pytest.raises(
            ConfigError,
            match=rf"another run \(process {os.getpid()}\) writes there; wait for its end",
        ):
            claim(folder)
        with run_folder(tmp_path / "other"):
            pass
        monkeypatch.setenv(RUN_FOLDER, str(folder))  # a rank whose launcher has it
        assert claim(folder) is None
        monkeypatch.delenv(RUN_FOLDER)
    lock = claim(folder)  # it was removed, being empty, and is made again
    assert lock is not None and folder.is_dir()
    os.close(lock)


def test_the_second_run_of_a_folder_is_refused_before_it_starts_ranks(
    book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_folder(tmp_path / "run"):
        status = main(
            ["train", "-n", "2", *TINY, "--data", str(book), "--out", str(tmp_path / "run")]
        )
    error = capfd.readouterr().err
    assert (
        status == 2
        and error.count("\n") == 1
        and "writes there; wait for its end, or name another folder" in error
    )


def start(by: list[str], folder: Path, book: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*by, *TINY, "--data", str(book), *options], cwd=folder, stderr=subprocess.PIPE, text=True
    )


def bits(folder: Path) -> Any:
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics["losses"], metrics["weights_sha256"]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".ring"
    }


@pytest.mark.soak
@pytest.mark.parametrize("by", BY)
def test_the_same_command_twice_at_once(by: list[str], book: Path, tmp_path: Path) -> None:
    """Other folders: the same bits. The same folder: one run ends well, the other says why it does
    not begin."""
    with nothing_left():
        runs = [start(by, tmp_path, book, "--steps", "20", "--out", out) for out in ("one", "two")]
        assert [run.communicate(timeout=120)[1] for run in runs] == ["", ""]
        assert bits(tmp_path / "one") == bits(tmp_path / "two")
        runs = [start(by, tmp_path, book, "--steps", "300", "--out", "same") for _ in range(2)]
        said = [run.communicate(timeout=120)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2], said
    assert [
        ("another run (process " in text, text.count("\n")) for text in sorted(said, key=len)
    ] == [(False, 0), (True, 1)]


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "2", "--transport", "threads"],
        *(
            pytest.param(options, marks=pytest.mark.soak)
            for options in (
                ["-n", "2", "--plan", "tp=2"],
                ["-n", "4", "--plan", "dp=2,ep=2", "--experts", "4"],
                ["-n", "2", "--plan", "pp=2"],
                ["-n", "3", "--zero", "3"],
            )
        ),
    ],
)
def test_equal_runs_write_equal_weights_checkpoints_and_pictures(
    options: list[str], book: Path, tmp_path: Path
) -> None:
    """Whatever the order in which a Python keeps its sets. What is measured differs, but not what
    it is called."""
    for number in (1, 2):
        run = subprocess.run(
            [
                *MINIDIST,
                "train",
                *TINY[:-3],
                "--quiet",
                *options,
                "--data",
                str(book),
                "--steps",
                "4",
                "--save-every",
                "2",
                "--out",
                "run",
            ],
            cwd=place(tmp_path, number),
            timeout=100,
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode, run.stderr) == (0, "")
    ours, theirs = (contents(place(tmp_path, number) / "run") for number in (1, 2))
    measured = {name for name in ours if name.startswith(("steps/", "metrics.json", "trace.json"))}
    assert {name for name in ours if ours[name] != theirs[name]} <= measured
    assert {"model.safetensors", "loss.png", "step-000004/manifest.json"} <= ours.keys() - measured
    assert names(json.loads(ours["metrics.json"])) == names(json.loads(theirs["metrics.json"]))


def place(folder: Path, number: int) -> Path:
    """The folder of a run."""
    (folder / str(number)).mkdir(exist_ok=True)
    return folder / str(number)


def names(value: Any) -> Any:
    """The keys of a JSON value, in their order."""
    if isinstance(value, dict):
        return [(name, names(each)) for name, each in value.items()]
    return [names(each) for each in value] if isinstance(value, list) else None


@pytest.mark.soak
def test_default_folders_of_one_second(book: Path, tmp_path: Path) -> None:
    runs = [start([*MINIDIST, "train"], tmp_path, book, "--steps", "2") for _ in range(3)]
    assert [run.communicate(timeout=120)[1] for run in runs] == [""] * 3
    assert len(os.listdir(tmp_path / "runs")) == 3


@pytest.mark.soak
@pytest.mark.parametrize("by", BY)
def test_one_is_killed(by: list[str], book: Path, tmp_path: Path) -> None:
    """The other, of the same command, ends with the bits of a run alone; what the dead one left
    goes at its next start."""
    common = ["--steps", "400", "--save-every", "20"]
    with nothing_left():
        alone = start(by, tmp_path, book, *common, "--out", "alone")
        assert alone.communicate(timeout=120)[1] == ""
        living, dying = (
            start(by, tmp_path, book, *common, "--out", out) for out in ("living", "dying")
        )
        deadline = time.monotonic() + 60
        while not checkpoints(tmp_path / "dying") and time.monotonic() < deadline:
            time.sleep(0.005)
        dying.send_signal(signal.SIGKILL)
        dying.communicate(timeout=60)
        assert living.communicate(timeout=120)[1] == "" and living.returncode == 0
        assert bits(tmp_path / "living") == bits(tmp_path / "alone")
        (tmp_path / "dying" / ".minidist-draft").mkdir()  # as a save that was broken off leaves one
        before = contents(tmp_path / "living")
        again = subprocess.run(
            [*by, "--resume", "dying", "--quiet"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert again.returncode == 0, again.stderr
    assert bits(tmp_path / "dying") == bits(tmp_path / "alone")
    assert not [name for name in os.listdir(tmp_path / "dying") if name.startswith(".")]
    assert contents(tmp_path / "living") == before
