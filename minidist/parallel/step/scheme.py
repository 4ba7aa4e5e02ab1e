"""Schemes: gradients travel between the ranks that sum them as they are, or in fewer bytes by a
scheme of parallel/compress/ (chapter 21).

A data axis passes each bucket to its Scheme when the bucket's gradients are final, and gets a
pending call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.call_site import entries
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.optim import Optimizer


class GradientRun(NamedTuple):
    """A bucket as a scheme sees it (with local steps: a stretch of a fragment), from the first step
    to the last.

    Attributes: spans: (parameter, the elements of it when flattened), one after another in the
                bucket.
                group: the ranks that sum it; verb: "all_reduce", or "reduce_scatter" (ZeRO-1,
                ZeRO-2).
    """

    spans: tuple[tuple[Parameter, range], ...]
    group: Group
    verb: str

    @classmethod
    def whole(cls, parameters: Sequence[Parameter], group: Group, verb: str) -> "GradientRun":
        """Return the bucket of some whole parameters."""
        return cls(tuple((p, range(p.size)) for p in parameters), group, verb)

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(len(part) for _, part in self.spans)

    @property
    def dtype(self) -> np.dtype:
        return self.spans[0][0].dtype


@entries  # error messages then name the strategy's line as the caller
class Scheme:
    """The plain scheme: gradients are sent as they are, by collectives of the given algorithm.

    Attributes: name; runs: the buckets, by index
                errors: ("worker" or "server", index) -> the residual, added to the next step's
                gradients: of the bucket, or of the chunk that this rank sums up
                private: further arrays that change from step to step, in the gradients' units;
                counters: numbers, equal on all ranks, as JSON
    """

    name = "none"
    runs: Sequence[GradientRun] = ()

    def __init__(self, algorithm: str = "ring") -> None:
        self.algorithm = algorithm
        self.errors: dict[tuple[str, int], Array] = {}
        self.private: dict[str, Array] = {}
        self.counters: dict[str, Any] = {"steps": 0, "scale": 1.0}

    def attach(self, runs: Sequence[GradientRun]) -> None:
        """Take the buckets, once, before the first step. Raises: ConfigError for what the scheme
        cannot compress."""
        self.runs = runs

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Take the optimizer, once, before the first step. Raises: ConfigError if the scheme needs
        another."""

    def begin_step(self, scale: float = 1.0) -> None:
        """Begin a step whose gradients are multiplied by `scale` (float16's loss scale), and scale
        the state alike."""
        if scale != self.counters["scale"]:
            for kept in (*self.errors.values(), *self.private.values()):
                kept *= scale / self.counters["scale"]
        self.counters.update(steps=self.counters["steps"] + 1, scale=scale)

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        """Start to sum a bucket (n,) over its group; after wait() it holds the sum, the same bits
        on every rank."""
        return self.runs[index].group.start_all_reduce(bucket, out=bucket, algorithm=self.algorithm)

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        """Start to sum a bucket (n,); after wait() `out`, which may be a part of it, holds this
        rank's chunk of the sum."""
        return self.runs[index].group.start_reduce_scatter(
            bucket, out=out, algorithm=self.algorithm
        )

    def sent_bytes(self, run: GradientRun) -> int | None:
        """Return the bytes that the ranks of its group send together for a sum; None: as the
        algorithm; -1: the numbers decide."""
        return None
