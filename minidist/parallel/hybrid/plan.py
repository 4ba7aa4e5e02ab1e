"""A plan: the axes along which a job is cut, and the way its gradients are sent. Rules for options
together: plan_checks.py."""

import math
from dataclasses import dataclass, fields
from typing import Any

from minidist.errors import PlanError
from minidist.parallel.data.buckets import BUCKET_BYTES
from minidist.parallel.hybrid import plan_checks
from minidist.parallel.hybrid.option_checks import check_change
from minidist.parallel.hybrid.plan_checks import (
    ATTENTIONS,
    AXES,
    OFFLOADS,
    ORDER,
    PLACEMENTS,
    PRECISIONS,
    SERVER_DEVICES,
    SERVER_DTYPES,
    STRATEGIES,
    ZERO_STAGES,
)
from minidist.parallel.memory.activations import ways_of
from minidist.parallel.pipeline.schedules import UPDATING, V_SHAPED, stages_a_rank

__all__ = [
    "ATTENTIONS",
    "AXES",
    "OFFLOADS",
    "ORDER",
    "PLACEMENTS",
    "PRECISIONS",
    "SERVER_DEVICES",
    "SERVER_DTYPES",
    "STRATEGIES",
    "ZERO_STAGES",
    "Plan",
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The way a job is cut. `Plan(dp=4)`, or `Plan.parse("dp=4")`.

    Attributes: dp, pp, ep, cp, tp   ranks along each axis
                order         of the axes on the machines: the last is innermost, its ranks are
                              neighbours on a node; axes that are not named are first
                placement     one of PLACEMENTS: which ranks are neighbours
                bucket_bytes  largest size of a gradient bucket, in bytes
                algorithm     of the gradients' collectives: pinned, so that the same plan gives the
                              same bits
                zero          the ZeRO stage: 0 (DDP), 1, 2 or 3, of the ranks along dp, ep and cp
                shard         ZeRO: how many neighbours share one copy of the state (None: all of
                              those ranks)
                keep_gathered ZeRO-3: units stay gathered from forward to backward (more memory,
                less traffic)
                accumulate    backward passes per step
                precision     one of PRECISIONS
                compress      the form of gradients sent along the data axis: "none", or a scheme
                              with its options, as "top-k:density=0.01" (compress/compress.py)
                checkpoint_blocks   the blocks whose insides backward computes again: "none",
                                    "scores", "all" or numbers
                keep_activations    how their inputs are kept: "whole", or words of WAYS
                                    (memory/kept_inputs.py)
                activation_memory   choose those blocks by measured times, so that a rank's
                                    activations take at most this number of bytes
                                    (memory/activation_budget.py); None: as checkpoint_blocks says
                offload       one of OFFLOADS
                strategy      one of STRATEGIES
                schedule      of the pipeline: one of ORDERS (schedules.py); microbatches: of each
                              pass of a data rank's rows (None: four per stage); stages_per_rank: of
                              interleaved, any number (None: two)
                stage_layers  of each stage of the pipeline: "even"; numbers, as "1,2,1"; or
                              "measured": the split whose slowest stage is fastest, by the times of
                              a block, the embedding and the output on rank 0. Another run may
                              measure another split
                attention     over ranks of cp: one of ATTENTIONS
                sequence_parallel   with tp: the numbers outside the tensor-parallel regions are
                                    divided by tokens
                replicas      of data-parallel: their number; devices: the numbers of their GPUs, as
                              "0,1" ("": one device)
                servers       of parameter-server: the number of ranks of the data axis, the last
                              ones
                server_device of parameter-server: the servers' device, one of SERVER_DEVICES
                server_dtype  of synchronous servers' masters, sums and update: one of SERVER_DTYPES
                asynchronous, staleness   of parameter-server: update by each gradient when it
                                          arrives; the most steps that a worker may be ahead of the
                                          slowest (None: any number)
                local_steps   number of steps that each rank trains separately before all
                              synchronize (None: every gradient is summed); outer, outer_lr,
                              outer_momentum: of the outer optimizer, one of OUTER_OPTIMIZERS (None:
                              as published); fragments: the number of parts in which weights are
                              sent; delay: steps until a part arrives; mix: weight of the local
                              parameters in the merge (0: take the common ones); outer_compress: the
                              form in which they are sent (chapter 21)
                device_memory the most bytes that a rank's device may hold (None: no limit)
    Raises:     PlanError for a size below 1, an unknown word, and for options that do not go
                together.
    """

    dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    order: str = ORDER
    placement: str = "node"
    bucket_bytes: int = BUCKET_BYTES
    algorithm: str = "ring"
    zero: int = 0
    shard: int | None = None
    keep_gathered: bool = False
    accumulate: int = 1
    precision: str = "fp32"
    compress: str = "none"
    checkpoint_blocks: str = "none"
    keep_activations: str = "whole"
    activation_memory: int | None = None
    offload: str = "none"
    device_memory: int | None = None
    strategy: str = "ddp"
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    stage_layers: str = "even"
    attention: str = "ring"
    sequence_parallel: bool = False
    replicas: int = 1
    devices: str = ""
    servers: int = 1
    server_device: str = "same"
    server_dtype: str = "same"
    asynchronous: bool = False
    staleness: int | None = 2
    local_steps: int | None = None
    outer: str = "nesterov"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    outer_compress: str = "none"

    def __post_init__(self) -> None:
        plan_checks.check(self)

    require_model = plan_checks.check_model
    require = plan_checks.check_ranks
    require_change = check_change
    savings = property(plan_checks.savings)

    # ------------------------------------------------------------------------------------- counting

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks along each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.axes.values())

    @property
    def composed(self) -> bool:
        """Whether an axis other than dp has several ranks."""
        return self.size > self.dp

    @property
    def copies(self) -> int:
        """The number of ranks that share the dense weights, and so their gradients and ZeRO's
        shards: along dp, ep and cp."""
        return self.dp * self.ep * self.cp

    @property
    def workers(self) -> int:
        """The number of ranks of the data axis that take a part of the batch."""
        return self.dp - self.servers if self.strategy == "parameter-server" else self.dp

    @property
    def masters_of_servers(self) -> str | None:
        """The dtype of servers' masters; None: servers update the weights that they send."""
        wide = (
            "float32" if self.strategy == "parameter-server" and self.precision == "bf16" else None
        )
        return wide if self.server_dtype == "same" else self.server_dtype

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pp * stages_a_rank(self.schedule, self.stages_per_rank) if self.pp > 1 else 1

    @property
    def v_shaped(self) -> bool:
        """Whether stages go there and back, so that the first and the last are on one rank."""
        return self.pp > 1 and self.schedule in V_SHAPED

    @property
    def updates_each_microbatch(self) -> bool:
        """Whether each stage updates its weights after each microbatch: PipeDream."""
        return self.schedule in UPDATING

    def updates(self, sequences: int) -> int:
        """Return the number of updates of a step: one, or one per microbatch with rows.

        Args:    sequences: of the batch. Returns: from 1.
        """
        return (
            min(self.pieces, -(-sequences // (self.dp * self.ep)))
            if self.updates_each_microbatch
            else 1
        )

    @property
    def boundaries(self) -> int:
        """The number of boundaries between stages on two ranks: activations and gradients are sent
        over each."""
        return self.stages - 1 - self.v_shaped

    @property
    def ways(self) -> tuple[str, ...]:
        """The words of keep_activations, in the order in which they are taken."""
        return ways_of(self.keep_activations)

    @property
    def pieces(self) -> int:
        """The number of microbatches per pass."""
        return self.microbatches or (4 * self.pp if self.pp > 1 else 1)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Return the plan that a text says. Args: text: axis=size pairs joined by commas, as in
        "dp=4,tp=2".

        Returns: the Plan, whose other options are the defaults. Raises: PlanError for any other
        text.
        """
        sizes: dict[str, Any] = {}
        for pair in filter(None, (piece.strip() for piece in text.split(","))):
            axis, equals, value = pair.partition("=")
            if axis not in AXES or not equals:
                raise PlanError(
                    f"plan {text!r}: {pair!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}; "
                    f"write it like dp=4"
                )
            if axis in sizes:
                raise PlanError(f"plan {text!r}: axis {axis} stands there twice")
            if not value.isascii() or not value.isdigit() or len(value) > 9:
                raise PlanError(
                    f"plan {text[:60]!r}: {axis}={value[:20]} is not a number of ranks; "
                    f"write it like {axis}=4"
                )
            sizes[axis] = int(value)
        return cls(**sizes)

    def as_dict(self) -> dict[str, int | str | None]:
        """Return every field by name, for metrics.json. Returns: {field: its value}."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
