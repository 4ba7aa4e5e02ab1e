"""Ring: every rank exchanges messages with its two neighbours only, all links are busy at once, and
each carries the minimum of bytes.

An all-reduce is a reduce-scatter, after which rank r holds the sum of chunk r, and then an
all-gather of those sums:

    P=3            r0                  r1                  r2
    start          a0 a1 a2            b0 b1 b2            c0 c1 c2
    reduce-scatter sum0                sum1                sum2             2 steps of n/3 elements
    all-gather     sum0 sum1 sum2      sum0 sum1 sum2      sum0 sum1 sum2   2 steps of n/3 elements

Each rank sends 2(P-1)/P of the array, less than twice the array at any P: so the ring scales.

notes: N1 Ring AllReduce, N4 §2.    Source: Patarasuk & Yuan 2009.
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.buffers import Place, PlaceOf, Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds, split
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.collectives.tree import halved
from minidist.comm.handle import Handle
from minidist.comm.limits import STRETCH_BYTES


def plain_reduce_scatter(group: BlockingGroup, chunks: list[np.ndarray]) -> None:
    """Add the ranks' chunks, one for each rank, in place; in the end chunks[rank] is the sum over
    all ranks."""
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    for step in range(group.size - 1):
        # first the chunk before the own one, then one lower a step
        outgoing = (group.rank - step - 1) % group.size
        # it leaves in the next step, with this rank's part in it
        incoming = (group.rank - step - 2) % group.size
        chunks[incoming] += group.exchange(chunks[outgoing], dst=next_rank, src=prev_rank)


def plain_all_gather(group: BlockingGroup, chunks: list[np.ndarray]) -> None:
    """Pass the finished chunks round, in place; chunks[rank] is finished, in the end all are."""
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    for step in range(group.size - 1):
        outgoing = (group.rank - step) % group.size  # first its own, then what arrived last
        incoming = (group.rank - step - 1) % group.size
        chunks[incoming] = group.exchange(chunks[outgoing], dst=next_rank, src=prev_rank)


def plain_all_reduce(group: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over the ranks, on every rank: reduce-scatter, then all-gather."""
    chunks = np.array_split(x.copy(), group.size)
    plain_reduce_scatter(group, chunks)
    plain_all_gather(group, chunks)
    return np.concatenate(chunks)


# The real ring below sends the same chunks in the same steps. It is also fast and general: an
# arriving chunk is added straight from the receive buffer, so no step copies or allocates; a long
# array is sent in stretches that fit in the processors' caches; blocks may have any length; other
# operations than the sum; and a broadcast.


def reduce_around(
    call: Call,
    chunks: Sequence[np.ndarray],
    partials: Sequence[np.ndarray],
    op: Reduction,
    first_step: int = 0,
) -> None:
    """Run the first half of the ring: each rank adds its own chunk to the arriving partial sum and
    passes the result on.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c2 -> r1    c0 -> r2    c1 -> r0
    step 1   c1 -> r1    c2 -> r2    c0 -> r0

    Args:    chunks    this rank's values, cut in P; only read.
             partials  P arrays: partials[c] takes the sum of chunk c up to this rank;
                       partials[rank] is the result, partials[prev_rank] is not used. The same array
                       may be used again two steps later, and may be the chunk that is added (in
                       place).
    Cost:    P-1 messages per rank; (P-1)*nbytes over all ranks, exactly. Each arriving chunk is
             added straight from the receive buffer to this rank's own and written once: no copy, no
             allocation.
    """
    outgoing = chunks[call.prev_rank]
    for step in range(call.size - 1):
        incoming = (call.rank - 2 - step) % call.size
        own = chunks[incoming]
        partial = partials[incoming][: len(own)]
        call.exchange(
            call.next_rank,
            outgoing,
            call.prev_rank,
            partial,
            op.into(own),
            step=first_step + step,
            chunk=(incoming + 1) % call.size,
        )
        outgoing = partial


def gather_around(call: Call, chunks: Sequence[np.ndarray], first_step: int = 0) -> None:
    """Run the second half of the ring: pass the finished chunks once around.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c0 -> r1    c1 -> r2    c2 -> r0
    step 1   c2 -> r1    c0 -> r2    c1 -> r0

    Args:    chunks: P arrays; chunk `rank` holds its values, the others are received.
    Cost:    P-1 messages per rank; (P-1)*nbytes over all ranks, exactly; no copy.
    """
    for step in range(call.size - 1):
        outgoing = (call.rank - step) % call.size
        call.exchange(
            call.next_rank,
            chunks[outgoing],
            call.prev_rank,
            chunks[outgoing - 1],
            step=first_step + step,
            chunk=outgoing,
        )


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce-scatter, then all-gather, in `out`; a long array is processed in stretches that fit in
    the caches.

    Cost:    2(P-1) messages per rank for each stretch of at most 4 MiB; 2(P-1)*nbytes over all
             ranks, exactly, also where P does not divide n. No workspace: partial sums are kept in
             `out`.
    Rounding: low precision is added in float32 and rounded once per hop, P-1 times in all.
    """
    length = STRETCH_BYTES // x.itemsize
    for number, start in enumerate(range(0, max(len(x), 1), length)):
        sums = split(out[start : start + length], call.size)
        step = 2 * number * (call.size - 1)
        chunks = split(x[start : start + length], call.size)
        reduce_around(call, chunks, sums, op, first_step=step)
        if op.op == "mean":
            op.finish(sums[call.rank], sums[call.rank])
        gather_around(call, sums, first_step=step + call.size - 1)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Run only the first half: rank r gets the reduced chunk r of the flattened array.

    Cost:    P-1 messages per rank; (P-1)*nbytes over all ranks, exactly. Workspace: two chunks
             (one at P = 3, none at P = 2).
    """
    reduce_chunks(call, split(x, call.size), out, op)
    if op.op == "mean":
        op.finish(out, out)


def reduce_chunks(call: Call, chunks: Sequence[np.ndarray], out: np.ndarray, op: Reduction) -> None:
    """Run reduce_around for P >= 2 chunks of any lengths; keep only the sum of chunk `rank`, in
    `out`."""
    spare = [call.workspace(max(map(len, chunks)), out.dtype) for _ in range(min(2, call.size - 2))]
    partials = [out] * call.size
    for step in range(call.size - 2):
        partials[(call.rank - 2 - step) % call.size] = spare[step % 2]
    reduce_around(call, chunks, partials, op)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Run only the second half, with blocks of any length: each header gives the block's shape.

    Cost:    P-1 messages per rank; (P-1)*(the bytes of all blocks) over all ranks, exactly.
    """
    return rows.join(gather_blocks(call, own, rows.place))


def gather_blocks(call: Call, own: np.ndarray, place: PlaceOf) -> list[np.ndarray]:
    """Run gather_around for blocks of any length; return all blocks, in rank order."""
    blocks = {call.rank: own}
    for step in range(call.size - 1):
        outgoing = (call.rank - step) % call.size
        incoming = (outgoing - 1) % call.size
        blocks[incoming] = call.exchange_blocks(
            call.next_rank,
            blocks[outgoing],
            call.prev_rank,
            place(incoming),
            step=step,
            chunk=outgoing,
        )
    return [blocks[rank] for rank in range(call.size)]


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Scatter along the tree, then pass the chunks around the ring: no link carries much more than
    the array once.

    P=4, root 0   step 0   r0 -> r2, r0 -> r2      step 1   r0 -> r1, r0 -> r1, r2 -> r3, r2 -> r3      and the ring

    The tree without the ring would send the whole array log2(P) times, one after the other. In the
    tree a rank receives two messages: one without bytes, whose shape is the array's shape followed
    by a 0, and the chunks of the ranks that it passes on to. In the ring no rank sends to the root,
    which has all chunks.

    Cost:    Messages: 2(P-1) along the tree, (P-1)^2 around the ring; 2 ceil(log2 P) + P-1 are one
             after the other. Bytes: along the tree each chunk once per level of its rank's depth;
             around the ring (P-1)*nbytes, less the chunks that the root does not receive: nbytes
             less its own. No workspace, no copy.
    Source:  Barnett, Shuler, van de Geijn et al. 1994.
    """
    call.agree()
    me, parent, children = halved(call.rank, root, call.size)
    if parent is not None:
        announced = call.recv_block(parent, np.empty)
        x = place(announced.shape[:-1], announced.dtype)
    assert x is not None, "the root has the array"
    flat = x.reshape(-1)
    cut = bounds(len(flat), call.size)
    if parent is not None:
        call.recv(parent, flat[cut[me.first] : cut[me.behind]])
    sent: list[Handle] = []
    for child in children:
        sent += [
            call.start_send_block(child.rank, np.empty((*x.shape, 0), x.dtype), step=child.cut - 1),
            call.start_send(
                child.rank, flat[cut[child.first] : cut[child.behind]], step=child.cut - 1
            ),
        ]
    call.wait(sent)
    _pass_around_from(call, root, split(flat, call.size), first_step=(call.size - 1).bit_length())
    return x


def _pass_around_from(call: Call, root: int, chunks: Sequence[np.ndarray], first_step: int) -> None:
    """Run gather_around without messages to the root, which has all chunks."""
    for step in range(call.size - 1):
        outgoing = (call.rank - step) % call.size
        handles = (
            [] if call.rank == root else [call.start_recv(call.prev_rank, chunks[outgoing - 1])]
        )
        if call.next_rank != root:
            handles.append(
                call.start_send(
                    call.next_rank, chunks[outgoing], step=first_step + step, chunk=outgoing
                )
            )
        call.wait(handles)
