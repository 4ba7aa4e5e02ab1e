"""Arithmetic with broadcasting, and elementwise functions.

Shapes broadcast as NumPy's do; a gradient is summed over the dims that were broadcast. Low
precision is computed in float32 and rounded once. CuPy does so itself, in one launch, where it adds
and multiplies; NumPy does so slowly.
"""

from collections.abc import Iterator
from typing import Any

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import (
    Array,
    array_module,
    dtype,
    narrow,
    on_host,
    sum_by_kernel,
    widen,
)
from minidist.errors import DtypeError

# of one array. Smaller ones cost more in calls than the nearer cache saves
BLOCK_BYTES = 256 * 1024


def row_blocks(x: Array) -> Iterator[slice]:
    """Yield slices over dim 0 of x, for a fused op: the temporaries of a block stay in the
    second-level cache.

    NumPy makes one pass over memory per operation, so ten passes over 4 MB would read and write 80
    MB. On a GPU there is one block, because CuPy launches a kernel per pass, and many small kernels
    cost more than they save.
    """
    n = len(x)
    per_row = max(1, x.nbytes // max(1, n))
    height = max(1, min(n, BLOCK_BYTES // per_row) if on_host(x) else n)
    return (slice(start, min(start + height, n)) for start in range(0, n, height))


def _computed(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the operands of one operation: on the host low precision as float32, on a GPU
    unchanged."""
    return (widen(a), widen(b)) if on_host(a, b) else (a, b)


def unbroadcast(gradient: Array, shape: tuple[int, ...], kind: Any = None) -> Array:
    """Sum `gradient` over the dims in which `shape` was broadcast; rounded once, to `kind` if it is
    given."""
    kind = gradient.dtype if kind is None else kind
    if gradient.shape == shape:
        return narrow(gradient, kind)
    lead = gradient.ndim - len(shape)
    dims = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and gradient.shape[lead + i] != 1
    )
    return narrow(widen(gradient).sum(axis=dims).reshape(shape), kind)


@op
def add(a: Array, b: Array) -> tuple[Array, Saved]:
    """Return a + b, with broadcasting."""
    if not on_host(a, b) and (fast := sum_by_kernel(a, b)) is not None:
        return fast, saved()
    a_wide, b_wide = _computed(a, b)
    return narrow(a_wide + b_wide, a.dtype), saved()


@op
def sub(a: Array, b: Array) -> tuple[Array, Saved]:
    """Return a - b, with broadcasting."""
    return narrow(widen(a) - widen(b), a.dtype), saved()


@add.gradient("a")
@sub.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(dy, node.shapes["a"])


@add.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(dy, node.shapes["b"])


@sub.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(-dy, node.shapes["b"])


@op
def mul(a: Array, b: Array) -> tuple[Array, Saved]:
    """Return a b elementwise, with broadcasting."""
    a_wide, b_wide = _computed(a, b)
    return narrow(a_wide * b_wide, a.dtype), saved(a=a, b=b)


@mul.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(widen(dy) * widen(node.b), node.shapes["a"], dy.dtype)


@mul.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(widen(dy) * widen(node.a), node.shapes["b"], dy.dtype)


@op
def div(a: Array, b: Array) -> tuple[Array, Saved]:
    """Return a / b, with broadcasting."""
    return narrow(widen(a) / widen(b), a.dtype), saved(a=a, b=b)


@div.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(widen(dy) / widen(node.b), node.shapes["a"], dy.dtype)


@div.gradient("b")
def _(node: Node, dy: Array) -> Array:
    b = widen(node.b)
    # b² may overflow
    return unbroadcast(-widen(dy) * (widen(node.a) / b / b), node.shapes["b"], dy.dtype)


@op
def neg(a: Array) -> tuple[Array, Saved]:
    """Return -a."""
    return -a, saved()


@neg.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return -dy


def _raise_to(a: Array, exponent: float) -> Array:
    """Return a ** exponent, by products for small whole exponents: NumPy's z**3 costs 200 times
    z*z*z."""
    xp = array_module(a)
    if exponent in (0, 1):
        return xp.ones_like(a) if exponent == 0 else a.copy()
    if exponent in (2, 3, 4):
        square = a * a
        return square if exponent == 2 else square * (a if exponent == 3 else square)
    return xp.sqrt(a) if exponent == 0.5 else xp.power(a, xp.asarray(exponent, a.dtype))


@op
def power(a: Array, exponent: float) -> tuple[Array, Saved]:
    """Return a ** exponent. Args: exponent: a plain number. Raises: DtypeError for anything
    else."""
    if not isinstance(exponent, (int, float)):
        raise DtypeError(
            f"power: the exponent must be a plain number, not {type(exponent).__name__}; for a "
            "tensor use exp(log(a) * exponent)"
        )
    return narrow(_raise_to(widen(a), exponent), a.dtype), saved(a=a, exponent=exponent)


@power.gradient("a")
def _(node: Node, dy: Array) -> Array:
    a = widen(node.a)
    if node.exponent == 0:  # 0, also where a ** -1 is infinite
        return array_module(a).zeros_like(dy)
    return narrow(
        widen(dy) * (_raise_to(a, node.exponent - 1) * a.dtype.type(node.exponent)), dy.dtype
    )


@op
def exp(a: Array) -> tuple[Array, Saved]:
    """Return e to the power a, element by element."""
    y = array_module(a).exp(a)
    return y, saved(y=y)


@exp.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return dy * node.y


@op
def log(a: Array) -> tuple[Array, Saved]:
    """Return the natural logarithm."""
    return array_module(a).log(a), saved(a=a)


@log.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return dy / node.a


@op
def tanh(a: Array) -> tuple[Array, Saved]:
    """Return the hyperbolic tangent."""
    return array_module(a).tanh(a), saved(a=a)


@tanh.gradient("a")
def _(node: Node, dy: Array) -> Array:
    # 1 - tanh² = (2t / (1 + t²))², and nothing cancels
    t = array_module(dy).exp(-abs(widen(node.a)))
    return narrow(widen(dy) * (2 * t / (1 + t * t)) ** 2, dy.dtype)


@op
def sqrt(a: Array) -> tuple[Array, Saved]:
    """Return the square root."""
    y = array_module(a).sqrt(a)
    return y, saved(y=y)


@sqrt.gradient("a")
def _(node: Node, dy: Array) -> Array:
    y = widen(node.y)
    return narrow(widen(dy) / (y + y), dy.dtype)


@op
def where(condition: Array, a: Array, b: Array) -> tuple[Array, Saved]:
    """Return a where `condition` (a bool array, without gradient) is True, else b; all three
    broadcast."""
    return array_module(a, b).where(condition, a, b), saved(condition=condition)


@where.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(
        array_module(dy).where(node.condition, dy, dy.dtype.type(0)), node.shapes["a"]
    )


@where.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(
        array_module(dy).where(node.condition, dy.dtype.type(0), dy), node.shapes["b"]
    )


@op
def cast(a: Array, kind: Any) -> tuple[Array, Saved]:
    """Return a in another dtype ("float32", "bfloat16", …); the gradient is cast back."""
    return a.astype(dtype(kind)), saved(kind=a.dtype)


@cast.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return dy.astype(node.kind)
