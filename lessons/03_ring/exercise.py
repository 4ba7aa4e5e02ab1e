"""Exercise 03: write the ring all-reduce.

Copy this file (`minidist lesson 03 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 03 DIR/exercise_03.py`. Each rank runs these functions with a `group` of
its own:

    group.rank, group.size                           this rank's number, and how many ranks there
                                                     are
    group.exchange(outgoing, dst=, src=) -> array    send to dst and receive from src, both at once
    group.send(outgoing, dst=)                       return when dst has taken it
    group.recv(src=) -> array                        return when src has sent it

The messages have no buffer: a send waits until the other side receives.
"""

import numpy as np

from minidist.grading import hole


def plain_reduce_scatter(group, chunks):
    """Add the ranks' chunks, one for each rank, in place; at the end chunks[rank] is the sum over
    all ranks.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   c2 -> r1    c0 -> r2    c1 -> r0
    step 1   c1 -> r1    c2 -> r2    c0 -> r0

    Args:    chunks: a list of group.size one-dimensional arrays, near-equal in length (some may be
             empty); overwritten.
    Cost:    size - 1 messages per rank, each one chunk, each to next_rank.
    """
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    for step in range(group.size - 1):
        outgoing = hole(
            1, "which chunk (an index) does this rank send in this step? (section 3.1)", step
        )
        incoming = hole(
            2, "which chunk arrives from the previous rank in this step? (section 3.1)", step
        )
        chunks[incoming] += hole(
            3,
            "send chunks[outgoing] to the next rank and take what the previous one sends "
            "(section 3.4)",
            outgoing,
            next_rank,
            prev_rank,
        )


def plain_all_gather(group, chunks):
    """Send the finished chunks around the ring, in place; at first only chunks[rank] is finished, at
    the end all are.

    Args:    chunks: as plain_reduce_scatter leaves them: chunks[group.rank] is finished, the others
             are leftovers.
    Cost:    size - 1 messages per rank, each one chunk, each to next_rank.
    """
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    for step in range(
        hole(4, "how many steps until the last rank has the last chunk? (section 3.2)")
    ):
        outgoing = hole(
            5, "which finished chunk does this rank pass on in this step? (section 3.2)", step
        )
        incoming = hole(6, "which finished chunk arrives in this step? (section 3.2)", step)
        chunks[incoming] = group.exchange(chunks[outgoing], dst=next_rank, src=prev_rank)


def plain_all_reduce(group, x):
    """Return the sum of x (n,) over the ranks, on every rank: reduce-scatter, then all-gather."""
    chunks = np.array_split(x.copy(), group.size)
    plain_reduce_scatter(group, chunks)
    plain_all_gather(group, chunks)
    return np.concatenate(chunks)
