"""Exercise 15: ZeRO-2, plain; then with overlap: reduce a gradient once it is final, add it to the
shard, free it.

Copy this file (`minidist lesson 15 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 15 DIR/exercise_15.py`. Each rank keeps `run.shard`, its chunk of the
summed gradient of each run of parameters (a bucket). What you may use:

    group.reduce_scatter(x, out=y)                   y (this rank's chunk of x, cut as in lesson 14)
                                                     = its sum over the ranks; x has any shape:
                                                     there is nothing to flatten or pad
    group.all_gather(y, out=x)                       x = every rank's y, one after the other; y may
                                                     not lie in x: give it a copy
    flat.chunk                                       the slice of flat's weights that is this rank's
    p.zero_grad()                                    lets p's gradient go: p.grad is None then
    group.start_reduce_scatter(x, out=y) -> handle   begins y (this rank's chunk of x) = its sum
                                                     over the ranks
    handle.wait()                                    returns when y is there; x must not change
                                                     before
    run.take()                                       the run's gradients end to end, one array; the
                                                     parameters let go
    run.shard                                        where the sums of this step's passes are to be
                                                     added up
    run.chunk()                                      a new array as long as the shard
"""

import numpy as np

from minidist.grading import hole
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.step import part_of


def plain_zero2(model, new_optimizer, group, batches):
    """Train by ZeRO-2, parameter by parameter and without overlap; batches are global, the numbers
    are those of N4:349."""
    runs = []
    for p in model.parameters():
        flat = Flat([p], group)
        weights = flat.join()
        mine = np.zeros(flat.chunk_size, flat.dtype)
        runs.append((flat, weights, mine))

        def final(p, mine=mine):
            hole(
                1,
                "1 p.grad is final: what are the two things to be done with it now? (section 1)",
                p,
                mine,
            )

        p.hooks.append(final)
    optimizer = new_optimizer(
        [flat.pieces(weights[flat.chunk], mine)[0] for flat, weights, mine in runs]
    )
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # 1 the hooks run in here
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        optimizer.step()  # 2 update my chunks
        for flat, weights, _ in runs:
            hole(
                2,
                "by one collective: every rank gets the weights that the others have updated",
                flat,
                weights,
            )


class MyGradients:
    """The gradients of all runs; this rank keeps its chunks.

    Attributes: flying: what is on its way, (run, gradient, chunk, handle) in the order of its start
    """

    def __init__(self, group):
        self.group = group
        self.flying = []

    def final(self, run):
        """Begin the sum of a run's gradients; backward calls this when the last gradient of the run
        is final, and continues at once."""
        gradient = run.take()
        chunk = run.chunk()
        handle = hole(
            3, "begin to sum gradient over the ranks, this rank's part into chunk", gradient, chunk
        )
        self.flying.append((run, gradient, chunk, handle))
        hole(
            4,
            "at most two buckets may be alive, one that fills and one in flight: what must land "
            "now, if anything?",
        )

    def land(self):
        """Wait for the oldest sum under way; add it to what earlier passes of the step left in the
        shard."""
        run, gradient, chunk, handle = self.flying[0]
        hole(5, "wait; what happens to run.shard? (section 4)", run, chunk, handle)
        del gradient
        hole(
            6,
            "`del gradient` took away one name; which other one still holds the gradient? (section 2)",
        )

    def finish(self):
        """Finish after each backward: when this returns, the shards hold the sums and the optimizer
        may read them."""
        hole(7, "what is left to be done?")
