"""Chapter 17 · A pipeline inside a composed plan: what its backwards leave is the data axis's affair.

With DDP and ZeRO-1 gradients add up where they are, over all microbatches, and are reduced once a step. ZeRO-2 and 3
promise that nobody keeps a whole gradient; so behind a pipeline each microbatch's backward of a stage ends in that
stage's reduce-scatters, and with ZeRO-3 each of its forwards and backwards begins with gathers:

    compute         F0 | F1 | B0           | F2 | B1           | …
    ZeRO-2                    reduce stage        reduce stage        m microbatches: m times the scatters
    ZeRO-3          gather for each F and each B; reduce               and m times the gathers

That is what a pass costs in chapters 15 and 16: a microbatch is a pass of its stage. In numbers a step, over all ranks
of one group of P on the data axis that holds Ψ numbers, R of them in a tied table, in A passes of m microbatches:

    DDP, ZeRO-1     2 (P-1) Ψ
    ZeRO-2          (A m + 1) (P-1) Ψ
    ZeRO-3          (P-1) (3 A m (Ψ - R) + 2 R)     the table is gathered once a step and held, and so is its gradient

Who wants the memory of stages 2 and 3 without this traffic takes fewer microbatches, or ZeRO-1. With keep_gathered a
unit stays as long as one of its microbatches is on its way: gpipe and 1f1b's first stages gather once a pass, but then
have all weights. Where backward is split in two (zb-h1) gradients are reduced after the second half, and lie whole
until then.

All ranks of the data axis must gather and reduce alike, so a microbatch without a row goes through too, with none.
"""

from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT
from minidist.nn.weight_shard import assemble
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid.hybrid_cut import TokenStages
from minidist.parallel.pipeline.instructions import BackwardWeights, Forward, Schedule
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.step import Part
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

Data = DDP | Zero1 | Zero2 | Zero3
"""What trains the replicas of a part of a model: the data axis's strategy."""


class DataPipeline(Pipeline):
    """This rank's stages of a GPT, whose gradients and update are those of a data axis that it `serve`s.

    Args:    as Pipeline's; of: the precision of its backward; tp: the ranks that divide its layers.
             seed: None leaves the weights undrawn.
    """

    stages: TokenStages

    def __init__(self, model: GPT, group: Group, schedule: Schedule, *, of: Precision, tp: Group,
                 **options: Any) -> None:
        super().__init__(model, group, schedule, **options)
        self.of, self.tp = of, tp
        self.data: Data
        self._parts = {stage: [*self._modules(stage)] for stage in self.stages.layers}

    def cut(self, model: GPT, rank: int) -> TokenStages:
        """As Pipeline's; the stages may work on a shard of the tokens."""
        return TokenStages(model, self.layers, range(rank, len(self.layers), self.group.size))

    def _modules(self, stage: int) -> list[Any]:
        """The modules that a stage calls, in order."""
        model, last = self.stages.model, self.stages.last
        first = [model.tokens, model.positions] if stage == 0 else []
        blocks = [model.blocks[layer] for layer in self.stages.layers[stage]]
        return [module for module in (*first, *blocks, *([model.norm, model.head] if stage == last else []))
                if module is not None]

    @property
    def loss_scale(self) -> float:
        """What backward multiplies the loss by."""
        return self.of.scale

    def weights_of(self, stage: int) -> list[Parameter]:
        """The parameters of a stage; a tied table at either end."""
        tied = [self.stages.model.tokens] if stage == self.stages.last and self.config.tied else []
        found = {id(p): p for module in (*tied, *self._parts[stage]) for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def chains(self) -> list[list[Any]]:
        """For ZeRO-3: the units of each of this rank's stages, in the order of their calls."""
        return [*self._parts.values()]

    def serve(self, data: Data) -> None:
        """From here on gradients are `data`'s, made of this pipeline's model."""
        self.data, self.always = data, data.always or isinstance(data, (Zero2, Zero3))

    # --------------------------------------------------------------------------------------- forward and backward

    def begin(self) -> None:
        """A step begins."""
        if isinstance(self.data, Zero3):
            self.fetch_root()
        else:
            self.data.hold()

    def fetch_root(self) -> None:
        """ZeRO-3: gather what is used at both ends of the model; it stays until it is freed, after the step."""
        if isinstance(self.data, Zero3):
            self.data.root.fetch()
            self.data.root.complete()

    def evaluate(self, part: Part, *, divisor: int) -> float:
        """As Pipeline's."""
        self.fetch_root()
        return super().evaluate(part, divisor=divisor)

    def go_back(self, stage: int, y: Tensor, dy: Array | None, *, whole: bool) -> list[WeightGradient]:
        """As Pipeline's, and what ZeRO-2 and 3 reduce after it."""
        if isinstance(self.data, Zero3):
            return self.data.backward_chain(self._number(stage), y, dy, whole=whole)
        if isinstance(self.data, Zero2):
            if whole:
                self._reach(stage)
                self.data.backward(y, dy, last=False)
                return []
            self.data.hold()
        return self.of.backward(y, dy, defer_weights=not whole)

    def go_back_weights(self, stage: int, put_off: list[WeightGradient]) -> None:
        """As Pipeline's, and what ZeRO-2 and 3 reduce after it."""
        if isinstance(self.data, Zero2):
            self.data.hold()
        self.of.backward_weights(put_off)
        if isinstance(self.data, Zero3):
            self.data.reduce_chain(self._number(stage))
        elif isinstance(self.data, Zero2):
            self._reach(stage)
            self.data.backward(None, last=False)

    def end(self) -> None:
        """The step's last pass is over: now the data axis has, or reduces, all gradients."""
        if isinstance(self.data, Zero3):
            self.data.finish_chains()
        elif isinstance(self.data, Zero2):
            self.data.gradients.sum_copies()
        else:
            self.data.backward(None)

    def _number(self, stage: int) -> int:
        """The number of a stage among this rank's."""
        return [*self._parts].index(stage)

    def _reach(self, stage: int) -> None:
        if len(self._parts) > 1:
            assert isinstance(self.data, Zero2)
            self.data.reach({id(parameter) for parameter in self.weights_of(stage)})

    # ---------------------------------------------------------------------------------------------------- weights

    def own_state(self) -> dict[str, np.ndarray]:
        """The weights of this rank's stages, put together over the data axis and tp."""
        return assemble(self.model, self.data.state_dict(), self.tp)


def gathers(schedule: Schedule, rank: int, stage: int, *, keep: bool) -> int:
    """How often ZeRO-3 gathers a unit of a stage in one pass: for each forward and each backward, or with `keep` as
    often as none of its microbatches is on its way when one begins.
    """
    times = on_its_way = 0
    for instruction in schedule.computes(rank):
        if instruction.stage != stage or isinstance(instruction, BackwardWeights):
            continue
        forward = isinstance(instruction, Forward)
        times += not keep or (forward and not on_its_way)
        on_its_way += 1 if forward else -1
    return times

