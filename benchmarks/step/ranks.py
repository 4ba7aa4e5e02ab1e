"""`minidist bench step`: our training step compared with PyTorch eager's, in one run, with one BLAS
thread per rank.

Our P ranks are also compared with P of our processes that train without communication: the limit of
the machine when P cores compute at once (two threads of one core give little more than one). The
difference is the cost of communication.

With `--zero 0,1,2,3` each of our stages is compared with PyTorch's counterpart over gloo (PEERS).

Jobs take turns round by round. Memory is the peak resident size minus the size after the imports
and one warm-up step of a tiny model, which loads modules at their first use.
"""

import argparse
import importlib.util
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    join_gloo,
    start_workers,
    worker_arguments,
)
from minidist.errors import LaunchError
from minidist.launch.membership import limit_blas_threads
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import ZERO_STAGES

OURS = "minidist"
SEPARATE = "separate"
PEER = "PyTorch"
MODULE = "minidist.bench.step.ranks"
CLIP = 1.0
PEERS = {
    0: ("DDP",),
    1: ("ZeroRedundancyOptimizer",),
    2: ("FSDP1 SHARD_GRAD_OP", "FSDP2 keep"),
    3: ("FSDP1 FULL_SHARD", "FSDP2 reshard"),
}
"""PyTorch's counterparts of each ZeRO stage (peers.py); FSDP that keeps weights after forward
divides the same state as stage 2."""

STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


@dataclass(frozen=True)
class Model:
    """The model of a bench: a GPT, and the number of sequences per rank."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 8
    vocab: int = 256

    def config(self, *, tied: bool = False) -> GPTConfig:
        """Return the model's GPTConfig; tied: the output layer is the embedding's table, as in
        GPT-2."""
        return GPTConfig(
            vocabulary=self.vocab,
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            tied=tied,
        )

    def arguments(self) -> list[str]:
        """Return the model as arguments of the worker."""
        return [f"--{name}={value}" for name, value in vars(self).items()]

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add these arguments to a worker's parser."""
        for name in vars(Model()):
            parser.add_argument(f"--{name}", type=int)

    @staticmethod
    def of(options: argparse.Namespace) -> "Model":
        """Return the model that the options describe."""
        return Model(**{name: getattr(options, name) for name in vars(Model())})


MODELS = {"gpt2-124m": Model(layers=12, width=768, heads=12, context=1024, batch=16, vocab=50304)}
"""Models by name. GPT-2's 50,257 tokens are rounded up to a multiple of 128, as is usual."""


def stages(text: str) -> list[int]:
    """Return ZeRO stages: '0,2' -> [0, 2]."""
    if not all(part in map(str, ZERO_STAGES) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are not ZeRO stages; choose of 0,1,2,3")
    return [int(part) for part in text.split(",")]


@dataclass(frozen=True)
class StepRow:
    """The result of one contender: median seconds per step, by the clock and of the processor
    (which other work does not change as much), tokens/s over all ranks, peak bytes above import of
    its largest rank."""

    name: str
    ranks: int
    step_seconds: float
    processor_seconds: float
    tokens_per_second: float
    peak_bytes: int
    zero: int = 0


def start_job(contender: str, ranks: int, model: Model, transport: str, zero: int = 0) -> Job:
    """Start the ranks of one contender."""
    options = [
        *model.arguments(),
        f"--zero={zero}",
        *([f"--transport={transport}"] if contender == OURS else []),
    ]
    return start_workers(
        MODULE, contender, ranks, options, by="launch" if contender == OURS else "rank"
    )


def measure_all(
    model: Model,
    ranks: list[int],
    rounds: int,
    steps: int,
    transport: str,
    progress: Callable[[str], None],
) -> list[StepRow]:
    """Return the rows of minidist, separate processes and PyTorch, if installed, at each number of
    ranks; jobs take turns in every round."""
    names = [OURS, SEPARATE, PEER] if importlib.util.find_spec("torch") else [OURS, SEPARATE]
    jobs = [
        start_job(name, count, model, transport)
        for count in ranks
        for name in names
        if count > 1 or name != SEPARATE
    ]
    return measure_jobs(jobs, model, rounds, steps, progress)


def measure_stages(
    model: Model,
    ranks: list[int],
    stages: list[int],
    rounds: int,
    steps: int,
    transport: str,
    progress: Callable[[str], None],
) -> tuple[list[StepRow], list[str]]:
    """Measure each of our stages and its peers in PyTorch at each number of ranks.

    The contenders of one stage and number of ranks take turns within every round.
    Returns: rows, and a line with the reason for each peer that was left out.
    """
    rows: list[StepRow] = []
    left_out: list[str] = []
    for count in ranks:
        for zero in stages:
            jobs = [start_job(OURS, count, model, transport, zero)]
            for peer in PEERS[zero] if importlib.util.find_spec("torch") else ():
                progress(f"starting {peer} on {count} ranks")
                try:
                    jobs.append(start_job(peer, count, model, transport))
                except LaunchError as error:
                    left_out.append(
                        f"PyTorch {peer} on {count} ranks: {str(error).splitlines()[-1]}"
                    )
            rows += [
                replace(row, zero=zero)
                for row in measure_jobs(jobs, model, rounds, steps, progress)
            ]
    return rows, left_out


class Answers(NamedTuple):
    """A job's answers over all rounds: seconds of each step on the slowest rank, seconds of the
    processor on the rank that used most, peak bytes of the largest rank."""

    seconds: list[float]
    processor_seconds: list[float]
    peak_bytes: int


def measure_jobs(
    jobs: list[Job], model: Model, rounds: int, steps: int, progress: Callable[[str], None]
) -> list[StepRow]:
    """Return a row for each job; every round asks each job in turn. Ends the jobs."""
    rows = []
    for job, answers in zip(jobs, take_turns(jobs, rounds, steps, progress), strict=True):
        median = statistics.median(answers.seconds)
        rows.append(
            StepRow(
                job.name,
                job.size,
                median,
                statistics.median(answers.processor_seconds),
                model.batch * model.context * job.size / median,
                answers.peak_bytes,
            )
        )
    return rows


def take_turns(
    jobs: list[Job], rounds: int, steps: int, progress: Callable[[str], None]
) -> list[Answers]:
    """Return each job's answers; every round asks each job in turn. Ends the jobs."""
    taken = [Answers([], [], 0) for _ in jobs]
    with closed_at_the_end(jobs):
        for round_number in range(rounds):
            for index, job in enumerate(jobs):
                progress(f"round {round_number + 1} of {rounds}: {job.name}, {job.size} ranks")
                answers = job.ask(steps=steps)
                taken[index] = Answers(
                    taken[index].seconds + _most(answers, "seconds"),
                    taken[index].processor_seconds + _most(answers, "processor_seconds"),
                    max(a["peak_bytes"] for a in answers),
                )
    return taken


def _most(answers: list[dict[str, Any]], name: str) -> list[float]:
    """Return the largest of all ranks' numbers of each step."""
    return [max(row) for row in zip(*(answer[name] for answer in answers), strict=True)]


# ---------------------------------------------------------------- the ranks' side


def resident_peak() -> int:
    """Return the peak resident bytes of this process since it started: VmHWM on Linux, else
    getrusage's value, which is in bytes on macOS.

    On Linux getrusage's value would be the peak of the parent process, if that was larger.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def our_rank(
    model: Model, transport: str, zero: int
) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Return (rank, measure) of one rank of minidist: a ZeRO stage over the ranks that the launcher
    started, or a world of one rank."""
    import minidist as md

    limit_blas_threads(1, local_size=1)
    world = md.init(transport=transport, threads=1)

    def trainer(config: GPTConfig) -> Any:
        return md.Trainer(md.Plan(dp=world.size, zero=zero), config, world, clip=CLIP)

    tiny = GPTConfig(vocabulary=16, context=8, layers=1, width=8, heads=2)
    trainer(tiny).step(random_batch(16, world.size, 8))
    floor = resident_peak()
    full = trainer(model.config())
    batch = random_batch(model.vocab, model.batch * world.size, model.context)
    return world.rank, timed(lambda: full.step(batch), floor)


def torch_rank(
    model: Model, folder: str, rank: int, size: int, peer: str
) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Return (rank, measure) of one rank of PyTorch eager; several ranks communicate over gloo."""
    import torch

    from minidist.bench.step.peers import torch_step

    if size > 1:
        join_gloo(folder, rank, size)
    torch.set_num_threads(1)
    tiny = GPTConfig(vocabulary=16, context=8, layers=1, width=8, heads=2)
    torch_step(tiny, ranks=size, clip=CLIP, peer=peer)(
        *map(torch.from_numpy, random_batch(16, 1, 8))
    )
    floor = resident_peak()
    step = torch_step(model.config(), ranks=size, clip=CLIP, peer=peer)
    ids, targets = map(torch.from_numpy, random_batch(model.vocab, model.batch, model.context))
    return rank, timed(lambda: step(ids, targets), floor)


def random_batch(vocabulary: int, sequences: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and targets, each (sequences, context) int64."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, vocabulary, (sequences, context + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def timed(step: Callable[[], Any], floor: int = 0) -> Callable[[int], dict[str, Any]]:
    """Return a function that runs `steps` steps (the first time after two warm-up steps) and
    returns seconds, seconds of the processor, peak bytes, losses.

    The losses are those of all steps so far, as `step` returned them.
    """
    losses: list[Any] = []

    def measure(steps: int) -> dict[str, Any]:
        while len(losses) < 2:
            losses.append(step())
        seconds = []
        processor_seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            used = time.process_time()
            losses.append(step())
            processor_seconds.append(time.process_time() - used)
            seconds.append(time.perf_counter() - start)
        return {
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "peak_bytes": resident_peak() - floor,
            "losses": losses,
        }

    return measure


def main() -> None:
    """Run as one rank of a contender."""
    parser = worker_arguments()
    parser.add_argument("--transport")
    parser.add_argument("--zero", type=int)
    Model.add_options(parser)
    options = parser.parse_args()
    model = Model.of(options)
    if options.contender in (OURS, SEPARATE):
        rank, measure = our_rank(model, options.transport, options.zero)
    else:
        peer = "DDP" if options.contender == PEER else options.contender
        rank, measure = torch_rank(model, options.meet, options.rank, options.size, peer)
    answer(options.meet, max(rank, options.rank), measure)


if __name__ == "__main__":
    main()
