"""Shared memory: every rank copies its array to memory that all ranks see, and reads the data that
it needs there.

Ranks of one host need no messages. A rank writes its array once, and all read it. A wait ends when
all ranks have arrived; a call has one or two waits at every P. Long arrays are processed in pieces
that fit in the processors' caches:

    P=3              r0              r1              r2
    show             .  a1 a2        b0 .  b2        c0 c1 .          all wait for all
    each adds        a0+b0+c0        a1+b1+c1        a2+b2+c2         reading the shared memory
    show             sum0            sum1            sum2             all wait for all
    each copies      sum0 sum1 sum2  sum0 sum1 sum2  sum0 sum1 sum2

Where the system lets the ranks read each other's memory (process_vm_read.py), a rank lends an array
that is longer than one piece: it shows only the address, the others copy the array from there, and
all wait for all before it may change. That is one copy instead of two, but by a system call, which
is slower for arrays that fit in the caches. Reductions do not lend.

This works only where all ranks of the group share memory: on one host, over auto or shm. A shown
array counts as one message of its bytes, and so does a lent array: it exists once, for P-1 readers.
Addresses, like headers, do not count.

notes: N4 §1 节点内.    Source: Jain, Kaleem et al. 2018 (shared-memory collectives of MPICH).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from minidist.comm.calls.buffers import Place, PlaceOf, Rows, bytes_view
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds, split
from minidist.comm.collectives.blocking import SharingGroup
from minidist.comm.collectives.bruck import PackedShapes, labels_of, shapes_in
from minidist.comm.limits import SHOWN_BYTES, SHOWN_WHOLE_BYTES


def plain_all_reduce(group: SharingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over ranks that see each other's memory: show, add one chunk, show
    the sum, copy all sums."""
    shown = group.show(x)  # all wait for all
    own = np.sum([np.array_split(theirs, group.size)[group.rank] for theirs in shown], axis=0)
    return np.concatenate(group.show(own))  # all wait for all


# The real version shows long arrays in pieces that fit in the caches, leaves out the chunk that no
# other rank reads, and lets each rank add everything itself where the array is so short that a
# second wait costs more.

_NOTHING = np.empty(0, np.uint8)


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Add one chunk of every piece for all ranks; of short arrays, add everything on each rank.

    Cost:     2 messages per rank for each piece of at most 2 MiB, 1 for short arrays; P*nbytes over
              all ranks, exactly.
    Rounding: low precision is added in a float32 workspace and rounded once.
    """
    add = _add_all if (call.size - 1) * x.nbytes <= SHOWN_WHOLE_BYTES else _add_chunks
    length = SHOWN_BYTES // x.itemsize
    for start in range(0, max(len(x), 1), length):
        add(call, x[start : start + length], out[start : start + length], op)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Show the chunks of the other ranks, and add the values that they show of this rank's chunk.

    Cost:     1 message per rank for each piece: 2 MiB / (P-1) of every chunk, rounded down to 64
              bytes; (P-1)*nbytes over all ranks, exactly.
    Rounding: as all_reduce.
    """
    chunks = split(x, call.size)
    step = piece_bytes(call.size) // x.itemsize
    for start in range(0, max(len(chunks[0]), 1), step):
        pieces = [chunk[start : start + step] for chunk in chunks]
        edges = [0, *accumulate(map(len, pieces))]
        own = pieces.pop(call.rank)
        _add(call, _of_chunk(call, own, pieces, edges), out[start : start + step], op)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Show the own block, 2 MiB at a time, or lend it if it has more than 2 MiB and ranks can lend;
    copy the others.

    Cost:    1 message per rank; beyond 2 MiB another, after which lent blocks may change, or 1 per
             piece and rank; the bytes of all blocks once, exactly.
    """
    data = bytes_view(own)
    lent = [_lendable(call, own)] if call.lends and _is_long(own.nbytes) else []
    told = call.show_block(own, *([] if lent else [data[:SHOWN_BYTES]]), lent=lent)
    blocks = {call.rank: own}
    for rank in call.others:
        theirs, shown = told[rank]
        assert theirs is not None, "every rank has a block"
        blocks[rank] = rows.place(rank)(theirs.shape, theirs.dtype)
        if call.lends and _is_long(blocks[rank].nbytes):
            call.read(rank, _address(shown), blocks[rank])
        else:
            bytes_view(blocks[rank])[: len(shown)] = shown
    longest = max(block.nbytes for block in blocks.values())
    if call.lends and _is_long(longest):
        call.show(_NOTHING)  # every rank has read
    for start in range(SHOWN_BYTES, 0 if call.lends else longest, SHOWN_BYTES):
        pieces = call.show(data[start : start + SHOWN_BYTES])
        for rank in call.others:
            bytes_view(blocks[rank])[start : start + len(pieces[rank])] = pieces[rank]
    return rows.join([blocks[rank] for rank in range(call.size)])


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Show the root's array, 2 MiB at a time; the other ranks show that they have arrived.

    Cost: 1 message per piece and rank; nbytes once, exactly.
    """
    data = _NOTHING if x is None else bytes_view(x)
    block, part = call.show_block(x, data[:SHOWN_BYTES])[root]
    assert block is not None, "the root has an array"
    array = place(block.shape, block.dtype) if x is None else x
    for start in range(0, array.nbytes, SHOWN_BYTES):
        if start:
            part = call.show(data[start : start + SHOWN_BYTES])[root]
        if x is None:
            bytes_view(array)[start : start + len(part)] = part
    return array


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Show the shapes of the parts, and also the parts, or lend them if together they have more
    than 2 MiB; copy the parts for this rank.

    P=3      r0                   r1                   r2
    show     shapes, .  p1 p2     shapes, p0 .  p2     shapes, p0 p1 .        all wait for all
    each     copies the parts for it

    Cost:    1 message per rank; beyond 2 MiB (of one rank's parts and shapes) another, after which
             lent parts may change, or, where ranks may not lend, 1 per piece and rank: 2 MiB /
             (P-1) of every part, rounded down to 64 bytes. Every part once, except those that stay;
             8 bytes for each part, 8 for each of its dims.
    """
    received = {call.rank: parts[call.rank]}
    others = [part for dst, part in enumerate(parts) if dst != call.rank]
    data = [bytes_view(part) for part in others]
    labels = labels_of(others)
    long = _is_long(len(labels) + sum(map(len, data)))
    lent = [_lendable(call, part) for part in data] if long and call.lends else []
    shown = call.show(labels, *([] if long else data), lent=lent)
    told = [shapes_in(theirs, call.size - 1, parts[0].itemsize, labels) for theirs in shown]
    longest = max(max(bundle.lengths) if _is_long(bundle.starts[-1]) else 0 for bundle in told)
    try:
        for src in call.others:
            mine = call.rank - (call.rank > src)
            bundle = told[src]
            received[src] = place(src)(bundle.shapes[mine], parts[0].dtype)
            if not _is_long(bundle.starts[-1]):
                bytes_view(received[src])[...] = shown[src][
                    bundle.starts[mine] : bundle.starts[mine + 1]
                ]
            elif call.lends:
                call.read(src, _address(shown[src][bundle.starts[0] :], mine), received[src])
    finally:
        if longest and call.lends:
            # also after an error: others may still be reading what this rank lent
            call.show(_NOTHING)
    if longest and not call.lends:
        _all_to_all_in_pieces(call, data if long else [_NOTHING], told, received, longest)
    return [received[src] for src in range(call.size)]


def barrier(call: Call) -> None:
    """Wait until every rank has shown that it has arrived. Cost: 1 message of 0 bytes per rank."""
    call.show(_NOTHING)


def piece_bytes(size: int) -> int:
    """Return the bytes of each of `size` chunks that a rank shows at a time, when it shows all but
    its own."""
    return SHOWN_BYTES // (size - 1) & -64


def _add_all(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    _add(call, call.show(x), out, op)


def _add_chunks(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    edges = bounds(len(x), call.size)
    low, high = edges[call.rank : call.rank + 2]
    own = out[low:high]
    _add(call, _of_chunk(call, x[low:high], (x[:low], x[high:]), edges), own, op)
    for rank, shown in enumerate(call.show(own)):
        if rank != call.rank:
            out[edges[rank] : edges[rank + 1]] = shown


def _of_chunk(
    call: Call, own: np.ndarray, others: Sequence[np.ndarray], edges: Sequence[int]
) -> list[np.ndarray]:
    """Return the values of chunk `rank` on all ranks, this rank's first. Each rank shows its
    `others`; `edges` are the bounds of the chunks."""
    before = edges[call.rank]
    values = [own]
    for rank, shown in enumerate(call.show(*others)):
        if rank != call.rank:
            # it does not show its own
            start = before if rank > call.rank else before - (edges[rank + 1] - edges[rank])
            values.append(shown[start : start + len(own)])
    return values


def _add(call: Call, values: Sequence[np.ndarray], out: np.ndarray, op: Reduction) -> None:
    """Write to `out` the values combined in their order; `out` may be the first of them."""
    total = out if op.total == out.dtype else call.workspace(len(out), op.total)
    op.combine_all(values, out=total)
    op.finish(total, out)


def _all_to_all_in_pieces(
    call: Call,
    data: Sequence[np.ndarray],
    told: Sequence[PackedShapes],
    received: Mapping[int, np.ndarray],
    longest: int,
) -> None:
    """Exchange long parts: show a piece of all parts, until the longest part is complete."""
    step = piece_bytes(call.size)
    for start in range(0, longest, step):
        shown = call.show(*(part[start : start + step] for part in data))
        for src in call.others:
            if _is_long(told[src].starts[-1]):
                pieces = [min(max(length - start, 0), step) for length in told[src].lengths]
                mine = call.rank - (call.rank > src)
                begin = sum(pieces[:mine])
                bytes_view(received[src])[start : start + pieces[mine]] = shown[src][
                    begin : begin + pieces[mine]
                ]


def _is_long(nbytes: int) -> bool:
    """Return whether `nbytes` is more than can be shown at a time."""
    return nbytes > SHOWN_BYTES


def _lendable(call: Call, array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy of it if other ranks cannot read its memory, as with pinned
    memory of a GPU driver."""
    if call.board is None or call.board.lendable(array):
        return array
    copy = call.workspace(array.size, array.dtype)
    copy[...] = array.reshape(-1)
    return copy


def _address(shown: np.ndarray, number: int = 0) -> int:
    """Return address `number` of the addresses that a rank shows for its lent arrays."""
    return int(shown.view(np.uint64)[number])
