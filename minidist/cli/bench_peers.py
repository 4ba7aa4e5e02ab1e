"""The peer of `minidist bench step`: the same GPT in PyTorch eager, as its users would write it.

Pre-norm blocks, biases, GELU in its tanh form (GPT-2's), `scaled_dot_product_attention`, AdamW, clipping by global
norm, DistributedDataParallel over gloo where there are several ranks. PyTorch is imported only here, when asked for.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from minidist.nn import GPTConfig


class TorchBlock(nn.Module):
    """One pre-norm transformer block: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then MLP, each around a residual."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """The GPT of minidist.nn with learned positions and an untied head: (B, T) -> mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(TorchBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean token loss."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def torch_step(config: GPTConfig, *, ranks: int, clip: float) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Build the model (wrapped in DDP where a process group of several ranks is up); returns its training step."""
    gpt: nn.Module = TorchGPT(config)
    if ranks > 1:
        gpt = nn.parallel.DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = gpt(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step
