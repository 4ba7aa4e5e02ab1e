"""The processes of an elastic job, and the launcher's connection to each; a process may serve in
several generations.

    process -> launcher                                 launcher -> process
    waiting   why it left its generation;               generation   rank, size, where the monitor
              tidy: it lost nothing;                                 is; whether the job has begun
              steps that it has made;                   regroup      to rank 0: name the step to
              saves: at SIGTERM it saves its                         stop after
              work and ends                             stop         step: leave the generation
    formed    step: the state is whole; rank 0's                     after it
    stepped   step: the first step after that is made   go           to rank 0: all others know
    at        step: this number of steps is made;                    that step
              rank 0's, several per second              record       the records of all generations
    trained   step: all steps are made; rank 0's
              (of ranks that make steps of their own: 0)
    boundary  step: all are to stop after it; rank 0's
    agreed    it knows that step
    record    (asks)
    give_up   why the job cannot continue
    done      its work is finished

A closed connection means that the process, or the launcher, is gone.
"""

import contextlib
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from minidist.comm import wire
from minidist.comm.health.acceptor import Acceptor, end_connection, listen, set_up, shortage
from minidist.comm.health.process_state import REAP_LIMIT
from minidist.errors import CommError, HandshakeError, LaunchError
from minidist.launch.limits import Limits
from minidist.launch.spawning import start_thread
from minidist.launch.starter import Starter
from minidist.launch.template import FORK_LIMIT, Template

HERE = "127.0.0.1"  # where the launcher listens for its processes, and for ranks
KILLED_LIMIT = 10.0  # seconds that all killed processes together get to end

STARTING = "starting"
WAITING = "waiting"
MEMBER = "member"
DONE = "done"

Event = tuple["Worker", dict[str, Any]]


class Worker:
    """A process of the job.

    `number` counts from 0 and is never used again; `rank` is its rank in its last generation.

    Args:       starter: the Starter that has started it.
    Attributes: state    STARTING, WAITING (for a generation), MEMBER (of the present one) or DONE
                tells    it was a member once, and may hold copies of the state
                saves    at SIGTERM it saves its work and ends; told: SIGTERM was sent to it
    """

    def __init__(self, number: int, process: Any, starter: Starter) -> None:
        self.number = number
        self.process = process
        self.starter = starter
        self.since = time.monotonic()
        self.sock: socket.socket | None = None
        self.state = STARTING
        self.rank = -1
        self.tells = False
        self.saves = False
        self.told = False
        self.frozen = False  # it was stopped (SIGSTOP) for too long, and is killed
        self._stopped: float | None = None  # since when it was seen stopped

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.state == MEMBER else f"process {self.number}"

    def send(self, kind: str, **content: Any) -> None:
        """Send one message. An error is ignored: the launcher notices the end of a process in
        another way."""
        with contextlib.suppress(CommError, OSError, ValueError):
            if self.sock is not None:
                wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)

    def ended(self, limit: float = REAP_LIMIT) -> int | None:
        """Return the exit code of a process that is about to end.

        None if it still runs after `limit` s.
        """
        deadline = time.monotonic() + limit
        code: int | None
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return code

    @property
    def stopped(self) -> bool:
        """Return whether it is stopped (SIGSTOP)."""
        return self.starter.stopped(self.process)

    def kill_frozen(self, patience: float) -> None:
        """Kill it if each look of the last `patience` seconds has found it stopped."""
        if not self.stopped:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        elif time.monotonic() - self._stopped > patience:
            self.frozen = True
            self.kill()

    def how_it_ended(self, code: int) -> str:
        """Return the exit code in words."""
        if self.frozen:
            return "was frozen (stopped) at its start, and is killed"
        return self.starter.how_it_ended(self.process, code)

    def tell(self) -> None:
        """Send SIGTERM, once."""
        if not self.told:
            self.told = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)


class Workforce:
    """All processes that were started and have not ended, by number.

    Their messages are in `events`.

    Args:       template: this host's, if there is one already.
    Attributes: coming: number of processes that are being started.
    """

    def __init__(
        self,
        command: Sequence[str],
        token: bytes,
        limits: Limits,
        template: Template | None = None,
    ) -> None:
        self.started = 0
        # replaced as a whole: another thread may be iterating over it
        self.workers: dict[int, Worker] = {}
        self.coming = 0
        self.events: queue.SimpleQueue[Event | LaunchError | None] = queue.SimpleQueue()
        self._listener = listen(HERE, 0)
        self._acceptor = Acceptor(
            self._listener,
            token,
            self._enter,
            1,
            _run,
            "minidist launcher",
            fail=self._cannot_accept,
        )
        self._closed = False
        self.starter = Starter(
            command, token, limits, self._listener.getsockname(), self._name, template=template
        )
        self._starting = threading.Lock()
        self._counting = threading.Lock()
        self._starters: list[threading.Thread] = []
        start_thread(self._accept)

    def prepare(self, *, forks: bool, told: Callable[[], bool]) -> None:
        """Start the template and wait until it has loaded; call this before the first start.

        Args:   forks: the command calls template.fork_on_demand(). told(): whether to stop waiting.
        """
        if forks:
            self.starter.start_template(told)

    def _name(self, number: int) -> str:
        """Return the name of a process, which is put in front of its lines."""
        worker = self.workers.get(number)
        return f"process {number}" if worker is None else str(worker)

    def start(self) -> None:
        """Start another process. Raises: LaunchError if the command cannot be started."""
        self._start(self._next_number())

    def start_beside(self) -> None:
        """Start another process in a thread: a fork may take long, and the launcher serves the
        ranks meanwhile.

        An error is raised by `next_event`.
        """
        living = [thread for thread in self._starters if thread.is_alive()]
        self._starters = [*living, start_thread(self._start_or_tell, self._next_number())]

    def count(self) -> int:
        """Return the number of processes, including those that are being started."""
        with self._counting:
            return len(self.workers) + self.coming

    def _next_number(self) -> int:
        """Return the number of a process that is about to be started."""
        with self._counting:
            self.coming = self.coming + 1
            self.started = self.started + 1
            return self.started - 1

    def _start_or_tell(self, number: int) -> None:
        try:
            self._start(number)
        except LaunchError as error:
            self.events.put(error)
        except (OSError, RuntimeError) as error:  # no file, no memory, no thread
            self.events.put(LaunchError(f"cannot start process {number}: {error}"))

    def _cannot_accept(self, error: OSError) -> None:
        """Report that processes connect and this one has no resources left to accept them."""
        size = max(1, len(self.workers))
        self.events.put(
            LaunchError(f"cannot take the connection of another process: {shortage(error, size)}")
        )

    def _start(self, number: int) -> None:
        with self._starting:  # a forked process may connect before start() returns
            if self._closed:
                return
            process = self.starter.start(number)
            if process is None:
                return
            worker = Worker(number, process, self.starter)
            with self._counting:
                self.workers = {**self.workers, number: worker}
                self.coming = self.coming - 1
        self.starter.pass_on_lines(number, process)

    def of(self, *states: str) -> list[Worker]:
        """Return the processes in one of these states, by number."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.state in states]

    def next_event(self, limit: float) -> Event | None:
        """Return a process's message; None if none arrives in `limit` s, or if a process has ended.

        Raises: LaunchError if another process could not be started.
        """
        try:
            event = self.events.get(timeout=limit)
        except queue.Empty:
            return None
        if isinstance(event, LaunchError):
            raise event
        return event

    def reap(self) -> list[tuple[Worker, int]]:
        """Remove and return the processes that have ended since the last call, with their exit
        codes."""
        gone = [
            (worker, code)
            for worker in self.of(STARTING, WAITING, MEMBER, DONE)
            if (code := worker.process.poll()) is not None
        ]
        for worker, _ in gone:
            if worker.sock is not None:  # its children may hold it open
                end_connection(worker.sock)
        ended = {worker.number for worker, _ in gone}
        with self._counting:
            self.workers = {
                number: worker for number, worker in self.workers.items() if number not in ended
            }
        return gone

    def end(self, grace: float, hurry: Callable[[], bool]) -> None:
        """Close all connections, at which waiting processes end.

        Send SIGTERM after `grace` s, SIGKILL after as long again.

        A process that has not connected yet gets SIGTERM at once.
        """
        self._closed = True
        self.starter.ending = True
        self._acceptor.close()
        for worker in self.workers.values():
            if worker.sock is not None:
                end_connection(worker.sock)
        deadline = time.monotonic() + FORK_LIMIT
        while (
            any(thread.is_alive() for thread in self._starters)
            and time.monotonic() < deadline
            and not hurry()
        ):
            time.sleep(0.005)
        for worker in self.workers.values():
            if worker.sock is None:
                worker.tell()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + (0.0 if hurry() else grace)
            while self.workers and time.monotonic() < deadline and not hurry():
                self.reap()
                time.sleep(0.005)
            for worker in self.workers.values():
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(signal.SIGKILL if hurry() else number)
        deadline = time.monotonic() + KILLED_LIMIT
        for worker in self.workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.starter.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            self._acceptor.accept()

    def _enter(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Accept the connection of a process, and receive its messages in a thread."""
        with self._starting:
            worker = self.workers.get(hello.get("process", -1))
        if worker is None or worker.sock is not None:
            raise HandshakeError(
                f"{wire.address_of(sock)} was refused: this job expects no process that is "
                f"{hello.get('process')!r}"
            )
        set_up(sock)
        wire.send_frame(sock, {"kind": "welcome"}, 1.0)
        worker.sock = sock
        start_thread(self._hear, worker, sock)

    def _hear(self, worker: Worker, sock: socket.socket) -> None:
        with sock, contextlib.suppress(CommError, OSError, ValueError):
            while True:
                self.events.put((worker, wire.recv_frame(sock, None)))
        worker.ended()
        self.events.put(None)  # wakes the launcher, which looks for ended processes


def _run(target: Callable[..., None], *args: Any) -> None:
    start_thread(target, *args)
