"""The balance losses of a model's mixtures (moe.py), in its loss and its gradient.

A block may be on a pipeline stage without the model's loss, or be computed again after the loss. So
a balance loss is not passed through the model: its value is added at the end, and its gradient
starts when the gradient of the layer's output arrives. An array of no elements connects the two on
the tape.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, array_module

if TYPE_CHECKING:
    from minidist.nn.moe import Mixture


@op
def begin_balance(
    chances: Array, factor: Array, *, layer: "Mixture", dtype: Any
) -> tuple[Array, Saved]:
    """Return an array of no elements. When its gradient arrives, the gradient of Σ chances · factor
    starts, times `balance_scale`."""
    return array_module(chances).zeros(0, dtype), saved(factor=factor)


@begin_balance.gradient("chances")
def _(node: Node, dy: Array) -> Array:
    xp = array_module(dy)
    factor = node.factor
    return xp.array(
        xp.broadcast_to(
            factor * factor.dtype.type(node.options["layer"].balance_scale), node.shapes["chances"]
        )
    )


@op
def _add_balance(loss: Array, *, layers: Sequence["Mixture"], share: float) -> tuple[Array, Saved]:
    balance: Any = sum(layer.balance for layer in layers)
    return loss + loss.dtype.type(share) * balance, saved()


@_add_balance.gradient("loss")
def _(node: Node, dy: Array) -> Array:
    for layer in node.options["layers"]:
        layer.balance_scale = float(dy) * node.options["share"]
    return dy


def add_balance(loss: Tensor, layers: Sequence["Mixture"], divisor: float) -> Tensor:
    """Return loss + the balance losses of the newest forward / divisor; its gradient sets
    `balance_scale` of the layers."""
    layers = [layer for layer in layers if layer.training and layer.balance is not None]
    return _add_balance(loss, layers=layers, share=1.0 / divisor) if layers else loss


def of_stage(layers: Sequence[Any], divisor: float) -> float:
    """Return a pipeline stage's balance losses: the sum over its mixtures' newest forward, divided
    by `divisor`."""
    return (
        sum(
            float(layer.balance) for layer in layers if layer.training and layer.balance is not None
        )
        / divisor
    )
