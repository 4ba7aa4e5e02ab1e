"""GELU, SiLU, SwiGLU, ReLU, softmax and log-softmax.

GELU and SiLU compute their slope together with their value, while the block of rows is in the cache, and save it
instead of x. Then backward is one product. On a GPU kernels keep x, as computing the slope again costs less there.
"""

from collections.abc import Callable
from typing import Any

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import column_sums, rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ShapeError

_GELU_IN = 0.7978845608028654      # sqrt(2 / pi)
_GELU_CUBE = 0.044715


def _gelu_block(xp: Any, x: Array) -> tuple[Array, Array]:
    """y = x h with h = (1 + tanh u) / 2 and u = x (c + k x²); slope = h + y (1 - h) 2 (c + 3 k x²)."""
    c, k = _GELU_IN, _GELU_IN * _GELU_CUBE
    s = x * x * k + c
    h = xp.tanh(s * x) * 0.5 + 0.5
    y = x * h
    s *= 6.0
    s -= 4.0 * c                     # s = 2 (c + 3 k x²)
    s *= y
    s -= s * h
    return y, s + h


def _silu_block(xp: Any, x: Array) -> tuple[Array, Array]:
    """y = x h with h = 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2; slope = h + y (1 - h)."""
    h = xp.tanh(x * 0.5) * 0.5 + 0.5
    y = x * h
    return y, y - y * h + h


def _value_and_slope(block: Callable[[Any, Array], tuple[Array, Array]], x: Array,
                     bias: Array | None = None) -> tuple[Array, Array]:
    """Run a block function over all of x, or x + bias, in float32 or better. Returns: value and slope in x's dtype."""
    xp = array_module(x)
    wide = xp.ascontiguousarray(widen(x) if bias is None else widen(x) + widen(bias)).reshape(-1)
    y = xp.empty_like(wide) if bias is None else wide           # a block has read x for the last time when it writes y
    slope = xp.empty_like(wide)
    for where in row_blocks(wide):
        y[where], slope[where] = block(xp, wide[where])
    return narrow(y.reshape(x.shape), x.dtype), narrow(slope.reshape(x.shape), x.dtype)


@op
def gelu(x: Array, bias: Array | None = None) -> tuple[Array, Saved]:
    """x Φ(x) in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))). Source: Hendrycks & Gimpel 2016.

    Args:    x: (…, columns), floats; bias: (columns,), added to x first, without rounding.
    Raises:  ShapeError if the bias does not fit.
    """
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ShapeError(f"gelu: a bias of shape {bias.shape} does not fit x {x.shape}; it needs {x.shape[-1:]}")
    fast = kernel("gelu", *((x,) if bias is None else (x, bias)))
    if fast is not None:
        return fast(x, bias), saved(x=x, bias=bias, slope=None)
    y, slope = _value_and_slope(_gelu_block, x, bias)
    return y, saved(slope=slope)


@gelu.gradient("x", "bias")
def _(node: Node, dy: Array) -> tuple[Array, Array | None]:
    if node.slope is None:
        dx, dbias = launcher("gelu_gradient")(node.x, node.bias, array_module(dy).ascontiguousarray(dy))
    else:
        dx = narrow(widen(dy) * widen(node.slope), dy.dtype)
        dbias = column_sums(rows(dx)) if node.needs("bias") else None
    node.forget()
    return dx, dbias


@op
def silu(x: Array) -> tuple[Array, Saved]:
    """x / (1 + exp(-x)), elementwise; also called swish."""
    y, slope = _value_and_slope(_silu_block, x)
    return y, saved(slope=slope)


@silu.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return narrow(widen(dy) * widen(node.slope), dy.dtype)


@op
def swiglu(gate: Array, up: Array) -> tuple[Array, Saved]:
    """silu(gate) · up, rounded as these two ops are. Source: Shazeer 2020.

    Raises:  ShapeError if the shapes differ.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate {gate.shape} and up {up.shape} must have one shape")
    fast = kernel("swiglu", gate, up)
    if fast is not None:
        return fast(gate, up), saved(gate=gate, up=up, slope=None)
    y, slope = _value_and_slope(_silu_block, gate)
    return narrow(widen(y) * widen(up), up.dtype), saved(silu=y, slope=slope, up=up)


@swiglu.gradient("gate", "up")
def _(node: Node, dy: Array) -> tuple[Array, ...]:
    if node.slope is None:
        return tuple(launcher("swiglu_gradient")(node.gate, node.up, array_module(dy).ascontiguousarray(dy)))
    wide = widen(dy)
    of_silu = narrow(wide * widen(node.up), dy.dtype)
    return narrow(widen(of_silu) * widen(node.slope), dy.dtype), narrow(wide * widen(node.silu), dy.dtype)


@op
def relu(x: Array) -> tuple[Array, Saved]:
    """max(x, 0)"""
    y = array_module(x).maximum(x, x.dtype.type(0))
    return y, saved(y=y)


@relu.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return dy * (node.y > 0).astype(dy.dtype)


@op
def softmax(x: Array, *, dim: int = -1) -> tuple[Array, Saved]:
    """exp(x) / sum(exp(x)) along `dim`. The maximum of each row is subtracted first, so no exponential overflows.

    A row with only -inf gives zeros (a query without visible keys), not NaN.
    """
    fast = kernel("softmax", x) if dim in (-1, x.ndim - 1) else None
    if fast is not None:
        y = fast(x)
        return y, saved(y=y)
    xp, wide = array_module(x), widen(x)
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
    y, wide = widen(node.y), widen(dy)
    dx = wide * y
    dx -= y * dx.sum(axis=dim, keepdims=True)
    return narrow(dx, dy.dtype)


@op
def log_softmax(x: Array, *, dim: int = -1) -> tuple[Array, Saved]:
    """x - log(sum(exp(x))) along `dim`."""
    xp = array_module(x)
    wide = widen(x)
    y = wide - wide.max(axis=dim, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=dim, keepdims=True))
    y = narrow(y, x.dtype)
    return y, saved(y=y)


@log_softmax.gradient("x")
def _(node: Node, dy: Array) -> Array:
    xp, wide = array_module(dy), widen(dy)
    dx = xp.exp(widen(node.y))
    dx *= -wide.sum(axis=node.options.get("dim", -1), keepdims=True)
    dx += wide
    return narrow(dx, dy.dtype)
