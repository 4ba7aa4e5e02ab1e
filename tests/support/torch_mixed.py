"""`minidist train` on the default text, by PyTorch, for test_mixed_precision.py: prints the
held-out loss at the end.

    python torch_mixed.py PRECISION ARGUMENTS…      # fp32 or bf16; arguments of `minidist train`

The same model, first weights, batches, rates, decay and clipping; in bf16 as its users do it by
hand: a module in bfloat16, float32 masters that AdamW updates, and the loss of logits in float32.
"""

import argparse
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minidist.bench.step.peers import TorchBlock, torch_weights
from minidist.cli.train import arguments
from minidist.cli.train import settings as train_settings
from minidist.nn import GPT, GPTConfig
from minidist.optim import warmup_cosine


class RotaryBlock(TorchBlock):
    """TorchBlock with rotary positions: pairs (x[i], x[i + n/2]), turned in float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.heads)
        half = config.head_width // 2
        angles = torch.arange(config.context)[:, None] * 10000.0 ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        self.cos = angles.cos().float()
        self.sin = angles.sin().float()

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, T, D) -> (B, H, T, D)"""
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)"""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, context, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class RotaryGPT(nn.Module):
    """minidist's default GPT, its head untied: (B, T) integers -> mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(RotaryBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        """The loss is float32."""
        x = self.tokens(torch.tensor(inputs))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(), torch.tensor(targets).long().flatten()
        )


def train(settings: train_settings.Settings, precision: str) -> float:
    """The held-out loss after all steps."""
    args = settings.args
    options = settings.trainer_options()
    ours = GPT(settings.config)
    ours.initialize(args.seed)
    model = RotaryGPT(settings.config)
    model.load_state_dict(torch_weights(ours.state_dict()))
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    groups: list[dict[str, Any]] = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": 0.01},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(
                step, peak=args.lr, warmup=options["warmup"], total=args.steps, floor=0.1 * args.lr
            )
        model.zero_grad()
        model(*settings.training_batch(step)).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        nn.utils.clip_grad_norm_(masters, options["clip"])
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    with torch.no_grad():
        batches = settings.validation_batches()
        return sum(model(*batch).item() * batch[1].size for batch in batches) / sum(
            b[1].size for b in batches
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    print(train(train_settings.check(parser.parse_args(sys.argv[2:])), sys.argv[1]))
