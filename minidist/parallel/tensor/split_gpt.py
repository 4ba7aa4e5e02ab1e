"""Which part of a GPT each rank of a tensor-parallel group gets, and the model cut so."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT, CausalSelfAttention, GPTConfig, Mixture
from minidist.nn.shares import head_shares, narrowest
from minidist.parallel.tensor.tensor_layers import (
    ColumnLinear,
    RowLinear,
    SharedKeysLinear,
    SplitEmbedding,
    SplitMixture,
    SplitMLP,
    SplitOutput,
    TensorRegion,
)


def head_columns(heads: int, key_heads: int, head_width: int,
                 shares: Sequence[tuple[range, range]]) -> list[tuple[Array, Array]]:
    """The columns that each rank needs of the common weight of queries, keys and values, for `head_shares`.

    Returns: for each rank (the columns of its queries; those of its keys and values), int64.
    """
    def of(first: int, chosen: range) -> Array:
        return np.arange((first + chosen.start) * head_width, (first + chosen.stop) * head_width)

    return [(of(0, queries), np.concatenate([of(heads, keys), of(heads + key_heads, keys)]))
            for queries, keys in shares]


def shared_numbers(config: GPTConfig, ranks: int) -> int:
    """Numbers that all ranks together send in a step to sum the gradients of key heads that several ranks hold.

    A head held by c ranks costs 2(c-1) times its columns of keys and values, with their biases. With fewer key heads
    than ranks the c of all heads add up to `ranks`.
    """
    heads_again = max(0, ranks - config.key_heads)
    return 2 * heads_again * config.layers * (config.width + 1) * 2 * config.head_width


def split_attention(attention: CausalSelfAttention, region: TensorRegion, sharers: Group | None) -> None:
    """Leave this rank its heads, in place. Heads stay whole, because softmax runs over all scores of a head.

    Args:    sharers: the ranks that also hold this rank's key head, or None.
    """
    group, width = region.group, attention.head_width
    shares = head_shares(attention.heads, attention.key_heads, group.size)
    queries, keys = shares[group.rank]
    columns = head_columns(attention.heads, attention.key_heads, width, shares)
    cut: Any = attention
    if sharers is None:
        cut.qkv = ColumnLinear(attention.qkv, region, columns=[np.concatenate(both) for both in columns])
    else:
        cut.qkv = SharedKeysLinear(attention.qkv, region, queries=[of for of, _ in columns],
                                   keys=[of for _, of in columns], sharers=sharers)
    cut.out = RowLinear(attention.out, region, rows=[slice(share.start * width, share.stop * width)
                                                     for share, _ in shares])
    attention.heads, attention.key_heads = len(queries), len(keys)


def split_gpt(model: GPT, region: TensorRegion) -> None:
    """Cut a GPT between the ranks of `region`, in place; its weights must not be drawn yet. Norms and dropout stay.

    Cost:    no messages; if several ranks hold a key head, one Group.split.
    Raises:  PlanError if a rank would get nothing of a layer; ConfigError if the weights are drawn.
    """
    group, config = region.group, model.config
    what, count = narrowest(config)
    if count < group.size:
        raise PlanError(f"tensor parallelism over tp={group.size} ranks: {count} {what} leave a rank without any; "
                        f"choose tp from 1 to {count}, or at least {group.size} {what}")
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError("tensor parallelism: the model's weights are drawn already; cut it first, so that each rank "
                          "draws its part alone")
    sharers = None
    if config.key_heads < group.size:
        own_keys = head_shares(config.heads, config.key_heads, group.size)[group.rank][1]
        sharers = group.split(own_keys.start, axis=group.axis)
    for block in model.blocks:
        split_attention(block.attention, region, sharers)
        block.mlp = SplitMixture(block.mlp, region) if isinstance(block.mlp, Mixture) else SplitMLP(block.mlp, region)
    model.tokens = SplitEmbedding(model.tokens, region)
    if model.head is not None:
        model.head = ColumnLinear(model.head, region)       # type: ignore[assignment]
    model.output = SplitOutput(config.vocabulary, region)
    model.assign_names()
