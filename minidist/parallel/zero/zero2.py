"""Chapter 15 · ZeRO-2: as ZeRO-1, and no rank ever holds a whole gradient.

The idea. A rank needs the summed gradient of its own chunk only, so why keep the rest? As soon as a bucket's last
gradient is final, the bucket is reduce-scattered; each rank adds its chunk of the sum to its shard and frees the
bucket. The whole gradient is computed, but never all of it is there:

    compute         forward | backward: layer 4 | layer 3          | layer 2          | … | wait | own chunk | forward
    communication   gather  |                   | reduce layer 4   | reduce layer 3   | …                    | gather
    buckets held                        4 fills | 4 flies, 3 fills | 3 flies, 2 fills | …   none

Who holds what, Ψ parameters in float32 with Adam (K = 8) on P ranks:

                 DDP     ZeRO-1         ZeRO-2, each rank
    parameters   4Ψ      4Ψ             4Ψ
    gradients    4Ψ      4Ψ             4Ψ/P, and for a while two buckets: one fills, one is in flight
    optimizer    8Ψ      8Ψ/P           8Ψ/P
    together     16Ψ     8Ψ + 8Ψ/P      4Ψ + 12Ψ/P: at most 4 times less; 8 times with K = 12 in mixed precision,
                                        2Ψ + (2+K)Ψ/P. (N4:336 leaves out the 2Ψ, and gives this one for stage 1)

A weight that is used twice, as a tied embedding, holds its bucket from its first gradient to its last. A weight that a
backward will not reach holds back nothing: backward tells before it runs what it will reach (data/bucket_order.py).

Cost, a step and rank, with A backward passes:

    bytes        (A+1)(P-1)/P × 4Ψ   every pass must reduce, since nobody can keep the sum of several; A = 1: as DDP
    messages     (A+1)(P-1) × buckets
    control      two float64: the loss, the squares of the gradient's norm

The notes' steps (N4:349), as they happen here:

    ZeRO-2 1a  each layer's gradients set out when they are computed: here, each bucket's.
    ZeRO-2 1b  and are freed when their sum has arrived. (N4:351 has them wait until they have "fed" the layer before;
               but it is the gradients of activations that do that, never those of weights.)
    ZeRO-2 2   each rank updates its chunk.
    ZeRO-2 3   all-gather of the new weights: it sets out here, and hides behind the next step's forward.

notes:   N0 ZeRO2, N4 §6
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.data.bucket_order import InOrder
from minidist.parallel.data.buckets import BUCKET_BYTES, cut
from minidist.parallel.data.replica_groups import Others, check_equal_owners, owners
from minidist.parallel.step.flat import Flat, Piece, squares_of_shards, sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, part_of
from minidist.parallel.zero.gradient_shards import Scattered
from minidist.parallel.zero.hybrid_sharding import Sharing
from minidist.parallel.zero.parameter_arrival import Arrivals
from minidist.parallel.zero.shard_store import Home


def plain_zero2(model: GPT, new_optimizer: Callable[[list[Piece]], Optimizer], group: Group,
                batches: Iterable[Batch]) -> None:
    """ZeRO-2, parameter by parameter and without overlap; the batches are global, the numbers those of N4:349."""
    runs = []
    for p in model.parameters():
        flat = Flat([p], group)
        weights, mine = flat.join(), np.zeros(flat.owned, flat.dtype)
        runs.append((flat, weights, mine))

        def final(p: Parameter, mine: Array = mine) -> None:
            group.reduce_scatter(p.grad, out=mine, algorithm="ring")                     # 1a sent as soon as final
            p.zero_grad()                                                                # 1b and freed
        p.hooks.append(final)
    optimizer = new_optimizer([flat.pieces(weights[flat.own], mine)[0] for flat, weights, mine in runs])
    for batch in batches:
        part = part_of(batch, size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=batch[1].size).backward()          # 1 the hooks run in here
        optimizer.step()                                                                 # 2 update my chunks
        for flat, weights, _ in runs:
            group.all_gather(weights[flat.own].copy(), out=weights, algorithm="ring")    # 3 all ranks' new weights


# `Zero2` below reduces buckets instead of parameters, and backward goes on meanwhile: at most two buckets of gradients
# are alive, one that fills and one on its way. Several passes add up in the chunks; the all-gathers overlap the next
# forward as in chapter 14.


class Zero2:
    """A replica of a model whose gradients and optimizer are divided among the ranks of a group.

    Args:    model: equal on all ranks; its weights move into vectors. Frozen weights stay as they are.
             group: the ranks that share the batch.
             loss: of a part of the batch (default: `model.loss`).
             bucket_bytes: a bucket's most bytes, and so half of what gradients take beside the shard.
             algorithm: of reduce-scatter and all-gather; pinned, so that the same run gives the same bits.
             shard: how many neighbours share one copy of the state (default: all; zero/hybrid_sharding.py).
             apart: parameters that travel in buckets of their own (data/buckets.py); others: of these, those that
             another group shares, with whom (data/replica_groups.py).
             precision: of weights and update (default: one dtype for all); home: where chunks lie (default: here).
             recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of: this rank's pieces.
             squares: finds the sum of the squares of the whole gradient; another, where a model is cut (chapter 17).
             always: a rank without a row computes too, for others wait for it on their way (chapter 18).
             rows: the ranks that divide a batch's rows; fewer than group, where ranks divide tokens too (chapter 17).
    Raises:  MismatchError if the replicas do not start equal.
    """

    def __init__(self, model: Module, group: Group, *, loss: Loss | None = None, bucket_bytes: int = BUCKET_BYTES,
                 algorithm: str = "ring", shard: int | None = None, apart: Sequence[Sequence[Parameter]] = (),
                 others: Others | None = None, precision: Precision | None = None, home: Home | None = None,
                 recorder: Recorder | None = None) -> None:
        self.model, self.group, self.rows, self.algorithm = model, group, group, algorithm
        self.loss = loss or loss_of(model)
        self.precision, self.always = precision or Precision(), False
        self.recorder = recorder or Silent()
        self.sharing = Sharing(group, shard, algorithm=algorithm, recorder=self.recorder)
        others = others or {}
        check_equal_owners(model.parameters(), group, others, when="before the first step")
        self.flats = [Flat(run, owners(run, self.sharing.shard, others))
                      for run in cut(trainable(model.parameters()), bucket_bytes, apart)]
        self.weights = [flat.join() for flat in self.flats]
        self.home = home or Home()
        self.home.begin(f"rank {group.rank}")
        for index, (flat, weights) in enumerate(zip(self.flats, self.weights, strict=True)):
            self.home.keep(flat, weights[flat.own], f"bucket {index}")
        self.gradients = Scattered(self.flats, self.sharing, home=self.home, algorithm=algorithm,
                                   recorder=self.recorder, what="bucket")
        self.parameters = [piece for flat in self.flats for piece in self.home.pieces(flat, self.precision)]
        self.squares: Callable[[], float] = lambda: squares_of_shards(self.sharing.shard, self.home.squares)
        self.arrivals = Arrivals(self.flats, self.weights, algorithm=algorithm, recorder=self.recorder)
        self._reached = list(range(len(self.flats)))    # runs that the next backward may reach
        self._order = InOrder([flat.parameters for flat in self.flats],
                              lambda number: self.gradients.start(self._reached[number]),
                              who=f"ZeRO-2 rank {group.rank} of {group.size}", by="Zero2.backward")

    # ------------------------------------------------------------------------------------------------- partition

    def part_of(self, batch: Batch) -> Part:
        """This rank's rows of a global batch; views, and perhaps none."""
        return part_of(batch, size=self.rows.size, rank=self.rows.rank)

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """This rank's share of the global mean loss; None without a row. `divisor`: the targets of the whole batch."""
        return self.loss(part, divisor) if len(part.inputs) or self.always else None

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, share: Tensor | None, dy: Array | None = None, *, last: bool = True) -> None:
        """Add the sums of the gradients over the ranks of this copy to the shards; the `last` adds the other copies'.

        Args:    dy: the gradient of a share that is no loss, but what a later stage of a pipeline goes on with.
        Cost:    one reduce-scatter a bucket, begun during backward; returns when all have ended.
        """
        self._order.begin()
        self.gradients.begin(last=last)
        with self.recorder.span("backward", notes="ZeRO-2 1a"):
            if share is not None:
                self.precision.backward(share, dy, surveyed=self._order.expect)
            self._order.finish()
        with self.recorder.span("wait for gradients", notes="ZeRO-2 1b"):
            self.gradients.finish()

    def hold(self) -> None:
        """Backwards come that somebody else runs (chapter 17); then `backward(None)` reduces what they have left."""
        self._order.hold()

    def reach(self, parameters: Collection[int]) -> None:
        """From here on backwards reach runs of these parameters (ids) alone, and reduce no others."""
        self._reached = [index for index, flat in enumerate(self.flats) if id(flat.parameters[0]) in parameters]
        self._order.arrange([self.flats[index].parameters for index in self._reached])

    # ---------------------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (masters, in mixed precision), whole, on the host, by dotted path. Every rank calls it.

        Cost:    one all-gather a bucket, counted under `control`.
        """
        return self.home.state(self.model, self.flats, algorithm=self.algorithm)

    # ------------------------------------------------------------------------------------------------------ step

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    optimizer: made of `self.parameters`; lr: this step's learning rate (None: the optimizer's own).
                 clip: bound of the whole gradient's norm; accumulate: in how many passes the rank takes its rows.
        """
        self.gradients.forget()
        total = 0.0
        for number, part in enumerate(micro_parts(self.part_of(batch), accumulate), start=1):
            with self.recorder.span("forward", rows=len(part.inputs)):
                share = self.forward(part, divisor=batch[1].size)
            self.backward(share, last=number == accumulate)
            total += 0.0 if share is None else float(share.item())
        with self.recorder.span("loss", "communication"):
            loss = sum_in_order(self.group, total)
        self.update(optimizer, lr=lr, clip=clip)
        return loss

    def update(self, optimizer: Optimizer, *, lr: float | None, clip: float | None) -> None:
        """The optimizer's step on this rank's pieces, and the new weights set out; args as `step`."""
        self.arrivals.settle()
        with self.recorder.span("optimizer", notes="ZeRO-2 2"):
            self.precision.update(optimizer, self.squares, lr=lr, clip=clip)
        self.arrivals.start()
