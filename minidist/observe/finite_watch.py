"""Chapter 25 · The first number that is not finite: its layer and op, in forward or backward.

    watch = FiniteWatch(model, recorder.not_finite)     # checks each block's output and gradient

The sum over a block's output is finite if all its numbers are (unless they are near the dtype's
largest number). Only if the sum is not finite, the op is searched on the output's tape: the oldest
node that saved a number that is not finite got it from its source node, or from a weight, which is
then named. In backward the tape no longer exists, so only the layer is named.

Cost: reads the output of each block once in forward and its gradient once in backward. On a GPU it
checks nothing, because there the host must not wait for the device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.autograd.tape import Node, behind
from minidist.autograd.tensor import Parameter, Tensor
from minidist.device.backend import Array
from minidist.nn.gpt import Block
from minidist.nn.module import Module

Tell = Callable[[str, str, str, str], None]
"""tell(layer, op, "forward" or "backward", "nan" or "inf")"""


class FiniteWatch:
    """A watch over the model's blocks on this rank; it reports the first number that is not
    finite."""

    def __init__(self, model: Module, tell: Tell) -> None:
        self.model = model
        self._tell = tell
        self._blocks = [
            (path, module) for path, module in model.named_modules() if isinstance(module, Block)
        ]
        self._after = {
            path: following
            for (path, _), (following, _) in zip(self._blocks, self._blocks[1:], strict=False)
        }
        self._handles = [module.register_forward_hook(self._forward) for _, module in self._blocks]
        self._told = False

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _forward(self, module: Module, args: tuple[Any, ...], result: Any) -> None:
        if self._told or not isinstance(result, Tensor) or not isinstance(result.data, np.ndarray):
            return
        if result.node is not None and result.requires_grad:
            result.register_hook(lambda dy: self._backward(module, dy))
        if not _finite(result.data):
            self._found(module.path, origin(result), "forward", result.data)

    def _backward(self, module: Module, dy: Array) -> None:
        if not self._told and not _finite(dy):
            self._found(
                self._after.get(module.path, "the layers behind the last block"),
                "backward",
                "backward",
                dy,
            )

    def _found(self, layer: str, op: str, where: str, array: Array) -> None:
        self._told = True
        self._tell(
            layer,
            op,
            where,
            "nan" if np.isnan(array.astype(np.float32, copy=False)).any() else "inf",
        )


def _finite(array: Array) -> bool:
    """Return whether the sum of the numbers is finite; one pass that allocates nothing."""
    kind = np.float32 if array.dtype.itemsize < 4 else None
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum(dtype=kind)))


def origin(result: Tensor) -> str:
    """Return the origin of the first number that is not finite on a result's tape: an op's name, or
    "weight NAME"."""
    if result.node is None:
        return "unknown"
    nodes, _ = behind(result.node)
    for node in nodes:  # oldest first
        for name, value in node._saved.items():
            bad = next((array for array in _arrays(value) if not _finite(array)), None)
            if bad is None:
                continue
            if isinstance(value, Parameter):
                return f"weight {value.name}"
            wanted = (
                name if name in node.op.arguments else node.op.arguments[0] if _rows_of(bad) else ""
            )
            source = next(
                (
                    edge.source
                    for edge in node.edges
                    if node.op.argument_name(edge.argument) == wanted
                ),
                None,
            )
            if isinstance(source, Parameter):
                return f"weight {source.name}"
            return _maker(source if isinstance(source, Node) else node)
    return str(result.node.op.name)


def _maker(node: Node) -> str:
    """Return the op that made the bad number of this node; an op that saves nothing (a sum, a view)
    is assumed to pass on the number of its youngest source."""
    while not node._saved:
        sources = [edge.source for edge in node.edges if isinstance(edge.source, Node)]
        if not sources:
            break
        node = max(sources, key=lambda source: source.order)
    return str(node.op.name)


def _rows_of(bad: np.ndarray) -> bool:
    """Return whether whole rows of an op's intermediate result are bad: then its input was bad,
    because a norm spreads one number over its row."""
    return bad.ndim > 0 and bool((~np.isfinite(bad)).all(axis=-1).any())


def _arrays(value: Any) -> list[np.ndarray]:
    arrays = (
        [value.data]
        if isinstance(value, Parameter)
        else value
        if isinstance(value, (list, tuple))
        else [value]
    )
    return [
        array
        for array in arrays
        if isinstance(array, np.ndarray)
        and array.dtype.kind == "f"
        and (array.size <= 1 or any(array.strides))
    ]
