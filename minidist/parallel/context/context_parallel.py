"""Chapter 13 · Context parallelism in a plan: the attention that sees the keys of all ranks, and
the changes to a model whose ranks have a part of each sequence.

    attention         keys that a query sees                      a rank's tokens
    ring              all, sent round (ring_attention.py)         two blocks of a zigzag
    … with a pattern  those it shows (sparse_ring_attention.py)   the same
    all-to-all        all, of the own heads (ulysses.py)          consecutive

Weights stay whole: the ranks of the axis are replicas, and the data axis sums their gradients.
"""

from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, to_device
from minidist.nn import GPT
from minidist.nn.moe import Sequences, mixtures
from minidist.parallel.context.ring_attention import attend_by_ring
from minidist.parallel.context.sparse_ring_attention import attend_by_pieces
from minidist.parallel.context.token_shard import (
    TOKENS,
    OwnTokens,
    TokenShardPositions,
    all_tokens,
    pick,
    within,
)
from minidist.parallel.context.ulysses import attend_by_heads
from minidist.parallel.step.model_axis import ModelAxis


class ContextParallel(ModelAxis):
    """The ranks that divide each sequence of a GPT; making it changes the model's attention, in
    place.

    Args:    attention: "ring" or "all-to-all".
    Attributes: own_tokens: this rank's tokens of a sequence.
    Raises:  PlanError for more ranks of all-to-all attention than heads.
    """

    def __init__(self, model: GPT, group: Group, attention: str = "ring") -> None:
        super().__init__(model, group)
        self.own_tokens = self._divide_attention(attention)
        positions = model.positions
        if positions is not None:
            inner = self.own_tokens
            if isinstance(positions, TokenShardPositions):  # by sequence parallelism
                inner = within(inner, positions.own)
            model.positions = TokenShardPositions(positions, inner)
        for layer in mixtures(model):
            layer.sequences = TokenShardSequences(layer.sequences, group, self.own_tokens)
        model.assign_names()

    def _divide_attention(self, attention: str) -> OwnTokens:
        if attention == "all-to-all":
            return attend_by_heads(self.model, self.group)
        if self.model.config.attention_pattern is not None:
            return attend_by_pieces(self.model, self.group)
        return attend_by_ring(self.model, self.group)


class TokenShardSequences(Sequences):
    """The tokens `inner` for a gate that sees only this rank's tokens of sequences; the ranks of
    `group` have the others."""

    def __init__(self, inner: Sequences, group: Group, own: OwnTokens) -> None:
        self.inner = inner
        self.group = group
        self.own = own

    def joined(self, chosen: Array) -> Array:
        """Return the choices of the whole sequences, as Sequences.joined. Cost: an all-gather of k
        integers per token, under `control`."""
        xp = array_module(chosen)
        with self.group.ledger.control():
            gathered = self.group.all_gather(
                xp.ascontiguousarray(xp.moveaxis(chosen, TOKENS, 0)), algorithm="ring"
            )
            places = self.group.all_gather(
                within(all_tokens, self.own)(len(gathered)), algorithm="ring"
            )
        whole = xp.zeros_like(gathered)  # a simulated rank knows its own places only
        whole[to_device(places, device_of(gathered))] = gathered
        return xp.ascontiguousarray(xp.moveaxis(whole, 0, TOKENS))

    def parted(self, kept: Array) -> Array:
        """Return the own tokens' part."""
        return pick(kept, self.own, TOKENS)

    def keys(self, tokens: Array) -> Array:
        """Return the keys of `inner`: the gate is given keys of the own tokens only."""
        return self.inner.keys(tokens)

    def total(self, share: Array) -> Array:
        """Return the total of `inner`: shares of the ranks of `group` are added later, in the
        loss."""
        return self.inner.total(share)
