"""What several test modules need: running ranks on any transport."""

from collections.abc import Callable
from typing import Any

from minidist.comm.transports.threads import run_threads

THREADS = ("threads", "threads-unbuffered")
MIXED = "sockets, two nodes"
"""Transport sockets as jobs have it: shared memory inside a node, TCP between nodes; odd ranks play the second."""
LIMIT = 20.0  # seconds; a test that waits longer hangs


def run(fn: Callable[..., Any], *args: Any, size: int, transport: str = "threads", limit: float = LIMIT) -> list[Any]:
    """`fn(world, *args)` on `size` ranks; what each returned, in rank order. Here "sockets" is TCP between all."""
    if transport in THREADS:
        return run_threads(fn, args, size, limit, unbuffered=transport == "threads-unbuffered")
    if transport == MIXED:
        from minidist.launch.forked import run_forked  # noqa: PLC0415 - the thread tests do without the launcher
        return run_forked(fn, args, size=size, transport="sockets", limit=limit,
                          nodes=[rank % 2 for rank in range(size)])
    from minidist.launch import run as launch_run  # noqa: PLC0415

    return launch_run(fn, *args, size=size, transport=transport, shared_memory=False, limit=limit)
