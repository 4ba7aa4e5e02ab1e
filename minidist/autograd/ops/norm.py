"""Layer norm and RMS norm over the last dim, computed and differentiated a block of rows at a time.

On a GPU kernels/norm.cu does both. Its backward computes the normalized rows again from x, mean and
scale.
"""

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ShapeError


def _check(name: str, x: Array, **weights: Array) -> None:
    """Raises: ShapeError if a weight is not one row of x."""
    for argument, value in weights.items():
        if value.shape != x.shape[-1:]:
            raise ShapeError(
                f"{name}: {argument} {value.shape} does not fit x {x.shape}; "
                f"it needs shape {x.shape[-1:]}"
            )


def _normalize(x: Array, w: Array, b: Array | None, eps: float) -> tuple[Array, Saved]:
    """Return hat * w (+ b), where hat is x with each row scaled to mean square 1; with b, the mean
    is subtracted first."""
    xp = array_module(x)
    wide = xp.ascontiguousarray(rows(widen(x)))
    w_wide = widen(w)
    b_wide = None if b is None else widen(b)
    n = wide.shape[1]
    y = xp.empty_like(wide)
    hat = xp.empty_like(wide)
    scale = xp.empty((len(wide), 1), wide.dtype)
    # x @ average is the mean of each row, by BLAS
    average = xp.full((n, 1), 1.0 / max(1, n), wide.dtype)
    for where in row_blocks(wide):
        # written where the next pass reads: no new array
        part = wide[where]
        h = hat[where]
        out = y[where]
        if b is not None:
            part = xp.subtract(part, part @ average, out=h)
        xp.multiply(part, part, out=out)
        scale[where] = 1.0 / xp.sqrt(out @ average + eps)
        xp.multiply(part, scale[where], out=h)
        xp.multiply(h, w_wide, out=out)
        if b is not None:
            out += b_wide
    return narrow(y.reshape(x.shape), x.dtype), saved(
        hat=hat, scale=scale, w=w, centre=b is not None
    )


@op
def layer_norm(x: Array, w: Array, b: Array, *, eps: float = 1e-5) -> tuple[Array, Saved]:
    """Return (x - mean) / sqrt(var + eps) * w + b over the last dim: (…, n), (n,), (n,) -> (…, n).
    Raises: ShapeError.

    Source: Ba et al. 2016.
    """
    _check("layer_norm", x, w=w, b=b)
    fast = kernel("layer_norm", x, w, b) if x.dtype == w.dtype == b.dtype else None
    if fast is None:
        return _normalize(x, w, b, eps)
    y, *sums = fast(x, w, b, eps=eps)  # the mean and the scale of each row
    return y, saved(x=x, w=w, sums=sums, hat=None)


@op
def rms_norm(x: Array, w: Array, *, eps: float = 1e-5) -> tuple[Array, Saved]:
    """Return x / sqrt(mean(x²) + eps) * w over the last dim: (…, n), (n,) -> (…, n). Raises:
    ShapeError.

    Source: Zhang & Sennrich 2019.
    """
    _check("rms_norm", x, w=w)
    fast = kernel("rms_norm", x, w) if x.dtype == w.dtype else None
    if fast is None:
        return _normalize(x, w, None, eps)
    y, scale = fast(x, w, eps=eps)
    return y, saved(x=x, w=w, sums=[scale], hat=None)


@rms_norm.gradient("x", "w")
@layer_norm.gradient("x", "w", "b")
def _(node: Node, dy: Array) -> tuple[Array, ...]:
    """With g = dy w: dx = scale (g - mean(g) - hat mean(g hat)), without mean(g) for RMS; dw = Σ dy
    hat, db = Σ dy."""
    xp = array_module(dy)
    if node.hat is None:
        return tuple(
            launcher(f"{node.op.name}_gradient")(
                node.x, node.w, xp.ascontiguousarray(dy), *node.sums
            )
        )
    wide = xp.ascontiguousarray(rows(widen(dy)))
    hat = node.hat
    scale = node.scale
    w = widen(node.w)
    n = wide.shape[1]
    dx = xp.empty_like(wide)
    share = (w / n).reshape(n, 1)
    dw = xp.zeros((1, n), wide.dtype)
    db = xp.zeros((1, n), wide.dtype)
    for where in row_blocks(wide):
        g = wide[where]
        h = hat[where]
        d = dx[where]
        xp.multiply(g, h, out=d)
        ones = xp.ones((1, len(g)), g.dtype)
        dw += ones @ d
        along = d @ share  # mean(dy w hat) of each row
        xp.multiply(g, w, out=d)
        d -= h * along
        if node.centre:
            db += ones @ g
            d -= g @ share
        d *= scale[where]
    kind = dy.dtype
    return narrow(dx.reshape(dy.shape), kind), narrow(dw[0], kind), narrow(db[0], kind)
