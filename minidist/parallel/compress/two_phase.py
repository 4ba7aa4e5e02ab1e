"""The exchange that most schemes share: an all-reduce in two phases, of chunks that a codec has made into bytes.

    P=3      bucket = chunks c0 | c1 | c2, cut as numpy.array_split does
    phase 1  every rank encodes its three chunks, and sends the bytes of chunk d to rank d      all_to_all
             rank d decodes three times chunk d, and adds them in rank order
    phase 2  rank d encodes the sum of chunk d once, and sends it to all                        all_gather
             every rank decodes the same bytes, so the sum has the same bits on every rank

A reduce-scatter is phase 1 alone. With error feedback what the codec loses is added to the next step's: each rank keeps
what it lost in phase 1 (the *worker* error, n numbers), and of its chunk what it lost in phase 2 (the *server* error).

Cost, ranks together, b(m) the bytes of m encoded numbers, m_d the size of chunk d:

    phase 1      (P-1) × sum of b(m_d)      P(P-1) messages
    phase 2      (P-1) × sum of b(m_d)      P(P-1) messages

Phase 2 of a bucket sets out when the next bucket of its group does, or in wait(): never by the clock, because all ranks
must make the calls of a group in the same order.

Source:  Tang et al. 2021, "1-bit Adam", figure 3.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds, split
from minidist.device import account
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.parallel.step.scheme import GradientRun, Scheme

WORKER, SERVER = "worker", "server"     # which error


class RandomStream(NamedTuple):
    """Where random numbers come from: a stream for each rank, bucket, phase and step, and a position in it."""

    stream: str
    seed: int
    first: int          # the position of the first of the numbers to encode


class Codec(ABC):
    """Numbers to bytes and back. A codec keeps no state."""

    lossless = False

    @abstractmethod
    def encode(self, values: Array, draw: RandomStream) -> Array:
        """The bytes (uint8) of `values` (m,) float32 or float64; m may be 0."""

    @abstractmethod
    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        """`count` numbers of dtype `kind`, from exactly their bytes."""

    @abstractmethod
    def nbytes(self, count: int, kind: np.dtype) -> int:
        """Bytes of `count` numbers; -1 if the numbers decide."""

    def length(self, stream: Array, count: int, kind: np.dtype) -> int:
        """How many bytes at the front of a stream are those of `count` numbers."""
        return self.nbytes(count, kind)


class TwoPhase(Scheme):
    """Sums buckets by the exchange above.

    Args:    name: of the scheme; codec; feedback: keep errors; seed: of random numbers.
    """

    def __init__(self, name: str, codec: Codec, *, feedback: bool, seed: int = 0) -> None:
        super().__init__()
        self.name, self.codec, self.feedback, self.seed = name, codec, feedback, seed
        self._previous: dict[int, _Exchange] = {}        # by group: the last exchange that set out

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        for index, run in enumerate(runs):
            if not self.feedback or run.group.size == 1:
                continue
            self.errors[WORKER, index] = _zeros(run, run.size)
            if run.verb == "all_reduce":
                start, stop = bounds(run.size, run.group.size)[run.group.rank:run.group.rank + 2]
                self.errors[SERVER, index] = _zeros(run, stop - start)

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        return self._start(index, bucket, None)

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        return self._start(index, bucket, out)

    def sent_bytes(self, run: GradientRun) -> int | None:
        sizes = [self.codec.nbytes(stop - start, widened(run.dtype))
                 for start, stop in pairwise(bounds(run.size, run.group.size))]
        phases = 2 if run.verb == "all_reduce" else 1
        return -1 if min(sizes) < 0 else phases * (run.group.size - 1) * sum(sizes)

    def _start(self, index: int, bucket: Array, out: Array | None) -> Pending:
        group = self.runs[index].group
        if group.size == 1:
            return _Alone(bucket, out)
        exchange = _Exchange(self, index, bucket, out)
        previous, self._previous[group.id] = self._previous.get(group.id), exchange
        if previous is not None:
            previous.advance()
        return exchange

    def encode(self, kind: str, index: int, values: Array, number: int, first: int) -> Array:
        """The bytes of a chunk, whose error is kept; `number`: which chunk; `first`: where it begins in the bucket."""
        run, chunk = self.runs[index], values
        stream = f"{run.spans[0][0].name}/{kind}/{run.group.rank}/{number}/{self.counters['steps']}"
        error = self.errors.get((kind, index))
        if error is None:
            return self.codec.encode(chunk, RandomStream(stream, self.seed, 0))
        kept = error[first:first + len(chunk)]
        kept += chunk
        payload = self.codec.encode(kept, RandomStream(stream, self.seed, 0))
        with np.errstate(invalid="ignore"):
            kept -= self.codec.decode(payload, len(chunk), chunk.dtype)
        kept[~array_module(kept).isfinite(kept)] = 0        # of an overflow nothing is kept: the step is skipped
        return payload


class _Exchange(Pending):
    """The sum of one bucket on its way. Its phases begin in the calling thread."""

    def __init__(self, scheme: TwoPhase, index: int, bucket: Array, out: Array | None) -> None:
        self.scheme, self.index, self.bucket, self.out = scheme, index, bucket, out
        self.group, self.codec = scheme.runs[index].group, scheme.codec
        self.edges = bounds(len(bucket), self.group.size)
        wide = widen(bucket)
        self.kind = wide.dtype
        payloads = [scheme.encode(WORKER, index, chunk, number, self.edges[number])
                    for number, chunk in enumerate(split(wide, self.group.size))]
        self._first: Pending | None = self.group.start_all_to_all(payloads, algorithm="pairwise")
        self._second: Pending | None = None
        self._finished = False

    def advance(self) -> None:
        """Wait for phase 1; add; begin phase 2."""
        if self._first is None:
            return
        payloads, self._first = self._first.wait(), None
        start, stop = self.edges[self.group.rank:self.group.rank + 2]
        total = self.codec.decode(payloads[0], stop - start, self.kind)
        for payload in payloads[1:]:
            with np.errstate(over="ignore", invalid="ignore"):
                total += self.codec.decode(payload, stop - start, self.kind)
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
            stream, at = self._second.wait(), 0
            for start, stop in pairwise(self.edges):
                size = self.codec.length(stream[at:], stop - start, self.kind)
                chunk = self.codec.decode(stream[at:at + size], stop - start, self.kind)
                narrow(chunk, self.bucket.dtype, self.bucket[start:stop])
                at += size
        self._first, self._second, self._finished = None, None, True
        return self.bucket if self.out is None else self.out

    def done(self) -> bool:
        """Whether wait() would return without waiting for another rank."""
        if self.out is None:
            return self._finished or (self._second is not None and self._second.done())
        return self._first is None or self._first.done()


class _Alone(Pending):
    """One rank has the sum already."""

    def __init__(self, bucket: Array, out: Array | None) -> None:
        self.bucket, self.out = bucket, out

    def wait(self) -> Array:
        if self.out is None:
            return self.bucket
        self.out[...] = self.bucket
        return self.out

    def done(self) -> bool:
        return True


def widened(kind: np.dtype) -> np.dtype:
    """The dtype in which a bucket of dtype `kind` is added up."""
    return widen(np.empty(0, kind)).dtype


def _zeros(run: GradientRun, size: int) -> Array:
    xp = array_module(run.spans[0][0].data)
    return account.current().hold(xp.zeros(size, widened(run.dtype)), "residuals")
