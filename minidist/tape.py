"""The tape: ops, the nodes they leave behind, and the walk back.

An op computes on plain arrays and says what its gradients will need; each differentiable argument has one gradient
function, beside the forward (STYLE 13):

    @op
    def mul(a, b):                                   # broadcasting
        return a * b, saved(a=a, b=b)

    @mul.gradient("a")
    def _(node, dy):
        return unbroadcast(dy * node.b, node.shapes["a"])

Called with Tensors, `mul` returns a Tensor that remembers a Node: the op, what it saved, where its inputs came from.
Nothing is captured by closures, so what is alive is what the nodes hold. A saved array that is a Parameter's data is
kept as the Parameter and read again at backward, because a strategy may free and re-gather it in between (ZeRO-3).

backward() walks the nodes newest first. It runs only the gradient functions that somebody needs, and drops what a node
saved as soon as they ran. Rules for gradient functions: return a new array, or `dy` or a view of it, never a saved
array; do not write to `dy`.
"""

import inspect
import itertools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist import account
from minidist.backend import FLOATS, Array, array_module, dtype_name, is_array
from minidist.errors import DtypeError, GradientError, ShapeError
from minidist.tensor import Parameter, Tensor, is_grad_enabled, no_grad

_creation = itertools.count()  # orders nodes within a thread; next() is atomic, so rank threads may share it


class Saved(dict[str, Any]):
    """What an op keeps for its gradient functions, by name."""


def saved(**values: Any) -> Saved:
    """Second half of an op's result: what `node.<name>` will be in its gradient functions."""
    return Saved(values)


class Edge:
    """Where one argument came from: output `index` of the Node that made it, or a leaf Tensor."""

    __slots__ = ("argument", "source", "index")

    def __init__(self, argument: int, tensor: Tensor) -> None:
        self.argument = argument
        self.source: Node | Tensor = tensor if tensor.node is None else tensor.node
        self.index = tensor.index


class Node:
    """One call of an op: what it saved, where its arguments came from, what to run when its gradient is known.

    Gradient functions read saved values as attributes (`node.b`), keyword options in `options`, the shapes of array
    arguments in `shapes` by name, and ask `needs("a")` whether anybody wants an argument's gradient.
    """

    __slots__ = ("op", "options", "shapes", "order", "edges", "outputs", "hooks", "released",
                 "_saved", "_shared", "__weakref__")

    def __init__(self, op: "Op", edges: list[Edge], options: dict[str, Any],
                 shapes: dict[str, tuple[int, ...]]) -> None:
        self.op = op
        self.options = options
        self.shapes = shapes
        self.order = next(_creation)
        self.edges = edges
        self.outputs: list[tuple[Any, tuple[int, ...], np.dtype]] = []  # (array module, shape, dtype)
        self.hooks: dict[int, list[Callable[[Array], Array | None]]] = {}
        self.released = False
        self._saved: dict[str, Any] = {}
        self._shared: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """A saved value; a saved Parameter's data as it is now."""
        try:
            value = self._saved[name]
        except KeyError:
            raise AttributeError(f"{self.op.name} saved no {name!r}; it saved {', '.join(self._saved)}") from None
        return value.data if isinstance(value, Parameter) else value

    def needs(self, argument: str) -> bool:
        """Whether the gradient of `argument` is wanted."""
        return any(self.op.argument_name(edge.argument) == argument for edge in self.edges)

    def once(self, compute: Callable[["Node", Array], Any], dy: Array) -> Any:
        """compute(self, dy), computed once a backward: for gradients that share their work (attention, norms)."""
        if compute not in self._shared:
            self._shared[compute] = compute(self, dy)
        return self._shared[compute]

    def room(self, argument: str) -> Array | None:
        """A buffer that may receive the gradient of `argument` directly (`out=`), or None: then allocate.

        It is the view a strategy bound to a Parameter (a bucket, a shard) while nothing has been added to it yet.
        """
        for edge in self.edges:
            if self.op.argument_name(edge.argument) == argument and isinstance(edge.source, Parameter):
                return edge.source.gradient_room()
        return None

    def release(self) -> None:
        """Drop everything this node keeps alive; a second backward through it is an error."""
        self.released = True
        self._saved, self._shared = {}, {}
        self.edges, self.hooks = [], {}


class WeightGradient:
    """One gradient that ends in a weight, put off by backward(defer_weights=True). Call it once, at any later time.

    Zero-bubble pipelines fill their idle time with these (their "W"). It keeps its node's saved values and the output's
    gradient alive until it has run.
    """

    __slots__ = ("parameter", "_walk", "_node", "_edge", "_dy", "_left")

    def __init__(self, walk: "_Walk", node: Node, edge: Edge, dy: Any, left: list[int]) -> None:
        assert isinstance(edge.source, Parameter)
        self.parameter = edge.source
        self._walk, self._node, self._edge, self._dy = walk, node, edge, dy
        self._left = left  # how many of the node's gradients are still put off; shared by them

    def __call__(self) -> None:
        """Compute the gradient and add it to the parameter's.

        Raises: GradientError when called again.
        """
        if self._dy is None:
            raise GradientError(f"this gradient of {self.parameter.name or 'a parameter'} has been computed already")
        dy, self._dy = self._dy, None
        with no_grad():
            self._walk.run_gradient(self._node, self._edge, dy)
        self._left[0] -= 1
        if not self._left[0]:
            self._node.release()


class Op:
    """A differentiable function of arrays, with one gradient function for each differentiable argument.

    Positional arguments may be Tensors, arrays or numbers; keyword-only arguments are options and pass through
    untouched (a dim, a rate, a group). Arguments with a gradient function must share one dtype; a number takes it.
    """

    def __init__(self, forward: Callable[..., tuple[Any, Saved]]) -> None:
        self.forward = forward
        self.name = forward.__name__.strip("_")
        self.__name__, self.__doc__, self.__module__ = self.name, forward.__doc__, forward.__module__
        self.gradients: dict[str, Callable[..., Array]] = {}
        parameters = inspect.signature(forward).parameters.values()
        self.arguments = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def gradient(self, argument: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
        """Register the gradient function of one argument: (node, dy) -> array of the argument's shape.

        With several outputs dy is a tuple, zeros where an output got no gradient. For a `*parts` argument the function
        gets a third value, which of the parts.
        """
        if argument not in self.arguments and argument != self.variadic:
            raise GradientError(f"{self.name} has no argument {argument!r}; it takes {', '.join(self.arguments)}")

        def register(function: Callable[..., Array]) -> Callable[..., Array]:
            self.gradients[argument] = function
            return function

        return register

    def argument_name(self, position: int) -> str:
        """The name of the positional argument at `position`."""
        if position < len(self.arguments):
            return self.arguments[position]
        assert self.variadic is not None
        return self.variadic

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The op's result: a Tensor, or a tuple of them. Remembers a node if grad mode is on and an input asks for it.

        Raises: ShapeError, DtypeError if the arguments do not fit.
        """
        args, options = self._bind(args, options)
        arrays = self._arrays(args)
        try:
            result, values = self.forward(*arrays, **options)
        except ShapeError:
            raise
        except ValueError as error:
            raise ShapeError(f"{self.name}: {self._describe(arrays)} do not fit: {error}") from error
        several = isinstance(result, (tuple, list))
        outputs = [np.asarray(r) if isinstance(r, np.generic) else r for r in (result if several else (result,))]
        memory = account.current()
        for output in outputs:
            memory.hold(output, "activations")
        node = self._record(args, arrays, options, values, outputs)
        tensors = tuple(Tensor._of(output, node, index) for index, output in enumerate(outputs))
        return tensors if several else tensors[0]

    def _bind(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move arguments given by keyword to their positions."""
        if not options or options.keys().isdisjoint(self.arguments):
            return args, options
        bound = inspect.signature(self.forward).bind(*args, **options)
        return bound.args, bound.kwargs

    def _arrays(self, args: Sequence[Any]) -> list[Any]:
        """Arguments as the forward takes them: arrays instead of Tensors, numbers as arrays of the arrays' dtype."""
        arrays = [a.data if isinstance(a, Tensor) else a for a in args]
        places = [i for i in range(len(arrays)) if self.argument_name(i) in self.gradients and arrays[i] is not None]
        first = None
        for i in places:
            if not is_array(arrays[i]):
                continue
            if first is None:
                first = arrays[i]
            elif arrays[i].dtype != first.dtype:
                raise DtypeError(f"{self.name}: {self._describe(arrays)} have different dtypes; "
                                 f"choose one with ops.cast(x, {dtype_name(first.dtype)!r})")
        for i in places:
            if not is_array(arrays[i]):
                arrays[i] = self._number(arrays[i], first)
        return arrays

    def _number(self, value: Any, like: Array | None) -> Array:
        """A Python or NumPy number as an array of `like`'s dtype and device; lists and the like as they are."""
        if isinstance(value, np.generic):
            value = value.item()  # np.float64(2) is meant as the number 2, not as a wish for float64
        if like is None or not isinstance(value, numbers.Number):
            return np.asarray(value)
        if like.dtype not in FLOATS and not isinstance(value, int):
            raise DtypeError(f"{self.name}: {value!r} does not fit dtype {dtype_name(like.dtype)}; "
                             f"use ops.cast to a float dtype first")
        return array_module(like).asarray(value, like.dtype)

    def _record(self, args: Sequence[Any], arrays: Sequence[Any], options: dict[str, Any], values: Saved,
                outputs: Sequence[Array]) -> Node | None:
        """The node of this call, or None if nobody will ask for its gradient."""
        if not is_grad_enabled():
            return None
        edges = [Edge(i, a) for i, a in enumerate(args)
                 if isinstance(a, Tensor) and a.requires_grad and self.argument_name(i) in self.gradients]
        if not edges:
            return None
        shapes = {self.argument_name(i): a.shape for i, a in enumerate(arrays) if is_array(a)}
        node = Node(self, edges, options, shapes)
        node.outputs = [(array_module(output), output.shape, output.dtype) for output in outputs]
        parameters = [edge.source for edge in edges if isinstance(edge.source, Parameter)]
        memory = account.current()
        for name, value in values.items():
            owner = next((p for p in parameters if p.data is value), None)
            node._saved[name] = value if owner is None else owner
            for array in value if isinstance(value, list) else [value]:
                if is_array(array) and owner is None:
                    memory.hold(array, "activations")
        return node

    def _describe(self, arrays: Sequence[Any]) -> str:
        """"a float32 (2, 3), b float32 (4,)" for an error message."""
        return ", ".join(f"{self.argument_name(i)} {dtype_name(a.dtype)} {a.shape}"
                         for i, a in enumerate(arrays) if is_array(a))


REGISTRY: dict[str, Op] = {}  # every op by name, for the tests that want each of them checked


def op(forward: Callable[..., tuple[Any, Saved]]) -> Op:
    """Make an op of a function of arrays that returns (result or tuple of results, saved(…))."""
    return Op(forward)


class _Arrived(NamedTuple):
    """The gradient of an output so far; `ours` if nobody else has that array, so that it may be added to in place."""

    gradient: Array
    ours: bool


class _Walk:
    """One backward: gradients on their way to their nodes, and how many contributions each leaf still waits for."""

    def __init__(self, defer_weights: bool) -> None:
        self.defer_weights = defer_weights
        self.deferred: list[WeightGradient] = []
        self._arrived: dict[int, list[_Arrived | None]] = {}  # id(node) -> one gradient per output
        self._waiting: dict[int, int] = {}                    # id(leaf) -> contributions still to come
        self._leaves: dict[int, Array] = {}                   # id(leaf with tensor hooks) -> sum so far

    def survey(self, start: Node) -> list[Node]:
        """All nodes behind `start`, oldest first; counts the contributions each leaf will get."""
        found, stack = {id(start): start}, [start]
        while stack:
            node = stack.pop()
            if node.released:
                raise GradientError(f"backward: an earlier backward ran through {node.op.name} and dropped what it "
                                    f"saved; run the forward again, or add the losses and go backward once")
            for edge in node.edges:
                source = edge.source
                if isinstance(source, Tensor):
                    self._waiting[id(source)] = self._waiting.get(id(source), 0) + 1
                elif id(source) not in found:
                    found[id(source)] = source
                    stack.append(source)
        return sorted(found.values(), key=lambda node: node.order)

    def visit(self, node: Node) -> None:
        """Everything that used this node's outputs has run: hand their gradients on."""
        dys = [None if arrived is None else arrived.gradient for arrived in self._arrived.pop(id(node))]
        for index, hooks in node.hooks.items():
            dys[index] = _call_hooks(hooks, dys[index])
        if len(dys) == 1:
            dy: Any = dys[0]
        else:
            dy = tuple(d if d is not None else xp.zeros(shape, kind)
                       for d, (xp, shape, kind) in zip(dys, node.outputs, strict=True))
        later = [edge for edge in node.edges if self.defer_weights and isinstance(edge.source, Parameter)]
        for edge in node.edges:
            if edge not in later:
                self.run_gradient(node, edge, dy)
        if not later:
            node.release()
            return
        node.released = True  # a second backward must not start here, but the weights' gradients are still to run
        left = [len(later)]
        self.deferred += [WeightGradient(self, node, edge, dy, left) for edge in later]

    def run_gradient(self, node: Node, edge: Edge, dy: Any) -> None:
        """Run one gradient function and hand its result to where the argument came from."""
        name = node.op.argument_name(edge.argument)
        function = node.op.gradients[name]
        gradient = function(node, dy) if name != node.op.variadic else function(
            node, dy, edge.argument - len(node.op.arguments))
        if isinstance(gradient, np.generic):
            gradient = np.asarray(gradient)
        ours = not _shares_buffer(gradient, dy)
        if isinstance(edge.source, Tensor):
            self._add_to_leaf(edge.source, gradient, ours)
        else:
            self.deliver(edge.source, edge.index, gradient, ours)

    def deliver(self, node: Node, index: int, gradient: Array, ours: bool) -> None:
        """Add to the gradient of one of a node's outputs; `ours` says that nobody else has `gradient`."""
        _, shape, kind = node.outputs[index]
        assert gradient.shape == shape and gradient.dtype == kind, (
            f"gradient for {node.op.name}'s result: {gradient.dtype} {gradient.shape}, expected {kind} {shape}")
        account.current().hold(gradient, "workspace")
        slots = self._arrived.setdefault(id(node), [None] * len(node.outputs))
        before = slots[index]
        if before is None:
            slots[index] = _Arrived(gradient, ours)
        elif before.ours:
            total = before.gradient
            total += gradient
        elif ours:
            gradient += before.gradient
            slots[index] = _Arrived(gradient, True)
        else:  # both are views of somebody's dy: leave them alone
            slots[index] = _Arrived(account.current().hold(before.gradient + gradient, "workspace"), True)

    def _add_to_leaf(self, leaf: Tensor, gradient: Array, ours: bool) -> None:
        assert gradient.shape == leaf.shape, f"gradient of shape {gradient.shape} for a leaf of shape {leaf.shape}"
        self._waiting[id(leaf)] -= 1
        last = not self._waiting[id(leaf)]
        if leaf.tensor_hooks:  # they see the total of this backward, so it is summed apart first
            if id(leaf) in self._leaves:
                gradient, ours = self._leaves.pop(id(leaf)) + gradient, True
            if not last:
                self._leaves[id(leaf)] = gradient
                return
            gradient, ours = _call_hooks(leaf.tensor_hooks, gradient), False
        leaf.accumulate(gradient, own=ours)
        if last and isinstance(leaf, Parameter):
            for hook in list(leaf.hooks):
                hook(leaf)


def _call_hooks(hooks: Sequence[Callable[[Array], Array | None]], gradient: Array | None) -> Any:
    """Pass a gradient through hooks; each may return a replacement."""
    if gradient is not None:
        for hook in list(hooks):
            replacement = hook(gradient)
            gradient = gradient if replacement is None else replacement
    return gradient


def _shares_buffer(gradient: Array, dy: Any) -> bool:
    """Whether `gradient` is dy or a view of it (the gradient of an addition is), or repeats one number by strides."""
    if not gradient.flags.c_contiguous:
        return True
    owner = account.owner_of(gradient)
    return any(owner is account.owner_of(d) for d in (dy if isinstance(dy, tuple) else (dy,)))


def backward(loss: Tensor, dy: Array | None = None, *, defer_weights: bool = False) -> list[WeightGradient]:
    """Add d loss / d leaf to the `.grad` of every leaf behind `loss`; see Tensor.backward."""
    if not loss.requires_grad:
        raise GradientError("backward: nothing behind this tensor asks for a gradient; was it computed under no_grad?")
    if dy is None:
        if loss.size != 1:
            raise GradientError(f"backward: a loss is one number, this tensor has shape {loss.shape}; "
                                f"take its sum or mean, or pass dy of that shape")
        dy = array_module(loss.data).ones(loss.shape, loss.dtype)
    elif dy.shape != loss.shape or dy.dtype != loss.dtype:
        raise GradientError(f"backward: dy is {dtype_name(dy.dtype)} {dy.shape}, "
                            f"the tensor is {dtype_name(loss.dtype)} {loss.shape}; they must agree")
    walk = _Walk(defer_weights)
    if loss.node is None:
        walk._waiting[id(loss)] = 1
        walk._add_to_leaf(loss, dy, False)
        return []
    nodes = walk.survey(loss.node)
    walk.deliver(loss.node, loss.index, dy, False)
    with no_grad():
        while nodes:
            walk.visit(nodes.pop())
    return walk.deferred
