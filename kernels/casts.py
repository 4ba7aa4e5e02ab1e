"""Casts to fewer bits, with a scale and the largest |element| as a by-product: the launchers of
casts.cu.

    y, amax = cast(x, "float8_e4m3fn", scale)  # scale float32 (1,) on the device, or None for 1
    x = restore(y, "float8_e4m3fn", scale)     # only fp8: exact, then / scale; float32 or bfloat16

float32 or bfloat16 to fp8 (e4m3, e5m2: y is uint8, as CuPy has no dtype for it;
`y.view(ml_dtypes.…)` on the host), float32 to float16 or bfloat16. Rounded as ml_dtypes does, bit
for bit; fp8 saturates. Bytes: at the head of casts.cu.
"""

import ml_dtypes
import numpy as np

from minidist.device.backend import Array, array_module, dtype_name
from minidist.errors import DtypeError, KernelError
from minidist.kernels.checks import check_number
from minidist.kernels.loader import Source, begin_aligned, c_type, launch

VERSIONS = (1, 2, 3)
EXPONENT_BITS = {"float8_e4m3fn": 4, "float8_e5m2": 5}
TARGETS = {"float32": ("float16", "bfloat16", *EXPONENT_BITS), "bfloat16": tuple(EXPONENT_BITS)}
# threads; blocks: 8 for each of 132 multiprocessors
BLOCK = 256
MOST_BLOCKS = 8 * 132
_NAMES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def _instance(version: int, source: str, target: str) -> str:
    return (
        f"cast_v{version}<{_NAMES[source]}, {_NAMES.get(target, 'unsigned char')}, "
        f"{EXPONENT_BITS.get(target, 0)}>"
    )


SOURCE = Source(
    "casts.cu",
    [
        *(
            _instance(version, source, target)
            for version in VERSIONS
            for source, targets in TARGETS.items()
            for target in targets
        ),
        *(
            f"restore_fp8<{exponent}, {_NAMES[kind]}>"
            for exponent in EXPONENT_BITS.values()
            for kind in ("float32", "bfloat16")
        ),
    ],
)


def cast_reference(x: np.ndarray, target: str, scale: float = 1.0) -> tuple[np.ndarray, np.float32]:
    """Return x (float32 or bfloat16) times scale in float32, clipped to fp8's range, rounded once;
    and the largest |x|."""
    wide = x.astype(np.float32)
    amax = np.abs(wide).max(initial=0)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = wide * np.float32(scale)
        if target in EXPONENT_BITS:
            largest = float(ml_dtypes.finfo(target).max)
            wide = np.clip(wide, -largest, largest)
        return wide.astype(target), amax


def cast(
    x: Array, target: str, scale: Array | None = None, *, version: int | None = None
) -> tuple[Array, Array]:
    """Return x times scale in `target`, of x's shape; and the largest |x| before scaling, float32
    (1,), NaN if an element is.

    Raises: DtypeError for a pair of dtypes that TARGETS does not name; KernelError if `version`
    does not fit.
    """
    xp = array_module(x)
    source = dtype_name(x.dtype)
    if target not in TARGETS.get(source, ()):
        raise DtypeError(f"cast: no kernel from {source} to {target}; they know {TARGETS}")
    check_number("cast", "scale", scale)
    y = xp.empty(x.shape, np.uint8 if target in EXPONENT_BITS else target)
    amax = xp.asarray(np.zeros(1, np.uint32))
    fits = begin_aligned(x, y)
    version = version or (3 if fits else 2)
    if version == 3 and not fits:
        raise KernelError(
            "cast_v3 loads 16 bytes at a time, and x begins elsewhere; take version 2"
        )
    if x.size:
        a_block = BLOCK * (16 // x.dtype.itemsize if version == 3 else 1)
        blocks = -(-x.size // a_block)
        launch(
            SOURCE,
            _instance(version, source, target),
            grid=min(blocks, MOST_BLOCKS) if version == 3 else blocks,
            block=BLOCK,
            args=(x, y, scale, amax, x.size),
        )
    return y, amax.view(np.float32)


def restore(y: Array, target: str, scale: Array | None = None, *, kind: str = "float32") -> Array:
    """Return the numbers of fp8 bytes (uint8), divided by scale, in `kind`: float32 or bfloat16.

    Raises: DtypeError for another dtype.
    """
    if target not in EXPONENT_BITS or c_type(y) != "unsigned char":
        raise DtypeError(
            f"restore: {dtype_name(y.dtype)} as {target}; it takes uint8 as one of "
            f"{list(EXPONENT_BITS)}"
        )
    if kind not in ("float32", "bfloat16"):
        raise DtypeError(f"restore: into {kind}; choose float32 or bfloat16")
    check_number("restore", "scale", scale)
    x = array_module(y).empty(y.shape, np.dtype(kind))
    if y.size:
        launch(
            SOURCE,
            f"restore_fp8<{EXPONENT_BITS[target]}, {_NAMES[kind]}>",
            grid=-(-y.size // BLOCK),
            block=BLOCK,
            args=(y, x, scale, y.size),
        )
    return x
