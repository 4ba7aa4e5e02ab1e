"""Read the memory of another process of this host: one copy, made by the kernel.

    rank 1's array ----- process_vm_readv(process of rank 1, address, nbytes) -----> rank 0's array

Linux calls it cross-memory attach, and allows it to processes that may debug the other one: of the
same user, unless Yama or a container forbids it. So ranks try it at start-up: each sends the others
the address of some random bytes in its memory, and reads theirs. They must be equal: containers may
number processes differently, and then the same number is another process.

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

_EXHIBIT = struct.Struct("<QQ16s")  # process id, address, the bytes at the address
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
    """Fill `target` (uint8, contiguous) with the bytes at `address` of the memory of `process`.

    Raises: OSError: ESRCH if the process no longer exists, EFAULT if it has no memory there, EPERM
            if this process may not read it, ENOSYS if the system has no such call.
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
    """Return whether other processes can read this array; not if a device's driver has mapped its
    memory."""
    try:
        read(os.getpid(), address_of(array), np.empty(min(1, array.nbytes), np.uint8))
    except OSError:
        return False
    return True


class Exhibit:
    """Random bytes in this process's memory, while this object lives; `told` is the message with
    their address for other ranks."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(secrets.token_bytes(16), np.uint8)
        self.told = _EXHIBIT.pack(os.getpid(), address_of(self._bytes), self._bytes.tobytes())
        with suppress(OSError):  # there is no Yama
            if _YAMA.read_text().strip() == "1":
                _libc.prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def process_of(told: bytes) -> int | None:
    """Return the process that sent this exhibit if this process can read its memory; else None."""
    process, address, expected = _EXHIBIT.unpack(told)
    found = np.zeros(len(expected), np.uint8)
    with suppress(OSError):
        read(process, address, found)
    return process if found.tobytes() == expected else None
