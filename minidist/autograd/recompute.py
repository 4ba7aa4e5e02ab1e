"""Stretches of the tape that are left out in forward and written again in backward (activation checkpointing).

    y = recompute(block, x, positions)        # keeps x and y, and nothing of what lies between

What a forward keeps for its backward lies in the nodes that it leaves on the tape. `recompute` runs the function, and
puts one node, a Stretch, in place of all that it left. When the walk back arrives there, the function runs once more,
and the walk goes on through the nodes which that leaves:

    forward     x ── n1 ── n2 ── n3 ── y          kept:  x ── stretch ── y
    backward    x ── n1 ── n2 ── n3 ── dy         written again when dy arrives, walked at once, and gone

So all that hangs on the tape works inside too: hooks of modules and weights, gradients put off. A stretch's edges are
those that led out of it, so a weight that is used inside and outside is counted right, and is final when it is final.
Source: Griewank & Walther 2000; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from minidist.autograd.tape import Edge, Node, Op, saved
from minidist.autograd.tensor import Parameter, Tensor, grad_mode, is_grad_enabled
from minidist.device.backend import array_module
from minidist.errors import GradientError

_thread = threading.local()     # `again`: whether this thread is in a retrace; ranks may be threads

def computed_again() -> bool:
    """Whether this is backward's second run of a stretch: what counts calls, and not work, leaves it out."""
    return getattr(_thread, "again", False)


def recompute(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """function(*args, **options), of whose inside backward computes again what it needs.

    Args:    function: returns one Tensor, and does the same each time: random numbers by key, nothing changed on the
             way. What it is given stays alive, and must be unchanged, until backward has been there.
    Cost:    of memory the arguments and the result stay; the function runs twice.
    Raises:  GradientError if it returns anything else; in backward, if it did not use the same weights again.
    """
    if not is_grad_enabled():
        return function(*args, **options)
    begin = Node(_STRETCH, [], {}, {}).order        # what is younger belongs to the stretch
    result = function(*args, **options)
    if not isinstance(result, Tensor):
        raise GradientError(f"recompute: {_name(function)} returned a {type(result).__name__}; "
                            f"it must return one Tensor")
    if result.node is None or result.node.order < begin:
        return result
    stretch = Stretch(_edges_out(result.node, begin), function, args, options)
    stretch.outputs = [(array_module(result.data), result.shape, result.dtype)]
    return Tensor._of(result.data, stretch, 0)


class Stretch(Node):
    """What stands on the tape for a function whose nodes were not kept."""

    __slots__ = ()

    def __init__(self, edges: list[Edge], function: Callable[..., Tensor], args: tuple[Any, ...],
                 options: dict[str, Any]) -> None:
        super().__init__(_STRETCH, edges, {}, {})
        self._saved = {"function": function, "args": args, "options": options}

    def retrace(self) -> Tensor:
        """Run the function again, this time leaving its nodes.

        Raises:  GradientError if it did not use the same weights as often as the first time.
        """
        begin = Node(_STRETCH, [], {}, {}).order
        outer, _thread.again = computed_again(), True
        try:
            with grad_mode(True):
                result = self._saved["function"](*self._saved["args"], **self._saved["options"])
        finally:
            _thread.again = outer
        edges = _edges_out(result.node, begin) if isinstance(result, Tensor) and result.node is not None else []
        if _weights(edges) != _weights(self.edges):
            raise GradientError(f"recompute: {_name(self._saved['function'])} used other weights the second time; "
                                f"what it does must depend on its arguments alone")
        assert isinstance(result, Tensor)
        return result


def _edges_out(last: Node, begin: int) -> list[Edge]:
    """The edges that lead from the nodes behind `last` that are younger than `begin` to what is older, or to leaves."""
    out, seen, stack = [], {id(last)}, [last]
    while stack:
        for edge in stack.pop().edges:
            source = edge.source
            if isinstance(source, Tensor) or source.order < begin:
                out.append(edge)
            elif id(source) not in seen:
                seen.add(id(source))
                stack.append(source)
    return out


def _weights(edges: list[Edge]) -> Counter[int]:
    """How often each weight was used."""
    return Counter(id(edge.source) for edge in edges if isinstance(edge.source, Parameter))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _stretch(*parts: Any) -> Any:
    """Gives a Stretch its name; it has no arithmetic of its own."""
    return parts, saved()


_STRETCH = Op(_stretch)
