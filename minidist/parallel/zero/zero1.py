"""Chapter 14 · ZeRO-1: as DDP, but each rank keeps the optimizer's state of its share of the weights alone.

The idea. In DDP all ranks make the same step from the same sums, each with a full copy of Adam's m and v. That work and
that memory can be divided: rank r needs the summed gradient of its chunk only, updates that chunk, and hands the new
weights to the others. Since an all-reduce is a reduce-scatter and an all-gather, and the update fits between the two,
nothing more is sent than in DDP:

    DDP       reduce-scatter gradients, all-gather gradients,                 update everything
    ZeRO-1    reduce-scatter gradients,        update own chunk,              all-gather weights

Who holds what, Ψ parameters in float32 with Adam (K = 8 bytes of state a parameter) on P ranks:

                 DDP     ZeRO-1, each rank
    parameters   4Ψ      4Ψ        the whole model
    gradients    4Ψ      4Ψ        own part's; of the own chunk the sum over all ranks
    optimizer    8Ψ      8Ψ/P      of the own chunk
    together     16Ψ     8Ψ + 8Ψ/P: 2.0 times less for many ranks in float32; 4 times with K = 12 in mixed precision,
                         where DDP has 16Ψ and ZeRO-1 4Ψ + 12Ψ/P. A limit: 2.3 times at P = 4 (N0:381 has it for all P)

Chunks are `numpy.array_split`s of each bucket: their edges fall inside parameters, and shards are even to an element a
bucket. Where P does not divide a bucket, the all-gather works on copies: up to two buckets of communication memory.

Cost, a step and rank, whatever the number of backward passes (gradients are added up before they travel):

    bytes        2(P-1)/P × 4Ψ   as DDP: (P-1)/P × 4Ψ in the reduce-scatter, as much in the all-gather
    messages     2(P-1) × buckets
    control      two float64: the loss, the squares of the gradient's norm

The notes' steps (N4:298), as they happen here:

    ZeRO-1 1  each rank computes the whole gradient of its part of the batch.
    ZeRO-1 2  reduce-scatter, bucket by bucket, during backward: rank r gets the sum of chunk r. (N0:335 lets all ranks
              have all sums, an all-reduce; then the weights travel on top of it, and a step costs 3Ψ.)
    ZeRO-1 3  each rank updates its chunk by its share of the optimizer's state.
    ZeRO-1 4  all-gather of the new weights. It sets out here; the next forward waits for each weight as it comes to it.

notes:   N0 ZeRO1, N4 §5
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.data.bucket_order import InOrder
from minidist.parallel.data.buckets import BUCKET_BYTES, make_buckets
from minidist.parallel.data.replica_groups import Others, check_equal_owners, owners
from minidist.parallel.step.flat import Flat, Piece, squares_of_shards, sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, part_of
from minidist.parallel.zero.hybrid_sharding import Sharing
from minidist.parallel.zero.parameter_arrival import Arrivals
from minidist.parallel.zero.shard_store import Home


def plain_zero1(model: GPT, new_optimizer: Callable[[list[Piece]], Optimizer], group: Group,
                batches: Iterable[Batch]) -> None:
    """ZeRO-1 without buckets and without overlap; the batches are global, the numbers those of N4:298."""
    flat = Flat(list(model.parameters()), group)                                     # all weights; one chunk is mine
    weights, mine = flat.join(), np.zeros(flat.owned, flat.dtype)
    optimizer = new_optimizer(flat.pieces(weights[flat.own], mine))                  # states of my chunk alone
    for batch in batches:
        part = part_of(batch, size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=batch[1].size).backward()      # 1 the whole gradient
        gradient = np.empty(flat.size, flat.dtype)
        for p, view in flat.views(gradient):
            view[...] = p.grad
        group.reduce_scatter(gradient, out=mine, algorithm="ring")                   # 2 the sum of my chunk
        optimizer.step()                                                             # 3 update my chunk
        group.all_gather(weights[flat.own].copy(), out=weights, algorithm="ring")    # 4 all ranks' new weights
        model.zero_grad()


# `Zero1` below adds buckets and overlap at both ends: a bucket's reduce-scatter runs while backward computes the next
# gradients, and its all-gather while the next forward computes; a weight that is used waits for its own bucket alone.


class Zero1:
    """A replica of a model whose optimizer is divided among the ranks of a group.

    Args:    model: equal on all ranks; its weights and gradients move into buckets. Frozen weights stay as they are.
             group: the ranks that share the batch.
             loss: of a part of the batch (default: `model.loss`).
             bucket_bytes: a bucket's most bytes.
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
        self.buckets = make_buckets(trainable(model.parameters()), bucket_bytes, apart)
        self.flats = [Flat(run, owners(run, self.sharing.shard, others))
                      for run in (bucket.parameters for bucket in self.buckets)]
        self.weights = [flat.join() for flat in self.flats]
        self.home = home or Home()
        self.home.begin(f"rank {group.rank}")
        for flat, weights, bucket in zip(self.flats, self.weights, self.buckets, strict=True):
            self.home.keep(flat, weights[flat.own], f"bucket {bucket.index}")
            self.home.keep_gradients(flat, bucket.data[flat.own])
        self.parameters = [piece for flat in self.flats for piece in self.home.pieces(flat, self.precision)]
        self.sharing.require_room(self.home.room(flat) is not None for flat in self.flats)
        self._pending: deque[tuple[int, Pending]] = deque()     # buckets on their way within the copy
        self.squares: Callable[[], float] = lambda: squares_of_shards(self.sharing.shard, self.home.squares)
        self.arrivals = Arrivals(self.flats, self.weights, algorithm=algorithm, recorder=self.recorder)
        self._order = InOrder([bucket.parameters for bucket in self.buckets], self._start_reduce,
                              who=f"ZeRO-1 rank {group.rank} of {group.size}", by="Zero1.backward")

    # ------------------------------------------------------------------------------------------------- partition

    def part_of(self, batch: Batch) -> Part:
        """This rank's rows of a global batch; views, and perhaps none."""
        return part_of(batch, size=self.rows.size, rank=self.rows.rank)

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """This rank's share of the global mean loss; None without a row. `divisor`: the targets of the whole batch."""
        return self.loss(part, divisor) if len(part.inputs) or self.always else None

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, share: Tensor | None, *, last: bool = True) -> None:
        """Add gradients into the buckets; in the `last` backward of a step their sums go to who owns them.

        Cost:    one reduce-scatter a bucket, begun during the last backward; returns when all have ended.
        """
        self._order.begin(quiet=not last)
        with self.recorder.span("backward", notes="ZeRO-1 1"):
            if share is not None:
                self.precision.backward(share, surveyed=self._order.expect)
            self._order.finish()
        with self.recorder.span("wait for gradients", notes="ZeRO-1 2"):
            self._take_sums(wait=True)
            self.sharing.settle()
            self.home.settle()

    def hold(self) -> None:
        """A step begins whose backwards somebody else runs (chapter 17); then `backward(None)` sums what has come."""
        self._order.hold()

    def _start_reduce(self, index: int) -> None:
        """Rank r's chunk of the bucket becomes the sum over all ranks, in its place; the rest keeps this rank's own."""
        gradients, own, group = self.buckets[index].data, self.flats[index].own, self.flats[index].group
        self.recorder.announce(group.axis, f"reduce_scatter bucket {index}")
        pending = group.start_reduce_scatter(gradients, out=gradients[own], algorithm=self.algorithm)
        self._pending.append((index, pending))
        self._take_sums(wait=False)

    def _take_sums(self, *, wait: bool) -> None:
        """Chunks whose sum is there go home, or on to the other copies; `wait`: all of them."""
        while self._pending and (wait or self._pending[0][1].done()):
            index, pending = self._pending.popleft()
            pending.wait()
            flat, gradients = self.flats[index], self.buckets[index].data
            if self.home.room(flat) is None:
                self.home.add(flat, gradients[flat.own], first=True)
            if flat.group is self.sharing.shard:
                self.sharing.start_sum(gradients[flat.own], f"bucket {index}")

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
        self.model.zero_grad()
        total, micros = 0.0, micro_parts(self.part_of(batch), accumulate)
        for number, part in enumerate(micros, start=1):
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
        with self.recorder.span("optimizer", notes="ZeRO-1 3"):
            self.precision.update(optimizer, self.squares, lr=lr, clip=clip)
        self.arrivals.start()
