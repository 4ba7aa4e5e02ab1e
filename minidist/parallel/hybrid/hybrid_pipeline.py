"""Chapter 17 · A pipeline inside a composed plan: the data axis runs its backwards, and sums their gradients.

With DDP and ZeRO-1 gradients add up in place, over all microbatches, and are reduced once a step. With ZeRO-2 and 3 no
rank keeps a whole gradient. So each microbatch's backward of a stage ends in the reduce-scatters of that stage, and
with ZeRO-3 each of its forwards and backwards begins with gathers:

    compute         F0 | F1 | B0           | F2 | B1           | …
    ZeRO-2                    reduce stage        reduce stage        m microbatches: m times the scatters
    ZeRO-3          gather for each F and each B; reduce               and m times the gathers

A microbatch is a pass of chapters 15 and 16. In elements a step, over all ranks of one group of P on the data axis that
holds Ψ elements, R of them in a tied table, for A passes of m microbatches:

    DDP, ZeRO-1     2 (P-1) Ψ
    ZeRO-2          (A m + 1) (P-1) Ψ
    ZeRO-3          (P-1) (3 A m (Ψ - R) + 2 R)     the table is gathered once a step and held, and so is its gradient

With keep_gathered a unit stays as long as one of its microbatches is between forward and backward: gpipe and 1f1b's
first stages then gather once a pass, but hold all weights. Where backward is split in two (zb-h1) gradients are reduced
after the second half, and lie whole until then.

All ranks of the data axis must gather and reduce the same, so a microbatch without a row goes through too, empty.
"""

from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, Module
from minidist.nn.weight_shard import assemble
from minidist.parallel.hybrid.hybrid_cut import TokenStages
from minidist.parallel.pipeline.instructions import BackwardWeights, Forward, Schedule
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.strategy import DataAxis


class DataPipeline(Pipeline):
    """This rank's stages of a GPT, whose backwards, gradients and update are those of a data axis that it `serve`s.

    Args:    as Pipeline's; of: the precision of its backward; tp: the ranks that divide its layers.
    """

    cuts = TokenStages

    def __init__(self, model: GPT, group: Group, schedule: Schedule, *, of: Precision, tp: Group,
                 **options: Any) -> None:
        super().__init__(model, group, schedule, **options)
        self.precision, self.tp = of, tp        # not before: the data axis makes the masters
        self.data_axis: DataAxis

    def serve(self, data: DataAxis, *, always: bool) -> None:
        """From here on gradients are `data`'s, made of this pipeline's model. `always`: ranks without a row compute."""
        self.data_axis, self.always = data, always or data.reduces_each_pass
        data.set_segments([self.modules_of(stage) for stage in self.stages.layers])

    def modules_of(self, stage: int) -> list[Module]:
        """The modules that a stage calls, in order; a tied table at either end comes first."""
        model, last = self.stages.model, stage == self.stages.last
        first = [model.tokens] if stage == 0 or (last and self.config.tied) else []
        first += [model.positions] if stage == 0 else []
        blocks = [model.blocks[layer] for layer in self.stages.layers[stage]]
        return [module for module in (*first, *blocks, *([model.norm, model.head] if last else []))
                if module is not None]

    def weights_of(self, stage: int) -> list[Parameter]:
        """The parameters of a stage that learn."""
        return [p for module in self.modules_of(stage) for p in module.parameters() if p.requires_grad]

    def go_back(self, stage: int, y: Tensor, dy: Array | None, *, whole: bool) -> list[WeightGradient]:
        """As Pipeline's, by the data axis, which may end in its reduce-scatters."""
        return self.data_axis.backward(y, dy, segment=self._segment(stage), last=False, defer=not whole)

    def go_back_weights(self, stage: int, put_off: list[WeightGradient]) -> None:
        """As Pipeline's, by the data axis."""
        self.data_axis.backward_weights(put_off, segment=self._segment(stage))

    def _segment(self, stage: int) -> int:
        """The number of a stage among this rank's."""
        return [*self.stages.layers].index(stage)

    def own_state(self) -> dict[str, np.ndarray]:
        """The weights of this rank's stages, put together over the data axis and tp."""
        return assemble(self.model, self.data_axis.state_dict(), self.tp)


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

