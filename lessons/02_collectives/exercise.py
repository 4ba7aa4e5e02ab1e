"""Exercise 02: write a broadcast, an all-to-all, a barrier, and the rule that chooses an algorithm.

Copy this file (`minidist lesson 02 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 02 DIR/exercise_02.py`. Each rank runs these functions with a `group` of
its own:

    group.rank, group.size                            this rank's number, and how many ranks there
                                                      are
    group.send(outgoing, dst=)                       return when dst has taken it
    group.recv(src=) -> array                        return when src has sent it
    group.exchange(outgoing, dst=, src=) -> array    send to dst and receive from src, both at once

The messages have no buffer: a send waits until the other side receives.
"""

import numpy as np

from minidist.grading import hole


def plain_broadcast(group, x, root):
    """Broadcast the root's array: in each step every rank that has it sends it on, so that twice as
    many ranks have it.

    Places count from the root: the root has place 0, the rank after it place 1, ... In each step
    each rank that has the array sends it to the rank whose place is `distance` larger.

    P=5, root 0   distance 1: r0 -> r1      distance 2: r0 -> r2, r1 -> r3      distance 4: r0 -> r4

    Args:    x: the root's array is sent; the arrays of other ranks are not used.
    Cost:    size - 1 messages in all, ceil(log2 size) one after the other.
    """
    place = hole(1, "this rank's place, counted from the root (section 2.2)")
    distance = 1
    while distance < group.size:
        if place < distance and hole(
            2, "is there a place `distance` further on? (section 2.2)", place, distance
        ):
            group.send(
                x, dst=hole(3, "which rank is at that place? (section 2.2)", place, distance)
            )
        elif distance <= place < 2 * distance:
            x = group.recv(
                src=hole(4, "which rank sends to this one? (section 2.2)", place, distance)
            )
        distance *= 2
    return x


def plain_all_to_all(group, parts):
    """Exchange parts with one partner per step; part d is for rank d. Return the parts for this
    rank, by source.

    P=3      r0 sends    r1 sends    r2 sends
    step 1   p01 -> r1   p12 -> r2   p20 -> r0
    step 2   p02 -> r2   p10 -> r0   p21 -> r1

    Args:    parts: one array for each rank.
    Cost:    size - 1 messages per rank; each part once.
    """
    received = list(parts)  # the own part stays where it is
    for step in range(1, group.size):
        dst = hole(5, "to which rank does this one send in this step? (section 2.5)", step)
        src = hole(6, "and from which rank does this one receive? (section 2.5)", step)
        received[src] = group.exchange(parts[dst], dst=dst, src=src)
    return received


def barrier(group):
    """Return when every rank has called it, by dissemination: each step sends to one rank and
    receives from another, at twice the distance of the step before.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   -> r1       -> r2       -> r3       -> r0
    step 1   -> r2       -> r3       -> r0       -> r1

    Cost:    ceil(log2 size) messages per rank, without payload.
    """
    nothing = np.empty(0)
    distance = 1
    while hole(
        7, "while may there be a rank that this rank knows nothing of yet? (section 2.6)", distance
    ):
        group.exchange(
            nothing,
            dst=(group.rank + distance) % group.size,
            src=(group.rank - distance) % group.size,
        )
        distance = hole(8, "how far does the next message go? (section 2.6)", distance)


def seconds(algorithm, size, nbytes, alpha, beta):
    """Return the seconds of an all-reduce by the α-β model: α for each message that waits for an
    earlier one, β for each byte.

    Args:    algorithm: "tree" or "ring". nbytes: of each rank's array. alpha: seconds per message;
             beta: seconds per byte.
    """
    if algorithm == "tree":
        levels = (size - 1).bit_length()  # ceil(log2 size)
        return hole(9, "down and up the tree, each message the whole array (section 3)", levels)
    return hole(10, "twice around the ring, each message one chunk (section 3)")
