"""A GPT that takes whole sequences and works on this rank's shard of their tokens.

A function of the sequence's length says which tokens these are: consecutive ones (`shard_of`), or
the two blocks of a zigzag. Each layer that is given something for all tokens (ids, positions,
dropout keys, targets) picks its own part.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.autograd.ops import collectives
from minidist.autograd.tensor import Tensor, tensor
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, index_range, to_device
from minidist.nn import GPT, Dropout, DropoutKey, Embedding
from minidist.nn.attention import CausalSelfAttention
from minidist.nn.gpt import Output
from minidist.parallel.step.step import Key, Loss, Part

TOKENS = 1  # the dim of (B, T, width) that is cut
OwnTokens = Callable[[int], Any]
"""length of a sequence -> the places of this rank's tokens in it: a slice, or integers in ascending
order."""


def all_tokens(length: int) -> slice:
    """Return all tokens: the OwnTokens of a rank that has all of them."""
    return slice(0, length)


def within(outer: OwnTokens, inner: OwnTokens) -> OwnTokens:
    """Return the OwnTokens that `inner` takes of the tokens of `outer`."""

    def own(length: int) -> Any:
        places = index_range(length)[outer(length)]
        return places[inner(len(places))]

    return own


def own_blocks(length: int, rank: int, size: int) -> list[tuple[int, slice]]:
    """Return a rank's two blocks of a sequence of `length` tokens: (number among the 2P, place
    among the own tokens)."""
    edges = bounds(length, 2 * size)
    first = rank
    last = 2 * size - 1 - rank
    middle = edges[first + 1] - edges[first]
    return [
        (first, slice(0, middle)),
        (last, slice(middle, middle + edges[last + 1] - edges[last])),
    ]


def zigzag(length: int, rank: int, size: int) -> np.ndarray:
    """Return the positions of a rank's tokens in a sequence of `length` tokens over `size` ranks,
    ascending: (own,) int64."""
    edges = bounds(length, 2 * size)
    return np.concatenate(
        [index_range(*edges[at : at + 2]) for at, _ in own_blocks(length, rank, size)]
    )


def pick(array: Array, own: OwnTokens, dim: int) -> Array:
    """Return the part of an array that belongs to this rank's tokens: (…, T, …) -> (…, own, …); T
    is dim `dim`."""
    places = own(array.shape[dim])
    if isinstance(places, slice):
        return array[(slice(None),) * dim + (places,)]
    return array_module(array).take(array, to_device(places, device_of(array)), axis=dim)


def own_key(key: DropoutKey | None, own: OwnTokens) -> DropoutKey | None:
    """Return the own tokens' part of a dropout key of all tokens."""
    return key and replace(key, tokens=pick(key.tokens, own, TOKENS))


def loss_of_tokens(model: GPT, key: Key, own: OwnTokens) -> Loss:
    """Return the loss of a rank that works on a shard of the tokens: the sum of the losses of its
    own tokens of some rows, divided by `divisor`."""

    def loss(part: Part, divisor: int) -> Tensor:
        return model.loss(
            pick(part.inputs, own, TOKENS),
            pick(part.targets, own, TOKENS),
            divisor,
            key=own_key(key(part), own),
            positions=index_range(part.inputs.shape[TOKENS]),
        )

    return loss


# ------------------------------------------------------------------------------------------- layers


class TokenShardEmbedding(Embedding):
    """A token embedding that is given all ids (B, T) and looks up the own ones: (B, own, width)."""

    dim = TOKENS

    def __init__(self, embedding: Embedding, own: OwnTokens) -> None:
        self.weight = embedding.weight
        self.own = own

    def forward(self, ids: Array) -> Tensor:
        return super().forward(pick(ids, self.own, self.dim))


class TokenShardPositions(TokenShardEmbedding):
    """A position embedding that is given all positions (T,) and looks up the own ones: (own,
    width)."""

    dim = 0


class TokenShardDropout(Dropout):
    """Dropout of the own tokens by the key of all tokens, so it drops the same numbers as on one
    rank."""

    def __init__(self, dropout: Dropout, own: OwnTokens) -> None:
        super().__init__(dropout.rate)
        self.own = own

    def forward(
        self, x: Tensor, key: DropoutKey | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """(B, own, width) -> (B, own, width); the key is that of all tokens."""
        return super().forward(x, own_key(key, self.own), residual=residual)


class TokenShardAttention(CausalSelfAttention):
    """A GPT's attention over a divided sequence: own tokens (B, own, width) -> (B, own, width).

    Args:    attention: the whole layer, whose two linears it takes; group: the ranks that divide
             the sequence. A subclass has `attend`, which lets own queries see the keys of all.
    """

    takes_packed = False

    def __init__(self, attention: CausalSelfAttention, group: Group) -> None:
        self.path = attention.path
        self.heads = attention.heads
        self.key_heads = attention.key_heads
        self.head_width = attention.head_width
        self.rotary = attention.rotary
        self.rope_theta = attention.rope_theta
        self.rope_scaling = attention.rope_scaling
        self.pattern = attention.pattern
        self.keeps_scores = attention.keeps_scores
        self.qkv = attention.qkv
        self.out = attention.out
        self.group = group


class TokenShardOutput(Output):
    """Logits of the own tokens: the loss of all ranks' tokens, and the last token to generate
    text."""

    def __init__(self, group: Group, own: OwnTokens) -> None:
        self.group = group
        self.own = own

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Return the loss of all tokens from own logits (B, own, vocabulary) and all targets (B,
        T); the same bits on every rank.

        Cost:    an all-reduce of one number, counted under `control`; backward sends nothing.
        """
        share = super().loss(
            logits, pick(targets, self.own, TOKENS), divisor=divisor or targets.size
        )
        with self.group.ledger.control():
            return collectives.reduce_from(share, group=self.group, algorithm="direct")

    def last(self, x: Tensor) -> Tensor:
        """Return the last token's hidden state on every rank, without gradient: (B, own, width) ->
        (B, 1, width)."""
        with self.group.ledger.control():
            length = int(self.group.all_reduce(np.array([x.shape[TOKENS]], np.int64))[0])
            here = length - 1 in np.arange(length)[self.own(length)]
            every = self.group.all_gather(
                x.data[:, -1] if here else x.data[:0, :0].reshape(0, x.shape[-1])
            )
        return tensor(every[:, None])


def shard_dropouts(model: GPT, own: OwnTokens) -> None:
    """Let a GPT's dropouts and its position embedding, in place, pick the own tokens' part."""
    if model.positions is not None:
        model.positions = TokenShardPositions(model.positions, own)
    model.dropout = TokenShardDropout(model.dropout, own)
    for block in model.blocks:
        block.dropout_attention = TokenShardDropout(block.dropout_attention, own)
        block.dropout_mlp = TokenShardDropout(block.dropout_mlp, own)


def shard_tokens(model: GPT, group: Group, own: OwnTokens) -> None:
    """Let a GPT take whole sequences and work on the own tokens, in place; its attention must see
    those of `group`."""
    model.tokens = TokenShardEmbedding(model.tokens, own)
    model.output = TokenShardOutput(group, own)
    shard_dropouts(model, own)
    model.assign_names()
