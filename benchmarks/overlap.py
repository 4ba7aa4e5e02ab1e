"""`minidist bench overlap`: the share of an all-reduce that is hidden behind matrix products.

    communicate      start, wait                         the time of communication
    compute          products of about the same time     the time of computation
    both             start, products, wait               at best the longer of the two, at worst
                                                         their sum

`delayed` is our all-reduce over links that sleep α + n·β per message
(comm/transports/throttled.py): it shows the value of overlap if a network moves the bytes. The
other contenders use this machine as it is, where the cores that compute also move the bytes.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    join_gloo,
    slowest,
    start_workers,
    worker_arguments,
)
from minidist.launch.membership import limit_blas_threads

DELAYED = "delayed"
GLOO = "gloo"
CONTENDERS = (DELAYED, "tcp", "shm", GLOO)
MODULE = "minidist.bench.overlap"
WIDTH = 256  # side of the float32 matrices: a product takes a fraction of a millisecond
TRIAL = 8  # products of the first measurement of their time


@dataclass(frozen=True)
class OverlapRow:
    """The result of one contender: median seconds of communication, of computation, and of both at
    once, on its slowest rank."""

    name: str
    communicate: float
    compute: float
    both: float

    @property
    def of_longer(self) -> float:
        """`both` / the longer of the two: 1 if the shorter is hidden completely."""
        return self.both / max(self.communicate, self.compute)

    @property
    def hidden(self) -> float:
        """The hidden share of the shorter: 1 at best; below 0 if both at once take longer than
        their sum."""
        return (self.communicate + self.compute - self.both) / min(self.communicate, self.compute)

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json, the table and the figure."""
        return {**asdict(self), "of_longer": self.of_longer, "hidden": self.hidden}


def contenders_here() -> list[str]:
    """Return the contenders on this machine: ours over delayed links, tcp and shm; gloo if PyTorch
    is installed."""
    return [DELAYED, "tcp", "shm", *([GLOO] if importlib.util.find_spec("torch") else [])]


def measure_all(
    contenders: list[str],
    ranks: int,
    nbytes: int,
    rounds: int,
    alpha: float,
    beta: float,
    progress: Callable[[str], None],
) -> list[OverlapRow]:
    """Return a row for each contender; they take turns within every round."""
    jobs: list[Job] = []
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    products: dict[str, int] = {}
    with closed_at_the_end(jobs):
        for name in contenders:
            progress(f"starting {name}")
            jobs.append(
                start_workers(
                    MODULE,
                    name,
                    ranks,
                    [f"--alpha={alpha!r}", f"--beta={beta!r}"],
                    by="rank" if name == GLOO else "launch",
                )
            )
        for round_number in range(rounds):
            for job in jobs:
                progress(f"round {round_number + 1} of {rounds}: {job.name}")
                if job.name not in products:
                    one = statistics.median(slowest(job, nbytes=0, products=TRIAL)) / TRIAL
                    alone = statistics.median(slowest(job, nbytes=nbytes, products=0))
                    products[job.name] = max(1, round(alone / one))
                count = products[job.name]
                for kind, size, some in (
                    ("communicate", nbytes, 0),
                    ("compute", 0, count),
                    ("both", nbytes, count),
                ):
                    seconds = statistics.median(slowest(job, nbytes=size, products=some))
                    figures[job.name].setdefault(kind, []).append(seconds)
    return [
        OverlapRow(
            name, **{kind: statistics.median(seconds) for kind, seconds in figures[name].items()}
        )
        for name in contenders
    ]


# ---------------------------------------------------------------- the ranks' side


class TimedOverlap:
    """A rank's communication and computation, timed separately or at once.

    Args:    start: start(x) -> a handle with wait(). multiply: one product. barrier: of all ranks.
    """

    def __init__(
        self,
        start: Callable[[np.ndarray], Any],
        multiply: Callable[[], Any],
        barrier: Callable[[], Any],
        ranks: int,
    ) -> None:
        self.start = start
        self.multiply = multiply
        self.barrier = barrier
        self.ranks = ranks

    def measure(self, nbytes: int, products: int, repeats: int = 5) -> list[float]:
        """Return the seconds of each repetition: all-reduce `nbytes` (none if 0) while `products`
        products are computed."""
        x = np.ones(nbytes // 4, np.float32)
        seconds = []
        for _ in range(repeats + 1):  # one to warm up
            x.fill(1)
            self.barrier()
            started = time.perf_counter()
            pending = self.start(x) if nbytes else None
            for _ in range(products):
                self.multiply()
            if pending is not None:
                pending.wait()
            seconds.append(time.perf_counter() - started)
        if not (x == self.ranks).all():
            raise ArithmeticError(
                f"all-reduce of {nbytes} B beside {products} products: not all {self.ranks}: "
                f"{x[:4]}"
            )
        return seconds[1:]


def our_rank(folder: str, contender: str, alpha: float, beta: float) -> None:
    """Run one rank of minidist, over delayed links or over the transport named like the
    contender."""
    import minidist as md
    from minidist.comm.transports.throttled import delayed

    limit_blas_threads(1, local_size=1)
    world = md.init(transport="tcp" if contender == DELAYED else contender, threads=1)
    a, b, c = (np.ones((WIDTH, WIDTH), np.float32) for _ in range(3))

    def work(group: Any) -> None:
        measure = TimedOverlap(
            lambda x: group.start_all_reduce(x, out=x, algorithm="ring"),
            lambda: np.matmul(a, b, out=c),
            world.barrier,
            world.size,
        ).measure
        answer(folder, world.rank, measure)

    if contender == DELAYED:
        with delayed(world, alpha=alpha, beta=beta) as slow:
            work(slow)
    else:
        work(world)


def gloo_rank(folder: str, rank: int, size: int) -> None:
    """Run one rank of PyTorch's all_reduce(async_op=True) over gloo."""
    import torch

    dist = join_gloo(folder, rank, size)
    a, b, c = (torch.ones(WIDTH, WIDTH) for _ in range(3))
    work = TimedOverlap(
        lambda x: dist.all_reduce(torch.from_numpy(x), async_op=True),
        lambda: torch.matmul(a, b, out=c),
        dist.barrier,
        size,
    )
    answer(folder, rank, work.measure)


def main() -> None:
    """Run as one rank of a contender."""
    parser = worker_arguments()
    parser.add_argument("--alpha", type=float, required=True)
    parser.add_argument("--beta", type=float, required=True)
    options = parser.parse_args()
    if options.contender == GLOO:
        gloo_rank(options.meet, options.rank, options.size)
    else:
        our_rank(options.meet, options.contender, options.alpha, options.beta)


if __name__ == "__main__":
    main()
