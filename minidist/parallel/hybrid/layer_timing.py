"""The number of layers of each stage of a plan's pipeline: even, as given, or by measured time."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.comm.records import unhurried
from minidist.device import account
from minidist.device.backend import beside, module_for, random_bits, to_host
from minidist.nn import GPT, GPTConfig
from minidist.parallel.pipeline.stages import balanced_layers


def stage_layers(
    how: str, config: GPTConfig, stages: int, group: Group, *, device: str = "cpu"
) -> list[int]:
    """Return the number of layers of each stage, the same on all ranks of `group`; `how` is
    Plan.stage_layers."""
    if how == "even":
        return balanced_layers([1.0] * config.layers, stages)
    if how == "measured":
        block, first, last = measured_costs(config, group, device=device)
        return balanced_layers([block] * config.layers, stages, first=first, last=last)
    return [int(number) for number in how.split(",")]


def measured_costs(
    config: GPTConfig, group: Group, *, rounds: int = 3, device: str = "cpu"
) -> tuple[float, float, float]:
    """Return the seconds, forward and backward, of a block, the embedding, and output with loss,
    for one sequence.

    Rank 0 measures; the fastest of `rounds` rounds counts. Cost: a broadcast of 24 bytes, counted
    under `control`.
    """
    seconds = np.zeros(3)
    if group.rank == 0:
        quiet = config.mixture and replace(config.mixture, noise=0.0, placement=None)
        one = replace(config, layers=1, dropout=0.0, mixture=quiet)
        with account.use(account.MemoryAccount()):  # no memory of it lasts
            seconds[:] = np.min([_time_parts(one, device) for _ in range(rounds)], axis=0)
    with unhurried(group), group.ledger.control():
        block, first, last = (float(value) for value in group.broadcast(seconds, root=0))
    return block, first, last


def _time_parts(config: GPTConfig, device: str) -> list[float]:
    """Return the seconds of a block, the embedding, the output and loss."""
    model = GPT(config)
    model.initialize(0, device=device)
    bits = random_bits("stages", 0, range(config.context)) % np.uint64(config.vocabulary)
    ids = bits.astype(np.int64).reshape(1, -1)
    positions = np.arange(config.context)
    xp = module_for(device)

    def timed(compute: Any) -> float:
        start = time.perf_counter()
        y = compute()
        y.backward(xp.ones(y.shape, y.dtype))
        to_host(y.data)  # waits for the device
        return time.perf_counter() - start

    x = Tensor(
        xp.ones((1, config.context, config.width), model.norm.weight.dtype), requires_grad=True
    )
    return [
        timed(lambda: model.blocks[0](x, beside(positions, x.data))),
        timed(lambda: model.embed(ids, positions)),
        timed(lambda: ops.cross_entropy(model.project(x), ids)),
    ]
