"""--cores and --memory-limit: what is wrong is told in one line, and ranks have the cores that are
dealt to them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.console import core_list
from minidist.device import cores

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
    "--steps",
    "2",
]
SHOW = "import os; os.write(1, f'{sorted(os.sched_getaffinity(0))}\\n'.encode())"


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose cores 0 to 5 and 8 this process may use."""
    monkeypatch.setattr(cores, "usable", lambda: [0, 1, 2, 3, 4, 5, 8])


@pytest.mark.parametrize(
    ("text", "chosen"), [("0", [0]), ("0-2", [0, 1, 2]), ("8, 0-1,1", [0, 1, 8])]
)
@pytest.mark.usefixtures("eight")
def test_a_list_of_cores(text: str, chosen: list[int]) -> None:
    assert core_list(text) == chosen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4-8", "'4-8' names core 6, but this process may use only cores 0-5,8"),
        (
            "x",
            "'x' is not a list of cores; write it as 0-1 or 0,2; this process may use cores 0-5,8",
        ),
        ("3-1", "is not a list of cores"),
        ("", "is not a list of cores"),
        ("0,", "is not a list of cores"),
        ("-1", "is not a list of cores"),
        ("1-", "is not a list of"),
    ],
)
@pytest.mark.usefixtures("eight")
def test_a_wrong_list_is_one_line(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", f"--cores={text}"], ["launch", f"--cores={text}", "true"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_where_a_process_cannot_choose_its_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: None)
    assert main(["train", "--cores", "0"]) == 2
    assert (
        "this system does not let a process choose its cores; leave the option out"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (["-n", "2", "--transport", "threads"], {}, "leave out --transport threads"),
        (
            [],
            {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            },
            "torchrun started the ranks; give the limit to it",
        ),
    ],
)
def test_a_memory_limit_needs_ranks_of_our_own(
    words: list[str],
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *TINY, *words, "--memory-limit", "2GiB"]) == 2
    error = capsys.readouterr().err
    assert "--memory-limit: " in error and says in error and error.count("\n") == 1


def test_ranks_have_the_cores_that_are_dealt(tmp_path: Path) -> None:
    here = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "minidist",
            "launch",
            "-n",
            str(len(here)),
            "--json",
            "job.json",
            "--cores",
            cores.in_words(here),
            sys.executable,
            "-S",
            "-c",
            SHOW,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [f"[{core}]" for core in here] and done.stderr == ""
    assert json.loads((tmp_path / "job.json").read_text())["cores"] == here


@pytest.mark.soak
@pytest.mark.parametrize(
    "by",
    [
        pytest.param([sys.executable, "-m", "minidist", "train", "-n", "2"], id="train"),
        pytest.param(
            [sys.executable, "-m", "minidist", "train", "-n", "2", "--memory-limit", "4GiB"],
            id="limited",
        ),
        pytest.param(
            [sys.executable, "-m", "minidist", "train", "-n", "2", "--elastic", "1:2"], id="elastic"
        ),
        pytest.param(["mpirun", "-n", "2", sys.executable, "-m", "minidist", "train"], id="mpirun"),
        pytest.param(
            [sys.executable, "-m", "minidist", "launch", "-n", "2", "-m", "minidist", "train"],
            id="launch",
        ),
    ],
)
def test_a_training_keeps_to_its_cores(by: list[str], tmp_path: Path) -> None:
    [last] = sorted(os.sched_getaffinity(0))[-1:]
    done = subprocess.run(
        [*by, *TINY, "--cores", str(last), "--quiet", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [rank["cores"] for rank in metrics["ranks"]] == [[last], [last]] and metrics[
        "threads"
    ] == 1
    limited = "--memory-limit" in by and "is not enforced" not in done.stderr
    assert metrics["memory_limit_bytes"] == (4 << 30 if limited else None)
