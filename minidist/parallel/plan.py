"""A plan: along which axes a job is cut, and how its gradients travel."""

from dataclasses import dataclass, fields
from typing import Any

from minidist.errors import PlanError
from minidist.nn import GPTConfig
from minidist.parallel.common.buckets import BUCKET_BYTES
from minidist.parallel.common.sharing import divisors
from minidist.parallel.common.split_gpt import check_fits
from minidist.parallel.schedules import ORDERS

ZERO_STAGES = (0, 1, 2, 3)
"""What the data axis divides among its ranks: nothing, the optimizer, the gradients too, the parameters too."""

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""How weights and gradients are kept: as the model's dtype says, or in two bytes beside float32 master weights; with
fp8 the inputs of matrix products are rounded to one byte."""

OFFLOADS = ("none", "optimizer", "all")
"""What leaves the device: nothing; optimizer state and update, to the host; all that lasts, to disk."""

STRATEGIES = ("ddp", "data-parallel", "parameter-server")
"""How the data axis is trained: replicas that are equals (with zero: divided), one process, workers and servers."""

AXES = ("dp", "pp", "ep", "cp", "tp")
"""Mesh axes, outermost first: data, pipeline, expert, context, tensor."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job is cut. `Plan(dp=4)`, or `Plan.parse("dp=4")`.

    Attributes: dp … tp       ranks along each axis
                bucket_bytes  a gradient bucket's most bytes
                algorithm     of the gradients' collectives: pinned, so that the same plan gives the same bits
                zero          the ZeRO stage: 0 (DDP), 1, 2 or 3
                shard         ZeRO: how many neighbours share one copy of the state (None: the whole data axis)
                keep_gathered ZeRO-3: units stay gathered from forward to backward, for memory instead of traffic
                accumulate    backward passes a step
                precision     one of PRECISIONS
                checkpoint_blocks   which blocks' insides backward computes again: "none", "scores", "all" or numbers
                offload       one of OFFLOADS
                strategy      one of STRATEGIES
                replicas      of data-parallel: devices of the one process
                schedule      of the pipeline: one of ORDERS (schedules.py); microbatches: of each pass of a data rank's
                              rows (None: four a stage)
                servers       of parameter-server: how many ranks of the data axis, the last
                asynchronous, staleness   of parameter-server: update by each gradient as it comes; how many steps a
                              worker may be ahead of the slowest (None: any number)
                device_memory the most bytes that a rank's device may hold (None: no limit)
    Raises:     PlanError for an axis this version cannot cut, a size below 1, another stage, precision or offload, no
                pass, and for options that the stage or each other do not go with.
    """

    dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    bucket_bytes: int = BUCKET_BYTES
    algorithm: str = "ring"
    zero: int = 0
    shard: int | None = None
    keep_gathered: bool = False
    accumulate: int = 1
    precision: str = "fp32"
    checkpoint_blocks: str = "none"
    offload: str = "none"
    device_memory: int | None = None
    strategy: str = "ddp"
    schedule: str = "1f1b"
    microbatches: int | None = None
    replicas: int = 1
    servers: int = 1
    asynchronous: bool = False
    staleness: int | None = 2

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if not isinstance(size, int) or size < 1:
                raise PlanError(f"plan axis {axis}={size}: the number of ranks along an axis is a whole number from 1")
            if axis in ("ep", "cp") and size > 1:
                raise PlanError(f"plan axis {axis}={size}: this version composes dp, pp and tp; use {axis}=1, with "
                                f"{_words(self.dp * self.ep * self.cp, self.pp, self.tp)}")
        if self.bucket_bytes < 1:
            raise PlanError(f"plan bucket_bytes={self.bucket_bytes}: a bucket holds at least one byte")
        if self.zero not in ZERO_STAGES:
            raise PlanError(f"plan zero={self.zero!r}: choose a stage of {', '.join(map(str, ZERO_STAGES))}")
        if self.shard is not None:
            self._check_shard()
        if self.keep_gathered and self.zero != 3:
            raise PlanError(f"plan keep_gathered with zero={self.zero}: only ZeRO-3 gathers units; choose zero=3")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise PlanError(f"plan accumulate={self.accumulate!r}: a step has at least one backward pass")
        if self.precision not in PRECISIONS:
            raise PlanError(f"plan precision={self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        self._check_offload()
        self._check_strategy()
        self._check_pipeline()
        if self.pp * self.tp > 1:
            self._check_composition()

    def _check_strategy(self) -> None:
        """What the strategies that are not DDP and ZeRO ask, and what is theirs alone."""
        if self.strategy not in STRATEGIES:
            raise PlanError(f"plan strategy={self.strategy!r}: choose one of {', '.join(STRATEGIES)}")
        others = (self.zero, self.precision, self.offload, self.device_memory)
        if self.strategy != "ddp" and others != (0, "fp32", "none", None):
            raise PlanError(f"plan strategy={self.strategy}: zero, precision, offload and device_memory are for "
                            f"strategy ddp; leave them out")
        if self.strategy != "data-parallel" and self.replicas != 1:
            raise PlanError(f"plan replicas={self.replicas}: devices of one process are for strategy data-parallel")
        if self.strategy != "parameter-server" and (self.servers != 1 or self.asynchronous):
            raise PlanError(f"plan servers={self.servers}, asynchronous={self.asynchronous}: these are for strategy "
                            f"parameter-server")
        if self.strategy == "data-parallel" and (self.size > 1 or self.replicas < 1):
            raise PlanError(f"plan strategy=data-parallel is one process with a thread for each of its replicas; start "
                            f"one rank instead of {self.size}, and take replicas={max(self.size, 2)}")
        if self.strategy == "parameter-server" and not 1 <= self.servers < self.dp:
            raise PlanError(f"plan servers={self.servers}: of {self.dp} rank{'s' * (self.dp > 1)} on the data axis, at "
                            f"least one is a server and one a worker; start {max(2, self.servers + 1)} or more")
        if self.staleness is not None and self.staleness < 0:
            raise PlanError(f"plan staleness={self.staleness}: a worker is 0 or more steps ahead of the slowest")

    def _check_offload(self) -> None:
        if self.offload not in OFFLOADS:
            raise PlanError(f"plan offload={self.offload!r}: choose one of {', '.join(OFFLOADS)}")
        if self.offload == "all" and self.zero != 3:
            raise PlanError(f"plan offload=all streams the units of ZeRO-3, and the plan has zero={self.zero}; use "
                            f"zero=3, on one rank too")
        if self.offload == "optimizer" and not self.zero and self.dp > 1:
            raise PlanError(f"plan offload=optimizer with zero=0 would keep and update the same state {self.dp} times; "
                            f"use zero=1, 2 or 3")
        if self.device_memory is not None and self.device_memory < 1:
            raise PlanError(f"plan device_memory={self.device_memory}: a device has at least one byte; write 64MiB")

    def _check_pipeline(self) -> None:
        if self.schedule not in ORDERS:
            raise PlanError(f"plan schedule={self.schedule!r}: choose one of {', '.join(ORDERS)}")
        if self.microbatches is None:
            return
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise PlanError(f"plan microbatches={self.microbatches!r}: a pipeline takes at least one")
        if self.pp == 1 and self.microbatches > 1:
            raise PlanError(f"plan microbatches={self.microbatches} with pp=1: there is no pipeline to fill; use "
                            f"accumulate={self.microbatches}, which takes as many passes, or pp=2")

    def _check_composition(self) -> None:
        """What goes with a pipeline or with tensor parallelism."""
        cut = ", ".join(f"{axis}={size}" for axis, size in (("pp", self.pp), ("tp", self.tp)) if size > 1)
        if self.strategy != "ddp":
            raise PlanError(f"plan {cut} with strategy={self.strategy}: it keeps whole models; use strategy=ddp, or "
                            f"dp={self.size}")
        if self.offload != "none":
            raise PlanError(f"plan {cut} with offload={self.offload}: this version offloads on the data axis alone; "
                            f"use offload=none, or dp={self.size} with zero={max(1, self.zero)}")
        if self.pp > 1 and self.zero > 1:
            what = "reduce its gradients" if self.zero == 2 else "gather weights and reduce gradients"
            raise PlanError(f"plan pp={self.pp} with zero={self.zero}: every microbatch would have to {what} anew; use "
                            f"zero=1, or pp=1")
        if self.tp > 1 and self.precision == "fp8":
            raise PlanError(f"plan tp={self.tp} with precision=fp8: a shard knows no scale of the whole matrix; use "
                            f"bf16, or tp=1 with dp={self.dp * self.tp}")

    def require_model(self, config: GPTConfig) -> None:
        """Raise PlanError unless a model of this shape can be cut so."""
        if self.stages > config.layers + 2:
            least = self.stages - 2
            most = max(pp for pp in divisors(self.pp) if pp * (self.stages // self.pp) <= config.layers + 2 or pp == 1)
            raise PlanError(f"plan pp={self.pp} with schedule={self.schedule} has {self.stages} stages, and the model "
                            f"{config.layers} layer{'s' * (config.layers > 1)}: each stage but the first and the last "
                            f"needs one; use {_words(self.dp * self.pp // most, most, self.tp)}, or at least "
                            f"{least} layers")
        if self.tp > 1:
            check_fits(config, self.tp)
        if self.tp > config.key_heads and self.zero:
            raise PlanError(f"plan tp={self.tp} with zero={self.zero}: several ranks hold each of {config.key_heads} "
                            f"key heads, in shards that lie apart; use tp={config.key_heads}, or zero=0")
        if self.tp > 1 and self.zero == 3 and self.dp > 2 and (config.heads % self.tp or config.hidden % self.tp):
            raise PlanError(f"plan tp={self.tp} with zero=3: {config.heads} heads or {config.hidden} hidden numbers do "
                            f"not divide, so norms would be summed in another order on each tensor rank; use zero=2")

    def _check_shard(self) -> None:
        fits = divisors(self.dp)
        if self.shard not in fits:
            raise PlanError(f"plan shard={self.shard!r}: the {self.dp} rank{'s' * (self.dp > 1)} of dp cannot be cut "
                            f"into copies of so many; choose one of {', '.join(map(str, fits))}")
        if not self.zero:
            raise PlanError(f"plan shard={self.shard} with zero=0: nothing is divided among ranks; choose zero=1, 2 "
                            f"or 3")
        if self.shard < self.dp and self.offload != "none":
            raise PlanError(f"plan shard={self.shard} of dp={self.dp} with offload={self.offload}: copies sum their "
                            f"gradients on the device; leave one of the two out")

    @property
    def workers(self) -> int:
        """Ranks of the data axis that take a part of the batch."""
        return self.dp - self.servers if self.strategy == "parameter-server" else self.dp

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stages(self) -> int:
        """Stages of the pipeline: one a rank, interleaved two."""
        return self.pp * (2 if self.schedule == "interleaved" and self.pp > 1 else 1)

    @property
    def pieces(self) -> int:
        """Microbatches a pass."""
        return self.microbatches or (4 * self.pp if self.pp > 1 else 1)

    @property
    def size(self) -> int:
        """Ranks in all."""
        product = 1
        for size in self.axes.values():
            product *= size
        return product

    def require(self, ranks: int) -> None:
        """Raise PlanError unless the plan is for so many ranks."""
        if self.size != ranks:
            dp, rest = divmod(ranks, self.pp * self.tp)
            nearest = _words(dp, self.pp, self.tp) if dp and not rest else f"dp={ranks}"
            raise PlanError(f"plan {_words(self.dp, self.pp, self.tp)} is for {self.size} rank{'s' * (self.size > 1)}, "
                            f"the job has {ranks}; use {nearest}, or start {self.size}")

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that `text` says: axis=size pairs joined by commas, as in "dp=4".

        Raises:  PlanError, in one line, for anything else.
        """
        sizes: dict[str, Any] = {}
        for pair in filter(None, (piece.strip() for piece in text.split(","))):
            axis, equals, value = pair.partition("=")
            if axis not in AXES or not equals:
                raise PlanError(f"plan {text!r}: {pair!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}; "
                                f"write it like dp=4")
            if axis in sizes:
                raise PlanError(f"plan {text!r}: axis {axis} stands there twice")
            if not value.isascii() or not value.isdigit():
                raise PlanError(f"plan {text!r}: {axis}={value} is not a number of ranks; write it like {axis}=4")
            sizes[axis] = int(value)
        return cls(**sizes)

    def as_dict(self) -> dict[str, int | str | None]:
        """Every field by name, for metrics.json."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _words(dp: int, pp: int, tp: int) -> str:
    """The axes as the command line has them, without those of one rank: "dp=2,tp=4"."""
    return ",".join(f"{axis}={size}" for axis, size in (("dp", dp), ("pp", pp), ("tp", tp))
                    if size > 1 or (axis == "dp" and pp * tp == 1))
