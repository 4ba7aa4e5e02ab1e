"""Chapter 17 · The step of a composed plan: a model cut by tensor, context and pipeline, and
replicas of what is left.

The idea. Each axis cuts something else, so the cuts nest like boxes, and each strategy does what it
does alone. Eight ranks, dp=2, pp=2, tp=2:

                          tp=0   tp=1
    dp=0   pp=0 stage 0    r0     r1      tp   0-1, 2-3, 4-5, 6-7   inside every layer: all-reduces
           (chapter 12)
           pp=1 stage 1    r2     r3      pp   0-2, 1-3, 4-6, 5-7   between layers: activations
                                                                    (chapter 11)
    dp=1   pp=0 stage 0    r4     r5      dp   0-4, 1-5, 2-6, 3-7   once a step: gradients (chapters
           7, 14-16)
           pp=1 stage 1    r6     r7

With cp (chapter 13) several ranks stand in the place of each; they have the same weights and rows,
and divide the tokens. With ep (chapter 18) several others do; they divide the experts, and rows as
dp does. The axis that sends most is innermost, where ranks are neighbours and links are fast. A
rank takes its part of the model in this order:

    model       GPT, not drawn -> tensor_parallel or sequence_parallel(tp) -> expert_parallel(ep) ->
                attention over cp -> Pipeline(pp) takes its stages and draws -> DDP or ZeRO, over
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
sends that part to the next stage. What must be equal on several ranks, to the bit, and why it is:

    norms, biases of row linears      on all of tp: from gradients that an all-reduce made equal
    key heads, if fewer than tp       on the ranks that share one, which add up the sums of the data
                                      axis
    a tied token table                on both ends of pp, which do the same
                                      (these three in buckets of their own, so that ZeRO's chunks
                                      have the same edges)
    loss, norm                        on all ranks: shares are added in rank order

Cost, a step: each axis what its chapter says, of what the rank holds (hybrid_costs.py). Without a
pipeline the data axis overlaps backward as in its own chapter. With one it sends after the last
microbatch, or with ZeRO-2 and 3 after each of them (hybrid_cut.py).

The notes' groups A and B (N0:442-470) are dp=2, pp=2: ranks 0-1 and 2-3 pass activations on, 0-2
and 1-3 add gradients up. (Their all-reduce takes a mean; here the loss was divided by all tokens
before, and gradients are summed.)

notes:   N0 3D Parallelism, 混合并行; N2 3D 并行策略
Source:  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
         Megatron-LM".
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses, add_squares, targets_in
from minidist.device import account
from minidist.device.backend import Array, index_range
from minidist.nn import GPT
from minidist.nn.weight_shard import WeightShard, assemble
from minidist.optim import Optimizer
from minidist.parallel.context.token_shard import TOKENS, own_key, pick
from minidist.parallel.hybrid.hybrid_cut import DataPipeline, cut_model
from minidist.parallel.hybrid.layer_timing import stage_layers
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.strategies import make_data_axis
from minidist.parallel.memory.offload_costs import require_disk
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import Batch, Key, Part, micro_parts, part_of
from minidist.parallel.step.strategy import DataAxis, Strategy
from minidist.parallel.tensor.split_model import Summand, add_up, counts_at, summands
from minidist.parallel.zero.shards import ShardStore


class Hybrid(Strategy):
    """This rank's part of a GPT that a mesh with more axes than dp trains.

    Args:    as Trainer; model: weights not yet drawn; key: of rows, for dropout; store: where
             ZeRO's chunks lie.
    Attributes: model: what this rank has of it; data_axis: its strategy; pipeline: the other, or
    None.
                outside: the runs of the data axis that have a gradient to be summed over other
                ranks too.
    Raises:  PlanError for what does not fit the model; MismatchError if replicas do not start
             equal.
    """

    pipelines: type[DataPipeline] = DataPipeline  # pipedream_step.py has another

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        plan: Plan,
        *,
        seed: int,
        key: Key,
        device: str = "cpu",
        precision: Precision | None = None,
        recorder: Recorder | None = None,
        store: ShardStore | None = None,
    ) -> None:
        self.model: GPT = model
        self.store = store or ShardStore()
        self.config = model.config
        self.plan = plan
        self.mesh = mesh
        self.key = key
        self.loss = self._loss
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.tp = mesh["tp"]
        self.pp = mesh["pp"]
        self.cp = mesh["cp"]
        self.rows = mesh.rows
        self.cut = mesh["pp", "tp"]
        self.ep = mesh["ep"]
        self.holders = mesh["pp", "ep", "tp"]
        self.shares = mesh["dp", "pp", "ep", "cp"]
        self.everyone = mesh["dp", "pp", "ep", "cp", "tp"]
        self.tokens, self.carried = cut_model(model, mesh, plan)
        self.pipeline: DataPipeline | None = None
        if self.pp.size > 1:
            self.pipeline = self._make_pipeline(seed, device)
        elif plan.zero < 3:
            model.initialize(seed, device=device)
        self.ends = None if self.pipeline is None else self.pipeline.ends
        self._lay_out()
        if plan.offload == "all":
            require_disk(plan, model, self.store, f"rank {mesh.world.rank}")
        self._data_axis = make_data_axis(
            model,
            mesh.copies,
            plan,
            seed=seed,
            device=device,
            precision=self.precision,
            recorder=self.recorder,
            store=self.store,
        )
        # others wait for a rank without rows
        self.always = self.data_axis.computes_without_rows or self.ep.size > 1
        if self.pipeline is not None:
            self.pipeline.serve(self.data_axis, always=self.always)
        self.parameters = self.data_axis.parameters
        self.summands = self._summands()
        self._batch: Batch  # of the step, which the ranks compare when they add up the norm

    @property
    def data_axis(self) -> DataAxis:
        """The strategy of the data axis."""
        return self._data_axis

    def _make_pipeline(self, seed: int, device: str) -> DataPipeline:
        schedule = make_schedule(
            self.plan.schedule, self.pp.size, self.plan.pieces, chunks=self.plan.stages_per_rank
        )
        layers = stage_layers(
            self.plan.stage_layers, self.config, schedule.stages, self.mesh.world, device=device
        )
        pipeline = self.pipelines(
            self.model,
            self.pp,
            schedule,
            of=self.precision,
            tp=self.tp,
            key=self.key,
            seed=None if self.plan.zero == 3 else seed,
            layers=layers,
            device=device,
            recorder=self.recorder,
        )
        pipeline.stages.tokens = self.tokens
        pipeline.stages.carried = self.carried
        return pipeline

    def _lay_out(self) -> None:
        """Give parameters their layouts: by stage; equal on ranks of tp; a table at both ends;
        experts."""
        alike = set(self._alike())
        table = set(self._tables())
        stages = (
            [trainable(self.model.parameters())]
            if self.pipeline is None
            else [self.pipeline.weights_of(stage) for stage in self.pipeline.stages.layers]
        )
        for number, weights in enumerate(stages):
            for p in weights:
                p.layout = (number, p in alike, p in table, p.shared_by is not None)

    def _whole(self) -> list[Parameter]:
        """The weights that all ranks of tp have whole."""
        if self.tp.size == 1:
            return []
        return [p for p in self.model.parameters() if not isinstance(p, WeightShard)]

    def _shared(self) -> list[WeightShard]:
        """The parts that several ranks of tp hold: key heads, of which there are fewer than
        ranks."""
        return [
            p
            for p in self.model.parameters()
            if isinstance(p, WeightShard) and p.sharers is not None
        ]

    def _alike(self) -> list[Parameter]:
        """The weights that need the same layout on every rank of tp, for the same bits: the whole
        and the shared."""
        return [*self._whole(), *self._shared()]

    def _twice(self) -> list[Parameter]:
        """The token table, where it lies at both ends of the pipeline and this rank is at one."""
        return [self.model.tokens.weight] if self.ends is not None else []

    def _tables(self) -> list[Parameter]:
        """The token table, where a tied output and the embedding are different stages and this rank
        has one or both."""
        ends = (
            self.config.tied
            and self.pipeline is not None
            and (self.pipeline.first or self.pipeline.last)
        )
        return [self.model.tokens.weight] if ends else []

    def _summands(self) -> list[Summand]:
        """The gradients to add up when the data axis has its sums: whole, or with ZeRO this rank's
        pieces of them."""
        updated = self.data_axis.updated()
        found = [Summand(table, self.ends) for table in self._twice() if self.ends is not None]
        found += summands(
            [owner for owner, _ in updated], self.tp if self.plan.sequence_parallel else None
        )
        self._outside = [(summand.parameter, summand.group) for summand in found]
        self.outside = [
            flat
            for flat in self.data_axis.flats
            if {*flat.parameters} & {owner for owner, _ in self._outside}
        ]
        pieces: dict[Any, Any] = dict(updated)
        return [summand._replace(parameter=pieces[summand.parameter]) for summand in found]

    # ----------------------------------------------------------------------------------------- step

    def part_of(self, batch: Batch) -> Part:
        """The rows of a global batch that this rank works on, with the other ranks of its tp, cp
        and pp."""
        return part_of(batch, size=self.rows.size, rank=self.rows.rank)

    def step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> float:
        """One step on the *global* batch; in a pipeline each pass has microbatches. Args, Returns:
        as Strategy.step."""
        self._batch = batch
        self.data_axis.begin_step()
        share = 0.0
        for number, part in enumerate(micro_parts(self.part_of(batch), accumulate), start=1):
            share += self._pass(part, targets_in(batch), last=number == accumulate)
        self.data_axis.finish_step()
        with self.recorder.span("add up", "communication"), self.store.gradients(self.outside):
            add_up(self.summands)
        self.data_axis.update(optimizer, lr=lr, clip=clip, squares=self.squares)
        return add_losses(self.shares, share, batch, everyone=self.everyone)

    def _pass(self, part: Part, divisor: int, *, last: bool) -> float:
        """Forward and backward of some rows: adds gradients, returns this rank's share of the
        loss."""
        self.data_axis.begin_pass()
        if self.pipeline is not None:
            return self.pipeline.run(part, divisor=divisor)
        with self.recorder.span("forward", rows=len(part.inputs)):
            share = self.loss(part, divisor) if len(part.inputs) or self.always else None
        self.data_axis.backward(share, last=last)
        return 0.0 if share is None else float(share.item())

    def _loss(self, part: Part, divisor: int) -> Tensor:
        """The sum of the losses of this rank's tokens of some rows, over `divisor`."""
        inputs, targets = (
            pick(array, self.tokens, TOKENS) for array in (part.inputs, part.targets)
        )
        return self.model.loss(
            inputs,
            targets,
            divisor,
            key=own_key(self.key(part), self.tokens),
            positions=index_range(part.inputs.shape[TOKENS]),
        )

    def squares(self) -> float:
        """The sum of the squares of the whole gradient; each number counts once. Cost: as
        add_squares.

        Whole gradients are equal over dp and cp: the ranks of pp, ep and tp add theirs up. Pieces
        lie on all ranks.
        """
        divided = self.data_axis.divides_state
        counts = self.data_axis.first_copy if divided else self.ep.rank == 0
        # counts at the first end
        skipped = {table for table in self._twice() if self.pp.rank > 0}
        counted = [
            piece
            for owner, piece in self.data_axis.updated()
            if (counts or owner.shared_by is not None)
            and owner not in skipped
            and counts_at(owner, self.tp.rank)
        ]
        holders = self.everyone if divided else self.holders
        return add_squares(holders, self.store.squares(counted), self._batch)

    # ----------------------------------------------------------------------------------- evaluation

    def evaluating(self) -> AbstractContextManager[Any]:
        return self.data_axis.evaluating()

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """The ranks of dp and ep divide the rows."""
        return self.rows, self.rows.size

    def loss_share(self, part: Part) -> float:
        """This rank's share of the sum of the losses of its rows, without gradients."""
        self.data_axis.begin_pass()
        if self.pipeline is not None:
            return self.pipeline.evaluate(part, divisor=1)
        return float(self.loss(part, 1).item()) if len(part.inputs) or self.always else 0.0

    def sum_shares(self, loss: float, tokens: int, group: Group) -> tuple[float, float]:
        """Over all ranks that have a share of the loss; of ranks that share rows one counts their
        tokens."""
        counts = (self.pipeline is None or self.pipeline.last) and self.cp.rank == 0
        return super().sum_shares(loss, tokens * counts, self.shares)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As Strategy's, on every rank. Cost: gathers over the data axis (ZeRO), tp and pp."""
        away = self.plan.offload != "none"  # then it comes from the host, and touches no device
        with account.use(self.store.host if away else account.current()):
            if self.pipeline is not None:
                return self.pipeline.state_dict()
            return assemble(self.model, self.data_axis.state_dict(), self.tp)

    def frozen(self, *, changes: bool) -> Iterator[tuple[Parameter, range, Array]]:
        return self.data_axis.frozen(changes=changes)

    def summand_of(self, parameter: Parameter) -> tuple[int, int]:
        number = 0
        count = 1
        for group in (group for owner, group in self._outside if owner is parameter):
            number = number * group.size + group.rank
            count = count * group.size
        return number, count

    def state_replaced(self) -> None:
        self.data_axis.state_replaced()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """As Strategy's, of what several ranks hold alike: over the data axis, over tp, a tied
        table at both ends."""
        self.data_axis.check_replicas(self.data_axis.group, when=when)
        if self.plan.zero == 3:  # no rank holds weights whole
            return
        check_equal_replicas(self._whole(), self.tp, when=when)
        shared = self._shared()
        if shared and shared[0].sharers is not None:
            check_equal_replicas(shared, shared[0].sharers, when=when)
        if self.ends is not None:
            check_equal_replicas(self._twice(), self.ends, when=when)
