"""The peers of `minidist bench step --plan`: the same GPT cut by PyTorch along the same axes, over
gloo.

    tp    DTensor: parallelize_module with column- and row-wise linears, a split vocabulary and
          loss_parallel
    pp    torch.distributed.pipelining: a PipelineStage for each of our stages, with the schedule of
          the same name
    dp    DistributedDataParallel; if it cannot be combined with the others, fully_shard that keeps
          weights gathered

They start with our weights and use our rows in the same number of microbatches, so their losses
must equal ours. PyTorch is imported only here, when it is needed.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from minidist.bench.step.peers import TorchGPT, torch_weights
from minidist.bench.step.plan import replicates
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.pipeline.stages import balanced_layers

ForwardBackward = Callable[[torch.Tensor, torch.Tensor], float | None]
"""Computes gradients of the mean loss of ids and targets, each (rows, T); returns the loss if this
rank knows it, else None."""

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
_IN_BLOCKS = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
_AT_ENDS = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


class TorchStage(nn.Module):
    """A stage of consecutive layers of a TorchGPT: ids (B, T) or activations (B, T, C) ->
    activations, or logits.

    Args:    layers: indices of its blocks; first: whether it has the embeddings; last: whether it
             has norm and head.
    """

    def __init__(self, gpt: TorchGPT, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.tokens: nn.Module | None = gpt.tokens if first else None
        self.positions: nn.Module | None = gpt.positions if first else None
        self.blocks = nn.ModuleList(gpt.blocks[layer] for layer in layers)
        self.norm: nn.Module | None = gpt.norm if last else None
        self.head: nn.Module | None = gpt.head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stage's activations, or logits on the last stage."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


# ---------------------------------------------------------------------------------------- partition


def _make_stages(
    config: GPTConfig, plan: Plan, mesh: DeviceMesh, weights: Mapping[str, np.ndarray]
) -> list[nn.Module]:
    """Return this rank's stages, with the same number of stages and layers as ours, cut by tp and
    wrapped by dp."""
    gpt = TorchGPT(config)
    gpt.load_state_dict(torch_weights(weights))
    counts = balanced_layers([1.0] * config.layers, plan.stages)
    stages = []
    for number in range(mesh["pp"].get_local_rank(), plan.stages, plan.pp):
        layers = range(sum(counts[:number]), sum(counts[: number + 1]))
        stage = TorchStage(gpt, layers, first=number == 0, last=number == plan.stages - 1)
        if plan.tp > 1:
            _cut_by_tensor(stage, mesh["tp"])
        stages.append(_replicated(stage, plan, mesh["dp"]) if plan.dp > 1 else stage)
    return stages


def _cut_by_tensor(stage: TorchStage, tp: DeviceMesh) -> None:
    """Cut a stage: each rank gets its heads, hidden numbers and slice of the vocabulary; the rest
    is whole on all ranks."""
    blocks: Any = stage.blocks
    for block in blocks:
        for tensor in block.qkv.parameters():  # rows (3, heads, …) -> (ranks, 3, own heads, …)
            rows = tensor.data.unflatten(0, (3, tp.size(), -1))
            tensor.data = rows.transpose(0, 1).flatten(0, 2).contiguous()
        block.heads //= tp.size()
        parallelize_module(block, tp, _IN_BLOCKS)
    parallelize_module(
        stage, tp, {name: way for name, way in _AT_ENDS.items() if getattr(stage, name) is not None}
    )


def _replicated(stage: TorchStage, plan: Plan, dp: DeviceMesh) -> nn.Module:
    """Return the stage wrapped for the data axis."""
    if replicates(plan) == "DDP":
        return nn.parallel.DistributedDataParallel(stage, process_group=dp.get_group())
    for module in (*stage.blocks, stage):
        fully_shard(module, mesh=dp, reshard_after_forward=False)
    return stage


# --------------------------------------------------------------------------------------------- step


def plan_step(
    config: GPTConfig, plan: Plan, *, clip: float, weights: Mapping[str, np.ndarray]
) -> ForwardBackward:
    """Return the training step with a plan; the process group of all its ranks must exist.

    Args:    weights: of our whole GPT.
    Returns: a function of the *global* batch that returns the mean loss of this data rank's rows,
             if this rank knows it.
    """
    mesh = init_device_mesh("cpu", (plan.dp, plan.pp, plan.tp), mesh_dim_names=("dp", "pp", "tp"))
    stages = _make_stages(config, plan, mesh, weights)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    run = _pipelined(stages, plan, mesh["pp"]) if plan.pp > 1 else _whole(stages[0])

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float | None:
        optimizer.zero_grad()
        row = mesh["dp"].get_local_rank()
        with loss_parallel() if plan.tp > 1 else nullcontext():
            loss = run(ids.chunk(plan.dp)[row], targets.chunk(plan.dp)[row])
        _clip(parameters, clip, mesh["pp"])
        optimizer.step()
        return loss

    return step


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _whole(model: nn.Module) -> ForwardBackward:
    """Return the forward and backward without a pipeline."""

    def run(ids: torch.Tensor, targets: torch.Tensor) -> float:
        # Tensor.backward has no types in some releases of PyTorch
        loss: Any = _loss(model(ids), targets)
        loss.backward()
        return float(loss.item())

    return run


def _pipelined(stages: list[nn.Module], plan: Plan, pp: DeviceMesh) -> ForwardBackward:
    """Return the forward and backward of a pipeline, with PyTorch's schedule of the plan's name."""
    rank = pp.get_local_rank()
    device = torch.device("cpu")
    own = [
        PipelineStage(stage, rank + place * plan.pp, plan.stages, device, group=pp.get_group())
        for place, stage in enumerate(stages)
    ]
    schedule = _SCHEDULES[plan.schedule](
        own if plan.stages > plan.pp else own[0], plan.pieces, loss_fn=_loss
    )
    first = rank == 0
    last = rank == plan.pp - 1

    def run(ids: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        schedule.step(
            *([ids] if first else []),
            target=targets if last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack([_local(loss) for loss in losses]).mean().item() if last else None

    return run


def _clip(parameters: Iterable[torch.Tensor], bound: float, pp: DeviceMesh) -> None:
    """Clip by the norm of the whole gradient: PyTorch computes the norm of one mesh at a time; the
    squares of stages are added up over pp."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    squares = sum(
        (
            _local(get_total_norm([p.grad for p in some if p.grad is not None])) ** 2
            for some in kinds.values()
        ),
        torch.zeros(()),
    )
    if pp.size() > 1:
        torch.distributed.all_reduce(squares, group=pp.get_group())
    for some in kinds.values():
        clip_grads_with_norm_(some, bound, squares.sqrt())


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return a number of all ranks as a plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
