"""Start a job (run, spawn), or join the job that a launcher has started (init).

    world = md.init()                                        # join a job, or be a job of one rank
    results = md.run(fn, *args, size=4, transport="auto")    # a job that runs one function
    status = spawn([sys.executable, "script.py"], 4)         # a job that runs one program

Modules that only ranks need are loaded when they are used: a launcher starts without NumPy.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from minidist.comm.health.process_state import PATIENCE
from minidist.errors import LaunchError
from minidist.launch.arguments import (
    MOST_RANKS,
    check_count,
    check_room,
    check_seconds,
    check_word,
    shown,
)
from minidist.launch.launchers import LAUNCHERS, Launch, Launcher, detect
from minidist.launch.spawning import spawn

if TYPE_CHECKING:
    from minidist.launch.membership import init, speaks_first

T = TypeVar("T")

MONITOR_THREADS = 3  # of the process that runs a job's monitor, plus one for each rank

__all__ = ["LAUNCHERS", "Launch", "Launcher", "detect", "init", "run", "spawn", "speaks_first"]


def __getattr__(name: str) -> Any:
    """Return `init` or `speaks_first`, imported at its first use (PEP 562).

    Raises: AttributeError for any other name.
    """
    if name in ("init", "speaks_first"):
        from minidist.launch import membership

        return getattr(membership, name)
    raise AttributeError(f"module 'minidist.launch' has no attribute {name!r}")


def run(
    fn: Callable[..., T],
    *args: Any,
    size: int,
    transport: str = "threads",
    limit: float = 60.0,
    patience: float = PATIENCE,
) -> list[T]:
    """Run `fn(world, *args)` on `size` ranks and wait for them.

    On one host it is tested with up to 256 processes.

        transport           ranks are                      fn may be    results may be
        threads             threads of this process        anything     anything
        threads-unbuffered  the same; a send completes only when it is received
        auto                forked copies of this process  anything     numbers, strings, NumPy arrays,
                            (on one host: shm)                          and lists, tuples, dicts of them
        tcp                 the same, over TCP only        the same     the same
        shm                 the same, over shared memory   the same     the same
        plain-tcp           the same, by the short transport that lessons 01 and 02 read
        mpi                 processes of a new mpirun      a function at the top level of a module
                                                           or script; arguments and results as
                                                           the results of auto
        nccl                the same, each with a GPU      the same; needs CuPy (several GPUs: not
                                                           yet run)

    Args:    fn: each rank calls fn(world, *args); world is its Group of all ranks. size: the number
             of ranks, from 1.
             transport: a name of the table. limit: seconds that the job, and each wait in it, may
             last.
             patience: seconds that a rank's process may be stopped (by SIGSTOP, not by a debugger)
             before the rank counts as lost.
    Returns: the results of all ranks, in rank order.
    Inside `fn`, md.init() returns the same world.
    Raises:  the first failure, with its rank and its own type, and with the rank's traceback as its
             cause (from another process, an exception class that is neither Python's nor minidist's
             arrives as RuntimeError); PeerLostError if the rank was killed or exited; TimeoutError,
             which names the ranks that had not ended after `limit` seconds; LaunchError if such
             ranks cannot be started here; ConfigError if this user's communication profile cannot
             be read.
    """
    from minidist.launch import membership, transports
    from minidist.launch.membership import as_rank

    transport = transports.current_name(check_word("run", "transport", transport))
    transports.check_name(
        transport, (*transports.THREADS, *transports.PROCESSES, *transports.PLAIN)
    )
    size = check_count("run", "size", size, "rank", MOST_RANKS)
    limit = check_seconds("run", "limit", limit)
    patience = check_seconds("run", "patience", patience)
    if not callable(fn):
        raise LaunchError(
            f"run({shown(fn)}): a function is expected, which each rank calls with its world"
        )
    member = membership.current()
    # without this check each rank would start a job, whose ranks start jobs, ...
    if member is not None and member.importing:
        raise LaunchError(
            f"{member.importing} calls md.run when it is imported, and each rank of "
            "run(transport='mpi') (or 'nccl') imports it for its function; put the call under "
            "`if __name__ == '__main__':`"
        )
    check_room(size, helpers=0 if transport in transports.THREADS else MONITOR_THREADS)
    if transport in transports.THREADS:
        from minidist.comm.cost.link_model import load_profile
        from minidist.comm.transports.threads import run_threads

        return run_threads(
            as_rank,
            (fn, *args),
            size,
            limit,
            unbuffered=transport == "threads-unbuffered",
            profile=load_profile(),
        )
    if transport in ("mpi", "nccl"):
        from minidist.launch.mpirun import run_mpi

        return run_mpi(fn, args, size=size, limit=limit, transport=transport, patience=patience)
    from minidist.launch.forked import run_forked

    return run_forked(
        as_rank, (fn, *args), size=size, transport=transport, limit=limit, patience=patience
    )
