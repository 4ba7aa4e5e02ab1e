"""Exercise 14: ZeRO-1 without buckets: which rank updates what, what travels, and when.

Copy this file (`minidist lesson 14 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 14 DIR/exercise_14.py`. Every rank runs it with its own replica of the model and its own part of each
batch. What you may use:

    group.rank, group.size
    group.reduce_scatter(x, out=y)   y (this rank's chunk of x, cut as numpy.array_split does) = its sum over the ranks
    group.all_reduce(x)              the sum of x over the ranks, whole, on every rank
    group.all_gather(y, out=x)       x = every rank's y, one after the other; y may not lie in x: give it a copy
"""

import numpy as np

from minidist.grading import hole


class MyZero1:
    """A replica whose optimizer is divided among the ranks.

    Args: weights: (n,) all parameters of the model end to end; changing it changes the model.
          new_optimizer(weights, gradients): an optimizer that changes `weights` in place by what stands in `gradients`
          whenever its step() is called; it keeps a state as large as what it was given.
    """

    def __init__(self, group, model, weights, new_optimizer):
        self.group, self.model, self.weights = group, model, weights
        self.own = hole(1, "the slice of self.weights that this rank updates, cut as numpy.array_split cuts")
        self.mine = np.zeros(self.own.stop - self.own.start)        # the summed gradient of that slice
        self.optimizer = new_optimizer(hole(2, "which weights is this rank's optimizer to change?"), self.mine)

    def step(self, inputs, targets, global_tokens):
        """One step on this rank's part of the batch; `global_tokens`: how many targets all ranks have together."""
        self.model.loss(inputs, targets, divisor=global_tokens).backward()                      # 1
        gradient = np.concatenate([p.grad.ravel() for p in self.model.parameters()])
        hole(3, "by one collective: self.mine = the sum over the ranks of gradient[self.own]", gradient)
        self.optimizer.step()                                                                   # 3
        hole(4, "by one collective: every rank gets the weights that the others have updated")
        self.model.zero_grad()
