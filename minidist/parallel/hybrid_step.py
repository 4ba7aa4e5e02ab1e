"""Chapter 17 · The step of a composed plan: a model cut by tensor and by pipeline, and replicas of what that leaves.

The idea. Each axis cuts something else, so they can be put into each other like boxes, and each strategy goes on doing
what it does alone. Eight ranks, dp=2, pp=2, tp=2:

                          tp=0   tp=1
    dp=0   pp=0 stage 0    r0     r1      tp   0-1, 2-3, 4-5, 6-7   inside every layer: all-reduces (chapter 12)
           pp=1 stage 1    r2     r3      pp   0-2, 1-3, 4-6, 5-7   between layers: activations (chapter 11)
    dp=1   pp=0 stage 0    r4     r5      dp   0-4, 1-5, 2-6, 3-7   once a step: gradients (chapters 7, 14-16)
           pp=1 stage 1    r6     r7

The axis that talks most is innermost, where ranks are neighbours and links fast. A rank is first a tensor shard of the
model, of which it keeps its stage, of which it draws its part; then the data axis is given that as the model to train:

    model       GPT, not drawn -> tensor_parallel(tp) -> Pipeline(pp) takes its stages and draws -> DDP or ZeRO (dp)
    batch       rows of dp, in accumulate passes, each in microbatches; tp ranks of a row see the same tokens
    gradients   add up where they are, over microbatches and passes; then sums over dp; tied ends over pp
    norm        every number of the gradient counts at one rank of the mesh
    update      of own weights, with ZeRO of own pieces of them

What must be the same on several ranks, and why it is, to the bit:

    norms, biases of row linears      on all of tp: from gradients that an all-reduce made equal. Over dp they are
                                      summed in buckets of their own, so that chunks lie alike on all tp ranks
    a tied token table                on both ends of pp: with DDP its sums over dp are added up over pp; with ZeRO-1
                                      the other way round, for a rank then has a part alone; in buckets of its own too
    loss, norm                        on all ranks: shares are added in rank order

Cost, a step: each axis what its chapter says, of what the rank holds (elements_sent). Without a pipeline the data axis
overlaps backward as in its own chapter; behind one it sends when the last microbatch is through.

What does not go together is refused by Plan: ZeRO-2 and 3 with a pipeline (every microbatch would have to reduce, or
gather, anew: m times the traffic, or no memory saved), and others there.

The notes' groups A and B (N0:442-470) are dp=2, pp=2: ranks 0-1 and 2-3 pass activations on, 0-2 and 1-3 add gradients
up. (Their all-reduce takes a mean; here the loss was divided by all tokens before, and gradients are summed.)

notes:   N0 3D Parallelism, 混合并行; N2 3D 并行策略
Source:  Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from minidist.nn import GPT, GPTConfig
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel import tensor_parallel as tensor
from minidist.parallel.accumulation import micro_parts
from minidist.parallel.common.flat import sum_in_order
from minidist.parallel.common.precision import Precision
from minidist.parallel.common.recorder import Recorder, Silent
from minidist.parallel.common.replicas import check_equal_replicas
from minidist.parallel.common.shards import WeightShard, add_up, assemble, counted_at, summands
from minidist.parallel.common.update import Batch, Key, Loss, Part, zero_unused
from minidist.parallel.ddp import DDP
from minidist.parallel.mesh import Mesh
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.plan import Plan
from minidist.parallel.schedules import make_schedule
from minidist.parallel.zero1 import Zero1
from minidist.parallel.zero2 import Zero2
from minidist.parallel.zero3 import Zero3
from minidist.tensor import Parameter, Tensor, no_grad


class Hybrid:
    """This rank's part of a GPT that a mesh with pp > 1 or tp > 1 trains.

    Args:    model: weights not yet drawn; loss: of a part, where there is no pipeline; key: for dropout, where one is.
             precision: of weights and update; recorder: is told what runs when.
    Attributes: model: what this rank has of it; data: the data axis's strategy; pipeline: the other, or None.
             parameters: what the optimizer is made of.
    Raises:  PlanError for what does not fit the model; MismatchError if replicas do not start equal.
    """

    # ------------------------------------------------------------------------------------------------- partition

    def __init__(self, model: GPT, mesh: Mesh, plan: Plan, *, seed: int, loss: Loss, key: Key, device: str = "cpu",
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        self.model, self.config, self.plan = model, model.config, plan
        self.precision, self.recorder = precision or Precision(), recorder or Silent()
        self.tp, self.pp, self.cut = mesh["tp"], mesh["pp"], mesh["pp", "tp"]
        self.shares, self.everybody = mesh["dp", "pp", "ep", "cp"], mesh["dp", "pp", "ep", "cp", "tp"]
        if self.tp.size > 1:
            tensor.tensor_parallel(model, self.tp)
        self.pipeline: Pipeline | None = None
        if self.pp.size > 1:
            schedule = make_schedule(plan.schedule, self.pp.size, plan.pieces)
            self.pipeline = Pipeline(model, self.pp, schedule, seed=seed, device=device, key=key,
                                     precision=_Inner(self), recorder=recorder)
        elif plan.zero < 3:
            model.initialize(seed, device=device)
        self.data = self._make_data(mesh, loss, seed, device)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.summands = summands(self.weights)
        self.parameters = self.data.parameters
        self.data.squares = self._squares

    def _make_data(self, mesh: Mesh, loss: Loss, seed: int, device: str) -> DDP | Zero1 | Zero2 | Zero3:
        plan: Plan = self.plan
        options: dict[str, Any] = {"loss": loss, "algorithm": plan.algorithm, "precision": self.precision,
                                   "recorder": self.recorder}
        if plan.zero:
            options["shard"] = plan.shard
        if plan.zero == 3:
            tied = self.model.tokens if self.config.tied else None
            return Zero3(self.model, mesh.copies, units=[c for _, c in self.model.children() if c is not tied],
                         seed=seed, device=device, free_after_forward=not plan.keep_gathered, **options)
        table = self._twice()
        whole = [p for p in self._whole() if p.requires_grad]
        kinds: dict[int, type[DDP] | type[Zero1] | type[Zero2]] = {0: DDP, 1: Zero1, 2: Zero2}
        return kinds[plan.zero](self.model, mesh.copies, bucket_bytes=plan.bucket_bytes,
                                apart=[some for some in (whole, table) if some], **options)

    def _whole(self) -> list[Parameter]:
        """The weights that all ranks of tp have whole."""
        if self.tp.size == 1:
            return []
        return [p for p in self.model.parameters() if not isinstance(p, WeightShard)]

    def _twice(self) -> list[Parameter]:
        """The token table, where it lies at both ends of the pipeline and this rank is at one."""
        return [self.model.tokens.weight] if self.pipeline is not None and self.pipeline.ends is not None else []

    # ------------------------------------------------------------------------------------------------------ step

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    lr: this step's learning rate (None: the optimizer's own); clip: bound of the whole gradient's norm.
                 accumulate: in how many passes a data rank takes its rows; with a pipeline, each in microbatches.
        """
        if self.pipeline is None and not self.summands:
            return self.data.step(batch, optimizer, lr=lr, clip=clip, accumulate=accumulate)
        assert isinstance(self.data, (DDP, Zero1))
        self.model.zero_grad()
        self.data.hold()
        share = 0.0
        for part in micro_parts(self.data.part_of(batch), accumulate):
            share += self._pass(part, batch[1].size)
        if isinstance(self.data, Zero1):
            self._sum_ends()
        self.data.backward(None)
        if isinstance(self.data, DDP):
            self._sum_ends()
        add_up(self.summands)
        self.data.update(optimizer, lr=lr, clip=clip)
        return sum_in_order(self.shares, share)

    def _pass(self, part: Part, divisor: int) -> float:
        """Forward and backward of some rows: adds gradients, returns this rank's share of the loss."""
        if self.pipeline is not None:
            return self.pipeline.run(part, divisor=divisor)
        share = self.data.forward(part, divisor=divisor)    # type: ignore[call-arg]
        if share is None:
            return 0.0
        self.precision.backward(share)
        return float(share.item())

    def _sum_ends(self) -> None:
        """The sum of a tied table's two gradients, at both ends."""
        if self.pipeline is not None:
            zero_unused(self._twice())
            self.pipeline.sum_ends()

    def _squares(self) -> float:
        """The sum of the squares of the whole gradient; each number counts once.

        Cost:    one all-gather of a float64 a rank, under `control`.
        """
        at_second_end = self.pp.rank > 0
        skipped = {id(table) for table in self._twice() if at_second_end}
        if isinstance(self.data, DDP):
            counted = counted_at((p for p in self.weights if id(p) not in skipped), self.tp.rank)
            return sum_in_order(self.cut, sum_of_squares(counted))
        flats = self.data.gradients.flats if isinstance(self.data, Zero3) else self.data.flats
        owners = [parameter for flat in flats for parameter in flat.parameters]
        first_copy = self.data.group.rank < self.data.sharing.shard.size
        pieces = [piece.grad for piece, owner in zip(self.data.parameters, owners, strict=True)
                  if first_copy and id(owner) not in skipped
                  and (isinstance(owner, WeightShard) or self.tp.rank == 0)]
        return sum_in_order(self.everybody, sum_of_squares(pieces))

    # ------------------------------------------------------------------------------------------------ evaluation

    def forward_share(self, part: Part, spare: Batch, loss: Loss) -> float:
        """The sum of the losses of this data rank's rows where this rank knows it, else 0. No gradients.

        Cost:    through a pipeline one message a boundary; its stages wait for each other.
        """
        if isinstance(self.data, Zero3):
            return float(self.data.forward(part, divisor=1, spare=spare).item())
        if not len(part.inputs):
            return 0.0
        if self.pipeline is None:
            return float(loss(part, 1).item())
        stages, group, share = self.pipeline.stages, self.pp, 0.0
        with no_grad():
            for stage in stages.layers:
                x: Any = part.inputs if stage == 0 else Tensor(group.recv(src=(stage - 1) % group.size))
                y = stages.forward(stage, x, targets=part.targets, divisor=1)
                if stage == stages.last:
                    share = float(y.item())
                else:
                    group.send(y.data, dst=(stage + 1) % group.size)
        return share

    @property
    def knows_loss(self) -> bool:
        """Whether this rank has the pipeline's last stage, which alone knows the loss."""
        return self.pp.rank == self.pp.size - 1

    # --------------------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (masters, in mixed precision), whole, in the serial layout, on every rank.

        Cost:    gathers over dp (ZeRO), tp and pp.
        """
        return self.own_state() if self.pipeline is None else self.pipeline.state_dict()

    def own_state(self) -> dict[str, np.ndarray]:
        """The weights of this rank's stages, whole."""
        own = self.data.state_dict()
        return own if self.tp.size == 1 else assemble(self.model, own, self.tp)

    def check_replicas(self) -> None:
        """Compare what several ranks should hold alike: over dp, over tp, and a tied table at both ends.

        Raises:  MismatchError naming the ranks that differ.
        """
        when = "after the last step"
        if self.plan.zero < 3:
            masters: Iterable[Any] = self.data.parameters if isinstance(self.data, DDP) else ()
            check_equal_replicas((*self.model.parameters(), *masters), self.data.group, when=when)
            check_equal_replicas(self._whole(), self.tp, when=when)
        if self.pipeline is not None and self.pipeline.ends is not None:
            check_equal_replicas(self._twice(), self.pipeline.ends, when=when)


class _Inner(Precision):
    """What the pipeline is given: backward as the plan's precision wants it; masters and update are the data axis's."""

    def __init__(self, hybrid: Hybrid) -> None:
        self.hybrid = hybrid

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> Any:
        """As the plan's precision."""
        return self.hybrid.precision.backward(loss, *args, **options)

    def state_dict(self, model: Any) -> dict[str, np.ndarray]:
        """This rank's stages, put together over dp and tp."""
        return self.hybrid.own_state()


def elements_sent(config: GPTConfig, plan: Plan, tokens: int, *, recomputed: int = 0) -> dict[str, int]:
    """Numbers that all ranks together send in a step along tp and pp, scalars apart; those of dp depend on who holds
    what, and are each chapter's formula of that.

    Args:    tokens: of the global batch; recomputed: how many blocks are computed again in backward.
    """
    sent = {}
    if plan.tp > 1:
        sent["tp"] = tensor.elements_sent(config, ranks=plan.tp, tokens=tokens, recomputed=recomputed)
        sent["tp"] += (plan.dp - 1) * tensor.shared_numbers(config, plan.tp)
    if plan.pp > 1:
        sent["pp"] = 2 * tokens * config.width * (plan.stages - 1) * plan.tp
        if config.tied:
            sent["pp"] += 2 * config.vocabulary * config.width * plan.dp
    return sent
