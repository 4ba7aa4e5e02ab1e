"""GELU, SiLU, SwiGLU, ReLU, softmax and log-softmax.

GELU and SiLU compute their slope together with their value, while the block of rows is in the
cache, and save it instead of x. Then backward is one product. On a GPU kernels keep x, as computing
the slope again costs less there.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import column_sums, rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import LOW_PRECISION, Array, array_module, narrow, on_host, widen
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ShapeError

_GELU_IN = 0.7978845608028654  # sqrt(2 / pi)
_GELU_CUBE = 0.044715


_Bounds: TypeAlias = tuple[float, float]  # of |x|, in float32 and in float64
_Block: TypeAlias = Callable[[Any, Array, Array, bool, Array, Array, Array], None]


def _gated(
    xp: Any, x: Array, u: Array, near: bool, y: Array, slope: Array, dz: Array | None = None
) -> None:
    """Compute y = x h with h = sigmoid(z), u = -z (overwritten), and slope = h + y (1 - h) dz/dx.
    No difference cancels.

    With r = exp(-z): h = 1 / (1 + r) and 1 - h = r / (1 + r), so each is right to its last digits
    where it is small. 1 + tanh(z/2) would lose all digits of a small h. If x is not near, r =
    exp(-z/2): h = (1/r) / (r + 1/r) and 1 - h = r / (r + 1/r); so r overflows at twice the |z|, for
    one division more.
    """
    if not near:
        u *= 0.5
    r = xp.exp(u, out=u)
    h = slope
    if near:
        xp.add(r, 1.0, out=h)
        xp.divide(1.0, h, out=h)  # NumPy's reciprocal takes twice as long
        r *= h  # 1 - h
    else:
        xp.reciprocal(r, out=h)
        c = xp.reciprocal(r + h)
        h *= c
        r *= c
    xp.multiply(x, h, out=y)
    r *= y
    if dz is not None:
        r *= dz
    h += r


def _gelu_block(
    xp: Any, x: Array, inner: Array, near: bool, y: Array, slope: Array, room: Array
) -> None:
    """Compute a block with z = 2 x (c + k x²), as (1 + tanh a) / 2 = sigmoid(2 a); dz/dx = 2 (c + 3
    k x²)."""
    c = _GELU_IN
    k = _GELU_IN * _GELU_CUBE
    (u, s) = room
    xp.multiply(inner, inner, out=s)
    s *= -2.0 * k
    s -= 2.0 * c  # s = -2 (c + k x²)
    xp.multiply(inner, s, out=u)
    s *= -3.0
    s -= 4.0 * c
    _gated(xp, x, u, near, y, slope, s)


def _silu_block(
    xp: Any, x: Array, inner: Array, near: bool, y: Array, slope: Array, room: Array
) -> None:
    """Compute a block with z = x."""
    _gated(xp, x, xp.negative(inner, out=room[0]), near, y, slope)


def least(dtype: "np.dtype[Any]") -> float:
    """Return the least number whose product with a gradient of eps is still normal."""
    return float(np.finfo(dtype).tiny / np.finfo(dtype).eps)


def _run_block(
    xp: Any, block: _Block, near: float, far: float, x: Array, y: Array, slope: Array, room: Array
) -> None:
    """Run a block function. No number's result depends on the others in its block.

    Up to `near` exp(-z) is finite and no result is below `least`. Beyond `far` sigmoid(z) is 0 or
    1, up to there exp(-z/2) is finite. On a GPU the host would wait for the answer whether all are
    near, so none is taken for it.

    On the host a result below `least` is 0. Products with it would be subnormal, and a processor
    takes a hundred cycles and more for each such number: after 1,600 steps 600 in an array made its
    matrix product six times as long.
    """
    if not on_host(x):
        block(xp, x, xp.clip(x, -far, far), False, y, slope, room)
    elif -near <= x.min() and x.max() <= near:
        block(xp, x, x, True, y, slope, room)
    else:
        where = np.flatnonzero(~(np.abs(x) <= near))  # also of NaN
        few = x[where]
        cut = np.clip(x, -near, near)
        results = np.empty((2, len(few)), x.dtype)
        block(xp, cut, cut, True, y, slope, room)
        block(xp, few, np.clip(few, -far, far), False, results[0], results[1], room[:, : len(few)])
        results[np.abs(results) < least(x.dtype)] = 0
        y[where], slope[where] = results


def _value_and_slope(
    block: _Block,
    near: _Bounds,
    far: _Bounds,
    x: Array,
    bias: Array | None = None,
    overwrite: bool = False,
) -> tuple[Array, Array]:
    """Run a block function over all of x, or x + bias, in float32 or better. Returns: value and
    slope in x's dtype.

    overwrite: the value may take the place of x, which saves 4 bytes of reads and 4 of writes per
    number.
    """
    xp = array_module(x)
    wide = xp.ascontiguousarray(widen(x))
    wide = wide.reshape(-1) if bias is None else rows(wide)
    ours = overwrite or x.dtype in LOW_PRECISION or not x.flags.c_contiguous
    y = wide if ours else xp.empty_like(wide)
    slope = xp.empty_like(wide)
    blocks = list(row_blocks(wide)) if wide.size else []
    kind = wide.dtype.itemsize // 8
    room = xp.empty((2, wide[blocks[0]].size if blocks else 0), wide.dtype)
    for at in blocks:
        part = wide[at]
        value = y[at]
        if bias is not None:
            # a block has read x for the last time when it writes y
            part = xp.add(part, widen(bias), out=value)
        _run_block(
            xp,
            block,
            near[kind],
            far[kind],
            part.reshape(-1),
            value.reshape(-1),
            slope[at].reshape(-1),
            room[:, : part.size],
        )
    return narrow(y.reshape(x.shape), x.dtype), narrow(slope.reshape(x.shape), x.dtype)


def _gelu(x: Array, bias: Array | None, overwrite: bool = False) -> tuple[Array, Array]:
    return _value_and_slope(_gelu_block, (9.1, 20.7), (12, 24), x, bias, overwrite)


def _times_slope(node: Node, dy: Array) -> Array:
    """Return dy slope, in the memory of the slope: this is its last use."""
    dx = widen(node.slope)
    dx *= widen(dy)
    node.forget()
    return narrow(dx, dy.dtype)


def _silu(x: Array) -> tuple[Array, Array]:
    return _value_and_slope(_silu_block, (71, 671), (140, 1000), x)


@op
def gelu(x: Array, bias: Array | None = None, *, overwrite: bool = False) -> tuple[Array, Saved]:
    """Return x Φ(x) in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))). Source:
    Hendrycks & Gimpel 2016.

    Args:    x: (…, columns), floats; bias: (columns,), added to x first, without rounding.
             overwrite: on the host the result may lie where x lies; for an x that has no other
             user.
    Raises:  ShapeError if the bias does not fit.
    """
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ShapeError(
            f"gelu: a bias of shape {bias.shape} does not fit x {x.shape}; it needs {x.shape[-1:]}"
        )
    fast = kernel("gelu", *((x,) if bias is None else (x, bias)))
    if fast is not None:
        return fast(x, bias), saved(x=x, bias=bias, slope=None)
    y, slope = _gelu(x, bias, overwrite)
    return y, saved(slope=slope)


@gelu.gradient("x", "bias")
def _(node: Node, dy: Array) -> tuple[Array, Array | None]:
    if node.slope is None:
        dx, dbias = launcher("gelu_gradient")(
            node.x, node.bias, array_module(dy).ascontiguousarray(dy)
        )
    else:
        dx = _times_slope(node, dy)
        dbias = column_sums(rows(dx)) if node.needs("bias") else None
    node.forget()
    return dx, dbias


@op
def silu(x: Array) -> tuple[Array, Saved]:
    """Return x / (1 + exp(-x)), elementwise; also called swish."""
    y, slope = _silu(x)
    return y, saved(slope=slope)


@silu.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return _times_slope(node, dy)


@op
def swiglu(gate: Array, up: Array) -> tuple[Array, Saved]:
    """Return silu(gate) · up, rounded as these two ops are. Source: Shazeer 2020.

    Raises:  ShapeError if the shapes differ.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate {gate.shape} and up {up.shape} must have the same shape")
    fast = kernel("swiglu", gate, up)
    if fast is not None:
        return fast(gate, up), saved(gate=gate, up=up, slope=None)
    y, slope = _silu(gate)
    return narrow(widen(y) * widen(up), up.dtype), saved(silu=y, slope=slope, up=up)


@swiglu.gradient("gate", "up")
def _(node: Node, dy: Array) -> tuple[Array, ...]:
    if node.slope is None:
        return tuple(
            launcher("swiglu_gradient")(node.gate, node.up, array_module(dy).ascontiguousarray(dy))
        )
    wide = widen(dy)
    dx = widen(narrow(wide * widen(node.up), dy.dtype))  # of silu(gate), rounded as silu gets it
    dx *= widen(node.slope)
    return narrow(dx, dy.dtype), narrow(wide * widen(node.silu), dy.dtype)


@op
def relu(x: Array) -> tuple[Array, Saved]:
    """Return max(x, 0)."""
    y = array_module(x).maximum(x, x.dtype.type(0))
    return y, saved(y=y)


@relu.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return dy * (node.y > 0).astype(dy.dtype)


@op
def softmax(x: Array, *, dim: int = -1) -> tuple[Array, Saved]:
    """Return exp(x) / sum(exp(x)) along `dim`. The maximum of each row is subtracted first, so no
    exponential overflows.

    A row with only -inf gives zeros (a query without visible keys), not NaN.
    """
    fast = kernel("softmax", x) if dim in (-1, x.ndim - 1) else None
    if fast is not None:
        y = fast(x)
        return y, saved(y=y)
    xp = array_module(x)
    wide = widen(x)
    if not x.size:  # no maximum, no chances
        return x.copy(), saved(y=x)
    top = wide.max(axis=dim, keepdims=True)
    y = wide - xp.where(xp.isinf(top), xp.zeros_like(top), top)
    xp.exp(y, out=y)
    total = y.sum(axis=dim, keepdims=True)
    y /= xp.where(total == 0, xp.ones_like(total), total)
    y = narrow(y, x.dtype)
    return y, saved(y=y)


@softmax.gradient("x")
def _(node: Node, dy: Array) -> Array:
    dim = node.options.get("dim", -1)
    fast = kernel("softmax_gradient", node.y, dy) if dim in (-1, dy.ndim - 1) else None
    if fast is not None:
        return fast(node.y, dy)
    y = widen(node.y)
    wide = widen(dy)
    dx = wide * y
    dx -= y * dx.sum(axis=dim, keepdims=True)
    return narrow(dx, dy.dtype)


@op
def log_softmax(x: Array, *, dim: int = -1) -> tuple[Array, Saved]:
    """Return x - log(sum(exp(x))) along `dim`."""
    xp = array_module(x)
    wide = widen(x)
    if not x.size:
        return x.copy(), saved(y=x)
    y = wide - wide.max(axis=dim, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=dim, keepdims=True))
    y = narrow(y, x.dtype)
    return y, saved(y=y)


@log_softmax.gradient("x")
def _(node: Node, dy: Array) -> Array:
    xp = array_module(dy)
    wide = widen(dy)
    dx = xp.exp(widen(node.y))
    dx *= -wide.sum(axis=node.options.get("dim", -1), keepdims=True)
    dx += wide
    return narrow(dx, dy.dtype)
