"""Tensors: an array, and what the tape needs to know about it.

    x = tensor(array, requires_grad=True)
    loss = (x * x).sum()
    loss.backward()                       # x.grad == 2 * x.data

A Tensor is a leaf (made by hand) or the result of an op (then it has a node on the tape, see tape.py). A Parameter is a
leaf with a name, hooks that run when its gradient is final, and a gradient that can live in somebody else's buffer.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.autograd.recording import grad_mode, is_grad_enabled, no_grad
from minidist.device import account, backend
from minidist.device.backend import Array
from minidist.errors import DtypeError, GradientError, ShapeError

if TYPE_CHECKING:
    from minidist.autograd.backward import Surveyed, WeightGradient
    from minidist.autograd.tape import Node


__all__ = ["Parameter", "Tensor", "grad_mode", "is_grad_enabled", "no_grad", "tensor"]


def _ops() -> Any:
    """The ops behind the operators; they are built on this module, so it can only name them when used."""
    from minidist.autograd import ops  # noqa: PLC0415

    return ops


class Tensor:
    """An array (NumPy or CuPy) that ops can follow."""

    __slots__ = ("data", "grad", "requires_grad", "node", "index", "tensor_hooks", "__weakref__")
    data: Array                # the array itself
    grad: Array | None         # the gradient summed over the backwards since the last zero_grad, or None

    def __init__(self, data: Array, *, requires_grad: bool = False) -> None:
        if requires_grad and data.dtype not in backend.FLOATS:
            raise DtypeError(f"only floats have gradients, not {backend.dtype_name(data.dtype)}; "
                             f"cast to float32 or leave requires_grad off")
        self.data = data
        self.grad = None
        self.requires_grad = requires_grad
        self.node: Node | None = None
        self.index = 0
        self.tensor_hooks: list[Callable[[Array], Array | None]] = []

    @classmethod
    def _of(cls, data: Array, node: "Node | None", index: int) -> "Tensor":
        """The result of an op: output `index` of `node`."""
        result = Tensor(data)
        result.requires_grad, result.node, result.index = node is not None, node, index
        return result

    # ------------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

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
        raise TypeError("a Tensor is not silently turned into an array; take its .data")

    __array_ufunc__ = None  # array + tensor asks Tensor.__radd__, instead of adding element by element

    def item(self) -> float:
        """The one number it holds, as a Python number."""
        if self.size != 1:
            raise ShapeError(f"item() takes a tensor of one number, this one has shape {self.shape}")
        return self.data.item()

    def detach(self) -> "Tensor":
        """The same array, cut off from the tape."""
        return Tensor(self.data)

    # -------------------------------------------------------------------------------------------------- gradients

    def backward(self, dy: Array | None = None, *, defer_weights: bool = False,
                 surveyed: "Surveyed | None" = None) -> "list[WeightGradient]":
        """Add the gradient of this tensor (of sum(self * dy)) to the `.grad` of every leaf behind it.

        Args:    dy: gradient of what follows, shape and dtype of self; may be left out for one number (then it is 1).
                 defer_weights: leave the gradient functions that end in a Parameter for later and return them, in the
                 order they would have run; calling them all gives what an ordinary backward gives, to the bit.
                 surveyed: is told, before anything runs, the ids of the leaves that this backward will reach.
        Raises:  GradientError for a second backward through the same nodes, a missing dy, or nothing to differentiate.
        """
        from minidist.autograd.backward import backward  # noqa: PLC0415 - it is built on this module

        return backward(self, dy, defer_weights=defer_weights, surveyed=surveyed)

    def register_hook(self, hook: Callable[[Array], Array | None]) -> Callable[[], None]:
        """Call `hook(dy)` in each backward when this tensor's total gradient is known; it may return a replacement.

        By then everything made from this tensor, and everything younger than it, has run its gradients.
        Returns: a function that removes the hook.
        """
        if not self.requires_grad:
            raise GradientError("register_hook: this tensor asks for no gradient, so the hook would never run")
        hooks = self.tensor_hooks if self.node is None else self.node.hooks.setdefault(self.index, [])
        hooks.append(hook)
        return lambda: hooks.remove(hook) if hook in hooks else None

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own` says that the array is nobody else's, so it may be kept."""
        if self.grad is None:
            self.grad = account.current().hold(gradient if own else gradient.copy(), "gradients")
        else:
            backend.add_into(self.grad, gradient)

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.grad = None

    # -------------------------------------------------------------------------------------------------- operators

    def __add__(self, other: Any) -> "Tensor":
        return _ops().add(self, other)

    def __sub__(self, other: Any) -> "Tensor":
        return _ops().sub(self, other)

    def __mul__(self, other: Any) -> "Tensor":
        return _ops().mul(self, other)

    def __truediv__(self, other: Any) -> "Tensor":
        return _ops().div(self, other)

    def __radd__(self, other: Any) -> "Tensor":
        return _ops().add(other, self)

    def __rsub__(self, other: Any) -> "Tensor":
        return _ops().sub(other, self)

    def __rmul__(self, other: Any) -> "Tensor":
        return _ops().mul(other, self)

    def __rtruediv__(self, other: Any) -> "Tensor":
        return _ops().div(other, self)

    def __neg__(self) -> "Tensor":
        return _ops().neg(self)

    def __pow__(self, exponent: float) -> "Tensor":
        return _ops().power(self, exponent)

    def __matmul__(self, other: Any) -> "Tensor":
        return _ops().matmul(self, other)

    def __rmatmul__(self, other: Any) -> "Tensor":
        return _ops().matmul(other, self)

    def __getitem__(self, index: Any) -> "Tensor":
        return _ops().getitem(self, index)

    def reshape(self, *shape: Any) -> "Tensor":
        """reshape(2, 3) or reshape((2, 3)); one of the sizes may be -1."""
        return _ops().reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def transpose(self, *dims: Any) -> "Tensor":
        """transpose() reverses the dims; transpose(0, 2, 1) or transpose((0, 2, 1)) orders them."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        return _ops().transpose(self, given or None)

    def sum(self, dim: Any = None, *, keepdims: bool = False) -> "Tensor":
        """Sum over all dims, one, or several."""
        return _ops().sum(self, dim=dim, keepdims=keepdims)

    def mean(self, dim: Any = None, *, keepdims: bool = False) -> "Tensor":
        """Mean over all dims, one, or several."""
        return _ops().mean(self, dim=dim, keepdims=keepdims)


class Parameter(Tensor):
    """A weight: a leaf with a name, hooks, and a gradient that may live in a buffer of the strategy.

    `hooks` are called with the parameter once per backward that reaches it, when the last contribution to its gradient
    has arrived (also for tied weights, which get several). `data` may be replaced at any time, by a shard or by an
    empty array: the tape reads it again when backward needs it. `arrival()`, if set, is called before `data` is read:
    its numbers are on their way from other ranks. `lender(parameter)`, if set, gives the view to bind when a gradient
    comes and none is bound.

    What a strategy of the data axis reads, and another strategy that cut the model has set:

    shared_by       the ranks that hold the parameter, if not all ranks of the data axis (experts, chapter 18)
    layout          a sort key: parameters of one key lie in buckets and vectors of their own (chapter 17)
    stays_whole     ZeRO-3 leaves the parameter whole on each rank, because no gradient moves it
    """

    __slots__ = ("name", "hooks", "arrival", "lender", "shared_by", "layout", "stays_whole", "_data", "_grad", "_view",
                 "_fresh")

    def __init__(self, data: Array, *, name: str = "", requires_grad: bool = True) -> None:
        self._view: Array | None = None
        self._fresh = False
        self.arrival: Callable[[], None] | None = None
        super().__init__(data, requires_grad=requires_grad)
        self.name = name
        self.hooks: list[Callable[[Parameter], None]] = []
        self.lender: Callable[[Parameter], Array] | None = None
        self.shared_by: Any = None
        self.layout: tuple[int, ...] = ()
        self.stays_whole = False

    @property
    def data(self) -> Array:  # type: ignore[override]  # the slot of Tensor becomes a property, to be counted
        """The array itself; returns when its numbers have arrived."""
        if self.arrival is not None:
            self.arrival()
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self._data = account.current().hold(array, "parameters")

    @property
    def grad(self) -> Array | None:  # type: ignore[override]
        """The gradient, or None. With a bound view: that view while it is fresh, None when it is stale."""
        if self._view is None:
            return self._grad
        return self._view if self._fresh else None

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
        """Let gradients be written into `view` (shape and dtype of data), a piece of a bucket or shard; None unbinds.

        The view starts stale: the first contribution after this or after zero_grad overwrites it, later ones add.
        """
        if view is not None and (view.shape != self.shape or view.dtype != self.dtype):
            raise ShapeError(f"bind_gradient: parameter {self.name!r} is {self.dtype} {self.shape}, "
                             f"the view is {view.dtype} {view.shape}; they must agree")
        self._view, self._grad, self._fresh = view, None, False

    def gradient_room(self) -> Array | None:
        """The bound view if nothing was added to it yet: a gradient function may write its result there."""
        if self._view is None and self.lender is not None:
            self.bind_gradient(self.lender(self))
        return None if self._fresh or self.tensor_hooks else self._view

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient: into the bound view if there is one."""
        self.gradient_room()            # may borrow it
        if self._view is None:
            super().accumulate(gradient, own=own)
        elif self._fresh:
            backend.add_into(self._view, gradient)
        else:
            if gradient is not self._view:
                self._view[...] = gradient
            self._fresh = True

    def zero_grad(self) -> None:
        """Forget the gradient; a bound view becomes stale and is not touched."""
        self._grad, self._fresh = None, False


def tensor(values: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A leaf Tensor of an array, a number or nested lists; an array is used as it is, not copied.

    Raises: DtypeError if `requires_grad` and not a float dtype; ConfigError for an unknown dtype.
    """
    array = values.data if isinstance(values, Tensor) else values
    if not backend.is_array(array):
        array = np.asarray(array)
    if dtype is not None:
        array = array.astype(backend.dtype(dtype), copy=False)
    return Tensor(array, requires_grad=requires_grad)
