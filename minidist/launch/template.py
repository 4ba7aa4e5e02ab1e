"""A process that has loaded what a rank needs, and forks: a replacement starts in milliseconds, not
in a second.

    launcher                               template                        process 5
    starts the template .................. loads minidist and the data,
                                           makes one tiny step
    number 5, a pipe for its stderr -----> forks twice ..................> connects to the launcher,
                                                                           as any process does
                     its process id <----- the parent of process 5 ends,
                                           so the launcher becomes its
                                           parent (Linux: prctl)

Loading takes 0.3 to 1 s of a core, which the working ranks would lose. A fork copies no memory
until it is written. The template has one thread, holds no state of the training and ends with the
launcher. If it is lost, processes are started in the usual way. It is not for ranks on a GPU: a
driver that is in use does not survive a fork.

A launcher that has loaded the same modules itself forks its template (`fork_template`), before it
starts a thread or opens a file: then the modules are loaded once for all ranks. A launcher that has
not starts the ranks' command once more.
"""

import contextlib
import ctypes
import json
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
from minidist.launch.launchers import clean_environment

VARIABLE = "MINIDIST_TEMPLATE"  # of the template's environment: the number of its socket's file
FORK_LIMIT = 10.0  # seconds that a fork may take
END_LIMIT = 1.0  # seconds that the template gets to end
_READY = b"!"
# the number of a process, and the length in bytes of its variables, which follow
_ORDER = struct.Struct("<qq")
_NUMBER = struct.Struct("<q")
_SET_CHILD_SUBREAPER = 36  # prctl


class Orphan:
    """A child that a Popen did not start: an orphan that this process adopted, or a fork.

    It is used like a Popen.

    Attributes: stderr: the pipe that it writes to, or None.
    """

    def __init__(self, pid: int, stderr: IO[bytes] | None) -> None:
        self.pid = pid
        self.stderr = stderr
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code in Popen's form; None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # it was waited for elsewhere
                    pid = self.pid
                    status = 1 << 8
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has just reaped it
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            time.sleep(0.005)
        return code


class Template:
    """The launcher's end of the socket to a template process."""

    def __init__(self, process: "subprocess.Popen[bytes] | Orphan", sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self.pid = process.pid
        self.ready = False

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the template has loaded, or has ended."""
        with contextlib.suppress(OSError):
            if not self.ready and select.select([self._sock], [], [], seconds)[0]:
                self.ready = self._sock.recv(1) == _READY
                if not self.ready:
                    return True
        return self.ready or self._process.poll() is not None

    def fork(self, number: int, variables: Mapping[str, str] | None = None) -> Orphan | None:
        """Return a new process of this number, with these variables in its environment.

        None if the template is lost.
        """
        if not self.ready:
            return None
        told = b""
        words = json.dumps(dict(variables or {})).encode()
        theirs, ours = os.pipe()[::-1] if number else (os.open(os.devnull, os.O_WRONLY), None)
        with contextlib.suppress(OSError):
            self._sock.settimeout(FORK_LIMIT)
            socket.send_fds(self._sock, [_ORDER.pack(number, len(words))], [theirs])
            self._sock.sendall(words)
            told = self._sock.recv(_NUMBER.size)
        os.close(theirs)
        if len(told) == _NUMBER.size:
            return Orphan(_NUMBER.unpack(told)[0], None if ours is None else os.fdopen(ours, "rb"))
        if ours is not None:
            os.close(ours)
        self.ready = False
        self._process.send_signal(signal.SIGKILL)  # a late template would fork after all
        return None

    def close(self) -> None:
        """End the template by closing its socket; later orphans go to the system again."""
        self._sock.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(FORK_LIMIT)
        _take_orphans(False)


def start_template(command: Sequence[str], environment: Mapping[str, str]) -> Template:
    """Start a template as a process of this command, which calls fork_on_demand() when it has
    loaded what it needs.

    Raises: OSError if this system has no templates, or the command cannot be started.
    """
    sock, theirs = _socket_pair()
    with theirs:
        process = subprocess.Popen(
            command, env={**environment, VARIABLE: str(theirs.fileno())}, pass_fds=[theirs.fileno()]
        )
    return Template(process, sock)


def fork_template() -> Template | None:
    """Fork a template, which has loaded what this process has.

    Return None in the copy, which calls fork_on_demand().

    Another thread of this process would be missing in the copy, and might hold a lock; so this
    process may have no other (except the BLAS library's, which prepares itself for a fork). Open
    files are open in the copy, too, and in all ranks.
    Raises: OSError if this system has no templates, or another thread runs.
    """
    if threading.active_count() > 1:
        raise OSError("another thread of this process runs")
    sock, theirs = _socket_pair()
    flush_output()
    # the launcher gets it, too: see fork_on_demand
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = _fork()
    if pid == 0:
        sock.close()
        for name in {*os.environ} - {*clean_environment(os.environ)}:
            del os.environ[name]
        os.environ[VARIABLE] = str(theirs.detach())
        return None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()
    return Template(Orphan(pid, None), sock)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a connected pair of sockets for a launcher and its template.

    Raises: OSError if this system cannot make orphans the launcher's children.
    """
    if not _take_orphans(True):
        raise OSError("this process cannot become the parent of orphans")
    return socket.socketpair()


def _take_orphans(yes: bool) -> bool:
    """Make orphans below this process its children, or no longer.

    Return whether this system can do that.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only on Linux
    return prctl is not None and bool(prctl(_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) == 0)


def fork_on_demand() -> None:
    """Become the template, if the launcher asked for one.

    Returns only in the processes that it forks.

    In a process that is no template it returns at once.
    """
    fileno = os.environ.pop(VARIABLE, None)
    if fileno is None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets it, too
    # a SIGINT that arrived meanwhile is ignored, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        number, variables, stderr = _serve(int(fileno))
    except OSError:  # the launcher has gone, or nothing more can be forked here
        os._exit(0)
    signal.signal(signal.SIGINT, before)
    os.environ.update(variables | {"MINIDIST_PROCESS": str(number)})
    if number:  # process 0 speaks and listens as the launcher does
        os.dup2(stderr, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    os.close(stderr)


def _serve(fileno: int) -> tuple[int, dict[str, str], int]:
    """Fork when the launcher asks.

    Return, in a forked process, its number, its variables and its stderr's file.

    Raises: OSError, in the template.
    """
    with socket.socket(fileno=fileno) as sock:
        sock.sendall(_READY)
        while True:
            data, files, *_ = socket.recv_fds(sock, _ORDER.size, 1)
            if len(data) < _ORDER.size:
                os._exit(0)
            number, length = _ORDER.unpack(data)
            variables = sock.recv(length, socket.MSG_WAITALL) if length else b"{}"
            pid = _fork_an_orphan()
            if pid == 0:
                return number, json.loads(variables), files[0]
            sock.sendall(_NUMBER.pack(pid))
            os.close(files[0])


def _fork_an_orphan() -> int:
    """Return the process id of a copy of this process whose parent has ended; 0 in the copy."""
    flush_output()
    reader, writer = os.pipe()
    middle = _fork()
    if middle == 0:
        pid = _fork()
        if pid:
            os.write(writer, _NUMBER.pack(pid))
            os._exit(0)
    os.close(writer)
    told = os.read(reader, _NUMBER.size) if middle else b""
    os.close(reader)
    if middle == 0:
        return 0
    os.waitpid(middle, 0)
    if len(told) < _NUMBER.size:
        raise OSError("the process between was killed")
    return int(_NUMBER.unpack(told)[0])


def _fork() -> int:
    """Call os.fork without Python 3.12's warning about threads: only the BLAS library's run
    (children.py)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        return os.fork()
