"""Exercise 00: train on one device, and say where the memory goes, before it is gone.

Copy this file (`minidist lesson 00 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 00 DIR/exercise_00.py`. The check runs real training steps and holds your
numbers against what the memory account counted.
"""

from minidist.autograd.tensor import no_grad  # noqa: F401 - you will want it
from minidist.grading import hole


def plain_single(model, optimizer, batches):
    """Train on one device with batches of (inputs, targets), each (B, T); return the last loss.

    model.loss(inputs, targets, divisor=d) is the sum of the targets' losses over d; the loss of a
    batch is their mean. The optimizer has two methods: step() and zero_grad(), as in PyTorch.
    """
    for inputs, targets in batches:
        loss = model.loss(
            inputs, targets, divisor=hole(1, "how many losses are there to be averaged?", targets)
        )
        loss.backward()
        hole(
            2,
            "update the weights; and what may not be added to the next batch's gradients? "
            "(section 1)",
            optimizer,
        )
    return float(loss.item())


def parameter_count(vocabulary, context, layers, width):
    """Return how many numbers a GPT of minidist holds: with learned positions, and with an output
    layer of its own that has no bias.

    One block: layer norm, attention (one linear width -> 3 width, one width -> width), layer norm,
    and an MLP (width -> 4 width -> width). Every linear and every norm of a block has a bias.
    """
    embeddings = vocabulary * width + context * width
    block = hole(
        3, "numbers in one block: weights and biases of four linears, and two norms of 2 width each"
    )
    head = 2 * width + width * vocabulary  # the last norm, and the output layer
    return embeddings + layers * block + head


def training_bytes(parameters, mixed):
    """Return {"parameters": ..., "gradients": ..., "optimizer": ...}: bytes of each with Adam
    during training.

    Args: parameters: how many numbers the model holds; mixed: False for float32, True for mixed
    precision (section 3, the five sources of the notes).
    """
    if mixed:
        return {
            "parameters": 2 * parameters,
            "gradients": hole(4, "mixed precision: bytes of the gradients"),
            "optimizer": hole(
                5, "mixed precision: bytes of all that the optimizer keeps (three things)"
            ),
        }
    return {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": hole(6, "float32: bytes of Adam's moments"),
    }


def kept_for_backward(layers, batch, context, width, heads):
    """Return how many bytes the blocks' ops keep for backward at the end of a float32 forward
    (section 4).

    Args: context: more than 256 tokens, so that attention keeps no probabilities.
    """
    numbers = hole(7, "numbers a token and block: the table of section 4")
    return 4 * layers * batch * context * numbers


def evaluate(model, batches):
    """Return the mean of model.loss(inputs, targets, divisor=targets.size) over the batches, a
    float.

    No backward follows, so nothing may be kept for one: not during the loop, and not after it.
    """
    total = 0.0
    for inputs, targets in batches:
        hole(
            8,
            "add this batch's loss to total as a plain float, with nothing kept for backward "
            "(section 6)",
            model,
            inputs,
            targets,
        )
    return total / len(batches)
