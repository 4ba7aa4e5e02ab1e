"""How the balance losses of a model's mixtures (moe.py) come into its loss and its gradient.

A block may stand on a stage that never sees the model's loss, or be computed again when that is long past. So a balance
loss does not travel to the end: its value is added there, and its gradient starts where the loss was made, once the
gradient of what the layer made has come. An array of no elements ties the two together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, array_module
from minidist.nn.output import Output

if TYPE_CHECKING:
    from minidist.nn.moe import Mixture


@op
def begin_balance(chances: Array, factor: Array, *, layer: "Mixture", dtype: Any) -> tuple[Array, Saved]:
    """No elements, of `dtype`; their gradient's coming says that the loss Σ chances · factor has one."""
    return array_module(chances).zeros(0, dtype), saved(factor=factor)


@begin_balance.gradient("chances")
def _(node: Node, dy: Array) -> Array:
    xp, factor = array_module(dy), node.factor
    return xp.array(xp.broadcast_to(factor * factor.dtype.type(node.options["layer"].balance_scale),
                                    node.shapes["chances"]))


@op
def _add_balance(loss: Array, *, layers: Sequence["Mixture"], share: float) -> tuple[Array, Saved]:
    """The loss with the layers' balance losses added, times `share`; its gradient tells the layers their scale."""
    balance: Any = sum(layer.balance for layer in layers)
    return loss + loss.dtype.type(share) * balance, saved()


@_add_balance.gradient("loss")
def _(node: Node, dy: Array) -> Array:
    for layer in node.options["layers"]:
        layer.balance_scale = float(dy) * node.options["share"]
    return dy


def of_stage(layers: Sequence[Any], divisor: float) -> float:
    """For a stage of a pipeline: the balance losses of the newest forward of its mixtures, over `divisor`."""
    return sum(float(layer.balance) for layer in layers if layer.training and layer.balance is not None) / divisor


class BalancedOutput(Output):
    """The loss with the layers' balance losses added; else what it was."""

    def __init__(self, output: Output, layers: Sequence["Mixture"]) -> None:
        self.output, self.layers = output, layers

    def last(self, x: Tensor) -> Tensor:
        """As the output's."""
        return self.output.last(x)

    def whole(self, logits: Tensor) -> Tensor:
        """As the output's."""
        return self.output.whole(logits)

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Cross-entropies and balance losses, over `divisor` (default: the number of tokens)."""
        loss = self.output.loss(logits, targets, divisor=divisor)
        layers = [layer for layer in self.layers if layer.training and layer.balance is not None]
        if not layers:
            return loss
        return _add_balance(loss, layers=layers, share=1.0 / (targets.size if divisor is None else divisor))
