"""RMSProp: the step of each weight is divided by the recent size of its gradients."""

from collections.abc import Callable, Iterable

from minidist.device.backend import Array
from minidist.optim.optimizer import Optimizable, Optimizer, Step, add_decay, at_least_two_dims, in_range


class RMSProp(Optimizer):
    """v = alpha v + (1 - alpha) g²;  p -= lr g / (sqrt(v) + eps).

    Weight decay adds weight_decay p to g. Memory: one array. Source: Tieleman & Hinton 2012; formula as in PyTorch.
    Args:    as Optimizer's; alpha: in [0, 1); eps: from 0.
    """

    state_names = ("v",)
    scratch_blocks = 2

    def __init__(self, parameters: Iterable[Optimizable], lr: float, *, alpha: float = 0.99, eps: float = 1e-8,
                 weight_decay: float = 0.0, decay: Callable[[Optimizable], bool] = at_least_two_dims) -> None:
        self.alpha = in_range(self, "alpha", alpha, 0.0, 1.0)
        self.eps = in_range(self, "eps", eps, 0.0)
        super().__init__(parameters, lr, weight_decay=weight_decay, decay=decay)

    def update(self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step) -> None:
        xp, (v,), (s, t) = step.xp, state, scratch
        step.scaled(g, s)
        add_decay(s, p, t, step)
        v *= self.alpha
        xp.multiply(s, s, out=t)
        t *= 1.0 - self.alpha
        v += t
        xp.sqrt(v, out=t)
        t += self.eps
        xp.divide(s, t, out=s)
        s *= step.lr
        p -= s
