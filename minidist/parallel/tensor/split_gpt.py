"""Which part of a GPT each rank of a tensor-parallel group gets, and the model cut so."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT, CausalSelfAttention, GPTConfig, Mixture
from minidist.nn.balance import BalancedOutput
from minidist.nn.moe import mixtures
from minidist.nn.output import Output
from minidist.parallel.tensor.tensor_layers import (
    ColumnLinear,
    Region,
    RowLinear,
    SharedKeysLinear,
    SplitEmbedding,
    SplitMixture,
    SplitMLP,
    SplitOutput,
    ranges,
)


def check_fits(config: GPTConfig, size: int) -> None:
    """Whether every rank of so many gets something of each layer.

    Raises:  PlanError, one line: what is too small, and what would fit.
    """
    what, count = narrowest(config)
    if count < size:
        raise PlanError(f"tensor parallelism over tp={size} ranks: {count} {what} leave a rank without any; "
                        f"choose tp from 1 to {count}, or at least {size} {what}")


def narrowest(config: GPTConfig) -> tuple[str, int]:
    """What a GPT has fewest of, of all that is divided, and how many: so many ranks at the most."""
    hidden = config.mixture.hidden or config.hidden if config.mixture else config.hidden
    counts = {"heads": config.heads, "token ids": config.vocabulary, "hidden numbers": hidden}
    what = min(counts, key=counts.__getitem__)
    return what, counts[what]


def head_shares(heads: int, key_heads: int, size: int) -> list[tuple[range, range]]:
    """Of each rank the query heads, and the key heads that these look at.

    Key heads are divided with all their query heads where there are enough; where there are not, each goes to several
    ranks, which divide its query heads. So no rank's queries ever look at a part of a key head's group.
    """
    each = heads // key_heads
    if key_heads >= size:
        return [(range(part.start * each, part.stop * each), range(part.start, part.stop))
                for part in ranges(key_heads, size)]
    shares = []
    for key, sharing in enumerate(ranges(size, key_heads)):
        for part in ranges(each, sharing.stop - sharing.start):
            shares.append((range(key * each + part.start, key * each + part.stop), range(key, key + 1)))
    return shares


def head_columns(heads: int, key_heads: int, head_width: int,
                 shares: Sequence[tuple[range, range]]) -> list[tuple[Array, Array]]:
    """The columns of the queries', keys' and values' common weight that each share needs: queries'; keys' and values'.
    """
    def of(first: int, chosen: range) -> Array:
        return np.arange((first + chosen.start) * head_width, (first + chosen.stop) * head_width)

    return [(of(0, queries), np.concatenate([of(heads, keys), of(heads + key_heads, keys)]))
            for queries, keys in shares]


def shared_numbers(config: GPTConfig, ranks: int) -> int:
    """Numbers that all ranks together send in a step to add up the gradients of key heads that several of them hold.

    2(c-1) times a head's columns of keys and values, with their biases, where c ranks hold it: with fewer key heads
    than ranks the c of all heads add up to the ranks.
    """
    heads_again = max(0, ranks - config.key_heads)
    return 2 * heads_again * config.layers * (config.width + 1) * 2 * config.head_width


def split_attention(attention: CausalSelfAttention, tp: Region, sharers: Group | None) -> None:
    """Leave this rank its heads: whole ones, for softmax runs over a head's scores, and a part of one is no use.

    Args:    sharers: the ranks that hold this rank's key head too, or None.
    """
    group, width = tp.group, attention.head_width
    shares = head_shares(attention.heads, attention.key_heads, group.size)
    queries, keys = shares[group.rank]
    columns = head_columns(attention.heads, attention.key_heads, width, shares)
    cut: Any = attention
    if sharers is None:
        cut.qkv = ColumnLinear(attention.qkv, tp, columns=[np.concatenate(both) for both in columns])
    else:
        cut.qkv = SharedKeysLinear(attention.qkv, tp, queries=[of for of, _ in columns], keys=[of for _, of in columns],
                                   sharers=sharers)
    attention.out = RowLinear(attention.out, tp,                                        # type: ignore[assignment]
                              rows=[slice(share.start * width, share.stop * width) for share, _ in shares])
    attention.heads, attention.key_heads = len(queries), len(keys)


def split_gpt(model: GPT, tp: Region) -> None:
    """Cut a GPT between the ranks of `tp`; its weights must not be drawn yet. Norms and dropout stay as they are.

    Cost:    none; where ranks share key heads, the making of their group.
    Raises:  PlanError if a rank would get nothing of a layer; ConfigError if the weights are drawn.
    """
    group, config = tp.group, model.config
    check_fits(config, group.size)
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError("tensor parallelism: the model's weights are drawn already; cut it first, so that each rank "
                          "draws its part alone")
    shares = head_shares(config.heads, config.key_heads, group.size)
    shared = config.key_heads < group.size
    sharers = group.split(shares[group.rank][1].start, axis=group.axis) if shared else None
    for block in model.blocks:
        split_attention(block.attention, tp, sharers)
        block.mlp = SplitMixture(block.mlp, tp) if isinstance(block.mlp, Mixture) else SplitMLP(block.mlp, tp)
    model.tokens = SplitEmbedding(model.tokens, tp)
    if model.head is not None:
        model.head = ColumnLinear(model.head, tp)       # type: ignore[assignment]
    set_output(model, SplitOutput(config.vocabulary, tp))
    model.assign_names()


def set_output(model: GPT, output: Output) -> None:
    """Put `output` in place of a GPT's, which goes on adding balance losses if it did."""
    layers = mixtures(model)
    model.output = BalancedOutput(output, layers) if layers else output
