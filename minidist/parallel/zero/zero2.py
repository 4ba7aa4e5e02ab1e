"""Chapter 15 · ZeRO-2: as ZeRO-1, and no rank ever holds a whole gradient.

The idea. A rank needs the summed gradient of its own chunk only, so why keep the rest? As soon as a
bucket's last gradient is final, the bucket is reduce-scattered; each rank adds its chunk of the sum
to its shard and frees the bucket. The whole gradient is computed, but never all of it is there:

    compute         forward | backward: layer 4 | layer 3          | layer 2          | … | wait | own chunk | forward
    communication   gather  |                   | reduce layer 4   | reduce layer 3   | …                    | gather
    buckets held                        4 fills | 4 flies, 3 fills | 3 flies, 2 fills | …   none

What each rank holds, Ψ parameters in float32 with Adam (K = 8) on P ranks:

                 DDP     ZeRO-1         ZeRO-2, each rank
    parameters   4Ψ      4Ψ             4Ψ
    gradients    4Ψ      4Ψ             4Ψ/P, and for a while two buckets: one fills, one is in
                                        flight
    optimizer    8Ψ      8Ψ/P           8Ψ/P
    together     16Ψ     8Ψ + 8Ψ/P      4Ψ + 12Ψ/P: at most 4 times less; 8 times with K = 12 in
                                        mixed precision, 2Ψ + 14Ψ/P

A weight that is used twice, as a tied embedding, holds its bucket from its first gradient to its
last.

Cost, a step and rank, with A backward passes:

    bytes        (A+1)(P-1)/P × 4Ψ   every pass must reduce, since no rank can keep the sum of
                                     several; A = 1: as DDP
    messages     (A+1)(P-1) × buckets
    control      two float64: the loss, the squares of the gradient's norm

notes:   N0 ZeRO2, N4 §6
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
         Models".
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.step import Batch, part_of
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.replica import ShardedReplica


def plain_zero2(
    model: GPT,
    new_optimizer: Callable[[list[Piece]], Optimizer],
    group: Group,
    batches: Iterable[Batch],
) -> None:
    """ZeRO-2, parameter by parameter and without overlap; the batches are global, the numbers those
    of N4:349."""
    runs = []
    for p in model.parameters():
        flat = Flat([p], group)
        weights = flat.join()
        mine = np.zeros(flat.chunk_size, flat.dtype)
        runs.append((flat, weights, mine))

        def final(p: Parameter, mine: Array = mine) -> None:
            group.reduce_scatter(p.grad, out=mine, algorithm="ring")  # 1a sent as soon as final
            p.zero_grad()  # 1b and freed

        p.hooks.append(final)
    optimizer = new_optimizer(
        [flat.pieces(weights[flat.chunk], mine)[0] for flat, weights, mine in runs]
    )
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # 1 the hooks run in here
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        optimizer.step()  # 2 update my chunks
        for flat, weights, _ in runs:
            # 3 all ranks' new weights
            group.all_gather(weights[flat.chunk].copy(), out=weights, algorithm="ring")


# `Zero2` below reduces buckets, not parameters, and backward goes on meanwhile: two buckets of
# gradients are alive, one that fills and one on its way. Several passes add up in the chunks;
# all-gathers overlap the next forward.


class Zero2(ShardedReplica):
    """A replica of a model whose gradients and optimizer are divided among the ranks of a group.

    Args, Attributes, Raises: as ShardedReplica (zero/replica.py).
    """

    name = "ZeRO-2"
    update_notes = {"notes": "ZeRO-2 2"}
    reduces_each_pass = True

    def _make_gradients(self) -> None:
        """Shards, and buffers that are lent to buckets."""
        self.gradients = GradientShards(self, "bucket")
        self._segments = [list(range(len(self.flats)))]  # the runs of each segment

    def set_segments(
        self, segments: Sequence[Sequence[Module]], order: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """A backward of a segment reaches, and reduces, the runs of its modules alone."""
        reached = [
            {parameter for module in segment for parameter in module.parameters()}
            for segment in segments
        ]
        self._segments = [
            [i for i, flat in enumerate(self.flats) if flat.parameters[0] in own] for own in reached
        ]

    def begin_step(self) -> None:
        """The next sums replace the shards."""
        self._summed = False
        self.gradients.forget()
        self.scheme.begin_step(self.precision.scale)

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add the sums of the gradients over the ranks of this copy to the shards; the `last` adds
        the other copies'.

        Args:    as DataAxis.backward. What is put off is reduced by backward_weights.
        Cost:    one reduce-scatter a bucket, begun during backward; returns when all have ended.
        """
        self._arrange(segment)
        self.gradients.begin(last=last)
        with self.recorder.span("backward", notes="ZeRO-2 1a"):
            deferred = self._order.backward(
                self.precision, share, dy, defer=defer, more_to_come=defer
            )
        if not defer:
            with self.recorder.span("wait for gradients", notes="ZeRO-2 1b"):
                self.gradients.finish()
        self._summed = last
        return deferred

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute what a backward has put off, and reduce all that the segment's parameters have
        then."""
        self._arrange(segment)
        self._order.backward_weights(self.precision, deferred)
        self.backward(None, segment=segment, last=False)

    def finish_step(self) -> None:
        """Sum the shards over the copies, unless a last backward did."""
        if not self._summed:
            self.gradients.sum_copies()
        self.sum_stored()

    def _arrange(self, segment: int) -> None:
        """This backward reaches the runs of one segment."""
        if len(self._segments) > 1:
            self._order.arrange([self.flats[index].parameters for index in self._segments[segment]])
        self._segment = segment

    def _start_reduce(self, index: int) -> None:
        """The bucket, by its number among those of the segment, sets out."""
        self.gradients.start(self._segments[self._segment][index])

    def traffic(self, passes: int) -> list[Collective]:
        """A reduce-scatter a bucket and pass, or for each segment that reaches it; an all-gather a
        bucket."""
        segments = [
            sum(index in segment for segment in self._segments) for index in range(len(self.flats))
        ]
        return self.collectives([passes * count for count in segments])
