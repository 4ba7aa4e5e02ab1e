"""Predicts when not to compress: the time of a step over a link, from a step over a link of no
time.

    measured once    L: seconds of a step over a link of no time (computing, encoding, decoding and
                     copying)
                     a_i: when bucket i was passed to its scheme
                     the bytes and messages that a rank sends
    link             one port per rank: bucket i leaves when it is ready and the previous buckets
                     have left, f_i = max(f_(i-1), a_i) + messages_i α + bytes_i β
    a step           L + (f_last - a_last): the rank waits for what the port still has to send when
                     the last bucket is ready

A scheme is faster than plain buckets if the bytes that it saves take longer than its encoding and
decoding. So there is one bandwidth, the break-even, above which it is slower.

notes:   N2 §10.1, §11.2, N3 §3.2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np

from minidist.comm.cost.link_model import LinkCost, LinkWork

CLOSE = 0.05  # cells whose two measured times differ by less do not count
# bytes per second between which a break-even is searched
LEAST = 1e3
MOST = 1e12


@dataclass(frozen=True)
class LocalStep:
    """A measured step over a link of no time.

    Attributes: seconds; nbytes, messages: sent by a rank; moments: when each bucket was ready, from
                the step's begin; sizes: of the buckets, in any unit.
    """

    seconds: float
    nbytes: float
    messages: float
    moments: Sequence[float]
    sizes: Sequence[float]

    def over(self, link: LinkCost) -> float:
        """Return the seconds of a step over this link."""
        if not self.sizes:
            return self.seconds
        free = 0.0
        for moment, size in zip(self.moments, self.sizes, strict=True):
            messages, nbytes = (
                part * size / sum(self.sizes) for part in (self.messages, self.nbytes)
            )
            free = max(free, moment) + link.seconds(LinkWork(messages, messages, nbytes, 0.0))
        return self.seconds + free - self.moments[-1]


def shaped(ranks: int, alpha: float, bandwidth: float) -> LinkCost:
    """Return the link model of a throttled link. Args: bandwidth: bytes per second."""
    return LinkCost("delayed", ranks, alpha, alpha, 1 / bandwidth, 0.0, 0.0)


def break_even(faster: Callable[[float], bool]) -> float:
    """Return the bandwidth (bytes per second) above which compression is no longer faster; 0: it is
    never faster, inf: always.

    Args:    faster: faster(bandwidth) -> whether the compressed step is faster.
    """
    if not faster(LEAST):
        return 0.0
    if faster(MOST):
        return inf
    low = log(LEAST)
    high = log(MOST)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if faster(exp(middle)) else (low, middle)
    return exp(low)


def predicted_gain(
    plain: LocalStep, scheme: LocalStep, ranks: int, alpha: float
) -> Callable[[float], float]:
    """Return a function: bandwidth -> seconds that a scheme saves in a step, by the model."""

    def gain(bandwidth: float) -> float:
        link = shaped(ranks, alpha, bandwidth)
        return plain.over(link) - scheme.over(link)

    return gain


def measured_break_even(
    cells: Mapping[float, tuple[float, float]], gain: Callable[[float], float]
) -> float | None:
    """Return the bandwidth at which both steps take the same time; None if it is outside the
    measured bandwidths.

    Single cells are too noisy: a step 5 % longer moves the break-even by 40 % where the two times
    cross at a small angle. So all cells together correct the model's gain, by a constant (encoding)
    and a slope (bytes): by the least-squares line a + b / bandwidth, with errors relative to the
    longer step.

    Args:    cells: bandwidth -> measured seconds of a plain step and of a compressed one; gain:
             predicted_gain's.
    """
    if len(cells) < 2:
        return None
    speeds = np.array(list(cells))
    times = np.array(list(cells.values()))
    weights = 1 / times.max(axis=1)
    off = times[:, 0] - times[:, 1] - [gain(speed) for speed in speeds]
    line = np.stack([np.ones(len(speeds)), 1 / speeds], axis=1)
    constant, slope = np.linalg.lstsq(line * weights[:, None], off * weights)[0]
    edge = break_even(lambda speed: bool(gain(speed) + constant + slope / speed > 0))
    return edge if speeds.min() <= edge <= speeds.max() else None


@dataclass(frozen=True)
class AdviceCell:
    """The step times of a scheme at one bandwidth and number of ranks, compared with plain buckets.

    Attributes: predicted, measured: seconds of a step (plain, scheme); measured: None if the cell
                was not measured
    """

    scheme: str
    ranks: int
    bandwidth: float
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None

    @property
    def compress(self) -> bool:
        """The advice: True if the scheme is predicted to be faster."""
        return self.predicted[1] < self.predicted[0]

    @property
    def right(self) -> bool | None:
        """True if the advice was right; None if the cell was not measured, or if its two times are
        too close."""
        if self.measured is None:
            return None
        plain, scheme = self.measured
        return (
            None
            if abs(plain - scheme) < CLOSE * max(plain, scheme)
            else self.compress == (scheme < plain)
        )


def score(cells: Sequence[AdviceCell]) -> tuple[int, int]:
    """Return (number of cells that were right, number of cells that count)."""
    counted = [cell.right for cell in cells if cell.right is not None]
    return sum(counted), len(counted)


# --------------------------------------------------------------- what the notes claim of 1-bit Adam


def bytes_ratio(warmup: float, *, plain_bits: int = 16, bits: float = 1.0) -> float:
    """Return the bytes of a whole plain training / the bytes with 1-bit Adam.

    Args:    warmup: share of the steps that send uncompressed gradients, in `plain_bits` per
    number.
    """
    return 1 / (warmup + (1 - warmup) * bits / plain_bits)


def speed_ratio(warmup: float, plain: float, compressed: float) -> float:
    """Return the time of a plain training / the time with 1-bit Adam. Args: plain, compressed:
    seconds of a step in the warm-up, and after it."""
    return 1 / (warmup + (1 - warmup) * compressed / plain)


def bandwidth_for(
    ratio: float, warmup: float, plain: LocalStep, compressed: LocalStep, ranks: int, alpha: float
) -> float:
    """Return the highest bandwidth (bytes per second) at which a training ends `ratio` times
    sooner; 0: there is none.

    Even over the slowest link the ratio stays below bytes_ratio.
    """

    def reached(bandwidth: float) -> bool:
        link = shaped(ranks, alpha, bandwidth)
        return speed_ratio(warmup, plain.over(link), compressed.over(link)) >= ratio

    return break_even(reached)
