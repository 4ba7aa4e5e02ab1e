"""Backward: a walk over the tape that runs every gradient function once, newest node first.

backward() first visits all nodes behind the loss and counts the contributions that each leaf will
get. Then it walks them in descending order of creation, so that every user of a result has run
before the node that made the result. It drops the saved values of a node as soon as its gradient
functions have run. The order depends only on the order of the forward, so every run gives the same
bits. At a Stretch (recompute.py) the forward of the stretch runs again and leaves its nodes. These
nodes are younger than all others that are left, so they run next.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.recompute import Stretch
from minidist.autograd.tape import Edge, Node, behind
from minidist.autograd.tensor import (
    GradientHook,
    Parameter,
    Surveyed,
    Tensor,
    WeightGradient,
    no_grad,
)
from minidist.device import account
from minidist.device.backend import Array, add_into, array_module, dtype_name
from minidist.errors import GradientError

__all__ = ["Surveyed", "WeightGradient", "backward"]


class _Walk:
    """The state of one backward: the gradients that have arrived at nodes, and the contributions
    that each leaf still waits for."""

    def __init__(self, defer_weights: bool) -> None:
        self.defer_weights = defer_weights
        self.deferred: list[WeightGradient] = []
        self.waiting: Counter[int] = Counter()  # id(leaf) -> contributions that have not arrived
        # id(node) -> by output, as deliver's
        self._arrived: dict[int, list[tuple[Array, bool] | None]] = {}
        self._leaves: dict[int, Array] = {}  # id(leaf with tensor hooks) -> sum so far

    def survey(self, start: Node, begin: int = -1) -> list[Node]:
        """Return the nodes behind `start`, as behind() does, and count the contributions that each
        leaf will get."""
        nodes, out = behind(start, begin)
        for node in nodes:
            if node.released:
                raise GradientError(
                    f"backward: an earlier backward ran through {node.op.name} and freed what it "
                    "saved; run the forward again, or add the losses and call backward once"
                )
        self.waiting.update(id(edge.source) for edge in out if isinstance(edge.source, Tensor))
        return nodes

    def visit(self, node: Node) -> list[Node]:
        """Run the gradient functions of a node whose users have all run. Returns nodes to visit
        next."""
        dys = [None if arrived is None else arrived[0] for arrived in self._arrived.pop(id(node))]
        for index, hooks in node.hooks.items():
            dys[index] = _call_hooks(hooks, dys[index])
        if isinstance(node, Stretch):
            return self._retrace(node, dys[0])
        dy: Any = dys[0]
        if node.several:
            dy = tuple(
                d if d is not None else xp.zeros(shape, kind)
                for d, (xp, shape, kind) in zip(dys, node.outputs, strict=True)
            )
        later = [
            edge for edge in node.edges if self.defer_weights and isinstance(edge.source, Parameter)
        ]
        for edge in node.edges:
            if edge not in later:
                self.run_gradient(node, edge, dy)
        if not later:
            node.release()
            return []
        # a second backward is an error, these are still to run
        node.released = True
        node.edges = list(later)
        self.deferred += [
            WeightGradient(edge.source, partial(self._run_deferred, node, edge, dy))
            for edge in later
            if isinstance(edge.source, Parameter)
        ]
        return []

    def _run_deferred(self, node: Node, edge: Edge, dy: Any) -> None:
        self.run_gradient(node, edge, dy)
        node.edges.remove(edge)
        if not node.edges:
            node.release()

    def _retrace(self, stretch: Stretch, dy: Array) -> list[Node]:
        """Return the nodes that a stretch stands for. Its gradient goes to the last of them; the
        contributions to their leaves are counted again."""
        result = stretch.retrace()
        nodes = self.survey(result.node, stretch.order)
        for edge in stretch.edges:
            if isinstance(edge.source, Tensor):
                self.waiting[id(edge.source)] -= 1
        stretch.release()
        self.deliver(result.node, result.index, dy, False)
        return nodes

    def run_gradient(self, node: Node, edge: Edge, dy: Any) -> None:
        """Run one gradient function and pass its result to the source of the argument."""
        part = edge.argument - len(node.op.arguments)  # from 0 for a part of a `*parts` argument
        function = node.op.gradients[node.op.argument_name(edge.argument)]
        gradient = function(node, dy) if part < 0 else function(node, dy, part)
        if isinstance(gradient, np.generic):
            gradient = np.asarray(gradient)
        ours = not _shares_buffer(gradient, dy)
        if isinstance(edge.source, Tensor):
            self.add_to_leaf(edge.source, gradient, ours)
        else:
            self.deliver(edge.source, edge.index, gradient, ours)

    def deliver(self, node: Node, index: int, gradient: Array, ours: bool) -> None:
        """Add to the gradient of one output of a node; `ours`: the array has no other user, so the
        walk may add."""
        _, shape, kind = node.outputs[index]
        assert gradient.shape == shape and gradient.dtype == kind, (
            f"gradient for {node.op.name}'s result: {gradient.dtype} {gradient.shape}, expected "
            f"{kind} {shape}"
        )
        account.current().hold(gradient, "workspace")
        slots = self._arrived.setdefault(id(node), [None] * len(node.outputs))
        total, own = slots[index] or (None, False)
        if total is None:
            slots[index] = gradient, ours
        elif own:
            add_into(total, gradient)
        elif ours:
            add_into(gradient, total)
            slots[index] = gradient, True
        else:  # both may be views of another node's dy, which must not change
            slots[index] = account.current().hold(total + gradient, "workspace"), True

    def add_to_leaf(self, leaf: Tensor, gradient: Array, ours: bool) -> None:
        """Add a contribution to the gradient of a leaf; the last one of this backward runs its
        hooks."""
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype, (
            f"gradient {gradient.dtype} {gradient.shape} for a leaf {leaf.dtype} {leaf.shape}"
        )
        self.waiting[id(leaf)] -= 1
        last = not self.waiting[id(leaf)]
        # they get the total of this backward, so it is summed in a separate array first
        if leaf.tensor_hooks:
            if id(leaf) in self._leaves:
                gradient = self._leaves.pop(id(leaf)) + gradient
                ours = True
            if not last:
                self._leaves[id(leaf)] = gradient
                return
            gradient = _call_hooks(leaf.tensor_hooks, gradient)
            ours = False
        leaf.accumulate(gradient, own=ours)
        if last and isinstance(leaf, Parameter):
            for hook in list(leaf.hooks):
                hook(leaf)


def _call_hooks(hooks: Sequence[GradientHook], gradient: Array | None) -> Array | None:
    """Return the gradient after all hooks; each hook may return a replacement."""
    if gradient is not None:
        for hook in list(hooks):
            replacement = hook(gradient)
            gradient = gradient if replacement is None else replacement
    return gradient


def _shares_buffer(gradient: Array, dy: Any) -> bool:
    """Return whether `gradient` is dy, a view of dy (as the gradient of an addition is), or a
    broadcast, which NumPy makes read-only."""
    flags = gradient.flags
    if not flags.c_contiguous or not getattr(flags, "writeable", True):
        return True
    owner = account.owner_of(gradient)
    return any(owner is account.owner_of(d) for d in (dy if isinstance(dy, tuple) else (dy,)))


def backward(
    loss: Tensor,
    dy: Array | None = None,
    *,
    defer_weights: bool = False,
    surveyed: Surveyed | None = None,
) -> list[WeightGradient]:
    """Add d loss / d leaf to the `.grad` of every leaf behind `loss`. Args, Returns, Raises: as
    Tensor.backward."""
    if not loss.requires_grad:
        raise GradientError(
            "backward: no tensor that this one was computed from requires a gradient; was it "
            "computed under no_grad?"
        )
    if dy is None:
        if loss.size != 1:
            raise GradientError(
                f"backward: a loss must be one number, but this tensor has shape {loss.shape}; "
                "take its sum or mean, or pass dy of that shape"
            )
        dy = array_module(loss.data).ones(loss.shape, loss.dtype)
    elif dy.shape != loss.shape or dy.dtype != loss.dtype:
        raise GradientError(
            f"backward: dy is {dtype_name(dy.dtype)} {dy.shape}, the tensor is "
            f"{dtype_name(loss.dtype)} {loss.shape}; dtype and shape must be the same"
        )
    walk = _Walk(defer_weights)
    nodes = []
    if loss.node is None:
        walk.waiting[id(loss)] = 1
    else:
        nodes = walk.survey(loss.node)
        walk.deliver(loss.node, loss.index, dy, False)
    if surveyed is not None:
        surveyed(walk.waiting.keys())
    if loss.node is None:
        walk.add_to_leaf(loss, dy, False)
    with no_grad():
        while nodes:
            nodes += walk.visit(nodes.pop())
    return walk.deferred
