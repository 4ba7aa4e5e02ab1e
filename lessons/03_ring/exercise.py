"""Exercise 03: write the ring all-reduce.

Copy this file (`minidist lesson 03 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 03 DIR/exercise_03.py`. Each rank runs these functions with a `link` of its own:

    link.rank, link.size                            this rank's number, and how many ranks there are
    link.next_rank, link.prev_rank                  this rank's neighbours on the ring
    link.exchange(outgoing, dst=, src=) -> array    send to dst and receive from src, both at once
    link.send(outgoing, dst=)                       return when dst has taken it
    link.recv(src=) -> array                        return when src has sent it

The link has no buffer: a send waits until the other side receives.
"""

import numpy as np

from minidist.grading import hole


def reduce_scatter(link, chunks):
    """Sum `chunks` around the ring; afterwards chunks[link.rank] holds the sum over all ranks.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c2 -> r1    c0 -> r2    c1 -> r0
    step 1   c1 -> r1    c2 -> r2    c0 -> r0

    Args:    chunks: a list of link.size one-dimensional arrays, near-equal in length (some may be empty); overwritten.
    Cost:    size - 1 messages a rank, each one chunk, each to link.next_rank.
    """
    for step in range(link.size - 1):
        outgoing = hole(1, "which chunk (an index) does this rank send in this step? (section 3.1)", step)
        incoming = hole(2, "which chunk arrives from the previous rank in this step? (section 3.1)", step)
        arrived = hole(3, "send chunks[outgoing] to the next rank and take what the previous one sends (section 3.4)",
                       outgoing)
        chunks[incoming] += arrived


def all_gather(link, chunks):
    """Hand the finished chunks round; afterwards every rank holds all of them.

    Args:    chunks: as reduce_scatter leaves them: chunks[link.rank] is finished, the others are leftovers.
    Cost:    size - 1 messages a rank, each one chunk, each to link.next_rank.
    """
    for step in range(hole(4, "how many steps until the last rank has the last chunk? (section 3.2)")):
        outgoing = hole(5, "which finished chunk does this rank pass on in this step? (section 3.2)", step)
        incoming = hole(6, "which finished chunk arrives in this step? (section 3.2)", step)
        chunks[incoming][...] = link.exchange(chunks[outgoing], dst=link.next_rank, src=link.prev_rank)


def all_reduce(link, x):
    """The sum of x over all ranks, on every rank: the two halves, one after the other."""
    chunks = np.array_split(x.copy(), link.size)
    reduce_scatter(link, chunks)
    all_gather(link, chunks)
    return np.concatenate(chunks)
