"""Reading the memory of another process of this host: one copy, made by the kernel.

    rank 1's array ----- process_vm_readv(process of rank 1, address, nbytes) -----> rank 0's array

Linux calls it cross-memory attach, and allows it to processes that may debug the other one: of the
same user, unless Yama or a container forbids it. So ranks try it when they meet: each tells the
others where in its memory some random bytes lie, and reads theirs. They must be equal: containers
may number processes differently, and then the same number is another process.

Yama (kernel.yama.ptrace_scope = 1) lets only ancestors read a process, unless it names others. It
can name one process, or all of its user. A rank has many readers, so it names all, as without Yama.
"""

import ctypes
import errno
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from minidist.comm.calls.buffers import address_of

_EXHIBIT = struct.Struct("<QQ16s")  # process id, address, the bytes that lie there
EXHIBIT_BYTES = _EXHIBIT.size
_WORD = ctypes.sizeof(ctypes.c_size_t)
_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def read(process: int, address: int, target: np.ndarray) -> None:
    """Fill `target` (uint8, contiguous) with what lies at `address` of the memory of `process`.

    Raises: OSError: ESRCH if there is no such process any more, EFAULT if it has nothing there,
    EPERM if we may not,
            ENOSYS where the system knows no such call.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    begin = address_of(target)
    done = 0
    while done < len(target):
        left = len(target) - done
        vectors = (ctypes.c_size_t * 4)(begin + done, left, address + done, left)
        count = _readv(process, vectors, 1, ctypes.addressof(vectors) + 2 * _WORD, 1, 0)
        if count <= 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += max(count, 0)


def readable(array: np.ndarray) -> bool:
    """Whether others can read this array; memory that a device's driver has mapped, they cannot."""
    try:
        read(os.getpid(), address_of(array), np.empty(min(1, array.nbytes), np.uint8))
    except OSError:
        return False
    return True


class Exhibit:
    """Random bytes in this process's memory, as long as this object lives; `told` says to others
    where they are."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(secrets.token_bytes(16), np.uint8)
        self.told = _EXHIBIT.pack(os.getpid(), address_of(self._bytes), self._bytes.tobytes())
        with suppress(OSError):  # there is no Yama
            if _YAMA.read_text().strip() == "1":
                _libc.prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def process_of(told: bytes) -> int | None:
    """The process whose exhibit was told so, if this one can read it; None if it cannot."""
    process, address, expected = _EXHIBIT.unpack(told)
    found = np.zeros(len(expected), np.uint8)
    with suppress(OSError):
        read(process, address, found)
    return process if found.tobytes() == expected else None
