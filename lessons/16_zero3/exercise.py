"""Exercise 16: ZeRO-3: gather a unit's weights before its turn, free them after, in forward and in backward.

Copy this file (`minidist lesson 16 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 16 DIR/exercise_16.py`. Each rank keeps `unit.shard`, its chunk of a unit's weights. What you may use:

    group.all_gather(unit.shard)            all chunks, one after the other
    group.reduce_scatter(x, out=y)          y (this rank's chunk of x) = its sum over the ranks
    unit.put(whole)                         the unit's weights are `whole` from now on
    unit.forget()                           the unit has no weights any more; they read as NaN
    unit.gradient()                         the unit's gradients end to end; the unit forgets them
    unit.mine                               where the optimizer looks for the summed gradient of this rank's chunk
"""

from minidist.grading import hole


class MyZero3:
    """Watches the units of a model. The model calls these four as it goes through them."""

    def __init__(self, group):
        self.group = group

    def before_forward(self, unit):
        """The unit is about to compute."""
        hole(1, "its weights come from all ranks", unit)

    def after_forward(self, unit):
        """The unit has computed; it will not be needed until backward comes back to it."""
        hole(2, "what for are its weights still here?", unit)

    def before_backward(self, unit):
        """Backward is about to go through the unit, and reads its weights."""
        hole(3, "its weights were freed (section 1, backward 1)", unit)

    def after_backward(self, unit):
        """The unit's gradients are final."""
        hole(4, "sum them to unit.mine, and leave nothing behind (section 1, backward 3 and 4)", unit)

    def after_update(self, unit):
        """The optimizer has changed unit.shard; the next step begins."""
        hole(5, "what must be sent now? (section 4)", unit)
