"""Chapter 15 · ZeRO-2: as ZeRO-1, and of the summed gradient a rank keeps only its chunk.

The idea. A rank needs the summed gradient of its own chunk only, so why keep the rest? As soon as a
bucket's last gradient is final, the bucket is reduce-scattered; each rank adds its chunk of the sum
to its shard and frees the bucket. The whole gradient is computed, but only two of its buckets are
there at a time:

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
    control      one float64, the loss, and with a Trainer two digests of its batch; another, the
                 squares of the gradient's norm, with `clip` (or a loss scale)

notes:   N0 ZeRO2, N4 §6
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
         Models".
"""

from collections.abc import Callable, Iterable

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT
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
    """Train by ZeRO-2, parameter by parameter and without overlap; batches are global, the numbers
    are those of N4:349."""
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


# `Zero2` below reduces buckets, not parameters, while backward continues: two buckets of gradients
# live, one that fills and one in flight. Several passes add up in the chunks. One step, with one
# copy of the state; PassLoop.start_step, DataAxis.run and DataAxis.conclude (step/strategy.py) call
# the parts:
#   begin_step   marks the shards empty; no message
#   forward      the first read of a weight waits for its bucket's all-gather, which the previous
#                update started: ParameterArrivals._arrive (replica.py)
#   backward     a bucket's first gradient takes a buffer: GradientShards._lend
#                (gradient_shards.py), called by Parameter.gradient_room
#                its last one starts the reduce-scatter: BucketOrder._final (data/buckets.py; a
#                hook, called by autograd/backward.py), _start_complete, _start_reduce,
#                GradientShards.start, HybridSharding (shards.py), the scheme (step/scheme.py),
#                which has the groups from ShardedReplica.__init__ (replica.py)
#                the group's worker thread (CallWorker, comm/calls/async_call.py) carries it out
#                while backward computes: by default reduce_scatter (comm/collectives/ring.py), by
#                Call.exchange (comm/calls/call.py); Reduction.into (comm/calls/reduction.py) adds
#                the next start, or the end of backward, waits for it: the sum goes into the
#                shard, the buffer is freed: GradientShards.take_sum
#   finish_step  nothing (several copies: chapter 16; offload: chapter 20)
#   conclude     all-gathers the loss, then calls update
#   update       with `clip` all-gathers the squares of the norm (step/step.py); changes this
#                rank's chunks; starts an all-gather per bucket (ShardedReplica.update, replica.py)
#
# The stages of a pipeline, each of which goes backward by itself, are for chapter 17
# (staged_zero2.py).


class Zero2(ShardedReplica):
    """A replica of a model whose gradients and optimizer are divided among the ranks of a group.

    Used as Zero1, which has an example.

    Args:    model, group, loss, bucket_bytes, algorithm, precision, recorder, scheme: as DDP's.
             shard: how many neighbours share one copy of the state (default: all); store: where
             chunks lie (default: on the device).
    Attributes: parameters: the arguments for the optimizer, this rank's pieces of the weights. The
                others: as ZeroAxis (zero/shards.py).
    Raises:  MismatchError if the replicas do not start equal.
    """

    name = "ZeRO-2"
    update_notes = {"notes": "ZeRO-2 2"}
    reduces_each_pass = True

    def _make_gradients(self) -> None:
        """Make the shards, and lend buffers to buckets."""
        self.gradients = GradientShards(self, "bucket")

    def begin_step(self) -> None:
        """Mark the shards empty: the next sums replace them."""
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

        Args:    as DataAxis.backward. What is deferred is reduced by backward_weights.
        Cost:    one reduce-scatter a bucket, begun during backward; returns when all have ended.
        """
        self.gradients.begin(last=last)
        # every pass reduces, not only the last; with `defer` backward_weights reduces
        with self.recorder.span("backward", notes="ZeRO-2 1a"):
            deferred = self._bucket_order.backward(
                self.precision, share, dy, defer=defer, reduces=not defer
            )
        if not defer:
            with self.recorder.span("wait for gradients", notes="ZeRO-2 1b"):
                self.gradients.finish()
        # False: no backward of this step was the last, so the copies are not summed
        self._summed = last
        return deferred

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute what a backward has deferred, and reduce all that the segment's parameters have
        then."""
        self._bucket_order.backward_weights(self.precision, deferred)
        self.backward(None, segment=segment, last=False)

    def finish_step(self) -> None:
        """Sum the shards over the copies, unless a last backward did."""
        if not self._summed:
            self.gradients.sum_copies()
        if self.sharing.copies > 1:
            self.sum_stored()

    def _start_reduce(self, index: int) -> None:
        """Begin the reduce-scatter of a bucket."""
        self.gradients.start(index)

    def traffic(self, passes: int) -> list[Collective]:
        """Return a reduce-scatter per bucket and pass, and an all-gather per bucket."""
        return self.collectives([passes] * len(self.flats))
