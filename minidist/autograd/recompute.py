"""Activation checkpointing: stretches of the tape that forward drops and backward computes again.

    y = recompute(block, x, positions)        # keeps x and y, and nothing in between

`recompute` runs the function and replaces all nodes that it left, with the arrays they hold, by one
node, a Stretch. When backward reaches this node, the function runs again, and backward continues
through the new nodes:

    forward     x ── n1 ── n2 ── n3 ── y      kept:  x ── stretch ── y
    backward    x ── n1 ── n2 ── n3 ── dy     made again when dy arrives, walked at once, dropped

So hooks and deferred gradients work inside a stretch too. The edges of a stretch are those that
lead out of it. So the contributions to a weight that is used inside and outside are counted, and
its hooks run when its gradient is final.

With `keep=`, the input x of a stretch may be put away until backward: cut over ranks, in fewer
bits, in another memory (parallel/memory/kept_inputs.py). It is brought back just before the
function runs again. At that moment the input of the stretch that is next in backward is prefetched,
so that it arrives while this stretch computes.
Source: Griewank & Walther 2000; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from minidist.autograd.tape import Edge, Node, Saved, behind, op, saved
from minidist.autograd.tensor import Parameter, Tensor, grad_mode, is_grad_enabled
from minidist.device.backend import Array, array_module
from minidist.errors import GradientError

_thread = threading.local()  # `again`: whether this thread is in a retrace; ranks may be threads


def computed_again() -> bool:
    """Return whether backward is running a stretch for the second time; counters of calls must not
    count it twice."""
    return getattr(_thread, "again", False)


class Kept(Protocol):
    """An array that was put away."""

    def prefetch(self) -> None:
        """Start to bring the array back, if that takes time: `take` will be called soon."""

    def take(self) -> Array:
        """Return the array, changed if it was kept in fewer bits; called once."""


class _PutAway:
    """The place on the tape of an argument whose array is put away."""

    def __init__(self, x: Tensor, keep: Callable[[Array], Kept]) -> None:
        self.kept = keep(x.data)
        self.node = x.node
        self.index = x.index
        self.leaf = x if x.node is None else None
        if self.leaf is not None:
            self.leaf.data = hollow_array(x.data)

    def back(self) -> Tensor:
        """Return the argument again."""
        data = self.kept.take()
        if self.leaf is None:
            return Tensor._of(data, self.node, self.index)
        self.leaf.data = data
        return self.leaf


def hollow_array(like: Array) -> Array:
    """Return one zero, broadcast to a shape: for code that needs only the shape."""
    xp = array_module(like)
    return xp.broadcast_to(xp.zeros((), like.dtype), like.shape)


def recompute(
    function: Callable[..., Tensor],
    *args: Any,
    keep: Callable[[Array], Kept] | None = None,
    **options: Any,
) -> Tensor:
    """Return function(*args, **options); the arrays inside are not kept but computed again in
    backward.

    Args:    function: returns one Tensor. Both runs must do the same: random numbers by key, no
             side effects.
             args, options: stay alive, and must not change, until backward has passed.
             keep: puts the array of the first argument away, if that is a result of an op, or a
             leaf that lends it.
    Cost:    memory for the arguments and the result only; the function runs twice.
    Raises:  GradientError if it returns anything else; in backward, if the second run used other
             weights.
    """
    if not is_grad_enabled():
        return function(*args, **options)
    begin = Node(_stretch, [], {}, {}).order  # younger nodes belong to the stretch
    result = function(*args, **options)
    if not isinstance(result, Tensor):
        raise GradientError(
            f"recompute: {_name(function)} returned a {type(result).__name__}; "
            f"it must return one Tensor"
        )
    if result.node is None or result.node.order < begin:
        return result
    stretch = Stretch(_stretch, behind(result.node, begin)[1], {}, {})
    if keep is not None and (args[0].node is not None or args[0].lends_data):
        args = (_PutAway(args[0], keep), *args[1:])
    stretch._saved = saved(call=partial(function, *args, **options))
    stretch.outputs = [(array_module(result.data), result.shape, result.dtype)]
    return Tensor._of(result.data, stretch, 0)


class Stretch(Node):
    """The node on the tape for a call of a function; `edges` lead out of the nodes that it left."""

    __slots__ = ()

    def retrace(self) -> Tensor:
        """Run the function again, and keep its nodes. Raises: GradientError if it uses other
        weights."""
        begin = Node(_stretch, [], {}, {}).order
        call = self._call_again()
        outer = computed_again()
        _thread.again = True
        try:
            with grad_mode(True):
                result: Tensor = call()
        finally:
            _thread.again = outer
        last = getattr(result, "node", None)
        edges = [] if last is None else behind(last, begin)[1]
        if _weights(edges) != _weights(self.edges):
            raise GradientError(
                f"recompute: {_name(self.call.func)} used other weights in the second run; its "
                "result must depend only on its arguments"
            )
        return result

    def _call_again(self) -> Callable[[], Tensor]:
        """Return the call with its arguments. An input that was put away is brought back, and that
        of the stretch before is prefetched."""
        call: partial[Tensor] = self.call
        if not call.args or not isinstance(call.args[0], _PutAway):
            return call
        x = call.args[0].back()
        before = _before(self)
        if before is not None and isinstance(before.call.args[0], _PutAway):
            before.call.args[0].kept.prefetch()
        return partial(call.func, x, *call.args[1:], **call.keywords)


def _before(stretch: Stretch) -> Stretch | None:
    """Return the youngest stretch behind this one: the next that backward reaches."""
    seen: dict[int, Node] = {}
    ahead: list[Node] = [stretch]
    while ahead:
        for edge in ahead.pop().edges:
            if isinstance(edge.source, Node) and edge.source.order not in seen:
                seen[edge.source.order] = edge.source
        if not seen:
            return None
        youngest = seen.pop(max(seen))
        if isinstance(youngest, Stretch):
            return youngest
        ahead.append(youngest)
    return None


def _weights(edges: list[Edge]) -> Counter[int]:
    """Return the number of uses of each weight."""
    return Counter(id(edge.source) for edge in edges if isinstance(edge.source, Parameter))


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return getattr(function, "__qualname__", type(function).__name__)


@op
def _stretch(*parts: Any) -> tuple[Any, Saved]:
    """Give a Stretch its name; it has no arithmetic of its own."""
    return parts, saved()
