"""Pairwise: in each step every rank talks to one other, another one each step.

notes: N3 §1 (all-to-all)
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.arrays import PlaceOf
from minidist.comm.call import Call


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Step s: send to the rank s+1 places on, receive from the rank s+1 places back.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   p01 -> r1   p12 -> r2   p20 -> r0
    step 1   p02 -> r2   p10 -> r0   p21 -> r1

    Args:    parts: P arrays, part d for rank d; place(rank): where the part from `rank` is received.
    Returns: the parts for this rank, by source; its own among them as it was given.
    Cost:    P-1 messages per rank; every part once, but those that stay; no copy.
    """
    received = {call.rank: parts[call.rank]}
    for step in range(call.size - 1):
        dst, src = (call.rank + 1 + step) % call.size, (call.rank - 1 - step) % call.size
        received[src] = call.exchange_blocks(dst, parts[dst], src, place(src), step=step, chunk=dst)
    return [received[src] for src in range(call.size)]
