"""Chapter 17 · The step of a composed plan: a model cut by tensor, context and pipeline, and
replicas of each part.

The idea. Each axis cuts something else, so the cuts nest like boxes, and each strategy works as in
its own chapter. Eight ranks, dp=2, pp=2, tp=2:

                          tp=0   tp=1
    dp=0   pp=0 stage 0    r0     r1      tp   0-1, 2-3, 4-5, 6-7   in every layer: all-reduces
           pp=1 stage 1    r2     r3      pp   0-2, 1-3, 4-6, 5-7   between layers: activations
    dp=1   pp=0 stage 0    r4     r5      dp   0-4, 1-5, 2-6, 3-7   once a step: gradients
           pp=1 stage 1    r6     r7

With cp (chapter 13) each rank is replaced by several ranks that have the same weights and rows, and
divide the tokens. With ep (chapter 18) it is replaced by several ranks that divide the experts, and
rows as dp does. The axis that sends most is innermost, where ranks are neighbours and links are
fast. A rank takes its part of the model in this order (parallelize.py):

    model       GPT, not drawn -> TensorParallel or SequenceParallel(tp) -> ExpertParallel(ep) ->
                ContextParallel(cp) -> Pipeline(pp) takes its stages and draws -> DDP or ZeRO, over
                all ranks that have the same weights: dp, ep and cp together, for experts dp and cp
    batch       rows of dp and ep, in accumulate passes, each in microbatches. Ranks of cp take
                their tokens of each row (zigzag, or with all-to-all attention consecutive ones);
                ranks of tp take the same rows and tokens
    loss        each rank's share: its tokens' losses over all tokens of the batch. Shares add up
    gradients   add up in place, over microbatches and passes; then over the data axis; then over
                other ranks that hold the same weight: a tied table on both ends of pp, with
                sequence parallelism norms on all of tp
    norm        every number of the gradient counts at one rank of the mesh
    update      of the rank's weights, with ZeRO of its pieces of them

With sequence parallelism a tp rank has, outside its regions, a part of its cp rank's tokens, and
sends that part to the next stage. These must be equal on several ranks, to the bit, and they are,
for the reason given:

    norms, biases of row linears      on all of tp: from gradients that an all-reduce made equal
    key heads, if fewer than tp       on the ranks that share one, which add up the sums of the data
                                      axis
    a tied token table                on both ends of pp, which do the same
                                      (these three in buckets of their own, so that ZeRO's chunks
                                      have the same edges)
    loss, norm                        on all ranks: shares are added in rank order

Cost, per step: for each axis the formula of its chapter, applied to the rank's part
(hybrid_costs.py). Without a pipeline the data axis overlaps backward as in its own chapter. With a
pipeline it sends after the last microbatch, or with ZeRO-2 and 3 after each microbatch
(zero/staged_zero3.py).

The notes' groups A and B (N0:442-470) are dp=2, pp=2: ranks 0-1 and 2-3 send activations, 0-2 and
1-3 sum gradients. (Their all-reduce takes a mean; here the loss was divided by all tokens before,
and gradients are summed.)

notes:   N0 3D Parallelism, 混合并行; N2 3D 并行策略
Source:  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
         Megatron-LM".
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses
from minidist.device import account
from minidist.device.backend import Array
from minidist.nn import GPT
from minidist.nn.weight_shard import assemble
from minidist.optim import Optimizer
from minidist.parallel.context.context_parallel import ContextParallel
from minidist.parallel.context.sequence_parallel import SequenceParallel
from minidist.parallel.context.token_shard import (
    OwnTokens,
    all_tokens,
    loss_of_tokens,
    within,
)
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.pipeline.stages import StageModel
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.model_axis import ModelAxis, Summand, add_up
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Batch, Counted, Key, Loss, Part, loss_of, part_of
from minidist.parallel.step.strategy import DataAxis, PassLoop
from minidist.parallel.tensor.tensor_parallel import TensorParallel
from minidist.parallel.zero.shards import ShardStore


def plain_hybrid(
    dp: Group,
    pp: Group,
    tp: Group,
    inputs: Array,
    targets: Array,
    up: Array,
    down: Array,
    lr: float,
) -> None:
    """Run one step of SGD on dp × pp × tp ranks, in place: one MLP per stage; a rank has some of
    its columns and rows.

    The numbers are those of N0:452.
    """
    # 0 rows: only by the dp coordinate
    mine = np.array_split(np.arange(len(inputs)), dp.size)[dp.rank]
    # 1.1 the first half's activations
    x = inputs[mine] if pp.rank == 0 else pp.recv(src=pp.rank - 1)
    inner = np.maximum(x @ up, 0)  # up: own columns of the own stage
    y = tp.all_reduce(inner @ down, algorithm="ring")  # down: own rows; g of chapter 12
    if pp.rank < pp.size - 1:
        pp.send(y, dst=pp.rank + 1)  # 1.2 the next stage continues
        dy = pp.recv(src=pp.rank + 1)  # 1.3 its gradient returns
    else:
        dy = 2 * (y - targets[mine]) / targets.size  # divided by the whole batch
    dinner = (dy @ down.T) * (inner > 0)
    dx = tp.all_reduce(dinner @ up.T, algorithm="ring")  # f of chapter 12
    if pp.rank > 0:
        pp.send(dx, dst=pp.rank - 1)
    for weights, gradient in ((up, x.T @ dinner), (down, inner.T @ dy)):  # 2.1 local gradients
        # 2.2 their sum, 2.3 the same update
        weights -= lr * dp.all_reduce(gradient, algorithm="ring")


# The real one builds a GPT in the same order, from the parts that the plan names: any axes, a
# schedule on pp, DDP or a stage of ZeRO on dp, also experts and context. It adds the facts that the
# parts must agree on: which ranks hold which weights whole, which ranks sum which gradients, and
# one norm of the model for clipping. One step; the numbers are those of plain_hybrid:
#   begin_step    the data axis forgets its gradients; no message
#   part_of    0  this rank's rows, by its coordinates on dp and ep
#   run           once for each pass:
#     with pp     1.1 to 1.3 and 2.1: Pipeline.run splits the rows into microbatches, and Executor
#                 runs the schedule; StagePass (pipeline/stages.py) computes each forward and
#                 backward, with cp or sequence parallelism on TokenStages (token_stages.py). A
#                 stage's backward is the data axis's, never as the `last`
#     without     DataAxis.run: forward, then backward; the `last` (ZeRO-2 and 3: each) starts the
#                 sums (2.2)
#   finish_step   2.2: with pp, DDP and ZeRO-1 start their sums here and wait for them
#                 (DataAxis.finish_step: a last backward of nothing); ZeRO-2 and 3 have reduced in
#                 each backward
#                 then add_up sums what ranks of other axes sum too: a tied table, norms, key heads
#   conclude      with `clip`, the norm of what the ranks of norm_group count; 2.3 update; then the
#                 loss's shares are gathered over loss_group
#
# The all-reduces of tp run inside forward and backward (tensor/tensor_layers.py).


class Hybrid(PassLoop):
    """This rank's part of a GPT that a mesh with more axes than dp trains (parallelize.py makes
    it).

    Args:    model: this rank's part of it; axes: the axes that divide it, the pipeline first;
             data_axis: trains the replicas of this part, by `own_loss`; pipeline: None without
             stages. The others as Trainer and parallelize.
    Attributes: flats_with_sums: the runs of the data axis that have a gradient to be summed over
                ranks of other axes too.
                summands: these gradients, each with the group that sums it.
                counted: the gradients that this rank counts in the norm.
    """

    pipeline: StageModel | None

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        plan: Plan,
        axes: Sequence[ModelAxis],
        data_axis: DataAxis,
        pipeline: StageModel | None = None,
        *,
        recorder: Recorder,
        store: ShardStore,
    ) -> None:
        self.model: GPT = model
        self.mesh = mesh
        self.plan = plan
        self.axes = axes
        self.data = data_axis
        self.pipeline = pipeline
        self.loss = data_axis.loss
        self.precision = data_axis.precision
        self.recorder = recorder
        self.store = store
        # the first use of a group splits the world (mesh.py): all ranks name them in this order
        self.row_group = mesh.rows
        self.replica_group = mesh["pp", "tp"]
        self.loss_group = mesh["dp", "pp", "ep", "cp"]  # not tp: its ranks have the same loss
        self.everyone = mesh["dp", "pp", "ep", "cp", "tp"]
        # a whole gradient is the same along dp and cp; with ZeRO they have pieces of it
        self.norm_group = self.everyone if data_axis.divides_state else mesh["pp", "ep", "tp"]
        if pipeline is not None:
            pipeline.use(data_axis)
        self.parameters = data_axis.parameters
        self.summands = self._summands()
        self.counted = Counted(
            [piece for owner, piece in data_axis.updated() if self._counts(owner)], self.norm_group
        )

    @property
    def data_axis(self) -> DataAxis:
        """The strategy of the data axis."""
        return self.data

    def _summands(self) -> list[Summand]:
        """Return the gradients to add up when the data axis has its sums: whole, or with ZeRO this
        rank's pieces of them."""
        found = [
            (owner, piece, group)
            for axis in self.axes
            for owner, piece in self.data.updated()
            if (group := axis.sums_over(owner)) is not None and group.size > 1
        ]
        self._sums_of = [(owner, group) for owner, _, group in found]
        owners = {owner for owner, _ in self._sums_of}
        self.flats_with_sums = [flat for flat in self.data.flats if owners & {*flat.parameters}]
        return [Summand(piece, group) for _, piece, group in found]

    # ----------------------------------------------------------------------------------------- step

    def part_of(self, batch: Batch) -> Part:
        """Return the rows of a global batch that this rank works on, with the other ranks of its
        tp, cp and pp."""
        return part_of(batch, size=self.row_group.size, rank=self.row_group.rank)

    def begin_step(self) -> None:
        """Begin a step, as PassLoop.begin_step."""
        self.data.begin_step()

    def run(self, part: Part, *, divisor: int, last: bool) -> Tensor | float | None:
        """Run forward and backward of some rows, as PassLoop.run; through the pipeline if there is
        one."""
        if self.pipeline is None:
            return self.data.run(part, divisor=divisor, last=last)
        self.data.begin_pass()
        return self.pipeline.run(part, divisor=divisor, last=last)

    def finish_step(self) -> None:
        """Sum the gradients over the data axis, then those that other ranks add to."""
        self.data.finish_step()
        if self.summands:
            # store: with an offload the gradients of ZeRO's pieces lie on the host, or are read
            # there from disk, and are summed there
            with (
                self.recorder.span("add up", "communication"),
                self.store.gradients(self.flats_with_sums),
            ):
                add_up(self.summands)

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """Make the update, then return the loss, as PassLoop.conclude. With `clip` ranks of tp
        compare their batches with the norm, and the others learn the result with the loss.

        Cost:    as DataAxis.conclude, and gradient_norm with `clip`.
        """
        counted = replace(self.counted, batch=batch)  # the ranks compare the batch with the norm
        self.data.update(optimizer, lr=lr, clip=clip, counted=counted)
        return LateLoss(add_losses(self.loss_group, share.wait(), batch, everyone=self.everyone))

    def _counts(self, owner: Parameter) -> bool:
        """Return whether this rank counts the gradient, or its piece of it, in the norm."""
        first = self.mesh.coordinates["ep"] == 0  # all of ep hold what experts do not divide
        copy = self.data.first_copy if self.data.divides_state else first
        return (copy or owner.shared_by is not None) and all(
            axis.counts(owner) for axis in self.axes
        )

    # ----------------------------------------------------------------------------------- evaluation

    def evaluating(self) -> AbstractContextManager[Any]:
        return self.data.evaluating()

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """Return the ranks of dp and ep, which divide the rows."""
        return self.row_group, self.row_group.size

    def loss_share(self, part: Part) -> float:
        """Return this rank's share of the sum of the losses of its rows, without gradients."""
        if self.pipeline is None:
            return self.data.loss_share(part)
        self.data.begin_pass()
        return self.pipeline.evaluate(part, divisor=1)

    def sum_shares(self, loss: float, tokens: int, group: Group) -> tuple[float, float]:
        """Return losses and tokens of all ranks that have a share of the loss; of ranks that share
        rows only one counts their tokens."""
        counts = (self.pipeline is None or self.pipeline.last) and (
            self.mesh.coordinates["cp"] == 0
        )
        return super().sum_shares(loss, tokens * counts, self.loss_group)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all weights, as Strategy.state_dict, on every rank. Cost: gathers over
        the data axis (ZeRO), tp and pp."""
        away = self.plan.offload != "none"  # then it is read from the host, without the device
        with account.use(self.store.host if away else account.current()):
            own = self.data.state_dict()
        # the copies are on the host: a whole model may not fit the device
        with account.use(self.store.host):
            if self.pipeline is not None:
                return self.pipeline.joined(own)
            return assemble(self.model, own, self.mesh["tp"])

    def frozen(self, *, changes: bool) -> Iterator[tuple[Parameter, range, Array]]:
        return self.data.frozen(changes=changes)

    def summand_of(self, parameter: Parameter) -> tuple[int, int]:
        number = 0
        count = 1
        for group in (group for owner, group in self._sums_of if owner is parameter):
            number = number * group.size + group.rank
            count = count * group.size
        return number, count

    def state_replaced(self) -> None:
        self.data.state_replaced()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare the weights that several ranks hold, as Strategy.check_replicas: over the data
        axis, over tp, and a tied table at both ends."""
        self.data.check_replicas(self.mesh.copies, when=when)
        if self.plan.zero < 3:  # with ZeRO-3 no rank holds weights whole
            for axis in self.axes:
                axis.check_shared(when=when)


def tokens_of(axes: Sequence[ModelAxis]) -> tuple[OwnTokens, OwnTokens]:
    """Return the tokens of a sequence that this rank works on, and the tokens whose activations it
    passes on between layers: with sequence parallelism a part of the first. Both are `all_tokens`
    if the ranks divide none."""
    tokens: OwnTokens = all_tokens
    carried: OwnTokens = all_tokens
    for axis in axes:
        if isinstance(axis, ContextParallel):
            tokens = axis.own_tokens
        elif isinstance(axis, SequenceParallel):
            carried = axis.own_tokens
    return tokens, carried if tokens is all_tokens else within(tokens, carried)


def own_loss(model: GPT, axes: Sequence[ModelAxis], key: Key) -> Loss:
    """Return the loss by which a rank trains a model that `axes` divide: of its own tokens."""
    tokens, _ = tokens_of(axes)
    return loss_of(model, key) if tokens is all_tokens else loss_of_tokens(model, key, tokens)


def lay_out(model: GPT, axes: Sequence[ModelAxis], pipeline: StageModel | None) -> None:
    """Give parameters their layouts: they say which parameters a data axis may put into one bucket
    (`cut` in data/buckets.py reads them).

    If several ranks of another axis hold a weight, ZeRO's chunks must have the same edges on each
    of them. So weights are separated by stage; by whether ranks of tp hold the same; a tied table;
    experts.
    """
    alike = [axis.held_alike for axis in axes if isinstance(axis, TensorParallel)]
    stages = (
        [trainable(model.parameters())]
        if pipeline is None
        else [pipeline.weights_of(stage) for stage in pipeline.stages.layers]
    )
    for number, weights in enumerate(stages):
        for p in weights:
            table = pipeline is not None and pipeline.has_table(p)
            p.layout = (number, any(held(p) for held in alike), table, p.shared_by is not None)
