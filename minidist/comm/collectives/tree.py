"""Binomial tree: log2(P) steps instead of P-1, for messages so small that only the number of steps counts.

    P=8, root 0:  broadcast            step 0          step 1                  step 2
                                       r0 -> r4        r0 -> r2, r4 -> r6      r0 -> r1, r2 -> r3, r4 -> r5, r6 -> r7
                  reduce               the same arrows, turned round, from the last step to the first

Ranks count from the root: v = (rank - root) mod P. The parent of v is v without its lowest set bit; its children are
v + 1, v + 2, v + 4, ... below that bit (and below P). Every rank but the root hears from exactly one parent.

notes: N3 §1, N4 §2
"""

import numpy as np

from minidist.comm.arrays import Place
from minidist.comm.call import Call
from minidist.comm.collectives.reduction import Reduction, add_from


def family(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """The parent of `rank` (None at the root) and its children, nearest first."""
    place = (rank - root) % size
    children, bit = [], 1
    while bit < size and not place & bit:
        if place + bit < size:
            children.append((place + bit + root) % size)
        bit <<= 1
    parent = None if place == 0 else ((place & (place - 1)) + root) % size
    return parent, children


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Who has the array passes it on, to the farthest first.

    P=4, root 0   step 0   r0 -> r2      step 1   r0 -> r1, r2 -> r3

    Args:    x (...), at the root; place(shape, dtype): where the others receive it.
    Returns: the array, x itself at the root.
    Cost:    P-1 messages over all ranks, ceil(log2 P) one after the other at most; (P-1)*nbytes.
    """
    call.agree()
    parent, children = family(call.rank, root, call.size)
    if parent is not None:
        x = call.recv_block(parent, place)
    assert x is not None, "the root has the array"
    sent = [call.start_send_block(child, x, step=_step(child, root, call.size)) for child in reversed(children)]
    for handle in sent:
        handle.wait()
    return x


def reduce(call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int) -> None:
    """Each rank adds what its children send to its own, and sends the sum to its parent.

    P=4, root 0   step 0   r1 -> r0, r3 -> r2      step 1   r2 -> r0

    Args:    x (n,), only read; out (n,) at the root, may be x.
    Cost:    P-1 messages over all ranks, ceil(log2 P) one after the other at most; (P-1)*nbytes.
             Workspace: n elements at ranks that have both parent and children.
    Rounding: a rank adds low precision in float32 and rounds once, when it sends the sum on.
    """
    call.agree()
    parent, children = family(call.rank, root, call.size)
    if parent is not None and not children:
        call.send(parent, x, step=_reduce_step(call, root))
        return
    partial = call.workspace(len(x), x.dtype) if out is None else out
    total = add_from(call, children, x, partial, op)
    if parent is None:
        op.finish(total, partial)
        return
    if total is not partial:
        partial[...] = total
    call.send(parent, partial, step=_reduce_step(call, root))


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to rank 0, then broadcast from it, both along the tree.

    Args:    x, out (n,); x is only read, and may be out.
    Cost:    2(P-1) messages over all ranks, 2*ceil(log2 P) one after the other at most; 2(P-1)*nbytes.
             No workspace: partial sums stand in `out`.
    """
    reduce(call, x, out, op, root=0)
    parent, children = family(call.rank, 0, call.size)
    if parent is not None:
        call.recv(parent, out)
    first = (call.size - 1).bit_length()
    sent = [call.start_send(child, out, step=first + _step(child, 0, call.size)) for child in reversed(children)]
    for handle in sent:
        handle.wait()


def _step(child: int, root: int, size: int) -> int:
    """The step of a broadcast in which `child` hears from its parent."""
    place = (child - root) % size
    return (size - 1).bit_length() - (place & -place).bit_length()


def _reduce_step(call: Call, root: int) -> int:
    """The step of a reduce in which this rank sends to its parent."""
    return (call.size - 1).bit_length() - 1 - _step(call.rank, root, call.size)
