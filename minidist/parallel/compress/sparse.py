"""top-k and threshold: only large numbers travel, as pairs of position and value; the others wait.

Of a gradient few numbers carry most of the length. Each rank chooses its own, from the sum of this
gradient and of what it has not sent before; so a small number that always points the same way
travels some steps later. The sum over the ranks is exact for what was chosen.

    top-k       density=0.01      the largest n × density numbers of a bucket, at least one
    threshold   value=1e-3        all with |number| >= value (times the loss scale), at most half of
                                  the bucket
    both        feedback=yes      what was not sent is kept as the worker error: n numbers a rank
                momentum=0        momentum correction: u = momentum u + g, and u is added up instead
                                  of g: n numbers more. The optimizer must then be SGD without
                                  momentum
                masking=yes       where a number was sent its momentum begins again at 0, or it
                                  would push the weight on in a direction that is old by now
                warmup=0          over so many steps the density falls from 1/4 to its value, in
                                  equal ratios (top-k)

Momentum correction, masking and warm-up are those of Deep Gradient Compression.

Cost, ranks together, k pairs a rank, s bytes a number (4, float64 8); a payload begins with its
count, 4 bytes:

    all-reduce      an all-gather of the pairs     (P-1) × sum over ranks of (4 + (4+s) k)
    reduce-scatter  each pair goes to the owner    sum over ranks r of 4(P-1) + (4+s) × (pairs of r
                                                   outside its chunk)

The bytes of an all-reduce grow with P², so top-k pays while k is below about n/P of the bucket's n
numbers.

notes:   N2 §11.2
Source:  Aji & Heafield 2017; Strom 2015 (threshold); Lin et al. 2018, "Deep Gradient Compression".
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.device.backend import Array, array_module, beside, narrow, to_host, widen
from minidist.errors import CommError, ConfigError
from minidist.parallel.compress import selection
from minidist.parallel.compress.pending_sum import WORKER, Alone, Then, widened, zeros_for
from minidist.parallel.step.scheme import GradientRun, Scheme

FIRST_DENSITY = 0.25  # where a warm-up begins


def pack(positions: Array, values: Array) -> Array:
    """Return the payload of pairs: how many (uint32), the values, the positions (uint32)."""
    xp = array_module(values)
    count = beside(np.array([len(values)], np.uint32), values)
    return xp.concatenate(
        [
            count.view(np.uint8),
            xp.ascontiguousarray(values).view(np.uint8),
            positions.astype(np.uint32).view(np.uint8),
        ]
    )


def unpack(stream: Array, at: int, kind: np.dtype, size: int) -> tuple[Array, Array, int]:
    """Return (positions, values, where the next payload begins) of the payload at byte `at`;
    positions are below `size`.

    Raises:  CommError for a payload that no rank packed.
    """
    count = int(to_host(stream[at : at + 4]).view(np.uint32)[0])
    middle = at + 4 + count * kind.itemsize
    stop = middle + count * 4
    if count > size or stop > len(stream):
        raise CommError(
            f"a payload of {count} pairs for {size} numbers, {len(stream) - at} bytes; the ranks "
            "disagree"
        )
    # copied: aligned
    return stream[middle:stop].view(np.uint32), stream[at + 4 : middle].copy().view(kind), stop


def payload_bytes(count: int, kind: np.dtype) -> int:
    """Return the bytes of `count` pairs."""
    return 4 + count * (4 + kind.itemsize)


class Sparse(Scheme, ABC):
    """Sums pairs; a subclass chooses them.

    Args:    feedback, momentum, masking: as above.
    """

    def __init__(self, *, feedback: bool, momentum: float = 0.0, masking: bool = True) -> None:
        super().__init__()
        if not 0 <= momentum < 1 or (momentum and not feedback):
            raise ConfigError(
                f"compress: momentum={momentum:g}; choose it from 0 to below 1, and with "
                "feedback=yes"
            )
        self.feedback = feedback
        self.momentum = momentum
        self.masking = masking

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        for index, run in enumerate(runs):
            if run.group.size == 1:
                continue
            if self.feedback:
                self.errors[WORKER, index] = zeros_for(run, run.size)
            if self.momentum:
                self.private[f"momentum.{index}"] = zeros_for(run, run.size)

    @abstractmethod
    def choose(self, index: int, values: Array) -> Array:
        """Return the rising positions of the values that travel."""

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        group = self.runs[index].group
        if group.size == 1:
            return Alone(bucket, None)
        call = group.start_all_gather(pack(*self.take(index, bucket)), algorithm="ring")
        return Then(call, partial(self._sum, bucket, widened(bucket.dtype), group.size))

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        group = self.runs[index].group
        if group.size == 1:
            return Alone(bucket, out)
        positions, values = self.take(index, bucket)
        edges = bounds(len(bucket), group.size)
        cuts = to_host(
            array_module(values).searchsorted(positions, beside(np.array(edges), values))
        )
        payloads = [
            pack(positions[start:stop] - first, values[start:stop])
            for (start, stop), first in zip(pairwise(cuts), edges, strict=False)
        ]
        call = group.start_all_to_all(payloads, algorithm="pairwise")
        return Then(
            call,
            lambda parts: self._sum(
                out, widened(bucket.dtype), group.size, array_module(values).concatenate(parts)
            ),
        )

    def take(self, index: int, bucket: Array) -> tuple[Array, Array]:
        """Return the (positions, values) that travel; keep the rest as the worker error."""
        gradient = widen(bucket)
        residual = self.errors.get((WORKER, index))
        with np.errstate(over="ignore", invalid="ignore"):
            gradient = self._with_momentum(index, gradient)
            if residual is None:
                candidates = gradient
            else:
                residual += gradient
                candidates = residual
        positions = self.choose(index, candidates)
        values = candidates[positions]
        if residual is not None:
            residual[positions] = 0
        velocity = self.private.get(f"momentum.{index}")
        if velocity is not None and self.masking:
            velocity[positions] = 0
        if not bool(array_module(values).isfinite(values).all()):
            self._forget_overflow(index)
        return positions, values

    def _with_momentum(self, index: int, gradient: Array) -> Array:
        """Return the velocity after this gradient; without momentum correction, the gradient."""
        velocity = self.private.get(f"momentum.{index}")
        if velocity is None:
            return gradient
        velocity *= self.momentum
        velocity += gradient
        return velocity

    def _forget_overflow(self, index: int) -> None:
        """Set to 0 what is not finite: the step of an overflow is skipped."""
        for kept in (self.errors.get((WORKER, index)), self.private.get(f"momentum.{index}")):
            if kept is not None:
                kept[~array_module(kept).isfinite(kept)] = 0

    def _sum(self, out: Array, kind: np.dtype, ranks: int, stream: Array) -> Array:
        """Add the payloads of all ranks, in rank order, into `out`."""
        total = array_module(out).zeros(len(out), kind)
        at = 0
        for _ in range(ranks):
            positions, values, at = unpack(stream, at, kind, len(out))
            with np.errstate(over="ignore", invalid="ignore"):
                total[positions] += values  # no position twice
        narrow(total, out.dtype, out)
        return out


class TopK(Sparse):
    """The largest numbers of each bucket. Args: density: the part that travels; warmup: steps;
    others as Sparse."""

    name = "top-k"

    def __init__(
        self,
        density: float,
        *,
        warmup: int = 0,
        feedback: bool = True,
        momentum: float = 0.0,
        masking: bool = True,
    ) -> None:
        super().__init__(feedback=feedback, momentum=momentum, masking=masking)
        if not 0 < density <= 1 or warmup < 0:
            raise ConfigError(
                f"compress top-k: density={density:g}, warmup={warmup}; choose a density above 0 "
                "and up to 1, and a warmup from 0"
            )
        self.density = density
        self.warmup = warmup

    def present_density(self) -> float:
        """Return the density of this step."""
        done = min(1.0, (max(self.counters["steps"], 1) - 1) / self.warmup) if self.warmup else 1.0
        return float(max(self.density, FIRST_DENSITY) ** (1 - done) * self.density**done)

    def choose(self, index: int, values: Array) -> Array:
        return selection.largest(values, count_of(self.present_density(), len(values)))

    def sent_bytes(self, run: GradientRun) -> int | None:
        if run.verb != "all_reduce" or self.warmup:
            return -1 if run.group.size > 1 else 0
        ranks = run.group.size
        return (
            ranks
            * (ranks - 1)
            * payload_bytes(count_of(self.density, run.size), widened(run.dtype))
        )


class Threshold(Sparse):
    """All numbers of at least `value`. Args: others as Sparse."""

    name = "threshold"

    def __init__(
        self, value: float, *, feedback: bool = True, momentum: float = 0.0, masking: bool = True
    ) -> None:
        super().__init__(feedback=feedback, momentum=momentum, masking=masking)
        if not value >= 0:
            raise ConfigError(
                f"compress threshold: value={value:g}; sizes are compared with it, so choose 0 "
                "or more"
            )
        self.value = value

    def choose(self, index: int, values: Array) -> Array:
        return selection.at_least(values, self.value * self.counters["scale"], -(-len(values) // 2))

    def sent_bytes(self, run: GradientRun) -> int | None:
        return -1 if run.group.size > 1 else 0


def count_of(density: float, size: int) -> int:
    """Return the count of `size` numbers that travel: at least one, unless there is none."""
    return min(size, max(1, round(density * size)))


def make_top_k(
    name: str,
    *,
    density: float = 0.01,
    feedback: bool = True,
    momentum: float = 0.0,
    masking: bool = True,
    warmup: int = 0,
) -> TopK:
    """Return the scheme top-k."""
    return TopK(density, warmup=warmup, feedback=feedback, momentum=momentum, masking=masking)


def make_threshold(
    name: str,
    *,
    value: float = 1e-3,
    feedback: bool = True,
    momentum: float = 0.0,
    masking: bool = True,
) -> Threshold:
    """Return the scheme threshold."""
    return Threshold(value, feedback=feedback, momentum=momentum, masking=masking)
