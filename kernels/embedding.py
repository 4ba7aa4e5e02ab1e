"""The gradient of an embedding without atomics: the reference, then the launcher of embedding.cu's
three versions.

    # ids (…) integers below count, dy (…, width) -> (count, width)
    dtable = embedding_gradient(ids, dy, count)

dy float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy. Sums are float32, in a fixed
order: the same bits each time. Moved: dy.nbytes read, the result's written; versions 2 and 3 sort
the ids first. Ids may stay on the host while dy is on a GPU; then the host sorts them while the GPU
computes.
"""

import numpy as np

from minidist.device.backend import Array, array_module, beside
from minidist.errors import ShapeError
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "embedding.cu",
    [f"embedding_gradient_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS],
)
# threads per block, and per warp
BLOCK = 256
LANES = 32


def embedding_gradient_reference(ids: np.ndarray, dy: np.ndarray, count: int) -> np.ndarray:
    """Return the gradient of the table: row t is the sum of the rows of dy whose id is t, in their
    order."""
    result = np.zeros((count, dy.shape[-1]), dy.dtype)
    np.add.at(result, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
    return result


def embedding_gradient(
    ids: Array,
    dy: Array,
    count: int,
    *,
    found: tuple[Array, Array] | None = None,
    version: int | None = None,
) -> Array:
    """Return the gradient (count, width), a new array of dy's dtype. Ids outside of 0 … count - 1
    are ignored.

    Args:    found: runs(ids, count) on the device of dy, if the caller has them.
    Raises:  ShapeError if dy does not fit ids; KernelError if `version` does not fit.
    """
    if dy.shape[:-1] != ids.shape or dy.ndim == 0:
        raise ShapeError(
            f"embedding_gradient: dy {dy.shape} does not fit ids {ids.shape}; it needs a row for "
            "each"
        )
    xp = array_module(dy)
    width = dy.shape[-1]
    result = xp.empty((count, width), dy.dtype)
    version = version_for("embedding_gradient", version, dy, result, packed=3)
    if result.size == 0:
        return result
    kernel = f"embedding_gradient_v{version}<{c_type(dy)}>"
    ids = array_module(ids).ascontiguousarray(ids.reshape(-1), dtype="int64")
    threads = BLOCK if version == 3 else min(BLOCK, -(-width // LANES) * LANES)
    if version == 1:
        launch(
            SOURCE,
            kernel,
            grid=count,
            block=threads,
            args=(beside(ids, dy), dy, result, ids.size, width),
        )
        return result
    order, starts = found or (beside(each, dy) for each in runs(ids, count))
    a_row = LANES * (16 // dy.dtype.itemsize)
    launch(
        SOURCE,
        kernel,
        grid=(count, -(-width // a_row) if version == 3 else 1),
        block=threads,
        args=(order, starts, dy, result, width),
    )
    return result


def runs(ids: Array, count: int) -> tuple[Array, Array]:
    """Return the positions of each id, sorted by id and then by position, and the bounds of each
    id's run.

    For ids on the host, the host sorts while the GPU computes. CuPy's sort waits for the GPU.
    Returns: order (n,) int32; starts (count + 1,) int32: id t is at order[starts[t]:starts[t + 1]].
    """
    xp = array_module(ids)
    order = xp.argsort(ids, kind="stable")
    starts = xp.searchsorted(ids[order], xp.arange(count + 1))
    return order.astype("int32"), starts.astype("int32")
