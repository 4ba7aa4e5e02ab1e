"""Stochastic gradient descent, with momentum."""

from collections.abc import Callable, Iterable

from minidist.device.backend import Array
from minidist.optim.optimizer import Optimizable, Optimizer, Step, add_decay, at_least_two_dims, in_range


class SGD(Optimizer):
    """p -= lr u  with  u = momentum u + g;  without momentum u = g.

    The first step sets u = g. Weight decay adds weight_decay p to g. Memory: one array, none without momentum.
    Args:    as Optimizer's; momentum: in [0, 1).
    Source:  Polyak 1964; formula as in PyTorch.
    """

    scratch_blocks = 2

    def __init__(self, parameters: Iterable[Optimizable], lr: float, *, momentum: float = 0.0,
                 weight_decay: float = 0.0, decay: Callable[[Optimizable], bool] = at_least_two_dims) -> None:
        self.momentum = in_range(self, "momentum", momentum, 0.0, 1.0)
        self.state_names = ("momentum",) if momentum else ()
        super().__init__(parameters, lr, weight_decay=weight_decay, decay=decay)

    def update(self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step) -> None:
        s, spare = scratch
        step.scaled(g, s)
        add_decay(s, p, spare, step)
        u = s
        if state:
            u = state[0]                     # zeros before the first step, which so sets u = g
            u *= self.momentum
            u += s
        step.xp.multiply(u, step.lr, out=s)
        p -= s
