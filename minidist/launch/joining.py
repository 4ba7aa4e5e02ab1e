"""Find the monitor of a job and connect to it, for every launcher.

    started by               the monitor is                         address and token come from
    minidist launch, md.run  a thread of the launcher               MINIDIST_MONITOR, MINIDIST_TOKEN
    mpirun                   a child of rank 0, on any free port    a broadcast by MPI
    torchrun, srun           a child of rank 0, on MASTER_PORT + 1  MASTER_ADDR; MINIDIST_TOKEN, or
                             (MASTER_PORT is torchrun's store)      a private file that rank 0 writes
                                                                    below the user's cache
    by hand, by an operator  a child of rank 0, on MASTER_PORT      the same
    mpirun of another MPI    a child of rank 0, on any free port    the same file: also the address

The token is never on a command line and never printed. Everything listens on loopback unless the
job has several hosts. Then the monitor listens at every address of its host, unless it was given
one. Under mpirun rank 0 sends all its addresses, and a rank takes the first at which the monitor
proves that it knows the job's token; a name may mean another address here (127.0.1.1) than on other
hosts. Ranks on the monitor's host are reached at the address by which other hosts have reached the
monitor (membership.py).
"""

import contextlib
import json
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minidist.comm import wire
from minidist.comm.health.acceptor import listen, where_to_listen
from minidist.comm.health.failure import MONITOR, Failure, how_it_ended, say_line
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import LOOK, PATIENCE, SHORTEST_LOOK, ProcessLooks
from minidist.errors import HandshakeError, LaunchError, TimeoutError
from minidist.launch.addresses import connect_to_any, own_addresses
from minidist.launch.launchers import LAST_PORT, Launch, check_host
from minidist.launch.own_python import module_command
from minidist.launch.token_file import TokenFile

STAND_IN = 1.5  # seconds during which rank 0 tells late ranks that the monitor is gone
_MESSAGE_BYTES = 4096  # of the MPI broadcast
_TOKEN_BYTES = 2048  # of a secret, at most


@dataclass(frozen=True)
class MonitorAddress:
    """The address of a job's monitor, and the token that a rank needs to connect."""

    host: str
    port: int
    token: bytes

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def variables(self) -> dict[str, str]:
        """Return the variables for the environment of a rank that our own launcher starts."""
        return {
            "MINIDIST_MONITOR": f"{self.host}:{self.port}",
            "MINIDIST_TOKEN": self.token.decode(),
        }


def token_from_environment() -> bytes | None:
    """Return MINIDIST_TOKEN, or None.

    Raises: LaunchError if it cannot be a secret.
    """
    token = os.environ.get("MINIDIST_TOKEN")
    return None if token is None else checked_token(os.fsencode(token), "MINIDIST_TOKEN")


def checked_token(token: bytes, name: str) -> bytes:
    """Return the secret without white space around it.

    It must be text, because it is sent in lines, in variables and in JSON; with at most 2048 bytes
    it fits into MPI's broadcast.

    Raises: LaunchError, which names its variable or file, if it cannot be a secret.
    """
    token = token.strip()
    try:
        printable = token.decode().isprintable()
    except UnicodeDecodeError:
        printable = False
    if 16 <= len(token) <= _TOKEN_BYTES and printable:
        return token
    problem = (
        "has fewer than 16 characters"
        if len(token) < 16
        else f"has more than {_TOKEN_BYTES} bytes"
        if len(token) > _TOKEN_BYTES
        else "is not one line of UTF-8 text"
    )
    raise LaunchError(
        f"{name} {problem}; make one with `python -c 'import secrets; "
        "print(secrets.token_hex())'` and give it to every node"
    )


def place_from_environment() -> MonitorAddress | None:
    """Return the monitor's address from our launcher's variables, or None if another launcher
    started us."""
    address = os.environ.get("MINIDIST_MONITOR")
    if address is None:
        return None
    host, port = address_of("MINIDIST_MONITOR", address)
    token = token_from_environment()
    if token is None:
        raise LaunchError("MINIDIST_MONITOR is set without MINIDIST_TOKEN; start the job again")
    return MonitorAddress(host, port, token)


def address_of(name: str, text: str) -> tuple[str, int]:
    """Return the host and the port of a variable of ours.

    Raises: LaunchError, which names the variable, if it does not hold a host and a port.
    """
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= LAST_PORT:
        raise LaunchError(f"{name}={text!r:.60} needs the form host:port; start the job again")
    check_host(name, host)
    return host, int(port)


# --- joining
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Joined:
    """A rank's connection to its job: `helpers` are its child processes, `file` is the token file
    (rank 0 only)."""

    link: MonitorClient
    token: bytes
    helpers: list["HelperProcess"] = field(default_factory=list)
    file: TokenFile | None = None


def find_monitor(launch: Launch, limit: float, patience: float = PATIENCE) -> Joined:
    """Connect to the monitor of the job that `launch` describes.

    Start it if that is this rank's task.

    Raises: LaunchError, HandshakeError or TimeoutError, as md.init does.
    """
    place = place_from_environment()
    if place is not None:  # other nodes may start before the launcher of node 0
        return _connect(launch, place, limit, begun=launch.node_rank == 0)
    by_file = launch.other_mpi and not launch.master_port
    joined = (_by_mpi if launch.by_mpirun else _by_file if by_file else _by_address)(
        launch, limit, patience
    )
    elsewhere = launch.knows_places or not joined.link.beside_monitor
    if launch.local_rank == 0 and launch.world_rank != 0 and not launch.one_host and elsewhere:
        joined.helpers.append(
            NodeAgentProcess(joined.link, joined.token)
        )  # for all ranks of this host
    return joined


def _connect(launch: Launch, place: MonitorAddress, limit: float, *, begun: bool = False) -> Joined:
    link = MonitorClient(
        place.address, place.token, launch.world_rank, launch.world_size, limit=limit, begun=begun
    )
    return Joined(link, place.token)


def _connect_to_own(launch: Launch, monitor: "MonitorProcess", limit: float) -> Joined:
    """Connect rank 0 to the monitor that it has started.

    Raises: PeerLostError, which says how the monitor ended, if it has.
    """
    try:
        joined = _connect(launch, monitor.place, limit, begun=True)
    except BaseException as error:
        monitor.close()  # it notifies the ranks that have not connected yet
        if monitor.loss is not None:
            raise monitor.loss.error() from error
        raise
    joined.helpers.append(monitor)
    return joined


def _by_mpi(launch: Launch, limit: float, patience: float) -> Joined:
    """Under mpirun: rank 0 starts the monitor and broadcasts its address by MPI, or the error if it
    could not."""
    monitor: MonitorProcess | None = None
    words = [""]
    if launch.world_rank == 0:
        try:
            monitor = MonitorProcess(
                launch.world_size,
                token_from_environment() or wire.new_token(),
                host="127.0.0.1" if launch.one_host else "",
                patience=patience,
            )
            words = [
                str(monitor.place.port),
                monitor.place.token.decode(),
                *(["127.0.0.1"] if launch.one_host else own_addresses()),
            ]
        except (LaunchError, OSError) as error:
            words = [str(error)[:500]]
    words = _broadcast(words, limit)
    if len(words) == 1:
        raise LaunchError(words[0])
    if monitor is not None:
        return _connect_to_own(launch, monitor, limit)
    port, token, *hosts = words
    return Joined(
        connect_to_any(hosts, int(port), token.encode(), launch, limit, begun=True), token.encode()
    )


def _by_address(launch: Launch, limit: float, patience: float) -> Joined:
    """Under torchrun and srun: rank 0 hosts the monitor one port above MASTER_PORT.

    If ranks were started by hand, it uses MASTER_PORT itself.
    """
    host = "127.0.0.1" if launch.one_host else launch.master_addr
    port = launch.monitor_port
    token = token_from_environment()
    file = TokenFile(f"{launch.launcher} {launch.job} {host} {port}") if token is None else None
    if launch.world_rank == 0:
        monitor = MonitorProcess(
            launch.world_size,
            token or wire.new_token(),
            port=port,
            patience=patience,
            host=host if launch.one_host else where_to_listen(host),
        )
        if file is not None:
            file.write(monitor.place.token)
        joined = _connect_to_own(launch, monitor, limit)
        joined.file = file
        return joined
    if file is None:
        return _connect(launch, MonitorAddress(host, port, token or b""), limit)
    link, token = connect_by_file(file, (host, port), launch, limit)
    link.limit = limit
    return Joined(link, token)


def _by_file(launch: Launch, limit: float, patience: float) -> Joined:
    """Under Open MPI's mpirun, without its MPI: rank 0 hosts the monitor, and writes its address
    and the token to a file."""
    if not launch.job:
        raise LaunchError(
            f"{launch.launcher}'s mpirun does not name its job (PMIX_NAMESPACE); start the job "
            "with `minidist launch`"
        )
    file = TokenFile(f"{launch.launcher} {launch.job}")
    if launch.world_rank != 0:
        link, token = connect_by_file(file, None, launch, limit)
        link.limit = limit
        return Joined(link, token)
    hosts = ["127.0.0.1"] if launch.one_host else own_addresses()
    monitor = MonitorProcess(
        launch.world_size,
        token_from_environment() or wire.new_token(),
        host="127.0.0.1" if launch.one_host else "",
        patience=patience,
    )
    file.write(f"{','.join(hosts)} {monitor.place.port} ".encode() + monitor.place.token)
    joined = _connect_to_own(launch, monitor, limit)
    joined.file = file
    return joined


# --- processes that a rank starts
# ------------------------------------------------------------------------------------


class HelperProcess:
    """A child process of a rank: minidist.comm.health.MODULE with ARGUMENTS.

    It reads the token from its stdin.

    A monitor ends when the ranks have ended, or when its stdin ends because rank 0 is gone. A node
    agent ends when the monitor closes the connection. The helper watches the ranks, and its rank
    watches the helper: a frozen helper is killed, and the end of a killed helper ends the job, even
    before it is connected.

    Attributes: loss: how it ended, if not well. met: all ranks have joined, so no late ones can
                connect.
    """

    world_rank = MONITOR  # in whose place it stands in a Failure

    def __init__(
        self,
        token: bytes,
        module: str,
        *arguments: object,
        fds: Sequence[int] = (),
        patience: float = PATIENCE,
    ) -> None:
        command = module_command(f"minidist.comm.health.{module}", *map(str, arguments))
        self._name = module.removesuffix("_process").replace("_", " ")
        self._ended = threading.Event()
        self.loss: Failure | None = None
        self.met = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=fds,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start the job's {self._name} on {platform.node()}: {error.strerror}"
            ) from error
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; _watch reports how
            self._process.stdin.write(token + b"\n")
            self._process.stdin.flush()
        self._watcher = threading.Thread(
            target=self._watch, args=(patience,), name="helper's watch", daemon=True
        )
        self._watcher.start()

    def close(self) -> None:
        """Wait until every rank has said goodbye, or the helper has ended.

        It may outlive this process to watch others.
        """
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        with stdout:
            if stdout.read():
                self._process.returncode = 0  # not awaited: it outlives this process
        self._process.wait()
        self._ended.set()
        self._watcher.join()

    def _watch(self, patience: float) -> None:
        """Until it has ended: kill it if it is stopped for `patience` seconds, and report it if it
        was killed."""
        looks = ProcessLooks(patience)
        pid = self._process.pid
        frozen = False
        while not self._ended.wait(self._until(looks)) and self._process.poll() is None:
            frozen = bool(looks.frozen({pid})) or frozen
            looks.close()  # it is killed at once
        if status := self._process.poll():
            how = "was frozen (stopped), and is killed" if frozen else how_it_ended(status)
            self.loss = Failure(self.world_rank, pid, platform.node(), how)
            say_line(f"minidist: the job's {self._name} (process {pid} on {platform.node()}) {how}")
            self.tell()

    def _until(self, looks: ProcessLooks) -> float:
        """Return the seconds until the next look: short while ranks join and wait for the result,
        longer once they train."""
        return max(0.0, looks.next(LOOK if self.met else SHORTEST_LOOK) - time.monotonic())

    def tell(self) -> None:
        """Report the `loss` to the job."""


class MonitorProcess(HelperProcess):
    """The monitor of a job, at `place`; host "": at every address.

    Raises: LaunchError if the port is taken.
    """

    def __init__(
        self,
        size: int,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        self._host = host
        self._size = size
        with listen(host, port) as listener:  # the kernel queues ranks until the child is there
            self.place = MonitorAddress(host or "127.0.0.1", listener.getsockname()[1], token)
            super().__init__(
                token,
                "monitor_process",
                size,
                listener.fileno(),
                patience,
                fds=[listener.fileno()],
                patience=patience,
            )

    def tell(self) -> None:
        """Notify late ranks in the lost monitor's place.

        The ranks that were connected have lost their connections.
        """
        if self.met or self.loss is None:
            return
        with contextlib.suppress(LaunchError, OSError):  # another process has taken the port
            monitor = Monitor(self._size, self.place.token, listen(self._host, self.place.port))
            monitor.start()
            monitor.lose(self.loss)
            deadline = time.monotonic() + STAND_IN
            while (
                not all(map(monitor.has_left, range(1, self._size))) and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            monitor.close()


class NodeAgentProcess(HelperProcess):
    """The node agent of a host, a child of its first rank.

    That rank's `link` reports if the agent dies.
    """

    def __init__(self, link: MonitorClient, token: bytes) -> None:
        self._link = link
        super().__init__(token, "node_agent", *link.address)

    def tell(self) -> None:
        """End the job: without the agent nobody knows how this host's ranks end."""
        if self.loss is not None and not self._link.closed:
            self._link.lose_with(
                Failure.here(
                    self._link.world_rank,
                    f"has lost its host's {self._name} (process "
                    f"{self.loss.pid}), which {self.loss.how}",
                )
            )


# --- how a rank learns where the monitor is
# ---------------------------------------------------------------------------


def _broadcast(words: list[str], limit: float) -> list[str]:
    """Return rank 0's words on every rank of MPI_COMM_WORLD, in one message of 4 KiB.

    A waiting rank sleeps between tests instead of spinning.

    Raises: TimeoutError if the broadcast does not finish in `limit` s.
    """
    from mpi4py import MPI

    message = bytearray(json.dumps(words, ensure_ascii=False).encode().ljust(_MESSAGE_BYTES))
    request = MPI.COMM_WORLD.Ibcast(message, root=0)  # all but rank 0 receive into theirs
    deadline = time.monotonic() + limit
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {MPI.COMM_WORLD.rank} waited {limit:g} s for MPI's rank 0 to send the "
                "monitor's address"
            )
        time.sleep(0.0005)
    return json.loads(message)  # type: ignore[no-any-return]


def connect_by_file(
    file: TokenFile, address: tuple[str, int] | None, launch: Launch, limit: float
) -> tuple[MonitorClient, bytes]:
    """Connect with the token that rank 0 is about to write.

    If an earlier job's token is refused, read the file again.

    Args:   address: the monitor's; None: the file has it, as "host,host port token".
    Raises: HandshakeError or TimeoutError after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    problem = None
    while time.monotonic() < deadline:
        token = file.read()
        if token is not None:
            try:
                if address is None:
                    hosts, port, token = token.split(b" ", 2)
                    return connect_to_any(
                        hosts.decode().split(","), int(port), token, launch, 1.0
                    ), token
                return MonitorClient(
                    address, token, launch.world_rank, launch.world_size, limit=1.0
                ), token
            except (HandshakeError, TimeoutError) as error:
                problem = error
        time.sleep(0.05)
    raise problem or TimeoutError(
        f"rank {launch.world_rank} waited {limit:g} s for rank 0 to write the job's token to "
        f"{file.path}; do the nodes share that folder? else set MINIDIST_TOKEN everywhere"
    )
