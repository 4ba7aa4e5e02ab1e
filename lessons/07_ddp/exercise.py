"""Exercise 07: distributed data parallelism: buckets, hooks and the training loop.

Copy this file (`minidist lesson 07 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 07 DIR/exercise_07.py`. Every rank runs it with its own replica of the
model and its part of each batch; the parts need not be equally long. What you may use:

    group.all_reduce(x, out=x)             x becomes the sum of all ranks' x
    model.loss(inputs, targets, divisor=d) -> the sum of the losses of these tokens, divided by d
    parameter.bind_gradient(view)          from now on backward writes this gradient into `view`
    parameter.hooks                        functions that backward calls once the parameter's
                                           gradient is final
    group.start_all_reduce(x, out=x) -> handle     begins to sum x over all ranks and returns at
                                                   once
    handle.wait()                                  returns when x holds the sum
"""

from functools import partial

import numpy as np

from minidist.grading import hole
from minidist.parallel.step.step import part_of


def plain_ddp(model, optimizer, group, batches):
    """Train by DDP without buckets and without overlap; batches are global, the numbers are those
    of N0:403."""
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)  # 2 my part of the data
        loss = model.loss(
            part.inputs,
            part.targets,  # 3 forward
            divisor=hole(
                1, "so that the ranks' shares add up to the mean over ALL tokens (section 4)"
            ),
        )
        loss.backward()  # 4 backward: my gradients
        for p in model.parameters():
            hole(
                2,
                "5 synchronise: p.grad is to be the gradient of the global mean loss (section 4)",
                p,
            )
        optimizer.step()  # 6 update: the same on all ranks
        optimizer.zero_grad()


def assign_buckets(sizes, limit):
    """Return which gradients travel together: lists of indices into `sizes`, in the order in which
    they are complete.

    Args: sizes: bytes of each gradient, in the order in which forward uses the parameters; limit:
          bytes of a bucket (a larger gradient has its own bucket).
    """
    buckets: list[list[int]] = [[]]
    room = limit
    for index in hole(
        3, "the indices in the order in which backward finishes their gradients (section 3.1)"
    ):
        if buckets[-1] and sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


class Synchronizer:
    """Sums gradients over the ranks, bucket by bucket, while backward still runs."""

    def __init__(self, group, parameters, limit):
        self.group = group
        self.parameters = parameters
        self.buckets = assign_buckets([parameter.data.nbytes for parameter in parameters], limit)
        self.flat = [
            np.zeros(sum(parameters[i].size for i in bucket), parameters[0].dtype)
            for bucket in self.buckets
        ]
        # gradients each bucket still waits for
        self.missing = [len(bucket) for bucket in self.buckets]
        self.pending = []  # handles of the all-reduces on their way
        for number, bucket in enumerate(self.buckets):
            begin = 0
            for i in bucket:
                view = self.flat[number][begin : begin + parameters[i].size]
                parameters[i].bind_gradient(view.reshape(parameters[i].shape))
                parameters[i].hooks.append(partial(self.ready, number))
                begin += parameters[i].size

    def ready(self, number, parameter):
        """Backward calls this when one more gradient of bucket `number` is final."""
        hole(
            4,
            "count it in self.missing[number]; when is it time for self.start(number)? (section "
            "3.2)",
        )

    def start(self, number):
        """Begin to sum bucket `number` over the ranks; its gradients must all be final."""
        self.pending.append(
            self.group.start_all_reduce(self.flat[number], out=self.flat[number], algorithm="ring")
        )

    def finish(self):
        """Return when every bucket holds the gradient of the global mean loss, and be ready for the
        next backward."""
        hole(
            5,
            "wait for all handles in self.pending, forget them, and set self.missing anew; "
            "is anything left to be done to the sums? (section 4)",
        )


def local_loss(model, batch):
    """Return this rank's share of the loss; batch.global_tokens is the number of tokens of all
    ranks in this step."""
    return model.loss(batch.inputs, batch.targets, divisor=batch.global_tokens)


def train(model, optimizer, synchronizer, epochs):
    """Train on `epochs`, a list of lists of batches: this rank's part of each."""
    for batches in epochs:
        hole(
            6,
            "plain_ddp's steps 3 to 6 with local_loss and synchronizer.finish, for every batch "
            "in batches; where must finish be called? (sections 2 and 5)",
            batches,
        )
