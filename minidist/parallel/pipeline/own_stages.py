"""Stages of a model that is no GPT: a list of modules, one for each stage.

    stages = [Front(), Middle(), Back()]     # each computes y = stage(x); the last has a loss
    pipeline = Pipeline(stages, group, make_schedule("1f1b", group.size, 4, stages=3), seed=0)

Every rank makes the whole list, whose weights are not drawn yet, and keeps its own stages. The
activations of a stage may have any shape and dtype: a message brings both.
"""

from collections.abc import Sequence
from typing import Any

from minidist.autograd.tensor import Parameter, Tensor
from minidist.device.backend import Array
from minidist.errors import ShardError
from minidist.nn import Mixture, Module
from minidist.nn.layers import DropoutKey


class StageList(Module):
    """Stages by their number in the whole model, as one module: its names begin with the number."""

    def __init__(self, stages: dict[int, Module]) -> None:
        self.stages = stages

    def forward(self, x: Any) -> Any:
        """Run the stages one after the other."""
        for stage in self.stages.values():
            x = stage(x)
        return x


class OwnStages:
    """The stages of a list of modules that one rank has; used as Stages (stages.py).

    Args:    modules: one for each stage of the whole model, weights not yet drawn. The last one has
             a method loss(x, targets, divisor): the sum of the targets' losses over `divisor`.
             own: the numbers of this rank's stages; of: the number of stages that there must be.
    Raises:  ShardError if there are more or fewer, an element is no Module, the last one has no
             loss, or two stages have the same parameter.
    """

    tied = False  # no weight is at both ends
    table: Parameter | None = None

    def __init__(self, modules: Sequence[Module], own: Sequence[int], *, of: int) -> None:
        check_stages(modules, of)
        self.modules = modules
        self.last = len(modules) - 1
        self.layers = {stage: range(stage, stage + 1) for stage in own}
        self.model = StageList({stage: modules[stage] for stage in own})

    def modules_of(self, stage: int) -> list[Module]:
        """Return the modules that a stage calls."""
        return [self.modules[stage]]

    def mixtures(self, stage: int) -> list[Mixture]:
        """Return no mixture: balance losses are the GPT's."""
        return []

    def room(self, inputs: Array) -> None:
        """Return None: an activation's shape is not known before it arrives."""

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
        """Compute a stage's forward, as Stages.forward; positions and key are a GPT's."""
        module: Any = self.modules[stage]
        result: Tensor = module.loss(x, targets, divisor) if stage == self.last else module(x)
        return result

    def shapes(self, own: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of some stages, by the names of the whole."""
        part = StageList({stage: self.modules[stage] for stage in own})
        return {name: weight.shape for name, weight in part.named_parameters()}


def check_stages(modules: Sequence[Module], count: int) -> None:
    """Raise ShardError if a list of modules cannot be the `count` stages of a pipeline."""
    if len(modules) != count:
        raise ShardError(
            f"{len(modules)} modules for a pipeline of {count} stages; give one module for each"
        )
    for number, module in enumerate(modules):
        if not isinstance(module, Module):
            raise ShardError(
                f"stage {number} of the pipeline is a {type(module).__name__}; give a list of "
                "minidist.nn.Module, one for each stage"
            )
    if not hasattr(modules[-1], "loss"):
        raise ShardError(
            f"the last stage, a {type(modules[-1]).__name__}, has no loss(x, targets, divisor); "
            "give it one that returns the sum of the targets' losses over divisor"
        )
    owners: dict[Parameter, int] = {}
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            if owners.setdefault(parameter, number) != number:
                raise ShardError(
                    f"stages {owners[parameter]} and {number} have the same parameter of shape "
                    f"{parameter.shape}; a weight belongs to one stage"
                )
