"""`minidist bench all-reduce`: our transports beside gloo and MPI, all in one run, over message sizes.

Each contender's ranks time the same in-place float32 sum. A repetition takes as long as its slowest rank; the figure of
a round is the median over repetitions, and the table shows the median over rounds. Bus bandwidth is nccl-tests':
bytes / seconds * 2(P-1)/P, what a ring's links carry, comparable across P.
"""

import importlib.util
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.cli.bench_jobs import Job, answer, worker_arguments, worker_command

OURS = ("sockets", "shm", "mpi")
PEERS = ("gloo", "MPI_Allreduce")
MODULE = "minidist.cli.bench_all_reduce"

Measure = Callable[..., list[float]]


def contenders_here() -> list[str]:
    """Every contender this machine can run: ours, gloo where PyTorch is installed, MPI where mpirun is."""
    names = ["sockets", "shm"]
    if shutil.which("mpirun"):
        names += ["mpi", "MPI_Allreduce"]
    if importlib.util.find_spec("torch"):
        names.append("gloo")
    return names


def base(contender: str) -> str:
    """The transport or peer of a contender: "shm" of "shm:ring"."""
    return contender.partition(":")[0]


def start_job(contender: str, size: int) -> Job:
    """Start the ranks of one contender."""
    command = worker_command(MODULE, contender)
    if contender == "gloo":
        return Job(contender, size, command, once_per_rank=True)
    if base(contender) in ("mpi", "MPI_Allreduce"):
        return Job(contender, size, ["mpirun", "-n", str(size), *command])
    return Job(contender, size, [sys.executable, "-m", "minidist", "launch", "-n", str(size), *command[1:]])


def measure_all(sizes: list[int], ranks: int, rounds: int, contenders: list[str],
                progress: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """Median seconds of each contender at each size, contenders taking turns within every round."""
    jobs = [start_job(name, ranks) for name in contenders]
    times: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in contenders}
    try:
        for round_number in range(rounds):
            for size in sizes:
                progress(f"{ranks} ranks, round {round_number + 1} of {rounds}, {size} B")
                repeats = max(5, min(100, (16 << 20) // size))
                for job in jobs:
                    slowest = [max(row) for row in zip(*job.ask(nbytes=size, repeats=repeats), strict=True)]
                    times[job.name][size].append(statistics.median(slowest))
    finally:
        for job in jobs:
            job.close()
    return {name: {size: statistics.median(rows) for size, rows in row.items()} for name, row in times.items()}


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Bytes per second that a ring's links carry: nbytes / seconds * 2(P-1)/P."""
    return nbytes / seconds * 2 * (ranks - 1) / ranks


# ---------------------------------------------------------------- the ranks' side


def our_rank(contender: str) -> tuple[int, Measure]:
    """One rank of minidist's own all_reduce, by the algorithm that the contender's name ends in, or auto's choice."""
    import minidist as md

    world, algorithm = md.init(transport=base(contender)), contender.partition(":")[2] or "auto"
    return world.rank, _timed(world.barrier, lambda x: world.all_reduce(x, out=x, algorithm=algorithm), world.size)


def mpi_rank() -> tuple[int, Measure]:
    """One rank of MPI's own Allreduce through mpi4py."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, _timed(world.Barrier, lambda x: world.Allreduce(MPI.IN_PLACE, x), world.size)


def gloo_rank(folder: str, rank: int, size: int) -> tuple[int, Measure]:
    """One rank of PyTorch's all_reduce over gloo, meeting through a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return rank, _timed(dist.barrier, lambda x: dist.all_reduce(torch.from_numpy(x)), size)


def _timed(barrier: Callable[[], Any], all_reduce: Callable[[np.ndarray], Any], size: int) -> Measure:
    def measure(nbytes: int, repeats: int) -> list[float]:
        buffer = np.full(nbytes // 4, 1.5, np.float32)
        all_reduce(buffer)
        if not (buffer == 1.5 * size).all():
            raise ArithmeticError(f"all_reduce of {nbytes} B over {size} ranks: not all {1.5 * size}: {buffer[:4]}")
        seconds = []
        for _ in range(repeats + 2):  # two to warm up
            buffer.fill(1.5)
            barrier()
            start = time.perf_counter()
            all_reduce(buffer)
            seconds.append(time.perf_counter() - start)
        return seconds[2:]

    return measure


def main() -> None:
    """Run as one rank of a contender."""
    options = worker_arguments().parse_args()
    if options.contender == "gloo":
        rank, measure = gloo_rank(options.meet, options.rank, options.size)
    elif options.contender == "MPI_Allreduce":
        rank, measure = mpi_rank()
    else:
        rank, measure = our_rank(options.contender)
    answer(options.meet, rank, measure)


if __name__ == "__main__":
    main()
