"""The k largest of many numbers, or all of at least a threshold: references, then the launchers of
selection.cu.

    indices, values = top_k(x, k)                           # int32 (k,), rising; x's numbers there
    indices, values = at_least(x, threshold)                # the same of all with |x| >= threshold

x float32 or bfloat16, fewer than 2^31 elements in any shape (indices are those of x flat),
contiguous, NumPy (CPU build) or CuPy. Of equal |x| the first are taken; NaN counts as the largest.
at_least waits for the count, top_k never.
"""

import numpy as np

from minidist.device.backend import Array, array_module, dtype_name
from minidist.errors import ConfigError, DtypeError
from minidist.kernels.loader import Source, c_type, launch

VERSIONS = (1, 2)
KINDS = {"float32": "float", "bfloat16": "__nv_bfloat16"}
SOURCE = Source(
    "selection.cu",
    [
        *(
            f"{name}<{kind}>"
            for kind in KINDS.values()
            for name in ("kth_v1", "kth_v2_count", "select_count", "select_write")
        ),
        "kth_v2_pick",
    ],
)
# threads; elements that a block selects from
BLOCK = 256
A_BLOCK = 1024
MOST_BLOCKS = 8 * 132  # that count digits: 8 for each of 132 multiprocessors


def top_k_reference(x: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the first k by size (NaN first, ties in order), in ascending order."""
    flat = np.abs(x.reshape(-1))
    return np.sort(np.lexsort((np.arange(flat.size), -flat, ~np.isnan(flat)))[:k])


def at_least_reference(x: np.ndarray, threshold: float) -> np.ndarray:
    """Return the indices of all elements with |x| not below the threshold."""
    return np.flatnonzero(~(np.abs(x.reshape(-1)) < threshold))


def top_k(x: Array, k: int, *, version: int | None = None) -> tuple[Array, Array]:
    """Return indices and values of the k largest |x|. Raises: ConfigError for a k outside of 0 … n;
    DtypeError."""
    name = _name("top_k", x)
    n = x.size
    version = version or 2
    if not 0 <= k <= n:
        raise ConfigError(f"top_k: {k} of {n} numbers; choose k from 0 to {n}")
    if k == 0:
        return _nothing(x)
    xp = array_module(x)
    state = xp.asarray(np.array([0, k], np.uint32))
    if version == 1:
        launch(SOURCE, f"kth_v1<{name}>", grid=-(-n // BLOCK), block=BLOCK, args=(x, state, n, k))
    else:
        digits = xp.asarray(np.zeros((4, BLOCK), np.uint32))
        for shift, counters in zip((24, 16, 8, 0), digits, strict=True):
            launch(
                SOURCE,
                f"kth_v2_count<{name}>",
                grid=min(-(-n // BLOCK), MOST_BLOCKS),
                block=BLOCK,
                args=(x, state, counters, n, shift),
            )
            launch(SOURCE, "kth_v2_pick", grid=1, block=BLOCK, args=(counters, state, shift))
    return _selected(x, name, state, k)


def at_least(x: Array, threshold: float) -> tuple[Array, Array]:
    """Return indices and values of all |x| >= threshold. Raises: ConfigError for a threshold below
    0; DtypeError."""
    name = _name("at_least", x)
    if not threshold >= 0:
        raise ConfigError(
            f"at_least: a threshold of {threshold}; sizes are compared with it, so choose 0 or more"
        )
    if x.size == 0:
        return _nothing(x)
    with np.errstate(over="ignore"):
        size = np.array([threshold], np.float64).astype(np.float32)
    if float(size[0]) < threshold:
        # rounded up, so that smaller elements are not selected
        size = np.nextafter(size, np.float32(np.inf))
    state = np.concatenate([size.view(np.uint32), np.array([x.size], np.uint32)])
    return _selected(x, name, array_module(x).asarray(state), None)


def _selected(x: Array, name: str, state: Array, k: int | None) -> tuple[Array, Array]:
    """Return the indices and values selected by `state`; k: their number, or None to read it from
    the device."""
    xp = array_module(x)
    blocks = -(-x.size // A_BLOCK)
    counts = xp.empty((2, blocks), np.int32)
    launch(
        SOURCE,
        f"select_count<{name}>",
        grid=blocks,
        block=BLOCK,
        args=(x, state, counts[0], counts[1], x.size),
    )
    counts = xp.cumsum(counts, axis=1, dtype=np.int32)
    indices, values = _nothing(x, int(counts[:, -1].sum()) if k is None else k)
    if indices.size:
        launch(
            SOURCE,
            f"select_write<{name}>",
            grid=blocks,
            block=BLOCK,
            args=(x, state, counts[0], counts[1], indices, values, x.size),
        )
    return indices, values


def _nothing(x: Array, k: int = 0) -> tuple[Array, Array]:
    """Return new arrays for k indices and values."""
    xp = array_module(x)
    return xp.empty(k, np.int32), xp.empty(k, x.dtype)


def _name(caller: str, x: Array) -> str:
    """Return the C name of x's element type. Raises: DtypeError."""
    if dtype_name(x.dtype) not in KINDS:
        raise DtypeError(
            f"{caller}: no kernel for {dtype_name(x.dtype)}; it takes {' or '.join(KINDS)}"
        )
    return c_type(x)
