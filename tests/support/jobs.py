"""Running tests/support/job.py under each launcher."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from minidist.launch.launchers import clean_environment
from minidist.launch.mpirun import find_mpirun

JOB = str(Path(__file__).parent / "job.py")
BIN = Path(sys.executable).parent


def finish(process, limit=60):
    """Return what the process said and how it ended; one that takes longer than `limit` s is killed
    and fails the test."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def met(process, size=3):
    """Wait until the ranks have said hello, or as many as will; returns when that was."""
    for _ in range(size):
        if not process.stdout.readline():
            break
    return time.monotonic()


def free_port():
    """A port that nobody listens on, nor on the next, where torchrun's monitor is; none that the
    kernel hands out, and another one in each process."""
    for port in range(20000 + 4 * os.getpid() % 10000, 32000):
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return str(port)
    raise OSError("no port is free")


def start(command, environment, *, apart=False, **variables):
    """`apart`: it and what it starts are a group of processes, as what a terminal starts is."""
    return subprocess.Popen(
        command,
        env={**clean_environment(environment), **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=apart,
    )


def by_launch(environment, *arguments, size=3, options=(), apart=False):
    """`minidist launch -n SIZE job.py …`."""
    return start(
        [sys.executable, "-m", "minidist", "launch", "-n", str(size), *options, JOB, *arguments],
        environment,
        apart=apart,
    )


def by_mpirun(environment, *arguments, size=3):
    """`mpirun -n SIZE python job.py …`."""
    mpirun = find_mpirun()
    return start([*mpirun.command(size), sys.executable, JOB, *arguments], environment)


def by_hand(environment, *arguments, size, variables):
    """One process a rank, with the variables that a launcher would set: `variables(rank)`."""
    return [
        start([sys.executable, JOB, *arguments], environment, **variables(rank))
        for rank in range(size)
    ]


def torchrun(rank, size=3, port="29400"):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"test {os.getpid()}",
    }


def slurm(rank, size=3, job=None):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "node7",
        "SLURM_JOB_ID": str(job or os.getpid()),
        "SLURM_STEP_ID": "0",
    }
