"""Shared memory: every rank shows its array where all ranks see it, and everybody reads what it needs.

Ranks of one host need no messages. What a rank has it writes once, for all who want it; a wait is for all ranks
together, and there are two of them, or one, whatever P is. Long arrays go in pieces that the processors' caches hold:

    P=3              r0              r1              r2
    show             .  a1 a2        b0 .  b2        c0 c1 .          all wait for all
    each adds        a0+b0+c0        a1+b1+c1        a2+b2+c2         straight from there, to its own
    show             sum0            sum1            sum2             all wait for all
    each copies      sum0 sum1 sum2  sum0 sum1 sum2  sum0 sum1 sum2

Only where all ranks of the group share memory: on one host, over shm or sockets. What is shown counts as one message of
its bytes: they are written once, for P-1 readers.

notes: N4 §3 (inside a node).    Source: Jain, Kaleem et al. 2018 (shared-memory collectives of MPICH).
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.arrays import Place, PlaceOf, Rows
from minidist.comm.call import Call
from minidist.comm.collectives.bruck import labels_of, shapes_in
from minidist.comm.collectives.chunks import bounds, split
from minidist.comm.collectives.reduction import Reduction
from minidist.comm.transport import SHOWN_BYTES

DIRECT_BYTES = 256 << 10
"""While what a rank reads, (P-1)n, is no more than this, every rank adds everything itself: one wait instead of two."""

_NOTHING = np.empty(0, np.uint8)


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
    length = SHOWN_BYTES // x.itemsize
    for start in range(0, max(len(x), 1), length):
        add(call, x[start:start + length], out[start:start + length], op)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Every rank shows the chunks of the others, and adds what they show of its own.

    Args:     x (n,), contiguous, only read; out: chunk `rank`, at most ceil(n/P) elements; may be that part of x.
    Cost:     1 message per rank for each piece: 2 MiB / (P-1) of every chunk, rounded down to 64 bytes; (P-1)*nbytes
              over all ranks, exactly. Workspace: what a rank adds, in float32, in low precision.
    Rounding: low precision is added in float32 and rounded once.
    """
    if call.size == 1:
        op.finish(x, out)
        return
    chunks = split(x, call.size)
    step = piece_bytes(call.size) // x.itemsize
    for start in range(0, max(len(chunks[0]), 1), step):
        piece = slice(start, start + step)
        _add(call, _of_chunk(call, [chunk[piece] for chunk in chunks]), out[piece], op)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Every rank shows its block, 2 MiB at a time, until the longest is through.

    Args:    own (m, ...), any m, this rank's block; rows: where the others' go.
    Returns: all blocks, one after the other in rank order.
    Cost:    1 message a piece and rank; the bytes of all blocks once, exactly.
    """
    blocks, octets = {call.rank: own}, _octets(own)
    told = call.show_block(own, octets[:SHOWN_BYTES]) if call.size > 1 else []
    for rank, (theirs, _) in enumerate(told):
        if rank != call.rank and theirs is not None:
            blocks[rank] = rows.place(rank)(theirs.shape, theirs.dtype)
    shown = [part for _, part in told]
    longest = max(block.nbytes for block in blocks.values())
    for start in range(0, longest if told else 0, SHOWN_BYTES):
        if start:
            shown = call.show(octets[start:start + SHOWN_BYTES])
        for rank, part in enumerate(shown):
            if rank != call.rank:
                _octets(blocks[rank])[start:start + len(part)] = part
    return rows.join([blocks[rank] for rank in range(call.size)])


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """The root shows its array, 2 MiB at a time; the others show that they are there.

    Args:    x: the root's array; place: where the others receive it.
    Cost:    1 message a piece and rank; nbytes once, exactly.
    """
    octets = _NOTHING if x is None else _octets(x)
    if call.size == 1 and x is not None:
        return x
    block, part = call.show_block(x, octets[:SHOWN_BYTES])[root]
    assert block is not None, "the root has an array"
    array = place(block.shape, block.dtype) if x is None else x
    for start in range(0, array.nbytes, SHOWN_BYTES):
        if start:
            part = call.show(octets[start:start + SHOWN_BYTES])[root]
        if x is None:
            _octets(array)[start:start + len(part)] = part
    return array


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Every rank shows the shapes of its parts, then the parts themselves, 2 MiB at a time.

    Args:    parts: P arrays of one dtype and any shapes, part d for rank d; place(rank): where the part from `rank`
             goes.
    Returns: the parts for this rank, by source; its own among them as it was given.
    Cost:    1 message per rank, and 1 a piece and rank until the rank with most to show is through; every part once,
             but those that stay, and 8 bytes for each part, 8 for each of its dims.
    """
    leaving = [part for dst, part in enumerate(parts) if dst != call.rank]
    received = {call.rank: parts[call.rank]}
    if not leaving:
        return [received[call.rank]]
    streams, starts = [], {}
    for src, labels in enumerate(call.show(labels_of(leaving))):
        shapes = shapes_in(labels, len(leaving))
        ends = np.cumsum([0] + [int(np.prod(shape, dtype=np.int64)) * parts[0].itemsize for shape in shapes]).tolist()
        streams.append(ends[-1])
        if src != call.rank:
            mine = call.rank - (call.rank > src)
            received[src], starts[src] = place(src)(shapes[mine], parts[0].dtype), ends[mine]
    stream = [_octets(part) for part in leaving]
    for start in range(0, max(streams), SHOWN_BYTES):
        for src, shown in enumerate(call.show(*_cut(stream, start, start + SHOWN_BYTES))):
            if src != call.rank:
                target = _octets(received[src])
                low, high = max(start, starts[src]), min(start + len(shown), starts[src] + len(target))
                if low < high:
                    target[low - starts[src]:high - starts[src]] = shown[low - start:high - start]
    return [received[src] for src in range(call.size)]


def barrier(call: Call) -> None:
    """Every rank shows that it is there.

    Cost: 1 message of 0 bytes per rank.
    """
    if call.size > 1:
        call.show(_NOTHING)


def piece_bytes(size: int) -> int:
    """Bytes of each of `size` chunks that a rank shows at a time, when it shows those of the others."""
    return SHOWN_BYTES // (size - 1) & -64


def _add_all(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    _add(call, call.show(x), out, op)


def _add_chunks(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    edges = bounds(len(x), call.size)
    low, high = edges[call.rank:call.rank + 2]
    _add(call, _of_chunk(call, split(x, call.size)), out[low:high], op)
    for rank, shown in enumerate(call.show(out[low:high])):
        if rank != call.rank:
            out[edges[rank]:edges[rank + 1]] = shown


def _of_chunk(call: Call, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What all ranks have of chunk `rank`, this one first; each shows the chunks of the others, one after the other."""
    own = chunks[call.rank]
    before = sum(map(len, chunks[:call.rank]))
    values = [own]
    for rank, shown in enumerate(call.show(*chunks[:call.rank], *chunks[call.rank + 1:])):
        if rank != call.rank:
            start = before if rank > call.rank else before - len(chunks[rank])   # it does not show its own
            values.append(shown[start:start + len(own)])
    return values


def _add(call: Call, values: Sequence[np.ndarray], out: np.ndarray, op: Reduction) -> None:
    """out = the values combined in their order; `out` may be the first."""
    total = out if op.total == out.dtype else call.workspace(len(out), op.total)
    op.combine(values[0], values[1], out=total)
    for value in values[2:]:
        op.combine(total, value, out=total)
    op.finish(total, out)


def _cut(stream: Sequence[np.ndarray], start: int, stop: int) -> list[np.ndarray]:
    """The bytes from `start` to `stop` of arrays that stand one after the other."""
    cut, begin = [_NOTHING], 0
    for octets in stream:
        cut.append(octets[max(0, start - begin):max(0, stop - begin)])
        begin += len(octets)
    return cut


def _octets(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
