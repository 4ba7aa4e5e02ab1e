"""The allocator of the C library, which NumPy uses for its arrays."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3            # from glibc's malloc.h


def tune_allocator(keep_bytes: int = 1 << 30) -> bool:
    """Let the C library keep freed memory instead of returning each large array to the operating system.

    A training step frees and allocates the same big arrays again. By default glibc returns them to the kernel, and each
    new page of 4 KiB then costs a page fault and a clearing. This changes the whole process.
    Returns: whether it took effect: on Linux with glibc only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:                                  # musl and macOS have none
        return False
    mmap_limit = min(keep_bytes, 1 << 25)                # glibc refuses more than 32 MiB
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_limit)) and bool(mallopt(_M_TRIM_THRESHOLD, keep_bytes))
