"""Stages: the cuts of a GPT between its layers, the number of layers of each stage, and the update
of a rank's stages.

    stage 0                    stage 1         stage 2
    embed, blocks 0 and 1      blocks 2, 3     blocks 4 and 5, norm, output

A rank cuts a model whose weights are not drawn yet, and draws only the weights that it keeps. Names
stay those of the whole model, so weights and dropout are the same too. With a tied output both ends
need the token table: both have it, and use the sum of its two gradients. `StageModel` is the common
base of model parallel and the pipeline.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.recompute import hollow_array
from minidist.autograd.tensor import Parameter, Tensor, is_grad_enabled
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses
from minidist.device import account, backend
from minidist.device.backend import Array, beside, index_range
from minidist.errors import ShardError
from minidist.nn import GPT, Mixture, Module
from minidist.nn.balance import of_stage
from minidist.nn.layers import DropoutKey
from minidist.nn.weight_shard import assemble
from minidist.optim import Optimizer
from minidist.parallel.pipeline.instructions import Instruction, RecvActivation, Schedule
from minidist.parallel.pipeline.own_stages import OwnStages
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.model_axis import ModelAxis
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Batch, Counted, Key, Part
from minidist.parallel.step.strategy import DataAxis, PassLoop


class Stages:
    """The stages of a GPT that one rank has.

    Args:    model: its weights not yet drawn; the layers of other ranks are removed from it.
             layers: number of layers of each stage of the whole model; own: the numbers of this
             rank's stages.
    Attributes: model: the rest of the model, with the names of the whole; last: number of the whole
                model's last stage.
                layers: {stage: its layers}, of this rank's stages.
    Raises:  ShardError if the layers do not add up to the model's, or a stage between the ends has
             none.
    """

    def __init__(self, model: GPT, layers: Sequence[int], own: Sequence[int]) -> None:
        whole = model.config.layers
        if sum(layers) != whole or min(layers) < 0:
            raise ShardError(
                f"stages of {list(layers)} layers for a model of {whole}: they must add up to "
                f"{whole}"
            )
        empty = [stage for stage, count in enumerate(layers[1:-1], start=1) if not count]
        if empty:
            raise ShardError(
                f"stages of {list(layers)} layers: stage {empty[0]} has none; only the first and "
                "the last, which have the embedding and the output, may have none"
            )
        edges = [0, *accumulate(layers)]
        self.config = model.config
        self.tied = model.config.tied
        self.counts = layers
        self.last = len(layers) - 1
        self.layers = {stage: range(edges[stage], edges[stage + 1]) for stage in own}
        cut: Any = model  # the same object, cut in place
        self.model: Any = cut
        cut.blocks = {layer: model.blocks[layer] for stage in own for layer in self.layers[stage]}
        if 0 not in own:
            cut.positions = None
            if not (model.config.tied and self.last in own):
                cut.tokens = None
        if self.last not in own:
            cut.norm = cut.head = None
        self._weight: Parameter = next(cut.parameters())  # activations are on its device

    def mixtures(self, stage: int) -> list[Mixture]:
        """Return the mixtures of a stage's blocks."""
        return [
            mlp
            for layer in self.layers[stage]
            if isinstance(mlp := self.model.blocks[layer].mlp, Mixture)
        ]

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """Return the shape of an activation sent between stages, for `rows` sequences of `length`
        tokens."""
        return rows, length, self.config.width

    def room(self, inputs: Array) -> Array:
        """Return a new array for the activation between stages of some token ids (B, T)."""
        device = backend.device_of(self._weight.data)
        shape = self.between(*inputs.shape)
        return backend.empty(shape, backend.dtype(self.config.dtype), device)

    def modules_of(self, stage: int) -> list[Module]:
        """Return the modules that a stage calls, in order; a tied table at either end is first."""
        model = self.model
        last = stage == self.last
        first = [model.tokens] if stage == 0 or (last and self.config.tied) else []
        first += [model.positions] if stage == 0 else []
        blocks = [model.blocks[layer] for layer in self.layers[stage]]
        return [
            module
            for module in (*first, *blocks, *([model.norm, model.head] if last else []))
            if module is not None
        ]

    @property
    def table(self) -> Parameter | None:
        """Return a tied token table, which both ends of the model have; None without one."""
        ends = 0 in self.layers or self.last in self.layers
        return self.model.tokens.weight if self.config.tied and ends else None

    def shapes(self, own: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of some stages, by the names of the whole model."""
        part = Stages(GPT(self.config), self.counts, own)
        return {name: weight.shape for name, weight in part.model.named_parameters()}

    def forward(
        self,
        stage: int,
        x: Any,
        *,
        targets: Array,
        positions: Array | None = None,
        divisor: float | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        """Compute one stage's forward.

        Args:    x: token ids (B, T) for stage 0, else the activation of the previous stage (B, T,
                 width).
                 targets: ids (B, T), used by the last stage; positions: (T,), default 0 to T-1.
                 divisor: of the loss, default B·T; key: for dropout.
        Returns: the activation (B, T, width); on the last stage the sum of the targets'
        cross-entropies over `divisor`.
        """
        positions = index_range(targets.shape[1]) if positions is None else positions
        if stage == 0:
            x = self.model.embed(x, positions, key)
        positions = beside(positions, x.data)
        for layer in self.layers[stage]:
            x = self.model.blocks[layer](x, positions, key)
        if stage < self.last:
            return x  # type: ignore[no-any-return]
        return self.model.output.loss(self.model.project(x), targets, divisor=divisor)  # type: ignore[no-any-return]


class ArrivedActivation(Tensor):
    """An activation that arrived from another rank; its gradient is sent there, so it counts as
    communication."""

    __slots__ = ()
    lends_data = True

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own`: nothing else uses the array, so it may be kept."""
        if self.grad is None:
            gradient = account.current().hold(gradient if own else gradient.copy(), "communication")
            own = True
        super().accumulate(gradient, own=own)


def hollow(y: Tensor) -> Tensor:
    """Return `y` for its backward, without its numbers: they were sent to another rank, and
    backward needs only the shape."""
    return y if y.node is None else Tensor._of(hollow_array(y.data), y.node, y.index)


def balanced_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Return the number of layers of each stage that makes the slowest stage fastest, and then the
    others most even.

    Args:    costs: of each layer, in any unit; first, last: costs of the embedding and of the
             output.
    Raises:  ShardError for more stages than there are layers, an embedding and an output.
    """
    edges = [0.0, *accumulate(costs)]
    count = len(costs)
    # layers so far -> slowest, squares, split
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
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
        raise ShardError(f"{count} layers cannot fill {stages} stages; use at most {count + 2}")
    return best[count][2]


class StageModel(ModelAxis, PassLoop):
    """The stages of a GPT that this rank of a group has: rank r of p has stages r, r + p, … (or as
    `own_stages` says).

    Its gradients and its update are those of a data axis. Alone (chapters 10 and 11) that is the
    axis of one process. In chapter 17 `use` gives it DDP or ZeRO, and Hybrid makes the step.

    Args:    model: a GPT, cut in place; or a list of modules, one for each stage (own_stages.py).
             seed: of the weights; None: the caller draws them. stages: in all (default: one per
             rank).
             layers: of each stage (default: as even as possible); key: for dropout; precision: of
             weights and update; make_stages: makes Stages of the model; tp: the ranks that
             divide the layers.
             alone: False: `use` gives a data axis later.
    Attributes: model: the part of the model with this rank's stages; parameters: the arguments for
                the optimizer, of this rank's stages.
                first, last: whether this rank has an end of the model.
                ends: the ranks of both ends, if both have a tied token table; or None.
    """

    schedule: Schedule  # in which order its stages compute

    def __init__(
        self,
        model: GPT | Sequence[Module],
        group: Group,
        *,
        seed: int | None,
        stages: int | None = None,
        layers: Sequence[int] | None = None,
        device: str = "cpu",
        key: Key | None = None,
        precision: Precision | None = None,
        recorder: Recorder | None = None,
        make_stages: Callable[..., Stages] = Stages,
        tp: Group | None = None,
        alone: bool = True,
    ) -> None:
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.key: Key = key or (lambda part: None)
        self.tp = tp
        self.group = group
        self.stages: Stages | OwnStages
        if isinstance(model, GPT):
            count = model.config.layers
            self.layers = list(layers or balanced_layers([1.0] * count, stages or group.size))
            self.stages = make_stages(model, self.layers, self.own_stages(group.rank))
        else:
            self.layers = [1] * len(model)
            self.stages = OwnStages(model, self.own_stages(group.rank), of=stages or group.size)
        ModelAxis.__init__(self, self.stages.model, group)
        if seed is not None:
            self.model.initialize(seed, device=device)
        self.first, self.last = 0 in self.stages.layers, self.stages.last in self.stages.layers
        self.ends = None
        if self.stages.tied and self.stages.last not in self.own_stages(0):
            self.ends = group.split(0 if self.first or self.last else None, axis=group.axis)
        if alone:
            self.use(Single(self.model, precision=self.precision))

    def use(self, data: DataAxis) -> None:
        """Take `data`, an axis made of this rank's model, for the gradients and the update.

        In chapter 17 Hybrid calls it, when the data axis is made from the model that the stages
        left.
        """
        self.data = data
        # microbatches without a row are computed, too: other ranks wait for them
        self.always = data.computes_without_rows or data.reduces_each_pass
        self.weights = [owner for owner, _ in data.updated()]
        self.parameters = data.parameters
        data.set_segments(
            [self.stages.modules_of(stage) for stage in self.stages.layers], self.order()
        )

    def order(self) -> list[tuple[int, bool]]:
        """Return the order of this rank's computes in a pass: (segment, whether forward)."""
        return [(0, True), (0, False)]

    def weights_of(self, stage: int) -> list[Parameter]:
        """Return the parameters of a stage that learn."""
        return [
            p
            for module in self.stages.modules_of(stage)
            for p in module.parameters()
            if p.requires_grad
        ]

    def own_stages(self, rank: int) -> Sequence[int]:
        """Return the numbers of the stages of a rank, in order."""
        return range(rank, len(self.layers), self.group.size)

    # ----------------------------------------------------------------------------------- its gradients

    def has_table(self, parameter: Parameter) -> bool:
        """Return whether `parameter` is a tied token table that other stages have, too."""
        return parameter is self.stages.table

    def sums_over(self, parameter: Parameter) -> Group | None:
        """Return both ends for a tied token table: one has the embedding's gradient, the other the
        output's; else None."""
        return self.ends if self.has_table(parameter) else None

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this rank counts a weight in the norm: a tied token table counts once, at
        the first end."""
        return self.sums_over(parameter) is None or self.group.rank == 0

    def check_shared(self, *, when: str) -> None:
        """Compare a tied token table at both ends. Raises: MismatchError."""
        if self.ends is not None:
            assert self.stages.table is not None, "both ends have it"
            check_equal_replicas([self.stages.table], self.ends, when=when)

    # ------------------------- a pass, an evaluation, the weights: chapters 10 and 11, and chapter 17

    @abstractmethod
    def run(self, part: Part, *, divisor: int, last: bool = True) -> float:
        """Return this rank's share of the loss of some rows, as PassLoop.run."""

    @abstractmethod
    def evaluate(self, part: Part, *, divisor: int) -> float:
        """Return this rank's share of the loss, as `run`, but without gradients and dropout, for
        half the messages."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all weights (masters, in mixed precision), whole, on every rank. Cost:
        one all-gather."""
        return self.joined(self.data.state_dict())

    def joined(self, mine: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the weights of all stages, given copies of this rank's. Cost: one all-gather."""
        if self.tp is not None:
            mine = assemble(self.model, mine, self.tp)
        with self.group.ledger.control():
            joined = self.group.all_gather(
                np.concatenate([mine[name].reshape(-1) for name in mine]), algorithm="ring"
            )
        whole = {}
        start = 0
        for rank in range(self.group.size):
            for name, shape in self.stages.shapes(self.own_stages(rank)).items():
                stop = start + math.prod(shape)
                whole[name] = joined[start:stop].reshape(shape).copy()
                start = stop
        return {name: whole[name] for name in self.stages.shapes(range(len(self.layers)))}

    # ----------------------- the other parts of a step of chapters 10 and 11; in chapter 17 they are
    # Hybrid's, and add_up sums the ends

    def begin_step(self) -> None:
        """Begin a step, as PassLoop.begin_step."""
        self.data.begin_step()

    def part_of(self, batch: Batch) -> Part:
        """Return the whole batch."""
        return Part(*batch, first=0)

    def finish_step(self) -> None:
        """Finish the gradients, as PassLoop.finish_step; a tied token table's are summed over both
        ends."""
        self.data.finish_step()
        self.sum_ends()

    def sum_ends(self) -> None:
        """Sum the two gradients of a tied token table, the embedding's and the output's: an
        all-reduce of both ends."""
        if self.ends is not None:
            table = self.stages.table
            assert table is not None, "both ends have it"
            with self.recorder.span("wait for the other end's table"):
                self.ends.all_reduce(table.grad, op="sum", out=table.grad, algorithm="ring")

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """Make the update and return the loss, as PassLoop.conclude. Cost: an all-gather of a
        float64 per rank, under `control`; with `clip` a second."""
        counted = Counted([p for p in self.weights if self.counts(p)], self.group)
        with self.recorder.span("optimizer"):
            self.data.update(optimizer, lr=lr, clip=clip, counted=counted)
        return LateLoss(add_losses(self.group, share.wait(), batch))


class StagePass:
    """The work of one pass of some microbatches on this rank; total: its loss so far."""

    def __init__(self, pipeline: StageModel, parts: list[Part], divisor: int) -> None:
        self.pipeline = pipeline
        self.stages = pipeline.stages
        self.parts = parts
        self.divisor = divisor
        self.total = 0.0
        # from forward to backward: x, y
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._deferred: dict[tuple[int, int], list[WeightGradient]] = {}

    def skips(self, microbatch: int) -> bool:
        return not self.pipeline.always and not len(self.parts[microbatch].inputs)

    def room(self, receive: Instruction) -> Array | None:
        """Return a new array for a message, None if its shape is not known; activations are counted
        as activations, because they are kept for backward."""
        array = self.stages.room(self.parts[receive.microbatch].inputs)
        category = "activations" if isinstance(receive, RecvActivation) else "communication"
        return None if array is None else account.current().hold(array, category)

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """Compute a stage's forward; only the shape of its output is kept."""
        part = self.parts[microbatch]
        start = None if x is None else ArrivedActivation(x)
        y = self.stages.forward(
            stage,
            part.inputs if start is None else start,
            targets=part.targets,
            divisor=self.divisor,
            key=self.pipeline.key(part),
        )
        last = stage == self.stages.last
        self.total += of_stage(self.stages.mixtures(stage), self.divisor) + (
            float(y.item()) if last else 0.0
        )
        if is_grad_enabled():
            self.kept[stage, microbatch] = start, y if last else hollow(y)
        return None if last else y.data

    def backward(
        self, stage: int, microbatch: int, dy: Array | None, *, whole: bool
    ) -> Array | None:
        start, y = self.kept.pop((stage, microbatch))
        for layer in self.stages.mixtures(stage):
            layer.balance_scale = self.pipeline.precision.scale / self.divisor
        # None: all weights of the first stage are frozen
        share = y if y.requires_grad else None
        # segment: the index of the stage among this rank's; last=False: another microbatch may
        # follow, and finish_step starts the sums
        deferred = self.pipeline.data.backward(
            share,
            dy,
            segment=stage // self.pipeline.group.size,
            last=False,
            defer=not whole,
        )
        if not whole:
            self._deferred[stage, microbatch] = deferred
        return None if start is None else start.grad

    def backward_weights(self, stage: int, microbatch: int) -> None:
        deferred = self._deferred.pop((stage, microbatch))
        self.pipeline.data.backward_weights(deferred, segment=stage // self.pipeline.group.size)
