"""Copies between device and host, from any thread.

On a GPU each copying thread has its own stream for copies. A copy waits for the work that the
program's stream held when `mark` was called; copy() returns when the bytes are there. On a CPU
device and host are both main memory, and a copy is a plain assignment.
"""

import mmap
import threading
from typing import Any

import numpy as np

from minidist.device.backend import Array, array_module, is_simulated, on_host, pinned

_local = threading.local()


def mark(array: Array) -> Any:
    """Return an event after the current stream's work on `array`; a copy of or into `array` must
    wait for it."""
    if on_host(array):
        return None
    event = array_module(array).cuda.Event(disable_timing=True)
    event.record()
    return event


def copy(source: Array, target: Array, ready: Any = None) -> None:
    """Copy: target[...] = source, with one rounding if target is of lower precision; each on device
    or host, of one shape.

    Args:    ready: mark() of the side on the device.
    """
    if on_host(source, target):
        target[...] = source
        return
    onto_device = on_host(source)
    device_side = target if onto_device else source
    with device_side.device, (stream := _stream(array_module(device_side))):
        if ready is not None:
            stream.wait_event(ready)
        if onto_device:
            target.set(
                array_module(source).ascontiguousarray(source.astype(target.dtype, copy=False)),
                stream=stream,
            )
        else:
            source.get(stream=stream, out=target)
        stream.synchronize()


def bring(source: Array, ready: Any = None) -> np.ndarray:
    """Return `source` on the host: itself, or a copy in pinned memory. Args: as copy."""
    if on_host(source):
        return source  # type: ignore[no-any-return]
    target = pinned(source.shape, source.dtype)
    copy(source, target, ready)
    return target


def _stream(xp: Any) -> Any:
    """Return the calling thread's stream for copies."""
    if not hasattr(_local, "stream"):
        _local.stream = xp.cuda.Stream(non_blocking=True)
    return _local.stream


def host_bytes(nbytes: int, device: str) -> np.ndarray:
    """Return host memory that begins on a page; pinned if the device is a GPU, so that its copy
    engine reaches it."""
    if device == "cpu" and not is_simulated():
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]
    return pinned(nbytes, np.uint8)
