"""A stand-in for macOS: on PYTHONPATH, it takes from every Python process what Linux alone has.

Names that Python does not have there are removed; /proc, /sys and /dev/shm are not found, but by
psutil, which has ways of its own on macOS; functions of Linux's C library are missing; a socket has
no name without a file.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import sys
import time

import psutil  # noqa: F401 - before the names that its Linux half takes go

NAMES = {
    os: [
        "sched_getaffinity",
        "sched_setaffinity",
        "sched_getparam",
        "sched_setscheduler",
        "memfd_create",
        "eventfd",
        "eventfd_read",
        "eventfd_write",
        "pidfd_open",
        "posix_fallocate",
        "posix_fadvise",
        "O_DIRECT",
        "O_TMPFILE",
        "O_PATH",
        "O_NOATIME",
        "O_LARGEFILE",
        "copy_file_range",
        "splice",
        "getrandom",
        "setns",
        "unshare",
        "pipe2",
        "fdatasync",
        "getxattr",
        "setxattr",
        "P_PIDFD",
        "getresuid",
        "setresuid",
        "RWF_NOWAIT",
    ],
    socket: [
        "AF_NETLINK",
        "AF_PACKET",
        "AF_VSOCK",
        "MSG_NOSIGNAL",
        "MSG_CMSG_CLOEXEC",
        "MSG_MORE",
        "SOCK_CLOEXEC",
        "SOCK_NONBLOCK",
        "SO_PEERCRED",
        "SO_DOMAIN",
        "SO_PROTOCOL",
        "SO_BINDTODEVICE",
        "SO_INCOMING_CPU",
        "TCP_KEEPIDLE",
        "TCP_USER_TIMEOUT",
        "TCP_CONGESTION",
        "TCP_QUICKACK",
        "TCP_CORK",
        "TCP_INFO",
    ],
    signal: [
        "SIGPWR",
        "SIGSTKFLT",
        "SIGPOLL",
        "SIGCLD",
        "SIGRTMIN",
        "SIGRTMAX",
        "sigtimedwait",
        "sigwaitinfo",
    ],
    resource: ["prlimit"],
    time: ["CLOCK_BOOTTIME", "CLOCK_TAI"],
}
LIBRARY = (
    "prctl",
    "mallopt",
    "process_vm_readv",
    "process_vm_writev",
    "syscall",
    "sched_getcpu",
    "malloc_trim",
)
FOLDERS = ("/proc", "/sys", "/dev/shm")


def _is_hidden(path: object) -> bool:
    """Return whether a path is of Linux alone, and no library that is built otherwise on macOS asks
    for it."""
    with contextlib.suppress(TypeError):
        name = os.fsdecode(path)  # type: ignore[arg-type]
        if not any(name == folder or name.startswith(folder + "/") for folder in FOLDERS):
            return False
        frame = sys._getframe(1)
        while frame is not None:
            if "psutil" in frame.f_code.co_filename:
                return False
            frame = frame.f_back  # type: ignore[assignment]
        return True
    return False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and arguments and _is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


def _hiding(function):  # type: ignore[no-untyped-def]
    """`function` of a path, which does not find what is hidden."""

    def found(path, *arguments, **options):  # type: ignore[no-untyped-def]
        if _is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *arguments, **options)

    return found


def take_away() -> None:
    """Do it, in this process."""
    for module, names in NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if hasattr(__import__("select"), "epoll"):
        del __import__("select").epoll
    import pathlib  # Python 3.10's takes the functions that it finds when it is imported

    kept = getattr(pathlib, "_NormalAccessor", None)
    for name in ("stat", "lstat", "readlink"):
        hiding = _hiding(getattr(os, name))
        setattr(os, name, hiding)
        if kept is not None and hasattr(kept, name):
            setattr(kept, name, staticmethod(hiding))
    sys.addaudithook(_hook)
    find = ctypes.CDLL.__getattr__
    bind = socket.socket.bind

    def find_name(library, name):  # type: ignore[no-untyped-def]
        if name in LIBRARY:
            raise AttributeError(f"{name}: symbol not found")
        return find(library, name)

    def bind_to_file(sock, address):  # type: ignore[no-untyped-def]
        if sock.family == socket.AF_UNIX and (not address or address[0] in ("\0", 0)):
            raise FileNotFoundError(2, "No such file or directory")
        bind(sock, address)

    ctypes.CDLL.__getattr__ = find_name  # type: ignore[method-assign]
    socket.socket.bind = bind_to_file  # type: ignore[method-assign, assignment]
    platform.system = lambda: "Darwin"


take_away()
