"""Cross-entropy with a split vocabulary: each rank has the logits of its slice, and no rank has a whole row."""

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import rows
from minidist.autograd.ops.loss import check_targets, logits_gradient
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, beside, widen


@op
def split_cross_entropy(logits: Array, targets: Array, *, first: int, vocabulary: int, group: Group,
                        divisor: float | None = None) -> tuple[Array, Saved]:
    """The sum over tokens of -log softmax(logits)[target], divided by `divisor`.

    Let l be the logits of a token on all ranks, m their maximum, t the logit of the target, and s = sum(exp(l - m)).
    The loss is log(s) + (m - t). Two all-reduces compute it: the first of the maxima, the second of s and t together.
    Args:    logits: (…, own), of the ids first, first + 1, …
             targets: (…), ids of the whole vocabulary, equal on all ranks; better on the host than on a GPU, so that
             their range is checked.
             divisor: default: the number of tokens.
    Returns: one number, the same bits on all ranks; float32 for low precision too.
    Raises:  DtypeError, ShapeError if targets do not fit.
    Cost:    forward: an all-reduce of 3 numbers a token, instead of a gather of `vocabulary` numbers. Backward: no
             communication, because the gradient on each rank is (softmax - one-hot) of its own slice.
    Source:  Shoeybi et al. 2019, section 3.
    """
    check_targets("split_cross_entropy", logits, targets, vocabulary)
    xp = array_module(logits)
    wide, ids = rows(widen(logits)), targets.reshape(-1) - first
    count = divisor if divisor is not None else ids.size
    highest = group.all_reduce(wide.max(axis=1), op="max", algorithm="ring")
    mine = (ids >= 0) & (ids < wide.shape[1])
    places = beside(array_module(ids).flatnonzero(mine), wide), beside(ids[mine], wide)
    partial = xp.zeros((2, len(wide)), wide.dtype)                 # sums of exp(logit - highest); the target's logit
    for where in row_blocks(wide):
        partial[0, where] = xp.exp(wide[where] - highest[where, None]).sum(axis=1)
    partial[1, places[0]] = wide[places]
    total, target = group.all_reduce(partial, algorithm="ring")
    loss = (xp.log(total) + (highest - target)).sum() / wide.dtype.type(count)
    return xp.asarray(loss), saved(logits=logits, places=places, highest=highest, total=total, divisor=count)


@split_cross_entropy.gradient("logits")
def _(node: Node, dy: Array) -> Array:
    """(softmax - one-hot) dy / divisor, of the own slice"""
    return logits_gradient(node.logits, node.highest[:, None], node.total[:, None], node.places, dy, node.divisor)
