"""The C library's allocator, from which NumPy takes its arrays."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3            # from glibc's malloc.h


def tune_allocator(keep_bytes: int = 1 << 30) -> bool:
    """Let the C library keep freed memory up to `keep_bytes` instead of handing each large array back to the system.

    A training step frees and takes the same big arrays again; by default glibc returns each to the kernel, and every
    fresh 4 KiB page costs a fault and a clearing. Changes the process. Returns whether it did: Linux with glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:                                  # musl has none
        return False
    mmap_limit = min(keep_bytes, 1 << 25)                # glibc refuses more than 32 MiB
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_limit)) and bool(mallopt(_M_TRIM_THRESHOLD, keep_bytes))
