"""Hooks that run around a module's forward and backward; ZeRO-3 and pipelines are built on them.

    handle = module.register_backward_hook(lambda module: free(module))
    ...
    handle.remove()

Forward hooks run around `forward`. For backward hooks each call of the module is between two nodes
on the tape:

    enter ── nodes of the module ── leave       the tape walks newest first: leave, nodes, enter
      └───────── marker ──────────────┘

When backward reaches `leave`, a gradient has arrived and no node inside has run: the backward_pre
hooks run. `enter` is older than all nodes inside. When backward reaches it, all of them have run:
the backward hooks run. The marker, an empty array, connects the two, so that backward reaches
`enter` also in a module of ids, which have no gradient.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.autograd.tensor import Tensor, is_grad_enabled
from minidist.device.backend import Array, array_module

# by kind, in the order of registration
Hooks: TypeAlias = defaultdict[str, list[Callable[..., Any]]]


@dataclass(eq=False)
class HookHandle:
    """The result of registering a hook; it can remove the hook."""

    _hooks: list[Callable[..., Any]]
    _hook: Callable[..., Any]

    def remove(self) -> None:
        """Remove the hook; a second call has no effect."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


@op
def take_along(y: Array, marker: Array) -> tuple[Array, Saved]:
    """Return y itself. When its gradient arrives, `marker`, an array of no elements of y's dtype,
    gets one too."""
    return y, saved()


@take_along.gradient("y", "marker")
def _(node: Node, dy: Array) -> tuple[Array, Array]:
    return dy, array_module(dy).zeros(0, dy.dtype)


class _Passage:
    """One call of a module, from its enter node to its leave node."""

    def __init__(self, module: Any, hooks: Hooks) -> None:
        self.module = module
        self.hooks = hooks
        self.arrived = False
        leaf = Tensor(np.zeros(0, np.float32), requires_grad=True)
        self.marker = leaf.reshape(0)  # makes the node `enter`
        self.marker.register_hook(lambda dy: self._run("backward"))

    def leave(self, result: Any) -> Any:
        """Return the module's result; every Tensor in it that requires a gradient goes through a
        leave node."""
        if isinstance(result, (tuple, list)):
            return type(result)(self.leave(part) for part in result)
        if not isinstance(result, Tensor) or not result.requires_grad:
            return result
        same_kind = (
            self.marker
            if result.dtype == self.marker.dtype
            else ops.cast(self.marker, result.dtype)
        )
        left = take_along(result, same_kind)
        left.register_hook(self._arrive)
        return left

    def _arrive(self, dy: Array) -> None:
        if not self.arrived:  # only for the first of several outputs
            self.arrived = True
            self._run("backward_pre")

    def _run(self, kind: str) -> None:
        for hook in list(self.hooks[kind]):  # a hook may remove itself
            hook(self.module)


def call(module: Any, hooks: Hooks, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of module.run, with the hooks run around it."""
    for hook in list(hooks["forward_pre"]):
        replaced = hook(module, args)
        if replaced is not None:
            args = replaced if isinstance(replaced, tuple) else (replaced,)
    if is_grad_enabled() and (hooks["backward_pre"] or hooks["backward"]):
        passage = _Passage(module, hooks)
        result = passage.leave(module.run(*args, **options))
    else:
        result = module.run(*args, **options)
    for hook in list(hooks["forward"]):
        replaced = hook(module, args, result)
        result = result if replaced is None else replaced
    return result
