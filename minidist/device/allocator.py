"""The allocator of the C library, which NumPy uses for its arrays."""

import ctypes
from pathlib import Path

# from glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MADV_HUGEPAGE = 14  # from Linux's mman.h
_MAPS = Path("/proc/self/maps")
_in_huge_pages = False


def tune_allocator(keep_bytes: int = 1 << 30) -> bool:
    """Let the C library keep freed memory instead of returning each large array to the operating
    system.

    A training step frees and allocates the same big arrays again. By default glibc returns them to
    the kernel, and each new page of 4 KiB then costs a page fault and a clearing. This changes the
    whole process.
    Returns: whether it took effect: on Linux with glibc only.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:  # musl and macOS have none
        return False
    mmap_limit = min(keep_bytes, 1 << 25)  # glibc refuses more than 32 MiB
    kept = bool(mallopt(_M_MMAP_THRESHOLD, mmap_limit)) and bool(
        mallopt(_M_TRIM_THRESHOLD, keep_bytes)
    )
    if kept:
        use_huge_pages(libc)  # where the kernel refuses, pages stay small
    return kept


def use_huge_pages(libc: ctypes.CDLL, reserve: int = 256 << 20) -> int:
    """Ask the kernel for pages of 2 MiB for the heap, once in a process. The heap grows first,
    because memory that is added later does not get them.

    Arrays of a step then need 512 times fewer entries of the address cache (TLB). A matrix product
    that walks down columns misses it often, and in a virtual machine each miss is expensive.

    Args:    reserve: bytes by which the heap grows. They are addresses; memory is taken when they
             are written.
    Returns: bytes of the heap for which the kernel agreed; 0 where it refuses, or after the first
             call.
    """
    global _in_huge_pages
    if _in_huge_pages or not _MAPS.exists():
        return 0
    _in_huge_pages = True
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_TOP_PAD, reserve)
    libc.free(libc.malloc(1 << 24))  # more than is free at the heap's end: so it grows
    libc.mallopt(_M_TOP_PAD, 1 << 17)  # as it was
    taken = 0
    for line in _MAPS.read_text(errors="replace").splitlines():
        if line.endswith("[heap]"):
            start, stop = (int(edge, 16) for edge in line.split()[0].split("-"))
            if libc.madvise(start, stop - start, _MADV_HUGEPAGE) == 0:
                taken += stop - start
    return taken
