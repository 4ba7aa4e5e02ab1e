"""sign: one bit a number, and a scale for each block of numbers.

A number travels as its sign; all of a block get the block's mean size. That is far from the
gradient in a single step, but what is lost is kept, and added to the next step's (error feedback).

    block=4096     numbers that share a scale; 0: the whole chunk, as in the papers
    majority=no    sums the ranks' numbers, each ± the scale of its block; errors of both phases are
                   kept: n + n/P numbers a rank
    majority=yes   the ranks vote: the sum gets the sign of most ranks, and as its size the sum of
                   the ranks' scales. Nothing is kept (signSGD with majority vote has no error
                   feedback)

Cost: as two_phase.py's, with b(m) = 4 ceil(m / block) + ceil(m / 8) bytes for a chunk of m numbers.

notes:   N3 §3.2
Source:  Bernstein et al. 2018, "signSGD" (majority); Karimireddy et al. 2019 (scale and error
         feedback).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.parallel.compress.two_phase import Codec, RandomStream, TwoPhase

BLOCK = 4096


class Sign(Codec):
    """A bit a number and a float32 scale a block. Args: block: numbers that share a scale; 0: all
    of them."""

    def __init__(self, block: int = BLOCK) -> None:
        if block < 0 or block % 8:
            raise ConfigError(
                f"compress sign: block={block} numbers share a scale; choose a multiple of 8, or "
                "0 for all"
            )
        self.block = block

    def encode(self, values: Array, draw: RandomStream) -> Array:
        xp = array_module(values)
        (block, blocks) = self._shape(len(values))
        scales = xp.empty(blocks, np.float32)
        size = xp.abs(values)
        inside = len(values) // block * block
        with np.errstate(over="ignore", invalid="ignore"):
            scales[: inside // block] = size[:inside].reshape(-1, block).mean(axis=1)
            if inside < len(values):
                scales[-1] = size[inside:].mean()
        return xp.concatenate([scales.view(np.uint8), xp.packbits(values >= 0)])

    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        xp = array_module(payload)
        (block, blocks) = self._shape(count)
        scales = payload[: 4 * blocks].copy().view(np.float32).astype(kind)
        inside = count // block * block
        values = xp.take(xp.asarray(_signs(kind)), payload[4 * blocks :], axis=0).reshape(-1)[
            :count
        ]
        with np.errstate(invalid="ignore"):
            rows = values[:inside].reshape(-1, block)
            rows *= scales[: inside // block, None]
            # the last block has fewer numbers, or there is none
            values[inside:] *= scales[inside // block :]
        return values

    def nbytes(self, count: int, kind: np.dtype) -> int:
        return 4 * self._shape(count)[1] + -(-count // 8)

    def _shape(self, count: int) -> tuple[int, int]:
        """Return (numbers in a block, blocks) of `count` numbers."""
        block = max(1, min(self.block or count, count))
        return block, -(-count // block)


@cache
def _signs(kind: np.dtype) -> np.ndarray:
    """Return the eight numbers ±1 of each byte, (256, 8): to look them up takes less than half of
    unpacking bits."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(kind) * 2 - 1


class Vote(TwoPhase):
    """The sign of most ranks, times the sum of the ranks' scales. Args: block: as Sign."""

    def __init__(self, block: int) -> None:
        super().__init__("sign", Sign(block), feedback=False)

    def add_up(self, index: int, payloads: Sequence[Array], count: int, kind: np.dtype) -> Array:
        sizes = 0
        votes = 0
        for payload in payloads:
            values = self.codec.decode(payload, count, kind)
            xp = array_module(values)
            votes = votes + xp.sign(values)
            sizes = sizes + xp.abs(values)
        with np.errstate(invalid="ignore"):
            return xp.sign(votes) * sizes


def make(name: str, *, block: int = BLOCK, majority: bool = False) -> TwoPhase:
    """Return the scheme."""
    return Vote(block) if majority else TwoPhase(name, Sign(block), feedback=True)
