"""Chapter 13 · All-to-all attention (DeepSpeed-Ulysses): the sequence is cut, but in attention the heads are.

The idea. Everything but attention works token by token; attention works head by head. So let each rank hold some of the
tokens, and where attention begins swap: every rank gives every other its tokens of that one's heads. Then each has all
tokens of its own heads, computes plain causal attention, and swaps back. A swap is one all-to-all.

    P=2, 4 tokens, heads a b        before     rank 0: a0 a1 b0 b1        rank 1: a2 a3 b2 b3
                                    inside     rank 0: a0 a1 a2 a3        rank 1: b0 b1 b2 b3

Who holds what:

    weights      whole on all ranks; gradients, each of the own tokens, are all-reduced
    tokens       consecutive ones, cut as numpy.array_split does: inside attention each rank has all, so all have the
                 same to do, and no zigzag is needed
    heads        inside, cut likewise; of fewer key heads than ranks each goes to all ranks whose queries look at it

Beside the ring (ring_attention.py): fewer bytes, since what travels does not grow with P, while each piece of keys and
values goes to all P ranks there. But no more ranks than heads; nothing to compute while the swap runs; and inside
attention a rank has T tokens of h / P numbers: as many as T/P tokens of h, so memory is divided, too.

Cost, a block and step, in numbers, over all ranks, width h and key-value width k, where P divides tokens and heads:

    (P-1)/P × B T (2 h + 2 k)    forward: q, k, v there, y back; backward the same again, or with the block computed
                                 again (chapter 19) twice
    so with as many key heads as heads 8(P-1)/P × B T h, and for a rank a P-th of it
    gradients 2(P-1)Ψ once a step;   control: the loss, and with clipping the norm

notes:   N2 序列并行
Source:  Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
         Transformer Models".
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
from minidist.nn import GPT, CausalSelfAttention, GPTConfig
from minidist.parallel.context.context_parallel import ContextParallel
from minidist.parallel.context.token_shard import Own, keep_own_tokens, pick
from minidist.parallel.tensor.split_gpt import head_shares
from minidist.parallel.tensor.tensor_layers import ranges

__all__ = ["ContextParallel", "UlyssesSelfAttention", "attend_by_heads", "elements_sent", "ulysses"]


def plain_ulysses(q: Array, k: Array, v: Array, group: Group) -> Array:
    """Causal attention by two swaps: (own, H, D) three times -> (own, H, D); rank r has run r of the tokens."""
    came = [group.all_to_all(np.array_split(x, group.size, axis=1)) for x in (q, k, v)]   # own tokens, all heads
    q, k, v = (np.concatenate(parts) for parts in came)                                   # all tokens, own heads
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf                      # these lie ahead
    p = np.exp(scores - scores.max(axis=2, keepdims=True, initial=-np.inf))
    y = np.einsum("hqk,khd->qhd", p / p.sum(axis=2, keepdims=True), v)
    ends = np.cumsum([len(part) for part in came[0]])
    return np.concatenate(group.all_to_all(np.split(y, ends[:-1])), axis=1)               # own tokens, all heads


# The real one swaps by differentiable all-to-alls, so that backward makes the same journeys, and lets causal_attention
# (chapter 22) look at the own heads without holding all scores. It adds rotary positions, and key heads that several
# query heads share, which go to each rank that needs them.

HEADS, TOKENS = 1, 2        # dims of (B, H, T, D)


class UlyssesSelfAttention(CausalSelfAttention):
    """A GPT's attention, of whose sequence this rank has its own tokens: (B, own, width) -> (B, own, width)."""

    takes_packed = False

    def __init__(self, attention: CausalSelfAttention, group: Group, algorithm: str) -> None:
        self.heads, self.key_heads, self.head_width = attention.heads, attention.key_heads, attention.head_width
        self.rotary, self.qkv, self.out = attention.rotary, attention.qkv, attention.out
        self.group, self.algorithm, self.keeps_scores = group, algorithm, attention.keeps_scores

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array) -> Tensor:
        """(B, H, own, D), (B, H_kv, own, D) twice, the positions of *all* tokens (T,) -> (B, H, own, D)."""
        if self.rotary:
            own = pick(positions, partial(shard_of, group=self.group), 0)
            q, k = ops.rotary(q, own), ops.rotary(k, own)
        shares = head_shares(self.heads, self.key_heads, self.group.size)
        q = self._swap(q, [queries for queries, _ in shares])
        k, v = (self._swap(x, [keys for _, keys in shares]) for x in (k, v))
        y = ops.causal_attention(q, k, v, keep=self.keeps_scores)               # (B, own heads, T, D)
        return collectives.all_to_all(y, split=TOKENS, join=HEADS, group=self.group,    # type: ignore[no-any-return]
                                      algorithm=self.algorithm)

    def _swap(self, x: Tensor, shares: list[range]) -> Tensor:
        """Own tokens of all heads -> all tokens of own heads: (B, H, own, D) -> (B, own heads, T, D)."""
        wanted = np.concatenate([np.arange(share.start, share.stop) for share in shares])
        if len(wanted) != x.shape[HEADS]:       # heads that several ranks look at are sent to each
            x = ops.take(x, wanted, dim=HEADS)
        return collectives.all_to_all(x, split=HEADS, join=TOKENS, group=self.group,    # type: ignore[no-any-return]
                                      counts=[len(share) for share in shares], algorithm=self.algorithm)


def attend_by_heads(model: GPT, group: Group, *, algorithm: str = "pairwise") -> Own:
    """Let a GPT's attention, in place, swap tokens for heads. Returns which tokens each rank must have.

    Args, Raises: as ulysses.
    """
    for block in model.blocks:
        heads = block.attention.heads
        if heads < group.size:
            raise PlanError(f"all-to-all attention over {group.axis}={group.size} ranks: {heads} heads leave a rank "
                            f"without any; choose 1 to {heads} ranks, or at least {group.size} heads, or ring "
                            f"attention, which takes any number of ranks")
        block.attention = UlyssesSelfAttention(block.attention, group, algorithm)
    return partial(shard_of, group=group)


def ulysses(model: GPT, group: Group, *, algorithm: str = "pairwise") -> GPT:
    """Cut a GPT's sequences between the ranks of `group`, in place; weights stay whole. Before or after drawing them.

    The model then takes whole sequences on every rank, works on its own tokens of them, and returns the loss of all;
    ContextParallel trains it.
    Args:    algorithm: of the all-to-alls.
    Raises:  PlanError if there are more ranks than heads.
    """
    keep_own_tokens(model, group, attend_by_heads(model, group, algorithm=algorithm))
    return model


def elements_sent(config: GPTConfig, parameters: int, *, ranks: int, sequences: int, recomputed: int = 0) -> int:
    """Numbers that all ranks together send along the axis in a step, whatever the passes: the cost above, of any sizes.

    Args:    sequences: of config.context tokens; recomputed: how many blocks are computed again in backward.
    """
    tokens = [part.stop - part.start for part in ranges(config.context, ranks)]
    shares = head_shares(config.heads, config.key_heads, ranks)
    swapped = sum(2 * (config.context - own) * (len(queries) + len(keys))
                  for own, (queries, keys) in zip(tokens, shares, strict=True))
    passes = 2 * config.layers + recomputed
    return passes * swapped * sequences * config.head_width + 2 * (ranks - 1) * parameters
