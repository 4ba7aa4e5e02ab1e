"""random-k: every rank sends the numbers at the same random positions, so no position travels.

The positions come from a counter-based generator, the same on all ranks and new in every step: one
in each of k strata of neighbours. So the values are summed by an ordinary all-reduce, and the bytes
of a rank do not grow with P.

    density=0.01   the part that travels; at least one number a chunk
    feedback=yes   what was not sent is kept as the worker error: n numbers a rank
    feedback=no    nothing is kept, and each number is multiplied by the size of its stratum, so
                   that the sum is right on average (unbiased), but n/k times as noisy
    seed=0         of the positions

Cost, ranks together, k = max(density × n, min(P, n)) numbers of s bytes:

    all-reduce      2(P-1) × s k        reduce-scatter  (P-1) × s k

Source:  Stich, Cordonnier & Jaggi 2018, "Sparsified SGD with Memory".
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.device.backend import Array, array_module, beside, narrow, widen
from minidist.errors import ConfigError
from minidist.parallel.compress import selection
from minidist.parallel.compress.pending_sum import WORKER, Alone, Then, widened, zeros_for
from minidist.parallel.step.scheme import GradientRun, Scheme


class RandomK(Scheme):
    """The numbers at some random positions. Args: as above."""

    name = "random-k"

    def __init__(self, density: float, *, feedback: bool = True, seed: int = 0) -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise ConfigError(
                f"compress random-k: density={density:g}; choose it above 0 and up to 1"
            )
        self.density = density
        self.feedback = feedback
        self.seed = seed

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        for index, run in enumerate(runs):
            if self.feedback and run.group.size > 1:
                self.errors[WORKER, index] = zeros_for(run, run.size)

    def count(self, size: int, ranks: int) -> int:
        """Return how many numbers of a bucket travel."""
        return min(size, max(round(self.density * size), ranks))

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        group = self.runs[index].group
        if group.size == 1:
            return Alone(bucket, None)
        positions, values = self.take(index, bucket)
        call = group.start_all_reduce(values, out=values, algorithm="ring")
        return Then(call, partial(_spread, bucket, positions))

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        group = self.runs[index].group
        if group.size == 1:
            return Alone(bucket, out)
        positions, values = self.take(index, bucket)
        start, stop = bounds(len(values), group.size)[group.rank : group.rank + 2]
        mine = positions[start:stop] - bounds(len(bucket), group.size)[group.rank]
        call = group.start_reduce_scatter(values, out=values[start:stop], algorithm="ring")
        return Then(call, partial(_spread, out, mine))

    def take(self, index: int, bucket: Array) -> tuple[Array, Array]:
        """Return the (positions, values) that travel; keep the rest as the worker error."""
        run = self.runs[index]
        residual = self.errors.get((WORKER, index))
        stream = f"{run.spans[0][0].name}/random-k/{self.counters['steps']}"
        host, lengths = selection.drawn(
            len(bucket), self.count(len(bucket), run.group.size), run.group.size, stream, self.seed
        )
        positions = beside(host, bucket)
        candidates = widen(bucket)
        with np.errstate(over="ignore", invalid="ignore"):
            if residual is None:
                values = candidates[positions] * beside(lengths.astype(candidates.dtype), bucket)
            else:
                residual += candidates
                candidates = residual
                values = residual[positions]
                residual[positions] = 0
            overflowed = not math.isfinite(float(candidates.sum()))
        if overflowed:  # perhaps at no drawn position: all ranks must see it, and skip the step
            values[:] = np.nan
            if residual is not None:
                residual[~array_module(residual).isfinite(residual)] = 0
        return positions, values

    def sent_bytes(self, run: GradientRun) -> int | None:
        phases = 2 if run.verb == "all_reduce" else 1
        ranks = run.group.size
        return phases * (ranks - 1) * self.count(run.size, ranks) * widened(run.dtype).itemsize


def _spread(out: Array, positions: Array, values: Array) -> Array:
    """Write `values` at their positions, and zeros elsewhere."""
    out[...] = 0
    out[positions] = narrow(values, out.dtype)
    return out


def make(name: str, *, density: float = 0.01, feedback: bool = True, seed: int = 0) -> RandomK:
    """Return the scheme."""
    return RandomK(density, feedback=feedback, seed=seed)
