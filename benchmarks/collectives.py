"""`minidist bench all-reduce|all-gather|reduce-scatter|all-to-all`: our transports compared with
gloo and MPI, in one run; where there is a GPU, also NCCL.

Each contender's ranks time the same float32 call after a check of its result. The time of a
repetition is that of its slowest rank; the figure of a round is the median over repetitions, and
the table shows the median over rounds.

Sizes and bus bandwidth are those of nccl-tests. A size is the larger of a rank's two buffers:
either of all-reduce, the output of all-gather, the input of reduce-scatter and all-to-all (P equal
blocks of whole numbers; the remainder is dropped). Bus bandwidth is bytes / seconds × the part of
the bytes that must cross a rank's link, so it can be compared across P and between verbs:

    all-reduce  2(P-1)/P        all-gather, reduce-scatter, all-to-all  (P-1)/P

For messages up to 4 MiB a repetition is several calls in a row, as in nccl-tests: then it matters
little that ranks leave the barrier before the calls at different times.

The contenders `copies` and `bare-tcp` do only the work that no algorithm avoids, `bare-shm` only
the work of showing arrays to each other (floors.py). The distance between a peer and them is about
the largest possible gain over shared memory and over TCP.

The contender `nccl` is our transport of this name: arrays on GPUs, which NCCL reduces, or CUDA IPC
where ranks share one GPU. A call ends when the GPU has finished.
"""

import importlib.util
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.bench.floors import (
    COPIES,
    FLOORS,
    SHM,
    TCP,
    BoardCalls,
    Run,
    blocks,
    connected,
    copies_call,
    tcp_call,
)
from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    join_gloo,
    slowest,
    start_workers,
    worker_arguments,
)
from minidist.comm.group import Group
from minidist.device.backend import module_for, to_device, to_host
from minidist.errors import DeviceError, LaunchError

NCCL = "nccl"
OURS = ("tcp", "shm", "mpi", NCCL)
GLOO = "gloo"
MODULE = "minidist.bench.collectives"
ITEM = 4  # bytes of a float32
IN_A_ROW = 10  # most calls of a repetition
ROW_BYTES = 8 << 20  # most bytes of all calls of a repetition with several calls

Measure = Callable[..., list[float]]


@dataclass(frozen=True)
class Verb:
    """A collective that is measured.

    Attributes: name    the method's name: "all_reduce"
                mpi     MPI's name, also the name of the contender: "MPI_Allreduce"
                about   for the table's title
                brings  (rank, P) -> the value that fills each block of the rank's input
                gets    (rank, P) -> the value that must fill each block of its output
    """

    name: str
    mpi: str
    about: str
    brings: Callable[[int, int], list[int]]
    gets: Callable[[int, int], list[int]]

    @property
    def title(self) -> str:
        """The name on the command line and in nccl-tests: "all-reduce"."""
        return self.name.replace("_", "-")

    @property
    def in_place(self) -> bool:
        return self.name == "all_reduce"

    @property
    def peers(self) -> tuple[str, ...]:
        """Contenders other than our transports."""
        return (GLOO, self.mpi, *FLOORS)

    def block(self, nbytes: int, ranks: int) -> int:
        """Return the elements of a block; the larger buffer has one block (all-reduce) or P."""
        return nbytes // ITEM if self.in_place else nbytes // ITEM // ranks

    def bus_bandwidth(self, nbytes: int, seconds: float, ranks: int) -> float:
        """Return the bytes per second that the links carry, as nccl-tests does."""
        crossings = 2 if self.in_place else 1
        moved = self.block(nbytes, ranks) * ITEM * (1 if self.in_place else ranks)
        return moved / seconds * crossings * (ranks - 1) / ranks


def _sum_over(ranks: int) -> int:
    """Return 1 + 2 + ... + P, the sum of rank+1 over all ranks."""
    return ranks * (ranks + 1) // 2


VERBS = {
    verb.title: verb
    for verb in (
        Verb(
            "all_reduce",
            "MPI_Allreduce",
            "float32 sum, in place",
            lambda rank, size: [rank + 1],
            lambda rank, size: [_sum_over(size)],
        ),
        Verb(
            "all_gather",
            "MPI_Allgather",
            "float32; a size is what every rank gets",
            lambda rank, size: [rank + 1],
            lambda rank, size: list(range(1, size + 1)),
        ),
        Verb(
            "reduce_scatter",
            "MPI_Reduce_scatter_block",
            "float32 sum; a size is what every rank brings",
            lambda rank, size: [(rank + 1) * (block + 1) for block in range(size)],
            lambda rank, size: [_sum_over(size) * (rank + 1)],
        ),
        Verb(
            "all_to_all",
            "MPI_Alltoall",
            "float32; a size is what every rank brings",
            lambda rank, size: [rank * size + block for block in range(size)],
            lambda rank, size: [block * size + rank for block in range(size)],
        ),
    )
}


def contenders_here(verb: Verb) -> list[str]:
    """Return every contender that this machine can run: ours, gloo if PyTorch is installed, MPI if
    mpirun is, NCCL if CuPy finds a GPU."""
    names = ["tcp", "shm", *FLOORS]
    if has_gpu():
        names.append(NCCL)
    if shutil.which("mpirun"):
        names += ["mpi", verb.mpi]
    if importlib.util.find_spec("torch"):
        names.append(GLOO)
    return names


def has_gpu() -> bool:
    """Return whether CuPy is installed and finds a GPU."""
    try:
        module_for("cuda")
    except DeviceError:
        return False
    return True


def base(contender: str) -> str:
    """Return the transport or peer of a contender: "shm" of "shm:ring"."""
    return contender.partition(":")[0]


def start_job(verb: Verb, contender: str, size: int) -> Job:
    """Start the ranks of one contender."""
    by = (
        "rank"
        if contender == GLOO
        else "mpirun"
        if base(contender) in ("mpi", verb.mpi)
        else "launch"
    )
    return start_workers(MODULE, contender, size, ["--verb", verb.title], by=by)


def in_a_row(nbytes: int) -> int:
    """Return the number of calls in a repetition with messages of `nbytes`."""
    return max(1, min(IN_A_ROW, ROW_BYTES // nbytes))


def measure_all(
    verb: Verb,
    sizes: list[int],
    ranks: int,
    rounds: int,
    contenders: Sequence[str],
    asked: bool,
    progress: Callable[[str], None],
) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Measure all contenders, which take turns within every round.

    Args:    sizes: bytes. asked: whether the user named the contenders; if not, a peer without the
             verb is left out.
    Returns: {contender: {size: median seconds}}, and a line for each contender that was left out.
    Raises:  LaunchError if a contender that must run does not start.
    """
    jobs: list[Job] = []
    left_out: list[str] = []
    times: dict[str, dict[int, list[float]]] = {}
    with closed_at_the_end(jobs):
        for name in contenders:
            progress(f"{verb.title}, {ranks} ranks: starting {name}")
            try:
                jobs.append(start_job(verb, name, ranks))
            except LaunchError as error:
                if asked or name not in verb.peers:
                    raise
                left_out.append(f"{name} was left out: {str(error).splitlines()[-1]}")
        times = {job.name: {size: [] for size in sizes} for job in jobs}
        for round_number in range(rounds):
            for size in sizes:
                progress(
                    f"{verb.title}, {ranks} ranks, round {round_number + 1} of {rounds}, {size} B"
                )
                repeats = max(5, min(100, (16 << 20) // size) // in_a_row(size))
                for job in jobs:
                    times[job.name][size].append(
                        statistics.median(slowest(job, nbytes=size, repeats=repeats))
                    )
    medians = {
        name: {size: statistics.median(rows) for size, rows in row.items()}
        for name, row in times.items()
    }
    return medians, left_out


# ---------------------------------------------------------------- the ranks' side


def our_rank(verb: Verb, contender: str) -> tuple[int, Measure]:
    """Return (rank, measure) of one rank of minidist, with the algorithm after the colon of the
    contender's name, or auto's choice."""
    import minidist as md

    world = md.init(transport=base(contender))
    call = our_call(world, verb, contender.partition(":")[2] or "auto")
    if base(contender) != NCCL:
        return world.rank, timed(verb, call, world.barrier, world.rank, world.size)
    return world.rank, timed_on_gpus(verb, call, world)


def timed_on_gpus(verb: Verb, call: Run, world: Group) -> Measure:
    """Return `timed` of arrays on GPUs: a call, and what stands before the barrier, ends when the
    GPU has finished."""
    cuda = module_for("cuda").cuda

    def run(send: Any, recv: Any) -> None:
        call(send, recv)
        cuda.get_current_stream().synchronize()

    def barrier() -> None:
        cuda.get_current_stream().synchronize()
        world.barrier()

    return timed(verb, run, barrier, world.rank, world.size, device="cuda")


def our_call(world: Group, verb: Verb, algorithm: str) -> Run:
    """Return the call of the group's verb that is timed."""
    call = getattr(world, verb.name)
    if verb.name == "all_to_all":
        return lambda send, recv: call(
            blocks(send, world.size), out=blocks(recv, world.size), algorithm=algorithm
        )
    return lambda send, recv: call(send, out=recv, algorithm=algorithm)


def floor_rank(verb: Verb, contender: str) -> tuple[int, Measure]:
    """Return (rank, measure) of one rank of a floor (floors.py); the ranks synchronize over shared
    memory."""
    import minidist as md

    world = md.init(transport="shm")
    if contender == COPIES:
        run = copies_call(verb, world.size)
    elif contender == TCP:
        run = tcp_call(verb, connected(world))
    else:
        assert world.board is not None, "ranks of one host share one"
        run = getattr(BoardCalls(world.board, world.rank, world.size), verb.name)
    return world.rank, timed(
        verb, run, world.barrier, world.rank, world.size, check=contender == SHM
    )


def mpi_rank(verb: Verb) -> tuple[int, Measure]:
    """Return (rank, measure) of one rank of MPI's own collective, through mpi4py."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    call = getattr(world, verb.mpi.removeprefix("MPI_"))

    def run(send: np.ndarray, recv: np.ndarray) -> None:
        call(MPI.IN_PLACE if send is recv else send, recv)

    return world.rank, timed(verb, run, world.Barrier, world.rank, world.size)


def gloo_rank(verb: Verb, folder: str, rank: int, size: int) -> tuple[int, Measure]:
    """Return (rank, measure) of one rank of PyTorch's collective over gloo; exit with one line and
    status 1 if gloo lacks the verb."""
    import torch

    dist = join_gloo(folder, rank, size)
    older = {
        "all_gather": "all_gather_into_tensor",
        "reduce_scatter": "reduce_scatter_tensor",
        "all_to_all": "all_to_all_single",
    }
    # names since PyTorch 2.13
    newer = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    call = getattr(dist, newer.get(verb.name, ""), None) or getattr(
        dist, older.get(verb.name, verb.name)
    )

    def run(send: np.ndarray, recv: np.ndarray) -> None:
        tensors = (
            (torch.from_numpy(recv),)
            if send is recv
            else (torch.from_numpy(recv), torch.from_numpy(send))
        )
        call(*tensors)

    measure = timed(verb, run, dist.barrier, rank, size)
    try:
        measure(nbytes=ITEM * size, repeats=1)
    except (RuntimeError, NotImplementedError) as error:
        sys.exit(
            f"gloo of PyTorch {torch.__version__} has no {verb.title}: {str(error).splitlines()[0]}"
        )
    return rank, measure


def timed(
    verb: Verb,
    run: Run,
    barrier: Callable[[], Any],
    rank: int,
    size: int,
    *,
    check: bool = True,
    device: str = "cpu",
) -> Measure:
    """Return a function that checks the call once, then returns its seconds in each repetition on
    this rank; its arrays lie on `device`."""

    def measure(nbytes: int, repeats: int) -> list[float]:
        block = verb.block(nbytes, size)
        filled = np.repeat(np.array(verb.brings(rank, size), np.float32), block)
        wanted = np.repeat(np.array(verb.gets(rank, size), np.float32), block)
        brings = to_device(filled, device)
        send = brings.copy()
        recv = send if verb.in_place else to_device(np.zeros_like(wanted), device)
        run(send, recv)
        got = to_host(recv)
        if check and not np.array_equal(got, wanted):
            wrong = int(np.flatnonzero(got != wanted)[0])
            raise ArithmeticError(
                f"{verb.title} of {nbytes} B over {size} ranks: rank {rank} has {got[wrong]:g} at "
                f"{wrong}, and should have {wanted[wrong]:g}"
            )
        seconds = []
        calls = in_a_row(nbytes)
        for _ in range(repeats + 2):  # two to warm up
            if verb.in_place:
                send[...] = brings  # else the sums would overflow
            barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run(send, recv)
            seconds.append((time.perf_counter() - start) / calls)
        return seconds[2:]

    return measure


def main() -> None:
    """Run as one rank of a contender."""
    parser = worker_arguments()
    parser.add_argument("--verb", choices=VERBS, required=True)
    options = parser.parse_args()
    verb = VERBS[options.verb]
    if options.contender == GLOO:
        rank, measure = gloo_rank(verb, options.meet, options.rank, options.size)
    elif options.contender == verb.mpi:
        rank, measure = mpi_rank(verb)
    elif options.contender in FLOORS:
        rank, measure = floor_rank(verb, options.contender)
    else:
        rank, measure = our_rank(verb, options.contender)
    answer(options.meet, rank, measure)


if __name__ == "__main__":
    main()
