"""Rotary positions: the angle between a query and a key depends on the distance of their tokens."""

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.device.dispatch import kernel
from minidist.errors import ShapeError


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate each pair (x[i], x[i + n/2]) by its angle: (…, T, n), (T, n/2) twice -> (…, T, n)."""
    xp = array_module(x)
    wide = widen(x)
    half = x.shape[-1] // 2
    y = xp.empty(x.shape, wide.dtype)
    a = wide[..., :half]
    b = wide[..., half:]
    y[..., :half] = a * cos - b * sin
    y[..., half:] = b * cos + a * sin
    return narrow(y, x.dtype)


@op
def rotary(x: Array, positions: Array, *, base: float = 10000.0) -> tuple[Array, Saved]:
    """Rotate the pairs (x[i], x[i + n/2]) by angles that grow with the global position of the
    token.

    Args:    x: (…, T, n), n even; positions: (T,) integers. A shard of the sequence passes its own
             global positions.
    Raises:  ShapeError if they do not fit.
    Source:  Su et al. 2021; pairs as in GPT-NeoX.
    """
    if x.ndim < 2 or x.shape[-1] % 2 or positions.shape != (x.shape[-2],):
        raise ShapeError(
            f"rotary: x {x.shape} with positions {positions.shape}; x needs shape (…, T, even), "
            f"positions (T,)"
        )
    xp = array_module(x)
    width = x.shape[-1]
    kind = widen(x).dtype
    speeds = base ** (-2.0 / max(1, width) * xp.arange(width // 2, dtype="float64"))
    angles = positions.astype("float64")[..., None] * speeds  # p / base^(2 i / width): (T, width/2)
    cos = xp.cos(angles).astype(kind)
    sin = xp.sin(angles).astype(kind)
    fast = kernel("rotary", x)
    return fast(x, cos, sin) if fast is not None else _rotate(x, cos, sin), saved(cos=cos, sin=sin)


@rotary.gradient("x")
def _(node: Node, dy: Array) -> Array:
    fast = kernel("rotary_gradient", dy)
    return fast(dy, node.cos, node.sin) if fast is not None else _rotate(dy, node.cos, -node.sin)
