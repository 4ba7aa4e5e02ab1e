"""Tensors: an array, and its place on the tape.

    x = tensor(array, requires_grad=True)
    loss = (x * x).sum()
    loss.backward()                       # x.grad == 2 * x.data

A Tensor is a leaf (made by hand) or the result of an op (then it has a node on the tape, see
tape.py).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from minidist.autograd.grad_mode import grad_mode, is_grad_enabled, no_grad
from minidist.device import account, backend
from minidist.device.backend import Array
from minidist.errors import ConfigError, DtypeError, GradientError, ShapeError

__all__ = [
    "FUNCTIONS",
    "GradientHook",
    "Parameter",
    "Surveyed",
    "Tensor",
    "WeightGradient",
    "grad_mode",
    "is_grad_enabled",
    "no_grad",
    "tensor",
]

FUNCTIONS: dict[str, Callable[..., "Tensor"]] = {}
"""All ops by name: those behind `a + b`, `x[i]`, `x.sum()`, and the others. autograd/__init__ fills
it, because ops are built on this module."""

OTHER_NAMES = {
    "T": "x.transpose()",
    "view": "x.reshape(…)",
    "flatten": "x.reshape(…)",
    "unsqueeze": "x.reshape(…)",
    "squeeze": "x.reshape(…)",
    "permute": "x.transpose(…)",
    "numpy": "x.data",
    "cpu": "minidist.device.backend.to_host(x.data)",
    "pow": "x ** power",
    "mm": "x @ y",
    "amax": "x.max(…)",
}
"""Methods of other libraries' tensors -> what to write here."""

# takes a gradient; may return a replacement
GradientHook: TypeAlias = Callable[[Array], Array | None]
# takes the ids of the leaves a backward will reach
Surveyed: TypeAlias = Callable[[Collection[int]], None]


def _array_of(value: Any) -> Any:
    """Return the array of a Tensor; anything else as it is."""
    return value.data if isinstance(value, Tensor) else value


def _operators(
    name: str,
) -> tuple[Callable[["Tensor", Any], "Tensor"], Callable[["Tensor", Any], "Tensor"]]:
    """Return the methods of Tensor for an operator: for a Tensor on its left, and for one on its
    right."""
    return lambda self, other: FUNCTIONS[name](self, other), lambda self, other: FUNCTIONS[name](
        other, self
    )


class Tensor:
    """A NumPy or CuPy array, which is not copied, and whose ops the tape records.

    Args:    requires_grad: whether backward computes its gradient.
    Raises:  DtypeError if requires_grad and the dtype is not a float.
    """

    __slots__ = ("_data", "grad", "requires_grad", "node", "index", "tensor_hooks", "__weakref__")
    _data: np.ndarray  # or CuPy's
    # backward() of backward.py, set by autograd/__init__
    _backward: ClassVar[Callable[..., "list[WeightGradient]"]]
    # whether a leaf's array may be put away from forward to backward
    lends_data: ClassVar[bool] = False
    grad: Array | None  # the gradient summed over the backwards since the last zero_grad, or None

    def __init__(self, data: Array, *, requires_grad: bool = False) -> None:
        if requires_grad and data.dtype not in backend.FLOATS:
            raise DtypeError(
                f"only floats have gradients, not {backend.dtype_name(data.dtype)}; cast to "
                "float32 in this machine's byte order, or omit requires_grad"
            )
        self.data = data
        self.requires_grad = requires_grad
        self.grad = None
        self.node: Any = None  # the tape.Node that made this Tensor, as its output `index`; or None
        self.index = 0
        self.tensor_hooks: list[GradientHook] = []

    @classmethod
    def _of(cls, data: Array, node: Any, index: int) -> "Tensor":
        """Return the result of an op: output `index` of `node`."""
        result = Tensor(data)
        result.requires_grad = node is not None
        result.node = node
        result.index = index
        return result

    @property
    def data(self) -> Array:
        """Return the array itself."""
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self._data = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    def __repr__(self) -> str:
        node = f", from {self.node.op.name}" if self.node is not None else ""
        return f"{type(self).__name__}({self.data!r}{', requires_grad=True' if self.requires_grad else ''}{node})"

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> "Iterator[Tensor]":
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("a Tensor is not converted to an array implicitly; use its .data")

    # array + tensor asks Tensor.__radd__, instead of adding element by element
    __array_ufunc__ = None

    def item(self) -> float:
        """Return the element of a tensor of one, as a Python number. Raises: ShapeError for another
        size."""
        if self.size != 1:
            raise ShapeError(
                f"item() needs a tensor of one number, but this tensor has shape {self.shape}"
            )
        number: float = self.data.item()
        return number

    def detach(self) -> "Tensor":
        """Return the same array, cut off from the tape."""
        return Tensor(self.data)

    def backward(
        self,
        dy: Array | None = None,
        *,
        defer_weights: bool = False,
        surveyed: Surveyed | None = None,
    ) -> "list[WeightGradient]":
        """Add the gradient of sum(self * dy) to the `.grad` of every leaf behind this tensor.

        Args:    dy: the gradient of this tensor, with its shape and dtype; default: 1, for a tensor
                 of one number.
                 defer_weights: do not run the gradient functions that end in a Parameter, but
                 return them.
                 surveyed: called before anything runs.
        Returns: the deferred functions in their order. Once all are called, gradients have the
        usual bits.
        Raises:  GradientError for a second backward through the same nodes, a missing dy, or
                 nothing to differentiate.
        """
        return self._backward(dy, defer_weights=defer_weights, surveyed=surveyed)

    def register_hook(self, hook: GradientHook) -> Callable[[], None]:
        """Call `hook(dy)` in each backward when this tensor's total gradient is known; a result
        replaces dy.

        By then the gradients of everything made from this tensor, and of everything younger than
        it, have run.
        Returns: a function that removes the hook.
        Raises:  GradientError if this tensor needs no gradient.
        """
        if not self.requires_grad:
            raise GradientError(
                "register_hook: this tensor does not require a gradient, so the hook would never "
                "run"
            )
        hooks = (
            self.tensor_hooks if self.node is None else self.node.hooks.setdefault(self.index, [])
        )
        hooks.append(hook)
        return lambda: hooks.remove(hook) if hook in hooks else None

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own`: the array `gradient` has no other user, so it may
        be kept."""
        if self.grad is None:
            self.grad = account.current().hold(gradient if own else gradient.copy(), "gradients")
        else:
            backend.add_into(self.grad, gradient)

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.grad = None

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __matmul__, __rmatmul__ = _operators("matmul")
    __getitem__ = _operators("getitem")[0]
    __pow__ = _operators("power")[0]

    def __neg__(self) -> "Tensor":
        return FUNCTIONS["neg"](self)

    def reshape(self, *shape: Any) -> "Tensor":
        """Return the tensor in another shape: reshape(2, 3) or reshape((2, 3)); one of the sizes
        may be -1."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return FUNCTIONS["reshape"](self, given)

    def transpose(self, *dims: Any) -> "Tensor":
        """Return the tensor with its dims in another order: transpose() reverses the dims;
        transpose(0, 2, 1) or transpose((0, 2, 1)) orders them."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        return FUNCTIONS["transpose"](self, given or None)

    def sum(self, dim: Any = None, *, keepdims: bool = False) -> "Tensor":
        """Sum over all dims, one, or several."""
        return FUNCTIONS["sum"](self, dim=dim, keepdims=keepdims)

    def mean(self, dim: Any = None, *, keepdims: bool = False) -> "Tensor":
        """Return the mean over all dims, one, or several."""
        return FUNCTIONS["mean"](self, dim=dim, keepdims=keepdims)

    def max(self, dim: Any = None, *, keepdims: bool = False) -> "Tensor":
        """Return the maximum over all dims, one, or several; equal maxima share the gradient."""
        return FUNCTIONS["max"](self, dim=dim, keepdims=keepdims)

    def relu(self) -> "Tensor":
        """Return max(x, 0), element by element."""
        return FUNCTIONS["relu"](self)

    def tanh(self) -> "Tensor":
        """Return the hyperbolic tangent, element by element."""
        return FUNCTIONS["tanh"](self)

    def exp(self) -> "Tensor":
        """Return e to the power x, element by element."""
        return FUNCTIONS["exp"](self)

    def log(self) -> "Tensor":
        """Return the natural logarithm, element by element."""
        return FUNCTIONS["log"](self)

    def sqrt(self) -> "Tensor":
        """Return the square root, element by element."""
        return FUNCTIONS["sqrt"](self)

    # Comparisons have no gradient, so they give arrays of bool: ops.where(x > 0, x, 0). `==` stays
    # the identity of the object, because tensors are keys of sets and dictionaries.

    def __lt__(self, other: Any) -> Array:
        return self.data < _array_of(other)

    def __le__(self, other: Any) -> Array:
        return self.data <= _array_of(other)

    def __gt__(self, other: Any) -> Array:
        return self.data > _array_of(other)

    def __ge__(self, other: Any) -> Array:
        return self.data >= _array_of(other)

    def __getattr__(self, name: str) -> Any:
        """Refuse a name that Tensor does not have. Raises: AttributeError, which names the op of
        this name if there is one."""
        instead = OTHER_NAMES.get(name, f"minidist.ops.{name}(x, …)" if name in FUNCTIONS else "")
        hint = f"; write {instead}" if instead else ""
        raise AttributeError(f"a Tensor has no {name!r}{hint}")


class Parameter(Tensor):
    """A weight: a leaf with a name, hooks, and a gradient that may live in a buffer of the
    strategy.

    The tape reads `data` again when backward needs it, so a strategy may replace it at any time.

    Attributes: hooks        hook(parameter): called once in each backward that reaches the
                             parameter, when the last contribution to its gradient has arrived (a
                             tied weight gets several)
                arrival      arrival(), if set, is called before `data` is read; it waits for other
                             ranks' numbers
                lender       lender(parameter), if set, returns the view to bind when a gradient
                             arrives and none is bound
                shared_by    the ranks that hold the parameter, if not all of the data axis
                             (experts, chapter 18)
                layout       a sort key: buckets and vectors hold parameters of one layout only
                             (chapter 17)
                stays_whole  ZeRO-3 leaves the parameter whole on each rank, because no gradient
                             moves it
                in_vector    `data` is a view of a strategy's vector: what is assigned is copied
                             there
                kept_by      who keeps the numbers that `data` is made from, if it is not `data`
                             itself: then `data` cannot be assigned
    """

    __slots__ = (
        "name",
        "hooks",
        "arrival",
        "lender",
        "shared_by",
        "layout",
        "stays_whole",
        "in_vector",
        "kept_by",
        "_grad",
        "_view",
        "_fresh",
    )

    def __init__(self, data: Array, *, name: str = "", requires_grad: bool = True) -> None:
        self._view: Array | None = None
        self._fresh = self.in_vector = False
        self.kept_by = ""
        self.arrival: Callable[[], None] | None = None
        super().__init__(data, requires_grad=requires_grad)
        self.name = name
        self.hooks: list[Callable[[Parameter], None]] = []
        self.lender: Callable[[Parameter], Array] | None = None
        self.shared_by: Any = None
        self.layout: tuple[int, ...] = ()
        self.stays_whole = False

    @property
    def data(self) -> Array:
        """Return the array itself. Wait until its numbers have arrived."""
        if self.arrival is not None:
            self.arrival()
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self.assign(array)

    def assign(self, array: Array) -> None:
        """Set `data` to this array, or with in_vector to its numbers.

        Raises:  ConfigError, ShapeError.
        """
        self.check_assignable()
        if not self.in_vector:
            self.place(array)
        elif array.shape != self.shape or array.dtype != self.dtype:
            raise ShapeError(
                f"parameter {self.name!r} is {self.dtype} {self.shape}, but the assigned data is "
                f"{array.dtype} {array.shape}; dtype and shape must be the same"
            )
        else:
            self.data[...] = array

    def check_assignable(self) -> None:
        """Raise ConfigError if a strategy would soon replace what is assigned to `data`."""
        if self.kept_by:
            raise ConfigError(
                f"parameter {self.name!r}: its values are kept by {self.kept_by}, which overwrites "
                "data in each step; load a checkpoint (Trainer.load), or set data before the "
                "training is set up"
            )

    def keep_by(self, keeper: str) -> None:
        """Set `kept_by`; on the host `data` is read-only from here on."""
        self.kept_by = keeper
        if isinstance(self._data, np.ndarray):
            read_only = self._data.view()
            read_only.flags.writeable = False
            self.place(read_only)

    def place(self, array: Array) -> None:
        """Let `data` be this array; for strategies."""
        self._data = account.current().hold(array, "parameters")

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the shape of the whole parameter; this parameter may be a shard
        (nn/weight_shard.py)."""
        return self.shape

    def whole_name(self, name: str) -> str:
        """Return the name of the whole parameter; `name` is the name of this one."""
        return name

    @property
    def grad(self) -> Array | None:
        """Return the gradient, or None. With a bound view: that view while it is fresh, None when
        it is stale."""
        return self._grad if self._view is None else self._view if self._fresh else None

    @grad.setter
    def grad(self, array: Array | None) -> None:
        if array is None:
            self.zero_grad()
        elif self._view is None:
            self._grad = account.current().hold(array, "gradients")
        else:
            self._view[...] = array
            self._fresh = True

    def bind_gradient(self, view: Array | None) -> None:
        """Let gradients be written into `view`, a part of a bucket or shard; None unbinds.

        The view starts stale: the first contribution after this or after zero_grad overwrites it,
        later ones add.
        Raises:  ShapeError if its shape or dtype is not that of data.
        """
        if view is not None and (view.shape != self.shape or view.dtype != self.dtype):
            raise ShapeError(
                f"bind_gradient: parameter {self.name!r} is {self.dtype} {self.shape}, but the "
                f"view is {view.dtype} {view.shape}; dtype and shape must be the same"
            )
        self._view = view
        self._grad = None
        self._fresh = False

    def gradient_room(self) -> Array | None:
        """Return the bound view while it is stale, else None: a gradient function may write its
        result there. If no view is bound, first bind the one that `lender` gives."""
        if self._view is None and self.lender is not None:
            self.bind_gradient(self.lender(self))
        return None if self._fresh or self.tensor_hooks else self._view

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient, as Tensor.accumulate does; into the bound view if there is one."""
        self.gradient_room()  # may bind the lender's view
        if self._view is None:
            super().accumulate(gradient, own=own)
        elif self._fresh:
            backend.add_into(self._view, gradient)
        else:
            if gradient is not self._view:
                self._view[...] = gradient
            self._fresh = True

    def zero_grad(self) -> None:
        """Forget the gradient; a bound view becomes stale."""
        self._grad = None
        self._fresh = False


@dataclass(eq=False)
class WeightGradient:
    """One deferred gradient of a weight (backward(defer_weights=True)): the "W" of zero-bubble
    pipelines.

    Call it once, at any later time. Until then the node's saved values and the gradient of its
    output stay alive.
    """

    parameter: Parameter
    _compute: Callable[[], None] | None

    def __call__(self) -> None:
        """Compute the gradient and add it to the parameter's. Raises: GradientError for a second
        call."""
        if self._compute is None:
            raise GradientError(
                f"this gradient of {self.parameter.name or 'a parameter'} has been computed already"
            )
        compute = self._compute
        self._compute = None
        with no_grad():
            compute()


def tensor(values: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a leaf Tensor of an array (not copied), a number or nested lists, cast to `dtype`, a
    name or a dtype.

    Raises:  DtypeError if `requires_grad` and not a float dtype; ConfigError for an unknown dtype.
    """
    array = values.data if isinstance(values, Tensor) else values
    if not backend.is_array(array):
        array = np.asarray(array)
    if dtype is not None:
        array = array.astype(backend.dtype(dtype), copy=False)
    return Tensor(array, requires_grad=requires_grad)
