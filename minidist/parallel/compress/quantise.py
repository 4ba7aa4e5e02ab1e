"""8bit and 4bit: each number becomes the index of the nearest entry of a small code book, times a
scale of its block.

A block's scale is its largest |number|, so one large gradient makes its block coarse, and no other.
Two code books:

    linear     -127 … 127 (4 bits: -7 … 7) over 127 (7): equal distances, so the error is at most
               1/254 (1/14) scale
    dynamic    seven decades (4 bits: three), each with twice as many entries as the one below: the
               error is up to 1/94 (1/6) scale at the top, but a number a hundred times smaller
               still has 16 entries to choose from

and two roundings. To the nearest the error is smallest, but always the same for the same number:
what is lost must be fed back. Stochastic rounding takes one of the two neighbours, the nearer one
more often, so that the mean is the number itself: errors cancel over ranks and steps, and no
residual is needed. Its random numbers are a hash of seed, bucket (its first parameter), phase,
rank, chunk and step (TwoPhase.draw, device/backend.py), so a second run rounds the same way.

Bytes of m numbers in blocks of k: 4 ceil(m/k) for the scales, then m codes (8 bits) or ceil(m/2)
bytes of two codes. At k = 128: 1.03 and 0.53 bytes a number, of float32's 4.
State: with feedback residuals, n + n/P numbers a rank (ZeRO: n); else none.

A block with infinity or NaN arrives as NaN, so that a loss scale sees the overflow on every rank.

Source:  Alistarh et al. 2017, "QSGD" (stochastic); Dettmers 2016, "8-Bit Approximations for
         Parallelism in Deep Learning" (dynamic trees); Dettmers et al. 2022, "8-bit Optimizers via
         Block-wise Quantization" (blocks).
"""

from collections.abc import Iterator
from functools import cache

import numpy as np

from minidist.device.backend import Array, array_module, narrow, random_uniform
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ConfigError
from minidist.parallel.compress.two_phase import Codec, RandomStream, TwoPhase

BITS = {"8bit": 8, "4bit": 4}
LARGEST = {8: 127, 4: 7}  # code of the linear book
BOOKS = ("linear", "dynamic")
ROUNDINGS = ("nearest", "stochastic")
FEEDBACK = ("auto", "yes", "no")
KERNEL_BLOCK = 128  # of kernels/quantise.cu, whose bytes these are
STRETCH = 1 << 16  # numbers that the host codes at a time: these and their shares fit its cache


class Quantiser(Codec):
    """Codes of 8 or 4 bits. Args: as make."""

    def __init__(self, bits: int, *, block: int, book: str, rounding: str) -> None:
        self.bits = bits
        self.block = block
        self.book = book
        self.stochastic = rounding == "stochastic"

    def encode(self, values: Array, draw: RandomStream) -> Array:
        """Return the scales, then the codes."""
        xp = array_module(values)
        size = 4 * self._blocks_of(len(values))
        if self._by_kernel and kernel("quantise", values) is not None:
            codes, scales = launcher("quantise")(values, bits=self.bits)
            return xp.concatenate([scales.view(np.uint8), codes.view(np.uint8)])
        payload = xp.empty(self.nbytes(len(values), values.dtype), np.uint8)
        scales = payload[:size].view(np.float32)
        codes = payload[size:]
        for start, stop in self._stretches(values):
            part = _blocks(values[start:stop], self.block)
            scale = scales[start // self.block :][: len(part)]
            self._scale(part, scale)
            found = self._codes(part, scale, draw._replace(first=draw.first + start)).reshape(-1)[
                : stop - start
            ]
            if self.bits == 8:
                codes[start:stop] = found
            else:
                codes[start // 2 : (stop + 1) // 2] = _packed(found)
        return payload

    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        xp = array_module(payload)
        size = 4 * self._blocks_of(count)
        scales = payload[:size].copy().view(np.float32)
        codes = payload[size:]
        if self._by_kernel and kernel("quantise", scales) is not None:
            numbers = launcher("restore_quantised")(
                codes.view(np.int8).copy(), scales, count, bits=self.bits
            )
            return numbers.astype(kind, copy=False)
        numbers = xp.empty(self._blocks_of(count) * self.block, kind)
        for start, stop in self._stretches(numbers):
            read = min(stop, count)
            found = (
                codes[start:read]
                if self.bits == 8
                else _unpacked(codes[start // 2 : (read + 1) // 2], read - start)
            )
            if self.book == "linear":
                numbers[start:read] = (found if self.bits == 8 else (found ^ 8) - 8).view(np.int8)
            else:
                numbers[start:read] = xp.asarray(book_of(self.bits)).astype(kind)[found]
            numbers[read:stop] = 0
            part = numbers[start:stop].reshape(-1, self.block)
            scale = scales[start // self.block :]
            with np.errstate(invalid="ignore", over="ignore"):
                part *= scale[: len(part), None].astype(kind)
        return numbers[:count]

    def nbytes(self, count: int, kind: np.dtype) -> int:
        return 4 * self._blocks_of(count) + -(-count * self.bits // 8)

    def _blocks_of(self, count: int) -> int:
        return -(-count // self.block)

    @property
    def _by_kernel(self) -> bool:
        return self.book == "linear" and not self.stochastic and self.block == KERNEL_BLOCK

    def _stretches(self, values: Array) -> Iterator[tuple[int, int]]:
        """Yield whole blocks that the processor's cache holds together, as (start, stop); on a GPU
        all at once."""
        length = (
            max(1, STRETCH // self.block) * self.block
            if isinstance(values, np.ndarray)
            else max(1, len(values))
        )
        for start in range(0, len(values), length):
            yield start, min(start + length, len(values))

    def _scale(self, blocks: Array, into: Array) -> None:
        """Write the scale of each block: a code's share of the book is multiplied by it. A block
        with infinity or NaN has that as its scale."""
        with np.errstate(over="ignore", invalid="ignore"):
            into[...] = _largest(blocks)
            into /= np.float32(LARGEST[self.bits] if self.book == "linear" else 1)

    def _codes(self, blocks: Array, scales: Array, draw: RandomStream) -> Array:
        """Return the code of each number, uint8."""
        xp = array_module(blocks)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            shares = blocks / xp.where(scales > 0, scales, 1)[:, None].astype(blocks.dtype)
            shares[~xp.isfinite(scales)] = 0
        drawn = None
        if self.stochastic:
            positions = xp.arange(draw.first, draw.first + blocks.size, dtype=np.int64)
            drawn = random_uniform(draw.stream, draw.seed, positions).reshape(blocks.shape)
        return (self._linear if self.book == "linear" else self._dynamic)(shares, drawn)

    def _linear(self, shares: Array, drawn: Array | None) -> Array:
        """Return int8 codes as uint8."""
        xp = array_module(shares)
        most = LARGEST[self.bits]
        if drawn is None:
            xp.rint(shares, out=shares)
        else:
            shares += drawn
            xp.floor(shares, out=shares)
            xp.clip(shares, -most, most, out=shares)
        return shares.astype(np.int8).view(np.uint8)

    def _dynamic(self, shares: Array, drawn: Array | None) -> Array:
        """Return indices into the book. A share is rounded to float16 first, whose 65,536 numbers
        have a table of indices."""
        xp = array_module(shares)
        half = narrow(shares.astype(np.float32, copy=False), np.dtype(np.float16)).view(np.uint16)
        if drawn is None:
            return xp.asarray(_nearest(self.bits))[half]
        below = xp.asarray(_below(self.bits))[half]
        book = xp.asarray(book_of(self.bits))
        distance = shares - book[below]
        return (below + (drawn * (book[below + 1] - book[below]) < distance)).astype(np.uint8)


def make(
    name: str,
    *,
    block: int = KERNEL_BLOCK,
    book: str = "linear",
    rounding: str = "nearest",
    feedback: str = "auto",
    seed: int = 0,
) -> TwoPhase:
    """Return the scheme.

    Args:    block: numbers of one scale; book: one of BOOKS; rounding: one of ROUNDINGS.
             feedback: keep what is lost; auto: with rounding to the nearest. seed: of stochastic
             rounding.
    Raises:  ConfigError for another value.
    """
    for option, value, choices in (
        ("book", book, BOOKS),
        ("rounding", rounding, ROUNDINGS),
        ("feedback", feedback, FEEDBACK),
    ):
        if value not in choices:
            raise ConfigError(
                f"compress {name}: {option}={value!r}; choose one of {', '.join(choices)}"
            )
    if not 2 <= block <= 1 << 20 or block % 2:
        raise ConfigError(
            f"compress {name}: block={block}; a block has an even number of elements, from 2 to "
            f"{1 << 20}"
        )
    codec = Quantiser(BITS[name], block=block, book=book, rounding=rounding)
    return TwoPhase(
        name,
        codec,
        feedback=rounding == "nearest" if feedback == "auto" else feedback == "yes",
        seed=seed,
    )


@cache
def book_of(bits: int) -> np.ndarray:
    """Return the dynamic code book: 2^bits numbers from -1 to 1, rising, float32.

    Decade i of d = bits - 1 (from 10^-i down to a tenth of it) has 2^(d-1-i) numbers of each sign,
    in the middles of equal parts. The book also has 0 and 1; the lowest is -1, so that every number
    lies between two of them.
    """
    decades = bits - 1
    numbers = [0.0, 1.0]
    for decade in range(decades):
        edges = np.linspace(0.1, 1, 2 ** (decades - 1 - decade) + 1)
        middles = 10.0**-decade * (edges[:-1] + edges[1:]) / 2
        numbers += [*middles, *-middles]
    book = np.sort(np.array(numbers, np.float32))
    book[0] = -1
    return book


@cache
def _halves() -> np.ndarray:
    """Return the value of each float16 in float32, clipped to -1 … 1; NaN as 0."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return np.clip(np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=-1.0), -1, 1)


@cache
def _nearest(bits: int) -> np.ndarray:
    """Return, for each float16, the index of the nearest number of the book, of two the upper."""
    book = book_of(bits)
    return np.searchsorted((book[:-1] + book[1:]) / 2, _halves(), side="right").astype(np.uint8)


@cache
def _below(bits: int) -> np.ndarray:
    """Return, for each float16, the index of the last number of the book that is not above it, but
    for the highest."""
    book = book_of(bits)
    return np.clip(np.searchsorted(book, _halves(), side="right") - 1, 0, len(book) - 2).astype(
        np.uint8
    )


def _blocks(values: Array, block: int) -> Array:
    """Return (⌈n/block⌉, block), padded with zeros; a copy where it is padded."""
    xp = array_module(values)
    rest = -values.size % block
    if rest:
        values = xp.concatenate([values, xp.zeros(rest, values.dtype)])
    return values.reshape(-1, block)


def _largest(blocks: Array) -> Array:
    """Return max |number| of each block; NaN if it holds one. They are compared as integers, whose
    order is that of positive floats: NumPy is three times as fast with them along short rows."""
    xp = array_module(blocks)
    kind = blocks.dtype
    return xp.abs(blocks).view(f"i{kind.itemsize}").max(axis=1).view(kind)


def _packed(codes: Array) -> Array:
    """Return two codes per byte, the first in the low half."""
    xp = array_module(codes)
    if codes.size % 2:
        codes = xp.concatenate([codes, codes[:1] * 0])
    pairs = xp.ascontiguousarray(codes).view("<u2")
    return ((pairs & 15) | ((pairs >> 4) & 240)).astype(np.uint8)


def _unpacked(pairs: Array, count: int) -> Array:
    """Return the codes, 0 … 15. It works, like _packed, on whole arrays of two bytes: a step of two
    through bytes is slower."""
    wide = pairs.astype("<u2")
    codes: Array = ((wide | (wide << 4)) & 0x0F0F).view(np.uint8)[:count]
    return codes
