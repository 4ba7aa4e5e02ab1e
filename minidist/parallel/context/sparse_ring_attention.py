"""Chapter 13 · Ring attention under a pattern: a rank gets the keys that its queries see, and no
others.

The idea. In a ring all keys and values visit all ranks, because a causal query sees all keys before
it. Under a sliding window it sees only the last N, and a key that no query of a rank sees need not
be sent there. These keys follow from the pattern and from the tokens of each rank, so each rank
knows them for all others, without a message.

    P=3, zigzag     block 0    1      2      3      4      5
    rank                  0    1      2      2      1      0
    keys from                  <- 0   <- 1   own    <- 2   <- 1

With local:N, N at most a block of the zigzag, a block needs the end of the block before it. So a
rank exchanges messages only with its two neighbours.

Keys go straight from the rank that has them to the rank that needs them. At hop h a rank sends to
the rank h places after it and receives from the rank h places before it, if there is something to
send. The order of hops is 1, P-1, 2, P-2, …: the neighbours on both sides first. While a rank
computes with one piece, the next two are being sent. Backward sends the same keys and values once
more, and their gradients straight back to the rank that has the tokens.

What each rank holds: as in ring_attention.py, cut in the same zigzag; of others' keys and values
only pieces.

Cost, per block and step, over all ranks. Let M be the number of tokens that the ranks need of each
other (tokens_sent), a token counted once for each rank that needs it, and K = 2 B × key-value width
the numbers of its keys and values:

    forward      M K            keys and values
    backward     2 M K          the same again, and their gradients
    local:N      M = (2P - 2)(N - 64), if 64 divides the T / 2P tokens of a block of the zigzag and
                 N <= T / 2P + 64
    dense ring   (P - 1) T K forward, (2P - 1) T K backward

notes:   N3 §3.2 (N3:52), N2 §10.4 环形注意力 (N2:410)
Source:  Child et al. 2019, "Generating Long Sequences with Sparse Transformers";
         ring_attention.py's.
"""

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
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.errors import ConfigError, ShapeError
from minidist.nn import GPT, CausalSelfAttention, GPTConfig
from minidist.parallel.context.pieces import PieceExchange, tokens_sent
from minidist.parallel.context.token_shard import (
    OwnTokens,
    TokenShardAttention,
    pick,
    shard_tokens,
    zigzag,
)


def plain_window_attention(
    q: Array, k: Array, v: Array, positions: Array, length: int, window: int, group: Group
) -> Array:
    """Return attention of one head to the last `window` tokens: (own, D) three times, positions
    (own,) -> (own, D)."""
    keys = [k]
    values = [v]
    places = [positions]
    for hop in range(1, group.size):
        dst = (group.rank + hop) % group.size
        src = (group.rank - hop) % group.size
        away = zigzag(length, dst, group.size)[:, None] - positions  # from their queries to my keys
        wanted = ((away >= 0) & (away < window)).any(axis=0)  # no other key is sent
        for found, mine in ((keys, k), (values, v), (places, positions)):
            found.append(group.exchange(mine[wanted], dst=dst, src=src))
    k = np.concatenate(keys)
    v = np.concatenate(values)
    seen = np.concatenate(places)
    away = positions[:, None] - seen
    scores = np.where((away >= 0) & (away < window), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ v


# The real one takes any pattern, in blocks of 64 tokens, and multiplies only the tiles that the
# pattern shows. It adds backward, sends nothing where nothing is needed (not even an empty
# message), computes while pieces travel, and holds a few pieces at a time: the softmax is taken
# piece by piece, as in ring_attention.py. Which piece is whose, and how pieces travel, stands in
# pieces.py.

# ----------------------------------------------------------------------------- forward and backward


@op
def sparse_ring_attention(
    q: Array, k: Array, v: Array, *, group: Group, length: int, pattern: str
) -> tuple[Array, Saved]:
    """sparse_attention of a sequence whose tokens are divided between the ranks (`zigzag`). All
    ranks call it.

    Args:    q (B, H, own, D); k, v (B, H_kv, own, D): of the own tokens, any float dtype.
             length: T, tokens of the whole sequence. pattern: as attention_pattern.py spells it;
             each query sees a key.
    Returns: (B, H, own, D), in q's dtype.
    Cost:    over all ranks, in units of 2·B·H_kv·D numbers: tokens_sent forward, twice as many
             backward. Memory: B·H·own numbers in addition to q, k, v and the result; while it runs
             the own keys and values, three pieces of other ranks and at most five outgoing pieces,
             in backward their gradients among them.
             On a GPU each tile is a launch of the attention kernel, so this is made for the host.
    Raises:  ShapeError if this rank has not as many tokens as `zigzag` says.
    """
    check_shapes("sparse_ring_attention", q, k, v)
    own = len(zigzag(length, group.rank, group.size))
    if q.shape[2] != own:
        raise ShapeError(
            f"sparse_ring_attention: {group.axis} rank {group.rank} of {group.size} has "
            f"{q.shape[2]} tokens, but of a sequence of {length} it should have {own}; cut the "
            "sequence by zigzag(length, rank, size)"
        )
    fused = fits_kernel(q)
    scaled = q if fused else scaled_queries(q)
    running = FusedSoftmax(q) if fused else OnlineSoftmax(scaled)
    exchange = PieceExchange(group, _packed(k, v), pattern, length)
    for hop, kv in exchange.pieces():
        if kv is not None:
            keys_all, values_all = kv if fused else widen(kv)
            for queries, keys, causal in exchange.needed(group.rank, exchange.source(hop)).tiles:
                running.absorb(
                    scaled, keys_all[:, :, keys], values_all[:, :, keys], queries, causal=causal
                )
    exchange.finish()
    y, log_total = running.finish()
    y = narrow(y, q.dtype)
    return y, saved(q=q, k=k, v=v, y=y, log_total=log_total)


@sparse_ring_attention.gradient("q", "k", "v")
def _(node: Node, dy: Array) -> tuple[Array, Array, Array]:
    """Get the same pieces once more; send the gradients of each piece to its rank as soon as they
    are computed."""
    group = node.options["group"]
    fused = fits_kernel(node.q)
    xp = array_module(dy)
    backward = (
        FusedGradients(node.q, node.y, node.log_total, dy)
        if fused
        else OnlineGradients(scaled_queries(node.q), widen(node.y), node.log_total, widen(dy))
    )
    exchange = PieceExchange(
        group, _packed(node.k, node.v), node.options["pattern"], node.options["length"]
    )
    total: Array = None
    for hop, kv in exchange.pieces():
        gradients = None
        if kv is not None:
            keys_all, values_all = kv if fused else widen(kv)
            gradients = account.current().hold(
                xp.zeros(kv.shape, backward.dq.dtype), "communication"
            )
            for queries, keys, causal in exchange.needed(group.rank, exchange.source(hop)).tiles:
                dk, dv = gradients[:, :, :, keys]
                backward.add(
                    keys_all[:, :, keys], values_all[:, :, keys], queries, dk, dv, causal=causal
                )
        if hop == 0:
            total = gradients
        else:
            exchange.send_home(hop, gradients, total)
    exchange.finish(total)
    dk, dv = total
    return narrow(backward.finish(), dy.dtype), narrow(dk, dy.dtype), narrow(dv, dy.dtype)


def _packed(k: Array, v: Array) -> Array:
    """Return keys and values as one array: (2, B, H_kv, own, D)."""
    return account.current().hold(array_module(k).stack([k, v]), "communication")


# ---------------------------------------------------------------------------------------------- GPT


class SparseRingSelfAttention(TokenShardAttention):
    """A GPT's attention under its pattern, over a divided sequence: own tokens (B, own, width) ->
    (B, own, width)."""

    def __init__(self, attention: CausalSelfAttention, group: Group) -> None:
        super().__init__(attention, group)
        self.own = partial(zigzag, rank=group.rank, size=group.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array) -> Tensor:
        """(B, H, own, D), (B, H_kv, own, D) twice, the positions of *all* tokens (T,) -> (B, H,
        own, D)."""
        if self.rotary:
            own = pick(positions, self.own, 0)
            q = self.rotate(q, own)
            k = self.rotate(k, own)
        return sparse_ring_attention(
            q, k, v, group=self.group, length=len(positions), pattern=self.pattern
        )


def attend_by_pieces(model: GPT, group: Group) -> OwnTokens:
    """Let a GPT's attention, in place, get the keys that its pattern shows; return each rank's
    tokens.

    Raises:  ConfigError if the model has no pattern.
    """
    if model.config.attention_pattern is None:
        raise ConfigError(
            "sparse_ring_attention: the model has no attention pattern, and each query sees all "
            "keys "
            'before it; give one (attention_pattern="local:256"), or use ring_attention.py'
        )
    for block in model.blocks:
        block.attention = SparseRingSelfAttention(block.attention, group)
    return partial(zigzag, rank=group.rank, size=group.size)


def sparse_context_parallel(model: GPT, group: Group) -> GPT:
    """Cut a GPT with an attention pattern, as context_parallel (ring_attention.py) does. Raises: as
    attend_by_pieces."""
    shard_tokens(model, group, attend_by_pieces(model, group))
    return model


def elements_sent(
    config: GPTConfig, parameters: int, *, ranks: int, sequences: int, recomputed: int = 0
) -> int:
    """Return the count of numbers that all ranks together send along the axis in a step, in all its
    passes: the cost above.

    Args:    parameters: Ψ; sequences: of config.context tokens; recomputed: how many blocks are
             computed again.
    """
    assert config.attention_pattern is not None
    token = 2 * sequences * config.key_heads * config.head_width
    needed = tokens_sent(config.attention_pattern, config.context, ranks)
    return (3 * config.layers + recomputed) * needed * token + 2 * (ranks - 1) * parameters
