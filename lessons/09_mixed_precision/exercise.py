"""Exercise 09: the training step in float16: a loss scale, gradients that may overflow, master
weights.

Copy this file (`minidist lesson 09 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 09 DIR/exercise_09.py`. What you may use:

    p.data[...] = array                  writes numbers into p.data, which keeps its dtype
    np.isfinite(x)                       false for infinities and NaN, element by element
    group.all_gather(np.array([x]))      the ranks' numbers, in rank order, the same on every rank
"""

import numpy as np

from minidist.grading import hole


def plain_mixed_precision(model, masters, optimizer, batches, scale):
    """Train in mixed precision on one process.

    `masters` has one float32 Parameter for each low-precision Parameter of the model.
    """
    for inputs, targets in batches:
        for p, master in zip(model.parameters(), masters, strict=True):
            hole(
                1,
                "(the notes' step 2) weights of half the bytes: what must p.data hold when forward "
                "begins? (section 2)",
                p,
                master,
            )
            p.zero_grad()
        loss = model.loss(inputs, targets, divisor=targets.size)  # step 3: forward in low precision
        loss.backward(
            np.asarray(hole(2, "with which gradient does backward begin? (section 3)"), "float32")
        )
        gradients = [
            hole(
                3,
                "(the notes' step 4) a float16 p.grad: what first, so that its small numbers "
                "survive? (section 3)",
                p,
            )
            for p in model.parameters()
        ]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = hole(4, "(step 4) and then the true gradient (section 3)", gradient)
        if hole(5, "(step 4) may the masters move? (section 4)", gradients):
            optimizer.step()  # the masters move
        else:
            scale /= 2


class Scaler:
    """A loss scale that halves when a gradient overflows and doubles after `patience` good steps in
    a row."""

    def __init__(self, scale, patience):
        self.scale = scale
        self.patience = patience
        self.good = 0

    def overflowed(self, gradients, group):
        """Return whether any element on ANY rank is infinite or NaN: the same answer on every
        rank."""
        mine = hole(
            6,
            "whether any element of my gradients, a list of arrays, is infinite or NaN (section 4)",
            gradients,
        )
        return bool(hole(7, "ask the others: one number a rank (section 6)", mine, group))

    def update(self, overflow):
        """Find the next step's scale."""
        hole(
            8,
            "halve, or count the step in self.good, and double after self.patience; what "
            "becomes of self.good in each case? (section 4)",
            overflow,
        )


def length(gradients, group):
    """Return the norm of the gradients of all ranks together (each rank has other weights), a
    Python float."""
    mine = sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients)
    return float(np.sum(group.all_gather(np.array([mine])))) ** 0.5


def clip_factor(gradients, scale, group, clip):
    """Return the factor that multiplies the true gradients, so that their norm is at most `clip`.

    `gradients` are as backward leaves them: float16, and `scale` times too large.
    """
    norm = hole(
        9,
        "the norm of which gradients is bounded by clip? (section 7)",
        length(gradients, group),
        scale,
    )
    return min(1.0, clip / norm) if norm else 1.0
