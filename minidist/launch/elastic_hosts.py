"""Other hosts of an elastic job, as its launcher sees them: `minidist train --elastic 4:7 --hosts
a:3,b:4`, by ssh.

    here                                          host b
    the launcher: all connections, the monitors
    ssh b ------------------------------------->  host_workers: starts processes, says how they end
    listens  <----------------- a connection ---  the same
             <----------------- a connection ---  each process

ssh starts host_workers.py, gives it its order on stdin, and brings back what the ranks print. All
else goes over a connection of its own, which the kernels end when a host falls silent
(acceptor.set_up): then the host is lost, and all its processes with it. A process on another host
is used like a Popen here (RemoteProcess).

A lost host gets no more processes. A host that loses its launcher ends its processes.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from minidist.comm import wire
from minidist.comm.health.acceptor import end_connection, is_loopback, set_up
from minidist.comm.health.failure import say_line
from minidist.errors import CommError, HandshakeError, LaunchError
from minidist.launch.addresses import own_addresses
from minidist.launch.host_launcher import MARK, version
from minidist.launch.hosts import PASSED, SSH, HostRanks, news_of, ssh_words
from minidist.launch.launchers import clean_environment
from minidist.launch.limits import Limits
from minidist.launch.own_python import module_command
from minidist.launch.spawning import start_thread

HOST_LIMIT = 30.0  # seconds until a host must have connected
KILL_LIMIT = 30.0  # seconds from the first SIGKILL until a process must have ended
END_LIMIT = 10.0  # seconds that host_workers gets to end when the launcher has hung up
SENT_LIMIT = 1.0  # seconds that a frame may take: a host whose connection is full is silent
LAST_LINES = 2.0  # seconds until what a host said last has been passed on


class RemoteProcess:
    """A process on another host; used like a Popen. `pid`: there, 0 until it has started."""

    stderr = None  # its lines come with its host's

    def __init__(self, host: "RemoteHost", number: int) -> None:
        self.host = host
        self.number = number
        self.pid = 0
        self.how = ""
        self.stopped = False
        self._code: int | None = None
        self._killed = 0.0  # since when it is to end by SIGKILL
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """The exit code as Popen has it; None while it runs."""
        return self._code

    def end(self, code: int, how: str) -> None:
        """It has ended, or is lost with its host."""
        if self._code is None:
            self._code = code
            self.how = how
            self._ended.set()

    def send_signal(self, number: int) -> None:
        """As Popen's; nothing, if its host is lost. A host that does not carry out a SIGKILL in
        time is lost."""
        if self._code is not None:
            return
        if number == signal.SIGKILL:
            self._killed = self._killed or time.monotonic()
            if time.monotonic() - self._killed > KILL_LIMIT:
                self.host.drop()
                return
        self.host.tell("signal", process=self.number, signal=int(number))

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        self._ended.wait(timeout)
        if self._code is None:
            raise subprocess.TimeoutExpired([f"process {self.number} on {self.host.name}"], timeout)
        return self._code


class RemoteHost:
    """A host that is reached by ssh, and its processes.

    Args:       ranks: its name, and how many ranks it is for. node: its number in the job. ssh: the
                command that reaches a host. order: what host_workers.py is told. news(): something
                has ended there.
    Attributes: lost: why no process can be started there any more; "" while one can.
    """

    def __init__(
        self,
        ranks: HostRanks,
        node: int,
        ssh: Sequence[str],
        order: dict[str, Any],
        news: Callable[[], None],
    ) -> None:
        self.name = ranks.name
        self.capacity = ranks.ranks
        self.node = node
        self.lost = ""
        self._order = {**order, "node": node}
        self._news = news
        self._last = ""
        self._processes: dict[int, RemoteProcess] = {}
        self._sock: socket.socket | None = None
        self._sending = threading.Lock()
        self._closed = False
        self._come = threading.Event()
        self._reach = [*ssh, ranks.name]
        there = shlex.join(module_command("minidist.launch.host_workers"))
        command = [*self._reach, f"exec {there}"]
        try:
            self._ssh = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {command[0]!r} for host {self.name}: {error.strerror}"
            ) from error
        assert self._ssh.stdout is not None and self._ssh.stderr is not None
        self._readers = [
            start_thread(self._read, self._ssh.stdout),
            start_thread(self._read_errors, self._ssh.stderr),
        ]

    # --- as Starter
    # --------------------------------------------------------------------------------------------------

    def start(self, number: int) -> RemoteProcess:
        """Start the process of this number there. If that fails, the process counts as ended."""
        process = self._processes[number] = RemoteProcess(self, number)
        self.tell("start", process=number)
        if self.lost:
            process.end(-signal.SIGKILL, self.lost)
        return process

    def pass_on_lines(self, number: int, process: RemoteProcess) -> None:
        """Its host does so."""

    def stopped(self, process: RemoteProcess) -> bool:
        """Whether the process is stopped (SIGSTOP), as its host last said."""
        return process.stopped

    def how_it_ended(self, process: RemoteProcess, code: int) -> str:
        """As its host has said."""
        return process.how

    # --- the host itself
    # ---------------------------------------------------------------------------------------------

    def tell(self, kind: str, **content: Any) -> None:
        """Send one frame. An error here means that the host is lost; _hear notices it."""
        with self._sending, contextlib.suppress(CommError, OSError, ValueError):
            if self._sock is not None:
                wire.send_frame(self._sock, {"kind": kind, **content}, SENT_LIMIT)

    def wait_until_there(self, deadline: float, told: Callable[[], bool]) -> None:
        """Wait until it has connected, or until told(). Raises: LaunchError, one line, if it ends
        or is late."""
        while not self._come.wait(0.02) and not told():
            if self.lost:
                raise LaunchError(f"host {self.name}: {self.lost}")
            if (status := self._ssh.poll()) is not None:
                self._readers[1].join(1.0)
                advice = (
                    f"try `{shlex.join(self._reach)} true`"
                    if status == 255
                    else f"is minidist installed there, at {sys.executable}?"
                )
                raise LaunchError(
                    f"host {self.name}: ssh ended with {status} "
                    f"({self._last or 'it said nothing'}); {advice}"
                )
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"host {self.name} did not connect within {HOST_LIMIT:g} s; does "
                    f"`{shlex.join(self._reach)} true` work, and does a firewall let it call "
                    "this host?"
                )

    def attach(self, sock: socket.socket) -> None:
        """It has connected."""
        if self._sock is not None:
            raise HandshakeError(
                f"{wire.address_of(sock)} was refused: host {self.name} is already there"
            )
        set_up(sock)
        wire.send_frame(sock, {"kind": "welcome"}, 1.0)
        self._sock = sock
        self._come.set()
        start_thread(self._hear, sock)

    def close(self) -> None:
        """Hang up: it ends what still runs there, and itself."""
        self._closed = True
        if self._sock is not None:
            end_connection(self._sock)
        with contextlib.suppress(OSError):
            if self._ssh.stdin is not None:
                self._ssh.stdin.close()
        try:
            self._ssh.wait(END_LIMIT if self._come.is_set() and not self.lost else 0.0)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        deadline = time.monotonic() + LAST_LINES
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def drop(self) -> None:
        """End its connection: the host is lost, and _hear notices it."""
        if self._sock is not None:
            end_connection(self._sock)

    def _hear(self, sock: socket.socket) -> None:
        why = "hung up"
        try:
            with sock:
                while True:
                    frame = wire.recv_frame(sock, None)
                    self._take(frame, self._processes[int(frame["process"])])
        except (CommError, OSError, ValueError, KeyError) as error:
            why = str(error) or why
        self._lose(why)

    def _take(self, frame: dict[str, Any], process: RemoteProcess) -> None:
        match frame["kind"]:
            case "started":
                process.pid = int(frame["pid"])
            case "stopped":
                process.stopped = bool(frame["value"])
            case "ended":
                process.end(int(frame["code"]), str(frame["how"]))
                self._news()

    def _lose(self, why: str) -> None:
        """The connection has ended: the host is lost, unless the job is over."""
        if not self._closed:
            self.lost = f"is lost with host {self.name}"
            say_line(f"minidist: host {self.name} is lost ({why}), with all its processes")
        for process in list(self._processes.values()):
            process.end(-signal.SIGKILL, self.lost or "ended with the job")
        self._news()

    def _read(self, pipe: IO[bytes]) -> None:
        """Lines of host_workers are for here, all others go to stdout."""
        with pipe:
            for line in pipe:
                if not line.startswith(MARK.encode()):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
                    continue
                told = news_of(line)
                if told.get("version", version()) != version():
                    self.lost = (
                        f"it has minidist {told['version']}, this host {version()}; "
                        "install the same on all"
                    )
                elif "hello" in told and self._ssh.stdin is not None:
                    with contextlib.suppress(OSError):
                        self._ssh.stdin.write(f"{json.dumps(self._order)}\n".encode())
                        self._ssh.stdin.flush()
                elif "problem" in told:
                    self.lost = told["problem"]

    def _read_errors(self, pipe: IO[bytes]) -> None:
        """To stderr. Lines before the connection are ssh's and the shell's: the last one says why
        there is none."""
        with pipe:
            for raw in pipe:
                self._last = raw.decode(errors="replace").rstrip("\r\n")
                if self._come.is_set():
                    say_line(self._last)


class OtherHosts:
    """The hosts of a job as `--hosts` names them; this one may be among them.

    Args: hosts: in the order of their nodes. ssh: the command that reaches one.
    """

    def __init__(self, hosts: Sequence[HostRanks], ssh: str = SSH) -> None:
        self.hosts = list(hosts)
        self.ssh = ssh_words(ssh)

    @property
    def here(self) -> int | None:
        """The number of this host, or None."""
        return next((node for node, host in enumerate(self.hosts) if host.is_here), None)

    @property
    def addresses(self) -> list[str]:
        """Where the others may reach this host. Raises: LaunchError if it has no address that leads
        out."""
        if all(host.is_here or is_loopback(host.address) for host in self.hosts):
            return ["127.0.0.1"]
        return own_addresses()

    def start(
        self,
        command: Sequence[str],
        token: bytes,
        port: int,
        limits: Limits,
        *,
        forks: bool,
        news: Callable[[], None],
    ) -> Iterator[RemoteHost]:
        """Yield each other host when its ssh has been started; none has connected yet. Raises:
        LaunchError."""
        memory = limits.memory and [limits.memory.nbytes, limits.memory.text]
        environ = {
            name: value
            for name, value in clean_environment(os.environ).items()
            if name.startswith(PASSED)
        }
        order = {
            "command": list(command),
            "token": token.decode(),
            "addresses": self.addresses,
            "port": port,
            "folder": os.getcwd(),
            "environ": environ,
            "cores": list(limits.cores),
            "memory": memory,
            "forks": forks,
            "run": None if limits.folder is None else os.path.realpath(limits.folder),
            "flight": None if limits.flight is None else os.path.realpath(limits.flight),
        }
        for node, host in enumerate(self.hosts):
            if node != self.here:
                yield RemoteHost(host, node, self.ssh, order, news)
