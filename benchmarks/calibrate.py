"""`minidist bench calibrate`: the cost of a message for each kind of link: α, o, β, γ, κ
(link_model.py).

    minidist bench calibrate                                        between ranks of this host
    minidist launch -n 2 --nnodes 2 ... minidist bench calibrate    on every node: between hosts,
                                                                    over their network

Measured links replace their entries in the profile; other links stay there.

The ranks form a ring and run the code of collectives: in `exchange` each rank sends to the next
rank and receives from the previous rank. Measured are

    exchange   of each size, steps that wait for each other       α + n·β
    add        the same, each arriving piece added to an array    α + n·(β + γ)
    spread     the same bytes, a part to every other rank at once α + (P-2)·o + n·(β + κ)
    burst      empty messages that do not wait for each other     α + (messages-1)·o

and, over each link of this host,

    tp, sequence, dp, pairs    steps of small models: the extra cost of calls and kernels in
                               training (call_cost.py), in units of steps without communication

A figure is the time of the slowest rank: median over repetitions, minimum over rounds (a
disturbance only adds time). Links take turns within a round. The fit is weighted least squares on
the relative error. Its worst misfit is reported, because the cost of a real link is not a straight
line: protocols change with the size, and small arrays stay in caches.
"""

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.bench import call_cost, computation
from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    slowest,
    start_workers,
    worker_arguments,
)
from minidist.comm import call_site
from minidist.comm.calls.call import Call
from minidist.comm.calls.prepared import prepare
from minidist.comm.chunks import split
from minidist.comm.cost.link_model import NETWORK, LinkCost, LinkWork, Sample, fit
from minidist.comm.group import Group
from minidist.comm.handle import Handle
from minidist.launch.own_python import module_command

MODULE = "minidist.bench.calibrate"
LINKS = ("threads", "tcp", "shm", "mpi")
BURST = 8  # messages of a burst, to one neighbour
STEPS = 4  # exchanges in a row, so that the start of the call counts little
BUDGET = 8 << 20  # bytes that the repetitions of one figure may move

Measure = Callable[..., list[float]]


class Fitted(NamedTuple):
    """The costs of a link, the samples of the fit, and the steps of small models
    (_training_steps)."""

    cost: LinkCost
    samples: list[Sample]
    steps: Mapping[str, Sequence[float]] = {}


def links_here() -> list[str]:
    """Return the link classes between ranks of this host."""
    return ["threads", "tcp", "shm", *(["mpi"] if shutil.which("mpirun") else [])]


def work_of(kind: str, nbytes: int, ranks: int) -> LinkWork:
    """Return the work of one step of a repetition, for the fit."""
    if kind == "burst":
        return LinkWork(1, BURST, 0, 0)
    if kind == "spread":
        parts = nbytes * (ranks - 1) / ranks
        return LinkWork(1, ranks - 1, parts, 0, parts if ranks > 2 else 0)
    return LinkWork(1, 1, nbytes, nbytes if kind == "add" else 0)


def measure_all(
    links: list[str],
    ranks: list[int],
    sizes: list[int],
    rounds: int,
    progress: Callable[[str], None],
) -> list[Fitted]:
    """Measure each link class of this host at each number of ranks; return the fits."""
    fitted: list[Fitted] = []
    for count in dict.fromkeys(ranks):
        jobs: list[Job] = []
        with closed_at_the_end(jobs):
            for link in links:
                progress(f"{count} ranks: starting {link}")
                jobs.append(start_job(link, count))
            asks: dict[str, Measure] = {job.name: partial(slowest, job) for job in jobs}
            found = _fit_all(asks, count, sizes, rounds, progress)
            jobs.append(computation.start_job(count))
            steps = _training_steps(asks, partial(slowest, jobs[-1]), count, rounds, progress)
            fitted += [each._replace(steps=steps[each.cost.link]) for each in found]
    return fitted


def _training_steps(
    asks: Mapping[str, Measure],
    ask_alone: Measure,
    ranks: int,
    rounds: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Return {link: {kind: step of each round}}; the unit is the mean of the steps without
    communication before and after it."""
    kinds = call_cost.kinds(ranks)
    steps: dict[str, dict[str, list[float]]] = {link: {kind: [] for kind in kinds} for link in asks}

    def alone() -> float:
        (seconds,) = ask_alone(kind="step", dtype="float32", size=call_cost.ALONE)
        return seconds

    before = alone()
    for round_number in range(rounds):
        progress(f"{ranks} ranks, round {round_number + 1} of {rounds}: training steps")
        for (link, ask), kind in itertools.product(asks.items(), kinds):
            seconds = statistics.median(ask(kind=kind, nbytes=0, repeats=0))
            after = alone()
            steps[link][kind].append(2 * seconds / (before + after))
            before = after
    return steps


def measure_job(
    world: Group, sizes: list[int], rounds: int, progress: Callable[[str], None]
) -> list[Fitted]:
    """Measure and fit this job's own link class ("network" if it runs on several machines). Every
    rank calls it."""
    own = measuring(world)

    def ask(**question: Any) -> list[float]:
        return list(world.all_reduce(np.array(own(**question)), op="max"))

    link = NETWORK if len(set(world.nodes)) > 1 else world.transport.inside
    return _fit_all({link: ask}, world.size, sizes, rounds, progress)


def _fit_all(
    asks: dict[str, Measure],
    ranks: int,
    sizes: list[int],
    rounds: int,
    progress: Callable[[str], None],
) -> list[Fitted]:
    """Measure every figure in every round, with the links in turn; return the fit of each link.

    Args:    asks: {link: function that returns the seconds of each repetition on its slowest rank}.
    """
    figures: dict[tuple[str, str, int], list[float]] = {}  # of a step, in each round
    for round_number in range(rounds):
        for kind, nbytes in (
            *((kind, size) for kind in ("exchange", "add", "spread") for size in sizes),
            ("burst", 0),
        ):
            progress(f"{ranks} ranks, round {round_number + 1} of {rounds}: {kind} {nbytes} B")
            repeats = max(5, min(50, BUDGET // STEPS // max(nbytes, 1)))
            for link, ask in asks.items():
                seconds = statistics.median(ask(kind=kind, nbytes=nbytes, repeats=repeats)) / STEPS
                figures.setdefault((link, kind, nbytes), []).append(seconds)
    fitted = []
    for link in asks:
        samples = [
            Sample(work_of(kind, nbytes, ranks), min(times))
            for (of, kind, nbytes), times in figures.items()
            if of == link
        ]
        fitted.append(Fitted(fit(link, ranks, samples), samples))
    return fitted


def start_job(link: str, ranks: int) -> Job:
    """Start the ranks that measure one link class."""
    if link == "threads":
        return Job(link, ranks, module_command(MODULE, link, "--size", str(ranks)))
    return start_workers(MODULE, link, ranks, by="mpirun" if link == "mpi" else "launch")


# ---------------------------------------------------------------- the ranks' side


def measuring(world: Group) -> Measure:
    """Return `measure(kind, nbytes, repeats)`, which returns the seconds of each repetition of
    STEPS steps on this rank."""

    def measure(kind: str, nbytes: int, repeats: int) -> list[float]:
        if kind in call_cost.KINDS:
            return call_cost.step_seconds(kind, world)
        send = np.ones(nbytes // 4, np.float32)
        into = np.zeros(nbytes // 4, np.float32)
        step = {
            "exchange": _exchange,
            "add": _exchange_and_add,
            "spread": _spread,
            "burst": _burst,
        }[kind]

        def work(call: Call) -> None:
            for _ in range(STEPS):
                step(call, send, into)

        prepared = prepare(world.id, "calibrate", kind, work, call_site.caller())
        seconds = []
        for _ in range(repeats + 2):  # two to warm up
            into.fill(0)
            world.barrier()
            start = time.perf_counter()
            call = Call(world, prepared, work)
            with call:
                work(call)
            seconds.append(time.perf_counter() - start)
        if kind == "spread":
            split(into, world.size)[world.rank].fill(1)  # the rank keeps its own part
        expected = STEPS if kind == "add" else 0 if kind == "burst" else 1
        if not (into == expected).all():
            raise ArithmeticError(
                f"calibrate: {kind} of {nbytes} B: not all {expected}: {into[:4]}"
            )
        return seconds[2:]

    return measure


def _exchange(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    call.exchange(call.next_rank, send, call.prev_rank, into)


def _exchange_and_add(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    call.exchange(call.next_rank, send, call.prev_rank, into, _add)


def _add(target: np.ndarray, start: int, piece: np.ndarray) -> None:
    """Add a piece to its place in `target`, directly from the receive buffer."""
    part = target[start : start + len(piece)]
    np.add(part, piece, out=part)


def _spread(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    others = [(call.rank + step) % call.size for step in range(1, call.size)]
    outgoing = split(send, call.size)
    incoming = split(into, call.size)
    handles: list[Handle] = [call.start_recv(src, incoming[src]) for src in reversed(others)]
    handles += [call.start_send(dst, outgoing[call.rank]) for dst in others]
    for handle in handles:
        handle.wait()


def _burst(call: Call, send: np.ndarray, into: np.ndarray) -> None:
    handles: list[Handle] = [call.start_recv(call.prev_rank, into[:0]) for _ in range(BURST)]
    handles += [call.start_send(call.next_rank, send[:0]) for _ in range(BURST)]
    for handle in handles:
        handle.wait()


def main() -> None:
    """Run as one rank of a link class, or as all of its ranks if they are threads."""
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
