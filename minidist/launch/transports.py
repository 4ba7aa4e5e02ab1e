"""Build a transport from its name; each module is imported when it is needed."""

import difflib
import importlib
import importlib.util
import queue
import resource
import threading
import warnings
from collections.abc import Callable

from minidist.comm.health.acceptor import FILES, shortage
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.errors import CommError, HandshakeError, LaunchError, PeerLostError

THREADS = ("threads", "threads-unbuffered")  # ranks inside one process
PROCESSES = ("auto", "tcp", "shm", "mpi", "nccl")  # ranks that are processes
PLAIN = ("plain-tcp",)  # the same, to read and to try: see comm/transports/plain_tcp.py
_MAKERS = {
    "auto": ("auto", "connect"),
    "tcp": ("auto", "connect_tcp"),
    "shm": ("auto", "connect_shm"),
    "plain-tcp": ("plain_tcp", "connect"),
    "mpi": ("mpi.transport", "MpiTransport"),
    "nccl": ("gpu.nccl", "connect"),
}
# most seconds to wait for the reason of a failed connection; usually milliseconds
HEARSAY = 2.0


def check_name(name: str, among: tuple[str, ...] = PROCESSES) -> None:
    """Raise LaunchError, with the nearest spelling, unless `name` is in `among`.

    Also raise it for nccl if CuPy is not installed.
    """
    if name not in among:
        nearest = difflib.get_close_matches(str(name), among, 1)
        raise LaunchError(
            f"no transport {name!r}; "
            + (f"did you mean {nearest[0]!r}? " if nearest else "")
            + f"choose from {', '.join(among)}"
        )
    if name == "nccl" and importlib.util.find_spec("cupy") is None:
        # no more checks: only the ranks look for the GPU, after which a process cannot fork
        raise LaunchError(
            "transport 'nccl' needs CuPy, which is not installed; pip install 'minidist[cuda13]' (or "
            "cuda12), or use auto"
        )


def current_name(name: str, *, speaks: bool = True) -> str:
    """Return a transport's present name.

    For its old name "sockets", the rank with `speaks` warns once.
    """
    if name != "sockets":
        return name
    if speaks:
        warnings.warn(
            "transport 'sockets' is called 'tcp' now, also between ranks of one host; 'auto' "
            "shares memory there, as 'sockets' did; the old name goes in the next release",
            FutureWarning,
            stacklevel=3,
        )
    return "tcp"


def load(name: str) -> Callable[..., Transport]:
    """Return the function that makes a transport between processes.

    The import costs more than the call.
    """
    module, maker = _MAKERS[name]
    return getattr(importlib.import_module(f"minidist.comm.transports.{module}"), maker)  # type: ignore[no-any-return]


def build(
    name: str, link: MonitorClient, token: bytes, limit: float, *, node: int = 0
) -> Transport:
    """Connect this rank with all others; every rank calls it with the same name.

    A thread connects, so that a loss of another rank ends the joining at once, whatever it waits
    for.

    Args:   node: the number of this rank's machine, as its launcher counts.
    Raises: LaunchError if the transport cannot work here; PeerLostError if a rank is lost
            meanwhile, whatever else failed because of it; HandshakeError, TimeoutError or CommError
            if connecting fails for another reason.
    """
    if name == "nccl":  # here: the GPU is chosen for each thread
        host = build("auto", link, token, limit, node=node)
        try:
            return load(name)(link, host)
        except BaseException:
            host.close()
            raise
    allow_open_files(link.world_size)
    found: queue.SimpleQueue[Transport | BaseException] = queue.SimpleQueue()
    memory = account.current()

    def connect() -> None:
        try:
            with account.use(memory):
                found.put(
                    load(name)(limit)
                    if name == "mpi"
                    else load(name)(link, token, limit, host=link.local_host, node=node)
                )
        except BaseException as error:
            found.put(error)

    threading.Thread(target=connect, name=f"rank {link.world_rank} connecting", daemon=True).start()
    link.on_loss(found.put)
    outcome = found.get()
    if isinstance(outcome, Transport):
        return outcome
    system = (
        outcome if isinstance(outcome, OSError) and not isinstance(outcome, CommError) else None
    )
    if system or isinstance(outcome, PeerLostError | HandshakeError):
        # the connection broke shortly before the monitor reports why
        loss = link.wait_for_loss(HEARSAY)
        if loss is not None:
            raise loss.error() from outcome
    if system:
        raise CommError(
            f"rank {link.world_rank} cannot connect to the other ranks: [Errno {system.errno}] "
            f"{shortage(system, link.world_size)}"
        ) from system
    raise outcome


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files to FILES per rank, as far as its user may."""
    count = FILES * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def progress_mpi() -> None:
    """Have MPI deliver what this rank has sent, even while it makes no other call to MPI."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Iprobe()
