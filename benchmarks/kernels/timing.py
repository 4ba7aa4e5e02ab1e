"""`minidist bench kernels`: each rung of each kernel compared with PyTorch, and as a fraction of
the GPU's measured rates.

    minidist bench kernels                          every kernel, at the sizes of a step of GPT-2
                                                    124M
    minidist bench kernels softmax matmul           kernels of kernels/softmax.py and matmul.py
    minidist bench kernels --count                  on a laptop: the bytes that each rung moves,
                                                    counted on the CPU build

Kernels that move bytes are compared with the bandwidth of a large copy, products and attention with
cuBLAS's rate; both rates are measured in the same run. Inputs are drawn again in each run. A rung
is checked against its NumPy reference before it is timed, over memory with all bits set; a wrong
rung gets no time. Contenders take turns in every round, each with empty caches, timed by CUDA
events; the median counts.

A fraction is (least bytes of the kernel, or operations by its header) / time / ceiling. Aims for
each kernel's last rung: 85 % of the copy bandwidth, and at least the speed of PyTorch eager; for
attention half the speed of PyTorch's flash attention.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from minidist.bench.kernels import flat_cases, product_cases, row_cases
from minidist.bench.kernels.case import (
    COPY,
    COPY_SHARE,
    EAGER,
    FLASH,
    KIND,
    Draw,
    Inputs,
    KernelCase,
    error,
    every,
    place,
    sample,
)
from minidist.bench.kernels.gpu import CudaGpu
from minidist.bench.kernels.peers import find, peers_of
from minidist.bench.step.ranks import MODELS, Model
from minidist.console import meant
from minidist.device.backend import dtype_name
from minidist.errors import ConfigError, KernelError

CASES = [*row_cases.CASES, *flat_cases.CASES, *product_cases.CASES]
STEP = MODELS["gpt2-124m"]

Progress = Callable[[str], None]
Work = Callable[[], Any]


@dataclass(frozen=True)
class KernelRow:
    """The result of one contender of one kernel.

    Attributes: contender    "v1", …, EAGER or COMPILED
                seconds      median; None if the result is wrong
                rate         bytes or operations per second
                fraction     of the ceiling: copy bandwidth, or the rate of matrix products
                beside_eager PyTorch eager's seconds / these seconds, if both have the same dtype
                error        largest difference from the reference, in roundings; None for a peer
                verdict      for the last rung: "met", or what is missing
    """

    kernel: str
    family: str
    contender: str
    dtype: str
    held: str
    bytes: int
    operations: float
    seconds: float | None = None
    rate: float | None = None
    fraction: float | None = None
    beside_eager: float | None = None
    error: float | None = None
    verdict: str = ""


def chosen(names: Sequence[str]) -> list[KernelCase]:
    """Return the cases of these kernels or modules of kernels/; all cases if none is named. Raises:
    ConfigError."""
    families = list(dict.fromkeys(case.family for case in CASES))
    known = [*families, *(case.name for case in CASES)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no kernel {name!r}{meant(name, known)}; choose from "
                f"{', '.join(families)}, or a kernel of one"
            )
    return [case for case in CASES if not names or case.name in names or case.family in names]


def measured(
    names: Sequence[str],
    peers_named: Sequence[str],
    rounds: int,
    seed: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Return the result for table and JSON. Raises: ConfigError for an unknown name; DeviceError
    without a GPU."""
    cases = chosen(names)
    seed = time.time_ns() % 2**32 if seed is None else seed
    gpu = CudaGpu()
    progress("the ceilings: a large copy, and cuBLAS")
    ceilings = gpu.ceilings()
    torch, why = find() if peers_named else (None, "")
    peers: Peers = (
        (lambda case, inputs: ({}, [])) if torch is None else partial(peers_of, torch, peers_named)
    )
    rows, left_out = measure_all(
        cases, STEP, gpu, ceilings, peers, rounds=rounds, seed=seed, progress=progress
    )
    return {
        "what": "kernels",
        "gpu": gpu.about(),
        "model": vars(STEP),
        "ceilings": ceilings,
        "rounds": rounds,
        "seed": seed,
        "rows": [asdict(row) for row in rows],
        "left_out": [*([why] if why else []), *left_out],
        "counts": None,
    }


# ------------------------------------------------------------------------------------------- timing

Peers = Callable[[KernelCase, Inputs], tuple[dict[str, Work], list[str]]]
"""peers(case, inputs on the device) -> {contender: work}, and a line for each that was left out."""


def measure_all(
    cases: list[KernelCase],
    model: Model,
    gpu: CudaGpu,
    ceilings: dict[str, Any],
    peers: Peers,
    *,
    rounds: int,
    seed: int,
    progress: Progress,
) -> tuple[list[KernelRow], list[str]]:
    """Measure every contender of every case.

    Args:    ceilings: {"copy": bytes per second, "matrix": {dtype: operations per second}}.
    """
    rows: list[KernelRow] = []
    left_out: list[str] = []
    for case in cases:
        more, without = _measure(case, model, gpu, ceilings, peers, rounds, seed, progress)
        rows = rows + more
        left_out = left_out + without
        gpu.free()
    return rows, left_out


def _measure(
    case: KernelCase,
    model: Model,
    gpu: CudaGpu,
    ceilings: dict[str, Any],
    peers: Peers,
    rounds: int,
    seed: int,
    progress: Progress,
) -> tuple[list[KernelRow], list[str]]:
    """Measure one case: for each dtype that its rungs need, draw, check, then time in turn."""
    rows: list[KernelRow] = []
    left_out = [f"{case.name} v{version}: {why}" for version, why in case.left_out.items()]
    versions = [version for version in case.versions if version not in case.left_out]
    for kind in dict.fromkeys(case.kind(version, KIND) for version in versions):
        progress(f"{case.name}: drawing {kind}")
        inputs = case.draw(model, Draw(seed, kind))
        of_kind = [version for version in versions if case.kind(version, KIND) == kind]
        checked, without = _checked(case, inputs, of_kind, gpu, seed, progress)
        left_out += without
        if not checked:
            continue
        works = {
            row.contender: work
            for row, work in checked
            if row.error is not None and row.error <= case.slack
        }
        rows += [row for row, _ in checked]
        template = rows[-1]
        if kind == case.kind(versions[-1], KIND):
            theirs, without = peers(case, place(inputs, gpu.device))
            works = {**works, **theirs}
            left_out = left_out + without
            rows += [replace(template, contender=name, error=None) for name in theirs]
        times = _take_turns(works, gpu, rounds, lambda name: progress(f"{case.name}: {name}"))
        rows = [
            timed(row, times.get(row.contender), ceilings) if row.dtype == template.dtype else row
            for row in rows
        ]
    return judged(rows, case), left_out


def _checked(
    case: KernelCase,
    inputs: Inputs,
    versions: list[int],
    gpu: CudaGpu,
    seed: int,
    progress: Progress,
) -> tuple[list[tuple[KernelRow, Work]], list[str]]:
    """Run each rung once. Returns: rows with errors, without times; and a line for each rung that
    does not run."""
    picked = sample(case, inputs, np.random.default_rng(seed))
    want = case.want(inputs, picked)
    dtype = dtype_name(next(every(inputs.values())).dtype)
    operations = case.operations(inputs)
    checked: list[tuple[KernelRow, Work]] = []
    left_out = []
    for version in versions:
        progress(f"{case.name}: checking v{version}")
        try:
            with gpu.poisoned():
                work = case.build(place(inputs, gpu.device), version)
                outputs = work()
                off = error(case, inputs, picked, want, outputs)
        except (KernelError, MemoryError) as failure:
            left_out.append(f"{case.name} v{version}: {str(failure).splitlines()[0]}")
            continue
        checked.append(
            (
                KernelRow(
                    case.name,
                    case.family,
                    f"v{version}",
                    dtype,
                    case.held,
                    case.moved(inputs, outputs),
                    operations,
                    error=off,
                ),
                work,
            )
        )
    return checked, left_out


def _take_turns(
    works: dict[str, Work], gpu: CudaGpu, rounds: int, progress: Progress
) -> dict[str, float]:
    """Return {contender: median seconds}; every round runs each contender once."""
    timers = {}
    for name, work in works.items():
        progress(name)
        timers[name] = gpu.timer(work)
    turns = [{name: timer() for name, timer in timers.items()} for _ in range(rounds)]
    return {name: statistics.median(turn[name] for turn in turns) for name in timers}


def timed(row: KernelRow, seconds: float | None, ceilings: dict[str, Any]) -> KernelRow:
    """Return the row with time, rate and fraction of the ceiling; unchanged if `seconds` is
    None."""
    if seconds is None:
        return row
    work, ceiling = (
        (row.bytes, ceilings["copy"])
        if row.held == COPY
        else (row.operations, ceilings["matrix"][row.dtype])
    )
    return replace(row, seconds=seconds, rate=work / seconds, fraction=work / seconds / ceiling)


def judged(rows: list[KernelRow], case: KernelCase) -> list[KernelRow]:
    """Return the rows, each compared with PyTorch eager, and the last rung with its aim."""
    eager = next((row for row in rows if row.contender == EAGER and row.seconds), None)
    last = f"v{case.versions[-1]}"
    done = []
    for row in rows:
        fields = asdict(row)
        if eager and eager.seconds and row.seconds and row.dtype == eager.dtype:
            fields["beside_eager"] = eager.seconds / row.seconds
        if row.contender == last:
            fields["verdict"] = verdict(case, row, fields["beside_eager"])
        done.append(KernelRow(**fields))
    return done


def verdict(case: KernelCase, row: KernelRow, beside_eager: float | None) -> str:
    """Return "met", what is missing, or "" for a kernel without an aim (the product, attention's
    gradient)."""
    if row.error is not None and row.error > case.slack:
        return f"wrong: off by {row.error:.1f} roundings"
    if row.fraction is None or case.held != COPY and not case.flash:
        return ""
    if case.flash:
        return (
            "flash attention not measured"
            if beside_eager is None
            else "met"
            if beside_eager >= FLASH
            else f"{beside_eager:.0%} of flash attention, not {FLASH:.0%}"
        )
    missing = []
    if row.fraction < COPY_SHARE:
        missing.append(f"{row.fraction:.0%} of a copy, not {COPY_SHARE:.0%}")
    if beside_eager is not None and beside_eager < 1.0:
        missing.append(f"behind eager: {beside_eager:.2f}×")
    return "; ".join(missing) or ("met" if beside_eager is not None else "met, eager not measured")
