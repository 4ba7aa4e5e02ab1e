"""Hierarchical: first inside each node, then between one leader per node, then inside again.

Links between machines are slower than links within one. A flat ring ignores this: with 4 ranks on
each of 2 nodes, all its 14 steps have the speed of the slow link. Here only leaders use it:

    node 0: r0 r1 r2    node 1: r3 r4         leaders: r0, r3

    all-reduce     r1, r2 -> r0    r4 -> r3       each node reduces to its leader, along a tree
                   r0 <-> r3                      the leaders' all-reduce, around their ring
                   r0 -> r1, r2    r3 -> r4       each leader broadcasts in its node, along a tree

The leader is the first rank of its node, or the root in a verb with a root. `group.nodes` says
which ranks share a node; it is known since the job started. Nodes may differ in size, and need not
hold consecutive ranks. In the costs M is the number of nodes.

notes: N4 §1, §3, N2 §11.3
"""

from typing import NamedTuple

import numpy as np

from minidist.comm.calls.buffers import Place, Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction, add_from
from minidist.comm.chunks import split
from minidist.comm.collectives import ring, tree
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.collectives.subset_call import SubsetCall


def plain_all_reduce(
    node: BlockingGroup, leaders: BlockingGroup | None, x: np.ndarray
) -> np.ndarray:
    """Return the sum of x over all ranks; `node`: the ranks of this machine, `leaders`: the
    machines' first ranks, None on other ranks."""
    total = tree.plain_reduce(node, x, root=0)  # inside
    if leaders is not None:
        total = ring.plain_all_reduce(leaders, total)  # between machines: one rank of each
    result = tree.plain_broadcast(node, total, root=0)  # inside
    assert result is not None, "every rank is told"
    return result


# The real version finds nodes and leaders itself (`levels`), from `group.nodes`, and needs no
# groups: a SubsetCall renumbers some ranks of the call. It divides a mean once, at the end.


class Levels(NamedTuple):
    """The nodes of a call, as one rank sees them."""

    nodes: list[list[int]]  # the ranks of each node; nodes in the order of their first ranks
    leaders: list[int]  # the leader of each node
    mine: int  # which node this rank is on
    inside: SubsetCall  # this rank's node as a call
    leader: int  # of this rank's node
    root: int  # the leader by its rank in `inside`


def levels(call: Call, root: int | None = None) -> Levels:
    """Return nodes and leaders of a call, after its ranks have agreed; `root` leads its own
    node."""
    call.agree()
    numbers = list(dict.fromkeys(call.nodes))
    nodes = [
        [rank for rank in range(call.size) if call.nodes[rank] == number] for number in numbers
    ]
    leaders = [root if root is not None and root in node else node[0] for node in nodes]
    mine = numbers.index(call.nodes[call.rank])
    leader = leaders[mine]
    return Levels(
        nodes, leaders, mine, SubsetCall(call, nodes[mine]), leader, nodes[mine].index(leader)
    )


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to the leader along a tree, all-reduce around the leaders' ring, broadcast in the node
    along a tree.

    P=4, two nodes of two     step 0   r1 -> r0, r3 -> r2              x, inside
                              step 1   r0 -> r2, r2 -> r0              half of the node's sum, between: reduce-scatter
                              step 2   r0 -> r2, r2 -> r0              half of the sum, between: all-gather
                              step 3   r0 -> r1, r2 -> r3              the sum, inside

    Cost:    2(P-M) messages inside nodes, 2M(M-1) between leaders for each stretch of at most 4 MiB
             (ring.py); 2(P-1)*nbytes over all ranks, exactly: 2(M-1)*nbytes between nodes, the rest
             inside. No workspace on leaders, n elements on ranks with both parent and children.
    Rounding: low precision is added in float32 and rounded once per rank in the tree, once per hop
    in the ring.
    """
    here = levels(call)
    leads = call.rank == here.leader
    tree.reduce(here.inside, x, out if leads else None, _undivided(op), here.root)
    if leads:
        ring.all_reduce(SubsetCall(call, here.leaders), out, out, op)
    tree.broadcast(here.inside, out if leads else None, lambda shape, dtype: out, here.root)


def reduce(call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int) -> None:
    """Reduce to the leader along a tree, then to the root along a tree of leaders.

    P=4, two nodes of two, root 1     step 0   r0 -> r1, r3 -> r2      step 1   r2 -> r1

    Cost:    P-1 messages; (P-1)*nbytes: (M-1)*nbytes between nodes, the rest inside. Workspace: n
             elements on leaders.
    Rounding: low precision is added in float32 and rounded once per rank.
    """
    here = levels(call, root)
    partial = _node_sum(call, here, x, op)
    if partial is not None:
        tree.reduce(SubsetCall(call, here.leaders), partial, out, op, here.leaders.index(root))


def broadcast(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    """Send the array along a tree of leaders, then along a tree in each node.

    P=4, two nodes of two, root 1     step 0   r1 -> r2                step 1   r1 -> r0, r2 -> r3

    Cost:    P-1 messages; (P-1)*nbytes: (M-1)*nbytes between nodes, the rest inside.
    """
    here = levels(call, root)
    if call.rank == here.leader:
        x = tree.broadcast(SubsetCall(call, here.leaders), x, place, here.leaders.index(root))
    return tree.broadcast(here.inside, x if call.rank == here.leader else None, place, here.root)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce to the leader; each leader sends every other leader the chunks of that leader's node,
    then sends each rank of its node its chunk.

    P=4, two nodes of two     step 0   r1 -> r0, r3 -> r2              x, inside
                              step 1   r0 -> r2: c2 c3, r2 -> r0: c0 c1    of the node's sum, between
                              step 2   r0 -> r1: c1, r2 -> r3: c3      of the sum, inside

    Cost:    P-M messages to leaders, P(M-1) between them, P-M from them; (P-1)*nbytes over all
             ranks ((M-1)*nbytes between nodes, the rest inside), and from the leaders the chunks of
             all other ranks. Workspace: n elements on leaders.
    Rounding: low precision is added in float32 and rounded once a rank in the tree, once between
    leaders.
    """
    here = levels(call)
    partial = _node_sum(call, here, x, op)
    if partial is None:
        call.recv(here.leader, out)
        return
    chunks = split(partial, call.size)
    others = [(here.mine + step) % len(here.nodes) for step in range(1, len(here.nodes))]
    sent = [
        call.start_send(here.leaders[other], chunks[rank], chunk=rank)
        for other in others
        for rank in here.nodes[other]
    ]
    for rank in here.nodes[here.mine]:
        target = out if rank == call.rank else chunks[rank]
        total = add_from(
            call, [here.leaders[other] for other in reversed(others)], chunks[rank], target, op
        )
        op.finish(total, target)
        if rank != call.rank:
            sent.append(call.start_send(rank, target, chunk=rank))
    call.wait(sent)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Gather to the leader; pass each node's blocks around the leaders' ring; broadcast all blocks
    in the node.

    P=4, two nodes of two     step 0   r1 -> r0: b1, r3 -> r2: b3          inside
                              step 1   r0 -> r2: b0 b1, r2 -> r0: b2 b3    between
                              step 2   r0 -> r1, r2 -> r3                  all blocks, inside

    Cost:    P-M messages to leaders, P(M-1) between them (one per block), P-M with the whole along
             trees. Bytes: the blocks of all but the leaders, M-1 times all blocks (between
             nodes), and P-M times all blocks.
    """
    here = levels(call)
    if call.rank != here.leader:
        call.send_block(here.leader, own, chunk=call.rank)
        return tree.broadcast(here.inside, None, rows.place_whole, here.root)
    blocks = {call.rank: own}
    for src in here.nodes[here.mine]:
        if src != call.rank:
            blocks[src] = call.recv_block(src, rows.place(src))
    across = SubsetCall(call, here.leaders)
    for step in range(len(here.nodes) - 1):
        outgoing = (here.mine - step) % len(here.nodes)
        sent = [
            across.start_send_block(across.next_rank, blocks[rank], chunk=rank)
            for rank in here.nodes[outgoing]
        ]
        for rank in here.nodes[outgoing - 1]:
            blocks[rank] = across.recv_block(across.prev_rank, rows.place(rank))
        call.wait(sent)
    return tree.broadcast(
        here.inside,
        rows.join([blocks[rank] for rank in range(call.size)]),
        rows.place_whole,
        here.root,
    )


def _node_sum(call: Call, here: Levels, x: np.ndarray, op: Reduction) -> np.ndarray | None:
    """Return the sum of the node at its leader (x itself if it is the node's only rank), elsewhere
    None."""
    leads = call.rank == here.leader
    if leads and here.inside.size == 1:
        return x
    partial = call.workspace(len(x), x.dtype) if leads else None
    tree.reduce(here.inside, x, partial, _undivided(op), here.root)
    return partial


def _undivided(op: Reduction) -> Reduction:
    """Return the reduction with a mean as a sum: the mean is divided once, at the end."""
    return op._replace(op="sum") if op.op == "mean" else op
