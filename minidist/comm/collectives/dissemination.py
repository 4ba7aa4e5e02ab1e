"""Dissemination: news doubles its reach every step.

The barrier below is the plain version too: it has nothing to overlap and no array to place.

Source: Hensgen, Finkel & Manber 1988.
"""

import numpy as np

from minidist.comm.calls.call import Call

_NOTHING = np.empty(0, np.uint8)


def barrier(call: Call) -> None:
    """Step k: tell the rank 2^k places on, hear from the rank 2^k places back, and so of all that
    it has heard of.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   -> r1       -> r2       -> r3       -> r0
    step 1   -> r2       -> r3       -> r0       -> r1

    Cost:    ceil(log2 P) messages of 0 bytes per rank.
    """
    for step in range((call.size - 1).bit_length()):
        dst = (call.rank + (1 << step)) % call.size
        src = (call.rank - (1 << step)) % call.size
        call.exchange(dst, _NOTHING, src, _NOTHING, step=step)
