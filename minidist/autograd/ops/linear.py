"""Matrix products: matmul for any stack of matrices, linear for x @ w + b over the last dim."""

import math

from minidist.autograd.ops.arithmetic import unbroadcast
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, narrow, on_host, sum_by_kernel, widen
from minidist.device.backend import matmul as multiply
from minidist.errors import ShapeError


@op
def matmul(a: Array, b: Array) -> tuple[Array, Saved]:
    """Return (…, m, k) @ (…, k, n) -> (…, m, n); the leading dims broadcast.

    Cost:    2·m·k·n FLOPs a matrix.
    Raises:  ShapeError if the shapes do not fit.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: {a.shape} @ {b.shape}: the last dim of a must equal the second-to-last dim "
            "of b, and both need at least two dims"
        )
    return multiply(a, b), saved(a=a, b=b)


@matmul.gradient("a")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(multiply(dy, node.b.swapaxes(-1, -2)), node.shapes["a"])


@matmul.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return unbroadcast(multiply(node.a.swapaxes(-1, -2), dy), node.shapes["b"])


def rows(x: Array) -> Array:
    """Return (…, n) as one matrix (rows, n): a view if x is contiguous. Also for n = 0, where -1
    would be any number."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def column_sums(x: Array, out: Array | None = None) -> Array:
    """Return the sums of the columns, (rows, n) -> (n,), by BLAS as ones @ x, which is faster than
    a sum over dim 0; low precision in float32."""
    ones = array_module(x).ones((1, len(x)), x.dtype)
    if out is None:
        return multiply(ones, x)[0]
    multiply(ones, x, out=out.reshape(1, -1))
    return out


@op
def unembed(x: Array, table: Array) -> tuple[Array, Saved]:
    """Return logits from a (tied) embedding table, x @ tableᵀ: (…, n), (V, n) -> (…, V). Raises:
    ShapeError."""
    if table.ndim != 2 or x.ndim < 1 or x.shape[-1] != table.shape[1]:
        raise ShapeError(
            f"unembed: x {x.shape} does not fit the table {table.shape}; their last dims must be "
            "equal"
        )
    return multiply(rows(x), table.T).reshape(*x.shape[:-1], len(table)), saved(x=x, table=table)


@unembed.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return multiply(rows(dy), node.table).reshape(node.shapes["x"])


@unembed.gradient("table")
def _(node: Node, dy: Array) -> Array:
    return multiply(rows(dy).T, rows(node.x), out=node.room("table"))


def product_and_bias(x: Array, w: Array, b: Array | None) -> Array:
    """Return (rows, in) @ (in, out) + (out,). On the host low precision gives a float32 result,
    which the caller rounds once.

    A GPU rounds the product, so that tensor cores can compute it, and rounds again after adding the
    bias.
    """
    if b is None:
        return multiply(x, w)
    if not on_host(x):
        y = multiply(x, w)
        return y + b if sum_by_kernel(y, b, y) is None else y
    y = multiply(widen(x), widen(w))
    y += widen(b)
    return y


@op
def linear(x: Array, w: Array, b: Array | None = None) -> tuple[Array, Saved]:
    """Return (…, in) @ (in, out) + (out,) -> (…, out), in one matrix product for all leading dims.

    Cost:    2·rows·in·out FLOPs.
    Raises:  ShapeError if the shapes do not fit.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ShapeError(
            f"linear: x {x.shape} does not fit w {w.shape}; the last dim of x must equal w's first"
        )
    if b is not None and b.shape != (w.shape[1],):
        raise ShapeError(
            f"linear: bias {b.shape} does not fit w {w.shape}; it needs shape ({w.shape[1]},)"
        )
    y = product_and_bias(rows(x), w, b)
    return narrow(y, x.dtype).reshape(*x.shape[:-1], w.shape[1]), saved(x=x, w=w)


@linear.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return multiply(rows(dy), node.w.T).reshape(node.shapes["x"])


@linear.gradient("w")
def _(node: Node, dy: Array) -> Array:
    return multiply(rows(node.x).T, rows(dy), out=node.room("w"))


@linear.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return column_sums(rows(dy), out=node.room("b"))
