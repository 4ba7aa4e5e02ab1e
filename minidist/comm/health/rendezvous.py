"""How the ranks of a job find each other, for every launcher.

    started by                 the monitor is                          a rank learns address and token from
    minidist launch, md.run    a thread of the launcher                MINIDIST_MONITOR, MINIDIST_TOKEN
    mpirun                     a child of rank 0, on any free port     a broadcast by MPI
    torchrun, srun             a child of rank 0, on MASTER_PORT + 1   MASTER_ADDR; MINIDIST_TOKEN, or a private file
                               (MASTER_PORT is torchrun's store)       that rank 0 writes below the user's cache

The token is never on a command line and never printed. Everything listens on loopback unless the job has several hosts.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from minidist.comm.health.failure import say_line
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import exit_of
from minidist.errors import HandshakeError, LaunchError, TimeoutError
from minidist.files import scratch, sweep

MONITOR_START = 30.0      # seconds a monitor process gets to start
STOP = 10.0               # seconds that the ranks get to end when one is lost
_MESSAGE_BYTES = 4096     # of the MPI broadcast


@dataclass(frozen=True)
class MonitorAddress:
    """Where a job's monitor is, and the secret that opens it."""

    host: str
    port: int
    token: bytes

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def variables(self) -> dict[str, str]:
        """For the environment of a rank that our own launcher starts."""
        return {"MINIDIST_MONITOR": f"{self.host}:{self.port}", "MINIDIST_TOKEN": self.token.decode()}


def token_from_environment() -> bytes | None:
    """MINIDIST_TOKEN, or None. Raises LaunchError if it is too short to be a secret."""
    token = os.environ.get("MINIDIST_TOKEN")
    if token is None:
        return None
    if len(token) < 16:
        raise LaunchError("MINIDIST_TOKEN has fewer than 16 characters; make one with "
                          "`python -c 'import secrets; print(secrets.token_hex())'` and give it to every node")
    return token.encode()


def place_from_environment() -> MonitorAddress | None:
    """What our own launcher says, or None if it did not start us."""
    address = os.environ.get("MINIDIST_MONITOR")
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    token = token_from_environment()
    if not (host and port.isdigit() and token):
        raise LaunchError(f"MINIDIST_MONITOR={address!r} needs the form host:port, and MINIDIST_TOKEN beside it")
    return MonitorAddress(host, int(port), token)


# --- the monitor as a child of rank 0 --------------------------------------------------------------------------------

class MonitorProcess:
    """A monitor of its own, in a child process that ends when the ranks have, or when we are gone.

    Raises: LaunchError if it does not start (the port is taken).
    """

    def __init__(self, size: int, token: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        command = [sys.executable, "-m", "minidist.comm.health.rendezvous", str(size), host, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(token + b"\n")
        self._process.stdin.flush()
        ready = select.select([self._process.stdout], [], [], MONITOR_START)[0]
        answer = self._process.stdout.readline().decode().strip() if ready else "error the monitor did not start"
        self._process.stdout.close()
        if not answer.isdigit():
            self.close(0.0)
            raise LaunchError(answer.removeprefix("error ") or "the monitor ended as it started")
        self.place = MonitorAddress(host, int(answer), token)

    def close(self, limit: float | None = None) -> None:
        """Wait until it has ended, which it does once every rank has gone: rank 0 ends last, as in MPI_Finalize."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _monitor_main(size: int, host: str, port: int) -> None:
    """The child: token in on stdin, port out on stdout; then it watches until every rank has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)                # Ctrl-C ends the ranks; we end after them
    token = sys.stdin.buffer.readline().strip()
    try:
        monitor = Monitor(size, token, host=host, port=port, how=lambda seat: exit_of(seat.pid))
    except LaunchError as error:
        print(f"error {error}", flush=True)
        return
    print(monitor.address[1], flush=True)
    monitor.start()
    while not monitor.wait(0.2) and monitor.loss is None:
        if select.select([sys.stdin], [], [], 0.0)[0]:          # rank 0 is gone, or about to go
            monitor.wait(0.5)                                   # time for its last word to arrive
            if monitor.loss is None and not monitor.has_left(0):
                break
    if monitor.loss is not None:
        if not monitor.loss.traceback:                          # it could not speak for itself
            say_line(f"minidist: {monitor.loss}; the job ends")
        deadline = time.monotonic() + STOP
        while time.monotonic() < deadline and not select.select([sys.stdin], [], [], 0.0)[0]:
            if monitor.wait_until_stopped(0.2, late=True):      # a late rank must learn of the failure, too
                break
        monitor.wait_until_stopped(max(0.0, deadline - time.monotonic()))
    monitor.close()


# --- under mpirun ----------------------------------------------------------------------------------------------------

def share_by_mpi(place: MonitorAddress | None, limit: float, *, problem: str = "") -> MonitorAddress:
    """Rank 0 tells every rank of MPI_COMM_WORLD where the monitor is, or what kept it from starting.

    Cost:    one broadcast of 4 KiB; a waiting rank sleeps between tests instead of spinning.
    Raises:  LaunchError if rank 0 had a `problem`; TimeoutError if MPI's ranks do not come together in `limit` s.
    """
    from mpi4py import MPI

    words = [problem[:500]] if place is None else [place.host, place.port, place.token.decode()]
    message = bytearray(json.dumps(words, ensure_ascii=False).encode().ljust(_MESSAGE_BYTES))
    request = MPI.COMM_WORLD.Ibcast(message, root=0)                # all but rank 0 receive into theirs
    deadline = time.monotonic() + limit
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {MPI.COMM_WORLD.rank} waited {limit:g} s for MPI's rank 0 to name the monitor")
        time.sleep(0.0005)
    words = json.loads(message)
    if len(words) == 1:
        raise LaunchError(words[0])
    return MonitorAddress(words[0], words[1], words[2].encode())


def outward_address() -> str:
    """This host's address as other hosts see it."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))     # RFC 5737, documentation: no packet is sent, the kernel only picks a route
        return str(sock.getsockname()[0])


# --- under torchrun and srun -----------------------------------------------------------------------------------------

class TokenFile:
    """The job's token in a file that only this user can read, for ranks whose launcher carries no secret of ours.

    Nodes find it through a shared home; where there is none, the user sets MINIDIST_TOKEN. Rank 0 holds a lock on it
    until it is removed, so that a file without one is seen to be a killed job's, and goes when the next one is written.
    """

    def __init__(self, job: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(cache) / "minidist" / f"job-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
        self._lock: int | None = None

    def write(self, token: bytes) -> None:
        """Put the token there, in one step. Raises LaunchError if the place cannot be written."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(self.path.parent, "job-")
            with scratch(self.path.parent) as folder:
                draft = folder / "token"
                self._lock = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with contextlib.suppress(OSError):      # a file system without locks
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, token)
                draft.replace(self.path)
        except OSError as error:
            raise LaunchError(f"cannot write the job's token below {self.path.parent} ({error.strerror}); set "
                              "MINIDIST_TOKEN for every rank instead") from error

    def read(self) -> bytes | None:
        """The token, or None while there is none. Raises LaunchError if another user could have written or read it."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                state = os.fstat(file.fileno())
                if state.st_uid != os.geteuid() or state.st_mode & 0o077:
                    raise LaunchError(f"{self.path} is not private to this user; remove it and start the job again")
                return file.read()
        except OSError:
            return None

    def remove(self) -> None:
        """Forget the token: every rank has it."""
        self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def connect_by_file(file: TokenFile, address: tuple[str, int], world_rank: int, world_size: int,
                    limit: float) -> tuple[MonitorClient, bytes]:
    """Connect with the token that rank 0 is about to write; one left by an earlier job is refused and read anew.

    Raises: HandshakeError or TimeoutError after `limit` seconds.
    """
    deadline, problem = time.monotonic() + limit, None
    while time.monotonic() < deadline:
        token = file.read()
        if token is not None:
            try:
                return MonitorClient(address, token, world_rank, world_size, limit=1.0), token
            except (HandshakeError, TimeoutError) as error:
                problem = error
        time.sleep(0.05)
    raise problem or TimeoutError(f"rank {world_rank} waited {limit:g} s for rank 0 to write the job's token to "
                                  f"{file.path}; do the nodes share that folder? else set MINIDIST_TOKEN everywhere")


if __name__ == "__main__":
    _monitor_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
