"""The dtype of a strategy's weights, and its effect on backward and on the update.

A strategy leaves these to its Precision, so its step reads the same in every precision. Precision
itself is the plain one: weights, gradients and arithmetic share one dtype, and weights are their
own masters. parallel/precision/mixed_precision.py has the other.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from minidist.autograd.backward import Surveyed, WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.optim import Optimizer, clip_scale
from minidist.parallel.step.step import Counted, gradient_norm

Span: TypeAlias = tuple[Parameter, Any, Any]
"""A parameter, its place in an array, and which of its elements lie there: positions, or () for
all."""


class Precision:
    """One dtype for everything: the model's own, float64 or float32.

    Attributes: skipped: steps whose update was left out; none, except float16's that overflowed.
    """

    skipped = 0

    @property
    def scale(self) -> float:
        """The factor by which backward multiplies the loss: 1, except float16's."""
        return 1.0

    def masters(self, parameters: Iterable[Parameter]) -> list[Any]:
        """Return the optimizer's tensors for whole parameters: here the parameters themselves."""
        return list(parameters)

    def master(self, weights: Array, spans: Iterable[Span]) -> Array:
        """Return the optimizer's array for a contiguous array of weights with these `spans`: here
        the array itself."""
        return weights

    def state_dict(self, model: Module) -> dict[str, np.ndarray]:
        """Return copies of a model's weights on the host, by dotted path; this rank must have all
        of them."""
        return model.state_dict()

    def state(self) -> dict[str, Any]:
        """Return the state other than the masters that changes from step to step, as JSON: the
        number of skipped steps."""
        return {"skipped": self.skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` of any precision returned; the masters are new, so round them to the
        weights."""
        self.skipped = state["skipped"]

    def backward(
        self,
        loss: Tensor,
        dy: Array | None = None,
        *,
        defer_weights: bool = False,
        surveyed: Surveyed | None = None,
    ) -> list[WeightGradient]:
        """Run backward from the loss, or from an activation whose gradient `dy` a later stage gave;
        as Tensor.backward."""
        return loss.backward(dy, defer_weights=defer_weights, surveyed=surveyed)

    def backward_weights(self, deferred: Iterable[WeightGradient]) -> None:
        """Compute the gradients that a backward has deferred."""
        for gradient in deferred:
            gradient()

    def update(
        self,
        optimizer: Optimizer,
        counted: Counted,
        *,
        lr: float | None,
        clip: float | None,
    ) -> None:
        """Make the optimizer's step, with gradients scaled so that their norm is at most `clip`
        (None: as they are).

        The optimizer scales as it reads, so clipping costs one pass over the gradients.
        Args:    counted: what this rank counts in the norm; the norm is found only where it is
                 needed, which is the same on every rank.
        """
        scale = 1.0 if clip is None else clip_scale(gradient_norm(counted), clip)
        optimizer.step(lr, scale)
