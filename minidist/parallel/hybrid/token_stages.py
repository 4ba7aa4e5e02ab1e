"""Chapter 17 · Stages of a model whose tokens context and sequence parallelism divide.

A stage is given the ids and targets of whole sequences, works on this rank's tokens, and sends the
activations of the tokens that it carries: with sequence parallelism a part of them. With tp only it
is chapter 11's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, index_range
from minidist.nn import GPT, DropoutKey
from minidist.parallel.context.token_shard import TOKENS, OwnTokens, own_key, pick
from minidist.parallel.pipeline.stages import Stages


class TokenStages(Stages):
    """Stages of a GPT that work on a shard of the tokens.

    Args:    as Stages; tokens: the tokens that this rank works on; carried: those whose activations
             it sends to other stages.
    """

    def __init__(
        self,
        model: GPT,
        layers: Sequence[int],
        own: Sequence[int],
        *,
        tokens: OwnTokens,
        carried: OwnTokens,
    ) -> None:
        super().__init__(model, layers, own)
        self.tokens = tokens
        self.carried = carried

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """Return the shape of an activation sent between stages, as Stages.between, for the carried
        tokens."""
        return super().between(rows, len(np.arange(length)[self.carried(length)]))

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
        """Compute a stage's forward, as Stages.forward; ids, targets and key are of all tokens."""
        return super().forward(
            stage,
            x if isinstance(x, Tensor) else pick(x, self.tokens, TOKENS),
            targets=pick(targets, self.tokens, TOKENS),
            divisor=divisor,
            key=own_key(key, self.tokens),
            positions=index_range(targets.shape[1]),
        )
