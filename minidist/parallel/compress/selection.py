"""Choose the numbers of a bucket that travel: the k largest, all of at least a threshold, or some
drawn at random.

All return rising positions. NaN counts as the largest, so that a gradient that is not finite
travels.
"""

import math

import numpy as np

from minidist.comm.chunks import bounds
from minidist.device.backend import Array, array_module, random_bits
from minidist.device.dispatch import kernel

SAMPLE = 1 << 14  # numbers from which a first threshold is guessed


def largest(values: Array, k: int) -> Array:
    """Return the positions of the k largest |value| of (n,), exactly; k at most n.

    A sample guesses a threshold that a few more than k numbers pass, and only those are
    partitioned. That is as exact as numpy.argpartition of all numbers; for a hundredth of 3.3
    million it takes about a third of the time.
    """
    xp = array_module(values)
    n = len(values)
    if k in (0, n):
        return xp.arange(k)
    launch = kernel("top_k", values)
    if launch is not None:
        return launch(values, k)[0]
    size = xp.abs(values)
    candidates = xp.flatnonzero(~(size < _guess(size, k)))
    if len(candidates) < k:
        candidates = xp.arange(n)
    if len(candidates) > k:
        candidates = xp.sort(
            candidates[
                xp.argpartition(size[candidates], len(candidates) - k)[len(candidates) - k :]
            ]
        )
    return candidates


def _guess(size: Array, k: int) -> float:
    """Return a threshold that most likely a few more than k of `size` reach; 0 if none is sure
    to."""
    sample = size[:: max(1, len(size) // SAMPLE)]
    expected = k * len(sample) / len(size)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank >= len(sample):
        return 0.0
    guess = float(array_module(size).partition(sample, len(sample) - rank)[len(sample) - rank])
    return 0.0 if math.isnan(guess) else guess


def at_least(values: Array, threshold: float, most: int) -> Array:
    """Return the positions of all |value| >= threshold of (n,); at most the `most` largest."""
    launch = kernel("at_least", values)
    xp = array_module(values)
    found = (
        launch(values, threshold)[0]
        if launch is not None
        else xp.flatnonzero(~(xp.abs(values) < threshold))
    )
    return found if len(found) <= most else largest(values, most)


def drawn(size: int, k: int, chunks: int, stream: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return k positions of `size`, one in each of k strata of neighbours, and the length of each
    stratum.

    Each chunk d of bounds(size, chunks) is cut into as many strata as chunk d of bounds(k, chunks)
    has elements, so a reduce-scatter of the k values leaves every rank those of its own chunk. The
    same on every rank.
    Args:    k: at least min(size, chunks), at most size.
    """
    of_size = bounds(size, chunks)
    of_k = bounds(k, chunks)
    edges = np.empty(k + 1, np.int64)
    for chunk in range(chunks):
        count = of_k[chunk + 1] - of_k[chunk]
        short, longer = divmod(of_size[chunk + 1] - of_size[chunk], max(count, 1))
        number = np.arange(count)
        edges[of_k[chunk] : of_k[chunk + 1]] = (
            of_size[chunk] + number * short + np.minimum(number, longer)
        )
    edges[k] = size
    lengths = np.diff(edges)
    offsets = random_bits(stream, seed, range(k)) % lengths.astype(np.uint64)
    return edges[:-1] + offsets.astype(np.int64), lengths
