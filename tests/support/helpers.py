"""Provide what several test modules need: running ranks on any transport."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from minidist.comm.transports.threads import run_threads

if TYPE_CHECKING:  # ranks of an mpirun import this
    import pytest

THREADS = ("threads", "threads-unbuffered")
MIXED = "auto, two nodes"
"""Shared memory inside a node, TCP between nodes; odd ranks play the second."""
LIMIT = 20.0  # seconds; a test that waits longer hangs
# seconds; what ends sooner, on however busy a machine, did not wait for its limit; how soon it is,
# is for tests/comm/test_kills.py, which knows how late threads wake, and for the soak tests
SOON = LIMIT / 2


@contextlib.contextmanager
def lateness() -> Iterator[list[float]]:
    """Gives a list: how late a thread woke that only slept, time and again, in the block.

    Any thread may wait as long for a core, where ranks and whatever else runs outnumber cores.
    """
    over = threading.Event()
    late = [0.0]

    def watch() -> None:
        while not over.is_set():
            slept = time.monotonic()
            time.sleep(0.002)
            late.append(time.monotonic() - slept - 0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()


def becomes_unhurried(transport: Any) -> bool:
    """Wait until the rank of `transport` waits without a limit in effect; False if it does not come
    to that."""
    from minidist.comm.records import A_DAY  # noqa: PLC0415 - the ranks of an mpirun do without it

    deadline = time.monotonic() + LIMIT
    while transport.limit < A_DAY and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(transport.limit >= A_DAY)


@contextlib.contextmanager
def nobodys_port() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens, nor will: a socket has its port that only holds it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()


def limit_comes(patch: "pytest.MonkeyPatch", here: Callable[[], bool]) -> None:
    """The limit of the next run of threads comes when `here()`, whatever the clock says; seen when
    a rank tells."""
    looks = itertools.count()  # the first is at the start
    patch.setattr(
        "minidist.comm.transports.threads.time",
        SimpleNamespace(
            monotonic=lambda: time.monotonic() + (2 * LIMIT if next(looks) and here() else 0.0)
        ),
    )


def run(
    fn: Callable[..., Any], *args: Any, size: int, transport: str = "threads", limit: float = LIMIT
) -> list[Any]:
    """`fn(world, *args)` on `size` ranks; what each returned, in rank order."""
    if transport in THREADS:
        return run_threads(fn, args, size, limit, unbuffered=transport == "threads-unbuffered")
    if transport == MIXED:
        from minidist.launch.forked import run_forked  # noqa: PLC0415 - the thread tests do without the launcher

        return run_forked(
            fn,
            args,
            size=size,
            transport="auto",
            limit=limit,
            nodes=[rank % 2 for rank in range(size)],
        )
    from minidist.launch import run as launch_run  # noqa: PLC0415

    return launch_run(fn, *args, size=size, transport=transport, limit=limit)
