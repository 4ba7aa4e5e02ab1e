"""A job on several hosts, given by name: `minidist launch --hosts a:3,b:4 script.py`, by ssh.

    here                 host a                                    host b
    ssh a ------------>  host_launcher: ranks 0 1 2, the monitor
    ssh b ---------------------------------------------------->    host_launcher: ranks 3 4 5 6

First every host says hello. Then host a gets its order and reports the port at which the monitor
listens; then the other hosts get their orders. From then on the job works as one of `minidist
launch --nnodes`: all ranks connect to a's monitor, by a's name. The output of the ranks returns
through ssh; a line that several hosts print ("minidist: rank 4 … ; the job ends") is shown once.

A host that loses its ssh ends its ranks, because no process could end them later. ssh must ask no
question (it needs a key and a known host), and minidist and the program must have the same path on
every host.
"""

import contextlib
import json
import os
import platform
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from minidist.comm import wire
from minidist.comm.health.acceptor import plain_address
from minidist.comm.health.failure import AGAIN, say_line
from minidist.comm.health.process_state import PATIENCE
from minidist.errors import LaunchError
from minidist.launch.host_launcher import MARK, version
from minidist.launch.launchers import LAST_PORT, clean_environment, expand_hosts
from minidist.launch.limits import Limits
from minidist.launch.own_python import module_command
from minidist.launch.spawning import noting_signals, start_thread

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=1 -o ServerAliveCountMax=5"
HELLO_LIMIT = 30.0  # seconds until every host must have said hello, and node 0 its port
# seconds that other hosts get to end after one has failed, and again after they were told
ENDING = 10.0
# seconds to pass on the last lines of the hosts: a grandchild may hold a pipe for ever
LAST_LINES = 2.0
PASSED = (
    "PYTHON",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "CUDA_",
    "NCCL_",
    "XDG_",
    "MINIDIST_LOG",
    "LD_LIBRARY_PATH",
)
"""Beginnings of the variables that a rank gets from here; it has all others from its own host."""


_USER = r"(?P<user>\w[\w.-]*@)?"
_RANKS = r"(?::(?P<ranks>[1-9][0-9]{0,3}))?"
_NAME = re.compile(rf"{_USER}(?P<host>\w[\w.-]*){_RANKS}")
_COLON_IN_BRACKETS = re.compile(r"[^\[]*\[[^\]]*:")
_IPV6 = re.compile(rf"{_USER}(?P<host>\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]){_RANKS}")


@dataclass(frozen=True)
class HostRanks:
    """A host's name for ssh ("a", "user@a"), and its number of ranks."""

    name: str
    ranks: int

    @property
    def address(self) -> str:
        """Return the name by which other hosts reach it."""
        return self.name.rpartition("@")[2]

    @property
    def is_here(self) -> bool:
        """Return whether it is this host, which needs no ssh."""
        return self.name in ("localhost", platform.node())


def hosts_of(text: str, ranks: int = 1) -> list[HostRanks]:
    """Return the hosts of a list: "a:3,b:4"; "gpu[01-03]:8", in Slurm's form; "[fd00::1]:8", an
    IPv6 address.

    Args:   ranks: the number of ranks of a host that gives none.
    Raises: LaunchError, one line, for a word that is no host, and for a host that is named twice.
    """
    found = []
    words = [
        word
        for part in re.split(r",(?![^\[\]]*\])", text)
        if part.strip()
        for word in ([part] if _COLON_IN_BRACKETS.match(part) else expand_hosts(part))
    ]
    for word in words:
        match = _IPV6.fullmatch(word) or _NAME.fullmatch(word)
        if match is None:
            raise LaunchError(
                f"{word!r} is not a host with a number of ranks; write a:3,b:4, each with 1 to "
                "9999 ranks, "
                "and an IPv6 address as [fd00::1]:3"
            )
        found.append(
            HostRanks(
                (match["user"] or "") + plain_address(match["host"]), int(match["ranks"] or ranks)
            )
        )
    names = Counter(host.name for host in found)
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise LaunchError(
            f"host {twice[0]} is named twice; give all its ranks at once, as {twice[0]}:4"
        )
    if not found:
        raise LaunchError(f"{text!r} names no host; write a:3,b:4")
    if len(found) > 1 and found[0].name == "localhost":
        raise own_name(found[0].name)
    return found


def own_name(address: str) -> LaunchError:
    """Return the error for an address that means another host on each host."""
    return LaunchError(
        f"{address!r} is another host on each of them; give the name by which the others reach "
        f"this one (here {platform.node()})"
    )


def ssh_words(text: str) -> list[str]:
    """Return the words of the command that reaches a host.

    Raises: LaunchError, one line, if there are none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"--ssh {text!r:.60}: {str(error).lower()}; quote it as in a shell"
        ) from error
    if not words:
        raise LaunchError(f"--ssh {text!r:.60}: names no command; the default is {SSH!r}")
    return words


def news_of(line: bytes) -> dict[str, Any]:
    """Return a host's message from a line that begins with MARK.

    If the line cannot be read, the message is a "problem".
    """
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(line[len(MARK) :])
        kinds = {"hello": str, "version": str, "port": int, "problem": str}
        if (
            isinstance(told, dict)
            and {*told} <= {*kinds}
            and all(type(told[name]) is kind for name, kind in kinds.items() if name in told)
            and ("hello" not in told or "version" in told)
            and 0 < told.get("port", 1) <= LAST_PORT
        ):
            return told
    return {"problem": f"what it answers cannot be understood: {line[len(MARK) :].strip()!r:.60}"}


def spawn_on_hosts(
    command: Sequence[str],
    hosts: Sequence[HostRanks],
    *,
    ssh: str = SSH,
    port: int = 0,
    address: str = "",
    token: bytes | None = None,
    patience: float = PATIENCE,
    limits: Limits | None = None,
) -> int:
    """Run copies of `command` on these hosts as ranks of one job, and wait for them.

    Args:    ssh: the command that reaches a host; the host's name and one word for its shell are
             appended. port: of the monitor, on the first host; 0: any free one. address: of the
             first host (default: its name). limits: of each host. token, patience: as in spawn().
    Returns: 0 if every rank ended with 0; else the exit status of a rank that failed, 75 if all
             have saved their work; 128 + the signal's number if this process gets SIGINT or
             SIGTERM.
    Raises:  LaunchError, one line that names the host, if one does not answer, has another version
             of minidist, or lacks this folder; then nothing runs on any host.
    """
    orders = _orders(
        command, hosts, port, address, token or wire.new_token(), patience, limits or Limits()
    )
    return HostsJob(hosts, orders, ssh).run()


def _orders(
    command: Sequence[str],
    hosts: Sequence[HostRanks],
    port: int,
    address: str,
    token: bytes,
    patience: float,
    limits: Limits,
) -> list[dict[str, Any]]:
    """Return the order of each host (host_launcher.py)."""
    environ = {
        name: value
        for name, value in clean_environment(os.environ).items()
        if name.startswith(PASSED)
    }
    memory = limits.memory and [limits.memory.nbytes, limits.memory.text]
    place = "127.0.0.1" if len(hosts) == 1 else address or hosts[0].address
    return [
        {
            "command": list(command),
            "sizes": [host.ranks for host in hosts],
            "node": node,
            "address": place,
            "port": port,
            "token": token.decode(),
            "folder": os.getcwd(),
            "environ": environ,
            "patience": patience,
            "cores": list(limits.cores),
            "memory": memory,
            "flight": None if limits.flight is None else os.path.realpath(limits.flight),
        }
        for node in range(len(hosts))
    ]


class HostsJob:
    """The launchers of all hosts, as their starter sees them."""

    def __init__(
        self, hosts: Sequence[HostRanks], orders: Sequence[dict[str, Any]], ssh: str
    ) -> None:
        self.hosts = hosts
        self.orders = orders
        self.ssh = ssh_words(ssh)
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.readers: list[threading.Thread] = []
        self.news: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.told: list[int] = []
        self.said: dict[str, None] = {}  # lines of minidist, which several hosts may print
        self.there: set[int] = set()  # hosts that have said hello
        self.last = [""] * len(hosts)  # the last line of each on stderr

    def run(self) -> int:
        """Start the launchers, wait for them, clean up; return the exit status."""
        with noting_signals(self.told):
            try:
                self._start()
                return self._wait() if self._order() else 128 + self.told[0]
            finally:
                self._end()

    def _start(self) -> None:
        there = f"exec {shlex.join(module_command('minidist.launch.host_launcher'))}"
        for number, host in enumerate(self.hosts):
            command = ["sh", "-c", there] if host.is_here else [*self.ssh, host.name, there]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(
                    f"cannot start {command[0]!r} for host {host.name}: {error.strerror}"
                ) from error
            self.launchers.append(process)
            self.readers += [
                start_thread(self._read, number, process.stdout),
                start_thread(self._pass_on_errors, number, process.stderr),
            ]

    def _order(self) -> bool:
        """Send the first host its order, and the others theirs with the monitor's port, when every
        host has answered.

        Returns: whether the job has begun; False if this process got a signal to stop before that.
        """
        for number, told in self._answers(range(len(self.hosts)), "hello").items():
            if told["version"] != version():
                raise LaunchError(
                    f"host {self.hosts[number].name} has minidist {told['version']}, this host "
                    f"has {version()}; install the same version on all hosts"
                )
        if not self.told:
            self._send(0, json.dumps(self.orders[0]))
        place = self._answers([0], "port").get(0)
        if place is None:
            return False
        for number, order in enumerate(self.orders[1:], 1):
            self._send(number, json.dumps({**order, "port": place["port"]}))
        return True

    def _answers(self, numbers: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
        """Return each host's message of this kind; after a signal to stop, perhaps not all.

        Raises: LaunchError if a host reports a problem, ends or does not answer, with its own
                words.
        """
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + HELLO_LIMIT
        while len(answers) < len(numbers) and not self.told:
            try:
                number, told = self.news.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() > deadline:
                    late = [self.hosts[number].name for number in numbers if number not in answers]
                    raise LaunchError(
                        f"{'hosts' if len(late) > 1 else 'host'} {', '.join(late)} did not "
                        f"answer within {HELLO_LIMIT:g} s; try `{shlex.join(self.ssh)} {late[0]} "
                        "true`"
                    ) from None
                continue
            if kind not in told and ("problem" in told or "end" in told):
                raise LaunchError(self._problem(number, told))
            answers[number] = told
        return answers

    def _problem(self, number: int, told: dict[str, Any]) -> str:
        name = self.hosts[number].name
        if "problem" in told:
            return f"host {name}: {told['problem']}"
        self.readers[2 * number + 1].join(1.0)
        status = self.launchers[number].wait()
        said = self.last[number] or "it said nothing"
        return f"host {name}: ssh ended with {status} ({said}); " + (
            f"try `{shlex.join(self.ssh)} {name} true`"
            if status == 255
            else f"is minidist installed there, at {sys.executable}?"
        )

    # --- output of the hosts
    # ----------------------------------------------------------------------------------------------

    def _read(self, number: int, pipe: IO[bytes]) -> None:
        """Read a host's stdout: its launcher's lines are messages, all others go to stdout."""
        with pipe:
            for line in pipe:
                if line.startswith(MARK.encode()):
                    self.there.add(number)
                    self.news.put((number, news_of(line)))
                else:
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
        self.news.put((number, {"end": True}))

    def _pass_on_errors(self, number: int, pipe: IO[bytes]) -> None:
        """Copy a host's stderr to our stderr.

        Lines before its hello (of ssh and the shell) are left out; equal lines of minidist are
        copied once.
        """
        with pipe:
            for raw in pipe:
                line = self.last[number] = raw.decode(errors="replace").rstrip("\r\n")
                if number in self.there and not (
                    line.startswith("minidist: ") and line in self.said
                ):
                    self.said[line] = None
                    say_line(line)

    # --- wait and end
    # ----------------------------------------------------------------------------------------------

    def _send(self, number: int, line: str) -> None:
        """Send a host a line. An error is ignored: a host that is gone is found by its end."""
        pipe = self.launchers[number].stdin
        with contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.write(f"{line}\n".encode())
                pipe.flush()

    def _wait(self) -> int:
        """Wait until every host has ended; when one has failed, the others get ENDING s.

        Return the exit status.
        """
        passed_on = 0
        failed = 0.0
        while (codes := [process.poll() for process in self.launchers]).count(None):
            for signal_number in self.told[passed_on:]:
                passed_on += 1
                for number in range(len(self.hosts)):
                    self._send(number, str(int(signal_number)))
            failed = failed or (time.monotonic() if any(codes) else 0.0)
            if failed and time.monotonic() - failed > ENDING:
                break
            time.sleep(0.01)
        self._name_lost(codes)
        statuses = [1 if code is None or code < 0 or code == 255 else code for code in codes]
        if any(status == AGAIN for status in statuses) and set(statuses) <= {0, AGAIN}:
            return AGAIN
        return next((status for status in statuses if status > 1), max(statuses))

    def _name_lost(self, codes: Sequence[int | None]) -> None:
        """Print which hosts were lost with their ssh."""
        for host, code in zip(self.hosts, codes, strict=True):
            if code == 255 or (code or 0) < 0:
                say_line(
                    f"minidist: the connection to host {host.name} ended ({self.ssh[0]}: {code})"
                )

    def _end(self) -> None:
        """Close the launchers' stdin, at which they end their ranks, and wait for their end."""
        for process in self.launchers:
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        deadline = time.monotonic() + ENDING
        for process in self.launchers:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + LAST_LINES
        for reader in self.readers:
            reader.join(max(0.0, deadline - time.monotonic()))
