"""Native: the transport's own collectives (MPI_Iallreduce, …), for comparison, and where the
library is better.

A library does not check that the ranks make the same call. So every call begins with
dissemination's barrier, whose messages carry the call's signature: a rank leaves it only after news
of the arrival of every other rank has reached it. A rank that receives the signature of another
call raises MismatchError before it enters the library, and the control connection makes every other
rank raise it, too.

The ledger cannot see the library's messages. It counts the messages of this module, and the bytes
that a rank hands to the library as one message. In the costs below A = P ceil(log2 P), the
barrier's messages (of 0 bytes).

The library decides the order of additions, and the result of NaN in max and min.

On a GPU (comm/device_lane.py) the arrays are CuPy's, and the library is NCCL or CUDA IPC; the costs
are the same, except that an all-to-all's shapes are sent in P-1 headers per rank instead of labels.
NCCL adds in the arrays' dtype: it may round low precision at every hop. Not yet run between several
GPUs.
"""

import math
from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.buffers import Place, PlaceOf, Rows, bytes_view
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds, split
from minidist.comm.collectives import dissemination, tree
from minidist.comm.collectives.bruck import pack, unpack
from minidist.device.backend import array_module


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Call the library's all-reduce, then divide a mean. Cost: A + P messages; P*nbytes handed
    over."""
    dissemination.barrier(call)
    call.count(x.nbytes)
    call.native().all_reduce(x, out, op.op)
    op.finish(out, out)


def reduce(call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int) -> None:
    """Call the library's reduce, then divide a mean. Cost: A + P messages; P*nbytes handed over."""
    dissemination.barrier(call)
    call.count(x.nbytes)
    call.native().reduce(x, out, op.op, root)
    if out is not None:
        op.finish(out, out)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Call the library's reduce-scatter, then divide a mean. Cost: as all_reduce, and a copy of x
    if `out` is in it."""
    dissemination.barrier(call)
    call.count(x.nbytes)
    apart = x.copy() if array_module(x).may_share_memory(x, out) else x
    call.native().reduce_scatter(apart, out, [len(chunk) for chunk in split(x, call.size)], op.op)
    op.finish(out, out)


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Send shape and dtype in headers along the tree, then call the library's broadcast.

    Cost:    A + P-1 messages of 0 bytes, and nbytes handed over by the root.
    """
    shape, dtype = _announced(call, x, root)
    if call.side is not None and call.origin == "cpu":
        return tree.broadcast(call, x, place, root)  # the root's array turns out to be on the host
    array = place(shape, dtype) if x is None else x
    if call.rank == root:
        call.count(array.nbytes)
    call.native().broadcast(bytes_view(array), root)
    return array


def scatter(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Send shape and dtype along the tree, then call the library's scatter. Cost: as broadcast."""
    shape, dtype = _announced(call, x, root)
    if call.side is not None and call.origin == "cpu":
        return tree.scatter(call, x, place, root)
    edges = bounds(shape[0], call.size)
    counts = (np.diff(edges) * _row_bytes(shape, dtype)).tolist()
    start, stop = edges[call.rank : call.rank + 2]
    if x is None:
        part = place((stop - start, *shape[1:]), dtype)
        call.native().scatter(None, counts, bytes_view(part), root)
        return part
    call.count(x.nbytes)
    call.native().scatter(bytes_view(x), counts, None, root)
    return x[start:stop]


def gather(call: Call, own: np.ndarray, rows: Rows | None, root: int) -> np.ndarray | None:
    """Exchange the lengths of all blocks, then call the library's gather.

    Cost:    A + 2P messages; 8P bytes of lengths, and the bytes of all blocks. The root copies its
             own first.
    """
    shape, counts = _joined(call, own)
    if rows is None:
        call.native().gather(bytes_view(own), None, counts, root)
        return None
    mine = own.copy()
    whole = rows.place_whole(shape, own.dtype)
    call.native().gather(bytes_view(mine), bytes_view(whole), counts, root)
    return whole


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Exchange the lengths of all blocks, then call the library's all-gather. Cost: as gather, but
    every rank copies its own block first."""
    shape, counts = _joined(call, own)
    mine = own.copy()
    whole = rows.place_whole(shape, own.dtype)
    call.native().all_gather(bytes_view(mine), bytes_view(whole), counts)
    return whole


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Exchange the lengths of all bundles, then call the library's all-to-all for the parts with
    their labels (see bruck.py).

    Cost:    A + 2P messages; 8 P^2 bytes of lengths, every part that does not stay, and 8 bytes and
             8 for each dim of it. Two copies of every part.
    """
    dissemination.barrier(call)
    if call.side is not None:
        return _all_to_all_on_gpu(call, parts, place)
    others = sorted(call.others)
    bundles = {rank: pack(call, [parts[rank]]) for rank in others}
    leaving = np.array(
        [len(bundles[rank]) if rank in bundles else 0 for rank in range(call.size)], np.int64
    )
    coming = np.empty_like(leaving)
    eight = [8] * call.size
    call.count(leaving.nbytes)
    call.native().all_to_all(bytes_view(leaving), eight, bytes_view(coming), eight)
    arrived = call.workspace(int(coming.sum()), np.dtype(np.uint8))
    call.count(int(leaving.sum()))
    call.native().all_to_all(
        np.concatenate(list(bundles.values())), leaving.tolist(), arrived, coming.tolist()
    )
    received = {call.rank: parts[call.rank]}
    edges = np.cumsum([0, *coming])
    for src in others:
        (part,) = unpack(arrived[edges[src] : edges[src + 1]].copy(), 1, parts[0].dtype)
        received[src] = place(src)(part.shape, part.dtype)
        received[src][...] = part
    return [received[src] for src in range(call.size)]


def _all_to_all_on_gpu(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Exchange the shapes in headers of messages without bytes, allocate each part where it
    belongs, then call the library's all-to-all."""
    received = {call.rank: parts[call.rank]}
    ranks = range(call.size)
    for far in range(1, call.size):
        dst = (call.rank + far) % call.size
        src = (call.rank - far) % call.size
        label = call.exchange_blocks(
            dst, np.empty((*parts[dst].shape, 0), parts[dst].dtype), src, np.empty
        )
        received[src] = place(src)(label.shape[:-1], label.dtype)
    call.count(sum(parts[rank].nbytes for rank in ranks if rank != call.rank))
    xp = array_module(parts[0])
    leaving = [0 if rank == call.rank else parts[rank].nbytes for rank in ranks]
    coming = [0 if rank == call.rank else received[rank].nbytes for rank in ranks]
    arrived = xp.empty(sum(coming), np.uint8)
    call.native().all_to_all(
        xp.concatenate([bytes_view(parts[rank])[: leaving[rank]] for rank in ranks]),
        leaving,
        arrived,
        coming,
    )
    for src, edge in zip(ranks, np.cumsum([0, *coming[:-1]]).tolist(), strict=True):
        if coming[src]:
            received[src].reshape(-1)[...] = arrived[edge : edge + coming[src]].view(
                received[src].dtype
            )
    return [received[src] for src in ranks]


def barrier(call: Call) -> None:
    """Wait in dissemination's barrier, which suffices, then call the library's for comparison.
    Cost: A + P messages of 0 bytes."""
    dissemination.barrier(call)
    call.count(0)
    call.native().barrier()


def _announced(call: Call, x: np.ndarray | None, root: int) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of the root's array, after all ranks have agreed: P-1 messages of 0
    bytes."""
    dissemination.barrier(call)
    told = tree.broadcast(
        call, None if x is None else np.empty((*x.shape, 0), x.dtype), np.empty, root
    )
    return told.shape[:-1], told.dtype


def _joined(call: Call, own: np.ndarray) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of all blocks joined, and the bytes of each, after all ranks have agreed;
    count `own` as handed over."""
    dissemination.barrier(call)
    mine = np.array([len(own)], np.int64)
    lengths = np.empty(call.size, np.int64)
    call.count(mine.nbytes)
    call.native().all_gather(bytes_view(mine), bytes_view(lengths), [8] * call.size)
    call.count(own.nbytes)
    return (int(lengths.sum()), *own.shape[1:]), (
        lengths * _row_bytes(own.shape, own.dtype)
    ).tolist()


def _row_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize
