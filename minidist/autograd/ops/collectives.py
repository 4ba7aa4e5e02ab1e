"""Differentiable collectives: each verb, and the verb that carries its gradient back.

A verb is a linear map over the ranks, and its gradient is the transposed map, which is a verb
again:

    op                forward                       backward                      arrays before and after
    copy_to           x itself                      all_reduce of dy              x whole, equal on all (Megatron's f)
    reduce_from       all_reduce of x               dy itself                     y whole, equal on all (Megatron's g)
    all_gather        shards joined along `dim`     reduce_scatter along `dim`    x a shard, y whole
    reduce_scatter    summed, own slice of `dim`    all_gather along `dim`        x a summand, y a shard
    gather_copies     shards joined along `dim`     own slice of dy               x a shard, y whole, equal on all
    take_shard        own slice of `dim`            all_gather along `dim`        x whole, equal on all, y a shard
    all_to_all        slices of `split` swapped     the same, the other way       x and y shards, of two dims

all_gather and gather_copies compute the same y. If each rank then does something different with y,
the gradients differ and must be summed. If all ranks do the same, each has the whole gradient
already; a sum would count it P times.

Cost in elements, over all ranks. n: elements of the whole array; n' = P·ceil(d/P)·n/d: the same
with its dim d padded, because verbs that scatter cut equal chunks (n if P divides d); s: elements
that stay on their rank in an exchange.

    op                forward      backward
    copy_to           0            2(P-1) n
    reduce_from       2(P-1) n     0
    all_gather        (P-1) n      (P-1) n'
    reduce_scatter    (P-1) n'     (P-1) n
    gather_copies     (P-1) n      0
    take_shard        0            (P-1) n
    all_to_all        n - s        n - s

Shards are cut as numpy.array_split does, so P need not divide a dim. Sums go round a ring, with the
same bits on every rank; reduce_from(algorithm="direct") adds in rank order, independent of the
layout, and sends more bytes. Every rank of the group calls each op. Backward runs them in the same
order on all ranks, as the tape follows from the forward.

notes:   N2 张量并行; N4 §2
Source:  Shoeybi et al. 2019, "Megatron-LM" (1909.08053), f and g; Korthikanti et al. 2022 for the
         sequence's pair.
"""

from collections.abc import Sequence
from itertools import accumulate

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.autograd.ops.linear import rows
from minidist.autograd.ops.loss import logits_gradient, targets_in
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.comm.chunks import bounds, longest
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, beside, device_of, widen
from minidist.errors import ShapeError

# -------------------------------------------------------------------------- whole arrays in and out


@op
def copy_to(x: Array, *, group: Group) -> tuple[Array, Saved]:
    """Return x unchanged (Megatron's f), whole and equal on all ranks, before each rank does its
    own part of the work."""
    return x, saved()


@copy_to.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return node.options["group"].all_reduce(dy, algorithm="ring")


@op
def reduce_from(x: Array, *, group: Group, algorithm: str = "ring") -> tuple[Array, Saved]:
    """Return the sum of all ranks' x (Megatron's g), whole and equal on all ranks; the shape of
    x."""
    return group.all_reduce(x, algorithm=algorithm), saved()


@reduce_from.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return dy


# ---------------------------------------------------------------------------------- shards of a dim


@op
def all_gather(x: Array, *, dim: int, group: Group) -> tuple[Array, Saved]:
    """Join the shards along `dim`, for ranks that do different work with the result: (…, own, …) ->
    (…, d, …).

    Raises:  ShapeError if the shards are not numpy.array_split's.
    """
    return _join(x, dim, group), saved()


@all_gather.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return _sum_and_cut(dy, **node.options)


@op
def reduce_scatter(x: Array, *, dim: int, group: Group) -> tuple[Array, Saved]:
    """Return this rank's slice of `dim` of the sum of all ranks' x: (…, d, …) -> (…, own, …)."""
    return _sum_and_cut(x, dim, group), saved()


@op
def gather_copies(x: Array, *, dim: int, group: Group) -> tuple[Array, Saved]:
    """Join the shards along `dim`, for ranks that all do the same work with the result. Raises: as
    all_gather."""
    return _join(x, dim, group), saved()


@gather_copies.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return _own(dy, **node.options)


@op
def take_shard(x: Array, *, dim: int, group: Group) -> tuple[Array, Saved]:
    """Return this rank's slice of `dim`, a view; x is whole and equal on all ranks: (…, d, …) ->
    (…, own, …)."""
    return _own(x, dim, group), saved()


@take_shard.gradient("x")
@reduce_scatter.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return _join(dy, **node.options)


def shard_of(length: int, group: Group) -> slice:
    """Return this rank's part of a dim of `length`, as numpy.array_split cuts it."""
    edges = bounds(length, group.size)
    return slice(edges[group.rank], edges[group.rank + 1])


def _own(x: Array, dim: int, group: Group) -> Array:
    """Return this rank's slice of `dim`: a view."""
    return x[(slice(None),) * (dim % x.ndim) + (shard_of(x.shape[dim], group),)]


def _join(x: Array, dim: int, group: Group) -> Array:
    """Return all ranks' x joined in rank order along `dim`, contiguous. Raises: ShapeError."""
    xp = array_module(x)
    whole = group.all_gather(xp.ascontiguousarray(xp.moveaxis(x, dim, 0)), algorithm="ring")
    own = shard_of(len(whole), group)
    if own.stop - own.start != x.shape[dim]:
        raise ShapeError(
            f"{group.axis} rank {group.rank} of {group.size}: the shard has {x.shape[dim]} in dim "
            f"{dim}, but of {len(whole)} in all it must have {own.stop - own.start}; divide as "
            "numpy.array_split does"
        )
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, dim))


def _sum_and_cut(x: Array, dim: int, group: Group) -> Array:
    """Return this rank's slice of `dim` of the sum of all ranks' x, contiguous.

    The verb cuts the flattened array into equal chunks. If P does not divide the dim, shorter
    slices are padded.
    """
    xp = array_module(x)
    length = x.shape[dim]
    own = shard_of(x.shape[dim], group)
    slices = xp.moveaxis(x, dim, 0)
    most = longest(length, group.size)
    if length % group.size:
        padded = xp.zeros((group.size, most, *slices.shape[1:]), x.dtype)
        for slot, part in zip(
            padded, xp.split(slices, bounds(length, group.size)[1:-1]), strict=True
        ):
            slot[: len(part)] = part
        slices = padded
    chunk = group.reduce_scatter(xp.ascontiguousarray(slices), algorithm="ring")
    chunk = chunk.reshape(most, *x.shape[: dim % x.ndim], *x.shape[dim % x.ndim + 1 :])[
        : own.stop - own.start
    ]
    return xp.ascontiguousarray(xp.moveaxis(chunk, 0, dim))


# -------------------------------------------------------------------------- from one dim to another


@op
def all_to_all(
    x: Array, *, split: int, join: int, group: Group, counts: Sequence[int] | None = None
) -> tuple[Array, Saved]:
    """Cut x along dim `split`, send each rank its slice, and join the received slices along dim
    `join`.

    So a whole `split` dim and a shard of `join` become a shard of `split` and a whole `join`; both
    may be one dim.
    Args:    counts: the size of the slice for each rank; default: as numpy.array_split cuts.
    Raises:  ShapeError if counts do not add up to the dim.
    """
    length = x.shape[split]
    edges = bounds(length, group.size) if counts is None else (0, *accumulate(map(int, counts)))
    if len(edges) != group.size + 1 or edges[-1] != length:
        raise ShapeError(
            f"all_to_all: counts {list(counts or ())} for {group.size} ranks do not divide the "
            f"{length} of dim {split}; pass one count per rank, with the sum {length}"
        )
    y, came = _swap(x, split, join, edges, group)
    return y, saved(came=came)


@all_to_all.gradient("x")
def _(node: Node, dy: Array) -> Array:
    options = node.options
    return _swap(dy, options["join"], options["split"], node.came, options["group"])[0]


def _swap(
    x: Array, split: int, join: int, edges: Sequence[int], group: Group
) -> tuple[Array, tuple[int, ...]]:
    """Return the joined slices that all ranks have for this rank, and the bounds of each slice
    along `join`."""
    xp = array_module(x)
    pieces = [xp.ascontiguousarray(piece) for piece in xp.split(x, edges[1:-1], axis=split)]
    came = group.all_to_all(pieces, algorithm="pairwise")
    return xp.concatenate(came, axis=join), (0, *accumulate(piece.shape[join] for piece in came))


# ------------------------------------------------------------------------------- a split vocabulary


@op
def split_cross_entropy(
    logits: Array,
    targets: Array,
    *,
    first: int,
    vocabulary: int,
    group: Group,
    divisor: float | None = None,
) -> tuple[Array, Saved]:
    """Return the cross-entropy (as cross_entropy of loss.py) of logits that are cut along the
    vocabulary: each rank has some columns of every row.

    The loss of a token is log(s) + m - t: m is the row's maximum, s the sum of exp(logit - m), t
    the target's logit. One all-reduce gives m; a second one gives s and t together.
    Args:    logits: (…, own), of the ids first, first + 1, …
             targets: (…), ids of the whole vocabulary, equal on all ranks; on the host their range
             is checked, on a GPU a target outside the vocabulary gives NaN.
    Returns: one number, the same bits on all ranks; float32 for low precision too.
    Raises:  DtypeError, ShapeError if targets do not fit.
    Cost:    forward: two all-reduces, of 1 and of 2 numbers per token, instead of a gather of
             `vocabulary` numbers. Backward: none, because the gradient on each rank is
             (softmax - one-hot) of its own slice.
    Source:  Shoeybi et al. 2019, section 3.
    """
    tokens = targets_in("split_cross_entropy", logits, targets, vocabulary).reshape(-1)
    ids = tokens - first
    xp = array_module(logits)
    wide = rows(widen(logits))
    count = divisor if divisor is not None else ids.size
    highest = group.all_reduce(wide.max(axis=1), op="max", algorithm="ring")
    mine = (ids >= 0) & (ids < wide.shape[1])
    rows_here = array_module(ids).flatnonzero(mine).astype("int64", copy=False)
    places = beside(rows_here, wide), beside(ids[mine], wide)
    # sums of exp(logit - highest); the target's logit
    partial = xp.zeros((2, len(wide)), wide.dtype)
    for where in row_blocks(wide):
        partial[0, where] = xp.exp(wide[where] - highest[where, None]).sum(axis=1)
    partial[1, places[0]] = wide[places]
    if device_of(tokens) == "cuda":  # where targets_in checks no range
        partial[1, (tokens < 0) | (tokens >= vocabulary)] = xp.nan
    total, target = group.all_reduce(partial, algorithm="ring")
    loss = (xp.log(total) + (highest - target)).sum() / wide.dtype.type(count)
    return xp.asarray(loss), saved(
        logits=logits, places=places, highest=highest, total=total, divisor=count
    )


@split_cross_entropy.gradient("logits")
def _(node: Node, dy: Array) -> Array:
    return logits_gradient(
        node.logits, node.highest[:, None], node.total[:, None], node.places, dy, node.divisor
    )
