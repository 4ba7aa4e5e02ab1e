"""Naive: everything passes through the root. Correct, simple, and the baseline for the others.

The root sends or receives P-1 times the bytes of each other rank, one message after the other,
while all other links are idle. In a verb without a root, rank 0 is the root.

    P=4, all_reduce          r1 -> r0   r2 -> r0   r3 -> r0   (r0 adds)   r0 -> r1   r0 -> r2   r0 -> r3

notes: N3 §1, N4 §2
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.buffers import Place, PlaceOf, Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction, add_from
from minidist.comm.chunks import split
from minidist.comm.collectives.blocking import BlockingGroup


def plain_all_reduce(group: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum: all arrays go to rank 0, which adds them and sends the sum back to each
    rank."""
    total = x.copy()
    if group.rank == 0:
        for src in range(1, group.size):
            total += group.recv(src=src)
        for dst in range(1, group.size):
            group.send(total, dst=dst)
    else:
        group.send(x, dst=0)
        total = group.recv(src=0)
    return total


# The real versions are as simple as this one. They add what all families have: messages arrive
# directly in the result, low precision is added in float32, and every rank's first message names
# its call.

_NOTHING = np.empty(0, np.uint8)


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Send the whole array from the root to each other rank in turn.

    P=4, root 0   step 0   r0 -> r1      step 1   r0 -> r2      step 2   r0 -> r3

    Cost:    P-1 messages, all from the root; (P-1)*nbytes.
    """
    call.agree()
    if call.rank != root:
        return call.recv_block(root, place)
    assert x is not None, "the root has the array"
    for step, dst in enumerate(_others(call.size, root)):
        call.send_block(dst, x, step=step)
    return x


def reduce(call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int) -> None:
    """Send each rank's whole array to the root, which adds them in rank order to its own.

    P=4, root 0   step 0   r1 -> r0      step 1   r2 -> r0      step 2   r3 -> r0

    Cost:    P-1 messages, all to the root; (P-1)*nbytes.
    Rounding: the root adds low precision in float32 and rounds once.
    """
    call.agree()
    if call.rank == root:
        assert out is not None, "the root has a result"
        op.finish(add_from(call, _others(call.size, root), x, out, op), out)
    else:
        call.send(root, x, step=call.rank - (call.rank > root))


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to rank 0, then broadcast from it.

    Cost:    2(P-1) messages; 2(P-1)*nbytes: the ring's bytes, but half of them leave one rank, and
             half arrive at it.
    """
    reduce(call, x, out if call.rank == 0 else None, op, root=0)
    if call.rank == 0:
        for dst in range(1, call.size):
            call.send(dst, out, step=call.size - 2 + dst)
    else:
        call.recv(0, out)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to rank 0, which then sends each rank its chunk.

    Cost:    2(P-1) messages; (P-1)*nbytes to rank 0, then all chunks but its own from it.
             Workspace: n elements at rank 0.
    """
    if call.rank != 0:
        reduce(call, x, None, op, root=0)
        call.recv(0, out)
        return
    whole = call.workspace(len(x), x.dtype)
    reduce(call, x, whole, op, root=0)
    chunks = split(whole, call.size)
    for dst in range(1, call.size):
        call.send(dst, chunks[dst], step=call.size - 2 + dst, chunk=dst)
    out[...] = chunks[0]


def gather(call: Call, own: np.ndarray, rows: Rows | None, root: int) -> np.ndarray | None:
    """Send each rank's block to the root.

    P=4, root 0   step 0   r1 -> r0      step 1   r2 -> r0      step 2   r3 -> r0

    Cost:    P-1 messages, all to the root; the bytes of all blocks but the root's.
    """
    call.agree()
    if call.rank != root:
        call.send_block(root, own, step=call.rank - (call.rank > root), chunk=call.rank)
        return None
    assert rows is not None, "the root has a place for the blocks"
    return rows.join(
        [own if src == root else call.recv_block(src, rows.place(src)) for src in range(call.size)]
    )


def scatter(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Send each rank its part, from the root.

    P=4, root 0   step 0   r0 -> r1      step 1   r0 -> r2      step 2   r0 -> r3

    Cost:    P-1 messages, all from the root; the bytes of all parts but the root's.
    """
    call.agree()
    if call.rank != root:
        return call.recv_block(root, place)
    assert x is not None, "the root has the array"
    parts = split(x, call.size)
    for step, dst in enumerate(_others(call.size, root)):
        call.send_block(dst, parts[dst], step=step, chunk=dst)
    return parts[root]


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Gather to rank 0, then broadcast the whole from it.

    Cost:    2(P-1) messages; the bytes of all blocks but rank 0's to it, then (P-1)*(the bytes of
             all blocks) from it.
    """
    whole = gather(call, own, rows, root=0)
    if whole is None:
        return call.recv_block(0, rows.place_whole)
    for dst in range(1, call.size):
        call.send_block(dst, whole, step=call.size - 2 + dst)
    return whole


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Send every part to rank 0 first, then on to the rank that it is for.

    P=3           r1 -> r0: p10 p12      r2 -> r0: p20 p21      r0 -> r1: p01 p21      r0 -> r2: p02 p12

    Cost:    2(P-1)^2 messages; each part twice, but once if it is from rank 0 or for it, and never
             if it stays. Workspace: rank 0 holds all parts that pass through, (P-1)(P-2) of them.
    """
    call.agree()
    if call.rank == 0:
        return _relay(call, parts, place)
    sent = [
        call.start_send_block(0, parts[dst], chunk=dst) for dst in _others(call.size, call.rank)
    ]
    call.wait(sent)
    return [
        parts[src] if src == call.rank else call.recv_block(0, place(src))
        for src in range(call.size)
    ]


def barrier(call: Call) -> None:
    """Send a message from each rank to rank 0; when all have arrived, rank 0 answers each.

    Cost:    2(P-1) messages of 0 bytes.
    """
    call.agree()
    if call.rank != 0:
        call.send(0, _NOTHING, step=call.rank - 1)
        call.recv(0, _NOTHING)
        return
    for src in range(1, call.size):
        call.recv(src, _NOTHING)
    for dst in range(1, call.size):
        call.send(dst, _NOTHING, step=call.size - 2 + dst)


def _relay(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Run rank 0's side of all_to_all: receive every part between other ranks, then send it on."""
    mine = [parts[0]]
    mail = {}
    for src in range(1, call.size):
        for dst in _others(call.size, src):
            block = call.recv_block(src, place(src) if dst == 0 else in_workspace(call))
            if dst == 0:
                mine.append(block)
            else:
                mail[src, dst] = block
    for dst in range(1, call.size):
        for src in _others(call.size, dst):
            call.send_block(dst, parts[dst] if src == 0 else mail[src, dst], chunk=dst)
    return mine


def _others(size: int, rank: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def in_workspace(call: Call) -> Place:
    """Return a Place in the workspace, for a block that is only passed on."""
    return lambda shape, dtype: call.workspace(int(np.prod(shape)), dtype).reshape(shape)
