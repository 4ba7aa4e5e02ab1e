"""Pairwise: in each step every rank sends to a different rank, and no step waits for the previous
one.

Where all links are equally fast (a switch, shared memory) an all-reduce needs no ring: rank r
receives chunk r from every other rank, adds, and sends the sum to every other rank. This takes the
ring's bytes and number of messages, but only two messages wait for each other. If there are more
ranks than cores, this is what counts: each wait is a switch to another process.

notes: N4 §3 全连接网络, All-to-All (N4:173, 192).    Source: Thakur, Rabenseifner & Gropp 2005 (pairwise
                                                 exchange).
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.buffers import PlaceOf
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction, add_from
from minidist.comm.chunks import split
from minidist.comm.collectives.blocking import BlockingGroup


def plain_all_to_all(group: BlockingGroup, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Exchange parts with one partner per step; part d is for rank d. Return the parts for this
    rank, by source."""
    received = list(parts)  # the own part stays where it is
    for step in range(1, group.size):
        dst = (group.rank + step) % group.size
        src = (group.rank - step) % group.size
        received[src] = group.exchange(parts[dst], dst=dst, src=src)
    return received


def plain_all_reduce(group: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over the ranks: each rank adds one chunk for all, and sends the sum
    to every rank."""
    own = np.sum(plain_all_to_all(group, np.array_split(x, group.size)), axis=0)
    return np.concatenate(plain_all_to_all(group, [own] * group.size))


# The real versions start all exchanges at once: no step waits for the previous one, which is the
# purpose of this family. Arriving chunks are added in the same order in every run.


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Send part d to rank d and return the parts for this rank, by source. Step s: send to the rank
    s+1 places on, receive from the rank s+1 places back. All steps start at once, in this order.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   p01 -> r1   p12 -> r2   p20 -> r0
    step 1   p02 -> r2   p10 -> r0   p21 -> r1

    Cost:    P-1 messages per rank; every part once, except those that stay; no copy.
    """
    receiving = {
        src: call.start_recv_block(src, place(src), like=parts[src])
        for src in reversed(call.others)
    }
    sent = [
        call.start_send(dst, parts[dst], block=True, step=step, chunk=dst)
        for step, dst in enumerate(call.others)
    ]
    received = {call.rank: parts[call.rank]}
    for src, (handle, arrived) in receiving.items():
        handle.wait()
        received[src] = arrived[0]
    call.wait(sent)
    return [received[src] for src in range(call.size)]


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Send chunk r to every other rank r; add the arriving chunks to the own one, nearest
    predecessor first.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c1 -> r1    c2 -> r2    c0 -> r0
    step 1   c2 -> r2    c0 -> r0    c1 -> r1

    Cost:    P-1 messages per rank; (P-1)*nbytes over all ranks, exactly. Added straight from the
             receive buffer; workspace: one float32 chunk in low precision, which is rounded once.
    """
    chunks = split(x, call.size)
    sent = [
        call.start_send(dst, chunks[dst], step=step, chunk=dst)
        for step, dst in enumerate(call.others)
    ]
    total = add_from(call, reversed(call.others), chunks[call.rank], out, op)
    call.wait(sent)
    op.finish(total, out)


def tell_all(call: Call, chunks: Sequence[np.ndarray], first_step: int = 0) -> None:
    """Send this rank's finished chunk to every other rank, and receive theirs.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c0 -> r1    c1 -> r2    c2 -> r0
    step 1   c0 -> r2    c1 -> r0    c2 -> r1

    Args:    chunks: P arrays; chunk `rank` holds its values, the others are received.
    Cost:    P-1 messages per rank; (P-1)*nbytes over all ranks, exactly; no copy.
    """
    received = [call.start_recv(src, chunks[src]) for src in reversed(call.others)]
    sent = [
        call.start_send(dst, chunks[call.rank], step=first_step + step, chunk=call.rank)
        for step, dst in enumerate(call.others)
    ]
    call.wait(received + sent)


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce-scatter, then send this rank's sum to every other rank; the result is in `out`.

    Cost:    2(P-1) messages per rank; 2(P-1)*nbytes over all ranks, exactly. Workspace: as
             reduce_scatter.
    Rounding: low precision is added in float32 and rounded once.
    """
    sums = split(out, call.size)
    reduce_scatter(call, x, sums[call.rank], op)
    tell_all(call, sums, first_step=call.size - 1)
