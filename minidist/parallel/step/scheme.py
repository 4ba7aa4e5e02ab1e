"""How gradients travel between the ranks that sum them: as they are here, or compressed (chapter 21).

A data axis hands each bucket to its Scheme when the bucket's gradients are final, and gets a call under way. A scheme
of parallel/compress/ sends fewer bytes, and keeps state of its own for each bucket.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array


class Run(NamedTuple):
    """What a scheme knows of a bucket, from the first step to the last.

    Attributes: spans: (parameter, which elements of it when flattened), one after another in the bucket.
                group: the ranks that sum it; verb: "all_reduce", or "reduce_scatter" (ZeRO-1, ZeRO-2).
    """

    spans: tuple[tuple[Parameter, range], ...]
    group: Group
    verb: str

    @classmethod
    def whole(cls, parameters: Sequence[Parameter], group: Group, verb: str) -> "Run":
        """The bucket of some whole parameters."""
        return cls(tuple((parameter, range(parameter.size)) for parameter in parameters), group, verb)

    @property
    def size(self) -> int:
        """Elements."""
        return sum(len(part) for _, part in self.spans)

    @property
    def dtype(self) -> np.dtype:
        return self.spans[0][0].dtype


class Scheme:
    """Gradients travel as they are.

    Args:    algorithm: of the collectives.
    Attributes: name; runs: the buckets, by index; biased: what is not sent is kept, and added to the next step's.
    """

    name = "none"
    biased = False
    runs: Sequence[Run] = ()

    def __init__(self, algorithm: str = "ring") -> None:
        self.algorithm = algorithm

    def attach(self, runs: Sequence[Run]) -> None:
        """Take the buckets, once, before the first step. Raises: ConfigError for what the scheme cannot compress."""
        self.runs = runs

    def begin_step(self, scale: float = 1.0) -> None:
        """A step begins; its gradients are multiplied by `scale` (the loss scale of float16)."""

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        """Begin to sum a bucket (n,) over its group; after wait() it holds the sum, the same bits on every rank."""
        return self.runs[index].group.start_all_reduce(bucket, out=bucket, algorithm=self.algorithm)

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        """Begin to sum a bucket (n,); after wait() `out` holds the sum of this rank's chunk, in array_split order.

        `out` may be that chunk of the bucket.
        """
        return self.runs[index].group.start_reduce_scatter(bucket, out=out, algorithm=self.algorithm)

    def sent_bytes(self, index: int) -> int | None:
        """Bytes that the ranks of the group send together for one sum; None: as the algorithm; -1: not known before."""
        return None

    def state(self) -> Any:
        """What changes from step to step; None: nothing (compress/state.py)."""
        return None
