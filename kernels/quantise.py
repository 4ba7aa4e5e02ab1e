"""Numbers in 8, 4 or 1 bits with a scale for each group: the references, then the launchers of
quantise.cu.

    codes, scales = quantise(x, bits=4)      # int8: n of 8 bits, or ⌈n/2⌉ bytes of two codes;
                                             # scales ⌈n/128⌉
    y = restore(codes, scales, n, bits=4)                   # float32 (n,), or dtype="bfloat16"
    words, scales = pack_signs(x)                           # uint32 ⌈n/32⌉; float32 ⌈n/1024⌉
    y = restore_signs(words, scales, n)

x float32 or bfloat16, n elements in any shape, contiguous, NumPy (CPU build) or CuPy. A group of
codes with inf or NaN is restored as NaN, a group of signs as NaN or ±inf. The caller keeps the
error x - y and adds it to the next x. Bytes moved: at the head of quantise.cu.
"""

import numpy as np

from minidist.device.backend import Array, array_module, dtype_name
from minidist.errors import ConfigError, DtypeError, KernelError, ShapeError
from minidist.kernels.loader import Source, begin_aligned, c_type, launch

VERSIONS = (1, 2, 3)
SIGN_VERSIONS = (1, 2)
# elements of one scale
GROUP = 128
SIGNS_GROUP = 1024
LARGEST = {8: 127, 4: 7}  # code, by bits
KINDS = {"float32": "float", "bfloat16": "__nv_bfloat16"}
SOURCE = Source(
    "quantise.cu",
    [
        *(
            f"{name}<{kind}, {bits}>"
            for kind in KINDS.values()
            for bits in LARGEST
            for name in (*(f"quantise_v{version}" for version in VERSIONS), "restore")
        ),
        *(
            f"{name}<{kind}>"
            for kind in KINDS.values()
            for name in ("pack_signs_v1", "pack_signs_v2", "restore_signs")
        ),
    ],
)
BLOCK = 256  # threads


def quantise_reference(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (n,) int8, not packed, and scales, in float32 with the bits of the kernel."""
    groups = _grouped(x.astype(np.float32), GROUP)
    largest = LARGEST[bits]
    scales = np.abs(groups).max(axis=1) / np.float32(largest)
    fine = np.isfinite(scales) & (scales > 0)
    codes = np.zeros(groups.shape, np.int8)
    codes[fine] = np.rint(groups[fine] / scales[fine, None]).clip(-largest, largest)
    return codes.reshape(-1)[: x.size], scales


def restore_reference(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return code × scale, for codes that are not packed, in the scales' dtype."""
    with np.errstate(invalid="ignore"):
        return codes * np.repeat(scales, GROUP)[: len(codes)]


def pack_signs_reference(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each element is 0 or more, (n,) bool, and the mean of |x| of each group."""
    flat = x.reshape(-1)
    sums = _grouped(np.abs(flat), SIGNS_GROUP).sum(axis=1)
    return ~(flat < 0), sums / _grouped(np.ones(x.size), SIGNS_GROUP).sum(axis=1)


def _grouped(x: np.ndarray, group: int) -> np.ndarray:
    """Return x as (⌈n/group⌉, group), padded with zeros."""
    return np.pad(x.reshape(-1), (0, -x.size % group)).reshape(-1, group)


def quantise(x: Array, *, bits: int, version: int | None = None) -> tuple[Array, Array]:
    """Return codes and scales.

    Raises: ConfigError for other bits; DtypeError for another x; KernelError if `version` does not
    fit.
    """
    _check("quantise", x.dtype, bits)
    xp = array_module(x)
    n = x.size
    codes = xp.empty(-(-n * bits // 8), np.int8)
    scales = xp.empty(-(-n // GROUP), np.float32)
    fits = begin_aligned(x, codes)
    version = version or (3 if fits else 2)
    if version == 3 and not fits:
        raise KernelError(
            "quantise_v3 loads four elements at a time, and x begins elsewhere; take version 2"
        )
    if n:
        a_block = GROUP * (BLOCK if version == 1 else BLOCK // 32)
        launch(
            SOURCE,
            f"quantise_v{version}<{c_type(x)}, {bits}>",
            grid=-(-n // a_block),
            block=BLOCK,
            args=(x, codes, scales, n),
        )
    return codes, scales


def restore(codes: Array, scales: Array, count: int, *, bits: int, dtype: str = "float32") -> Array:
    """Return (count,) numbers in `dtype`. Raises: ConfigError, DtypeError, ShapeError if codes or
    scales do not fit."""
    _check("restore", np.dtype(dtype), bits)
    _check_sizes("restore", codes, -(-count * bits // 8), scales, -(-count // GROUP))
    y = array_module(codes).empty(count, dtype)
    if count:
        launch(
            SOURCE,
            f"restore<{c_type(y)}, {bits}>",
            grid=-(-count // BLOCK),
            block=BLOCK,
            args=(codes, scales, y, count),
        )
    return y


def pack_signs(x: Array, *, version: int | None = None) -> tuple[Array, Array]:
    """Return sign bits, 32 in a word, 0 beyond the last element; and scales. Raises: DtypeError for
    another x."""
    _check("pack_signs", x.dtype)
    xp = array_module(x)
    n = x.size
    version = version or 2
    words = xp.empty(-(-n // 32), np.uint32)
    scales = xp.empty(-(-n // SIGNS_GROUP), np.float32)
    if n:
        a_block = SIGNS_GROUP * (BLOCK if version == 1 else 1)
        launch(
            SOURCE,
            f"pack_signs_v{version}<{c_type(x)}>",
            grid=-(-n // a_block),
            block=BLOCK,
            args=(x, words, scales, n),
        )
    return words, scales


def restore_signs(words: Array, scales: Array, count: int, *, dtype: str = "float32") -> Array:
    """Return (count,) numbers, scale or -scale. Raises: DtypeError, ShapeError if words or scales
    do not fit."""
    _check("restore_signs", np.dtype(dtype))
    _check_sizes("restore_signs", words, -(-count // 32), scales, -(-count // SIGNS_GROUP))
    y = array_module(words).empty(count, dtype)
    if count:
        launch(
            SOURCE,
            f"restore_signs<{c_type(y)}>",
            grid=-(-count // BLOCK),
            block=BLOCK,
            args=(words, scales, y, count),
        )
    return y


def _check(name: str, dtype: np.dtype, bits: int = 8) -> None:
    if bits not in LARGEST:
        raise ConfigError(f"{name}: codes of {bits} bits; choose 8 or 4, or pack_signs for 1")
    if dtype_name(dtype) not in KINDS:
        raise DtypeError(
            f"{name}: no kernel for {dtype_name(dtype)}; it takes {' or '.join(KINDS)}"
        )


def _check_sizes(name: str, codes: Array, wanted: int, scales: Array, groups: int) -> None:
    if codes.shape != (wanted,) or scales.shape != (groups,):
        raise ShapeError(
            f"{name}: codes {codes.shape} and scales {scales.shape}; "
            f"this count needs ({wanted},) and ({groups},)"
        )
