"""The global norm of a gradient, and clipping by it.

Squares are summed in float64, block by block through a small scratch. The blocks of a tensor do not
depend on its place in memory, and their sums are added exactly. So the norm has the same bits for
any order of tensors and any buckets. On a GPU one launch takes all tensors
(kernels/global_norm.cu); its bits depend on their order. The results of `squares_of`, `norm_of` and
`clip_scale` stay on the GPU, where the optimizer reads them, so the host does not wait.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from minidist.device.backend import Array, array_module, is_array, on_host
from minidist.device.dispatch import kernel

# float64 numbers; OpenBLAS splits a dot product of more than 10,000 among its threads
_BLOCK = 8192
_TOGETHER = 16  # blocks of the host, which costs fewer calls
_DEVICE_BLOCK = 1 << 24


def sum_of_squares(gradients: Iterable[Array | None]) -> float:
    """Return the sum of the squares of all elements, in float64; None counts as zero. The host
    waits for a GPU."""
    return float(squares_of(gradients))


def squares_of(gradients: Iterable[Array | None]) -> float | Array:
    """Return the sum of the squares of all elements; for gradients on a GPU a float64 array without
    dims there, and the host does not wait."""
    present = [gradient for gradient in gradients if gradient is not None]
    xp = array_module(*present)
    fast = (
        kernel("sum_of_squares", *present)
        if len({gradient.dtype for gradient in present}) == 1
        else None
    )
    if fast is not None:
        return fast(present)
    sums = [block for gradient in present for block in block_sums(gradient)]
    return add_exactly(map(float, sums)) if on_host(*present) else xp.stack(sums).sum()


def add_exactly(sums: Iterable[float]) -> float:
    """Return the sum of the blocks' sums of squares; the order does not change its bits."""
    partial = list(sums)
    return math.fsum(partial) if np.isfinite(partial).all() else float(np.sum(partial))


def block_sums(gradient: Array) -> Iterator[Array]:
    """Yield the sum of squares of each block of one tensor: float64, without dims."""
    xp = array_module(gradient)
    flat = gradient.reshape(-1)
    size = _BLOCK if on_host(gradient) else _DEVICE_BLOCK
    whole = flat.size // size * size
    together = _TOGETHER * size if on_host(gradient) else size
    for start in range(0, whole, together):
        wide = flat[start : min(start + together, whole)].astype(np.float64)
        wide = wide.reshape(-1, 1, size)
        yield from xp.matmul(wide, wide.swapaxes(1, 2)).reshape(-1)  # a dot product of each block
    if whole < flat.size:
        wide = flat[whole:].astype(np.float64)
        yield xp.dot(wide, wide)


def global_norm(gradients: Iterable[Array | None], *, group: Any = None) -> float:
    """Return the square root of the sum of squares over all tensors: one number for the whole
    model.

    Args:    group: ranks that hold different parts of the gradient (ZeRO, tensor parallel), or
             None.
    Returns: the same bits on every rank; inf or nan if an element is.
    Cost:    with a group one all-gather of a float64 per rank, counted as control; sums are added
             in rank order.
    """
    total = sum_of_squares(gradients)
    if group is not None:
        with group.ledger.control():
            total = float(np.sum(group.all_gather(np.array([total]), algorithm="ring")))
    return math.sqrt(total)


def norm_of(squares: float | Array) -> float | Array:
    """Return the square root of a sum of squares, on the device of the sum."""
    return array_module(squares).sqrt(squares) if is_array(squares) else math.sqrt(squares)


def clip_scale(norm: float | Array, limit: float) -> float | Array:
    """Return the factor, for `optimizer.step(scale=)`, that brings gradients of this norm to
    `limit`, as PyTorch's.

    Returns: 1 within the limit; not finite if the norm is not; on the device of the norm.
    """
    if is_array(norm):
        # inf - inf is NaN
        return array_module(norm).minimum(limit / (norm + 1e-6), 1.0) + (norm - norm)
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan


def clip_by_global_norm(
    gradients: Iterable[Array | None], limit: float, *, group: Any = None
) -> float:
    """Scale all gradients in place so that their global norm is at most `limit`. Args, Cost: as
    `global_norm`.

    Returns: the norm before. `step(scale=clip_scale(global_norm(gradients), limit))` of an
    optimizer saves this pass.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    norm = global_norm(present, group=group)
    scale = clip_scale(norm, limit)
    if scale != 1.0:
        for gradient in present:
            gradient *= scale
    return norm
