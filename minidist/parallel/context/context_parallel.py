"""The step of a GPT whose sequences are cut between ranks that all have its weights (chapter 13)."""

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Loss
from minidist.parallel.tensor.split_model import SplitModel


class ContextParallel(SplitModel):
    """A GPT cut by `context_parallel` (ring_attention.py) or `ulysses`, trained on batches that every rank sees whole.

        model = context_parallel(GPT(config), group)
        model.initialize(seed)
        strategy = ContextParallel(model, group)
        loss = strategy.step(batch, AdamW(strategy.parameters, lr))

    A rank's loss is that of its tokens over the number of all; after the last backward gradients are all-reduced.
    Args:    as SplitModel.
    """

    def __init__(self, model: GPT, group: Group, *, loss: Loss | None = None, algorithm: str = "ring",
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        super().__init__(model, group, outside=group, loss=loss, algorithm=algorithm, precision=precision,
                         recorder=recorder)
