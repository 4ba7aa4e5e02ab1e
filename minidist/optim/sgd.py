"""Stochastic gradient descent, with momentum."""

from collections.abc import Iterable

from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.optim.optimizer import (
    Optimizable,
    Optimizer,
    Rule,
    Step,
    add_decay,
    at_least_two_dims,
    in_range,
)


class SGD(Optimizer):
    """p -= lr u  with  u = momentum u + g;  without momentum u = g;  nesterov: p -= lr (g + momentum u).

    The first step sets u = g. Weight decay adds weight_decay p to g. Memory: one array, none
    without momentum.
    Args:    as Optimizer's; momentum: in [0, 1); nesterov: look ahead along u, which needs
             momentum.
    Source:  Polyak 1964; Nesterov 1983, Sutskever et al. 2013; formulas as in PyTorch.
    """

    options = ("lr", "weight_decay", "momentum", "nesterov")
    scratch_blocks = 2

    def __init__(
        self,
        parameters: Iterable[Optimizable],
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay: Rule = at_least_two_dims,
    ) -> None:
        if nesterov and not momentum:
            raise ConfigError(
                "SGD: nesterov needs a momentum, but the momentum is 0; pass for example "
                "momentum=0.9"
            )
        self.state_names = ("momentum",) if momentum else ()
        self.momentum = momentum
        self.nesterov = nesterov
        super().__init__(parameters, lr, weight_decay=weight_decay, decay=decay)

    @property
    def momentum(self) -> float:
        """Return the share of u that the next step keeps. It may be changed if it is not 0 at
        first."""
        return self._momentum

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._momentum = in_range(self, "momentum", momentum, 0.0, 1.0)
        if self._momentum and not self.state_names:
            raise ConfigError(
                f"SGD: momentum is set to {momentum!r}, but it was 0 when the optimizer was "
                "created, so there is no array for it; create the optimizer with a momentum above 0"
            )

    def update(
        self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step
    ) -> None:
        s, spare = scratch
        step.scaled(g, s)
        add_decay(s, p, spare, step)
        u = s
        if state and self.momentum:
            u = state[0]  # zeros before the first step, which so sets u = g
            u *= self.momentum
            u += s
            if self.nesterov:
                step.xp.multiply(u, self.momentum, out=spare)
                s += spare
                u = s
        step.xp.multiply(u, step.lr, out=s)
        p -= s
