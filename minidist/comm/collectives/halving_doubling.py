"""Halving and doubling: log2(P) steps; the distance to the partner halves or doubles in each step.

    P=4                  r0             r1             r2             r3
    start                a0 a1 a2 a3    b0 b1 b2 b3    c0 c1 c2 c3    d0 d1 d2 d3
    halving, step 0      ac0 ac1        bd0 bd1        ac2 ac3        bd2 bd3         half the array, with rank +-2
    halving, step 1      sum0           sum1           sum2           sum3            a quarter, with rank +-1
    doubling, step 2     sum0 sum1      sum0 sum1      sum2 sum3      sum2 sum3       a quarter, with rank +-1
    doubling, step 3     sum0 sum1 sum2 sum3 on all                                   half, with rank +-2

The ring's bytes exactly, in 2 log2(P) steps instead of 2(P-1). It needs 2^k ranks. For other P, let
Q be the largest power of two below P: the first P-Q pairs of neighbours each act as one rank. The
second rank of a pair is surplus: it sends its array to the first (fold), and receives the result at
the end (unfold). The Q other ranks, the core, halve and double. Pairs are neighbours, so that the
chunks that a core rank handles are always contiguous in the array:

    P=6, Q=4    ranks 0 1 | 2 3 | 4 | 5      core: 0 2 4 5      surplus: 1 3

notes: N4 §2.    Source: Thakur, Rabenseifner & Gropp 2005; Rabenseifner 2004.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.calls.buffers import Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds
from minidist.comm.collectives.blocking import BlockingGroup


def plain_all_reduce(group: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over 2^k ranks: exchange one half of the remaining part with a
    partner, add, and repeat; then back."""
    total = x.copy()
    start = 0
    stop = len(x)
    steps = []
    distance = group.size // 2
    while distance:  # halving: a reduce-scatter
        partner = group.rank ^ distance
        middle = (start + stop) // 2
        low = slice(start, middle)
        high = slice(middle, stop)
        keep, give = (low, high) if group.rank < partner else (high, low)
        total[keep] += group.exchange(total[give], dst=partner, src=partner)
        steps.append((partner, keep, give))
        start = keep.start
        stop = keep.stop
        distance //= 2
    for partner, keep, give in reversed(steps):  # doubling: an all-gather, the same way back
        total[give] = group.exchange(total[keep], dst=partner, src=partner)
    return total


# The real version takes any number of ranks (fold, unfold) and cuts the array by ranks, so that
# the first half of it is also a reduce-scatter, and the second an all-gather, with the chunks of
# the other algorithms.


class Core(NamedTuple):
    """The Q = 2^k ranks that halve and double, as seen by this rank."""

    # place j of the core is rank firsts[j], which acts for the ranks up to firsts[j+1]
    firsts: Sequence[int]
    place: int  # of this rank, or of the rank that acts for it
    alone: bool  # whether the rank at this place acts for one rank only
    surplus: bool  # whether this rank is outside the core
    steps: int  # log2 Q
    folds: int  # steps of a fold: 1, or 0 if P is a power of two

    def stretch(self, place: int, distance: int) -> tuple[int, int]:
        """Return the ranks (first, last + 1) that the `distance` places around `place` act for; the
        places begin at a multiple of `distance`."""
        start = place - place % distance
        return self.firsts[start], self.firsts[start + distance]


def core_of(call: Call) -> Core:
    """Return the core of this call, after its ranks have agreed (needed for more than two ranks:
    partners are not always neighbours)."""
    if call.size > 2:
        call.agree()
    steps = call.size.bit_length() - 1
    firsts = bounds(call.size, 1 << steps)
    place = bisect_right(firsts, call.rank) - 1
    return Core(
        firsts,
        place,
        firsts[place + 1] - firsts[place] == 1,
        firsts[place] != call.rank,
        steps,
        int(call.size > 1 << steps),
    )


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce by Rabenseifner's algorithm: halve, then double; the result is in `out`.

    Cost:    2 Q log2(Q) + 2(P-Q) messages in all, 2 log2(Q) + 2 one after the other (without the 2
             where P = Q). 2(P-1)*nbytes over all ranks, exactly. No workspace: partial sums are
             kept in `out`.
    Rounding: low precision is added in float32 and rounded once per step, ceil(log2 P) times.
    """
    core = core_of(call)
    cut = bounds(len(x), call.size)
    values = fold(call, core, x, out, op)
    if not core.surplus:
        halve(call, core, values, out, cut, op)
        own = out[_elements(core, core.place, 1, cut)]
        op.finish(own, own)
        double(call, core, out, cut, first_step=core.folds + core.steps)
    unfold(call, core, out, step=1 + 2 * core.steps)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Halve only; a core rank ends with the chunks that it acts for, and sends the second chunk to
    its surplus rank.

    Cost:    Q log2(Q) + 2(P-Q) messages in all; (P-1)*nbytes, and the chunks of the surplus ranks
             once more. Workspace: n elements, on core ranks. One copy of a chunk.
    Rounding: as all_reduce.
    """
    core = core_of(call)
    cut = bounds(len(x), call.size)
    if core.surplus:
        fold(call, core, x, x, op)
        call.recv(call.prev_rank, out)
        return
    partial = call.workspace(len(x), x.dtype)
    values = fold(call, core, x, partial, op)
    halve(call, core, values, partial, cut, op)
    own = partial[cut[call.rank] : cut[call.rank + 1]]
    op.finish(own, out)
    if not core.alone:
        theirs = partial[cut[call.rank + 1] : cut[call.rank + 2]]
        op.finish(theirs, theirs)
        call.send(call.next_rank, theirs, step=1 + core.steps, chunk=call.next_rank)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Double only, with blocks of any length: the blocks that a rank has are always contiguous in
    the result.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   -> r1       -> r0       -> r3       -> r2
    step 1   -> r2       -> r3       -> r0       -> r1

    Each message gives the shape of the joined blocks in it: no rank needs to know where one block
    ends and the next begins.

    Cost:    Q log2(Q) + 2(P-Q) messages in all; (P-1)*(the bytes of all blocks) over all ranks, and
             the blocks of the surplus ranks once more. No copy where all blocks have one length.
    """
    core = core_of(call)
    if core.surplus:
        call.send_block(call.prev_rank, own, step=0)
        return call.recv_block(call.prev_rank, rows.place_whole)
    have = own
    if not core.alone:
        theirs = call.recv_block(call.next_rank, rows.place(call.next_rank))
        have = rows.merge(call.rank, [own, theirs])
    for step in range(core.steps):
        distance = 1 << step
        partner = core.place ^ distance
        first, behind = core.stretch(partner, distance)
        theirs = call.exchange_blocks(
            core.firsts[partner],
            have,
            core.firsts[partner],
            rows.place(first, behind - first),
            step=core.folds + step,
        )
        first, _ = core.stretch(core.place, 2 * distance)
        have = rows.merge(first, [have, theirs] if partner > core.place else [theirs, have])
    whole = rows.complete(have)
    if not core.alone:
        call.send_block(call.next_rank, whole, step=1 + core.steps)
    return whole


def double_whole(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Exchange whole arrays in every step and add them on each rank: the fewest steps, for small
    arrays.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   x -> r1     x -> r0     x -> r3     x -> r2
    step 1   x -> r2     x -> r3     x -> r0     x -> r1

    Two partners add the same two values in the same order, lower rank first, so that all ranks end
    with the same bits.

    Cost:    Q log2(Q) + 2(P-Q) messages in all, log2(Q) + 2 one after the other (without the 2
             where P = Q), each of the whole array. Workspace: n elements; a copy of the array at
             the end if the number of steps is even.
    Rounding: as all_reduce.
    """
    core = core_of(call)
    values = fold(call, core, x, out, op)
    if not core.surplus:
        spare = call.workspace(len(x), x.dtype)
        for step in range(core.steps):
            partner = core.place ^ (1 << step)
            peer = core.firsts[partner]
            target = spare if np.may_share_memory(values, out) else out  # never what is being sent
            call.exchange(
                peer,
                values,
                peer,
                target,
                op.into(values, behind=partner < core.place),
                step=core.folds + step,
            )
            values = target
        op.finish(values, out)
    unfold(call, core, out, step=1 + core.steps)


# ---------------------------------------------------------------------------------------- the parts


def fold(call: Call, core: Core, x: np.ndarray, total: np.ndarray, op: Reduction) -> np.ndarray:
    """Send x from a surplus rank to the rank before it, which writes the sum of both into `total`
    (which may be x).

    Returns: this rank's input to the core: `total`, or x if it acts for itself only.
    """
    if core.surplus:
        call.send(call.prev_rank, x, step=0)
    elif not core.alone:
        call.recv(call.next_rank, total, op.into(x))
        return total
    return x


def unfold(call: Call, core: Core, out: np.ndarray, step: int) -> None:
    """Send the result to each surplus rank."""
    if core.surplus:
        call.recv(call.prev_rank, out)
    elif not core.alone:
        call.send(call.next_rank, out, step=step)


def halve(
    call: Call,
    core: Core,
    values: np.ndarray,
    partial: np.ndarray,
    cut: Sequence[int],
    op: Reduction,
) -> None:
    """Recursive halving: in each step send one half of the remaining chunks, and add the arriving
    half to the other.

    P=4      r0 sends     r1 sends     r2 sends     r3 sends
    step 0   c2:4 -> r2   c2:4 -> r3   c0:2 -> r0   c0:2 -> r1
    step 1   c1:2 -> r1   c0:1 -> r0   c3:4 -> r3   c2:3 -> r2

    Args:    values, partial (n,): this rank's values (only read), and the sums, in the places of
             their chunks; may be the same.
    Cost:    log2(Q) messages per core rank; (Q-1)*nbytes over all ranks, exactly: no copy, no
             allocation.
    """
    for step in range(core.steps):
        distance = 1 << (core.steps - 1 - step)
        partner = core.place ^ distance
        peer = core.firsts[partner]
        give = _elements(core, partner, distance, cut)
        keep = _elements(core, core.place, distance, cut)
        call.exchange(
            peer, values[give], peer, partial[keep], op.into(values[keep]), step=core.folds + step
        )
        values = partial


def double(call: Call, core: Core, sums: np.ndarray, cut: Sequence[int], first_step: int) -> None:
    """Recursive doubling: in each step send all chunks that this rank has, which doubles their
    number.

    P=4      r0 sends     r1 sends     r2 sends     r3 sends
    step 0   c0:1 -> r1   c1:2 -> r0   c2:3 -> r3   c3:4 -> r2
    step 1   c0:2 -> r2   c0:2 -> r3   c2:4 -> r0   c2:4 -> r1

    Args:    sums (n,): holds the chunks that this rank acts for; the rest is received.
    Cost:    log2(Q) messages per core rank; (Q-1)*nbytes over all ranks, exactly; no copy.
    """
    for step in range(core.steps):
        partner = core.place ^ (1 << step)
        peer = core.firsts[partner]
        mine = _elements(core, core.place, 1 << step, cut)
        theirs = _elements(core, partner, 1 << step, cut)
        call.exchange(peer, sums[mine], peer, sums[theirs], step=first_step + step)


def _elements(core: Core, place: int, distance: int, cut: Sequence[int]) -> slice:
    """Return the slice of the array with the chunks that the `distance` places around `place` act
    for."""
    first, behind = core.stretch(place, distance)
    return slice(cut[first], cut[behind])
