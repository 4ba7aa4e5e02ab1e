"""Copies between device and host, from any thread.

On a GPU a copy runs on a stream of the copying thread's own, behind what the program's stream held when it was asked
for (`mark`); copy() returns when the bytes are there. On a CPU device and host are both main memory, and a copy is one.
"""

import mmap
import threading
from typing import Any

import numpy as np

from minidist.device.backend import Array, array_module, device_of, is_simulated, is_virtual, module_for, to_host

_local = threading.local()


def mark(array: Array) -> Any:
    """An event behind the current stream's work on `array`; a copy of or into `array` must wait for it."""
    xp = array_module(array)
    if xp is np or is_virtual(array):
        return None
    event = xp.cuda.Event(disable_timing=True)
    event.record()
    return event


def copy(source: Array, target: Array, ready: Any = None) -> None:
    """target[...] = source, with one rounding where target is of lower precision; device or host, of one shape.

    Args:    ready: mark() of the side on the device.
    """
    if is_virtual(source):
        return
    if array_module(source, target) is np:
        target[...] = source
        return
    onto_device = isinstance(source, np.ndarray)
    device_side = target if onto_device else source
    stream = _stream(array_module(device_side))
    with device_side.device, stream:
        if ready is not None:
            stream.wait_event(ready)
        if onto_device:
            target.set(np.ascontiguousarray(source.astype(target.dtype, copy=False)), stream=stream)
        else:
            source.get(stream=stream, out=target)
        stream.synchronize()


def bring(source: Array, ready: Any = None) -> np.ndarray:
    """`source` on the host: itself, or a copy in pinned memory. Args: as copy."""
    if device_of(source) == "cpu" or is_virtual(source):
        return to_host(source)
    target: np.ndarray = host_bytes(source.nbytes, "cuda").view(source.dtype)
    copy(source, target, ready)
    return target


def _stream(xp: Any) -> Any:
    """The calling thread's stream for copies."""
    if not hasattr(_local, "stream"):
        _local.stream = xp.cuda.Stream(non_blocking=True)
    return _local.stream


def host_bytes(nbytes: int, device: str) -> np.ndarray:
    """Host memory that begins on a page; pinned where the device is a GPU, so that its copy engine reaches it."""
    if is_simulated():
        return module_for("cpu").empty(nbytes, np.uint8)    # type: ignore[no-any-return]
    if module_for(device) is np:
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]
    import cupyx  # noqa: PLC0415 - a GPU is in use, so CuPy is here

    return cupyx.empty_pinned(nbytes, np.uint8)  # type: ignore[no-any-return]
