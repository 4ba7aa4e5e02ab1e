"""Arrays of other libraries (PyTorch, JAX, …), which share their memory by DLPack.

    array = shared("all_reduce", "x", tensor)     # NumPy's or CuPy's, on the memory of `tensor`

Nothing is copied. Data on the host becomes a NumPy array, data on an NVIDIA GPU a CuPy array.
NumPy's own `from_dlpack` does all but two things: it knows no bfloat16, and it returns a read-only
array for a library that exports the first version of DLPack, which cannot say whether it allows
writing (such a library must not export read-only arrays).
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

from minidist.device import backend
from minidist.device.backend import Array
from minidist.errors import DeviceError, DtypeError

_HOST = (1, 3)  # kDLCPU, and kDLCUDAHost: pinned memory
_NVIDIA = (2, 13)  # kDLCUDA, and kDLCUDAManaged


def is_foreign(value: object) -> bool:
    """Return whether `value` is an array of another library that exports DLPack."""
    return hasattr(value, "__dlpack__") and not backend.is_array(value)


def shared(verb: str, name: str, value: Any) -> Array:
    """Return the array, NumPy's or CuPy's, on the memory of `value`; it keeps `value` alive.

    Args:    verb, name: of the call and its argument, for errors.
             value: has `__dlpack__` and `__dlpack_device__`.
    Raises:  DtypeError with the library's reason if it does not export the value; DeviceError for
             another device, and for a GPU without CuPy.
    """
    told = f"{verb}: {name} is a {type(value).__name__}"
    if _is_tensor(value) and value.is_neg():
        raise DtypeError(
            f"{told} that PyTorch negates only when it is read, and exports with the wrong sign; pass "
            "x.resolve_neg()"
        )
    try:
        kind = int(value.__dlpack_device__()[0])
        if kind in _HOST:
            return _on_host(value)
        if kind in _NVIDIA:
            return _on_gpu(value)
    except DeviceError as error:
        raise DeviceError(f"{told} on a GPU: {error}") from None
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DtypeError(f"{told} that cannot be shared by DLPack: {reason}") from error
    raise DeviceError(
        f"{told} on a device that minidist does not know (DLPack's device type {kind}); copy it to "
        "the host, as x.cpu() does in PyTorch"
    )


def _on_host(value: Any) -> np.ndarray:
    as_bits = _bfloat16_bits(value)
    export = _Export(value if as_bits is None else as_bits)
    array: np.ndarray = np.from_dlpack(export)
    if not (array.flags.writeable or export.versioned):
        array = np.asarray(_Writable(array))
    return array if as_bits is None else array.view(ml_dtypes.bfloat16)


def _on_gpu(value: Any) -> Array:
    cupy = backend.module_for("cuda")
    as_bits = _bfloat16_bits(value)
    if as_bits is None:
        return cupy.from_dlpack(value)
    return cupy.from_dlpack(as_bits).view(ml_dtypes.bfloat16)


def _bfloat16_bits(value: Any) -> Any:
    """Return a PyTorch tensor of bfloat16, viewed as int16; None for any other value."""
    if not _is_tensor(value) or value.dtype != sys.modules["torch"].bfloat16:
        return None
    # detach() would drop what PyTorch refuses to export
    return value if value.requires_grad else value.view(sys.modules["torch"].int16)


def _is_tensor(value: object) -> bool:
    """Return whether `value` is a PyTorch tensor; PyTorch is not imported for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class _Export:
    """Passes on the export of `value`, and notes whether the exported version of DLPack has a flag
    for read-only."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.versioned = False

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.value.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.value.__dlpack__(**options)
        self.versioned = '"dltensor_versioned"' in repr(capsule)
        return capsule


class _Writable:
    """Offers the memory of a read-only array for writing; the array made of it keeps it alive."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
