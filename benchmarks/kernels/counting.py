"""`minidist bench kernels --count`: the bytes that each rung of each kernel moves, counted on the
CPU build without a GPU.

Sizes are small; the last dims, which decide the access pattern of a warp, are those of a model.
Each result is compared with the NumPy reference, and the CPU build checks every access.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minidist.bench.kernels.case import KIND, Draw, KernelCase, error, every, place, sample
from minidist.bench.kernels.timing import chosen
from minidist.bench.step.ranks import Model
from minidist.device.backend import dtype_name
from minidist.errors import ConfigError, KernelError
from minidist.kernels import on_cpu

COUNTED = Model(layers=1, width=128, heads=2, context=64, batch=1, vocab=256)
SECTOR = 32  # bytes that a GPU's memory gives at a time

Progress = Callable[[str], None]


def counted(names: Sequence[str], seed: int | None, progress: Progress) -> dict[str, Any]:
    """Return the result for table and JSON. Raises: as count_all; ConfigError for an unknown
    name."""
    seed = time.time_ns() % 2**32 if seed is None else seed
    rows = count_all(chosen(names), seed=seed, progress=progress)
    return {
        "what": "kernels",
        "model": vars(COUNTED),
        "seed": seed,
        "counts": [asdict(row) for row in rows],
    }


@dataclass(frozen=True)
class KernelCount:
    """The traffic of one rung in all its launches, counted on the CPU build.

    Attributes: least      bytes of inputs and outputs, each once, by formula
                asked      bytes that threads loaded and stored in global memory
                sectors    number of 32-byte sectors touched by the requests of warps, without
                           caches; fetched: their bytes
                needed     least / fetched; above 1 for small arrays, or for data in sectors that
                           were fetched already
                shared     bytes that threads loaded and stored in shared memory
                error      as KernelRow's
    """

    kernel: str
    family: str
    rung: str
    dtype: str
    launches: int
    least: int
    asked: int
    requests: int
    sectors: int
    fetched: int
    needed: float
    shared: int
    barriers: int
    error: float


def count_all(cases: list[KernelCase], *, seed: int, progress: Progress) -> list[KernelCount]:
    """Count every rung of the cases, at the sizes of COUNTED.

    Raises: ConfigError without g++; KernelError if a kernel breaks a rule.
    """
    if on_cpu.compiler() is None:
        raise ConfigError(
            "--count runs kernels on the CPU, built by g++, which is not on this machine; "
            "apt install g++"
        )
    return [_count(case, version, seed, progress) for case in cases for version in case.versions]


def _count(case: KernelCase, version: int, seed: int, progress: Progress) -> KernelCount:
    progress(f"{case.name} v{version}")
    inputs = case.draw(COUNTED, Draw(seed, case.kind(version, KIND)))
    picked = sample(case, inputs, np.random.default_rng(seed))
    work = case.build(place(inputs, "cpu"), version)
    with on_cpu.watch(count=True, seed=seed) as seen:
        outputs = work()
    off = error(case, inputs, picked, case.want(inputs, picked), outputs)
    if off > case.slack:
        raise KernelError(
            f"{case.name} v{version} is wrong: off by {off:.1f} roundings of the largest number"
        )
    traffic = [part for launch in seen for part in (launch.loads, launch.stores)]
    sectors = sum(part.sectors for part in traffic)
    least = case.moved(inputs, outputs)
    return KernelCount(
        case.name,
        case.family,
        f"v{version}",
        dtype_name(next(every(inputs.values())).dtype),
        len(seen),
        least,
        sum(part.bytes for part in traffic),
        sum(part.requests for part in traffic),
        sectors,
        SECTOR * sectors,
        least / (SECTOR * sectors),
        sum(part.shared for part in traffic),
        sum(launch.barriers for launch in seen),
        off,
    )
