"""Exercise 05: DP by hand: one process, several devices, and device 0 with everything to do.

Copy this file (`minidist lesson 05 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 05 DIR/exercise_05.py`. The devices work one after the other here; threads
would change no number. What you may use:

    replicas[r]                     the model on device r: called with inputs it gives outputs;
                                    replicas[0] learns
    replica.parameters()            with .data and .grad, in the same order on every device
"""

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.grading import hole


def plain_data_parallel(replicas, optimizer, batches):
    """Train by DP on devices that work one after the other: replicas[0] learns, the others are
    overwritten in every step.

    Return the last loss, the mean over the targets of the whole batch.
    """
    for inputs, targets in batches:
        parts = hole(
            1,
            "DP 1: rows for each device, as even as it goes, the larger parts first (section 1)",
            inputs,
        )
        for replica in replicas[1:]:
            for original, copied in zip(
                replicas[0].parameters(), replica.parameters(), strict=True
            ):
                hole(
                    2,
                    "DP 2: copied has its own array; which numbers must it hold? (section 1)",
                    original,
                    copied,
                )
        # DP 3: forward everywhere
        outputs = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
        # outputs to device 0
        gathered = tensor(np.concatenate([y.data for y in outputs]), requires_grad=True)
        # which has the loss
        loss = ops.cross_entropy(gathered, targets, divisor=targets.size)
        loss.backward()  # gathered.grad: the gradient of the loss for each output
        for y, dy in zip(
            outputs,
            hole(3, "DP 4: with what does each device's backward begin? (section 1)", gathered),
            strict=True,
        ):
            y.backward(dy)
        for same in zip(*(replica.parameters() for replica in replicas), strict=True):
            same[0].grad = hole(
                4, "DP 5: the gradient of the mean loss of the whole batch (section 4)", same
            )
        optimizer.step()
        for replica in replicas:
            replica.zero_grad()
    return float(loss.item())


def through_device_0(model_bytes, row_bytes, output_bytes, rows, replicas):
    """Return (bytes that device 0 sends, bytes that it receives) in one step.

    Args: model_bytes: of all parameters; row_bytes: of one row of inputs; output_bytes: of the
    outputs of one row.
    """
    others = rows - -(-rows // replicas)  # rows that are not device 0's own
    return hole(5, "the two sums of section 3", others)
