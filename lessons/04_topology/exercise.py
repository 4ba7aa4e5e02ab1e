"""Exercise 04: hops, bisection, a hierarchical all-reduce, and what it takes; α and β out of
measurements.

Copy this file (`minidist lesson 04 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 04 DIR/exercise_04.py`. `nodes` are the machines of all ranks, a number
each: equal where ranks share one, as in (0, 1, 0, 1). In plain_all_reduce groups are those of
lessons 02 and 03, whose functions are at hand:

    node.rank, node.size                          this rank's number in the group, and how many it
                                                  has
    tree.plain_reduce(node, x, root=0)            the group's sum of x, on rank 0 of it; elsewhere a
                                                  part of the sum
    tree.plain_broadcast(node, x, root=0)         rank 0's x, on every rank of the group
    ring.plain_all_reduce(node, x)                the group's sum of x, on every rank of it

All ranks of a group must call the same. No link has a buffer: a send waits until the other side
receives.
"""

import numpy as np

from minidist.comm.collectives import ring, tree
from minidist.grading import hole


def ring_hops(a, b, size):
    """Return the number of links between devices a and b on a ring of `size` devices that carries
    messages in both directions."""
    return hole(1, "the shorter of the two ways round (section 1)", a, b, size)


def cut(links, half):
    """Return how many links join the devices in `half` with the others.

    Args:    links: pairs (a, b), each link once. half: a set of devices.
    """
    return hole(
        2, "count the links with one end in half and one end out of it (section 1)", links, half
    )


def machine(rank, nodes):
    """Return the ranks on the same machine as `rank`, itself included, in order.

    The ranks of a machine need not be consecutive, and machines may have different numbers of
    ranks.
    """
    return hole(3, "all ranks with this rank's node (section 4)", rank, nodes)


def leaders(nodes):
    """Return the first rank of each machine, in order."""
    return hole(4, "the first rank of each node (section 4)", nodes)


def plain_all_reduce(node, leaders, x):
    """Return the sum of x over all ranks; only leaders send between machines.

    P=4, two machines of two    r1 -> r0, r3 -> r2      then r0 and r2 all-reduce      then r0 -> r1, r2 -> r3

    Args:    node: the group of this machine's ranks; its rank 0 is the leader. leaders: the group of
             leaders; None on any other rank.
    """
    total = tree.plain_reduce(node, x, root=0)
    if leaders is not None:
        total = hole(
            5, "the sum of what the leaders have, by the ring (section 4)", ring, leaders, total
        )
    result = hole(
        6,
        "what does a machine get to know, and from which of its ranks? (section 4)",
        tree,
        node,
        total,
    )
    assert result is not None, "every rank is told"
    return result


def ring_seconds(size, nbytes, alpha, beta):
    """Return the seconds of a flat ring over `size` ranks; the slow link sets the pace of every
    step: α seconds per message, β per byte."""
    return hole(7, "2(P-1) steps of one chunk (section 4)")


def hierarchical_seconds(machines, nbytes, alpha, beta):
    """Return the seconds of the leaders' ring, the part of a hierarchical all-reduce that uses the
    slow link."""
    return hole(8, "the same ring, of leaders (section 4)")


def fit(sizes, seconds):
    """Return (alpha, beta) of the straight line through measured times: seconds = alpha + beta *
    sizes.

    Args:    sizes, seconds: arrays of one length. np.polyfit(x, y, 1) gives slope and intercept, in
             this order.
    """
    return hole(9, "which of the two is the latency? (section 5)", np.polyfit(sizes, seconds, 1))
