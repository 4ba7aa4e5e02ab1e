"""Chapter 13 · All-to-all attention (DeepSpeed-Ulysses): the sequence is cut, but in attention the
heads are.

The idea. Everything but attention works token by token; attention works head by head. So each rank
holds some of the tokens, and where attention begins an all-to-all swaps: each rank sends every
other rank its tokens of that rank's heads. Then each rank has all tokens of its own heads, computes
plain causal attention, and swaps back.

    P=2, 4 tokens, heads a b        before     rank 0: a0 a1 b0 b1        rank 1: a2 a3 b2 b3
                                    inside     rank 0: a0 a1 a2 a3        rank 1: b0 b1 b2 b3

What each rank holds:

    weights      whole on all ranks; gradients, each of the own tokens, are all-reduced
    tokens       consecutive, cut as numpy.array_split does: the work in attention is even without a
                 zigzag
    heads        inside, cut in the same way; with fewer key heads than ranks, each goes to all
                 ranks whose queries need it

Compared with the ring (ring_attention.py): fewer bytes, because a swap does not grow with P, while
the ring sends all keys and values to all P ranks. But there can be no more ranks than heads, and
nothing is computed during a swap. Memory is divided too: inside attention a rank has T tokens of h
/ P numbers, as many as T/P tokens of h.

Cost, per block and step, in numbers, over all ranks, width h and key-value width k, if P divides
tokens and heads:

    (P-1)/P × B T (2 h + 2 k)    forward: q, k, v there, y back; backward the same again, or twice
                                 if the block is computed again (chapter 19)
    so with as many key heads as heads 8(P-1)/P × B T h; a rank sends a P-th of it
    gradients 2(P-1)Ψ once a step;   control: one float64, the loss, and with a Trainer two digests
                                     of its batch; no norm is sent but with ZeRO

notes:   N2 序列并行
Source:  Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of
         Extreme Long Sequence Transformer Models".
"""

from functools import partial

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.ops.collectives import shard_of
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import PlanError
from minidist.nn import GPT, GPTConfig
from minidist.nn.shares import even_slices, head_shares
from minidist.parallel.context.token_shard import OwnTokens, TokenShardAttention, pick, shard_tokens


def plain_ulysses(q: Array, k: Array, v: Array, group: Group) -> Array:
    """Return causal attention by two swaps: (own, H, D) three times -> (own, H, D); rank r has run
    r of the tokens."""
    # own tokens, all heads
    came = [group.all_to_all(np.array_split(x, group.size, axis=1)) for x in (q, k, v)]
    q, k, v = (np.concatenate(parts) for parts in came)  # all tokens, own heads
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf  # these lie ahead
    p = np.exp(scores - scores.max(axis=2, keepdims=True, initial=-np.inf))
    y = np.einsum("hqk,khd->qhd", p / p.sum(axis=2, keepdims=True), v)
    ends = np.cumsum([len(part) for part in came[0]])
    return np.concatenate(group.all_to_all(np.split(y, ends[:-1])), axis=1)  # own tokens, all heads


# The real one swaps by differentiable all-to-alls, so that backward makes the same journeys, and
# lets causal_attention (chapter 22) look at the own heads without holding all scores. It adds
# rotary positions, and key heads that several query heads share, which go to each rank that needs
# them.

# dims of (B, H, T, D)
HEADS = 1
TOKENS = 2


class UlyssesSelfAttention(TokenShardAttention):
    """A GPT's attention over a divided sequence: own tokens (B, own, width) -> (B, own, width)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array) -> Tensor:
        """(B, H, own, D), (B, H_kv, own, D) twice, the positions of *all* tokens (T,) -> (B, H,
        own, D)."""
        if self.rotary:
            own = pick(positions, partial(shard_of, group=self.group), 0)
            q = self.rotate(q, own)
            k = self.rotate(k, own)
        shares = head_shares(self.heads, self.key_heads, self.group.size)
        q = self._swap(q, [queries for queries, _ in shares])
        k, v = (self._swap(x, [keys for _, keys in shares]) for x in (k, v))
        y = self.see(q, k, v)  # (B, own heads, T, D)
        return collectives.all_to_all(y, split=TOKENS, join=HEADS, group=self.group)

    def _swap(self, x: Tensor, shares: list[range]) -> Tensor:
        """Swap own tokens of all heads for all tokens of own heads: (B, H, own, D) -> (B, own
        heads, T, D)."""
        wanted = np.concatenate([np.array(share, np.int64) for share in shares])
        if len(wanted) != x.shape[HEADS]:  # a head that several ranks need is sent to each of them
            x = ops.take(x, wanted, dim=HEADS)
        return collectives.all_to_all(
            x, split=HEADS, join=TOKENS, group=self.group, counts=[len(share) for share in shares]
        )


def attend_by_heads(model: GPT, group: Group) -> OwnTokens:
    """Let a GPT's attention, in place, swap tokens for heads; return each rank's tokens. Raises: as
    ulysses."""
    for block in model.blocks:
        heads = block.attention.heads
        if heads < group.size:
            raise PlanError(
                f"all-to-all attention over {group.axis}={group.size} ranks: {heads} heads leave "
                f"a rank without any; choose 1 to {heads} ranks, or at least {group.size} heads, "
                "or ring attention, which runs on any number of ranks"
            )
        block.attention = UlyssesSelfAttention(block.attention, group)
    return partial(shard_of, group=group)


def ulysses(model: GPT, group: Group) -> GPT:
    """Cut a GPT's sequences as context_parallel (ring_attention.py) does, but into consecutive
    tokens. Raises PlanError for more ranks than heads."""
    shard_tokens(model, group, attend_by_heads(model, group))
    return model


def elements_sent(
    config: GPTConfig, parameters: int, *, ranks: int, sequences: int, recomputed: int = 0
) -> int:
    """Return the count of numbers that all ranks together send along the axis in a step, in all its
    passes: the cost above, any sizes.

    Args:    parameters: Ψ; sequences: of config.context tokens; recomputed: how many blocks are
             computed again.
    """
    tokens: list[int] = [own.stop - own.start for own in even_slices(config.context, ranks)]
    shares = head_shares(config.heads, config.key_heads, ranks)
    swapped = sum(
        2 * (config.context - own) * (len(queries) + len(keys))
        for own, (queries, keys) in zip(tokens, shares, strict=True)
    )
    passes = 2 * config.layers + recomputed
    return passes * swapped * sequences * config.head_width + 2 * (ranks - 1) * parameters
