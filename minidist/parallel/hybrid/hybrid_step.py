"""Chapter 17 · The step of a composed plan: a model cut by tensor, context and pipeline, and replicas of what is left.

The idea. Each axis cuts something else, so they can be put into each other like boxes, and each strategy goes on doing
what it does alone. Eight ranks, dp=2, pp=2, tp=2:

                          tp=0   tp=1
    dp=0   pp=0 stage 0    r0     r1      tp   0-1, 2-3, 4-5, 6-7   inside every layer: all-reduces (chapter 12)
           pp=1 stage 1    r2     r3      pp   0-2, 1-3, 4-6, 5-7   between layers: activations (chapter 11)
    dp=1   pp=0 stage 0    r4     r5      dp   0-4, 1-5, 2-6, 3-7   once a step: gradients (chapters 7, 14-16)
           pp=1 stage 1    r6     r7

With cp (chapter 13) there are as many ranks in the place of each, which have the same weights and rows and divide the
tokens; with ep (chapter 18) others again, which divide the experts, and rows as dp does. The axis that talks most is
innermost, where ranks are neighbours and links fast. A rank is first a tensor shard of the model, with some of each
sequence's tokens, of which it keeps its stage, of which it draws its part; then the data axis trains that:

    model       GPT, not drawn -> tensor_parallel or sequence_parallel(tp) -> expert_parallel(ep) -> attention over cp
                -> Pipeline(pp) takes its stages and draws -> DDP or ZeRO, over all ranks that have the same weights:
                dp, ep and cp together, for experts dp and cp
    batch       rows of dp and ep, in accumulate passes, each in microbatches; of them ranks of cp pick their tokens
                (zigzag, or with all-to-all attention consecutive ones); tp ranks of a row see the same ones
    loss        own tokens' over all tokens of the batch: shares, that add up
    gradients   add up where they are, over microbatches and passes; sums over the data axis; then what lies on several
                ranks for another reason, a tied table on both ends of pp, with sequence parallelism norms on all of tp
    norm        every number of the gradient counts at one rank of the mesh
    update      of own weights, with ZeRO of own pieces of them

With sequence parallelism a tp rank has, outside its regions, its part of its cp rank's tokens; that is what it hands on
to the next stage: tp times less than what all of tp would hand on whole.

What must be the same on several ranks, and why it is, to the bit:

    norms, biases of row linears      on all of tp: from gradients that an all-reduce made equal. Over the data axis
                                      they are summed in buckets of their own, so that chunks lie alike on all tp ranks
    key heads, if fewer than tp       on the ranks that look at one: in such buckets too; then the sums, with ZeRO those
                                      of a rank's piece, are added up over these ranks
    a tied token table                on both ends of pp: sums over the data axis are added up over pp, with ZeRO those
                                      of a rank's piece of it; in buckets of its own too
    loss, norm                        on all ranks: shares are added in rank order

Cost, a step: each axis what its chapter says, of what the rank holds (hybrid_costs.py). Without a pipeline the data
axis overlaps backward as in its own chapter; behind one it sends when the last microbatch is through, or with ZeRO-2
and 3 with each of them (hybrid_pipeline.py). What does not go together is refused by Plan (plan_checks.py).

The notes' groups A and B (N0:442-470) are dp=2, pp=2: ranks 0-1 and 2-3 pass activations on, 0-2 and 1-3 add gradients
up. (Their all-reduce takes a mean; here the loss was divided by all tokens before, and gradients are summed.)

notes:   N0 3D Parallelism, 混合并行; N2 3D 并行策略
Source:  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.nn import GPT
from minidist.nn.moe import biases
from minidist.nn.weight_shard import WeightShard, assemble
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel.context.token_shard import TOKENS, own_key, pick
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.replica_groups import check_equal_owners
from minidist.parallel.hybrid.hybrid_cut import cut_model
from minidist.parallel.hybrid.hybrid_pipeline import Data, DataPipeline
from minidist.parallel.hybrid.layer_timing import stage_layers
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.parallel.step.flat import Piece, sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import Batch, Key, Part, micro_parts
from minidist.parallel.tensor.split_model import Summand, add_up, counted_at, summands
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3


class Hybrid:
    """This rank's part of a GPT that a mesh with more axes than dp trains.

    Args:    model: weights not yet drawn; key: of rows, for dropout.
             precision: of weights and update; recorder: is told what runs when.
    Attributes: model: what this rank has of it; data: the data axis's strategy; pipeline: the other, or None.
             parameters: what the optimizer is made of.
    Raises:  PlanError for what does not fit the model; MismatchError if replicas do not start equal.
    """

    # ------------------------------------------------------------------------------------------------- partition

    def __init__(self, model: GPT, mesh: Mesh, plan: Plan, *, seed: int, key: Key, device: str = "cpu",
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        self.model, self.config, self.plan, self.mesh, self.key = model, model.config, plan, mesh, key
        self.precision, self.recorder = precision or Precision(), recorder or Silent()
        self.tp, self.pp, self.cp, self.rows, self.cut = mesh["tp"], mesh["pp"], mesh["cp"], mesh.rows, mesh["pp", "tp"]
        self.ep, self.holders = mesh["ep"], mesh["pp", "ep", "tp"]
        self.shares, self.everybody = mesh["dp", "pp", "ep", "cp"], mesh["dp", "pp", "ep", "cp", "tp"]
        self.tokens, self.carried, self.others = cut_model(model, mesh, plan)
        self.pipeline: DataPipeline | None = None
        if self.pp.size > 1:
            self.pipeline = self._make_pipeline(seed, device)
        elif plan.zero < 3:
            model.initialize(seed, device=device)
        self.data = self._make_data(seed, device)
        self.data.rows, self.data.squares = self.rows, self._squares
        self.data.always = self.data.always or self.ep.size > 1
        if self.pipeline is not None:
            self.pipeline.serve(self.data)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.parameters = self.data.parameters
        self.summands = self._summands()

    def _make_pipeline(self, seed: int, device: str) -> DataPipeline:
        schedule = make_schedule(self.plan.schedule, self.pp.size, self.plan.pieces)
        layers = stage_layers(self.plan.stage_layers, self.config, schedule.stages, self.mesh.world, device=device)
        pipeline = DataPipeline(self.model, self.pp, schedule, of=self.precision, tp=self.tp, key=self.key,
                                seed=None if self.plan.zero == 3 else seed, layers=layers, device=device,
                                recorder=self.recorder)
        pipeline.stages.tokens, pipeline.stages.carried = self.tokens, self.carried
        return pipeline

    def _make_data(self, seed: int, device: str) -> Data:
        """The data axis's strategy, of what the other axes leave this rank."""
        plan, group = self.plan, self.mesh.copies
        options: dict[str, Any] = {"loss": self._loss, "algorithm": plan.algorithm, "precision": self.precision,
                                   "recorder": self.recorder, "others": self.others}
        if plan.zero:
            options["shard"] = plan.shard
        if plan.zero == 3:
            tied = self.model.tokens if self.config.tied else None
            return Zero3(self.model, group, units=[c for _, c in self.model.children() if c is not tied],
                         seed=seed, device=device, free_after_forward=not plan.keep_gathered, apart=self._alike(),
                         whole=biases(self.model),
                         chains=[] if self.pipeline is None else self.pipeline.chains(), **options)
        kinds: dict[int, type[DDP] | type[Zero1] | type[Zero2]] = {0: DDP, 1: Zero1, 2: Zero2}
        return kinds[plan.zero](self.model, group, bucket_bytes=plan.bucket_bytes, apart=self._apart(), **options)

    def _apart(self) -> list[list[Parameter]]:
        """What travels in buckets of its own: of a stage shards, experts, a table at both ends, what ranks of tp share.
        """
        alike, table = ({id(p) for p in some} for some in (self._alike(), self._twice()))
        stages = ([trainable(self.model.parameters())] if self.pipeline is None else
                  [self.pipeline.weights_of(stage) for stage in self.pipeline.stages.layers])
        apart = []
        for weights in stages:
            kinds: dict[tuple[bool, bool, bool], list[Parameter]] = {}
            for p in weights:
                kinds.setdefault((id(p) in alike, id(p) in table, id(p) in self.others), []).append(p)
            apart += [kinds[kind] for kind in sorted(kinds)]
        return apart

    def _whole(self) -> list[Parameter]:
        """The weights that all ranks of tp have whole."""
        if self.tp.size == 1:
            return []
        return [p for p in self.model.parameters() if not isinstance(p, WeightShard)]

    def _shared(self) -> list[WeightShard]:
        """The parts that several ranks of tp hold: key heads, of which there are fewer than ranks."""
        return [p for p in self.model.parameters() if isinstance(p, WeightShard) and p.sharers is not None]

    def _alike(self) -> list[Parameter]:
        """What must lie alike on ranks of tp, to have the same bits: the whole and the shared."""
        return [*self._whole(), *self._shared()]

    def _twice(self) -> list[Parameter]:
        """The token table, where it lies at both ends of the pipeline and this rank is at one."""
        return [self.model.tokens.weight] if self.pipeline is not None and self.pipeline.ends is not None else []

    def _summands(self) -> list[Summand]:
        """What is added up when the data axis has its sums: whole gradients, or with ZeRO this rank's pieces of them.

        A tied table at both ends; key heads that several ranks hold; with sequence parallelism what is whole on tp.
        """
        ends = None if self.pipeline is None else self.pipeline.ends
        found = [Summand(table, ends) for table in self._twice() if ends is not None]
        found += summands(self.weights, self.tp if self.plan.sequence_parallel else None)
        if isinstance(self.data, DDP):
            return found
        pieces = {id(owner): piece for owner, piece in self._pieces()}
        return [summand._replace(parameter=pieces[id(summand.parameter)]) for summand in found]

    def _pieces(self) -> list[tuple[Parameter, Piece]]:
        """With ZeRO: each parameter, and this rank's piece of it."""
        assert not isinstance(self.data, DDP)
        flats = self.data.gradients.flats if isinstance(self.data, Zero3) else self.data.flats
        owners = [parameter for flat in flats for parameter in flat.parameters]
        return list(zip(owners, self.data.parameters, strict=True))

    # ------------------------------------------------------------------------------------------------------ step

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    lr: this step's learning rate (None: the optimizer's own); clip: bound of the whole gradient's norm.
                 accumulate: in how many passes a data rank takes its rows; with a pipeline, each in microbatches.
        """
        if isinstance(self.data, (Zero2, Zero3)):
            self.data.gradients.forget()
        else:
            self.model.zero_grad()
        if self.pipeline is not None:
            self.pipeline.begin()
        share = 0.0
        for number, part in enumerate(micro_parts(self.data.part_of(batch), accumulate), start=1):
            share += self._pass(part, batch, last=number == accumulate)
        if self.pipeline is not None:
            self.pipeline.end()
        with self.recorder.span("add up", "communication"):
            add_up(self.summands)
        self.data.update(optimizer, lr=lr, clip=clip)
        return sum_in_order(self.shares, share)

    def _pass(self, part: Part, batch: Batch, *, last: bool) -> float:
        """Forward and backward of some rows: adds gradients, returns this rank's share of the loss."""
        divisor = batch[1].size
        if self.pipeline is not None:
            return self.pipeline.run(part, divisor=divisor)
        with self.recorder.span("forward", rows=len(part.inputs)):
            if isinstance(self.data, Zero3):
                share: Tensor | None = self.data.forward(part, divisor=divisor, spare=batch)
            else:
                share = self.data.forward(part, divisor=divisor)
        self.data.backward(share, last=last)        # type: ignore[arg-type]
        return 0.0 if share is None else float(share.item())

    def _loss(self, part: Part, divisor: int) -> Tensor:
        """The sum of the losses of this rank's tokens of some rows, over `divisor`."""
        inputs, targets = (pick(array, self.tokens, TOKENS) for array in (part.inputs, part.targets))
        return self.model.loss(inputs, targets, divisor, positions=np.arange(part.inputs.shape[TOKENS]),
                               key=own_key(self.key(part), self.tokens))

    def _squares(self) -> float:
        """The sum of the squares of the whole gradient; each number counts once.

        Cost:    one all-gather of a float64 a rank, under `control`.
        """
        at_second_end = self.pp.rank > 0
        skipped = {id(table) for table in self._twice() if at_second_end}
        if isinstance(self.data, DDP):
            counted = counted_at((p for p in self.weights if id(p) not in skipped
                                  and (self.ep.rank == 0 or id(p) in self.others)), self.tp.rank)
            return sum_in_order(self.holders, sum_of_squares(counted))
        first_copy = self.data.group.rank < self.data.sharing.shard.size
        pieces = [piece.grad for owner, piece in self._pieces()
                  if (first_copy or id(owner) in self.others) and id(owner) not in skipped
                  and (owner.first_sharer() if isinstance(owner, WeightShard) else self.tp.rank == 0)]
        return sum_in_order(self.everybody, sum_of_squares(pieces))

    # ------------------------------------------------------------------------------------------------ evaluation

    def forward_share(self, part: Part, spare: Batch) -> float:
        """This rank's share of the sum of the losses of its rows, without gradients. `spare`: for who has none."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(part, divisor=1)
        if isinstance(self.data, Zero3):
            return float(self.data.forward(part, divisor=1, spare=spare).item())
        return float(self._loss(part, 1).item()) if len(part.inputs) or self.data.always else 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank is the one, of those that share some rows, that counts their tokens."""
        return self.pp.rank == self.pp.size - 1 and self.cp.rank == 0

    # --------------------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (masters, in mixed precision), whole, in the serial layout, on every rank.

        Cost:    gathers over the data axis (ZeRO), tp and pp.
        """
        if self.pipeline is not None:
            return self.pipeline.state_dict()
        return assemble(self.model, self.data.state_dict(), self.tp)

    def check_replicas(self) -> None:
        """Compare what several ranks should hold alike: over the data axis, over tp, and a tied table at both ends.

        Raises:  MismatchError naming the ranks that differ.
        """
        when = "after the last step"
        if self.plan.zero < 3:
            masters = [*self.data.parameters] if isinstance(self.data, DDP) else []
            of_masters = {id(master): self.others[id(weight)] for weight, master in
                          zip(self.weights, masters, strict=False) if id(weight) in self.others}
            check_equal_owners((*self.model.parameters(), *masters), self.data.group, {**self.others, **of_masters},
                               when=when)
            check_equal_replicas(self._whole(), self.tp, when=when)
            shared = self._shared()
            if shared and shared[0].sharers is not None:
                check_equal_replicas(shared, shared[0].sharers, when=when)
            if self.pipeline is not None and self.pipeline.ends is not None:
                check_equal_replicas(self._twice(), self.pipeline.ends, when=when)
