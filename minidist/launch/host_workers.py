"""Processes of an elastic job on one of its hosts, started there by ssh for the job's launcher
(elastic_hosts.py).

    launcher -> this process                          this process -> launcher
    start       process: another one                  started   process, pid
    signal      process, signal: send it              stopped   process, value: whether it is
                                                                stopped (SIGSTOP)
    generation  number, port, token of its monitor,   ended     process, code, how
                ranks: [rank, process] of this host

The order comes on stdin, as host_launcher.py's; then this process connects to the launcher. For
each generation that has ranks here it is the monitor's node agent, which knows how they end. When
the launcher hangs up, what still runs here is ended.
"""

import contextlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.comm.health.acceptor import connect_to_monitor
from minidist.comm.health.node_agent import NodeAgent
from minidist.comm.health.process_state import LOOK, REAP_LIMIT
from minidist.errors import CommError, LaunchError
from minidist.launch.host_launcher import NO_ORDER, take_order, tell_problem
from minidist.launch.limits import Limits, MemoryLimit
from minidist.launch.spawning import GRACE, start_thread
from minidist.launch.starter import Starter
from minidist.launch.template import Orphan

TRY = 3.0  # seconds that one of the launcher's addresses gets to answer
REAP = 0.005  # seconds between looks at whether a process has ended
TEMPLATE_LIMIT = 120.0  # seconds that the template may take to load


def main() -> int:
    """Take the order, then serve the launcher until it hangs up. Returns: 0; 2 if the order cannot
    be followed."""
    _, line = take_order()
    if not line:
        return 1
    try:
        host = HostWorkers(json.loads(line))
    except NO_ORDER as error:
        tell_problem(error)
        return 2
    host.serve()
    return 0


class HostWorkers:
    """The processes of this host. Raises: OSError if the folder is not there; CommError if no
    address answers."""

    def __init__(self, order: dict[str, Any]) -> None:
        os.chdir(order["folder"])
        os.environ.update(order["environ"])
        memory = order["memory"] and MemoryLimit(*order["memory"])
        self.limits = Limits(
            order["cores"],
            memory,
            folder=order["run"] and Path(order["run"]),
            flight=order["flight"] and Path(order["flight"]),
        )
        self.processes: dict[int, subprocess.Popen[bytes] | Orphan] = {}
        self.codes: dict[int, int] = {}
        self.ranks: dict[int, int] = {}  # of the present generation: process by rank
        self.stopped: set[int] = set()
        self.agent: NodeAgent | None = None
        self._sending = threading.Lock()
        self._over = False
        token = order["token"].encode()
        self.sock, address = _connect(order["addresses"], order["port"], token, order["node"])
        self.starter = Starter(order["command"], token, self.limits, address, self._name)
        self.limits.begin()
        if order["forks"]:
            deadline = time.monotonic() + TEMPLATE_LIMIT
            self.starter.start_template(lambda: time.monotonic() > deadline or _hung_up(self.sock))

    def serve(self) -> None:
        """Do what the launcher says until it hangs up."""
        watch = start_thread(self._watch)
        try:
            with self.sock:
                while True:
                    try:
                        frame = wire.recv_frame(self.sock, None)
                    except (CommError, OSError, ValueError):
                        break  # the launcher has hung up
                    self._take(frame)
        finally:
            self._end()
            self._over = True
            watch.join(1.0)

    def _take(self, frame: dict[str, Any]) -> None:
        match frame["kind"]:
            case "start":
                self._start(int(frame["process"]))
            case "signal":
                process = self.processes.get(int(frame["process"]))
                if process is not None and process.poll() is None:
                    process.send_signal(int(frame["signal"]))
            case "generation":
                if self.agent is not None:
                    self.agent.close()
                self.ranks = {int(rank): int(number) for rank, number in frame["ranks"]}
                self.agent = NodeAgent([*self.ranks], self._how) if self.ranks else None
                if self.agent is not None:
                    start_thread(
                        self.agent.serve,
                        (self.starter.address[0], int(frame["port"])),
                        str(frame["token"]).encode(),
                    )

    def _start(self, number: int) -> None:
        try:
            process = self.starter.start(number)
        except (LaunchError, OSError) as error:
            self._say("ended", process=number, code=127, how=f"could not be started: {error}")
            return
        if process is None:
            return
        self.processes[number] = process
        self._say("started", process=number, pid=process.pid)
        self.starter.pass_on_lines(number, process)

    def _name(self, number: int) -> str:
        return next(
            (f"rank {rank}" for rank, process in self.ranks.items() if process == number),
            f"process {number}",
        )

    def _how(self, rank: int) -> str | None:
        """How a rank ended that is just ending; None if it still runs."""
        process = self.processes.get(self.ranks.get(rank, -1))
        deadline = time.monotonic() + REAP_LIMIT
        while process is not None:
            if (code := process.poll()) is not None:
                return self.limits.how_it_ended(code)
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return None

    def _watch(self) -> None:
        """Tell the launcher which processes end, and which are stopped."""
        looked = 0.0
        while not self._over:
            living = {
                number: process
                for number, process in list(self.processes.items())
                if number not in self.codes
            }
            for number, process in living.items():
                if (code := process.poll()) is not None:
                    self.codes[number] = code
                    self._say(
                        "ended", process=number, code=code, how=self.limits.how_it_ended(code)
                    )
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                for number, process in living.items():
                    if self.starter.stopped(process) != (number in self.stopped):
                        self.stopped ^= {number}
                        self._say("stopped", process=number, value=number in self.stopped)
            time.sleep(REAP)

    def _say(self, kind: str, **content: Any) -> None:
        with self._sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)

    def _end(self) -> None:
        """The launcher has hung up, and the processes see that, too: they get GRACE s to end, and
        again."""
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE * (number != signal.SIGKILL)
            living = [process for process in self.processes.values() if process.poll() is None]
            for process in living if number else ():
                process.send_signal(number)
            while any(process.poll() is None for process in living) and time.monotonic() < deadline:
                time.sleep(REAP)
        if self.agent is not None:
            self.agent.close()
        self.starter.close()
        self.limits.end()


def _connect(
    addresses: list[str], port: int, token: bytes, node: int
) -> tuple[socket.socket, tuple[str, int]]:
    """A connection to the launcher, which is at one of these addresses; and which that is. Raises:
    CommError."""
    problem: CommError | None = None
    for address in addresses:
        try:
            return connect_to_monitor(
                (address, port),
                token,
                {"host_workers": node},
                f"host {platform.node()}",
                TRY,
                begun=True,
            ), (address, port)
        except CommError as error:
            problem = error
    assert problem is not None
    raise problem


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection; on Linux frames that are not read yet do not
    hide it."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
