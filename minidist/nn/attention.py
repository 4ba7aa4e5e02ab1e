"""Causal self-attention: each token attends to itself and to the tokens before it, or to those that
a pattern shows."""

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.nn.attention_pattern import pattern_blocks
from minidist.nn.config import GPTConfig
from minidist.nn.layers import Linear
from minidist.nn.module import Module


class CausalSelfAttention(Module):
    """(B, T, width) -> (B, T, width): one linear computes queries, keys and values; a second mixes
    the heads' results.

    The last dim of qkv's output holds the queries of all heads, then the keys, then the values.
    With fewer key heads, neighbouring query heads share one. Args: out_std: standard deviation of
    the second linear's initial weight.
    """

    keeps_scores = True  # or backward computes them again (parallel/memory/activations.py)
    # whether q, k and v may stay in one array; False: `attend` is always called
    takes_packed = True

    def __init__(self, config: GPTConfig, *, out_std: float) -> None:
        self.heads = config.heads
        self.key_heads = config.key_heads
        self.head_width = config.head_width
        self.rotary = config.positions == "rotary"
        self.rope_theta = config.rope_theta
        self.rope_scaling = config.rope_scaling
        self.pattern = config.attention_pattern
        outputs = (self.heads + 2 * self.key_heads) * self.head_width
        self.qkv = Linear(config.width, outputs, std=0.02, dtype=config.dtype)
        self.out = Linear(config.width, config.width, std=out_std, dtype=config.dtype)

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        qkv = self.qkv(x)
        if (
            self.takes_packed
            and self.key_heads == self.heads
            and not self.rotary
            and self.pattern is None
        ):
            return self.out(
                ops.causal_attention_packed(qkv, heads=self.heads, keep=self.keeps_scores)
            )
        queries = self.heads * self.head_width
        keys = self.key_heads * self.head_width
        q, k, v = ops.split(qkv, [queries, keys, keys], dim=-1)
        # (B, H, T, D)
        y = self.attend(self._by_head(q), self._by_head(k), self._by_head(v), positions)
        return self.out(y.transpose(0, 2, 1, 3).reshape(*qkv.shape[:-1], queries))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array) -> Tensor:
        """Return the attention of q (B, H, T, D) to k and v (B, H_kv, T, D) at global positions
        (T,): (B, H, T, D)."""
        if self.rotary:
            q = self.rotate(q, positions)
            k = self.rotate(k, positions)
        return self.see(q, k, v)

    def rotate(self, x: Tensor, positions: Array) -> Tensor:
        """Rotate queries or keys (B, H, T, D) by the angles of their positions (T,): same shape."""
        return ops.rotary(x, positions, base=self.rope_theta, scaling=self.rope_scaling)

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of whole sequences, to all keys up to a query or to those that the
        pattern shows; as attend."""
        if self.pattern is None:
            return ops.causal_attention(q, k, v, keep=self.keeps_scores)
        return ops.sparse_attention(q, k, v, blocks=pattern_blocks(self.pattern, q.shape[2]))

    def _by_head(self, x: Tensor) -> Tensor:
        """Return (B, T, heads·D) as (B, heads, T, D)."""
        b, t, n = x.shape
        return x.reshape(b, t, n // self.head_width, self.head_width).transpose(0, 2, 1, 3)
