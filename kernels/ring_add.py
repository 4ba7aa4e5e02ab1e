"""The add of a ring step with float32 accumulation: the reference, then the launchers of
ring_add.cu's two versions.

    ring_add(incoming, own, outgoing=chunk)             # for the next rank, rounded once
    ring_add(incoming, own, total=own)                  # last step: the sum in float32, in place

incoming and outgoing, received and sent: (n,) float32, float16 or bfloat16; own and total: (n,)
float32. Contiguous, NumPy (CPU build) or CuPy. Moved: 4 + 2 itemsize bytes per element, 4 more if
total is written too.
"""

import numpy as np

from minidist.device.backend import Array
from minidist.errors import ConfigError, KernelError, ShapeError
from minidist.kernels.loader import FLOATS, Source, begin_aligned, c_type, launch

VERSIONS = (1, 2)
SOURCE = Source(
    "ring_add.cu", [f"ring_add_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS]
)
BLOCK = 256  # threads


def ring_add_reference(incoming: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the sum in own's dtype."""
    return incoming.astype(own.dtype) + own


def ring_add(
    incoming: Array,
    own: Array,
    *,
    outgoing: Array | None = None,
    total: Array | None = None,
    version: int | None = None,
) -> None:
    """Write incoming + own, added in float32, into `outgoing` (rounded once) or `total` or both.

    outgoing may be incoming, and total may be own.
    Raises: ConfigError without outgoing and total; ShapeError if lengths differ; KernelError if
            `version` does not fit.
    """
    arrays = [array for array in (incoming, own, outgoing, total) if array is not None]
    if len(arrays) == 2:
        raise ConfigError("ring_add: nowhere to write the sum; pass outgoing or total")
    if any(array.shape != incoming.shape for array in arrays):
        raise ShapeError(
            f"ring_add: arrays of shapes {', '.join(str(array.shape) for array in arrays)}; "
            f"they must be alike"
        )
    fits = begin_aligned(*arrays)
    version = version or (2 if fits else 1)
    if version == 2 and not fits:
        raise KernelError(
            "ring_add_v2 loads 16 bytes at a time, and an array begins elsewhere; take version 1"
        )
    if incoming.size:
        a_block = BLOCK * (16 // incoming.dtype.itemsize if version == 2 else 1)
        launch(
            SOURCE,
            f"ring_add_v{version}<{c_type(incoming)}>",
            grid=-(-incoming.size // a_block),
            block=BLOCK,
            args=(incoming, own, outgoing, total, incoming.size),
        )
