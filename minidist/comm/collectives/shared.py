"""Shared memory: every rank shows its array where all ranks see it, and everybody reads what it needs.

Ranks of one host need no messages. What a rank has it writes once, for all who want it; a wait is for all ranks
together, and there are two of them, or one, whatever P is. Long arrays go in pieces that the processors' caches hold:

    P=3              r0              r1              r2
    show             .  a1 a2        b0 .  b2        c0 c1 .          all wait for all
    each adds        a0+b0+c0        a1+b1+c1        a2+b2+c2         straight from there, to its own
    show             sum0            sum1            sum2             all wait for all
    each copies      sum0 sum1 sum2  sum0 sum1 sum2  sum0 sum1 sum2

Only on the transport shm. What is shown counts as one message of its bytes: they are written once, for P-1 readers.

notes: N4 §3 (inside a node).    Source: Jain, Kaleem et al. 2018 (shared-memory collectives of MPICH).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from minidist.comm.call import Call
from minidist.comm.collectives.chunks import bounds
from minidist.comm.collectives.reduction import Reduction

DIRECT_BYTES = 256 << 10
"""While what a rank reads, (P-1)n, is no more than this, every rank adds everything itself: one wait instead of two."""


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Each rank adds one chunk of every piece for all; of short arrays, everything for itself.

    Args:     x, out (n,), contiguous; x is only read, and may be out.
    Cost:     2 messages per rank for each piece of at most 2 MiB, 1 for short arrays; P*nbytes over all ranks, exactly.
              Workspace: what a rank adds, in float32, in low precision.
    Rounding: low precision is added in float32 and rounded once.
    """
    if call.size == 1:
        op.finish(x, out)
        return
    add = _add_all if (call.size - 1) * x.nbytes <= DIRECT_BYTES else _add_chunks
    for start, stop in _pieces(call, x):
        add(call, x[start:stop], out[start:stop], op)


def _add_all(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    _add(call, call.show(x), out, op)


def _add_chunks(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    edges = bounds(len(x), call.size)
    low, high = edges[call.rank:call.rank + 2]
    values = [x[low:high]]
    for rank, shown in enumerate(call.show(x[:low], x[high:])):
        if rank != call.rank:
            start = low if rank > call.rank else low - (edges[rank + 1] - edges[rank])  # its own chunk is not there
            values.append(shown[start:start + high - low])
    _add(call, values, out[low:high], op)
    for rank, shown in enumerate(call.show(out[low:high])):
        if rank != call.rank:
            out[edges[rank]:edges[rank + 1]] = shown


def _add(call: Call, values: Sequence[np.ndarray], out: np.ndarray, op: Reduction) -> None:
    """out = the values combined in their order; `out` may be the first."""
    total = out if op.total == out.dtype else call.workspace(len(out), op.total)
    op.combine(values[0], values[1], out=total)
    for value in values[2:]:
        op.combine(total, value, out=total)
    op.finish(total, out)


def _pieces(call: Call, x: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where the pieces begin and end, in elements; an empty array is one piece."""
    assert call.board is not None
    longest = call.board.limit // x.itemsize
    for start in range(0, max(len(x), 1), longest):
        yield start, min(start + longest, len(x))
