"""Chapter 14 · ZeRO-1: as DDP, but each rank keeps the optimizer's state only of its share of the
weights.

The idea. In DDP all ranks make the same step from the same sums, each with a full copy of Adam's m
and v. That work and that memory can be divided: rank r needs the summed gradient of its chunk only,
updates that chunk, and hands the new weights to the others. Since an all-reduce is a reduce-scatter
and an all-gather, and the update fits between the two, nothing more is sent than in DDP:

    DDP       reduce-scatter gradients, all-gather gradients,                 update everything
    ZeRO-1    reduce-scatter gradients,        update own chunk,              all-gather weights

What each rank holds, Ψ parameters in float32 with Adam (K = 8 bytes of state a parameter) on P
ranks:

                 DDP     ZeRO-1, each rank
    parameters   4Ψ      4Ψ        the whole model
    gradients    4Ψ      4Ψ        own part's; of the own chunk the sum over all ranks
    optimizer    8Ψ      8Ψ/P      of the own chunk
    together     16Ψ     8Ψ + 8Ψ/P: at most 2 times less
                         (mixed precision, K = 12: 4Ψ + 12Ψ/P, at most 4 times less)

Chunks are `numpy.array_split`s of each bucket: their edges fall inside parameters, and shards are
even to an element a bucket. Where P does not divide a bucket, the all-gather works on copies: up to
two buckets of communication memory.

Cost, a step and rank, whatever the number of backward passes (gradients are added up before they
travel):

    bytes        2(P-1)/P × 4Ψ   as DDP: (P-1)/P × 4Ψ in the reduce-scatter, as much in the
                                 all-gather
    messages     2(P-1) × buckets
    control      one float64, the loss, and with a Trainer two digests of its batch; another, the
                 squares of the gradient's norm, with `clip` (or a loss scale)

notes:   N0 ZeRO1, N4 §5
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
         Models".
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Tensor
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.parallel.data.buckets import Bucket
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.step import Batch, part_of
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.replica import ShardedReplica


def plain_zero1(
    model: GPT,
    new_optimizer: Callable[[list[Piece]], Optimizer],
    group: Group,
    batches: Iterable[Batch],
) -> None:
    """Train by ZeRO-1 without buckets and without overlap; batches are global, the numbers are
    those of N4:297."""
    flat = Flat(list(model.parameters()), group)  # all weights; one chunk is mine
    weights = flat.join()
    mine = np.zeros(flat.chunk_size, flat.dtype)
    optimizer = new_optimizer(flat.pieces(weights[flat.chunk], mine))  # states of my chunk only
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # 1 the whole gradient
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        gradient = np.empty(flat.size, flat.dtype)
        for p, view in flat.views(gradient):
            view[...] = p.grad
        group.reduce_scatter(gradient, out=mine, algorithm="ring")  # 2 the sum of my chunk
        optimizer.step()  # 3 update my chunk
        # 4 all ranks' new weights
        group.all_gather(weights[flat.chunk].copy(), out=weights, algorithm="ring")
        model.zero_grad()


# `Zero1` below adds buckets and overlap at both ends: a bucket's reduce-scatter runs while backward
# computes the next gradients, and its all-gather while the next forward computes; a weight that is
# used waits only for its own bucket. One step, with one copy of the state:
#   begin_step   forgets the gradients; no message
#   forward      the first read of a weight waits for its bucket's all-gather, which the previous
#                update started: ParameterArrivals._arrive (replica.py)
#   backward     adds gradients into the buckets. In the step's last backward a bucket's last
#                gradient starts its reduce-scatter: BucketOrder._final (data/buckets.py; a hook,
#                called by autograd/backward.py), _start_complete, _start_reduce, HybridSharding
#                (shards.py), the scheme (step/scheme.py), which has the groups from
#                ShardedReplica.__init__
#                the group's worker thread (CallWorker, comm/calls/async_call.py) carries it out:
#                by default reduce_scatter (comm/collectives/ring.py), by Call.exchange
#                (comm/calls/call.py)
#                then waits for the sums, each in this rank's chunk of its bucket: _take_sums
#   finish_step  nothing; in a pipeline (chapter 17) a last backward, of nothing: the sums (several
#                copies: chapter 16; offload: chapter 20)
#   conclude     all-gathers the loss, then calls update
#   update       with `clip` all-gathers the squares of the norm (step/step.py); changes this
#                rank's chunks; starts an all-gather per bucket (ShardedReplica.update, replica.py)


class Zero1(ShardedReplica):
    """A replica of a model whose optimizer is divided among the ranks of a group.

    Its gradients move into buckets.

        zero = Zero1(model, world)      # any Module with loss(inputs, targets, divisor) -> Tensor
        optimizer = AdamW(zero.parameters, lr=1e-3)
        loss = zero.step((inputs, targets), optimizer, clip=1.0)    # the global batch, on each rank
        weights = zero.state_dict()                                 # whole, on each rank

    Args:    model, group, loss, bucket_bytes, algorithm, precision, recorder, scheme: as DDP's.
             shard: how many neighbours share one copy of the state (default: all); store: where
             chunks lie (default: on the device).
    Attributes: parameters: the arguments for the optimizer, this rank's pieces of the weights. The
                others: as ZeroAxis (zero/shards.py).
    Raises:  MismatchError if the replicas do not start equal.
    """

    name = "ZeRO-1"
    update_notes = {"notes": "ZeRO-1 3"}

    def _make_gradients(self) -> None:
        """Buckets, each with this rank's own gradients; the sum over the ranks arrives in this
        rank's chunk."""
        self.buckets = [Bucket(flat.parameters) for flat in self.flats]
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            self.store.keep_gradients(flat, bucket.data[flat.chunk])
        self._pending: deque[tuple[int, Pending]] = deque()  # buckets on their way within the copy

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add gradients into the buckets; in the `last` backward of a step each rank gets the sums
        of its chunks.

        Args:    as DataAxis.backward.
        Cost:    one reduce-scatter a bucket, begun during the last backward; returns when all have
                 ended.
        """
        with self.recorder.span("backward", notes="ZeRO-1 1"):
            deferred = self._bucket_order.backward(
                self.precision, share, dy, defer=defer, reduces=last
            )
        if last:
            with self.recorder.span("wait for gradients", notes="ZeRO-1 2"):
                self._take_sums(wait=True)
                if self.sharing.copies > 1:
                    self.sharing.wait_for_copies()
                self.store.wait_for_gradients()
            self._summed = True
        return deferred

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Add the gradients that a backward has deferred into the buckets."""
        self._bucket_order.backward_weights(self.precision, deferred)

    def finish_step(self) -> None:
        """As DataAxis's; then what has left the device is summed over the copies."""
        super().finish_step()
        if self.sharing.copies > 1:
            self.sum_stored()

    def _start_reduce(self, index: int) -> None:
        """Rank r's chunk of the bucket becomes the sum over all ranks, in its place; the rest keeps
        this rank's own."""
        gradients = self.buckets[index].data
        flat = self.flats[index]
        self.recorder.announce(flat.group.axis, f"reduce_scatter bucket {index}")
        chunk = gradients[flat.chunk]
        pending = self.sharing.start_reduce_scatter(index, flat, gradients, chunk)
        self._pending.append((index, pending))
        self._take_sums(wait=False)

    def _take_sums(self, *, wait: bool) -> None:
        """Sums that are there go to the store, or on to the other copies; `wait`: all of them."""
        while self._pending and (wait or self._pending[0][1].done()):
            index, pending = self._pending.popleft()
            pending.wait()
            flat = self.flats[index]
            gradients = self.buckets[index].data
            if self.store.device_sums(flat) is None:
                self.store.add(flat, gradients[flat.chunk], first=True)
            elif self.sharing.has_copies(flat):
                self.sharing.start_sum_of_copies(index, gradients[flat.chunk], f"bucket {index}")

    def traffic(self, passes: int) -> list[Collective]:
        """A reduce-scatter and an all-gather a bucket, whatever the number of passes."""
        return self.collectives([1] * len(self.flats))
