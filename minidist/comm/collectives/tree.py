"""Binomial tree: log2(P) steps instead of P-1, for messages so small that only the number of steps
counts.

    P=8, root 0:  broadcast            step 0          step 1                  step 2
                                       r0 -> r4        r0 -> r2, r4 -> r6      r0 -> r1, r2 -> r3, r4 -> r5, r6 -> r7
                  reduce               the same arrows reversed, from the last step to the first

The plain versions double the distance instead, r0 -> r1 first: other arrows, as many steps.

broadcast, reduce, all_reduce: ranks count from the root: v = (rank - root) mod P. The parent of v
is v without its lowest set bit; its children are v + 1, v + 2, v + 4, ... below that bit (and below
P). Every rank except the root receives from exactly one parent.

gather and scatter: the blocks that a rank passes on must be contiguous in the result. So the ranks
are cut into two halves, each half again into two, and so on. The root receives and sends for its
half, the first rank of every other half for that half. For P = 2^k and root 0 it is the same tree.

notes: N3 §1, N4 §2
"""

from typing import NamedTuple

import numpy as np

from minidist.comm.calls.buffers import Place, Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction, add_from
from minidist.comm.chunks import bounds
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.collectives.naive import in_workspace


def plain_broadcast(group: BlockingGroup, x: np.ndarray | None, root: int) -> np.ndarray | None:
    """Broadcast the root's array: in each step every rank that has it sends it on, so that twice as
    many ranks have it."""
    # places count from the root
    place = (group.rank - root) % group.size
    distance = 1
    while distance < group.size:
        if place < distance and place + distance < group.size:
            group.send(x, dst=(group.rank + distance) % group.size)
        elif distance <= place < 2 * distance:
            x = group.recv(src=(group.rank - distance) % group.size)
        distance *= 2
    return x


def plain_reduce(group: BlockingGroup, x: np.ndarray, root: int) -> np.ndarray:
    """Reduce by the messages of the broadcast in the opposite order and direction; return the sum
    on the root."""
    place = (group.rank - root) % group.size
    total = x.copy()
    distance = 1 << (group.size - 1).bit_length() >> 1  # the last of the broadcast
    while distance:
        if place < distance and place + distance < group.size:
            total += group.recv(src=(group.rank + distance) % group.size)
        elif distance <= place < 2 * distance:
            group.send(total, dst=(group.rank - distance) % group.size)
        distance //= 2
    return total


# The real versions send to the farthest place first. That takes the same number of steps, but the
# ranks below one rank are then consecutive, and all sends of a rank are in flight at once. An
# all-reduce is both; gather and scatter cut the ranks into halves in the same way, so that the
# blocks of a message are contiguous in the result.


def family(rank: int, root: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent of `rank` (None at the root) and its children, nearest first."""
    place = (rank - root) % size
    children = []
    bit = 1
    while bit < size and not place & bit:
        if place + bit < size:
            children.append((place + bit + root) % size)
        bit <<= 1
    parent = None if place == 0 else ((place & (place - 1)) + root) % size
    return parent, children


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Receive the array from the parent and send it to all children, the farthest first.

    P=4, root 0   step 0   r0 -> r2      step 1   r0 -> r1, r2 -> r3

    Cost:    P-1 messages over all ranks, ceil(log2 P) one after the other at most; (P-1)*nbytes.
    """
    call.agree()
    parent, children = family(call.rank, root, call.size)
    if parent is not None:
        x = call.recv_block(parent, place)
    assert x is not None, "the root has the array"
    sent = [
        call.start_send_block(child, x, step=_step(child, root, call.size))
        for child in reversed(children)
    ]
    call.wait(sent)
    return x


def reduce(call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int) -> None:
    """Add the arrays of the children to the own one, and send the sum to the parent.

    P=4, root 0   step 0   r1 -> r0, r3 -> r2      step 1   r2 -> r0

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
        op.pass_on(total, partial)
    call.send(parent, partial, step=_reduce_step(call, root))


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to rank 0, then broadcast from it, both along the tree.

    Cost:    2(P-1) messages over all ranks, 2*ceil(log2 P) one after the other at most;
             2(P-1)*nbytes. No workspace: partial sums are kept in `out`.
    """
    reduce(call, x, out, op, root=0)
    parent, children = family(call.rank, 0, call.size)
    if parent is not None:
        call.recv(parent, out)
    first = (call.size - 1).bit_length()
    sent = [
        call.start_send(child, out, step=first + _step(child, 0, call.size))
        for child in reversed(children)
    ]
    call.wait(sent)


class Twig(NamedTuple):
    """A rank of the halved tree. It acts for ranks `first` to `behind - 1`, which the halving
    number `cut` has separated."""

    rank: int
    first: int
    behind: int
    cut: int


def halved(rank: int, root: int, size: int) -> tuple[Twig, int | None, list[Twig]]:
    """Return this rank's place in the halved tree, its parent (None at the root), and its children,
    farthest first."""
    me = Twig(root, 0, size, 0)
    parent = None
    children = []
    first = 0
    behind = size
    cut = 0
    while behind - first > 1:
        middle = (first + behind + 1) // 2
        near, far = (
            ((first, middle), (middle, behind))
            if me.rank < middle
            else ((middle, behind), (first, middle))
        )
        twig = Twig(far[0], *far, cut + 1)
        first, behind, cut = *near, cut + 1
        if me.rank == rank:
            children.append(twig)
        elif twig.first <= rank < twig.behind:
            me, parent, (first, behind) = twig, me.rank, far
    return me, parent, children


def gather(call: Call, own: np.ndarray, rows: Rows | None, root: int) -> np.ndarray | None:
    """Join the blocks of the children with the own one, and send them to the parent.

    P=4, root 0   step 0   r1 -> r0, r3 -> r2      step 1   r2 -> r0

    A message gives the shape of its joined blocks: no rank needs to know where one block ends and
    the next begins.

    Cost:    P-1 messages over all ranks, ceil(log2 P) one after the other at most; each block once
             per level of its rank's depth in the tree. Workspace: twice the bytes a rank sends, at
             ranks that have both parent and children.
    """
    call.agree()
    me, parent, children = halved(call.rank, root, call.size)
    blocks = {call.rank: own}
    for child in reversed(children):
        place = (
            in_workspace(call)
            if rows is None
            else rows.place(child.first, child.behind - child.first)
        )
        blocks[child.first] = call.recv_block(child.rank, place)
    ordered = [blocks[first] for first in sorted(blocks)]
    if parent is None:
        assert rows is not None, "the root has a place for the blocks"
        return rows.complete(rows.merge(0, ordered))
    joined = own
    if children:
        shape = (sum(map(len, ordered)), *own.shape[1:])
        joined = np.concatenate(ordered, out=in_workspace(call)(shape, own.dtype))
    call.send_block(parent, joined, step=(call.size - 1).bit_length() - me.cut)
    return None


def scatter(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Receive the parts of a half of the ranks, and send each child the parts that it acts for;
    return the own part.

    P=4, root 0   step 0   r0 -> r2      step 1   r0 -> r1, r2 -> r3

    Consecutive parts of numpy.array_split, joined and cut again, give the same parts (the longer
    parts are first), so a rank needs to know only the message's own shape.

    Cost:    P-1 messages over all ranks, ceil(log2 P) one after the other at most; each part once
             per level of its rank's depth in the tree. Workspace: the parts to pass on, and one
             copy of the own part, at ranks that have both parent and children.
    """
    call.agree()
    me, parent, children = halved(call.rank, root, call.size)
    if parent is not None:
        x = call.recv_block(parent, in_workspace(call) if children else place)
    assert x is not None, "the root has the array"
    edges = bounds(len(x), me.behind - me.first)
    sent = [
        call.start_send_block(
            child.rank,
            x[edges[child.first - me.first] : edges[child.behind - me.first]],
            step=child.cut - 1,
        )
        for child in children
    ]
    part = x[edges[call.rank - me.first] : edges[call.rank - me.first + 1]]
    if parent is not None and children:
        kept = place(part.shape, part.dtype)
        kept[...] = part
        part = kept
    call.wait(sent)
    return part


def _step(child: int, root: int, size: int) -> int:
    """Return the step of a broadcast in which `child` receives from its parent."""
    place = (child - root) % size
    return (size - 1).bit_length() - (place & -place).bit_length()


def _reduce_step(call: Call, root: int) -> int:
    """Return the step of a reduce in which this rank sends to its parent."""
    return (call.size - 1).bit_length() - 1 - _step(call.rank, root, call.size)
