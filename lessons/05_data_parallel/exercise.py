"""Exercise 05: DP by hand: one process, several devices, and device 0 with everything to do.

Copy this file (`minidist lesson 05 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 05 DIR/exercise_05.py`. The devices work one after the other here; threads would change no number.
What you may use:

    devices[r].model                the replica on device r; devices[0].model is the one that learns
    model.parameters()              with .data and .grad, in the same order on every device
    wire.copy(src, dst, array)      a copy of the array on device dst; counted, unless src is dst
    cross_entropy(outputs, targets, divisor)    the sum of the losses over divisor
"""

import numpy as np

from minidist.autograd.tensor import tensor
from minidist.grading import hole
from minidist.parallel.data.data_parallel import cross_entropy


def parts(rows, replicas):
    """(first row, number of rows) of each replica: as even as it goes, the larger parts first, no row left out."""
    return hole(1, "a list of pairs, one for each replica (section 2, DP 1)", rows, replicas)


def train_step(devices, optimizer, inputs, targets, wire):
    """DP 1 to DP 5; returns the mean loss of the batch."""
    bounds = parts(len(inputs), len(devices))
    for number, device in enumerate(devices[1:], start=1):
        for original, copied in zip(devices[0].model.parameters(), device.model.parameters(), strict=True):
            hole(2, "DP 2: copied.data[...] becomes device 0's present weights, by the wire", number, original, copied)

    outputs = []
    for number, (device, (first, rows)) in enumerate(zip(devices, bounds, strict=True)):
        mine = wire.copy(0, number, inputs[first:first + rows])
        outputs.append(device.model(mine))
    gathered = tensor(np.concatenate([wire.copy(number, 0, output.data) for number, output in enumerate(outputs)]),
                      requires_grad=True)
    loss = cross_entropy(gathered, targets, targets.size)
    loss.backward()  # gathered.grad: the gradient of the loss for each output

    for number, (output, (first, rows)) in enumerate(zip(outputs, bounds, strict=True)):
        output.backward(hole(3, "DP 4: what does this device's backward begin with? By the wire, from device 0",
                             number, first, rows))

    for parameters in zip(*(device.model.parameters() for device in devices), strict=True):
        own, others = parameters[0], parameters[1:]
        hole(4, "DP 5: own.grad[...] becomes the gradient of the mean loss of the whole batch (section 4)", own, others)
    optimizer.step()
    for device in devices:
        device.model.zero_grad()
    return loss.item()


def through_device_0(model_bytes, row_bytes, output_bytes, rows, replicas):
    """(bytes that device 0 sends, bytes that it receives) in one step.

    Args: model_bytes: of all parameters; row_bytes: of one row of inputs; output_bytes: of the outputs of one row.
    """
    others = rows - parts(rows, replicas)[0][1]  # rows that are not device 0's own
    return hole(5, "the two sums of section 3", others)
