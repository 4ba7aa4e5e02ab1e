"""A plan: along which axes a job is cut, and how its gradients travel."""

from dataclasses import dataclass, fields
from typing import Any

from minidist.errors import PlanError
from minidist.parallel.common.buckets import BUCKET_BYTES
from minidist.parallel.common.sharing import divisors

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
    replicas: int = 1
    servers: int = 1
    asynchronous: bool = False
    staleness: int | None = 2

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if not isinstance(size, int) or size < 1:
                raise PlanError(f"plan axis {axis}={size}: the number of ranks along an axis is a whole number from 1")
            if axis != "dp" and size > 1:
                raise PlanError(f"plan axis {axis}={size}: this version has the data axis; use dp={self.size}")
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

    def _check_shard(self) -> None:
        fits = divisors(self.dp)
        if self.shard not in fits:
            raise PlanError(f"plan shard={self.shard!r}: the {self.dp} ranks of dp cannot be cut into copies of so "
                            f"many; choose one of {', '.join(map(str, fits))}")
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
    def size(self) -> int:
        """Ranks in all."""
        product = 1
        for size in self.axes.values():
            product *= size
        return product

    def require(self, ranks: int) -> None:
        """Raise PlanError unless the plan is for so many ranks."""
        if self.size != ranks:
            raise PlanError(f"plan dp={self.dp} is for {self.size} rank{'s' * (self.size > 1)}, the job has {ranks}; "
                            f"use dp={ranks}, or start {self.size}")

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
