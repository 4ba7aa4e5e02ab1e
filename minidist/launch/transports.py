"""From a transport's name to a transport; each module is loaded when it is asked for."""

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
# most seconds to wait for the reason of a connection that failed; milliseconds mostly
HEARSAY = 2.0


def check_name(name: str, among: tuple[str, ...] = PROCESSES) -> None:
    """Raises LaunchError, with the nearest spelling, unless `name` is one of `among`."""
    if name not in among:
        nearest = difflib.get_close_matches(str(name), among, 1)
        raise LaunchError(
            f"no transport {name!r}; "
            + (f"did you mean {nearest[0]!r}? " if nearest else "")
            + f"choose from {', '.join(among)}"
        )
    if name == "nccl" and importlib.util.find_spec("cupy") is None:
        # not more: the ranks look for the GPU, and a process that has done so cannot fork any more
        raise LaunchError(
            "transport 'nccl' needs CuPy, which is not installed; pip install -e '.[cuda13]' (or "
            "cuda12), or take auto"
        )


def current_name(name: str, *, speaks: bool = True) -> str:
    """The name that a transport has today; "sockets", its name before, is told once a job, by the
    rank that speaks."""
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
    """What makes a transport between processes; importing it costs more than calling it."""
    module, maker = _MAKERS[name]
    return getattr(importlib.import_module(f"minidist.comm.transports.{module}"), maker)  # type: ignore[no-any-return]


def build(
    name: str, link: MonitorClient, token: bytes, limit: float, *, node: int = 0
) -> Transport:
    """Connect this rank with all others; every rank calls it with the same name.

    A thread connects, so that a loss elsewhere ends the joining at once, whatever it waits for.

    Args:   node: the machine this rank is on, as its launcher counts.
    Raises: LaunchError if the transport cannot work here; PeerLostError if a rank is lost
    meanwhile, whatever else went
            wrong because of it; HandshakeError, TimeoutError or CommError if connecting fails for
            another reason.
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
        # the connection broke a moment before the monitor says why
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
    """Have the system let this process open FILES a rank, as far as its user may decide that."""
    count = FILES * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def progress_mpi() -> None:
    """Have MPI deliver what this rank has sent, also while it calls MPI for nothing else."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Iprobe()
