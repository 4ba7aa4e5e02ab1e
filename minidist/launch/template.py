"""A process that has loaded what a rank needs, and forks: a replacement is there in milliseconds, not in a second.

    launcher                               template                        process 5
    starts the template .................. loads minidist and the data,
                                           makes one tiny step
    number 5, a pipe for its stderr -----> forks twice ..................> connects to the launcher, as any process does
                     its process id <----- the parent of process 5 ends,
                                           so the launcher becomes it (Linux: prctl)

Loading takes 0.6 to 1 s of a core, which the ranks that work would miss. A fork copies no memory until it is written.
The template has one thread, holds no state of the training and ends with the launcher. If it is lost, processes are
started in the usual way. Not for ranks on a GPU: a driver that is in use does not survive a fork.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import IO

from minidist.launch.children import flush_output

VARIABLE = "MINIDIST_TEMPLATE"      # of the template's environment: the number of its socket's file
FORK_LIMIT = 10.0                   # seconds that a fork may take
END_LIMIT = 1.0                     # seconds that the template gets to end
_READY = b"!"
_NUMBER = struct.Struct("<q")
_SET_CHILD_SUBREAPER = 36           # prctl


class Orphan:
    """A process whose parent has ended, so that this process became it; used like a Popen.

    Attributes: stderr: what it writes there, or None.
    """

    def __init__(self, pid: int, stderr: IO[bytes] | None) -> None:
        self.pid, self.stderr = pid, stderr
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code as Popen has it; None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:                   # it was waited for elsewhere
                    pid, status = self.pid, 1 << 8
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def send_signal(self, number: int) -> None:
        """As Popen's: nothing, if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):   # another thread has just reaped it
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            time.sleep(0.005)
        return code


class Template:
    """The launcher's side. Raises: OSError if this system has no such thing, or the command cannot be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if not _take_orphans(True):
            raise OSError("this process cannot become the parent of orphans")
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(command, env={**environment, VARIABLE: str(theirs.fileno())},
                                             pass_fds=[theirs.fileno()])
        self.pid, self.ready = self._process.pid, False

    def wait(self, seconds: float) -> bool:
        """Whether it has loaded, or has ended: after at most so many seconds."""
        with contextlib.suppress(OSError):
            if not self.ready and select.select([self._sock], [], [], seconds)[0]:
                self.ready = self._sock.recv(1) == _READY
                if not self.ready:
                    return True
        return self.ready or self._process.poll() is not None

    def fork(self, number: int) -> Orphan | None:
        """A new process of this number; None if the template is lost."""
        if not self.ready:
            return None
        theirs, ours = os.pipe()[::-1] if number else (os.open(os.devnull, os.O_WRONLY), None)
        try:
            self._sock.settimeout(FORK_LIMIT)
            socket.send_fds(self._sock, [_NUMBER.pack(number)], [theirs])
            told = self._sock.recv(_NUMBER.size)
        except OSError:
            told = b""
        finally:
            os.close(theirs)
        if len(told) == _NUMBER.size:
            return Orphan(_NUMBER.unpack(told)[0], None if ours is None else os.fdopen(ours, "rb"))
        if ours is not None:
            os.close(ours)
        self.ready = False
        self._process.kill()                                # one that is late would fork after all
        return None

    def close(self) -> None:
        """It ends when its socket does; later orphans go to the system again."""
        self._sock.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _take_orphans(False)


def _take_orphans(yes: bool) -> bool:
    """Have orphans below this process become its children, or no longer; whether this system can do that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)       # Linux alone
    return prctl is not None and bool(prctl(_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) == 0)


def fork_on_demand() -> None:
    """Where the launcher asked for a template: become it. Returns in every process that it forks, not in itself.

    In a process that is no template it returns at once.
    """
    fileno = os.environ.pop(VARIABLE, None)
    if fileno is None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)      # the launcher gets it, too
    with socket.socket(fileno=int(fileno)) as sock:
        sock.sendall(_READY)
        while True:
            data, files, *_ = socket.recv_fds(sock, _NUMBER.size, 1)
            if len(data) < _NUMBER.size:
                os._exit(0)
            number = _NUMBER.unpack(data)[0]
            pid = _fork_an_orphan()
            if pid == 0:
                break
            sock.sendall(_NUMBER.pack(pid))
            os.close(files[0])
    signal.signal(signal.SIGINT, before)
    os.environ["MINIDIST_PROCESS"] = str(number)
    if number:                                              # process 0 speaks and listens as the launcher does
        os.dup2(files[0], 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    os.close(files[0])


def _fork_an_orphan() -> int:
    """The process id of a copy of this process whose parent has ended; 0 in the copy."""
    flush_output()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)     # of threads, which are the BLAS library's
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid:
                os.write(writer, _NUMBER.pack(pid))
                os._exit(0)
    os.close(writer)
    told = os.read(reader, _NUMBER.size) if middle else b""
    os.close(reader)
    if middle == 0:
        return 0
    os.waitpid(middle, 0)
    return int(_NUMBER.unpack(told)[0])
