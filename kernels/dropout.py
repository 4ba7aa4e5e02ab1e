"""Residual + dropout; the mask is drawn again in backward, not kept: the NumPy reference, then the
launcher.

    y = residual_dropout(x, residual, rate=0.1, key=stream_key("layer/dropout/3", seed))     # residual None: 0
    dx = residual_dropout(dy, None, rate=0.1, key=…)                                        # its gradient for x

x (…, columns) in float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy. The numbers
are those of backend.random_bits, so ops.dropout gives the same mask on a CPU, on a GPU, and on
every shard.
"""

import numpy as np

from minidist.device.backend import Array, array_module, is_array
from minidist.errors import ConfigError, ShapeError
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2)
SOURCE = Source(
    "dropout.cu",
    [f"residual_dropout_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS],
)
BLOCK = 256  # threads


def residual_dropout_reference(
    x: np.ndarray, residual: np.ndarray | None, bits: np.ndarray, rate: float
) -> np.ndarray:
    """Return residual + x / (1 - rate) where an element's 64 bits reach rate 2^64, else only the
    residual."""
    y = np.where(bits >= np.uint64(int(rate * 2.0**64)), x / (1.0 - rate), 0 * x)
    return y if residual is None else y + residual


def residual_dropout(
    x: Array,
    residual: Array | None = None,
    *,
    rate: float,
    key: int | Array,
    tokens: Array | None = None,
    first_column: int = 0,
    width: int | None = None,
    version: int | None = None,
) -> Array:
    """Return x after dropout, plus the residual: a new array of x's shape and dtype.

    Args:    key: backend.stream_key of the layer, step and seed; or uint64 (1,) on x's device, read
             when the kernel runs.
             tokens: (…) int64, the global index of each row (default: 0, 1, …).
             first_column, width: the first of these columns, and the number of all columns
             (default: these are all).
    Raises:  ConfigError for a rate outside [0, 1); ShapeError if residual or tokens do not fit.
    """
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"residual_dropout: rate {rate} is not in [0, 1)")
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(
            f"residual_dropout: a residual of shape {residual.shape} does not fit x {x.shape}"
        )
    if tokens is not None and tokens.shape != x.shape[:-1]:
        raise ShapeError(
            f"residual_dropout: x {x.shape} needs tokens of shape {x.shape[:-1]}, "
            f"not {tokens.shape}"
        )
    y = array_module(x).empty(x.shape, x.dtype)
    if x.size == 0:
        return y
    columns = x.shape[-1]
    version = version_for(
        "residual_dropout", version, *((x,) if residual is None else (x, residual))
    )
    stream, number = (key, 0) if is_array(key) else (None, int(key))
    elements = -(-x.size // (16 // x.dtype.itemsize)) if version == 2 else x.size
    launch(
        SOURCE,
        f"residual_dropout_v{version}<{c_type(x)}>",
        grid=-(-elements // BLOCK),
        block=BLOCK,
        args=(
            x,
            residual,
            y,
            tokens,
            x.size,
            columns,
            first_column,
            width or columns,
            stream,
            number,
            int(rate * 2.0**64),
            1.0 / (1.0 - rate),
        ),
    )
    return y
