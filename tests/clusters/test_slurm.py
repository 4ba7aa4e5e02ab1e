"""Under Slurm: uneven nodes, MPI's ranks, a wrong PMI, scancel, a node that dies, a requeue."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cluster_launchers import by_srun, slurm_variables
from clusters import RANK, hosts_up
from jobs import JOB, finish, start
from leftovers import nothing_left

pytestmark = pytest.mark.cluster
TRAIN = [
    "-m",
    "minidist",
    "train",
    "--batch",
    "6",
    "--context",
    "8",
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


@pytest.fixture(scope="module")
def slurm():
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
        pytest.skip("Slurm is not installed: `apt-get install slurmctld slurmd slurm-client munge`")
    with hosts_up("a:loopback", "b:dead", "c", options=["--slurm"]) as cluster:
        yield cluster


def srun(cluster, where, *program, mpi="none", in_turn=False, **variables):
    with nothing_left() as mark:
        started = by_srun(f"--mpi={mpi}", in_turn=in_turn)(
            cluster, where, list(program), {**mark, **variables}
        )
        return finish(started[0], 60)


def command(cluster, *words):
    """A command of Slurm's on the first host; what it prints."""
    return cluster.ask(
        "a", "env", *(f"{name}={value}" for name, value in slurm_variables(cluster).items()), *words
    )


def free(cluster, limit=30):
    """Wait until no job is there and every node can take one."""
    deadline = time.monotonic() + limit
    while (
        command(cluster, "squeue", "-h")
        or command(cluster, "sinfo", "-h", "-t", "idle", "-o", "%D") != "3\n"
    ):
        assert time.monotonic() < deadline, command(cluster, "sinfo")
        time.sleep(0.2)


def test_seven_tasks_on_three_nodes(slurm):
    done = srun(slurm, {"a": 3, "b": 2, "c": 2}, RANK, "meet")
    assert done.returncode == 0, done
    assert json.loads(done.stdout) == {
        "hosts": ["a"] * 3 + ["b"] * 2 + ["c"] * 2,
        "nodes": [0] * 3 + [3] * 2 + [5] * 2,
        "transport": "shm+tcp",
    }


def test_tasks_dealt_in_turn(slurm):
    done = srun(slurm, {"a": 3, "b": 2}, RANK, "meet", in_turn=True)
    told = json.loads(done.stdout)
    assert (told["hosts"], told["nodes"]) == (["a", "b", "a", "b", "a"], [0, 1, 0, 1, 0])


@pytest.mark.parametrize("mode", ["meet", "conformance"])
def test_mpichs_ranks_by_pmi2(slurm, mode):
    done = srun(slurm, {"b": 2, "c": 1}, RANK, mode, mpi="pmi2", CLUSTER_TRANSPORT="mpi")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["transport"] == "mpi"


def test_a_killed_rank_of_mpi_by_pmi2_is_named(slurm):
    done = srun(slurm, {"b": 2, "c": 1}, RANK, "kill", "2", mpi="pmi2", CLUSTER_TRANSPORT="mpi")
    assert done.returncode
    # Slurm may have cleared it away before we look
    how = "was killed(?: by SIGKILL|, or ended without goodbye)"
    assert re.search(rf"minidist: rank 2 \(process \d+ on c\) {how}", done.stderr), done.stderr
    free(slurm)


@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_a_wrong_pmi_is_refused_in_one_line(slurm, mpi):
    """MPICH's library sees worlds of one."""
    done = srun(slurm, {"a": 2, "b": 1}, JOB, "ok", "mpi", mpi=mpi)
    assert done.returncode
    said = [
        line for line in done.stderr.splitlines() if not line.startswith(("srun: ", "slurmstepd: "))
    ]
    assert len(said) == 1, said
    assert re.fullmatch(
        r"minidist: srun .*started 3 tasks, but mpi4py .*: give srun --mpi=pmi2 for MPICH, .*",
        said[0],
    )


def test_scancel_ends_every_rank(slurm):
    with nothing_left(limit=10) as environment:
        (job,) = by_srun("--job-name=cancelled")(
            slurm, {"a": 1, "b": 2}, [RANK, "wait", "1"], environment
        )
        assert sorted(json.loads(job.stdout.readline())["met"] for _ in range(3)) == [0, 1, 2]
        command(slurm, "scancel", "--name=cancelled")
        started = time.monotonic()
        done = finish(job)
        assert time.monotonic() - started < 10
    assert done.returncode
    free(slurm)


@pytest.mark.timeout(400)
def test_a_job_that_is_put_back_goes_on_from_its_checkpoint(slurm, tmp_path):
    """`scontrol requeue`: Slurm starts the same batch file again, and the losses are those of an
    undisturbed run."""
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    train = [*TRAIN, "--data", str(book), "--steps", "150", "--save-every", "15"]
    with nothing_left() as environment:
        alone = finish(
            start([sys.executable, *train, "--out", str(tmp_path / "alone")], environment), 100
        )
        assert alone.returncode == 0, alone
    out = tmp_path / "run"
    batch = tmp_path / "batch.sh"
    batch.write_text(
        "#!/bin/bash\necho restart $SLURM_RESTART_COUNT\n"
        f"srun --mpi=none {sys.executable} {' '.join(train)} --out {out}\n"
    )
    number = command(
        slurm,
        "sbatch",
        "--parsable",
        "--requeue",
        "-N",
        "2",
        "-n",
        "3",
        "-w",
        "a,b",
        "-o",
        str(tmp_path / "said"),
        "--open-mode=append",
        str(batch),
    ).strip()
    deadline = time.monotonic() + 60
    while not list(out.glob("step-*")):
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
        time.sleep(0.05)
    command(slurm, "scontrol", "requeue", number)
    while not (out / "metrics.json").exists():
        assert time.monotonic() < deadline + 180, (tmp_path / "said").read_text()
        time.sleep(0.2)
    free(slurm)
    here, there = (
        json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path / "alone", out)
    )
    assert there["losses"][-1] == pytest.approx(here["losses"][-1], rel=1e-10)
    assert "restart 1\n" in (tmp_path / "said").read_text()


def test_a_node_that_dies_is_named(slurm):
    """Last: the host does not come again. --no-kill: else Slurm, which hears of it later, ends the
    job."""
    with nothing_left(limit=20) as environment:
        (job,) = by_srun("--no-kill")(slurm, {"a": 1, "c": 1}, [RANK, "wait", "0"], environment)
        for _ in range(2):
            job.stdout.readline()
        os.kill(slurm.pid("c"), signal.SIGKILL)
        started = time.monotonic()
        while "rank 1 " not in (line := job.stderr.readline()):
            assert line and time.monotonic() - started < 8
        assert re.search(r"rank 1 \(process \d+ on c\)", line)
        subprocess.run(
            slurm.on(
                "a",
                "env",
                *(f"{name}={value}" for name, value in slurm_variables(slurm).items()),
                "scancel",
                "-u",
                "root",
            ),
            check=True,
        )
        assert finish(job).returncode
