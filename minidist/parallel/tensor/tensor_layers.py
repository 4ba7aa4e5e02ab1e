"""Layers cut between the ranks of a tensor-parallel group, the edges of their regions, and a GPT
cut so.

A block has two regions, attention and MLP. A region is a column linear, an elementwise or per-head
function, and a row linear. Inside a region each rank works on its own columns, and nothing is sent:

    x -- enter -- x W1[:, own columns] -- gelu, or attention of own heads --
      -- y W2[own rows, :] -- leave -- + bias

TensorRegion.enter and leave are Megatron's f and g (chapter 12). Chapter 13 replaces them by a
gather and a scatter of the sequence. Only layers are replaced, so weights keep their names and the
GPT keeps its definition.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.ops.gather import positions_in
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, beside, device_of, index_range
from minidist.errors import ConfigError, PlanError
from minidist.nn import (
    GPT,
    MLP,
    CausalSelfAttention,
    DropoutKey,
    Embedding,
    GPTConfig,
    Linear,
    Mixture,
    Module,
    Weight,
)
from minidist.nn.gpt import Output
from minidist.nn.moe import Sequences
from minidist.nn.shares import even_slices, head_shares, narrowest
from minidist.nn.weight_shard import ShardIndex, WeightShard


class TensorRegion:
    """The part of a layer in which each rank of `group` works on its own columns, with the
    communication at its two edges."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """Return x, whole on all ranks, as it is; backward all-reduces its gradient (Megatron's
        f)."""
        return collectives.copy_to(x, group=self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the all-reduced sum of the ranks' summands; backward leaves the gradient as it is
        (Megatron's g)."""
        return collectives.reduce_from(x, group=self.group)

    def sequences(self) -> Sequences:
        """Return the tokens that a mixture's gate sees; it is outside the region, so it sees all of
        them."""
        return Sequences()


class ColumnLinear(Module):
    """y_r = x W[:, columns of r] + b[columns of r].

    Args:    linear: the whole layer, its weights not yet drawn.
             columns: of every rank (default: as numpy.array_split).
             enter: whether x must enter the region here; False if the caller did it once for
             several layers.
             sharers: the ranks that have the same columns, or None; word: see WeightShard.
    """

    def __init__(
        self,
        linear: Linear,
        region: TensorRegion,
        *,
        columns: Sequence[slice | Array] | None = None,
        enter: bool = True,
        sharers: Group | None = None,
        word: str = "",
    ) -> None:
        rank = region.group.rank
        chosen = columns or even_slices(linear.weight.shape[1], region.group.size)
        self.region = region if enter else None
        # ops.linear, or what a precision put in its place
        self.product = linear.product
        shard = partial(WeightShard, rank=rank, sharers=sharers, word=word)
        self.weight = shard(linear.weight, [(slice(None), own) for own in chosen])
        self.bias = None if linear.bias is None else shard(linear.bias, [(own,) for own in chosen])

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """(…, inputs) -> (…, own outputs); bias=False: without the bias, if the next op adds it."""
        return self.product(
            x if self.region is None else self.region.enter(x),
            self.weight,
            self.bias if bias else None,
        )


class SharedKeysLinear(Module):
    """Queries of this rank's heads, and keys and values of one key head that several ranks hold.

    They are two column linears: ZeRO must cut the shared columns equally on every rank that has
    them.
    Args:    queries, keys: the columns of every rank; sharers: the ranks that hold this rank's key
             head.
    """

    def __init__(
        self,
        linear: Linear,
        region: TensorRegion,
        *,
        queries: Sequence[Array],
        keys: Sequence[Array],
        sharers: Group,
    ) -> None:
        self.region = region
        self.product = linear.product
        linears = {
            "queries": ColumnLinear(linear, region, columns=queries, word="queries"),
            "keys": ColumnLinear(linear, region, columns=keys, sharers=sharers, word="keys"),
        }
        self.weight = {name: own.weight for name, own in linears.items()}
        self.bias = {name: own.bias for name, own in linears.items()}

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) -> (…, own outputs): queries, keys and values of the own heads."""
        x = self.region.enter(x)
        return ops.concat(
            [self.product(x, weight, self.bias[name]) for name, weight in self.weight.items()],
            dim=-1,
        )


class RowLinear(Module):
    """y = Σ_r x_r W[rows of r, :] + b; every rank has b whole and adds it after the sum, so that it
    counts once and not P times.

    Args:    rows: of every rank (default: as numpy.array_split).
    """

    def __init__(
        self, linear: Linear, region: TensorRegion, *, rows: Sequence[slice] | None = None
    ) -> None:
        self.region = region
        self.product = linear.product
        chosen = rows or even_slices(linear.weight.shape[0], region.group.size)
        self.weight = WeightShard(linear.weight, [(own,) for own in chosen], region.group.rank)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, own inputs) -> (…, outputs)."""
        y = self.region.leave(self.product(x, self.weight))
        return y if self.bias is None else y + self.bias


class SplitMLP(MLP):
    """An MLP whose hidden numbers are divided: columns of gate and up, rows of down. x enters once
    for both; then MLP.forward runs unchanged."""

    def __init__(self, mlp: MLP, region: TensorRegion) -> None:
        self.region = region
        self.gate = None if mlp.gate is None else ColumnLinear(mlp.gate, region, enter=False)  # type: ignore[assignment]
        self.up = ColumnLinear(mlp.up, region, enter=False)  # type: ignore[assignment]
        self.down = RowLinear(mlp.down, region)  # type: ignore[assignment]

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """(…, width) -> (…, width)."""
        return super().forward(self.region.enter(x), key)


class SplitMixture(Mixture):
    """A mixture whose experts' hidden numbers are divided: columns of gate and up, rows of down, of
    each expert.

    The gate is outside the region, whole on all ranks, so all ranks route tokens in the same way.
    Tokens and the weights of the results enter the region together; each rank's weighted sums are
    summands of the region's output. Shared experts are regions of their own.
    """

    def __init__(self, mixture: Mixture, region: TensorRegion) -> None:
        self.path = mixture.path
        self.config = mixture.config
        self.layer = mixture.layer
        self.scores = mixture.scores
        self.experts = mixture.experts
        self.shared = [SplitMLP(expert, region) for expert in mixture.shared]
        self.bias = mixture.bias
        self.sequences = region.sequences()
        self.routing = mixture.routing
        self.newest = mixture.newest
        self.balance = mixture.balance
        self.balance_scale = mixture.balance_scale
        self.load = mixture.load
        self.region = region
        experts = self.experts
        rank = region.group.rank
        hidden = even_slices(experts.up.shape[2], region.group.size)
        columns: list[ShardIndex] = [(slice(None), slice(None), own) for own in hidden]
        rows: list[ShardIndex] = [(slice(None), own) for own in hidden]
        experts.gate = None if experts.gate is None else WeightShard(experts.gate, columns, rank)
        experts.up = WeightShard(experts.up, columns, rank)
        experts.down = WeightShard(experts.down, rows, rank)

    def enter(self, x: Tensor) -> Tensor:
        """Let tokens, or the gate's probabilities, enter the region."""
        return self.region.enter(x)

    def leave(self, y: Tensor) -> Tensor:
        """Let the ranks' summands leave the region."""
        return self.region.leave(y)


class SplitEmbedding(Embedding):
    """An embedding whose rows are divided: each rank looks up its own ids, zeros for the others;
    then all add up."""

    def __init__(self, embedding: Embedding, region: TensorRegion) -> None:
        self.region = region
        self.count = embedding.weight.shape[0]
        rows = even_slices(self.count, region.group.size)
        self.rows = rows[region.group.rank]
        self.weight: Weight = WeightShard(
            embedding.weight, [(own,) for own in rows], region.group.rank
        )

    def forward(self, ids: Array) -> Tensor:
        """All ids (…) -> (…, width)."""
        ids = positions_in("embedding", ids, self.count)
        mine = (ids >= self.rows.start) & (ids < self.rows.stop)
        # positions_in checks no range on a GPU: the look-up of an id outside the vocabulary gives
        # NaN, and every rank keeps it
        if device_of(ids) == "cuda":
            mine |= (ids < 0) | (ids >= self.count)
        xp = array_module(ids)
        found = ops.embedding(self.weight, xp.where(mine, ids - self.rows.start, 0))
        return self.region.leave(ops.where(beside(mine[..., None], found.data), found, 0.0))

    def unembed(self, x: Tensor) -> Tensor:
        """Return the logits of the own rows of a tied table: (…, width) -> (…, own rows)."""
        return ops.unembed(self.region.enter(x), self.weight)


class SplitOutput(Output):
    """Logits of a slice of the vocabulary: their loss is computed without joining them. Args:
    vocabulary: the whole's size."""

    def __init__(self, vocabulary: int, region: TensorRegion) -> None:
        self.vocabulary = vocabulary
        self.region = region
        self.first = even_slices(vocabulary, region.group.size)[region.group.rank].start

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Return the loss, as Output.loss does; the same bits on every rank."""
        return collectives.split_cross_entropy(
            logits,
            targets,
            first=self.first,
            vocabulary=self.vocabulary,
            group=self.region.group,
            divisor=divisor,
        )

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids, to generate text: an all-gather of `vocabulary` numbers per
        row."""
        return collectives.gather_copies(logits, dim=-1, group=self.region.group)


# ---------------------------------------------------------------------------------------------- GPT


def head_columns(
    heads: int, key_heads: int, head_width: int, shares: Sequence[tuple[range, range]]
) -> list[tuple[Array, Array]]:
    """Return for each rank (the columns of its queries; those of its keys and values) in their
    common weight, int64."""

    def of(first: int, chosen: range) -> Array:
        return index_range(*(head_width * (first + head) for head in (chosen.start, chosen.stop)))

    return [
        (of(0, queries), np.concatenate([of(heads, keys), of(heads + key_heads, keys)]))
        for queries, keys in shares
    ]


def shared_numbers(config: GPTConfig, ranks: int) -> int:
    """Return the count of numbers that all ranks together send in a step to sum the gradients of
    shared key heads.

    A head held by c ranks costs 2(c-1) times its columns, with biases; if some are shared, all c
    add up to `ranks`.
    """
    heads_again = max(0, ranks - config.key_heads)
    return 2 * heads_again * config.layers * (config.width + 1) * 2 * config.head_width


def split_attention(
    attention: CausalSelfAttention, region: TensorRegion, sharers: Group | None
) -> None:
    """Leave this rank its heads of an attention layer, in place; `sharers`: the ranks that also
    hold its key head, or None."""
    group = region.group
    width = attention.head_width
    shares = head_shares(attention.heads, attention.key_heads, group.size)
    queries, keys = shares[group.rank]
    columns = head_columns(attention.heads, attention.key_heads, width, shares)
    cut: Any = attention
    if sharers is None:
        cut.qkv = ColumnLinear(
            attention.qkv, region, columns=[np.concatenate(both) for both in columns]
        )
    else:
        cut.qkv = SharedKeysLinear(
            attention.qkv,
            region,
            queries=[of for of, _ in columns],
            keys=[of for _, of in columns],
            sharers=sharers,
        )
    cut.out = RowLinear(
        attention.out,
        region,
        rows=[slice(share.start * width, share.stop * width) for share, _ in shares],
    )
    attention.heads = len(queries)
    attention.key_heads = len(keys)


def split_gpt(model: GPT, region: TensorRegion) -> None:
    """Cut a GPT between the ranks of `region`, in place. Norms and dropout stay.

    Raises:  PlanError if a rank would get nothing of a layer; ConfigError if the weights are drawn.
    """
    group = region.group
    config = model.config
    what, count = narrowest(config)
    if count < group.size:
        raise PlanError(
            f"tensor parallelism over tp={group.size} ranks: {count} {what} leave a rank without "
            f"any; choose tp from 1 to {count}, or at least {group.size} {what}"
        )
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError(
            "tensor parallelism: the model's weights are drawn already; cut it first, so that "
            "each rank draws only its part"
        )
    sharers = None
    if config.key_heads < group.size:
        own_keys = head_shares(config.heads, config.key_heads, group.size)[group.rank][1]
        sharers = group.split(own_keys.start, axis=group.axis)
    for block in model.blocks:
        split_attention(block.attention, region, sharers)
        block.mlp = (
            SplitMixture(block.mlp, region)
            if isinstance(block.mlp, Mixture)
            else SplitMLP(block.mlp, region)
        )
    model.tokens = SplitEmbedding(model.tokens, region)
    if model.head is not None:
        model.head = ColumnLinear(model.head, region)  # type: ignore[assignment]
    model.output = SplitOutput(config.vocabulary, region)
    model.assign_names()
