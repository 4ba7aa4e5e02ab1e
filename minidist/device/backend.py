"""NumPy or CuPy behind one name, `xp`; dtypes; random numbers that do not depend on the device or
on the split.

    xp = array_module(x)                                   # numpy, or cupy if x lives on a GPU
    w = random_normal("blocks.0.fc.weight", 7, range(n))   # each slice of range(n) draws its part

CuPy is imported only when a CUDA device is requested. "Low precision" means float16 and bfloat16:
both are stored and sent in two bytes, but computed in float32 and rounded once (a sum of 4,096 ones
in bfloat16 would give 256).
"""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np

from minidist.device import blas, cublas, float16
from minidist.errors import ConfigError, DeviceError

Array: TypeAlias = Any  # a numpy.ndarray or a cupy.ndarray; CuPy has no types to name here

_DTYPES = {
    name: np.dtype(name)
    for name in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
    )
}
_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
FLOATS = frozenset(_DTYPES[name] for name in ("float64", "float32", "float16", "bfloat16"))
_TWO_BYTES = frozenset(_DTYPES[name] for name in ("float16", "bfloat16"))
LOW_PRECISION = _TWO_BYTES | {kind.newbyteorder() for kind in _TWO_BYTES}  # in either byte order
_SIGNIFICANT_BITS = {
    _DTYPES["float64"]: 53,
    _DTYPES["float32"]: 24,
    _DTYPES["float16"]: 11,
    _DTYPES["bfloat16"]: 8,
}


# --------------------------------------------------------------------------------- modules, devices


def imported_cupy() -> ModuleType | None:
    """Return CuPy if it is imported already, else None; then no CuPy array can exist."""
    return sys.modules.get("cupy")


# classes of arrays without data (simulate/shape_array.py), once it is imported
_virtual: tuple[type, ...] = ()
# `modules`: device -> array module, of a rank that this thread simulates
_local = threading.local()


def add_virtual(kind: type) -> None:
    """Register `kind` as a class of arrays without data; their `module` and `device_name` say where
    they live."""
    global _virtual
    _virtual += (kind,)


def is_virtual(value: object) -> bool:
    """Return whether `value` is an array without data."""
    return isinstance(value, _virtual)


def is_simulated() -> bool:
    """Return whether this thread simulates a rank: then nothing is drawn, and large arrays have no
    data."""
    return getattr(_local, "modules", None) is not None


@contextmanager
def simulated(modules: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: this thread allocates arrays without data; `modules`: the array modules of
    "cpu" and "cuda"."""
    before = getattr(_local, "modules", None)
    _local.modules = modules
    try:
        yield
    finally:
        _local.modules = before


def is_array(value: object) -> TypeGuard[Array]:
    """Return whether `value` is a NumPy or CuPy array, or one without data."""
    if isinstance(value, np.ndarray):
        return True
    cupy = imported_cupy()
    return (cupy is not None and isinstance(value, cupy.ndarray)) or isinstance(value, _virtual)


def array_module(*arrays: object) -> Any:
    """Return the module that computes on `arrays`: cupy if one of them is on a GPU, else numpy.
    Never imports CuPy."""
    cupy = imported_cupy()
    if cupy is None and not _virtual:
        return np
    on_gpu: Any = () if cupy is None else cupy.ndarray
    for array in arrays:
        if isinstance(array, on_gpu):
            return cupy
        if isinstance(array, _virtual):
            return array.module  # type: ignore[attr-defined]
    return np


def module_for(device: str) -> Any:
    """Return the array module of a device: "cpu" -> numpy, "cuda" -> cupy; on a simulated rank the
    modules of arrays without data.

    Raises:  DeviceError if CuPy or a GPU is missing; ConfigError for another name.
    """
    modules = getattr(_local, "modules", None)
    if modules is not None and device in modules:
        return modules[device]
    if device == "cpu":
        return np
    if device != "cuda":
        raise ConfigError(f"unknown device {device!r}; choose cpu or cuda")
    try:
        import cupy  # noqa: PLC0415 - half a second, and only where a GPU is asked for
    except ImportError as error:
        raise DeviceError(
            "device cuda needs CuPy, which is not installed; pip install 'minidist[cuda13]' (or "
            "cuda12), or choose --device cpu"
        ) from error
    if not cupy.is_available():
        raise DeviceError(
            "device cuda: CuPy is installed but finds no usable GPU or driver; choose --device cpu"
        )
    return cupy


def on_gpu(number: int | None) -> Any:
    """Context manager: the calling thread works on the GPU of this number; None: where it is.

    Raises:  DeviceError if there is no such GPU.
    """
    if number is None:
        return nullcontext()
    cuda = module_for("cuda").cuda
    if number >= (count := cuda.runtime.getDeviceCount()):
        raise DeviceError(
            f"GPU {number}: this machine has {count}, numbered from 0; choose another number"
        )
    return cuda.Device(number)


def device_of(array: Array) -> str:
    """Return the device of an array: "cpu" or "cuda"."""
    if isinstance(array, np.ndarray):
        return "cpu"
    return array.device_name if isinstance(array, _virtual) else "cuda"  # type: ignore[attr-defined]


def on_host(*arrays: object) -> bool:
    """Return whether none of `arrays` is on a GPU. If so, code computes in blocks that the host's
    caches hold."""
    return all(
        isinstance(array, np.ndarray) or not is_array(array) or device_of(array) == "cpu"
        for array in arrays
    )


def index_range(*bounds: int) -> np.ndarray:
    """Return the integers of range(*bounds) on the host: int64 on every platform."""
    return np.arange(*bounds, dtype=np.int64)


def empty(shape: tuple[int, ...] | int, kind: np.dtype, device: str) -> Array:
    """Return a new array on `device`, not initialized. Raises: as `module_for`."""
    return module_for(device).empty(shape, kind)


def to_host(array: Array) -> np.ndarray:
    """Return `array` itself if it is NumPy's, else a copy in pinned host memory, which a GPU can
    write directly."""
    if device_of(array) == "cpu":
        return array  # type: ignore[no-any-return]
    host = pinned(array.shape, array.dtype)
    array.get(out=host)
    return host


def pinned(shape: tuple[int, ...] | int, kind: Any) -> np.ndarray:
    """Return a new array in host memory that a GPU can write directly; on a simulated rank one
    without data."""
    if is_simulated():
        return module_for("cpu").empty(shape, kind)  # type: ignore[no-any-return]
    import cupyx  # noqa: PLC0415 - a GPU is in use, so CuPy is here

    return cupyx.empty_pinned(shape, kind)  # type: ignore[no-any-return]


_PINNED = 1  # cudaMemoryTypeHost


def to_device(array: Array, device: str) -> Array:
    """Return `array` on `device`; itself if it is there already. The caller may change a host array
    after the return.

    A GPU gets the host's byte order, also if `array` has the other one.
    Raises:  DeviceError, ConfigError as `module_for`.
    """
    if device_of(array) == device:
        return array
    xp = module_for(device)
    if device == "cpu":
        return to_host(array)
    if is_simulated():
        return xp.asarray(array)
    native = array.dtype.newbyteorder("=")
    result = xp.empty(array.shape, native)
    # ascontiguousarray would give an array without dims one
    source = np.asarray(array, native, order="C")
    result.set(source)
    # the GPU may still have to read it
    if xp.cuda.runtime.pointerGetAttributes(source.ctypes.data).type == _PINNED:
        xp.cuda.get_current_stream().synchronize()
    return result


def beside(array: Array, other: Array) -> Array:
    """Return `array` on the device of `other`; itself if it is there already. The host does not
    wait for a copy to a GPU.

    So the caller may change an array in pageable memory at once, but an array in pinned memory only
    after the GPU has read it.
    """
    if device_of(array) == "cpu" and device_of(other) == "cuda":
        return array_module(other).array(array, order="C")
    return to_device(array, device_of(other))


def digested(array: Array) -> Any:
    """Return the bytes of an array on any device, for a digest; no bytes for an array without
    data."""
    return b"" if is_virtual(array) else bytes_view(np.ascontiguousarray(to_host(array))).data


def bytes_view(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous host array of any dtype and size: a 1-D uint8 view.

    Raises:  ConfigError if the array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ConfigError(
            f"bytes_view: an array of shape {array.shape} is not contiguous; "
            f"pass np.ascontiguousarray(x)"
        )
    return array.reshape(-1).view(np.uint8)


# ------------------------------------------------------------------------------------------- dtypes


def dtype(name: Any) -> np.dtype:
    """Return the dtype called `name` ("float32", "bfloat16", "int64", …); a dtype passes through.

    Raises:  ConfigError, which lists the known names.
    """
    try:
        found = _DTYPES.get(name) if isinstance(name, str) else np.dtype(name)
    except TypeError:
        found = None
    if found is None or found not in _DTYPES.values():
        raise ConfigError(f"unknown dtype {name!r}; choose one of {', '.join(_DTYPES)}")
    return found


def dtype_name(kind: Any) -> str:
    """Return the name of a dtype, as `dtype` takes it; ">float32" if it is in the other byte order,
    which `dtype` refuses."""
    found = np.dtype(kind)
    return str(found.name) if found.isnative else f"{found.byteorder}{found.name}"


def widen(array: Array) -> Array:
    """Return `array` in the dtype of computation: float32 for low precision, else itself."""
    if array.dtype not in LOW_PRECISION:
        return array
    if array.dtype == np.float16 and isinstance(array, np.ndarray):
        return float16.to_float32(array)
    return array.astype(np.float32)


def narrow(array: Array, kind: np.dtype, out: Array | None = None) -> Array:
    """Return `array` rounded to `kind`; itself if it has that dtype. Too large numbers become
    infinite, without a warning.

    Args:    out: the array to write instead, of the same shape and of any dtype that `array` casts
             to.
    """
    if out is None and array.dtype == kind:
        return array
    target = array_module(array).empty(array.shape, kind) if out is None else out
    if (
        target.dtype == np.float16
        and array.dtype == np.float32
        and isinstance(target, np.ndarray)
        and target.flags.c_contiguous
    ):
        return float16.from_float32(np.ascontiguousarray(array), target)
    with np.errstate(over="ignore"):
        target[...] = array
    return target


def add_into(total: Array, array: Array) -> None:
    """Add `array` to `total` in place; low precision is added in float32 and rounded once, as a GPU
    does it."""
    alone = not on_host(total) and array.dtype == total.dtype
    if total.dtype in LOW_PRECISION and not alone:
        narrow(widen(total) + widen(array), total.dtype, total)
    elif on_host(total) or sum_by_kernel(total, array, total) is None:
        total += array


def sum_by_kernel(a: Array, b: Array, out: Array | None = None) -> Array | None:
    """Return a + b by kernels/add.cu, in `out` or a new array; b has a's shape or its last dims.
    None if the kernel does not take such arrays."""
    from minidist.device.dispatch import kernel  # noqa: PLC0415 - it imports this module

    fits = a.dtype == b.dtype and a.shape[max(0, a.ndim - b.ndim) :] == b.shape
    launch = kernel("add", a, b) if fits else None
    return None if launch is None else launch(a, b, out=out)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a @ b, (…, m, k) @ (…, k, n) -> (…, m, n), in `out` or a new array; low precision adds
    in float32 and is rounded once.

    NumPy's float16 matmul is 420 times slower than its float32 matmul, and CuPy's takes low
    precision only in two dims (it upcasts float16, and has no batched bfloat16). So the other cases
    are computed in float32. Large products of matrices on the host are MKL's where it is installed
    (blas.py).
    """
    xp = array_module(a, b)
    instead = cublas.current()
    if instead is not None and xp is not np:
        return instead.multiply(a, b, out)
    if (
        xp is np
        and (fast := blas.in_use()) is not None
        and (product := fast.multiply(a, b, out)) is not None
    ):
        return product
    low = a.dtype in LOW_PRECISION
    if low and a.ndim == b.ndim == 2 and a.dtype == b.dtype and xp is imported_cupy():
        return cublas.own(xp).multiply(a, b, out)
    if not low or (xp is not np and not on_host(a) and a.ndim == b.ndim == 2):
        return xp.matmul(a, b, out=out) if out is not None else xp.matmul(a, b)
    return narrow(matmul(widen(a), widen(b)), a.dtype, out)


# ----------------------------------------------------------------------------------- random numbers

# indices hashed at once on the host: with its scratch this stays in the second-level cache
_BLOCK = 16384
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def stream_key(name: str, seed: int) -> np.uint64:
    """Return the 64-bit key of the stream (name, seed), which `random_bits` hashes together with
    each position."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _hashed(bits: Array, key: np.uint64) -> Array:
    """Return splitmix64(key ^ index) of indices (uint64), which are overwritten. Source: Steele,
    Lea & Flood 2014."""
    bits ^= key
    bits += _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits


def _draw(
    name: str, seed: int, index: Any, kind: np.dtype, convert: Callable[[Array], Array]
) -> Array:
    """Hash `index` block by block; `convert` turns the bits of a block into values."""
    xp = array_module(index)
    key = stream_key(name, seed)
    if not isinstance(index, range):
        index = xp.asarray(index)
        if index.dtype.kind not in "iu":
            raise ConfigError(
                f"positions of random numbers must be integers, not {dtype_name(index.dtype)}"
            )
    flat = index if isinstance(index, range) else index.reshape(-1)
    result = xp.empty(len(flat), kind)
    block = _BLOCK if xp is np else max(1, len(flat))
    for start in range(0, len(flat), block):
        piece = flat[start : start + block]
        if isinstance(piece, range):
            piece = np.arange(piece.start, piece.stop, piece.step, dtype=np.int64)
        result[start : start + block] = convert(_hashed(piece.astype(np.uint64), key))
    return result if isinstance(index, range) else result.reshape(index.shape)


def _float_dtype(drawer: str, kind: Any) -> np.dtype:
    if dtype(kind) not in FLOATS:
        raise ConfigError(f"{drawer} draws floats, not {dtype_name(kind)}")
    return dtype(kind)


def random_bits(name: str, seed: int, index: Any) -> Array:
    """Return 64 random bits for each global position in `index` (integer array of any shape, or a
    range): uint64.

    A hash of the stream (name, seed) and the position, without state: a shard that draws its own
    positions gets exactly its slice of the whole, in any order. NumPy and CuPy give the same bits.
    Cost:    3 to 8 ns per number on one core.
    Raises:  ConfigError for positions that are not integers.
    """
    return _draw(name, seed, index, np.dtype(np.uint64), lambda bits: bits)


def random_uniform(name: str, seed: int, index: Any, kind: Any = "float32") -> Array:
    """Return uniform numbers in [0, 1) at the global positions `index`: the top bits of the hash,
    as many as the dtype holds.

    Args, Raises: as random_bits; kind: a float dtype.
    """
    kind = _float_dtype("random_uniform", kind)
    digits = _SIGNIFICANT_BITS[kind]
    wide = np.float64 if digits > 24 else np.float32
    return _draw(
        name,
        seed,
        index,
        kind,
        lambda bits: (bits >> np.uint64(64 - digits)).astype(wide) * wide(2.0**-digits),
    )


_SUM_MEAN = 2 * 65535  # of four uniform 16-bit integers
_SUM_STD = float(np.sqrt(4 * (65536.0**2 - 1) / 12))
_EVEN_LANES = np.uint64(0x0000FFFF0000FFFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def random_normal(name: str, seed: int, index: Any, kind: Any = "float32") -> Array:
    """Return nearly normal numbers, mean 0 and standard deviation 1, at the global positions
    `index`.

    Each is the sum of the four 16-bit integers of the hash, centred and scaled. All steps but the
    last multiplication are in integers, so NumPy and CuPy give the same bits; their log and cos
    would not. Values are within ±3.47. Args, Raises: as random_uniform's.
    """
    kind = _float_dtype("random_normal", kind)
    wide = np.dtype(np.float64) if kind == np.float64 else np.dtype(np.float32)
    scale = wide.type(1.0 / _SUM_STD)

    def convert(bits: Array) -> Array:
        # two sums, in the 32-bit halves
        pairs = (bits & _EVEN_LANES) + ((bits >> np.uint64(16)) & _EVEN_LANES)
        total = (pairs + (pairs >> np.uint64(32))) & _LOW_HALF
        return (total.view(np.int64) - _SUM_MEAN).astype(wide) * scale

    return _draw(name, seed, index, kind, convert)
