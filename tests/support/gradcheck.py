"""Gradients against central differences, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tape import Node
from minidist.autograd.tensor import Tensor, tensor
from minidist.device.backend import device_of, to_device

STEP = 1e-6


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """An op's result as a tuple, also when it is one Tensor."""
    return result if isinstance(result, tuple) else (result,)


def weigh(result: Any, seed: int = 0) -> Tensor:
    """One number made of all outputs with fixed random weights, so that no gradient is uniform."""
    rng = np.random.default_rng(seed)
    total: Any = 0.0
    for output in outputs_of(result):
        weights = rng.uniform(0.5, 1.5, output.shape).astype(output.dtype)
        total = ops.sum(output * to_device(weights, device_of(output.data))) + total
    return total


def tape_gradients(call: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Gradients of weigh(call(*arrays)) by the tape; zeros where nothing arrived."""
    leaves = [tensor(a, requires_grad=True) for a in arrays]
    weigh(call(*leaves)).backward()
    return [np.zeros_like(leaf.data) if leaf.grad is None else leaf.grad for leaf in leaves]


def numeric_gradients(call: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same gradients by moving every number a little to both sides."""

    def loss() -> float:
        return weigh(call(*[tensor(a) for a in arrays])).item()

    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + STEP
            above = loss()
            array[place] = kept - STEP
            gradient[place] = (above - loss()) / (2 * STEP)
            array[place] = kept
        gradients.append(gradient)
    return gradients


def check_gradients(call: Callable[..., Any], arrays: Sequence[np.ndarray]) -> None:
    """Assert that both agree, number by number."""
    ours = tape_gradients(call, arrays)
    numeric = numeric_gradients(call, arrays)
    for which, (a, b) in enumerate(zip(ours, numeric, strict=True)):
        np.testing.assert_allclose(
            a, b, rtol=1e-5, atol=1e-7, err_msg=f"gradient of argument {which}"
        )


def nodes_behind(result: Any) -> list[Node]:
    """Every node on the tape behind a result."""
    found: dict[int, Node] = {}
    stack = [t.node for t in outputs_of(result) if t.node is not None]
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += [edge.source for edge in node.edges if isinstance(edge.source, Node)]
    return list(found.values())
