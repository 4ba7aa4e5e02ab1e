"""Start copies of a program as the ranks of one job: `minidist launch`, `minidist train -n 4`.

Each copy gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
NODE_RANK, MASTER_ADDR, MASTER_PORT) and the address of our monitor. The ranks' stdout, and rank 0's
stderr, go straight to the terminal; stderr of the other ranks is copied line by line as `[rank 2]
…`.

A copy starts with SIGINT blocked: a terminal sends Ctrl-C to all copies, and it takes effect in a
program from md.init on. The launcher ends a copy that has not reached md.init, or never calls it.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from minidist.comm import wire
from minidist.comm.health.acceptor import is_loopback, listen, shortage, where_to_listen
from minidist.comm.health.failure import AGAIN, LAUNCHER, Failure, say_line
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.node_agent import NodeAgent
from minidist.comm.health.process_state import PATIENCE
from minidist.device.cores import starting_on
from minidist.errors import LaunchError
from minidist.launch.children import UNMET, Children
from minidist.launch.joining import MonitorAddress, token_from_environment
from minidist.launch.launchers import clean_environment
from minidist.launch.limits import Limits
from minidist.launch.token_file import TokenFile

GRACE = 5.0  # seconds the other ranks get to end after one has failed, and again after SIGTERM
STOP = 1.0  # the same when the launcher is told to stop
MEET_LIMIT = 60.0  # seconds that a node waits for node 0 of its machine
# seconds to pass on the last lines of the ranks: a grandchild may hold a pipe for ever
LAST_LINES = 5.0


@dataclass(frozen=True)
class Nodes:
    """The machines of a job: how many, which one this is, and where node 0 listens.

    `sizes`: the number of ranks on each; left out: the same as on this one. `master_port` 0: any
    free port, on node 0 only.
    """

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    sizes: tuple[int, ...] = ()

    def ranks(self, size: int) -> range:
        """Return the world ranks of this node, which has `size` ranks."""
        first = sum(self.sizes[: self.rank]) if self.sizes else self.rank * size
        return range(first, first + size)

    def world_size(self, size: int) -> int:
        """Return the number of ranks of the job."""
        return sum(self.sizes) if self.sizes else size * self.count


def spawn(
    command: Sequence[str],
    size: int,
    *,
    nodes: Nodes | None = None,
    token: bytes | None = None,
    patience: float = PATIENCE,
    limits: Limits | None = None,
) -> int:
    """Run `size` copies of `command` here (on each of `nodes`) as ranks of one job, and wait for
    them.

    Args:    patience: seconds that a rank's process may be stopped (SIGSTOP) before it counts as
             lost; node 0's value counts.
             limits: the cores and the memory of the ranks here; this process keeps to the cores,
             too.
    Returns: 0 if every rank here ended with 0; else the exit status of the first that failed (128 +
             the signal's number if it was killed). The others are notified at once, then get
             SIGTERM, then SIGKILL. If this process gets SIGINT (Ctrl-C) or SIGTERM, it ends the
             ranks on all nodes within 2 s and returns 128 + the signal's number; a second signal
             kills the ranks here at once. Ranks that save their work at SIGTERM (`minidist train
             --save-every`) get the signal and the time to do so; they end with 75 (try again), and
             so does this.
    Raises:  LaunchError if the port is taken, or several nodes lack MASTER_PORT or a token.
    """
    nodes = nodes or Nodes()
    token = token or token_from_environment()
    if nodes.count > 1 and (token is None or nodes.master_port == 0):
        raise LaunchError(
            "a job on several nodes needs --master-addr, --master-port and one secret for all "
            "nodes: set MINIDIST_TOKEN, or give --token-file, on each of them"
        )
    return SpawnedJob(
        list(command), size, nodes, token or wire.new_token(), patience, limits or Limits()
    ).run()


@contextmanager
def token_on_this_machine(nodes: Nodes) -> Iterator[bytes | None]:
    """Yield the token of a job whose nodes are all on this machine, from node 0's private file.

    For any other job it yields None.

    Raises: LaunchError if node 0 has not written it within MEET_LIMIT s.
    """
    if nodes.count == 1 or not is_loopback(nodes.master_addr):
        yield None
        return
    file = TokenFile(f"launch {nodes.master_addr} {nodes.master_port}")
    if nodes.rank == 0:
        token = wire.new_token()
        file.write(token)
        try:
            yield token
        finally:
            file.remove()
        return
    deadline = time.monotonic() + MEET_LIMIT
    while (found := file.read()) is None or not file.is_held():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 of the job at {nodes.master_addr}:{nodes.master_port} did not answer "
                f"within {MEET_LIMIT:g} s; start it with --node-rank 0 and the same --master-port"
            )
        time.sleep(0.05)
    yield found


class SpawnedJob:
    """The ranks of one node; on node 0 also the job's monitor, on other nodes the node's agent."""

    def __init__(
        self,
        command: list[str],
        size: int,
        nodes: Nodes,
        token: bytes,
        patience: float,
        limits: Limits,
    ) -> None:
        self.command = command
        self.size = size
        self.nodes = nodes
        self.limits = limits
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.children = Children(self.processes, limits, patience)
        self.helpers: list[threading.Thread] = []
        self.told: list[int] = []  # signals to stop that we have received
        self.ended: set[int] = set()  # ranks whose end has been noted
        self.passed_on = 0  # number of signals passed on to ranks that save and end
        self.again = False  # they have saved their work
        host = nodes.master_addr
        port = nodes.master_port
        self.ranks = nodes.ranks(size)
        self.watch: Monitor | NodeAgent = NodeAgent(self.ranks, self.children.how)
        if nodes.rank == 0:
            place = where_to_listen(host) if nodes.count > 1 else host
            self.watch = Monitor(
                nodes.world_size(size),
                token,
                listen(place, port),
                how=lambda seat: self.children.how(seat.world_rank),
                patience=patience,
            )
            port = self.watch.address[1]
        self.place = MonitorAddress(host, port, token)

    def run(self) -> int:
        """Start the ranks, wait for them, clean up; return the exit status."""
        with noting_signals(self.told):
            try:
                self._start()
                return self._wait()
            finally:
                self._end()

    def _start(self) -> None:
        self.limits.begin()
        if isinstance(self.watch, Monitor):
            self.watch.start()
        else:
            self.helpers.append(
                start_thread(self.watch.serve, self.place.address, self.place.token)
            )
        for local_rank, rank in enumerate(self.ranks):
            if self.told:
                return
            # the copy inherits it
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with starting_on(self.limits.of_rank(local_rank, self.size)):
                    process = subprocess.Popen(
                        self.command,
                        env=self._environment(rank, local_rank),
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stderr=None if rank == 0 else subprocess.PIPE,
                    )
            except OSError as error:
                raise LaunchError(
                    f"cannot start {self.command[0]!r}: {shortage(error, self.size)}"
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.processes[rank] = process
            self.limits.started(process.pid)
            if process.stderr is not None:
                try:
                    self.helpers.append(
                        start_thread(copy_lines, process.stderr, f"rank {rank}".__str__)
                    )
                except RuntimeError as error:
                    process.stderr.close()
                    raise LaunchError(
                        f"cannot receive from rank {rank}, which has just been started: {error}"
                    ) from error

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        nodes = self.nodes
        place = self.place
        return {
            **clean_environment(os.environ),
            **place.variables(),
            **self.limits.variables(),
            "MINIDIST_LAUNCH": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes.world_size(self.size)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_RANK": str(nodes.rank),
            "NODE_RANK": str(nodes.rank),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
        }

    def _wait(self) -> int:
        """Wait until every rank here (on node 0: every rank anywhere) has ended well, or one has
        failed; return the status."""
        while not self.told or self._pass_on():
            running = self.children.running()
            for rank, process in self.processes.items():
                if process.returncode == AGAIN and rank in self.watch.savers:
                    self.again = True
                elif process.returncode is not None and rank not in self.ended:
                    self.ended.add(rank)
                    self._note(rank, process.returncode)
            for loss in self.children.frozen(self.watch.awaited()):
                self.watch.miss(loss)
            if self.watch.loss is not None:
                return self._lost(self.watch.loss)
            if not running and (isinstance(self.watch, NodeAgent) or not self.watch.running()):
                return AGAIN if self.again else 0
            time.sleep(0.01)
        return self._stop(Failure.by_signal(self.told[0]))

    def _pass_on(self) -> bool:
        """After one SIGTERM: if all running ranks here save their work, pass it on to them and
        return True."""
        if self.told != [signal.SIGTERM] or not set(self.children.running()) <= self.watch.savers:
            return False
        if not self.passed_on:
            self.passed_on = 1
            for rank in self.children.running():
                self.processes[rank].send_signal(signal.SIGTERM)
        return True

    def _stop(self, loss: Failure) -> int:
        """End the job: the monitor notifies ranks in their waits, and they unwind.

        Return the exit status.
        """
        self.watch.lose(loss)
        self.children.end(STOP, hurry=lambda: len(self.told) > 1)
        ranks = f"{len(self.processes)} ranks were" if len(self.processes) != 1 else "1 rank was"
        say_line(f"minidist: {loss}; its {ranks} ended")
        return loss.status

    def _note(self, rank: int, code: int) -> None:
        """Record that a rank here ended with `code`.

        Another may have failed first, or the rank was expendable.

        Status 0 is no failure after a goodbye, or if no rank needs this one.
        """
        how = self.limits.how_it_ended(code) if code else f"exited with status 0 {UNMET}"
        loss = Failure(rank, self.processes[rank].pid, os.uname().nodename, how)
        if not code:
            self.watch.miss(loss)
            return
        self.watch.lose(loss)
        if self.watch.loss is None and rank in self.watch.spared:
            say_line(f"minidist: {self.watch.spared[rank]}; the job continues without it")
        elif self.watch.loss is None:  # the monitor does not answer
            self.watch.loss = loss

    def _lost(self, loss: Failure) -> int:
        if not loss.traceback:  # the rank could not print its own end
            say_line(f"minidist: {loss}; the job ends")
        code = self.children.code(loss.world_rank, GRACE)
        return loss.status if not code else code if code > 0 else 128 - code

    def _end(self) -> None:
        loss = self.watch.loss
        told_to_stop = loss is not None and loss.world_rank == LAUNCHER  # perhaps another node's
        self.children.end(
            STOP if told_to_stop else GRACE, hurry=lambda: len(self.told) > self.passed_on
        )
        self.watch.close()
        self.limits.end()
        deadline = time.monotonic() + LAST_LINES
        for helper in self.helpers:
            helper.join(max(0.0, deadline - time.monotonic()))


def start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread for a launcher."""
    thread = threading.Thread(target=target, args=args, name="minidist launcher", daemon=True)
    thread.start()
    return thread


def copy_lines(pipe: IO[bytes], name: Callable[[], str]) -> None:
    """Print every line from the pipe, with its sender's name in front; a progress bar's `\\r` ends
    a line, too."""
    with pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\r\n")
            parts = [f"[{name()}] {part}" for part in text.split("\r") if part]
            if parts:
                say_line("\n".join(parts))


@contextmanager
def noting_signals(told: list[int]) -> Iterator[None]:
    """Append SIGINT and SIGTERM to `told` instead of interrupting the block, which must look at
    `told`.

    Outside the main thread it changes nothing: only the main thread may set signal handlers.
    """

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    here = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if here
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
