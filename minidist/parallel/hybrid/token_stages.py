"""Chapter 17 · Stages of a model whose tokens are divided, and what a pipeline asks of a data axis.

In a pipeline the data axis runs the backwards, and sums their gradients. With DDP and ZeRO-1 they
add up in place, over all microbatches, and are reduced once a step. With ZeRO-2 and 3 no rank keeps
a whole gradient. So each microbatch's backward of a stage ends in the reduce-scatters of that
stage, and with ZeRO-3 each of its forwards and backwards begins with gathers:

    compute         F0 | F1 | B0           | F2 | B1           | …
    ZeRO-2                    reduce stage        reduce stage        m microbatches: m times the scatters
    ZeRO-3          gather for each F and each B; reduce               and m times the gathers

A microbatch is a pass of chapters 15 and 16. In elements a step, over all ranks of one group of P
on the data axis that holds Ψ elements, R of them in a tied table, for A passes of m microbatches:

    DDP, ZeRO-1     2 (P-1) Ψ
    ZeRO-2          (A m + 1) (P-1) Ψ
    ZeRO-3          (P-1) (3 A m (Ψ - R) + 2 R)     the table is gathered once a step and held, and
                                                    so is its gradient

Where both ends are on one rank (zb-v, dualpipe-v) two stages give a tied table gradients, and
ZeRO-2 reduces it twice a microbatch.

While a segment's last units compute, the first ones of the schedule's next instruction are read
ahead, where weights lie on disk (chapter 20): they stream in the order of the step.

With keep_gathered a unit stays as long as one of its microbatches is between forward and backward:
gpipe and 1f1b's first stages then gather once a pass, but hold all weights. Where backward is split
in two (zero bubble) gradients are reduced after the second half, and lie whole until then.

All ranks of the data axis must gather and reduce the same, so a microbatch without a row goes
through too, empty.
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
        """As Stages.between, of the carried tokens."""
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
        """As Stages.forward; ids, targets and key are of all tokens."""
        return super().forward(
            stage,
            x if isinstance(x, Tensor) else pick(x, self.tokens, TOKENS),
            targets=pick(targets, self.tokens, TOKENS),
            divisor=divisor,
            key=own_key(key, self.tokens),
            positions=index_range(targets.shape[1]),
        )
