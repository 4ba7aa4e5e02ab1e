"""Exercise 15: ZeRO-2 with overlap: reduce a gradient as soon as it is final, add it to the shard, free it.

Copy this file (`minidist lesson 15 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 15 DIR/exercise_15.py`. Each rank keeps `run.shard`, its chunk of the summed gradient of each run of
parameters (a bucket). What you may use:

    group.start_reduce_scatter(x, out=y) -> handle   begins y (this rank's chunk of x) = its sum over the ranks
    handle.wait()                                    returns when y is there; x must not change before
    run.take()                                       the run's gradients end to end, one array; the parameters let go
    run.shard                                        where the sums of this step's passes are to be added up
    run.chunk()                                      a new array as long as the shard
"""

from minidist.grading import hole


class MyGradients:
    """The gradients of all runs; this rank keeps its chunks.

    Attributes: flying: what is on its way, (run, gradient, chunk, handle) in the order of its start
    """

    def __init__(self, group):
        self.group, self.flying = group, []

    def final(self, run):
        """Backward calls this when the last gradient of a run is final: its sum sets out, and backward goes on."""
        gradient, chunk = run.take(), run.chunk()
        handle = hole(1, "begin to sum gradient over the ranks, this rank's part into chunk", gradient, chunk)
        self.flying.append((run, gradient, chunk, handle))
        hole(2, "at most two buckets may be alive, one that fills and one in flight: what must land now, if anything?")

    def land(self):
        """The oldest that flies: wait for its sum, add it to what earlier passes of the step left in the shard."""
        run, gradient, chunk, handle = self.flying[0]
        hole(3, "wait; what happens to run.shard? (section 4)", run, chunk, handle)
        hole(4, "no name may refer to the gradient any longer (section 2)")

    def finish(self):
        """After each backward: when this returns, the shards hold the sums and the optimizer may read them."""
        hole(5, "what is left to be done?")
