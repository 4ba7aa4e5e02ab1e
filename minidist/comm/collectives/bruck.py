"""Bruck: an all-to-all in log2(P) messages per rank instead of P-1, for parts so small that only
the number of messages counts.

A part for the rank k places on is sent in jumps of 1, 2, 4, ...: one jump for each binary digit of
k that is 1. In each step a rank sends, in one message, all parts that have this jump to make: its
own and those that it has received in earlier steps.

    P=4, parts by their distance k, from r0 to r0+k             step 0 (jump 1)   k = 1, 3
                                                                step 1 (jump 2)   k = 2, 3

notes: N4 §3 All-to-All (N4:192).    Source: Bruck, Ho, Kipnis & Weathersby 1994.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from minidist.comm.calls.buffers import PlaceOf, bytes_view
from minidist.comm.calls.call import Call
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.collectives.naive import in_workspace


def plain_all_to_all(group: BlockingGroup, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Exchange parts of one shape; part d is for rank d. Return the parts for this rank, by
    source."""
    # by how far they have to go
    slots = [parts[(group.rank + far) % group.size] for far in range(group.size)]
    jump = 1
    while jump < group.size:
        jumping = [far for far in range(group.size) if far & jump]  # one message holds all of these
        dst = (group.rank + jump) % group.size
        src = (group.rank - jump) % group.size
        arrived = group.exchange(np.stack([slots[far] for far in jumping]), dst=dst, src=src)
        for far, part in zip(jumping, arrived, strict=True):
            slots[far] = part
        jump *= 2
    # slot k is from k ranks before
    return [slots[(group.rank - src) % group.size] for src in range(group.size)]


# The real version takes parts of any shapes. A message begins with their labels (the shapes),
# because a header has no space for them.
#
#     [ D, dim, dim, ... | D, dim, ... | ... ][ bytes of part 0 | bytes of part 1 | ... ]
#       the label of each part: its number of dims D and its dims, 8 bytes each

WORD = np.dtype("<i8")
_NO_LABELS = np.empty(0, np.uint8)


class PackedShapes(NamedTuple):
    """The shapes and byte lengths of packed parts, read from their labels."""

    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]  # in bytes
    # where each begins, and the last one ends, in bytes from where the labels begin
    starts: tuple[int, ...]


def labels_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the labels of arrays, as a read-only uint8 array."""
    return _labels(tuple(part.shape for part in parts))


@lru_cache(maxsize=256)
def _labels(shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    labels = np.array([number for shape in shapes for number in (len(shape), *shape)], WORD).view(
        np.uint8
    )
    labels.setflags(write=False)
    return labels


def shapes_in(
    packed: np.ndarray, count: int, itemsize: int, like: np.ndarray = _NO_LABELS
) -> PackedShapes:
    """Read the labels of `count` parts at the beginning of `packed` (uint8).

    Args:    like: labels that `packed` probably begins with; their parsed form is cached.
    """
    first = packed[: len(like)].tobytes()
    if first and first == like.tobytes():
        return _parsed_again(first, count, itemsize)
    return _parsed(packed, count, itemsize)


@lru_cache(maxsize=256)
def _parsed_again(labels: bytes, count: int, itemsize: int) -> PackedShapes:
    return _parsed(np.frombuffer(labels, np.uint8), count, itemsize)


def _parsed(packed: np.ndarray, count: int, itemsize: int) -> PackedShapes:
    words = packed[: len(packed) & -WORD.itemsize].view(WORD)
    read = 0
    shapes = []
    for _ in range(count):
        behind = read + 1 + int(words[read])
        shapes.append(tuple(words[read + 1 : behind].tolist()))
        read = behind
    lengths = tuple(math.prod(shape) * itemsize for shape in shapes)
    return PackedShapes(
        tuple(shapes), lengths, tuple(accumulate(lengths, initial=read * WORD.itemsize))
    )


def pack(call: Call, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return one array of bytes: the labels of the arrays, then their bytes."""
    pieces = [labels_of(parts), *(bytes_view(part) for part in parts)]
    return np.concatenate(pieces, out=call.workspace(sum(map(len, pieces)), np.dtype(np.uint8)))


def unpack(bundle: np.ndarray, count: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return the `count` packed arrays, as views of the bundle."""
    packed = shapes_in(bundle, count, dtype.itemsize)
    return [
        bundle[start : start + length].view(dtype).reshape(shape)
        for shape, length, start in zip(
            packed.shapes, packed.lengths, packed.starts[:-1], strict=True
        )
    ]


def all_to_all(call: Call, parts: Sequence[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    """Return the parts for this rank, by source. Step s: send every part that has a jump of 2^s to
    make to the rank 2^s places on.

    P=4      r0 sends    r1 sends    r2 sends    r3 sends
    step 0   -> r1       -> r2       -> r3       -> r0
    step 1   -> r2       -> r3       -> r0       -> r1

    Cost:    ceil(log2 P) messages per rank. The part from r for d is in as many messages as (d - r)
             mod P has binary ones, each time with its label. Workspace: the bundle sent, and those
             received so far: ceil(log2 P) + 1 of them at the end, each of at most P/2 parts. A part
             is copied once per jump, and once at its end.
    """
    slots = [parts[(call.rank + far) % call.size] for far in range(call.size)]
    for step in range((call.size - 1).bit_length()):
        jump = 1 << step
        jumping = [far for far in range(call.size) if far & jump]
        bundle = pack(call, [slots[far] for far in jumping])
        arrived = call.exchange_blocks(
            (call.rank + jump) % call.size,
            bundle,
            (call.rank - jump) % call.size,
            in_workspace(call),
            step=step,
        )
        for far, part in zip(jumping, unpack(arrived, len(jumping), parts[0].dtype), strict=True):
            slots[far] = part
    received = {call.rank: parts[call.rank]}
    for far in range(1, call.size):
        src = (call.rank - far) % call.size
        received[src] = place(src)(slots[far].shape, slots[far].dtype)
        received[src][...] = slots[far]
    return [received[src] for src in range(call.size)]
