"""Exercise 09: the training step in float16: a loss scale, gradients that may overflow, master weights.

Copy this file (`minidist lesson 09 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 09 DIR/exercise_09.py`. Gradients come in float16 and `scale` times too large. Each rank may see other
gradients (ZeRO); all must do the same. What you may use:

    np.isfinite(x)                       false for infinities and NaN, element by element
    group.all_gather(np.array([x]))      the ranks' numbers, in rank order, the same on every rank
"""

import numpy as np

from minidist.grading import hole


class Scaler:
    """A loss scale that halves when a gradient overflows and doubles after `patience` good steps in a row."""

    def __init__(self, scale, patience):
        self.scale, self.patience, self.good = scale, patience, 0

    def unscaled(self, gradient):
        """A float16 gradient as it would be without the scale: float32."""
        return hole(1, "both: to float32, and divided by self.scale; in which order? (section 3)", gradient)

    def overflowed(self, gradients, group):
        """Whether any element on ANY rank is infinite or NaN: the same answer on every rank."""
        mine = hole(2, "whether any element of my gradients, a list of arrays, is infinite or NaN (section 4)",
                    gradients)
        return bool(hole(3, "ask the others: one number a rank (section 6)", mine, group))

    def update(self, overflow):
        """Find the next step's scale."""
        hole(4, "halve, or count the step in self.good, and double after self.patience; what becomes of self.good in "
                "each case? (section 4)", overflow)


def length(gradients, group):
    """The norm of the gradients of all ranks together (each has other weights), as a Python float."""
    mine = sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients)
    return float(np.sum(group.all_gather(np.array([mine])))) ** 0.5


def step(masters, weights, gradients, scaler, group, lr, clip):
    """One step of SGD: masters are float32, weights float16, gradients float16 and scaled; lists of arrays.

    The whole gradient is clipped to a norm of `clip`. Masters and weights are changed in place; both stay if a gradient
    overflowed.
    """
    overflow = scaler.overflowed(gradients, group)
    if hole(5, "when is there no update?", overflow):
        scaler.update(overflow)
        return
    true = [scaler.unscaled(gradient) for gradient in gradients]
    norm = length(hole(6, "the norm of which gradients is bounded by clip? (section 7)", gradients, true), group)
    factor = min(1.0, clip / norm) if norm else 1.0
    for master, weight, gradient in zip(masters, weights, true, strict=True):
        hole(7, "move the master by lr × factor × gradient, then the weight: how? (section 2)", master, weight,
             gradient, lr, factor)
    scaler.update(overflow)
