"""Cross-entropy of logits against token ids."""

from minidist.autograd.ops.blocks import row_blocks
from minidist.autograd.ops.linear import rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, beside, device_of, narrow, widen
from minidist.device.dispatch import kernel
from minidist.errors import DtypeError, ShapeError


def _check(logits: Array, targets: Array) -> None:
    """Raises: DtypeError, ShapeError. The range is looked at on the host alone: a GPU would have to be waited for."""
    if targets.dtype.kind not in "iu":
        raise DtypeError(f"cross_entropy: targets are token ids, integers, not {targets.dtype}")
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ShapeError(f"cross_entropy: targets {targets.shape} do not fit logits {logits.shape}; "
                         f"they need shape {logits.shape[:-1]}")
    if device_of(targets) != "cpu" or not targets.size:
        return
    if int(targets.min()) < 0 or int(targets.max()) >= logits.shape[-1]:
        raise ShapeError(f"cross_entropy: targets {int(targets.min())}..{int(targets.max())} outside the vocabulary; "
                         f"logits {logits.shape} allow 0..{logits.shape[-1] - 1}")


def _int64(ids: Array) -> Array:
    return ids if ids.dtype.name == "int64" else ids.astype("int64")


@op
def cross_entropy(logits: Array, targets: Array, *, divisor: float | None = None) -> tuple[Array, Saved]:
    """Sum over tokens of -log softmax(logits)[target], over `divisor` (default: the number of tokens).

    (…, V) floats, (…) integers -> one number, float32 for low precision too. A strategy passes the global token count,
    so that losses and gradients of the shards add up (never a mean of means).

    With l a token's logits, m their maximum, s = sum(exp(l - m)) and t the target's: log(s) + (m - t), in this order,
    so that large logits, of a run that diverges, do not swallow log(s). m and s stay for backward, 2 numbers a token.
    Targets may stay on the host where logits are on a GPU: there they are looked at. Of those that lie on the GPU, one
    outside of the vocabulary gives NaN: looking for it would mean to wait.
    """
    _check(logits, targets)
    targets = beside(targets, logits)
    xp = array_module(logits)
    count = divisor if divisor is not None else targets.size
    fast = kernel("cross_entropy", logits)
    if fast is not None:
        losses, _ = fast(logits, _int64(targets), scale=1.0, gradient=False)
        return losses.sum() / losses.dtype.type(count), saved(logits=logits, ids=targets, divisor=count)
    wide, ids = rows(widen(logits)), targets.reshape(-1)
    top, total = xp.empty((len(wide), 1), wide.dtype), xp.empty((len(wide), 1), wide.dtype)
    for where, (e,) in row_blocks(xp, wide, scratch=1):
        wide[where].max(axis=1, keepdims=True, out=top[where])
        xp.subtract(wide[where], top[where], out=e)
        xp.exp(e, out=e)
        e.sum(axis=1, keepdims=True, out=total[where])
    losses = xp.log(total[:, 0]) + (top[:, 0] - wide[xp.arange(len(wide)), ids])
    loss = losses.sum() / losses.dtype.type(count)
    return xp.asarray(loss), saved(logits=logits, ids=ids, top=top, total=total, divisor=count)


@cross_entropy.gradient("logits")
def _(node: Node, dy: Array) -> Array:
    """(softmax - one-hot) dy / divisor"""
    xp = array_module(dy)
    fast = kernel("cross_entropy", node.logits)
    if fast is not None:
        _, dx = fast(node.logits, _int64(node.ids), scale=1.0 / node.divisor, factor=widen(dy))
        return dx
    wide = rows(widen(node.logits))
    scale = widen(dy) / wide.dtype.type(node.divisor)
    dx = xp.empty(wide.shape, wide.dtype)
    for where, _ in row_blocks(xp, wide):
        d = dx[where]
        xp.subtract(wide[where], node.top[where], out=d)
        xp.exp(d, out=d)
        d *= scale / node.total[where]
    dx[xp.arange(len(dx)), node.ids] -= scale
    return narrow(dx.reshape(node.logits.shape), node.logits.dtype)
