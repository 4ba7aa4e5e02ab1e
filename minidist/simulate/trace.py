"""Chapter 24 · What one rank of a plan does, as data: its kernels, its events, its memory and what
it sent."""

from dataclasses import dataclass, field
from math import fsum
from typing import Any, NamedTuple

from minidist.observe.events import Busy, Event


class Kernel(NamedTuple):
    """One operation on arrays, as a device runs it.

    kind "matmul": a stack of matrix products; "attention": scores and values in one kernel; "loss":
    cross-entropy in one kernel;
    "memory": a pass over arrays (elementwise, sums, copies, gathers); "host": what the host of a
    GPU computes (offload), pass by pass; "python": on a processor, what Python does for one result
    of an op (modules, tape, account).
    """

    kind: str
    dtype: str  # in which it computes
    flops: float  # additions and multiplications of its products
    nbytes: float  # read and written
    # of a matmul: (matrices, m, k, n); of attention: (scores,); of a loss: (logits,); of a pass on
    # a host: (inner loops,) if several
    size: tuple[int, ...] = ()


Segment = tuple[tuple[Kernel, int], ...]
"""The kernels between two calls, moves, waits or spans, each with how often it runs."""


@dataclass
class RankTrace:
    """What a rank did in its steps.

    Attributes: events: in its order. steps: where each step begins in `events`; before the first:
    set-up.
                segments: of kernels; `Busy.work` is the place of one.
                ledger: rows, as Ledger.rows; last_step: those that the last step added.
                peak, now: bytes of the memory account by category; host_peak: of the host's, with
                offload.
                lanes: bytes that moved between memories in the steps, by way. parameters: numbers
                of its weights.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    last_step: list[dict[str, Any]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    host_peak: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0

    def flops(self, begin: int = 0) -> float:
        """Return FLOPs of matrix products and attention, from event `begin` on: of the last step
        flops(trace.steps[-1])."""
        return fsum(kernel.flops * times for kernel, times in self.kernels(begin))

    def kernels(self, begin: int = 0) -> list[tuple[Kernel, int]]:
        """Return every kernel that ran from event `begin` on, with how often, segment by
        segment."""
        ran: list[Any] = [event.work for event in self.events[begin:] if isinstance(event, Busy)]
        return [pair for work in ran for pair in self.segments[work]]
