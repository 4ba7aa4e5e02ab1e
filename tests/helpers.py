"""What several test modules need: running ranks on any transport."""

from collections.abc import Callable
from typing import Any

from minidist.comm.transports.threads import run_threads

THREADS = ("threads", "threads-unbuffered")
LIMIT = 20.0  # seconds; a test that waits longer hangs


def run(fn: Callable[..., Any], *args: Any, size: int, transport: str = "threads", limit: float = LIMIT) -> list[Any]:
    """`fn(world, *args)` on `size` ranks; what each returned, in rank order."""
    if transport in THREADS:
        return run_threads(fn, args, size, limit, unbuffered=transport == "threads-unbuffered")
    from minidist.launch import run as launch_run  # noqa: PLC0415 - the thread tests do without the launcher

    return launch_run(fn, *args, size=size, transport=transport, limit=limit)
