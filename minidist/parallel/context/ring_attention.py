"""Chapter 13 · Ring attention: the sequence is cut, keys and values go round, and no rank ever has
all of them.

The idea. Everything in a block but attention works token by token, so each rank can hold some of
the tokens and all of the weights. In attention the queries of a rank must see the keys of all
ranks. Each rank sends the keys and values that it has just used to the next rank and receives those
of the previous rank; after P - 1 hops every query has seen every key. Softmax over keys that arrive
in parts needs a running maximum and a running sum: see autograd/ops/online_attention.py. While a
rank computes with one part, it receives the next one.

    P=3      r0 sees    r1 sees    r2 sees        r -> r+1 meanwhile
    hop 0    kv0        kv1        kv2            each rank sends its own
    hop 1    kv2        kv0        kv1            each rank sends what it had at hop 0
    hop 2    kv1        kv2        kv0            nothing

(N2:315 draws two ranks with L/2 × L/2 scores each, so half of the scores are lost: each rank needs
L/2 × L.)

What each rank holds. A causal query sees only the keys before it, so with consecutive tokens the
last rank would have 2P - 1 times the work of the first. The sequence is cut in 2P blocks instead,
and rank r holds blocks r and 2P-1-r (zigzag):

    P=3      block 0    1      2      3      4      5
    rank     0          1      2      2      1      0

After hop 0 every rank multiplies two pairs of blocks a hop, without a mask: both query blocks with
the first key block of an earlier rank, or the last query block with both key blocks of a later
rank.

    weights      whole on all ranks; gradients, each of the own tokens, are all-reduced
    positions    of the own tokens, in the whole sequence: rotary angles, learned positions
    activations  of T/P tokens; at most five arrays in messages: two of keys and values, three of
                 their gradients

Backward sends keys and values round once more. Their gradients follow them: each rank adds what its
queries contribute, and after P hops the gradients are back on the rank that has the tokens.

Cost, per block and step, over all ranks, of B·T × key-value width numbers (a rank sends 1/P of it
on average):

    forward      2(P-1)      keys and values, P - 1 hops
    backward     4P - 2      the same again, and their gradients, P hops
    if the block is computed again (chapter 19) the forward counts twice
    gradients    2(P-1)Ψ once a step
    control      one float64, the loss, and with a Trainer two digests of its batch; no norm is sent
                 but with ZeRO

Half-precision keys and values are sent as they are. Their gradients are sent in float32, because
each hop adds to them.

notes:   N2 序列并行, §10.4 环形注意力 (N2:410)
Source:  Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers"; zigzag: Llama
         team 2024, "The Llama 3 Herd of Models", §3.3.2.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from minidist.autograd.ops.attention import check_shapes, fits_kernel
from minidist.autograd.ops.online_attention import (
    FusedGradients,
    FusedSoftmax,
    OnlineGradients,
    OnlineSoftmax,
    scaled_queries,
)
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.autograd.tensor import Tensor
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.errors import ConfigError, ShapeError
from minidist.nn import GPT, CausalSelfAttention, GPTConfig
from minidist.nn.attention_pattern import shown_pattern
from minidist.parallel.context.token_shard import OwnTokens, TokenShardAttention, pick, shard_tokens
from minidist.parallel.context.token_shard import own_blocks as own_blocks
from minidist.parallel.context.token_shard import zigzag as zigzag


def plain_ring_attention(q: Array, k: Array, v: Array, positions: Array, group: Group) -> Array:
    """Return ring attention's forward of one head: (own, D) three times, positions (own,) -> (own,
    D)."""
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    # seen: where these keys stand
    top = -np.inf
    total = 0.0
    y = 0.0
    seen = positions
    for hop in range(group.size):
        scores = q @ k.T / np.sqrt(q.shape[1])
        scores[positions[:, None] < seen] = -np.inf  # these lie ahead
        now = np.maximum(top, scores.max(axis=1, keepdims=True))
        # shrink: for sums under the old maximum
        p = np.exp(scores - now)
        shrink = np.exp(top - now)
        total = total * shrink + p.sum(axis=1, keepdims=True)
        y = y * shrink + p @ v
        top = now
        if hop < group.size - 1:  # pass on, take the previous rank's
            k, v, seen = (group.exchange(x, dst=next_rank, src=prev_rank) for x in (k, v, seen))
    return y / total


# `ring_attention` below adds backward (the same ring once more, in which the gradients of keys and
# values travel with them and come home), all heads and sequences at once, and overlap: the next
# keys are on their way while these are multiplied. It cuts a sequence so that all ranks have
# equally much to do (`zigzag`), skips what lies ahead instead of computing it, and works in tiles,
# on a GPU by the kernel of chapter 22.

# ---------------------------------------------------------------------------------------- partition
# zigzag and own_blocks, in token_shard.py, say which tokens a rank has.


def visible(length: int, rank: int, source: int, size: int) -> Iterator[tuple[slice, slice, bool]]:
    """Return which of a rank's query blocks see which key blocks of rank `source`, as slices of the
    ranks' tokens.

    Returns: (queries, keys, causal); causal: queries and keys are one block. Queries of a later
    block see all keys, queries of an earlier block none.
    """
    for own, queries in own_blocks(length, rank, size):
        for other, keys in own_blocks(length, source, size):
            if own >= other:
                yield queries, keys, own == other


# --------------------------------------------------------------------------------------------- ring


def pass_on(group: Group, array: Array, tokens: int) -> Pending:
    """Start to send `array` (…, own, D) to the next rank, and to receive (…, tokens, D) from the
    previous rank."""
    xp = array_module(array)
    room = account.current().hold(
        xp.empty((*array.shape[:-2], tokens, array.shape[-1]), array.dtype), "communication"
    )
    return group.start_exchange(
        array, (group.rank + 1) % group.size, (group.rank - 1) % group.size, out=room
    )


def around(group: Group, kv: Array, length: int) -> Iterator[tuple[int, Array]]:
    """Send keys and values round the ring; the next ones arrive while the caller computes with the
    present ones.

    Args:    kv: this rank's (2, B, H_kv, own, D); length: tokens of the whole sequence.
    Returns: (rank, its keys and values) for every rank, this one first; the arrays must not be
    written to.
    Cost:    P - 1 messages per rank, one a hop, of any size.
    """
    for hop in range(group.size):
        source = (group.rank - hop) % group.size
        after = (group.rank - hop - 1) % group.size
        coming = (
            pass_on(group, kv, len(zigzag(length, after, group.size)))
            if hop < group.size - 1
            else None
        )
        yield source, kv
        if coming is not None:
            kv = coming.wait()


# ----------------------------------------------------------------------------- forward and backward


@op
def ring_attention(
    q: Array, k: Array, v: Array, *, group: Group, length: int
) -> tuple[Array, Saved]:
    """causal_attention of a sequence whose tokens are divided between the ranks (`zigzag`). All
    ranks call it.

    Args:    q (B, H, own, D); k, v (B, H_kv, own, D): of the own tokens, any float dtype.
             length: T, tokens of the whole sequence.
    Returns: (B, H, own, D), in q's dtype.
    Cost:    over all ranks, in units of B·T·H_kv·D numbers: 2(P-1) forward, 4P-2 backward (none for
             P = 1). Memory: B·H·own numbers in addition to q, k, v and the result; while it runs
             keys and values of two ranks, and in backward their gradients for three.
    Raises:  ShapeError if this rank has not as many tokens as `zigzag` says.
    """
    check_shapes("ring_attention", q, k, v)
    own = len(zigzag(length, group.rank, group.size))
    if q.shape[2] != own:
        raise ShapeError(
            f"ring_attention: {group.axis} rank {group.rank} of {group.size} has {q.shape[2]} "
            f"tokens, but of a sequence of {length} it should have {own}; cut the sequence by "
            "zigzag(length, rank, size)"
        )
    fused = fits_kernel(q)
    scaled = q if fused else scaled_queries(q)
    running = FusedSoftmax(q) if fused else OnlineSoftmax(scaled)
    for source, kv in around(group, _packed(k, v), length):
        keys_all, values_all = kv if fused else widen(kv)
        for queries, keys, causal in visible(length, group.rank, source, group.size):
            running.absorb(
                scaled, keys_all[:, :, keys], values_all[:, :, keys], queries, causal=causal
            )
    y, log_total = running.finish()
    y = narrow(y, q.dtype)
    return y, saved(q=q, k=k, v=v, y=y, log_total=log_total)


@ring_attention.gradient("q", "k", "v")
def _(node: Node, dy: Array) -> tuple[Array, Array, Array]:
    """Send keys and values round the ring once more, followed by their gradients."""
    group = node.options["group"]
    length = node.options["length"]
    fused = fits_kernel(node.q)
    backward = (
        FusedGradients(node.q, node.y, node.log_total, dy)
        if fused
        else OnlineGradients(scaled_queries(node.q), widen(node.y), node.log_total, widen(dy))
    )
    coming: Pending | None = None
    for source, kv in around(group, _packed(node.k, node.v), length):
        keys_all, values_all = kv if fused else widen(kv)
        gradients = account.current().hold(
            array_module(dy).zeros(kv.shape, backward.dq.dtype), "communication"
        )
        for queries, keys, causal in visible(length, group.rank, source, group.size):
            dk, dv = gradients[:, :, :, keys]
            backward.add(
                keys_all[:, :, keys], values_all[:, :, keys], queries, dk, dv, causal=causal
            )
        if coming is not None:
            gradients += coming.wait()  # from the ranks that had these keys before
            coming = None  # frees the memory of what has arrived
        if group.size > 1:
            # the rank whose gradients the previous rank sends meanwhile
            after = (source - 1) % group.size
            coming = pass_on(group, gradients, len(zigzag(length, after, group.size)))
    dk, dv = gradients if coming is None else coming.wait()  # those of the own tokens
    return narrow(backward.finish(), dy.dtype), narrow(dk, dy.dtype), narrow(dv, dy.dtype)


def _packed(k: Array, v: Array) -> Array:
    """Return keys and values as one message: (2, B, H_kv, own, D)."""
    return account.current().hold(array_module(k).stack([k, v]), "communication")


# ---------------------------------------------------------------------------------------------- GPT


class RingSelfAttention(TokenShardAttention):
    """A GPT's attention over a divided sequence: own tokens (B, own, width) -> (B, own, width)."""

    def __init__(self, attention: CausalSelfAttention, group: Group) -> None:
        super().__init__(attention, group)
        if self.pattern is not None:
            raise ConfigError(
                "ring_attention: the model has the attention pattern "
                f"{shown_pattern(self.pattern)}, and the ring would send keys to ranks where no "
                "query sees them; use sparse_ring_attention.py"
            )
        self.own = partial(zigzag, rank=group.rank, size=group.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array) -> Tensor:
        """(B, H, own, D), (B, H_kv, own, D) twice, the positions of *all* tokens (T,) -> (B, H,
        own, D)."""
        if self.rotary:
            own = pick(positions, self.own, 0)
            q = self.rotate(q, own)
            k = self.rotate(k, own)
        return ring_attention(q, k, v, group=self.group, length=len(positions))


def attend_by_ring(model: GPT, group: Group) -> OwnTokens:
    """Let a GPT's attention, in place, send keys and values round `group`; return each rank's
    tokens."""
    for block in model.blocks:
        block.attention = RingSelfAttention(block.attention, group)
    return partial(zigzag, rank=group.rank, size=group.size)


def context_parallel(model: GPT, group: Group) -> GPT:
    """Cut a GPT's sequences between the ranks of `group`, in place, before or after its weights are
    drawn.

    Weights stay whole. The model then takes whole sequences on every rank, works on its own tokens,
    and returns the loss of all tokens. A plan divides tokens by ContextParallel
    (context_parallel.py) instead, whose ranks each return their share of the loss.
    """
    shard_tokens(model, group, attend_by_ring(model, group))
    return model


def elements_sent(
    config: GPTConfig, parameters: int, *, ranks: int, sequences: int, recomputed: int = 0
) -> int:
    """Return the count of numbers that all ranks together send along the axis in a step, in all its
    passes: the cost above.

    Args:    parameters: Ψ; sequences: of config.context tokens; recomputed: how many blocks are
             computed again.
    """
    keys = sequences * config.context * config.key_heads * config.head_width
    trips = 0 if ranks == 1 else (6 * ranks - 4) * config.layers + 2 * (ranks - 1) * recomputed
    return trips * keys + 2 * (ranks - 1) * parameters
