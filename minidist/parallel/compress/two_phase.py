"""The exchange that most schemes share: an all-reduce in two phases, of chunks that a codec has
made into bytes.

    P=3      bucket = chunks c0 | c1 | c2, cut as numpy.array_split does
    phase 1  every rank encodes its three chunks, and sends the bytes of chunk d to rank d
             all_to_all rank d decodes three times chunk d, and adds them in rank order
    phase 2  rank d encodes the sum of chunk d once, and sends it to all
             all_gather every rank decodes the same bytes, so the sum has the same bits on every
             rank

A reduce-scatter is only phase 1. With error feedback what the codec loses is added to the next
step's: each rank keeps what it lost in phase 1 (the *worker* error, n numbers), and of its chunk
what it lost in phase 2 (the *server* error).

Cost, ranks together, b(m) the bytes of m encoded numbers, m_d the size of chunk d:

    phase 1      (P-1) × sum of b(m_d)      P(P-1) messages
    phase 2      (P-1) × sum of b(m_d)      P(P-1) messages

Phase 2 of a bucket sets out when the next bucket of its group does, or in wait(): never by the
clock, because all ranks must make the calls of a group in the same order.

Source:  Tang et al. 2021, "1-bit Adam", figure 3.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds, split
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.parallel.compress.pending_sum import (
    SERVER,
    WORKER,
    Alone,
    Phased,
    widened,
    zeros_for,
)
from minidist.parallel.step.scheme import GradientRun, Scheme


class RandomStream(NamedTuple):
    """The source of random numbers: a stream for each rank, bucket, phase and step, and a position
    in it."""

    stream: str
    seed: int
    first: int  # the position of the first of the numbers to encode


class Codec(ABC):
    """Numbers to bytes and back. A codec keeps no state."""

    lossless = False

    @abstractmethod
    def encode(self, values: Array, draw: RandomStream) -> Array:
        """Return the bytes (uint8) of `values` (m,) float32 or float64; m may be 0."""

    @abstractmethod
    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        """Return `count` numbers of dtype `kind`, from exactly their bytes."""

    @abstractmethod
    def nbytes(self, count: int, kind: np.dtype) -> int:
        """Return the bytes of `count` numbers; -1 if the numbers decide."""

    def length(self, stream: Array, count: int, kind: np.dtype) -> int:
        """Return how many bytes at the front of a stream are those of `count` numbers."""
        return self.nbytes(count, kind)


class Chained(Scheme):
    """Phase 2 of a bucket sets out when the next bucket of its group does, or in wait()."""

    def __init__(self) -> None:
        super().__init__()
        self._previous: dict[int, Phased] = {}  # by group: the last exchange that set out

    @abstractmethod
    def exchange(self, index: int, bucket: Array, out: Array | None) -> Phased:
        """Begin phase 1; `out`: of a reduce-scatter."""

    def chain(self, index: int, bucket: Array, out: Array | None) -> Pending:
        """Begin phase 1 of this bucket, then phase 2 of the one before; on one rank nothing."""
        group = self.runs[index].group
        if group.size == 1:
            return Alone(bucket, out)
        exchange = self.exchange(index, bucket, out)
        previous = self._previous.get(group.id)
        self._previous[group.id] = exchange
        if previous is not None:
            previous.advance()
        return exchange

    def ended(self, exchange: Phased, group: Group) -> None:
        """Forget an exchange whose sum has arrived."""
        if self._previous.get(group.id) is exchange:
            del self._previous[group.id]


class TwoPhase(Chained):
    """Sums buckets by the exchange above.

    Args:    name: of the scheme; codec; feedback: keep errors; seed: of random numbers.
    """

    def __init__(self, name: str, codec: Codec, *, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.name = name
        self.codec = codec
        self.feedback = feedback
        self.seed = seed

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        for index, run in enumerate(runs):
            if not self.feedback or run.group.size == 1:
                continue
            self.errors[WORKER, index] = zeros_for(run, run.size)
            if run.verb == "all_reduce":
                start, stop = bounds(run.size, run.group.size)[run.group.rank : run.group.rank + 2]
                self.errors[SERVER, index] = zeros_for(run, stop - start)

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        return self.chain(index, bucket, None)

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        return self.chain(index, bucket, out)

    def sent_bytes(self, run: GradientRun) -> int | None:
        sizes = [
            self.codec.nbytes(stop - start, widened(run.dtype))
            for start, stop in pairwise(bounds(run.size, run.group.size))
        ]
        phases = 2 if run.verb == "all_reduce" else 1
        return -1 if min(sizes) < 0 else phases * (run.group.size - 1) * sum(sizes)

    def exchange(self, index: int, bucket: Array, out: Array | None) -> Phased:
        return _Exchange(self, index, bucket, out)

    def add_up(self, index: int, payloads: Sequence[Array], count: int, kind: np.dtype) -> Array:
        """Return the sum of what the ranks sent of this rank's chunk, in rank order."""
        total = self.codec.decode(payloads[0], count, kind)
        for payload in payloads[1:]:
            with np.errstate(over="ignore", invalid="ignore"):
                total += self.codec.decode(payload, count, kind)
        return total

    def encode(self, side: str, index: int, values: Array, number: int, first: int) -> Array:
        """Return the bytes of a chunk, and keep its error.

        Args:    side: WORKER (phase 1) or SERVER (phase 2). number: which chunk. first: where its
                 error begins in `errors[side, index]`; in phase 2 at 0, because an owner keeps only
                 its own chunk's.
        """
        error = self.errors.get((side, index))
        if error is None:
            return self.codec.encode(values, self.draw(side, index, number))
        kept = error[first : first + len(values)]
        kept += values
        payload = self.codec.encode(kept, self.draw(side, index, number))
        with np.errstate(invalid="ignore"):
            kept -= self.codec.decode(payload, len(values), values.dtype)
        # of an overflow nothing is kept: the step is skipped
        kept[~array_module(kept).isfinite(kept)] = 0
        return payload

    def restore(self, index: int, first: int, chunk: Array) -> Array:
        """Return the sum of a chunk, which begins at `first`, from what phase 2 has brought."""
        return chunk

    def draw(self, side: str, index: int, number: int) -> RandomStream:
        """Return the source of random numbers for a chunk of this step."""
        run = self.runs[index]
        step = self.counters["steps"]
        parameter, inside = run.spans[0]
        # a large parameter may lie in several buckets
        begin = f"[{inside.start}]" if inside.start else ""
        return RandomStream(
            f"{parameter.name}{begin}/{side}/{run.group.rank}/{number}/{step}", self.seed, 0
        )


class _Exchange(Phased):
    """The sum of one bucket on its way. Its phases begin in the calling thread."""

    def __init__(self, scheme: TwoPhase, index: int, bucket: Array, out: Array | None) -> None:
        self.scheme = scheme
        self.index = index
        self.bucket = bucket
        self.out = out
        self.group = scheme.runs[index].group
        self.codec = scheme.codec
        self.edges = bounds(len(bucket), self.group.size)
        wide = widen(bucket)
        self.kind = wide.dtype
        payloads = [
            scheme.encode(WORKER, index, chunk, number, self.edges[number])
            for number, chunk in enumerate(split(wide, self.group.size))
        ]
        self._first: Pending | None = self.group.start_all_to_all(payloads, algorithm="pairwise")
        self._second: Pending | None = None
        self._finished = False

    def advance(self) -> None:
        if self._first is None:
            return
        payloads = self._first.wait()
        self._first = None
        start, stop = self.edges[self.group.rank : self.group.rank + 2]
        total = self.scheme.add_up(self.index, payloads, stop - start, self.kind)
        if self.out is None:
            payload = self.scheme.encode(SERVER, self.index, total, self.group.rank, 0)
            self._second = self.group.start_all_gather(payload, algorithm="ring")
        else:
            narrow(total, self.out.dtype, self.out)

    def wait(self) -> Array:
        if self._finished:
            return self.bucket if self.out is None else self.out
        self.advance()
        if self._second is not None:
            stream = self._second.wait()
            at = 0
            for start, stop in pairwise(self.edges):
                size = self.codec.length(stream[at:], stop - start, self.kind)
                chunk = self.scheme.restore(
                    self.index,
                    start,
                    self.codec.decode(stream[at : at + size], stop - start, self.kind),
                )
                narrow(chunk, self.bucket.dtype, self.bucket[start:stop])
                at += size
        self._first = None
        self._second = None
        self._finished = True
        self.scheme.ended(self, self.group)
        return self.bucket if self.out is None else self.out

    def done(self) -> bool:
        """Return whether wait() would return without waiting for another rank."""
        if self.out is None:
            return self._finished or (self._second is not None and self._second.done())
        return self._first is None or self._first.done()
