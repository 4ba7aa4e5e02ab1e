"""Direct: every rank sends everything to everybody. The most bytes, the fewest steps that wait for each other: one.

notes: N4 §2
"""

import numpy as np

from minidist.comm.call import Call
from minidist.comm.collectives.reduction import Reduction


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """P-1 exchanges of the whole array; each rank then adds all values itself, in rank order.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   x -> r1     x -> r2     x -> r0
    step 1   x -> r2     x -> r0     x -> r1

    All exchanges are under way at once. The order of the additions does not depend on the layout of the group, and low
    precision is added in float32 and rounded once.

    Args:    x, out (n,), contiguous; x is only read, and may be out.
    Cost:    P-1 messages per rank; P(P-1)*nbytes over all ranks. Workspace: (P-1)*n elements. For small arrays, and for
             two ranks, where the ring sends the same bytes in twice the messages.
    """
    arrived = {src: call.workspace(len(x), x.dtype) for src in range(call.size) if src != call.rank}
    received = [call.start_recv((call.rank - step) % call.size, arrived[(call.rank - step) % call.size])
                for step in range(1, call.size)]
    sent = [call.start_send((call.rank + step) % call.size, x, step=step - 1) for step in range(1, call.size)]
    for handle in received + sent:
        handle.wait()
    arrived[call.rank] = x
    total = arrived[0] if call.size == 1 else call.workspace(len(x), op.total)
    for rank in range(1, call.size):
        op.combine(arrived[0] if rank == 1 else total, arrived[rank], out=total)
    op.finish(total, out)
