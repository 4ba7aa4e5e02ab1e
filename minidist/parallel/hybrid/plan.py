"""A plan: the axes along which a job is cut, and the way its gradients are sent. Rules for options
together: plan_checks.py."""

import inspect
import math
from dataclasses import dataclass, fields
from typing import Any

from minidist.errors import PlanError
from minidist.parallel.compress.compress import SCHEMES
from minidist.parallel.data.buckets import BUCKET_BYTES
from minidist.parallel.hybrid import plan_checks
from minidist.parallel.hybrid.option_checks import OUTER_OPTIMIZERS, OUTER_SCHEMES, check_change
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
from minidist.parallel.hybrid.plan_options import described, option
from minidist.parallel.memory.activations import ways_of
from minidist.parallel.pipeline.schedules import ORDERS, UPDATING, V_SHAPED, stages_a_rank

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

    Attributes: dp, pp, ep, cp, tp: ranks along the axes data, pipeline, experts, context, tensor
    Raises:     PlanError for a size below 1, an unknown word, and for options that do not go
                together.
    """

    dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    order: str = option(ORDER, "which axis lies inside nodes: the last", metavar="AXIS,…")
    placement: str = option(
        "node",
        "which ranks are neighbours: those of one node, however the launcher dealt them, or those "
        "with neighbouring numbers",
        choices=PLACEMENTS,
    )
    bucket_bytes: int = option(BUCKET_BYTES, "largest size of a bucket of gradients, in bytes")
    algorithm: str = option(
        "ring",
        "of the gradients' collectives; pinned, so that the same plan gives the same bits",
    )
    # ------------------------------------------------------------------------------ the data axis
    zero: int = option(
        0,
        "divide among ranks: 1 the optimizer's state, 2 gradients too, 3 parameters too",
        choices=ZERO_STAGES,
    )
    shard: int | None = option(
        None,
        "with {zero}: hybrid sharding, each group of N neighbours has a copy of the state of its "
        "own",
        metavar="N",
        kind="ranks",
        otherwise="all ranks share one copy",
        needs="zero",
    )
    keep_gathered: bool = option(
        False,
        "with {zero} 3: keep weights from forward to backward: a third less traffic, more memory",
        needs="zero=3",
    )
    # ---------------------------------------------------------------------- arithmetic and memory
    accumulate: int = option(
        1,
        "divide each rank's sequences into A passes, which needs less activation memory",
        metavar="A",
        kind="count",
    )
    precision: str = option(
        "fp32",
        "weights and gradients as {dtype} says (fp32), or in bf16 or fp16 with float32 master "
        "weights; fp16 with a loss scale; fp8: bf16, and products of one byte",
        choices=PRECISIONS,
    )
    compress: str = option(
        "none",
        f"send fewer bytes of gradients, with {{zero}} 0 to 2: {', '.join(SCHEMES)}; with options, "
        "as 8bit:block=64,rounding=stochastic",
        metavar="NAME[:OPTION=VALUE,…]",
    )
    checkpoint_blocks: str = option(
        "none",
        "keep only the inputs of blocks and recompute the rest in backward: all (default with the "
        "option), numbers as in 0,2, or scores: those of attention",
        metavar="WHICH",
    )
    keep_activations: str = option(
        "whole",
        "with {checkpoint_blocks}: keep the inputs of blocks in 8 bits, cut over the ranks of tp, "
        "or on the host; several joined by commas",
        metavar="8bit|shard|offload",
    )
    activation_memory: int | None = option(
        None,
        "choose the blocks to recompute by measured time and bytes, so that a rank's activations "
        "take at most SIZE, as 64MiB",
        metavar="SIZE",
        kind="bytes",
        otherwise="as {checkpoint_blocks} says",
    )
    offload: str = option(
        "none",
        "keep off the device, with any axes: optimizer, its state and update on the host; all, "
        "every lasting array on disk",
        choices=OFFLOADS,
    )
    device_memory: int | None = option(
        None,
        "limit of a rank's device memory, as 64MiB; more is an error",
        metavar="SIZE",
        kind="bytes",
        otherwise="no limit",
    )
    strategy: str = option(
        "ddp",
        "ddp: all ranks are equal; data-parallel: one process, a thread a replica; "
        "parameter-server: the last ranks keep the weights",
        choices=STRATEGIES,
    )
    # --------------------------------------------------------------------------- the other axes
    schedule: str = option(
        "1f1b",
        "order of forward and backward passes, with pp=2 or more; zb-v, dualpipe-v: each rank has "
        "two stages, the first rank both ends of the model; pipedream: each microbatch makes an "
        "update of its own (needs {clip} 0)",
        choices=tuple(ORDERS),
    )
    microbatches: int | None = option(
        None,
        "with pp=2 or more: microbatches of a pass through the pipeline",
        metavar="M",
        kind="count",
        otherwise="4 a stage",
    )
    stages_per_rank: int | None = option(
        None,
        "with {schedule} interleaved: stages of a rank",
        metavar="V",
        kind="count",
        otherwise="2",
        needs="pp",
    )
    stage_layers: str = option(
        "even",
        "with pp=2 or more: layers of each stage; measured: the fastest slowest stage, by the "
        "measured times of a block, the embedding and the output",
        metavar="even|measured|N,N,…",
        needs="pp",
    )
    attention: str = option(
        "ring",
        "with cp=2 or more: pass keys and values around, or exchange heads for tokens",
        choices=ATTENTIONS,
        needs="cp",
    )
    sequence_parallel: bool = option(
        False, "with tp=2 or more: divide tokens outside the tensor-parallel regions", needs="tp"
    )
    # ------------------------------------------------------------------------- other strategies
    replicas: int = option(
        1,
        "of data-parallel: number of devices",
        metavar="R",
        kind="ranks",
        otherwise="2",
        needs="replicas",
    )
    devices: str = option(
        "",
        "of data-parallel with {device} cuda: the GPU of each replica, as 0,1,2,3",
        metavar="N,N,…",
        otherwise="all on one",
        needs="replicas",
    )
    servers: int = option(
        1, "of parameter-server: number of servers", metavar="S", kind="ranks", needs="servers"
    )
    server_device: str = option(
        "same",
        "of parameter-server: where servers keep and update the weights, as cpu beside {device} "
        "cuda",
        choices=SERVER_DEVICES,
        needs="servers",
    )
    server_dtype: str = option(
        "same",
        "of synchronous servers: their masters, sums and update; what travels has the workers'",
        choices=SERVER_DTYPES,
        otherwise="same; with {precision} bf16 float32",
        needs="servers",
    )
    asynchronous: bool = option(
        False,
        "of parameter-server: update with each worker's gradient as it arrives",
        needs="servers",
    )
    staleness: int | None = option(
        2,
        "most steps that an asynchronous worker may be ahead; below 0: no limit",
        metavar="K",
        kind="any",
    )
    # ------------------------------------------------------------------------------ local steps
    local_steps: int | None = option(
        None,
        "each rank trains separately for H steps, then all exchange weights once; with "
        "{asynchronous} each worker exchanges weights with the servers separately",
        metavar="H",
        kind="count",
        otherwise="every gradient is summed",
    )
    outer: str = option(
        "nesterov",
        "outer optimizer applied to the summed weight changes of all ranks: sgd (their mean: local "
        "SGD) or nesterov (DiLoCo)",
        choices=OUTER_OPTIMIZERS,
        needs="local steps",
    )
    outer_lr: float | None = option(
        None,
        "of {outer}",
        metavar="RATE",
        kind="rate",
        otherwise="sgd 1, nesterov 0.7",
        needs="local steps",
    )
    outer_momentum: float | None = option(
        None,
        "of {outer}",
        metavar="M",
        kind="fraction",
        otherwise="sgd 0, nesterov 0.9",
        needs="local steps",
    )
    fragments: int = option(
        1,
        "the weights travel in F parts, one after the other over the H steps",
        metavar="F",
        kind="count",
        needs="local steps",
    )
    delay: int = option(
        0,
        "a part is on its way for D more steps, and no rank waits",
        metavar="D",
        kind="number",
        needs="local steps",
    )
    mix: float = option(
        0.0,
        "what then stays of a rank's own weights: A × own + (1 - A) × common",
        metavar="A",
        kind="fraction",
        otherwise="0",
        needs="local steps",
    )
    outer_compress: str = option(
        "none",
        f"compression of those weight changes: {', '.join(OUTER_SCHEMES)}, with options as those "
        "of {compress}",
        metavar="NAME",
        needs="local steps",
    )

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
        for pair in (piece.strip() for piece in text.split(",") if text.strip()):
            axis, equals, value = pair.partition("=")
            if axis not in AXES or not equals:
                raise PlanError(
                    f"plan {text!r}: {pair!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}; "
                    f"write it like dp=4"
                )
            if axis in sizes:
                raise PlanError(f"plan {text!r}: axis {axis} is given twice")
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


# help(minidist.Plan) and the command line have the same words
Plan.__doc__ = inspect.cleandoc(str(Plan.__doc__)).replace("Raises:", f"{described(Plan)}\nRaises:")
