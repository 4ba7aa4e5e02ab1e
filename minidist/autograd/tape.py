"""The tape: ops, and the nodes that they leave.

An op computes on plain arrays and names the values that its gradients will need. Each
differentiable argument has one gradient function, next to the forward:

    @op
    def mul(a, b):                                   # broadcasting
        return a * b, saved(a=a, b=b)

    @mul.gradient("a")
    def _(node, dy):
        return unbroadcast(dy * node.b, node.shapes["a"])

Called with Tensors, `mul` returns a Tensor with a Node: the op, its saved values, and the sources
of its arguments. No closure captures an array, so an array stays alive only if a node holds it. In
place of a Parameter's data the node keeps the Parameter and reads it again at backward, because a
strategy may free and re-gather it in between (ZeRO-3).

Rules for gradient functions: return a new array, or `dy` or a view of it; do not write to `dy`. A
saved array may be overwritten and returned only if it is no argument and no result of the op, one
call computes all gradients, and this is its last use (`forget`).
"""

import inspect
import itertools
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np

from minidist.autograd.tensor import GradientHook, Parameter, Tensor, is_grad_enabled
from minidist.device import account
from minidist.device.backend import FLOATS, Array, array_module, dtype_name, is_array
from minidist.errors import DtypeError, GradientError, MinidistError, ShapeError

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
GradientFunction = TypeVar("GradientFunction", bound=Callable[..., Any])

# orders nodes within a thread; next() is atomic, so rank threads may share it
_creation = itertools.count()

Saved: TypeAlias = dict[str, Any]


def saved(**values: Any) -> Saved:
    """Return the second half of an op's result: the values that gradient functions read as
    `node.<name>`."""
    return values


class Edge:
    """The source of the argument at position `argument`: output `index` of the Node that made it,
    or a leaf Tensor."""

    __slots__ = ("argument", "source", "index")

    def __init__(self, argument: int, tensor: Tensor) -> None:
        self.argument = argument
        self.source: Node | Tensor = tensor.node or tensor
        self.index = tensor.index


class Node:
    """One call of an op: its saved values, the sources of its arguments, the hooks on its outputs.

    Gradient functions read saved values as attributes (`node.b`), keyword options in `options`, and
    the shapes of array arguments in `shapes` by name. `needs("a")` tells whether the gradient of an
    argument is needed.
    """

    __slots__ = (
        "op",
        "options",
        "shapes",
        "order",
        "edges",
        "outputs",
        "several",
        "hooks",
        "released",
        "_saved",
        "_shared",
        "__weakref__",
    )

    def __init__(
        self,
        op: "Op[Any]",
        edges: list[Edge],
        options: dict[str, Any],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self.op = op
        self.edges = edges
        self.options = options
        self.shapes = shapes
        self.order = next(_creation)
        # (array module, shape, dtype)
        self.outputs: list[tuple[Any, tuple[int, ...], np.dtype]] = []
        self.several = False  # dy is then a tuple, also of one output
        self.hooks: dict[int, list[GradientHook]] = {}  # by output
        self.released = False
        self._saved: dict[str, Any] = {}
        self._shared: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a saved value; for a Parameter its data as it is now."""
        try:
            value = self._saved[name]
        except KeyError:
            raise AttributeError(
                f"{self.op.name} saved no {name!r}; it saved {', '.join(self._saved)}"
            ) from None
        return value.data if isinstance(value, Parameter) else value

    def needs(self, argument: str) -> bool:
        """Return whether the gradient of `argument` is needed."""
        return any(self.op.argument_name(edge.argument) == argument for edge in self.edges)

    def once(self, compute: Callable[["Node", Array], Any], dy: Array) -> Any:
        """compute(self, dy), computed once in a backward: for gradients that share their work
        (attention, norms)."""
        if compute not in self._shared:
            self._shared[compute] = compute(self, dy)
        return self._shared[compute]

    def forget(self) -> None:
        """Drop the saved values: `once` has computed all gradients of this node, deferred ones
        too."""
        self._saved = {}

    def room(self, argument: str) -> Array | None:
        """Return a stale view that a strategy bound to the Parameter `argument`, to receive its
        gradient (`out=`), or None."""
        for edge in self.edges:
            if self.op.argument_name(edge.argument) == argument and isinstance(
                edge.source, Parameter
            ):
                return edge.source.gradient_room()
        return None

    def release(self) -> None:
        """Drop everything that this node keeps alive. A second backward through it is an error."""
        self.released = True
        self._saved = {}
        self._shared = {}
        self.edges = []
        self.hooks = {}


def behind(last: Node, begin: int = -1) -> tuple[list[Node], list[Edge]]:
    """Return `last` and all nodes behind it younger than `begin`, oldest first; and the edges that
    lead out of them."""
    found = {id(last): last}
    out = []
    stack = [last]
    while stack:
        for edge in stack.pop().edges:
            source = edge.source
            if isinstance(source, Tensor) or source.order <= begin:
                out.append(edge)
            elif id(source) not in found:
                found[id(source)] = source
                stack.append(source)
    return sorted(found.values(), key=lambda node: node.order), out


def _one_of(
    function: Callable[[Node, Array], tuple[Array, ...]], which: int, node: Node, dy: Array
) -> Array:
    return node.once(function, dy)[which]


class Op(Generic[Result]):
    """A differentiable function of arrays, with one gradient function for each differentiable
    argument.

    Positional arguments may be Tensors, arrays or numbers; keyword-only ones are options (a dim, a
    rate, a group). Arguments with a gradient function must share one dtype; a number takes it.
    """

    def __init__(self, forward: Callable[..., tuple[Any, Saved]]) -> None:
        self.forward = forward
        self.name = forward.__name__.strip("_")
        self.__name__ = self.name
        self.__doc__ = forward.__doc__
        self.__module__ = forward.__module__
        self.gradients: dict[str, Callable[..., Array]] = {}
        parameters = inspect.signature(forward).parameters.values()
        self.arguments = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def gradient(self, *arguments: str) -> Callable[[GradientFunction], GradientFunction]:
        """Decorator: register the gradient function of an argument, (node, dy) -> array of the
        argument's shape.

        For several arguments it returns a tuple with an array for each, and runs once a backward.
        With several outputs dy is a tuple, with zeros for an output without gradient. For `*parts`
        it also gets the number of the part.
        Raises:  GradientError for an argument that the op does not have.
        """
        for argument in arguments:
            if argument not in self.arguments and argument != self.variadic:
                raise GradientError(
                    f"{self.name} has no argument {argument!r}; it has {', '.join(self.arguments)}"
                )

        def register(function: GradientFunction) -> GradientFunction:
            for which, argument in enumerate(arguments):
                self.gradients[argument] = (
                    function if len(arguments) == 1 else partial(_one_of, function, which)
                )
            return function

        return register

    def argument_name(self, position: int) -> str:
        """Return the name of the positional argument at `position`."""
        return self.arguments[position] if position < len(self.arguments) else self.variadic

    def __call__(self, *args: Any, **options: Any) -> Result:
        """Return the op's result: a Tensor or a tuple of them, with a node if grad mode is on and
        an input needs a gradient.

        Raises:  ShapeError, DtypeError if the arguments do not fit.
        """
        # given by keyword: to their positions
        if options and not options.keys().isdisjoint(self.arguments):
            bound = inspect.signature(self.forward).bind(*args, **options)
            args = bound.args
            options = bound.kwargs
        arrays = self._arrays(args)
        try:
            result, values = self.forward(*arrays, **options)
        except MinidistError:
            raise
        except ValueError as error:
            raise ShapeError(
                f"{self.name}: {self._describe(arrays)} do not fit: {error}"
            ) from error
        several = isinstance(result, (tuple, list))
        outputs = [
            np.asarray(r) if isinstance(r, np.generic) else r
            for r in (result if several else (result,))
        ]
        for output in outputs:
            account.current().hold(output, "activations")
        node = self._record(args, arrays, options, values)
        if node is not None:
            node.several = several
            node.outputs = [
                (array_module(output), output.shape, output.dtype) for output in outputs
            ]
        tensors = tuple(Tensor._of(output, node, index) for index, output in enumerate(outputs))
        return cast(Result, tensors if several else tensors[0])

    def _arrays(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments as the forward takes them: arrays instead of Tensors, numbers as arrays
        of the arrays' dtype."""
        arrays = [a.data if isinstance(a, Tensor) else a for a in args]
        places = [
            i
            for i in range(len(arrays))
            if self.argument_name(i) in self.gradients and arrays[i] is not None
        ]
        first = None
        for i in places:
            if not is_array(arrays[i]):
                continue
            if not arrays[i].dtype.isnative:
                raise DtypeError(
                    f"{self.name}: {self._describe(arrays)}; {self.argument_name(i)} is not in "
                    f"this machine's byte order; pass x.astype({arrays[i].dtype.name!r})"
                )
            if first is None:
                first = arrays[i]
            elif arrays[i].dtype != first.dtype:
                raise DtypeError(
                    f"{self.name}: {self._describe(arrays)} have different dtypes; "
                    f"choose one with ops.cast(x, {dtype_name(first.dtype)!r})"
                )
        for i in places:
            if not is_array(arrays[i]):
                arrays[i] = self._number(arrays[i], first)
        return arrays

    def _number(self, value: Any, like: Array | None) -> Array:
        """Return a number as an array of the dtype and device of `like`; a list as NumPy converts
        it."""
        if isinstance(value, np.generic):
            value = value.item()  # np.float64(2) means the number 2 and does not ask for float64
        if like is None or not isinstance(value, numbers.Number):
            return np.asarray(value)
        if like.dtype not in FLOATS and not isinstance(value, int):
            raise DtypeError(
                f"{self.name}: {value!r} does not fit dtype {dtype_name(like.dtype)}; "
                f"use ops.cast to a float dtype first"
            )
        return array_module(like).asarray(value, like.dtype)

    def _record(
        self, args: Sequence[Any], arrays: Sequence[Any], options: dict[str, Any], values: Saved
    ) -> Node | None:
        """Return the node of this call, or None if no gradient of it is needed."""
        if not is_grad_enabled():
            return None
        edges = [
            Edge(i, a)
            for i, a in enumerate(args)
            if isinstance(a, Tensor) and a.requires_grad and self.argument_name(i) in self.gradients
        ]
        if not edges:
            return None
        shapes = {self.argument_name(i): a.shape for i, a in enumerate(arrays) if is_array(a)}
        node = Node(self, edges, options, shapes)
        parameters = [a for a in args if isinstance(a, Parameter)]
        memory = account.current()
        for name, value in values.items():
            owner = next((p for p in parameters if p.data is value), None)
            node._saved[name] = value if owner is None else owner
            for array in value if isinstance(value, list) else [value]:
                if is_array(array) and owner is None:
                    memory.hold(array, "activations")
        return node

    def _describe(self, arrays: Sequence[Any]) -> str:
        """Return "a float32 (2, 3), b float32 (4,)", for an error message."""
        return ", ".join(
            f"{self.argument_name(i)} {dtype_name(a.dtype)} {a.shape}"
            for i, a in enumerate(arrays)
            if is_array(a)
        )


REGISTRY: dict[str, Op[Any]] = {}  # every op by name, for tests that check each of them

op = Op[Tensor]  # decorator of a function of arrays that returns (result, saved(…))
op_of_several = Op[tuple[Tensor, ...]]  # of one that returns (tuple of results, saved(…))
