"""`minidist bench calibrate`: what a message costs on this machine, for each link class: α, o, β, γ (comm/profile.py).

The ranks stand in a circle and do what collectives do, over the same code: `exchange`, each sending to the next and
receiving from the one before. Measured are

    exchange   of each size, steps that wait for each other       α + n·β
    add        the same, adding what arrives to an array          α + n·(β + γ)
    burst      empty messages that do not wait for each other     α + (messages-1)·o

A figure is the time of its slowest rank, the median over repetitions, the least over rounds (what disturbs a round only
adds to it); links take turns within a round. The fit is weighted least squares on the relative error; the worst misfit
is reported, for real links are not straight lines: protocols change with the size, and small arrays stay in caches.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from minidist.cli.bench_jobs import Job, answer, worker_arguments, worker_command
from minidist.comm.call import Call
from minidist.comm.group import Group
from minidist.comm.profile import LinkCost, Sample, Work, fit
from minidist.comm.transport import Handle

MODULE = "minidist.cli.bench_calibrate"
LINKS = ("threads", "sockets", "shm", "mpi")
BURST = 8                   # messages of a burst, to one neighbour
STEPS = 4                   # exchanges in a row, so that starting the call counts little
BUDGET = 8 << 20            # bytes that the repetitions of one figure may move

Measure = Callable[..., list[float]]


def links_here() -> list[str]:
    """The link classes between ranks of this host."""
    return ["threads", "sockets", "shm", *(["mpi"] if shutil.which("mpirun") else [])]


def work_of(kind: str, nbytes: int) -> Work:
    """What one repetition of a kind does, per step."""
    if kind == "burst":
        return Work(1, BURST, 0, 0)
    return Work(1, 1, nbytes, nbytes if kind == "add" else 0)


def measure_all(links: list[str], ranks: list[int], sizes: list[int], rounds: int,
                progress: Callable[[str], None]) -> tuple[list[LinkCost], list[list[Sample]]]:
    """The fitted costs of each link among each count of ranks, and the samples each was fitted to."""
    costs: list[LinkCost] = []
    samples: list[list[Sample]] = []
    for count in ranks:
        jobs: list[Job] = []
        try:
            for link in links:
                progress(f"{count} ranks: starting {link}")
                jobs.append(start_job(link, count))
            figures = _rounds(jobs, sizes, rounds, progress)
        finally:
            for job in jobs:
                job.close()
        for link in links:
            samples.append([Sample(work_of(kind, nbytes), min(times))
                            for (of, kind, nbytes), times in figures.items() if of == link])
            costs.append(fit(link, count, samples[-1]))
    return costs, samples


def _rounds(jobs: list[Job], sizes: list[int], rounds: int,
            progress: Callable[[str], None]) -> dict[tuple[str, str, int], list[float]]:
    """{(link, kind, bytes): seconds of a step in each round}."""
    figures: dict[tuple[str, str, int], list[float]] = {}
    for round_number in range(rounds):
        for kind, nbytes in (*((kind, size) for kind in ("exchange", "add") for size in sizes), ("burst", 0)):
            progress(f"{jobs[0].size} ranks, round {round_number + 1} of {rounds}: {kind} {nbytes} B")
            repeats = max(5, min(50, BUDGET // STEPS // max(nbytes, 1)))
            for job in jobs:
                slowest = [max(row) for row in zip(*job.ask(kind=kind, nbytes=nbytes, repeats=repeats), strict=True)]
                figures.setdefault((job.name, kind, nbytes), []).append(statistics.median(slowest) / STEPS)
    return figures


def start_job(link: str, ranks: int) -> Job:
    """Start the ranks that measure one link class."""
    command = worker_command(MODULE, link)
    if link == "threads":
        return Job(link, ranks, [*command, "--size", str(ranks)])
    if link == "mpi":
        return Job(link, ranks, ["mpirun", "-n", str(ranks), *command])
    return Job(link, ranks, [sys.executable, "-m", "minidist", "launch", "-n", str(ranks), *command[1:]])


# ---------------------------------------------------------------- the ranks' side


def measuring(world: Group) -> Measure:
    """`measure(kind, nbytes, repeats)`: seconds of each repetition of STEPS steps on this rank."""
    def measure(kind: str, nbytes: int, repeats: int) -> list[float]:
        send, into = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        step = _burst if kind == "burst" else _exchange_and_add if kind == "add" else _exchange

        def work(call: Call) -> None:
            for _ in range(STEPS):
                step(call, send, into)

        seconds = []
        for _ in range(repeats + 2):  # two to warm up
            into.fill(0)
            world.barrier()
            start = time.perf_counter()
            Call(world, "calibrate", kind, work).run()
            seconds.append(time.perf_counter() - start)
        expected = STEPS if kind == "add" else 0 if kind == "burst" else 1
        if not (into == expected).all():
            raise ArithmeticError(f"calibrate: {kind} of {nbytes} B: not all {expected}: {into[:4]}")
        return seconds[2:]

    return measure


def _exchange(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    call.exchange(call.next_rank, send, call.prev_rank, into)


def _exchange_and_add(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    call.exchange(call.next_rank, send, call.prev_rank, into, _add)


def _add(target: np.ndarray, start: int, piece: np.ndarray) -> None:
    """Add a piece where it belongs, straight from the receive buffer."""
    part = target[start:start + len(piece)]
    np.add(part, piece, out=part)


def _burst(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    handles: list[Handle] = [call.start_recv(call.prev_rank, into[:0]) for _ in range(BURST)]
    handles += [call.start_send(call.next_rank, send[:0]) for _ in range(BURST)]
    for handle in handles:
        handle.wait()


def main() -> None:
    """Run as one rank of a link class; as all of them, where they are threads."""
    import minidist as md

    options = worker_arguments().parse_args()

    def body(world: Group) -> None:
        answer(options.meet, world.rank, measuring(world))

    if options.contender == "threads":
        md.run(body, size=options.size, transport="threads", limit=3600.0)
    else:
        body(md.init(transport=options.contender))


if __name__ == "__main__":
    main()
