"""The peers of `minidist bench step`: the same GPT in PyTorch eager, as its users would write it.

Pre-norm blocks, biases, GELU in its tanh form (GPT-2's), `scaled_dot_product_attention`, AdamW,
clipping by global norm; several ranks over gloo, with PyTorch's counterpart of each ZeRO stage
(PEERS).
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import nn

from minidist.nn import GPTConfig

Step = Callable[[torch.Tensor, torch.Tensor], float]
Clip = Callable[[float], Any]
Wrapped = tuple[nn.Module, torch.optim.Optimizer, Clip]
"""The model to call, its optimizer, and the function that clips its gradients to a norm."""


class TorchBlock(nn.Module):
    """A pre-norm transformer block: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return attention, then MLP, each added to its input."""
        batch, context, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, -1))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))
        return y


class TorchGPT(nn.Module):
    """The GPT of minidist.nn with learned positions: (B, T) -> mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            TorchBlock(config.width, config.heads) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            nn.init.normal_(self.tokens.weight, std=0.02)  # as logits need it
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss per token."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def torch_weights(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return weights of our GPT (learned positions, untied head) with the names and layout of
    TorchGPT."""
    found = {}
    for name, array in weights.items():
        # (in, out) -> (out, in)
        matrix = array.ndim == 2 and not name.startswith(("tokens.", "positions."))
        flat_name = name.replace(".attention.", ".").replace(".mlp.", ".")
        found[flat_name] = torch.from_numpy(np.ascontiguousarray(array.T if matrix else array))
    return found


def torch_step(
    config: GPTConfig,
    *,
    ranks: int,
    clip: float | None,
    peer: str = "DDP",
    weights: Mapping[str, np.ndarray] | None = None,
) -> Step:
    """Return the training step of the model, wrapped as `peer` if there are several ranks in a
    process group.

    The model starts with `weights` of our GPT, or draws its own.
    """
    gpt = TorchGPT(config)
    if weights is not None:
        gpt.load_state_dict(torch_weights(weights))
    model, optimizer, clip_gradients = (_WRAP[peer] if ranks > 1 else _plain)(gpt)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        if clip is not None:
            clip_gradients(clip)
        optimizer.step()
        return float(loss.item())

    return step


def torch_device_step(
    config: GPTConfig, *, device: str, precision: str, compiled: bool, clip: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the training step of the model on `device`; it returns the loss on the device, without
    waiting.

    Weights are float32. bf16: autocast, and only flash attention; fp32: products of float32 may use
    TF32.
    """
    torch.set_float32_matmul_precision("high")
    gpt = TorchGPT(config).to(device)
    model: Any = torch.compile(gpt) if compiled else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=device == "cuda")
    half = precision == "bf16"

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with (
            torch.autocast(device, torch.bfloat16, enabled=half),
            flash_attention() if half else nullcontext(),
        ):
            # Tensor.backward has no types in some releases of PyTorch
            loss: Any = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        value: torch.Tensor = loss.detach()
        return value

    return step


def flash_attention() -> Any:
    """Return a context in which scaled_dot_product_attention is flash attention, or raises."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _clip(model: nn.Module) -> Clip:
    return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


def _plain(gpt: nn.Module) -> Wrapped:
    """Return the model of one process, with its optimizer and clipping."""
    return gpt, _adamw(gpt), _clip(gpt)


def _ddp(gpt: TorchGPT) -> Wrapped:
    """Return DDP: replicas of the model."""
    return _plain(nn.parallel.DistributedDataParallel(gpt))


def _zero_redundancy(gpt: TorchGPT) -> Wrapped:
    """Return DDP with an optimizer that is divided by whole tensors (stage 1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(gpt)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
    )
    return model, optimizer, _clip(model)


def _fsdp1(gpt: TorchGPT, *, strategy: str) -> Wrapped:
    """Return FullyShardedDataParallel with one unit per block, on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        gpt,
        auto_wrap_policy=ModuleWrapPolicy({TorchBlock}),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )
    return model, _adamw(model), model.clip_grad_norm_


def _fsdp2(gpt: TorchGPT, *, reshard: bool) -> Wrapped:
    """Return fully_shard with one unit per block, on the CPU; `reshard`: free weights after
    forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return _plain(gpt)


_WRAP: dict[str, Callable[[TorchGPT], Wrapped]] = {
    "DDP": _ddp,
    "ZeroRedundancyOptimizer": _zero_redundancy,
    "FSDP1 SHARD_GRAD_OP": partial(_fsdp1, strategy="SHARD_GRAD_OP"),
    "FSDP2 keep": partial(_fsdp2, reshard=False),
    "FSDP1 FULL_SHARD": partial(_fsdp1, strategy="FULL_SHARD"),
    "FSDP2 reshard": partial(_fsdp2, reshard=True),
}
