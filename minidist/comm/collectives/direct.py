"""Direct: every rank sends its whole array to every other rank. The most bytes, but only one step.

notes: N4 §2
"""

import numpy as np

from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.collectives.blocking import BlockingGroup


def plain_all_reduce(group: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Exchange the whole array with every other rank; each rank then adds all of them, in rank
    order."""
    values = {group.rank: x}
    for step in range(1, group.size):
        dst = (group.rank + step) % group.size
        src = (group.rank - step) % group.size
        values[src] = group.exchange(x, dst=dst, src=src)
    return np.sum([values[rank] for rank in range(group.size)], axis=0)  # type: ignore[no-any-return]


# The real version starts all exchanges at once, which leaves one wait, and can work in place. Two
# ranks add what arrives straight from the receive buffer.


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Exchange the whole array with P-1 ranks; each rank then adds all values, in rank order.

    P=3      r0 sends    r1 sends    r2 sends
    step 0   x -> r1     x -> r2     x -> r0
    step 1   x -> r2     x -> r0     x -> r1

    Cost:    P-1 messages per rank; P(P-1)*nbytes over all ranks. Workspace: (P-1)*n elements, and n
             more in low precision (float32), or in place on ranks from 2 on; on two ranks usually
             none but in low precision.
    Rounding: low precision is added in float32 and rounded once.
    """
    if call.size == 2 and op.total == out.dtype:
        _exchange_and_add(call, x, out, op)
        return
    others = call.others
    room = call.workspace(len(others) * len(x), x.dtype).reshape(len(others), len(x))
    values = dict(zip(reversed(others), room, strict=True))
    received = [call.start_recv(src, value) for src, value in values.items()]
    sent = [call.start_send(dst, x, step=step) for step, dst in enumerate(others)]
    call.wait(received + sent)
    values[call.rank] = x
    spoils_x = call.rank > 1 and np.may_share_memory(x, out)  # before x has been added
    total = call.workspace(len(x), op.total) if spoils_x or op.total != out.dtype else out
    op.combine_all([values[rank] for rank in range(call.size)], out=total)
    op.finish(total, out)


def _exchange_and_add(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Run all_reduce on two ranks: add the other rank's array as it arrives, in rank order."""
    other = 1 - call.rank
    sent = call.start_send(other, x, step=0)
    # in place, the sum may overwrite x when x has left: a short one leaves at once
    safe = sent.done() or not np.may_share_memory(x, out)
    total = out if safe else call.workspace(len(x), x.dtype)
    call.recv(other, total, op.into(x, behind=call.rank == 1))
    sent.wait()
    op.finish(total, out)
