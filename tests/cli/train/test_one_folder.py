"""One run has one folder, whichever launcher starts its ranks, also where --out is left out."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import nobodys_port, run

from minidist.cli import main
from minidist.cli.train.settings import Settings
from minidist.comm.group import Group

MINIDIST = [sys.executable, "-m", "minidist"]
TINY = [
    "--steps",
    "3",
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
    "--quiet",
    "--validate",
    "4",
]
LOOKS = (["diagnose"], ["report"], ["watch", "--once"], ["sample", "--tokens", "3"])


def by_variables(folder: Path, name: str, size: int = 2) -> list["subprocess.Popen[str]"]:
    """Start the ranks as torchrun or srun would: a process each, with the launcher's variables."""
    with nobodys_port() as (address, port):
        pass
    started = []
    for rank in range(size):
        told = {
            "torchrun": {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": 0,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "none",
            },
            "srun": {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": size,
                "SLURM_LOCALID": rank,
                "SLURM_NODEID": 0,
                "SLURM_STEP_TASKS_PER_NODE": size,
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_STEP_ID": 0,
                "SLURM_JOB_ID": port,
                "MASTER_PORT": port,
                "MINIDIST_TOKEN": "0123456789abcdef" * 2,
            },
        }[name]
        environment = {**os.environ, **{variable: str(value) for variable, value in told.items()}}
        started.append(
            subprocess.Popen(
                [*MINIDIST, "train", *TINY],
                cwd=folder,
                env=environment,
                text=True,
                stderr=subprocess.PIPE,
            )
        )
    return started


def by_command(folder: Path, *words: str) -> list["subprocess.Popen[str]"]:
    """Start a launcher of the ranks."""
    return [subprocess.Popen([*words, *TINY], cwd=folder, text=True, stderr=subprocess.PIPE)]


WAYS = {
    "mpirun": lambda folder: by_command(folder, "mpirun", "-n", "2", *MINIDIST, "train"),
    "launch": lambda folder: by_command(
        folder, *MINIDIST, "launch", "-n", "3", "-m", "minidist", "train"
    ),
    "torchrun": lambda folder: by_variables(folder, "torchrun"),
    "srun": lambda folder: by_variables(folder, "srun"),
    "own ranks": lambda folder: by_command(folder, *MINIDIST, "train", "-n", "2"),
    "elastic": lambda folder: by_command(folder, *MINIDIST, "train", "-n", "2", "--elastic", "1:2"),
    "threads": lambda folder: by_command(
        folder, *MINIDIST, "train", "-n", "2", "--transport", "threads"
    ),
}
USUAL = ("mpirun", "torchrun")


@pytest.mark.parametrize(
    "way", [way if way in USUAL else pytest.param(way, marks=pytest.mark.soak) for way in WAYS]
)
def test_a_run_without_out_leaves_one_folder_that_every_command_can_read(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = WAYS[way](tmp_path)
    assert [process.communicate(timeout=100)[1] for process in started] == [""] * len(started)
    (folder,) = (tmp_path / "runs").iterdir()
    for look in LOOKS:
        assert main([look[0], str(folder), *look[1:]]) == 0, (look, capsys.readouterr().out)
    assert "between hosts" not in capsys.readouterr().out


def test_rank_0_names_the_folder_unless_an_option_does() -> None:
    def named(world: Group, out: str | None) -> tuple[str, bool]:
        args = SimpleNamespace(out=out)
        own = Settings(args, None, None, Path(f"runs/of-{world.rank}"))  # type: ignore[arg-type]
        found = own.with_one_folder(world)
        assert found == replace(own, out=found.out)
        return str(found.out), any(world.ledger.messages().values())

    assert {folder for folder, _ in run(named, None, size=3)} == {"runs/of-0"}
    assert run(named, "given", size=2) == [("runs/of-0", False), ("runs/of-1", False)]
