"""Cross-entropy, forward and backward in one pass over the logits: the NumPy reference, then the
launcher.

    losses, dlogits = cross_entropy(logits, targets, scale=1 / tokens)                # a new array
    losses, dlogits = cross_entropy(logits, targets, scale=1 / tokens, out=logits)    # over the logits

logits (…, columns) in float32, float16 or bfloat16, targets (…) int64; losses (…) float32, one per
row. dlogits is the gradient of scale (times factor[0]) times the sum of the losses. NumPy (CPU
build) or CuPy.
Bytes moved: at the head of cross_entropy.cu.
"""

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import ShapeError
from minidist.kernels.checks import check_alike, check_number
from minidist.kernels.loader import FLOATS, MOST_SHARED, Source, c_type, launch, version_for

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "cross_entropy.cu",
    [f"cross_entropy_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS],
)
BLOCK = {1: 128, 2: 256, 3: 256}  # threads
LONG = 8192  # columns of a long row; few such rows fit a multiprocessor: 1,024 threads each
# bytes of a row that version 3 can keep, if a block may have that much
MOST_KEPT = MOST_SHARED - 256


def is_kept(logits: Array) -> bool:
    """Return whether version 3 can keep a row in shared memory on this device: sm_80 has 163 KiB,
    sm_89 and others 99."""
    row = logits.shape[-1] * logits.dtype.itemsize
    if isinstance(logits, np.ndarray) or row <= 48 << 10:  # as every GPU has; asking takes a while
        return row <= MOST_KEPT
    return row <= min(MOST_KEPT, logits.device.attributes["MaxSharedMemoryPerBlockOptin"] - 256)


def cross_entropy_reference(
    logits: np.ndarray, targets: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return losses (…) and the gradient (…, columns) of scale times their sum."""
    top = logits.max(axis=-1, keepdims=True)
    e = np.exp(logits - top)
    total = e.sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)
    losses = np.log(total) + (top - picked)
    gradient = e / total
    np.put_along_axis(
        gradient,
        targets[..., None],
        np.take_along_axis(gradient, targets[..., None], -1) - 1,
        axis=-1,
    )
    return losses[..., 0], gradient * scale


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    scale: float,
    factor: Array | None = None,
    gradient: bool = True,
    out: Array | None = None,
    version: int | None = None,
) -> tuple[Array, Array | None]:
    """Return losses and dlogits. A target outside the row gives NaN, because the host does not wait
    to check targets.

    Args:    gradient: False: dlogits is None; out: the array for dlogits, possibly the logits
             themselves.
             factor: one float32 number on the device of the logits, so that the host does not wait
             to read it.
    Raises:  ShapeError if targets, factor or `out` do not fit.
    """
    xp = array_module(logits)
    columns = logits.shape[-1]
    if targets.shape != logits.shape[:-1]:
        raise ShapeError(
            f"cross_entropy: targets {targets.shape} do not fit logits {logits.shape}; "
            f"they need shape {logits.shape[:-1]}"
        )
    check_alike("cross_entropy", logits, out)
    check_number("cross_entropy", "factor", factor)
    losses = xp.empty(targets.shape, np.float32)
    dx = (xp.empty(logits.shape, logits.dtype) if out is None else out) if gradient else None
    if logits.size == 0:
        return losses, dx
    rows = logits.size // columns
    kept = columns * logits.dtype.itemsize
    checked = [logits] if dx is None else [logits, dx]
    if version is None and not is_kept(logits):
        version = 2
    version = version_for("cross_entropy", version, *checked, packed=3)
    launch(
        SOURCE,
        f"cross_entropy_v{version}<{c_type(logits)}>",
        grid=-(-rows // BLOCK[1]) if version == 1 else rows,
        block=1024 if version == 3 and columns >= LONG else BLOCK[version],
        args=(logits, targets, losses, dx, rows, columns, scale, factor),
        shared=kept if version == 3 else 0,
    )
    return losses, dx
