"""RMSProp, Adam and AdamW: steps, in Adam with momentum, divided by the recent size of the
gradients.

On a GPU one launch updates Adam's tensors (fused_adam.py) and rounds masters to the weights that
the next step uses.
"""

import math
from collections.abc import Iterable

from minidist.device.backend import Array, is_array
from minidist.errors import ConfigError
from minidist.optim.fused_adam import FusedAdam
from minidist.optim.optimizer import (
    Optimizable,
    Optimizer,
    Option,
    Rule,
    Step,
    add_decay,
    at_least_two_dims,
    in_range,
)


class RMSProp(Optimizer):
    """v = alpha v + (1 - alpha) g²;  p -= lr g / (sqrt(v) + eps).

    Weight decay adds weight_decay p to g. Memory: one array. Source: Tieleman & Hinton 2012;
    formula as in PyTorch.
    Args:    as Optimizer's; alpha: in [0, 1); eps: from 0.
    """

    state_names = ("v",)
    scratch_blocks = 2
    options = ("lr", "weight_decay", "alpha", "eps")
    alpha = Option(0.0, 1.0)
    eps = Option(0.0)

    def __init__(
        self,
        parameters: Iterable[Optimizable],
        lr: float,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: Rule = at_least_two_dims,
    ) -> None:
        self.alpha = alpha
        self.eps = eps
        super().__init__(parameters, lr, weight_decay=weight_decay, decay=decay)

    def update(
        self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step
    ) -> None:
        xp = step.xp
        (v,) = state
        (s, t) = scratch
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


class Adam(Optimizer):
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g²;  p -= lr m̂ / (sqrt(v̂) + eps).

    m̂ = m / (1 - b1^t) and v̂ = v / (1 - b2^t) correct the start from zero at step t. Weight decay
    adds weight_decay p to g. Memory: two arrays, 8 bytes a parameter in float32. Source: Kingma &
    Ba 2015; formula as in PyTorch.

    Args:    as Optimizer's; betas: b1 and b2, in [0, 1); eps: from 0.
    """

    state_names = ("m", "v")
    options = ("lr", "weight_decay", "betas", "eps")
    eps = Option(0.0)
    apart = False  # whether weight decay is separate from the gradient
    # number of updates after which v stays as it is (None: never; compress/one_bit_adam.py)
    variance_steps: int | None = None

    def __init__(
        self,
        parameters: Iterable[Optimizable],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: Rule = at_least_two_dims,
    ) -> None:
        self.betas = betas
        self.eps = eps
        super().__init__(parameters, lr, weight_decay=weight_decay, decay=decay)
        self._fused = FusedAdam(apart=self.apart)

    @property
    def betas(self) -> tuple[float, float]:
        """Return b1 and b2."""
        return self._betas

    @betas.setter
    def betas(self, betas: tuple[float, float]) -> None:
        first, second = betas
        self._betas = (
            in_range(self, "betas[0]", first, 0.0, 1.0),
            in_range(self, "betas[1]", second, 0.0, 1.0),
        )

    @property
    def scratch_blocks(self) -> int:  # type: ignore[override]
        """Return the number of scratch blocks that `update` gets; the term of weight decay takes
        two more."""
        return 3 if self.weight_decay and not self.apart else 1

    def step(
        self,
        lr: float | Array | None = None,
        scale: float | Array = 1.0,
        *,
        roundings: Iterable[tuple[Array, Array]] = (),
    ) -> None:
        """Update every tensor, as Optimizer.step does; on a GPU in one launch, if the kernel takes
        all tensors.

        Args:    lr: then also float64 (1,) on the GPU, read when the update runs.
        Raises:  ConfigError if lr is on a GPU and the kernel does not run.
        """
        roundings = list(roundings)
        kernel_takes_it = self._store is None and self.variance_steps is None
        rate = self.lr if lr is None else lr
        if not kernel_takes_it or not self._fused.step(
            self.slots,
            rate,
            scale,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            roundings=roundings,
        ):
            if is_array(lr):
                raise ConfigError(
                    f"{type(self).__name__}: only the kernel can read a rate on a GPU, and the "
                    "kernel needs float32 weights on the GPU, each with a gradient; pass the rate "
                    "as a number"
                )
            super().step(lr, scale, roundings=roundings)

    def again(self) -> None:
        """Count an update that a captured graph runs again (cuda_graph.py)."""
        self._fused.again(self.slots)

    def update(
        self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step
    ) -> None:
        """Update block p and its moments, in 12 passes.

        Both moments are corrected in one step:
        p -= lr sqrt(1 - b2^t) / (1 - b1^t)  m / (sqrt(v) + eps sqrt(1 - b2^t)).
        """
        xp = step.xp
        (m, v) = state
        (b1, b2) = self.betas
        (s, *more) = scratch
        if step.decay and not self.apart:
            decayed, spare = more
            step.scaled(g, decayed)
            add_decay(decayed, p, spare, step)
            xp.multiply(decayed, 1.0 - b1, out=s)
        else:
            step.scaled(g, s, factor=1.0 - b1)
        if step.decay and self.apart:
            p *= 1.0 - step.lr * step.decay
        m *= b1
        m += s
        last = step.count if self.variance_steps is None else min(step.count, self.variance_steps)
        if last == step.count:
            s *= s
            s *= (1.0 - b2) / (1.0 - b1) ** 2
            v *= b2
            v += s
        correction = math.sqrt(1.0 - b2**last)
        xp.sqrt(v, out=s)
        s += self.eps * correction
        xp.divide(m, s, out=s)
        s *= step.lr * correction / (1.0 - b1**step.count)
        p -= s


class AdamW(Adam):
    """Adam with weight decay on the weights themselves, p *= 1 - lr weight_decay, which does not
    enter m and v.

    Args:    as Adam's; decay: which tensors shrink; default: matrices and tables. Source:
             Loshchilov & Hutter 2019.
    """

    apart = True

    def __init__(
        self,
        parameters: Iterable[Optimizable],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decay: Rule = at_least_two_dims,
    ) -> None:
        super().__init__(
            parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay
        )
