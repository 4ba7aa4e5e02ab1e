"""Dissemination: after each step, a rank knows of the arrival of twice as many ranks.

The barrier below is also the plain version: it has nothing to overlap and no array to place.

Source: Hensgen, Finkel & Manber 1988.
"""

import numpy as np

from minidist.comm.calls.call import Call

_NOTHING = np.empty(0, np.uint8)


def barrier(call: Call) -> None:
    """Wait until all ranks have called it. Step k: send to the rank 2^k places on, receive from the
    rank 2^k places back. A message stands for its sender and for all ranks whose arrival the sender
    already knows.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   -> r1       -> r2       -> r3       -> r0
    step 1   -> r2       -> r3       -> r0       -> r1

    Cost:    ceil(log2 P) messages of 0 bytes per rank.
    """
    for step in range((call.size - 1).bit_length()):
        dst = (call.rank + (1 << step)) % call.size
        src = (call.rank - (1 << step)) % call.size
        call.exchange(dst, _NOTHING, src, _NOTHING, step=step)
