"""A GPT that is given whole sequences and works on this rank's tokens of them.

Which tokens those are says a function of a sequence's length: consecutive ones (`shard_of`), or the two blocks of a
zigzag. Each layer that is told of all tokens (their ids, positions, dropout keys, targets) picks those of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.autograd.ops import collectives
from minidist.autograd.tensor import Tensor, tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, to_device
from minidist.nn import GPT, Dropout, DropoutKey, Embedding
from minidist.nn.moe import Sequences, mixtures
from minidist.nn.output import Output

TOKENS = 1      # the dim of (B, T, width) that is cut
Own = Callable[[int], Any]
"""The places of this rank's tokens in a sequence of so many: a slice, or integers in ascending order."""


def everything(length: int) -> slice:
    """All tokens are one's own."""
    return slice(0, length)


def within(outer: Own, inner: Own) -> Own:
    """The tokens that `inner` takes of those that `outer` takes."""
    def own(length: int) -> Any:
        places = np.arange(length)[outer(length)]
        return places[inner(len(places))]
    return own


def own_key(key: DropoutKey | None, own: Own) -> DropoutKey | None:
    """The own tokens' part of a dropout key."""
    return key and replace(key, tokens=pick(key.tokens, own, TOKENS))


def pick(array: Array, own: Own, dim: int) -> Array:
    """What belongs to this rank's tokens, of an array whose `dim` is all tokens: (…, T, …) -> (…, own, …)."""
    places = own(array.shape[dim])
    if isinstance(places, slice):
        return array[(slice(None),) * dim + (places,)]
    return array_module(array).take(array, to_device(places, device_of(array)), axis=dim)


class OwnIds(Embedding):
    """A token embedding that is asked for all ids (B, T) and looks up the own ones: -> (B, own, width)."""

    def __init__(self, embedding: Embedding, own: Own) -> None:
        self.weight, self.own = embedding.weight, own

    def forward(self, ids: Array) -> Tensor:
        return super().forward(pick(ids, self.own, TOKENS))


class OwnPositions(Embedding):
    """A position embedding that is asked for all positions (T,) and looks up those of the own tokens.

    Of one that does so already it takes over what that would look up.
    """

    def __init__(self, embedding: Embedding, own: Own) -> None:
        self.weight = embedding.weight
        self.own: Own = within(own, embedding.own) if isinstance(embedding, OwnPositions) else own

    def forward(self, ids: Array) -> Tensor:
        return super().forward(pick(ids, self.own, 0))


class OwnDropout(Dropout):
    """Dropout of the own tokens, by the key of all: what falls is what would fall on one rank."""

    def __init__(self, dropout: Dropout, own: Own) -> None:
        super().__init__(dropout.rate)
        self.own = own

    def forward(self, x: Tensor, key: DropoutKey | None = None, *, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, own_key(key, self.own), residual=residual)


class OwnOutput(Output):
    """Logits of the own tokens: the loss of all ranks' tokens, and the last token for generating text."""

    def __init__(self, group: Group, own: Own) -> None:
        self.group, self.own = group, own

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Own logits (B, own, vocabulary), all targets (B, T) -> the loss of all, the same bits on every rank.

        Cost:    one number a rank, counted under `control`; backward sends nothing.
        """
        share = super().loss(logits, pick(targets, self.own, TOKENS), divisor=divisor or targets.size)
        with self.group.ledger.control():
            return collectives.reduce_from(share, group=self.group, algorithm="direct")  # type: ignore[no-any-return]

    def last(self, x: Tensor) -> Tensor:
        """The last token's, on every rank: (B, own, width) -> (B, 1, width); without gradient, for generating text."""
        with self.group.ledger.control():
            length = int(self.group.all_reduce(np.array([x.shape[TOKENS]], np.int64))[0])
            here = length - 1 in np.arange(length)[self.own(length)]
            every = self.group.all_gather(x.data[:, -1] if here else x.data[:0, :0].reshape(0, x.shape[-1]))
        return tensor(every[:, None])


def keep_own_dropouts(model: GPT, own: Own) -> None:
    """Let a GPT's dropouts and position embedding, in place, pick the own tokens' part of what they are told."""
    if model.positions is not None:
        model.positions = OwnPositions(model.positions, own)
    model.dropout = OwnDropout(model.dropout, own)
    for block in model.blocks:
        block.dropout_attention = OwnDropout(block.dropout_attention, own)
        block.dropout_mlp = OwnDropout(block.dropout_mlp, own)


class OwnSequences(Sequences):
    """Of a gate that sees the own tokens of sequences: who chose what in all of them, and what that says of the own.

    Args:    inner: how the gate's tokens come about otherwise; group: the ranks that have the others.
    """

    def __init__(self, inner: Sequences, group: Group, own: Own) -> None:
        self.inner, self.group, self.own = inner, group, own

    def joined(self, chosen: Array) -> Array:
        """Cost: an all-gather of k integers a token, under `control`."""
        xp = array_module(chosen)
        with self.group.ledger.control():
            parts = self.group.all_gather(xp.ascontiguousarray(xp.moveaxis(chosen, TOKENS, 0)), algorithm="ring")
            places = self.group.all_gather(np.arange(len(parts))[self.own(len(parts))], algorithm="ring")
        whole = xp.empty_like(parts)
        whole[to_device(places, device_of(parts))] = parts
        return xp.ascontiguousarray(xp.moveaxis(whole, 0, TOKENS))

    def parted(self, kept: Array) -> Array:
        """The own tokens' part."""
        return pick(kept, self.own, TOKENS)

    def keys(self, tokens: Array) -> Array:
        """As without other ranks: a key comes for the own tokens alone."""
        return self.inner.keys(tokens)

    def total(self, share: Array) -> Array:
        """This rank's tokens' part of the loss: shares add up later."""
        return self.inner.total(share)


def tell_own(model: GPT, group: Group, own: Own) -> None:
    """Let a GPT that is given the own tokens' ids, in place, pick their positions, and route by whole sequences."""
    if model.positions is not None:
        model.positions = OwnPositions(model.positions, own)
    for layer in mixtures(model):
        layer.sequences = OwnSequences(layer.sequences, group, own)


def keep_own_tokens(model: GPT, group: Group, own: Own) -> None:
    """Let a GPT take whole sequences and work on the own tokens, in place; attention must see to the others."""
    model.tokens = OwnIds(model.tokens, own)
    model.output = OwnOutput(group, own)
    keep_own_dropouts(model, own)
    model.assign_names()
