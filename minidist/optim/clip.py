"""The global norm of a gradient, and clipping by it.

Squares are summed in float64, a block at a time through a small scratch, so that no float64 copy of a gradient exists.
The blocks of a tensor do not depend on where it lies in memory and their sums are added exactly, so the norm has the
same bits in whatever order and buckets the tensors come.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from minidist.backend import Array, array_module

_BLOCK = 8192           # float64 numbers; OpenBLAS splits a dot product of more than 10,000 among its threads
_DEVICE_BLOCK = 1 << 24


def sum_of_squares(gradients: Iterable[Array | None]) -> float:
    """Sum of the squares of all elements, in float64. None counts as zero."""
    sums = [block for gradient in gradients if gradient is not None for block in block_sums(gradient)]
    return add_exactly(float(block) for block in sums)  # a GPU is waited for here, when it has all of them to do


def add_exactly(sums: Iterable[float]) -> float:
    """Sum of the blocks' sums of squares: the same bits in whatever order they come."""
    partial = list(sums)
    return math.fsum(partial) if np.isfinite(partial).all() else float(np.sum(partial))


def block_sums(gradient: Array) -> Iterator[Array]:
    """The sum of squares of each block of one tensor: float64, no dims."""
    xp = array_module(gradient)
    flat, size = gradient.reshape(-1), _BLOCK if xp is np else _DEVICE_BLOCK
    scratch = xp.empty(min(size, flat.size), np.float64)
    for start in range(0, flat.size, size):
        piece = flat[start:start + size]
        wide = scratch[:piece.size]
        wide[...] = piece
        yield xp.dot(wide, wide)


def global_norm(gradients: Iterable[Array | None], *, group: Any = None) -> float:
    """Square root of the sum of squares over all tensors: one number for the whole model.

    Args:    gradients: any shapes and float dtypes; group: whose ranks each hold other pieces of the gradient (ZeRO,
             tensor parallel). Leave it out where every rank holds all of it (DDP).
    Returns: the same bits on every rank; inf or nan if an element is.
    Cost:    without group none; with it one all-reduce of 8 bytes, counted as control.
    """
    total = sum_of_squares(gradients)
    if group is not None:
        with group.ledger.control():
            total = float(group.all_reduce(np.asarray([total]))[0])
    return math.sqrt(total)


def clip_scale(norm: float, limit: float) -> float:
    """What to multiply gradients of this norm by so that it is at most `limit`: hand it to `optimizer.step(scale=)`.

    1 within the limit; not finite where the norm is not (then so are the gradients). Formula as in PyTorch.
    """
    if not math.isfinite(norm):
        return math.nan
    return min(1.0, limit / (norm + 1e-6))


def clip_by_global_norm(gradients: Iterable[Array | None], limit: float, *, group: Any = None) -> float:
    """Scale all gradients in place so that their global norm is at most `limit`; returns the norm before.

    An optimizer can do the scaling on its way: `step(scale=clip_scale(global_norm(gradients), limit))` saves a pass.
    Args, Cost: as `global_norm`.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    norm = global_norm(present, group=group)
    scale = clip_scale(norm, limit)
    if scale != 1.0:
        for gradient in present:
            gradient *= scale
    return norm
