"""Exercise 12: cut heads, an MLP, and the cross-entropy of a vocabulary between ranks.

Copy this file (`minidist lesson 12 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 12 DIR/exercise_12.py`. Every rank runs it with its own part. What you may
use:

    group.rank, group.size
    group.all_reduce(x) -> the sum of all ranks' x; group.all_reduce(x, "max") -> the largest of
    each number
"""

import numpy as np

from minidist.grading import hole


def head_columns(heads, head_width, rank, size):
    """Return which columns of the (h, 3h) weight of queries, keys and values rank `rank` keeps: an
    array of integers.

    The 3h columns are the queries of all heads, then the keys of all heads, then the values. A rank
    has whole heads, divided as numpy.array_split divides.
    """
    mine = np.array_split(np.arange(heads), size)[rank]  # this rank's heads
    queries = hole(
        1, "the columns of the queries of these heads (head i has head_width columns)", mine
    )
    return hole(2, "these columns of queries, then the same heads' keys, then values", queries)


def plain_tensor_mlp(x, up, down, bias, dy, group):
    """Run an MLP forward and backward; return y, dx, and the gradients of `up` and `down`.

    y = relu(x up) down + bias. `up` has this rank's columns, `down` its rows. x (n, h), bias (h,)
    and dy (n, h) are whole and the same on every rank; y and dx must be so too.
    """
    inner = x @ up  # (n, h) (h, own) -> (n, own): complete
    active = np.maximum(inner, 0)  # number by number: no rank needs another's
    y = hole(3, "the whole result (Megatron's g); how often is the bias added? (section 1)", active)
    ddown = hole(
        4,
        "the gradient of this rank's rows; is there anything to add up between ranks? (section 1)",
        active,
    )
    dinner = (dy @ down.T) * (inner > 0)
    dup = x.T @ dinner
    dx = hole(5, "the whole gradient of x, which every rank's columns used (Megatron's f)", dinner)
    return y, dx, dup, ddown


def bias_gradient(dy, group):
    """Return the gradient of the bias, which every rank has; dy (n, h) is whole, the same on every
    rank."""
    return hole(6, "which sum is it? (section 1)", dy)


def cross_entropy(logits, targets, first, group):
    """Return the mean of -log softmax(logits)[target] over the tokens.

    logits (n, own) are those of ids first, first + 1, …; targets (n,) are ids of the whole
    vocabulary. Never gather the logits: only numbers of shape (n,) may travel.
    """
    highest = hole(7, "each token's largest logit, of all ranks", logits)
    total = hole(8, "each token's sum of exp(logit - highest), of all ranks", highest)
    mine = (targets >= first) & (targets < first + logits.shape[1])
    target = np.zeros(len(targets))
    target[mine] = logits[mine, targets[mine] - first]
    target = hole(9, "each token's target logit, from the rank that has it", target)
    return float(np.mean(np.log(total) + highest - target))


def numbers_sent(blocks, tokens, width, ranks):
    """Return how many numbers all ranks together send for the blocks of one training step (ring
    all-reduces), nothing else."""
    return hole(
        10, "how many all-reduces a block, of how many numbers, at what price each?", tokens * width
    )
