"""Cross-entropy of logits against token ids."""

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, beside, device_of, narrow, widen
from minidist.device.dispatch import kernel
from minidist.errors import DtypeError, ShapeError


def targets_in(name: str, logits: Array, targets: Array, vocabulary: int) -> Array:
    """Return the targets as int64: later arithmetic must not depend on the caller's dtype.

    The range is checked on the host only: for a GPU the host would have to wait.
    Raises:  DtypeError, ShapeError.
    """
    if targets.dtype.kind not in "iu":
        raise DtypeError(f"{name}: targets must be token ids (integers), not {targets.dtype}")
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{name}: targets {targets.shape} do not fit logits {logits.shape}; "
            f"they need shape {logits.shape[:-1]}"
        )
    if (
        device_of(targets) == "cpu"
        and targets.size
        and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary)
    ):
        raise ShapeError(
            f"{name}: targets {int(targets.min())}..{int(targets.max())} are outside the "
            f"vocabulary, which has 0..{vocabulary - 1}; logits {logits.shape}"
        )
    return targets.astype("int64", copy=False)


@op
def cross_entropy(
    logits: Array, targets: Array, *, divisor: float | None = None
) -> tuple[Array, Saved]:
    """Return the sum over tokens of -log softmax(logits)[target], divided by `divisor`.

    Let l be the logits of a token, m their maximum, t the logit of the target, and s = sum(exp(l -
    m)). The loss is log(s) + (m - t), in this order, so that rounding does not lose log(s) when the
    logits of a diverging run are large.
    Args:    logits: (…, V), floats; targets: (…), integers. They may stay on the host while logits
             are on a GPU; then their range is checked. A target on a GPU that is outside the
             vocabulary gives NaN.
             divisor: default: the number of tokens. A strategy passes the global token count, so
             that shards add up.
    Returns: one number, in float32 for low precision too.
    Raises:  DtypeError, ShapeError if targets do not fit.
    """
    vocabulary = logits.shape[-1] if logits.ndim else 0
    targets = beside(targets_in("cross_entropy", logits, targets, vocabulary), logits)
    xp = array_module(logits)
    count = divisor if divisor is not None else targets.size
    fast = kernel("cross_entropy", logits)
    if fast is not None:
        losses, _ = fast(logits, targets, scale=1.0, gradient=False)
        return losses.sum() / losses.dtype.type(count), saved(
            logits=logits, ids=targets, divisor=count
        )
    wide = rows(widen(logits))
    ids = targets.reshape(-1)
    top = xp.empty((len(wide), 1), wide.dtype)
    total = xp.empty((len(wide), 1), wide.dtype)
    for where in row_blocks(wide):
        top[where] = wide[where].max(axis=1, keepdims=True)
        total[where] = xp.exp(wide[where] - top[where]).sum(axis=1, keepdims=True)
    losses = xp.log(total[:, 0]) + (top[:, 0] - wide[xp.arange(len(wide)), ids])
    loss = losses.sum() / losses.dtype.type(count)
    return xp.asarray(loss), saved(logits=logits, ids=ids, top=top, total=total, divisor=count)


@cross_entropy.gradient("logits")
def _(node: Node, dy: Array) -> Array:
    """Return (softmax - one-hot) dy / divisor."""
    fast = kernel("cross_entropy", node.logits)
    if fast is not None:
        _, dx = fast(node.logits, node.ids, scale=1.0 / node.divisor, factor=widen(dy))
        return dx
    ids = array_module(dy).arange(len(node.ids)), node.ids
    return logits_gradient(node.logits, node.top, node.total, ids, dy, node.divisor)


def logits_gradient(
    logits: Array, top: Array, total: Array, places: tuple[Array, Array], dy: Array, divisor: float
) -> Array:
    """Return (exp(logits - top) / total - one-hot) dy / divisor; `places`: rows and columns of the
    targets; dy: one number."""
    xp = array_module(logits)
    wide = rows(widen(logits))
    dx = xp.empty(wide.shape, wide.dtype)
    scale = widen(dy) / wide.dtype.type(divisor)
    for where in row_blocks(wide):
        dx[where] = xp.exp(wide[where] - top[where]) * (scale / total[where])
    dx[places] -= scale
    return narrow(dx.reshape(logits.shape), logits.dtype)
