"""`minidist bench step --model gpt2-124m --device cuda --precision bf16`: a training step of one
process on one device.

Our step is compared with PyTorch eager (with flash attention if the precision has it) and with
torch.compile of the same model, as their users write it: autocast, float32 weights, AdamW (fused on
a GPU), clipping. Each contender is a separate process, and contenders take turns round by round; a
turn is several steps, timed from first to last with the device idle before and after.

The rate of matrix products and the bandwidth of a copy are measured first, on the same device.
Utilisation is the model's operations (floor.py: products, and half of the scores for causal
attention) / time / the rate of products. The floor is the time of a step whose parts all run at
these rates. Several ranks, ZeRO stages and plans are measured by `bench step` without --device.
With --graph our step has two rows, the second captured as one CUDA graph (cuda_graph.py).
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minidist.bench.jobs import Job, answer, closed_at_the_end, worker_arguments
from minidist.bench.step import floor as step_floor
from minidist.bench.step.ranks import CLIP, OURS, Model, random_batch, resident_peak
from minidist.device import account
from minidist.device.backend import module_for
from minidist.errors import ConfigError, LaunchError, PeerLostError
from minidist.launch.membership import limit_blas_threads
from minidist.launch.own_python import module_command

MODULE = "minidist.bench.step.device"
EAGER = "PyTorch eager"
COMPILED = "torch.compile"
CEILINGS = "ceilings"
CAPTURED = "minidist, one graph"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
WARM_UP = 3  # steps before the first turn
# measurement of a CPU's ceilings: bytes, side of a matrix, runs
COPIED = 64 << 20
SIDE = 1024
ROUNDS = 10

Progress = Callable[[str], None]
Turn = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class DeviceRow:
    """The result of one contender.

    Attributes: step_seconds    median over turns
                utilisation     share of the measured rate of matrix products
                of_floor        floor / step: 1 if every part is at its ceiling
                peak_bytes      cuda: bytes of the allocator; cpu: resident bytes above import
                memory          for ours: the account's peak by category
    """

    name: str
    step_seconds: float
    tokens_per_second: float
    utilisation: float
    of_floor: float
    peak_bytes: int
    memory: dict[str, int] | None = None


def measure_asked(args: argparse.Namespace, model: Model, progress: Progress) -> dict[str, Any]:
    """Measure one process by the options of `minidist bench step`. Raises: ConfigError for options
    for several ranks."""
    if (
        args.ranks not in (None, [1])
        or args.plan
        or args.zero
        or args.schedule
        or args.microbatches
    ):
        raise ConfigError(
            "--model, --device and --precision time one process on one device; leave -n, "
            "--plan and --zero out"
        )
    if args.graph and (args.device, args.precision) != ("cuda", "bf16"):
        raise ConfigError(
            "--graph captures a step on a GPU in bf16; add --device cuda --precision bf16, "
            "or leave it out"
        )
    found = measure(
        model,
        args.device or "cpu",
        args.precision or "fp32",
        args.rounds,
        args.steps,
        progress,
        graph=args.graph,
    )
    return {"what": "step", "model": vars(model), "zero": None, "plans": [], **found}


def measure(
    model: Model,
    device: str,
    precision: str,
    rounds: int,
    steps: int,
    progress: Progress,
    *,
    graph: bool = False,
) -> dict[str, Any]:
    """Return the result for table and JSON. Raises: DeviceError without that device."""
    module_for(device)
    progress("the ceilings: a large copy, and matrix products")
    ceilings = ceilings_of(device, precision)
    mine = [OURS, CAPTURED] if graph else [OURS]
    names = [*mine, EAGER, COMPILED] if importlib.util.find_spec("torch") else mine
    jobs: list[Job] = []
    left_out = (
        []
        if EAGER in names
        else ['PyTorch was left out: it is not installed; pip install "minidist[bench]"']
    )
    with closed_at_the_end(jobs):
        for name in names:
            progress(f"starting {name}")
            try:
                jobs.append(_start(name, model, device, precision))
            except LaunchError as error:
                if name in mine:
                    raise
                left_out.append(f"{name} was left out: {str(error).splitlines()[-1]}")
        turns, lost = _take_turns(jobs, rounds, steps, progress)
    parts = step_floor.step_parts(model, itemsize(precision))
    rows = [row_of(name, answers, model, parts, ceilings) for name, answers in turns.items()]
    return {
        "device": device,
        "precision": precision,
        "ceilings": ceilings,
        "rounds": rounds,
        "steps": steps,
        "rows": [asdict(row) for row in rows],
        "left_out": left_out + lost,
        "parts": [
            {**asdict(part), "seconds": part.seconds(ceilings["copy"], ceilings["matrix"])}
            for part in parts
        ],
        "parameters": step_floor.parameters(model),
    }


def ceilings_of(device: str, precision: str) -> dict[str, Any]:
    """Return {"copy": bytes per second, "matrix": operations per second, "about": the GPU},
    measured by a separate process."""
    job = _start(CEILINGS, Model(), device, precision)
    with closed_at_the_end([job]):
        found: dict[str, Any] = job.ask()[0]
    return found


def itemsize(precision: str) -> int:
    """Return the bytes of an activation."""
    return 4 if precision == "fp32" else 2


def _start(name: str, model: Model, device: str, precision: str) -> Job:
    return Job(
        name,
        1,
        module_command(
            MODULE, name, *model.arguments(), f"--device={device}", f"--precision={precision}"
        ),
    )


def _take_turns(
    jobs: list[Job], rounds: int, steps: int, progress: Progress
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return {job: answers} and a line for each peer that failed; every round asks each job in
    turn."""
    turns: dict[str, list[dict[str, Any]]] = {job.name: [] for job in jobs}
    lost = []
    for round_number in range(rounds):
        for job in [job for job in jobs if job.name in turns]:
            progress(f"round {round_number + 1} of {rounds}: {job.name}")
            try:
                turns[job.name] += job.ask(steps=steps)
            except PeerLostError as error:
                if job.name in (OURS, CAPTURED):
                    raise
                del turns[job.name]
                lost.append(f"{job.name} was left out: {str(error).splitlines()[-1]}")
    return turns, lost


def row_of(
    name: str,
    turns: list[dict[str, Any]],
    model: Model,
    parts: list[step_floor.FloorPart],
    ceilings: dict[str, float],
) -> DeviceRow:
    """Return the row of a contender: medians and fractions of its answers."""
    seconds = statistics.median(turn["seconds"] for turn in turns)
    least = step_floor.floor(parts, copy=ceilings["copy"], matrix=ceilings["matrix"])
    return DeviceRow(
        name,
        seconds,
        model.batch * model.context / seconds,
        step_floor.operations(parts) / seconds / ceilings["matrix"],
        least / seconds,
        turns[-1]["peak_bytes"],
        turns[-1]["memory"],
    )


# ---------------------------------------------------------------- the contenders' side


def timed(
    start_step: Callable[[], Any],
    finish: Callable[[Any], float],
    memory: Callable[[], dict[str, Any]],
) -> Turn:
    """Return a function that answers {"steps": K}: mean seconds of K steps in a row, the last loss,
    and `memory()`.

    Args:    start_step: queue a step and return its loss. finish: wait until the device is idle and
             return the loss as a number.
    """
    done = 0

    def turn(steps: int) -> dict[str, Any]:
        nonlocal done
        while done < WARM_UP:
            finish(start_step())
            done += 1
        start = time.perf_counter()
        loss = None
        for _ in range(steps):
            loss = start_step()
        last = finish(loss)
        return {"seconds": (time.perf_counter() - start) / steps, "loss": last, **memory()}

    return turn


def ours(model: Model, device: str, precision: str, *, captured: bool = False) -> Turn:
    """Return the turn of minidist on one rank; captured: the step runs as one CUDA graph."""
    import minidist as md
    from minidist.parallel.hybrid.cuda_graph import CapturedStep

    limit_blas_threads(1, local_size=1)
    floor = resident_peak()
    xp = module_for(device)
    trainer = md.Trainer(
        md.Plan(precision=precision),
        model.config(tied=True),
        md.init(threads=1),
        clip=CLIP,
        device=device,
    )
    batch = random_batch(model.vocab, model.batch, model.context)
    graph = CapturedStep(trainer) if captured else None
    start_step = trainer.start_step if graph is None else graph.start_step

    def memory() -> dict[str, Any]:
        peak = resident_peak() - floor if xp is np else xp.get_default_memory_pool().total_bytes()
        peak += 0 if graph is None else graph.pool.total_bytes()
        return {"peak_bytes": int(peak), "memory": account.current().peak}

    def finish(loss: Any) -> float:
        number = float(loss.wait())
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()  # the update runs after the loss
        return number

    return timed(lambda: start_step(batch), finish, memory)


def measured_ceilings(device: str, precision: str) -> dict[str, Any]:
    """Return the result of ceilings_of. On a CPU products are in float32, because low precision is
    computed in float32 there."""
    limit_blas_threads(1, local_size=1)
    if device == "cuda":
        from minidist.bench.kernels.gpu import CudaGpu

        gpu = CudaGpu()
        kind = PRECISIONS[precision]
        found = gpu.ceilings((kind,))
        return {"copy": found["copy"], "matrix": found["matrix"][kind], "about": gpu.about()}
    source = np.ones(COPIED // 4, np.float32)
    target = np.empty(COPIED // 4, np.float32)
    matrix = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
    return {
        "copy": 2 * COPIED / _median(lambda: np.copyto(target, source)),
        "matrix": 2 * SIDE**3 / _median(lambda: matrix @ matrix),
        "about": None,
    }


def _median(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def theirs(model: Model, device: str, precision: str, *, compiled: bool) -> Turn:
    """Return the turn of PyTorch, eager or compiled."""
    import torch

    from minidist.bench.step.peers import torch_device_step

    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(f"PyTorch {torch.__version__} sees no GPU")
    torch.set_num_threads(1)
    floor = resident_peak()
    step = torch_device_step(
        model.config(tied=True), device=device, precision=precision, compiled=compiled, clip=CLIP
    )
    ids, targets = (
        torch.from_numpy(each).to(device)
        for each in random_batch(model.vocab, model.batch, model.context)
    )

    def memory() -> dict[str, Any]:
        peak = torch.cuda.max_memory_reserved() if device == "cuda" else resident_peak() - floor
        return {"peak_bytes": int(peak), "memory": None}

    def finish(loss: Any) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return float(loss)

    return timed(lambda: step(ids, targets), finish, memory)


def main() -> None:
    """Run as one contender."""
    parser = worker_arguments()
    parser.add_argument("--device")
    parser.add_argument("--precision")
    Model.add_options(parser)
    options = parser.parse_args()
    answer(options.meet, 0, turn_of(options, Model.of(options)))


def turn_of(options: argparse.Namespace, model: Model) -> Turn:
    """Return the function that answers for the contender."""
    if options.contender == CEILINGS:
        return lambda: measured_ceilings(options.device, options.precision)
    if options.contender in (OURS, CAPTURED):
        return ours(
            model, options.device, options.precision, captured=options.contender == CAPTURED
        )
    return theirs(model, options.device, options.precision, compiled=options.contender == COMPILED)


if __name__ == "__main__":
    main()
