"""Exercise 07: distributed data parallelism: buckets, hooks and the training loop.

Copy this file (`minidist lesson 07 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 07 DIR/exercise_07.py`. Every rank runs it with its own replica of the model and its own part of each
batch; the parts need not be equally long. What you may use:

    model.loss(inputs, targets, divisor=d) -> the sum of the losses of these tokens, divided by d
    parameter.bind_gradient(view)          from now on backward writes this gradient into `view`
    parameter.hooks                        functions that backward calls once the parameter's gradient is final
    group.start_all_reduce(x, out=x) -> handle     begins to sum x over all ranks and returns at once
    handle.wait()                                  returns when x holds the sum
"""

from functools import partial

import numpy as np

from minidist.grading import hole


def assign_buckets(sizes, limit):
    """Which gradients travel together: lists of indices into `sizes`, the list that is complete first comes first.

    Args: sizes: bytes of each gradient, in the order in which forward uses the parameters; limit: bytes of a bucket (a
          gradient larger than that is a bucket by itself).
    """
    buckets: list[list[int]] = [[]]
    room = limit
    for index in hole(1, "the indices in the order in which backward finishes their gradients (section 3.1)"):
        if buckets[-1] and sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


def local_loss(model, batch):
    """This rank's share of the loss. Summed over the ranks it must be the mean over ALL tokens of the step.

    batch.inputs, batch.targets   this rank's tokens; batch.targets.size of them
    batch.global_tokens           how many tokens all ranks have together in this step
    """
    return model.loss(batch.inputs, batch.targets, divisor=hole(2, "divide by how many tokens? (section 4)"))


class Synchronizer:
    """Sums gradients over the ranks, bucket by bucket, while backward still runs."""

    def __init__(self, group, parameters, limit):
        self.group, self.parameters = group, parameters
        self.buckets = assign_buckets([parameter.data.nbytes for parameter in parameters], limit)
        self.flat = [np.zeros(sum(parameters[i].size for i in bucket), parameters[0].dtype) for bucket in self.buckets]
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients each bucket still waits for
        self.pending = []  # handles of the all-reduces on their way
        for number, bucket in enumerate(self.buckets):
            begin = 0
            for i in bucket:
                view = self.flat[number][begin:begin + parameters[i].size]
                parameters[i].bind_gradient(view.reshape(parameters[i].shape))
                parameters[i].hooks.append(partial(self.ready, number))
                begin += parameters[i].size

    def ready(self, number, parameter):
        """Backward calls this when one more gradient of bucket `number` is final."""
        hole(3, "count it in self.missing[number]; when is it time for self.start(number)? (section 3.2)")

    def start(self, number):
        """Begin to sum bucket `number` over the ranks; its gradients must all be final."""
        self.pending.append(self.group.start_all_reduce(self.flat[number], out=self.flat[number], algorithm="ring"))

    def finish(self):
        """Return when every bucket holds the gradient of the global mean loss, and be ready for the next backward."""
        hole(4, "wait for all handles in self.pending, forget them, and set self.missing anew; "
                "is anything left to be done to the sums? (section 4)")


def train(group, model, optimizer, synchronizer, epochs):
    """Train on `epochs`, a list of lists of batches: this rank's part of each."""
    for batches in epochs:
        hole(5, "for every batch in batches, steps 3 to 6 of the six: local_loss, backward, synchronizer.finish, "
                "optimizer.step and optimizer.zero_grad; at which place does finish stand? (sections 2 and 5)", batches)
