"""The run folder: metrics.json stands for one whole run, also where a run is killed or its disk is
full."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from minidist.cli import main
from minidist.cli.train.run_folder import (
    run_folder,
    save_weights,
    sha256,
    write_results,
    write_views,
)

TINY = [
    "train",
    "--steps",
    "1",
    "--batch",
    "64",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "1",
]
NAMES = ["loss.png", "metrics.json", "model.safetensors", "trace.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the results of a run."""
    # without matplotlib, which takes a second
    monkeypatch.setattr(
        "minidist.cli.train.run_folder.draw_loss",
        lambda path, losses, **options: path.write_text(str(losses)),
    )
    write(tmp_path, 1)
    return tmp_path


def write(folder: Path, number: int) -> None:
    """The results of run `number`, as a run has them."""
    metrics: dict[str, Any] = {
        "losses": [float(number)],
        "validation_loss": 0.0,
        "parameters": 4,
        "size": 1,
        "transport": "shm",
        "config": {"number": number},
    }
    write_results(folder, metrics, {"weight": np.full(4, number, np.float32)})
    write_views(folder, metrics, [])


def die_after(files: int) -> None:
    """From now on this process is killed when so many drafts have taken their place and one more
    would."""
    done = []
    replace = Path.replace

    def dying(draft: Path, place: Path) -> Path:
        if len(done) == files:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(draft)
        return replace(draft, place)

    Path.replace = dying  # type: ignore[method-assign, assignment]


def is_whole(folder: Path) -> bool:
    """Return whether all files are those of the run in metrics.json."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: sha256(folder / name) for name in metrics["files"]} == metrics["files"]


def test_a_run_that_is_killed_as_it_takes_the_folder_leaves_no_metrics_beside_other_weights(
    folder: Path,
) -> None:
    for files in range(5):  # that have their place when it is killed
        child = os.fork()
        if child == 0:
            die_after(files)
            write(folder, files + 2)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        there = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        assert "metrics.json" not in there if files < 2 else is_whole(folder)
        with run_folder(folder):  # the next run
            assert sorted(os.listdir(folder)) == there
    assert there == NAMES


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-n", "2", "--transport", "threads"],
        pytest.param(["-n", "2", "--transport", "tcp"], marks=pytest.mark.soak),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_the_results_that_were_there(
    options: list[str],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules that are imported meanwhile
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    text = folder / "text.txt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    text.write_text("a b c d e f g\n" * 99)
    before = {name: sha256(folder / name) for name in NAMES}
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # bytes: less than the weights
    try:
        assert main([*TINY, "--quiet", "--data", str(text), "--out", str(folder), *options]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capfd.readouterr().err == f"minidist train: --out {folder}: File too large\n"
    assert {
        name: sha256(folder / name)
        for name in os.listdir(folder)
        if name not in ("text.txt", "metrics.jsonl", "steps")
    } == before


def test_the_next_runs_results_come_without_what_the_run_before_alone_had(folder: Path) -> None:
    for name in ("why.png", "report.html", "mine.txt"):
        (folder / name).touch()
    write(folder, 2)
    assert sorted(os.listdir(folder)) == sorted([*NAMES, "mine.txt"]) and is_whole(folder)


def test_equal_weights_are_equal_files_that_every_reader_of_safetensors_opens(
    tmp_path: Path,
) -> None:
    """Each call of the library's own writer puts its metadata in another order."""
    weights = {
        "é.weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "b": np.arange(4, dtype=np.float16),
    }
    for number in range(8):
        save_weights(tmp_path / f"{number}.safetensors", weights, {"width": 8, "symbols": "äß"})
    assert len({sha256(tmp_path / f"{number}.safetensors") for number in range(8)}) == 1
    with safe_open(tmp_path / "0.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["config"]) == {"width": 8, "symbols": "äß"}
        for name in weights.keys() - {"half"}:  # which NumPy's reader does not know
            assert np.array_equal(file.get_tensor(name), weights[name])
            assert file.get_tensor(name).shape == weights[name].shape


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_the_weights_have_the_mode_of_the_other_files(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minidist.cli.train.run_folder.draw_loss",
        lambda path, losses, **options: path.write_text(str(losses)),
    )
    before = os.umask(mask)
    try:
        write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in NAMES} == dict.fromkeys(
        NAMES, 0o666 & ~mask
    )


NAME = b"run-\xc3\xa9-\xff"
"""Of a folder: UTF-8, and a byte that is not."""


def test_a_folder_may_have_any_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds characters that are no Unicode, as each name beyond ASCII does in a C locale."""
    text = tmp_path / "text.txt"
    name = os.fsdecode(NAME)
    text.write_text("a b c d e f g\n" * 99)
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                *TINY,
                "--data",
                str(text),
                "--out",
                name,
                "-n",
                "2",
                "--transport",
                "threads",
                "--save-every",
                "1",
                "--json",
                "metrics.json",
            ]
        )
        == 0
    )
    assert main(["train", "--resume", name, "--steps", "2", "--quiet"]) == 0
    for look in (
        ["report"],
        ["diagnose"],
        ["watch", "--once"],
        ["sample", "--json", "sample.json"],
        ["checkpoint", "--json", "checkpoint.json"],
    ):
        assert main([look[0], name, *look[1:]]) == 0, look
    assert "Traceback" not in capfd.readouterr().err
    assert json.loads(Path("sample.json").read_text(encoding="utf-8"))["source"].startswith(name)


@pytest.mark.soak
@pytest.mark.parametrize(
    "by", [["-n", "2"], ["-n", "2", "--elastic", "1:2"], ["-n", "2", "--watch"], []]
)
def test_a_name_beyond_ascii_in_a_c_locale(by: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e f g\n" * 99)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (
        [*TINY, "--data", "text.txt", "--save-every", "1", "--out", NAME, *by],
        ["train", "--steps", "2", "--resume", NAME],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "minidist", *words],
            cwd=tmp_path,
            env=environment,
            timeout=100,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode(
            errors="replace"
        )
