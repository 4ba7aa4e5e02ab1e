"""adaptive: top-k whose density follows the link and the gradients; all ranks agree on it.

Every `period` steps, from the second on, the ranks of a group tell each other three numbers, and so
find the same one:

    link        a probe of 128 KiB goes around the ring; its time gives the bytes a second of the
                slowest rank
    computing   the time from the step's begin until its last bucket set out: sums may take `hide`
                times as long unseen
    spread      the smallest density whose numbers hold `keep` of the squared length of what waits
                to be sent

    density     = min(what the link moves while the rank computes, spread), at least `least`
    all         if the link moves everything meanwhile, or pairs would be more bytes than all
                numbers: then buckets travel whole, by an ordinary all-reduce. That is the scheme's
                advice not to compress

    hide=1  keep=0.9  least=0.001  period=25  start=0.01 (the density until the first agreement)

All ranks of a group get the same bits in a step, but a second run measures other times, so it may
send other numbers. The densities are state: a resumed run begins with those of the saved one.

State: worker error, n numbers a rank.
Cost:  as sparse.py's top-k at the present density, or 2(P-1) × s n for what travels whole
       (reduce-scatter: half); and at an agreement P(P-1) × (2^17 + 24) bytes under `control`.

notes:   N2 §11.4
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array, narrow, to_host, widen
from minidist.errors import ConfigError
from minidist.parallel.compress.pending_sum import WORKER, Then, widened
from minidist.parallel.compress.sparse import TopK
from minidist.parallel.step.scheme import GradientRun

PROBE = 1 << 17  # bytes
SAMPLE = 1 << 12  # numbers of a bucket whose spread is looked at


def spread_of(values: np.ndarray, keep: float) -> float:
    """Return the smallest part of the numbers that holds `keep` of their squared length; 1 for
    none, zeros or an overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.sort(np.square(values, dtype=np.float64))[::-1].cumsum()
    if not len(squares) or not 0 < squares[-1] < np.inf:
        return 1.0
    return min(1.0, float(np.searchsorted(squares, keep * squares[-1]) + 1) / len(squares))


def agreed_density(
    *,
    ranks: int,
    size: int,
    itemsize: int,
    bandwidth: float,
    seconds: float,
    spread: float,
    least: float,
) -> float:
    """Return the density of a group's buckets; 1: they travel whole.

    Args:    size: their numbers, of `itemsize` bytes; bandwidth: bytes a second that a rank sends;
             seconds: that sums may take; spread, least: as above.
    """
    movable = seconds * bandwidth
    whole = 2 * (ranks - 1) / ranks * itemsize * size
    density = max(least, min(movable / ((ranks - 1) * (4 + itemsize) * max(size, 1)), spread))
    return (
        1.0
        if movable >= whole or density * (ranks - 1) * (4 + itemsize) * size >= whole
        else density
    )


class Adaptive(TopK):
    """Top-k with a density that the ranks agree on. Args: as above."""

    name = "adaptive"
    clock = staticmethod(time.perf_counter)

    def __init__(
        self, *, hide: float, keep: float, least: float, period: int, start: float
    ) -> None:
        super().__init__(start)
        if not (hide > 0 and 0 < keep < 1 and 0 < least <= 1 and period >= 3):
            raise ConfigError(
                f"compress adaptive: hide={hide:g}, keep={keep:g}, least={least:g}, "
                f"period={period}; choose hide above 0, keep between 0 and 1, least above 0 up "
                "to 1, a period from 3"
            )
        self.hide = hide
        self.keep = keep
        self.least = least
        self.period = period
        self._began = self._computed = 0.0

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        self._groups: list[Group] = []
        for run in runs:
            if run.group.size > 1 and run.group not in self._groups:
                self._groups.append(run.group)
        self.counters.update(
            {f"density.{number}": self.density for number in range(len(self._groups))}
        )
        self._spreads = [1.0] * len(runs)

    def begin_step(self, scale: float = 1.0) -> None:
        super().begin_step(scale)
        if self.counters["steps"] % self.period == 2:
            for number, group in enumerate(self._groups):
                self.counters[f"density.{number}"] = self._agree(group)
        self._began = self.clock()

    def density_of(self, run: GradientRun) -> float:
        """Return the present density of a bucket; 1: it travels whole."""
        return float(self.counters[f"density.{self._groups.index(run.group)}"])

    def choose(self, index: int, values: Array) -> Array:
        self.density = self.density_of(self.runs[index])
        return super().choose(index, values)

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        self._look(index, bucket)
        run = self.runs[index]
        if run.group.size == 1 or self.density_of(run) < 1:
            return super().start_all_reduce(index, bucket)
        total = self._all_of(index, bucket)
        return Then(
            run.group.start_all_reduce(total, out=total, algorithm="ring"), partial(_into, bucket)
        )

    def start_reduce_scatter(self, index: int, bucket: Array, out: Array) -> Pending:
        self._look(index, bucket)
        run = self.runs[index]
        if run.group.size == 1 or self.density_of(run) < 1:
            return super().start_reduce_scatter(index, bucket, out)
        total = self._all_of(index, bucket)
        return Then(run.group.start_reduce_scatter(total, algorithm="ring"), partial(_into, out))

    def sent_bytes(self, run: GradientRun) -> int | None:
        return -1 if run.group.size > 1 else 0

    def _look(self, index: int, bucket: Array) -> None:
        """Note the time and spread of this bucket, for the next agreement."""
        self._computed = self.clock() - self._began
        if (self.counters["steps"] + 1) % self.period == 2 and self.runs[index].group.size > 1:
            step = max(1, len(bucket) // SAMPLE)
            waiting = widen(bucket[::step]) + self.errors[WORKER, index][::step]
            self._spreads[index] = spread_of(to_host(waiting), self.keep)

    def _all_of(self, index: int, bucket: Array) -> Array:
        """Return the sum of this gradient and the worker error, and set the error to 0."""
        error = self.errors[WORKER, index]
        with np.errstate(over="ignore", invalid="ignore"):
            total = error + widen(bucket)
        error[...] = 0
        return total

    def _agree(self, group: Group) -> float:
        """Return the density of a group's buckets, the same on all its ranks."""
        mine = [
            (run.size, spread)
            for run, spread in zip(self.runs, self._spreads, strict=True)
            if run.group is group
        ]
        size = sum(count for count, _ in mine)
        spread = sum(count * part for count, part in mine) / max(size, 1)
        kind = next(widened(run.dtype) for run in self.runs if run.group is group)
        with group.ledger.control():
            rows = group.all_gather(np.array([self._computed, spread]), algorithm="ring").reshape(
                -1, 2
            )
            began = self.clock()
            group.all_gather(np.zeros(PROBE, np.uint8), algorithm="ring")
            took = group.all_gather(np.array([self.clock() - began]), algorithm="ring").max()
        return agreed_density(
            ranks=group.size,
            size=size,
            itemsize=kind.itemsize,
            spread=float(rows[:, 1].mean()),
            bandwidth=(group.size - 1) * PROBE / max(float(took), 1e-9),
            seconds=self.hide * float(rows[:, 0].max()),
            least=self.least,
        )


def _into(out: Array, total: Array) -> Array:
    narrow(total, out.dtype, out)
    return out


def make(
    name: str,
    *,
    hide: float = 1.0,
    keep: float = 0.9,
    least: float = 0.001,
    period: int = 25,
    start: float = 0.01,
) -> Adaptive:
    """Return the scheme."""
    return Adaptive(hide=hide, keep=keep, least=least, period=period, start=start)
