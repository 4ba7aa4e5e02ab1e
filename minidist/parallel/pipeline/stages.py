"""Stages: where a GPT is cut by its layers, and which layers go where.

    stage 0                    stage 1         stage 2
    embed, blocks 0 and 1      blocks 2, 3     blocks 4 and 5, norm, output

A rank cuts a model whose weights are not drawn yet, and draws what it keeps: names are those of the whole model, so
weights and dropout are too. With a tied output the token table is needed at both ends: then both have it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module, beside, dtype_name, module_for, random_bits, to_host
from minidist.errors import ShardError
from minidist.nn import GPT, GPTConfig, Mixture
from minidist.nn.balance import BalancedOutput
from minidist.nn.dropout import DropoutKey
from minidist.parallel.context.token_shard import TOKENS, Own, everything, own_key, pick


class Stages:
    """The stages of a GPT that one rank has.

    Args:    model: its weights not yet drawn; what is not in `own` is taken out of it.
             layers: of each stage of the whole model, how many; own: the numbers of this rank's stages.
    Attributes: model: what is left, with the names of the whole; last: the number of the whole model's last stage.
             tokens: which of a sequence's tokens this rank works on: all, unless told otherwise (chapter 17).
             carried: those whose activations it passes on.
    Raises:  ShardError if the layers are not those of the model, or a stage between the ends has none.
    """

    def __init__(self, model: GPT, layers: Sequence[int], own: Sequence[int]) -> None:
        check_layers(layers, model.config.layers)
        edges, self.last = [0, *accumulate(layers)], len(layers) - 1
        self.layers = {stage: range(edges[stage], edges[stage + 1]) for stage in own}
        self.tokens: Own = everything
        self.carried: Own = everything
        cut: Any = model
        self.model: Any = cut
        cut.blocks = {layer: model.blocks[layer] for stage in own for layer in self.layers[stage]}
        if 0 not in own:
            cut.positions = None
            if not (model.config.tied and self.last in own):
                cut.tokens = None
        if self.last not in own:
            cut.norm = cut.head = None
        if isinstance(model.output, BalancedOutput):
            cut.output = model.output.output        # a stage sees to the balance of its own blocks

    def mixtures(self, stage: int) -> list[Mixture]:
        """Those of a stage's blocks."""
        mlps = [self.model.blocks[layer].mlp for layer in self.layers[stage]]
        return [mlp for mlp in mlps if isinstance(mlp, Mixture)]

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """The shape of what travels between stages: (rows, carried tokens of `length`, width)."""
        return rows, len(np.arange(length)[self.carried(length)]), self.model.config.width

    def forward(self, stage: int, x: Any, *, targets: Array, divisor: float | None = None,
                key: DropoutKey | None = None) -> Tensor:
        """What one stage makes of token ids (B, T), for stage 0, or of what came, a Tensor shaped as `between` says.

        The last stage makes the loss: the sum of the targets' cross-entropies over `divisor`. Targets (B, T), ids and
        key are of all tokens.
        """
        positions, key = np.arange(targets.shape[1]), own_key(key, self.tokens)
        if stage == 0:
            x = self.model.embed(pick(x, self.tokens, TOKENS), positions, key)
        positions = beside(positions, x.data)
        for layer in self.layers[stage]:
            x = self.model.blocks[layer](x, positions, key)
        if stage < self.last:
            return x    # type: ignore[no-any-return]
        return self.model.output.loss(self.model.project(x),        # type: ignore[no-any-return]
                                      pick(targets, self.tokens, TOKENS), divisor=divisor)


class Arrived(Tensor):
    """An activation that came from another rank; its gradient will go there, so it counts as communication."""

    __slots__ = ()

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own` says that the array is nobody else's, so it may be kept."""
        if self.grad is None:
            gradient, own = account.current().hold(gradient if own else gradient.copy(), "communication"), True
        super().accumulate(gradient, own=own)


def hollow(y: Tensor) -> Tensor:
    """`y` for its backward, without its numbers, which have gone to another rank: backward needs their shape alone."""
    if y.node is None:
        return y
    xp = array_module(y.data)
    return Tensor._of(xp.broadcast_to(xp.zeros((), y.dtype), y.shape), y.node, y.index)


# -------------------------------------------------------------------------------------------- which layers go where

def check_layers(layers: Sequence[int], whole: int) -> None:
    """Raises ShardError unless `layers` are as many as the model has, and every stage has something to do."""
    if sum(layers) != whole or min(layers) < 0:
        raise ShardError(f"stages of {list(layers)} layers for a model of {whole}: they must add up to {whole}")
    empty = [stage for stage, count in enumerate(layers[1:-1], start=1) if not count]
    if empty:
        raise ShardError(f"stages of {list(layers)} layers: stage {empty[0]} has none; only the first and the last, "
                         f"which have the embedding and the output, may do without")


def balanced_layers(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many layers each stage gets so that the slowest is as fast as can be, and the others as even.

    Args:    costs: of each layer, in any unit; first, last: what the embedding and the output add at the ends.
    Raises:  ShardError for more stages than there are layers, an embedding and an output.
    """
    edges = [0.0, *accumulate(costs)]
    count = len(costs)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}   # layers so far -> slowest, squares, split
    for stage in range(stages):
        extra = first * (stage == 0) + last * (stage == stages - 1)
        least = 0 if stage in (0, stages - 1) else 1
        choices: dict[int, tuple[float, float, list[int]]] = {}
        for start, (slowest, squares, split) in best.items():
            for stop in range(start + least, count + 1):
                cost = edges[stop] - edges[start] + extra
                choice = (max(slowest, cost), squares + cost * cost, [*split, stop - start])
                choices[stop] = min(choices.get(stop, (math.inf, math.inf, [])), choice)
        best = choices
    if count not in best:
        raise ShardError(f"{count} layers cannot fill {stages} stages; take at most {count + 2}")
    return best[count][2]


def stage_layers(how: str, config: GPTConfig, stages: int, group: Group, *, device: str = "cpu") -> list[int]:
    """How many layers each stage gets as Plan's stage_layers says, the same on all ranks of `group`.

    Cost, Raises: of "measured" as measured_costs and balanced_layers.
    """
    if how == "even":
        return balanced_layers([1.0] * config.layers, stages)
    if how == "measured":
        block, first, last = measured_costs(config, group, device=device)
        return balanced_layers([block] * config.layers, stages, first=first, last=last)
    return [int(number) for number in how.split(",")]


def measured_costs(config: GPTConfig, group: Group, *, rows: int = 1, rounds: int = 3,
                   device: str = "cpu") -> tuple[float, float, float]:
    """Seconds, forward and backward, of (a block, the embedding, the output and loss): rank 0's, the same on all.

    Args:    rows: sequences, as many as a microbatch has; rounds: of which the quickest counts.
    Cost:    one broadcast of 24 bytes, counted under `control`; and the time that it measures, on rank 0.
    """
    seconds = np.zeros(3)
    if group.rank == 0:
        quiet = config.mixture and replace(config.mixture, noise=0.0)
        one = replace(config, layers=1, dropout=0.0, mixture=quiet)
        with account.use(account.MemoryAccount()):      # nothing of it lasts
            seconds[:] = np.min([_time_parts(one, rows, device) for _ in range(rounds)], axis=0)
    with group.ledger.control():
        block, first, last = (float(value) for value in group.broadcast(seconds, root=0))
    return block, first, last


def _time_parts(config: GPTConfig, rows: int, device: str) -> list[float]:
    """Seconds of a block, the embedding, the output and loss."""
    model = GPT(config)
    model.initialize(0, device=device)
    bits = random_bits("stages", 0, range(rows * config.context)) % np.uint64(config.vocabulary)
    ids, positions = bits.astype(np.int64).reshape(rows, -1), np.arange(config.context)
    xp = module_for(device)

    def timed(part: Any) -> float:
        start = time.perf_counter()
        y = part()
        y.backward(xp.ones(y.shape, y.dtype))
        to_host(y.data)         # waits for the device
        return time.perf_counter() - start

    x = Tensor(xp.ones((rows, config.context, config.width), model.norm.weight.dtype), requires_grad=True)
    assert dtype_name(x.dtype) == config.dtype
    return [timed(lambda: model.blocks[0](x, beside(positions, x.data))), timed(lambda: model.embed(ids, positions)),
            timed(lambda: ops.cross_entropy(model.project(x), ids))]
