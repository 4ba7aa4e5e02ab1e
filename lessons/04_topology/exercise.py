"""Exercise 04: hops, bisection, a hierarchical all-reduce, and what it takes; α and β out of measurements.

Copy this file (`minidist lesson 04 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 04 DIR/exercise_04.py`. In all_reduce each rank has a `link` of its own:

    link.rank, link.size                     this rank's number, and how many ranks there are
    link.nodes                               the machine of each rank, a number each: equal where they share one
    link.send(outgoing, dst=)                return when dst has taken it
    link.recv(src=) -> array                 return when src has sent it
    link.ring_all_reduce(ranks, x) -> array  the sum over `ranks` only (lesson 03); each of them must call it

The link has no buffer: a send waits until the other side receives.
"""

import numpy as np

from minidist.grading import hole


def ring_hops(a, b, size):
    """Links between device a and device b on a ring of `size` devices, which carries messages both ways round."""
    return hole(1, "the shorter of the two ways round (section 1)", a, b, size)


def cut(links, half):
    """How many links join the devices in `half` with the others.

    Args:    links: pairs (a, b), each link once. half: a set of devices.
    """
    return hole(2, "count the links with one end in half and one end out of it (section 1)", links, half)


def all_reduce(link, x):
    """The sum of x over all ranks, on every rank; between machines only leaders talk.

    A leader is the first rank of its machine. Machines need not hold ranks that follow each other: nodes may be
    (0, 1, 0, 1). They need not hold equally many.

    P=4, two machines of two    r1 -> r0, r3 -> r2      then r0 and r2 all-reduce      then r0 -> r1, r2 -> r3
    """
    leader = hole(3, "the first rank that shares this rank's machine (section 4)")
    if link.rank != leader:
        link.send(x, dst=leader)
        return link.recv(src=leader)
    followers = hole(4, "the other ranks of this machine (section 4)")
    total = x.copy()
    for src in followers:
        total += link.recv(src=src)
    total = link.ring_all_reduce(hole(5, "the ranks that lead a machine, in order (section 4)"), total)
    for dst in hole(6, "which ranks does this leader tell? (section 4)", followers):
        link.send(total, dst=dst)
    return total


def ring_seconds(size, nbytes, alpha, beta):
    """A flat ring over `size` ranks, every step at the pace of the slow link: α seconds a message, β a byte."""
    return hole(7, "2(P-1) steps of one chunk (section 4)")


def hierarchical_seconds(machines, nbytes, alpha, beta):
    """The ring of the leaders alone, which is what the slow link sees of a hierarchical all-reduce."""
    return hole(8, "the same ring, of leaders (section 4)")


def fit(sizes, seconds):
    """(alpha, beta) of the straight line through measured times: seconds = alpha + beta * sizes.

    Args:    sizes, seconds: arrays of one length. np.polyfit(x, y, 1) gives slope and intercept, in this order.
    """
    return hole(9, "which of the two is the latency? (section 5)", np.polyfit(sizes, seconds, 1))
