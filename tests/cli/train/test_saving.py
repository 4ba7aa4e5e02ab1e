"""A run that is told to stop by SIGTERM saves and ends with status 75, under any launcher; a disk
that is slow."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import SOON
from jobs import free_port, slurm, torchrun

from minidist.cli import main
from minidist.cli.train.saving import Saver
from minidist.parallel.state import checkpoint
from minidist.parallel.state.manifest import checkpoints, read_manifest, step_of, unpacked

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
    "--lr-schedule",
    "constant",
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    return file


def begin(command: list[str], folder: Path, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def training(run: "subprocess.Popen[str]") -> None:
    """Wait until it has made a step."""
    assert run.stdout is not None
    assert next(line for line in run.stdout if line.startswith("step "))


def stopped_well(run: "subprocess.Popen[str]", folder: Path) -> int:
    """It ends with status 75 and one line, and leaves the checkpoint of its last step, which is
    returned."""
    _, error = run.communicate(timeout=60)
    assert run.returncode == 75, error
    assert error.count("\n") == 1 and "minidist train: told to stop after step " in error, error
    [saved] = checkpoints(folder)
    assert sorted(os.listdir(folder)) == ["flight", "metrics.jsonl", saved.name, "steps"]
    assert f"saved in run/{saved.name}; continue with `minidist train --resume run`" in error
    return step_of(saved) or 0


@pytest.mark.parametrize(
    "by",
    [
        pytest.param([*MINIDIST, "train", "-n", "2"], id="train"),
        pytest.param([*MINIDIST, "train"], id="alone", marks=pytest.mark.soak),
        pytest.param(
            [*MINIDIST, "launch", "-n", "2", "-m", "minidist", "train"],
            id="launch",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["mpirun", "-n", "2", *MINIDIST, "train"], id="mpirun", marks=pytest.mark.soak
        ),
        pytest.param(
            [*MINIDIST, "train", "-n", "2", "--transport", "threads"],
            id="threads",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_run_that_is_told_to_stop_saves_and_goes_on(
    by: list[str], book: Path, tmp_path: Path
) -> None:
    run = begin(
        [
            *by,
            *TINY,
            "--steps",
            "100000",
            "--save-every",
            "90000",
            "--data",
            str(book),
            "--out",
            "run",
        ],
        tmp_path,
    )
    training(run)
    told = time.monotonic()
    run.send_signal(signal.SIGTERM)
    done = stopped_well(run, tmp_path / "run")
    assert time.monotonic() - told < 20  # a step and a save take milliseconds, beside other work
    about = read_manifest(tmp_path / "run" / f"step-{done:06}")["about"]
    assert about["ranks"] == (1 if by == [*MINIDIST, "train"] else 2)
    assert len(unpacked(about["metrics"]["losses"])) == done


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "number"),
    [(torchrun, signal.SIGTERM), (slurm, signal.SIGTERM), (slurm, signal.SIGUSR1)],
)
def test_one_rank_of_another_launcher_is_told(
    launcher: Any, number: int, book: Path, tmp_path: Path
) -> None:
    """All save after the same step; SIGUSR1 is heard under srun. Started again, they go on by
    themselves."""
    port = {"port": free_port()} if launcher is torchrun else {}

    def start(**variables: str) -> list["subprocess.Popen[str]"]:
        return [
            begin(
                [
                    *MINIDIST,
                    "train",
                    *TINY,
                    "--steps",
                    "100000",
                    "--save-every",
                    "90000",
                    "--data",
                    str(book),
                    "--out",
                    "run",
                ],
                tmp_path,
                **launcher(rank, size=2, **port),
                **variables,
            )
            for rank in range(2)
        ]

    ranks = start()
    training(ranks[0])
    ranks[1].send_signal(number)
    done = stopped_well(ranks[0], tmp_path / "run")
    _, error = ranks[1].communicate(timeout=60)
    assert (ranks[1].returncode, error) == (75, "") and done > 0
    refused = [rank.communicate(timeout=60)[1] for rank in start()]
    assert "--out run: holds checkpoints of a run; continue with --resume run" in "".join(refused)
    ranks = start(
        **{"SLURM_RESTART_COUNT" if launcher is slurm else "TORCHELASTIC_RESTART_COUNT": "1"}
    )
    training(ranks[0])
    ranks[0].send_signal(number)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], said
    assert [step_of(folder) for folder in checkpoints(tmp_path / "run")][0] == done and len(
        checkpoints(tmp_path / "run")
    ) == 2


@pytest.mark.soak
def test_the_launcher_of_one_node_of_two_is_told(book: Path, tmp_path: Path) -> None:
    port = free_port()
    address = "127.0.0.2"
    train = [
        *MINIDIST,
        "train",
        *TINY,
        "--steps",
        "100000",
        "--save-every",
        "90000",
        "--data",
        str(book),
        "--out",
        "run",
    ]
    nodes = [
        begin(
            [
                sys.executable,
                "-c",
                "import sys; from minidist.launch.spawning import *; sys.exit(spawn("
                f"{train!r}, 1, nodes=Nodes(2, {node}, {address!r}, {port})))",
            ],
            tmp_path,
            MINIDIST_TOKEN="s" * 32,
        )
        for node in range(2)
    ]
    training(nodes[0])
    time.sleep(0.5)  # the second launcher hears from the monitor that ranks save
    nodes[1].send_signal(signal.SIGTERM)
    stopped_well(nodes[0], tmp_path / "run")
    _, error = nodes[1].communicate(timeout=60)
    assert (nodes[1].returncode, error) == (75, "")


@pytest.mark.soak
def test_a_second_signal_ends_it_at_once(book: Path, tmp_path: Path) -> None:
    """While the first step lasts for ever."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK'):\n    from minidist.parallel.data.ddp "
        "import DDP\n"
        "    def start_step(*args, **options):\n        print('step ', flush=True)\n        "
        "time.sleep(60)\n"
        "    DDP.start_step = start_step\n"
    )
    run = begin(
        [
            *MINIDIST,
            "train",
            "-n",
            "2",
            *TINY,
            "--steps",
            "9",
            "--save-every",
            "9",
            "--data",
            str(book),
            "--out",
            "run",
        ],
        tmp_path,
        PYTHONPATH=str(tmp_path / "start"),
    )
    training(run)
    run.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=20)
    assert run.returncode == 143 and "was told to stop by SIGTERM; its 2 ranks were ended" in error
    assert os.listdir(tmp_path) == ["start"]


def test_a_save_that_is_due_while_another_is_written_is_put_off(
    book: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of one rank writes the save of step 1 until step 5. No step waits, and one line
    tells of it."""
    run = tmp_path / "run"
    on_disk = checkpoint.write_shard
    goes_on = threading.Event()
    drafts = []

    def write(file: Path, *rest: Any) -> Any:
        drafts.append(len(list(run.glob(".minidist-*"))))
        if file.name == checkpoint.shard_name(1):
            goes_on.wait(SOON)
        return on_disk(file, *rest)

    def due(saver: Saver, step: int) -> bool:
        if step == 5:
            goes_on.set()
        return True

    monkeypatch.setattr(checkpoint, "write_shard", write)
    monkeypatch.setattr(Saver, "due", due)
    assert (
        main(
            [
                "train",
                "-n2",
                "--transport=threads",
                "--quiet",
                *TINY,
                "--steps=8",
                "--save-every=1",
                "--save-async",
                f"--data={book}",
                f"--out={run}",
            ]
        )
        == 0
    )
    steps = json.loads((run / "metrics.json").read_text())["checkpoint"]["steps"]
    assert (steps[0], steps[-1]) == (1, 8) and not {2, 3, 4} & {*steps}
    assert {*drafts} == {1}
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "minidist train: the save after step 2 is put off: the disk still writes that of step 1; "
    )
