"""Dropout. The mask depends on the layer, the seed, the step and the global token, but not on how
work is split."""

from typing import Any

import numpy as np

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import (
    Array,
    array_module,
    dtype_name,
    narrow,
    random_bits,
    stream_key,
    widen,
)
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ConfigError, ShapeError


def _positions(
    xp: Any, shape: tuple[int, ...], tokens: Any, columns: Any, width: int | None
) -> Array:
    """Return the global position of each element: token * width + column. Raises: ShapeError."""
    lead = shape[:-1]
    n = shape[-1]
    tokens = (
        xp.arange(int(np.prod(lead)), dtype="int64").reshape(lead)
        if tokens is None
        else xp.asarray(tokens)
    )
    columns = range(n) if columns is None else columns
    if tokens.shape != lead or len(columns) != n:
        raise ShapeError(
            f"dropout: x {shape} needs global tokens of shape {lead}, not {tokens.shape}, "
            f"and {n} columns, not {len(columns)}"
        )
    return tokens.astype("int64")[..., None] * (width or n) + xp.asarray(columns, dtype="int64")


@op
def dropout(
    x: Array,
    residual: Array | None = None,
    *,
    rate: float,
    name: str,
    seed: int,
    step: int,
    tokens: Any = None,
    columns: Any = None,
    width: int | None = None,
    key: Array | None = None,
) -> tuple[Array, Saved]:
    """Zero a share `rate` of x (…, n), scale the rest by 1 / (1 - rate), and add it to `residual`
    (…, n).

    A hash of (name, seed, step, global token, global column) chooses: a shard's mask is its slice
    of the whole one.
    Args:    tokens: (…) integers, the global index of each token here, for a shard of the batch or
             the sequence.
             columns, width: the global columns here (a range) and the number of all, for a shard of
             the width.
             key: uint64 (1,) on a GPU, read by the kernel: the key of the stream, in place of name,
             seed and step.
    Raises:  ConfigError for a rate outside [0, 1), or a key where no kernel reads it; ShapeError.
    """
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"dropout: rate {rate} is not in [0, 1)")
    xp = array_module(x)
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"dropout: a residual of shape {residual.shape} does not fit x {x.shape}")
    if rate == 0.0:
        return x.copy() if residual is None else narrow(
            widen(residual) + widen(x), x.dtype
        ), saved()
    if kernel("dropout", *(x,) if residual is None else (x, residual)) is not None and (
        columns is None or columns.step == 1
    ):
        return _by_kernel(x, residual, rate, name, seed, step, tokens, columns, width, key), saved(
            kept=None
        )
    if key is not None:
        raise ConfigError(
            f"dropout {name!r}: only the kernel can read a key on a GPU, and the kernel does not "
            f"take {dtype_name(x.dtype)} of this layout; pass only seed and step"
        )
    bits = random_bits(
        f"{name}/dropout/{step}", seed, _positions(xp, x.shape, tokens, columns, width)
    )
    kept = bits >= np.uint64(int(rate * 2.0**64))
    return _apply(x, residual, kept, rate), saved(kept=kept, rate=rate)


def _by_kernel(
    x: Array,
    residual: Array | None,
    rate: float,
    name: str,
    seed: int,
    step: int,
    tokens: Any = None,
    columns: Any = None,
    width: int | None = None,
    key: Array | None = None,
) -> Array:
    """Apply dropout by the kernel, which draws its own numbers, in forward and again for the
    gradient."""
    xp = array_module(x)
    if columns is not None and len(columns) != x.shape[-1]:
        raise ShapeError(f"dropout: x {x.shape} needs {x.shape[-1]} columns, not {len(columns)}")
    tokens = None if tokens is None else xp.ascontiguousarray(xp.asarray(tokens, dtype="int64"))
    return launcher("dropout")(
        x,
        residual,
        rate=rate,
        key=dropout_key(name, seed, step) if key is None else key,
        tokens=tokens,
        first_column=0 if columns is None else columns.start,
        width=width,
    )


def dropout_key(name: str, seed: int, step: int) -> np.uint64:
    """Return the key of the random stream of the layer `name` in this step."""
    return stream_key(f"{name}/dropout/{step}", seed)


def _apply(x: Array, residual: Array | None, kept: Array, rate: float) -> Array:
    """Return x scaled where `kept`, else zero, plus the residual; rounded once."""
    wide = widen(x)
    y = wide * (kept.astype(wide.dtype) * wide.dtype.type(1.0 / (1.0 - rate)))
    if residual is not None:
        y += widen(residual)
    return narrow(y, x.dtype)


@dropout.gradient("x")
def _(node: Node, dy: Array) -> Array:
    if node.options["rate"] == 0.0:
        return dy
    if node.kept is None:
        return _by_kernel(array_module(dy).ascontiguousarray(dy), None, **node.options)
    return _apply(dy, None, node.kept, node.rate)


@dropout.gradient("residual")
def _(node: Node, dy: Array) -> Array:
    return dy
