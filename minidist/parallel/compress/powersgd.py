"""powersgd: each matrix of gradients M (a, b) travels as the product of two thin ones, P (a, r) and
Q (b, r).

    1  P = sum over ranks of M_r Q      all-reduce of r a numbers; Q is that of the step before
                                        (warm start)
    2  P's columns are made orthonormal, on every rank alike
    3  Q = sum over ranks of M_rᵀ P     all-reduce of r b numbers
    4  the sum of all M_r becomes P Qᵀ: its projection on the columns of P

One step of power iteration a training step: with the warm start, P turns towards the r strongest
directions of the gradients over the steps. Both sums are ordinary all-reduces, so the bytes of a
rank do not grow with P's ranks. Vectors (biases, norms), parts of matrices, and matrices that r
does not make smaller travel as they are, together with P.

    rank=4         r, at most min(a, b)
    feedback=yes   M_r - P (M_rᵀ P)ᵀ, what the projection leaves of this rank's own part, is kept: n
                   numbers a rank. (The paper keeps M_r less the *average* projection: the same sum
                   over the ranks. With that, ranks whose parts differ push each other's errors up,
                   even where r is so large that nothing is lost.)
    seed=0         of the first Q

State: worker errors, and Q of each matrix: r b numbers, the same on all ranks. Every rank
multiplies P and Q itself, so the same bits on all ranks need processors of one kind with one
library of matrix products.

Cost, ranks together, s bytes a number, u numbers as they are, matrices (a_i, b_i):

    2(P-1) × s × (u + sum of r (a_i + b_i))      for a reduce-scatter too: each rank then takes its
                                                 chunk of the result

notes:   N2 §11.2
Source:  Vogels, Karimireddy & Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression".
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.device import account
from minidist.device.backend import (
    Array,
    array_module,
    device_of,
    narrow,
    random_normal,
    to_device,
    widen,
)
from minidist.errors import ConfigError
from minidist.parallel.compress.pending_sum import WORKER, Phased, widened, zeros_for
from minidist.parallel.compress.two_phase import Chained
from minidist.parallel.step.scheme import GradientRun


class Matrix(NamedTuple):
    """A matrix of a bucket: where it begins, its shape, the columns of P and Q."""

    start: int
    rows: int
    columns: int
    rank: int

    def of(self, bucket: Array) -> Array:
        """Return its numbers, a view (rows, columns)."""
        return bucket[self.start : self.start + self.rows * self.columns].reshape(
            self.rows, self.columns
        )


def orthonormal(p: Array) -> Array:
    """Make the columns of p (a, r) orthonormal, in place, one after the other; what is left of a
    dependent one is 0."""
    xp = array_module(p)
    tiny = np.finfo(p.dtype).eps * 8
    for index in range(p.shape[1]):
        column = p[:, index]
        size = xp.linalg.norm(column)
        for _ in range(2):  # once more: rounding leaves a part of the others
            column -= p[:, :index] @ (p[:, :index].T @ column)
        left = xp.linalg.norm(column)
        column *= xp.where(left > tiny * size, 1 / xp.where(left == 0, 1, left), 0 * left)
    return p


class PowerSGD(Chained):
    """Sums low-rank products. Args: as above."""

    name = "powersgd"

    def __init__(self, rank: int, *, feedback: bool = True, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigError(f"compress powersgd: rank={rank}; choose 1 or more")
        self.rank = rank
        self.feedback = feedback
        self.seed = seed

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        self.matrices = [self.matrices_of(run) for run in runs]
        for index, run in enumerate(runs):
            if run.group.size == 1 or not self.matrices[index]:
                continue
            if self.feedback:
                self.errors[WORKER, index] = zeros_for(run, run.size)
            device = device_of(run.spans[0][0].data)
            kind = widened(run.dtype)
            for number, matrix in enumerate(self.matrices[index]):
                drawn = random_normal(
                    f"{run.spans[0][0].name}/powersgd/{number}",
                    self.seed,
                    range(matrix.columns * matrix.rank),
                    kind.name,
                )
                q = to_device(drawn.reshape(matrix.columns, matrix.rank), device)
                self.private[f"q.{index}.{number}"] = account.current().hold(q, "residuals")

    def matrices_of(self, run: GradientRun) -> list[Matrix]:
        """Return the matrices of a bucket that a product of rank `rank` makes smaller."""
        found = []
        start = 0
        for parameter, part in run.spans:
            shape = parameter.shape
            if len(part) == parameter.size and len(shape) > 1 and parameter.size:
                rows = shape[0]
                columns = parameter.size // shape[0]
                rank = min(self.rank, rows, columns)
                if rank * (rows + columns) < rows * columns:
                    found.append(Matrix(start, rows, columns, rank))
            start += len(part)
        return found

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        return self.chain(index, bucket, None)

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        return self.chain(index, bucket, out)

    def exchange(self, index: int, bucket: Array, out: Array | None) -> "_Products":
        return _Products(self, index, bucket, out)

    def sent_bytes(self, run: GradientRun) -> int | None:
        matrices = self.matrices_of(run)
        saved = sum(m.rows * m.columns - m.rank * (m.rows + m.columns) for m in matrices)
        return 2 * (run.group.size - 1) * (run.size - saved) * widened(run.dtype).itemsize


class _Products(Phased):
    """The sum of one bucket on its way."""

    def __init__(self, scheme: PowerSGD, index: int, bucket: Array, out: Array | None) -> None:
        self.scheme = scheme
        self.index = index
        self.bucket = bucket
        self.out = out
        self.group = scheme.runs[index].group
        self.matrices = scheme.matrices[index]
        self.error = scheme.errors.get((WORKER, index))
        self.qs = [scheme.private[f"q.{index}.{number}"] for number in range(len(self.matrices))]
        xp = array_module(bucket)
        self.mine = widen(bucket)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.error is not None:
                self.error += self.mine  # of what travels as it is the error is 0
                self.mine = self.error
            ps = [m.of(self.mine) @ q for m, q in zip(self.matrices, self.qs, strict=True)]
        self.first_sum = xp.concatenate([*(p.reshape(-1) for p in ps), *self._others(self.mine)])
        self._first: Pending | None = self._sum(self.first_sum)
        self._second: Pending | None = None
        self._finished = False

    def _others(self, vector: Array) -> list[Array]:
        """Return views of the numbers between the matrices."""
        edges = [
            0,
            *(edge for m in self.matrices for edge in (m.start, m.start + m.rows * m.columns)),
            len(vector),
        ]
        return [vector[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]

    def _sum(self, vector: Array) -> Pending:
        return self.group.start_all_reduce(vector, out=vector, algorithm="ring")

    def advance(self) -> None:
        if self._first is None:
            return
        self._first.wait()
        self._first = None
        at = 0
        self.ps = list[Array]()
        own = list[Array]()
        with np.errstate(over="ignore", invalid="ignore"):
            for m in self.matrices:
                self.ps.append(
                    orthonormal(self.first_sum[at : at + m.rows * m.rank].reshape(m.rows, m.rank))
                )
                at += m.rows * m.rank
                own.append(m.of(self.mine).T @ self.ps[-1])
            if self.error is not None:
                self._keep(own)
        self.rest = self.first_sum[at:]
        if own:
            self.second_sum = array_module(self.mine).concatenate([q.reshape(-1) for q in own])
            self._second = self._sum(self.second_sum)

    def _keep(self, own: list[Array]) -> None:
        """Keep what the projection leaves of this rank's part as its error, and nothing of an
        overflow."""
        for m, p, q in zip(self.matrices, self.ps, own, strict=True):
            matrix = m.of(self.mine)
            matrix -= p @ q.T
        for other in self._others(self.mine):
            other[...] = 0
        if not np.isfinite(float(self.mine.sum())):
            self.mine[~array_module(self.mine).isfinite(self.mine)] = 0

    def wait(self) -> Array:
        result = self.bucket if self.out is None else self.out
        if self._finished:
            return result
        self.advance()
        whole = array_module(self.bucket).empty(len(self.bucket), self.mine.dtype)
        at = 0
        for other in self._others(whole):
            other[...] = self.rest[at : at + len(other)]
            at += len(other)
        if self._second is not None:
            self._second.wait()
            self._multiply(whole)
        start, stop = bounds(len(whole), self.group.size)[self.group.rank : self.group.rank + 2]
        narrow(whole if self.out is None else whole[start:stop], result.dtype, result)
        self._second = None
        self._finished = True
        self.scheme.ended(self, self.group)
        return result

    def _multiply(self, whole: Array) -> None:
        """Write P Qᵀ in the place of each matrix, and keep Q for the next step, but for columns
        without direction."""
        xp = array_module(whole)
        at = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for m, p, kept in zip(self.matrices, self.ps, self.qs, strict=True):
                q = self.second_sum[at : at + m.columns * m.rank].reshape(m.columns, m.rank)
                at += m.columns * m.rank
                xp.matmul(p, q.T, out=m.of(whole))
                usable = xp.isfinite(q).all(axis=0) & (q != 0).any(axis=0)
                kept[...] = xp.where(usable, q, kept)

    def done(self) -> bool:
        return self._finished or (
            self._first is None and (self._second is None or self._second.done())
        )


def make(name: str, *, rank: int = 4, feedback: bool = True, seed: int = 0) -> PowerSGD:
    """Return the scheme."""
    return PowerSGD(rank, feedback=feedback, seed=seed)
