"""When not to compress: the time of a step over a link, from a step over a link that takes no time.

    measured once    L, the seconds of a step over a link of no time: all that computes, encodes,
                     decodes and copies a_i, when bucket i was handed to its scheme; the bytes and
                     messages that a rank sends
    link             one port a rank: bucket i leaves when it is ready and the ones before have
                     left, f_i = max(f_(i-1), a_i) + messages_i α + bytes_i β
    a step           L + (f_last - a_last): what the port still has to send when the last bucket is
                     ready is waited for

A scheme is faster than plain buckets where the bytes that it saves take longer than its encoding
and decoding. So there is one bandwidth above which it is slower, the break-even.

notes:   N2 §10.1, §11.2, N3 §3.2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np

from minidist.comm.cost.link_model import LinkCost, LinkWork

CLOSE = 0.05  # cells whose two measured times differ by less do not count
# bytes a second between which a break-even is looked for
LEAST = 1e3
MOST = 1e12


@dataclass(frozen=True)
class LocalStep:
    """A step over a link that takes no time.

    Attributes: seconds; nbytes, messages: that a rank sends; moments: when each bucket was ready,
    from the step's
                begin; sizes: of the buckets, in any unit.
    """

    seconds: float
    nbytes: float
    messages: float
    moments: Sequence[float]
    sizes: Sequence[float]

    def over(self, link: LinkCost) -> float:
        """Seconds of a step over this link."""
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
    """The link model of a throttled link. Args: bandwidth: bytes a second."""
    return LinkCost("delayed", ranks, alpha, alpha, 1 / bandwidth, 0.0, 0.0)


def break_even(faster: Callable[[float], bool]) -> float:
    """The bandwidth (bytes a second) above which compression no longer is faster; 0: it never is,
    inf: it always is.

    Args:    faster: whether the compressed step is the faster one at a bandwidth.
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
    """Seconds that a scheme saves in a step, by the model, as a function of the bandwidth."""

    def gain(bandwidth: float) -> float:
        link = shaped(ranks, alpha, bandwidth)
        return plain.over(link) - scheme.over(link)

    return gain


def measured_break_even(
    cells: Mapping[float, tuple[float, float]], gain: Callable[[float], float]
) -> float | None:
    """The bandwidth between the measured ones at which both take as long; None if it lies beyond
    them.

    Single cells are too noisy: a step 5 % longer moves the break-even by 40 % where the two times
    cross at a small angle. So all cells together move the model's gain, by more or less encoding
    and by more or less bytes: by the line a + b / bandwidth of least squares, errors counted as
    parts of the longer step.

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
    """A scheme at a bandwidth among so many ranks: seconds of a step of plain buckets and of the
    scheme's.

    Attributes: predicted, measured: (plain, scheme); measured is None if the cell was not measured
    """

    scheme: str
    ranks: int
    bandwidth: float
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None

    @property
    def compress(self) -> bool:
        """The advice."""
        return self.predicted[1] < self.predicted[0]

    @property
    def right(self) -> bool | None:
        """Whether the advice was right; None if the cell was not measured, or its two times are too
        close."""
        if self.measured is None:
            return None
        plain, scheme = self.measured
        return (
            None
            if abs(plain - scheme) < CLOSE * max(plain, scheme)
            else self.compress == (scheme < plain)
        )


def score(cells: Sequence[AdviceCell]) -> tuple[int, int]:
    """(cells that were right, cells that count)."""
    counted = [cell.right for cell in cells if cell.right is not None]
    return sum(counted), len(counted)


# --------------------------------------------------------------- what the notes claim of 1-bit Adam


def bytes_ratio(warmup: float, *, plain_bits: int = 16, bits: float = 1.0) -> float:
    """How many times fewer bytes 1-bit Adam sends in a whole training.

    Args:    warmup: share of the steps that send gradients as they are, in `plain_bits` a number.
    """
    return 1 / (warmup + (1 - warmup) * bits / plain_bits)


def speed_ratio(warmup: float, plain: float, compressed: float) -> float:
    """How many times sooner its training ends. Args: plain, compressed: seconds of a step in
    warm-up, and then."""
    return 1 / (warmup + (1 - warmup) * compressed / plain)


def bandwidth_for(
    ratio: float, warmup: float, plain: LocalStep, compressed: LocalStep, ranks: int, alpha: float
) -> float:
    """The highest bandwidth (bytes a second) at which a training ends `ratio` times sooner; 0: at
    none.

    Even over the slowest link the ratio stays below bytes_ratio.
    """

    def reached(bandwidth: float) -> bool:
        link = shaped(ranks, alpha, bandwidth)
        return speed_ratio(warmup, plain.over(link), compressed.over(link)) >= ratio

    return break_even(reached)
