"""Context compression: attention in which old tokens are seen as the means of groups.

    tokens      0 1 2 3 | 4 5 6 7 | 8 9 10 11     ratio = 4, window = 3
    query 9     mean 0-3   4 5 6 7   8 9          group 4-7 is not old yet: token 7 is one of the
                                                  last 3
    query 11    mean 0-3   mean 4-7  8 9 10 11

A group's key and value are the means of its tokens', and its score gets + log(ratio): so it weighs
as much as its tokens would, if their keys were equal. To continue after T tokens, T/ratio + window
+ ratio entries must be kept.

It is another function than attention over the whole context: the differences between the tokens of
a group are lost. Two old tokens of a group may change places, and no result changes; a token that a
query looks for is found at 1/ratio of its value at the most. So the context is not compressed
without loss (N2 §10.4 says 信息保持, that information is kept); equal only with ratio=1, with a window
as long as the context, or if all keys of each group are equal.

notes:   N2 §10.4
Source:  Rae et al. 2019, "Compressive Transformers for Long-Range Sequence Modelling" (mean pooling
         of old memories).
"""

import numpy as np

from minidist.autograd.ops.activation import softmax
from minidist.autograd.ops.arithmetic import where
from minidist.autograd.ops.attention import check_shapes
from minidist.autograd.ops.linear import matmul
from minidist.autograd.ops.reduction import mean
from minidist.autograd.ops.shape import concat, reshape, transpose
from minidist.autograd.tensor import Tensor
from minidist.device.backend import beside
from minidist.errors import ConfigError, ShapeError


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, *, ratio: int, window: int) -> Tensor:
    """Return causal attention to the means of old groups and to single tokens after them: (B, H, T,
    D) three times -> the same

    Args:    ratio: tokens of a group; window: the last tokens, the query's own among them, that are
             seen singly.
    Cost:    memory B·H·T·(T + T/ratio) numbers while it trains: this op shows what compression
             computes, it is not a fast one.
    Raises:  ShapeError if the shapes do not fit; ConfigError for a ratio or a window below 1.
    """
    check_shapes("compressed_attention", q.data, k.data, v.data)
    if k.shape != q.shape:
        raise ShapeError(
            f"compressed_attention: q {q.shape}, k {k.shape}; the number of key heads must be the "
            "number of query heads"
        )
    if ratio < 1 or window < 1:
        raise ConfigError(
            f"compressed_attention: ratio {ratio}, window {window}; both must be at least 1"
        )
    length, width = q.shape[2:]
    hidden, weights = _seen(length, ratio, window)
    keys = _with_means(k, ratio)
    values = _with_means(v, ratio)
    scores = matmul(q, transpose(keys, (0, 1, 3, 2))) * width**-0.5
    scores = scores + beside(weights.astype(q.dtype), q.data)
    return matmul(softmax(where(beside(hidden, q.data), -np.inf, scores)), values)


def _with_means(x: Tensor, ratio: int) -> Tensor:
    """Return the tokens, followed by the mean of each whole group: (B, H, T, D) -> (B, H, T + T //
    ratio, D)."""
    b, heads, length, width = x.shape
    groups = length // ratio
    return concat(
        [x, mean(reshape(x[:, :, : groups * ratio], (b, heads, groups, ratio, width)), dim=3)],
        dim=2,
    )


def _seen(length: int, ratio: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens and groups are hidden from each query, (T, T + T // ratio), and the
    numbers to add to their scores."""
    groups = length // ratio
    places = np.arange(length)
    last = (np.arange(groups) + 1) * ratio - 1
    old = last <= places[:, None] - window  # (T, groups): seen as a mean
    in_old = np.zeros((length, length), bool)
    in_old[:, : groups * ratio] = np.repeat(old, ratio, axis=1)
    hidden = np.concatenate([(places > places[:, None]) | in_old, ~old], axis=1)
    return hidden, np.repeat([0.0, np.log(ratio)], [length, groups])
