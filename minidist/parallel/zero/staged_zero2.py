"""Chapter 17 · ZeRO-2 under a pipeline: the backward of a stage reduces the buckets of that stage.

A stage of this rank is a segment of the model. Its backward reaches the parameters of its modules,
so only their buckets are waited for and reduced, in each microbatch. What that costs stands in
staged_zero3.py, for ZeRO-2 and ZeRO-3 together.
"""

from collections.abc import Sequence

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.zero2 import Zero2


class StagedZero2(Zero2):
    """ZeRO-2 for the stages of a pipeline. Args, Attributes, Raises: as Zero2."""

    _segments: list[list[int]]  # the runs of each segment
    _segment: int  # the one that the newest backward reaches

    def set_segments(
        self, segments: Sequence[Sequence[Module]], order: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """Find the runs of each segment: only they are reduced by its backward."""
        reached = [
            {parameter for module in segment for parameter in module.parameters()}
            for segment in segments
        ]
        self._segments = [
            [i for i, flat in enumerate(self.flats) if flat.parameters[0] in own] for own in reached
        ]

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        self._arrange(segment)
        return super().backward(share, dy, segment=segment, last=last, defer=defer)

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        self._arrange(segment)
        super().backward_weights(deferred, segment=segment)

    def _arrange(self, segment: int) -> None:
        """Let this backward wait for the runs of one segment."""
        if len(self._segments) > 1:
            self._bucket_order.arrange(
                [self.flats[index].parameters for index in self._segments[segment]]
            )
        self._segment = segment

    def _start_reduce(self, index: int) -> None:
        """Begin the reduce-scatter of a bucket. Args: index: among those of the segment."""
        super()._start_reduce(self._segments[self._segment][index])

    def traffic(self, passes: int) -> list[Collective]:
        """Return a reduce-scatter per bucket, pass and segment that reaches it, and an all-gather
        per bucket."""
        segments = [
            sum(index in segment for segment in self._segments) for index in range(len(self.flats))
        ]
        return self.collectives([passes * count for count in segments])
