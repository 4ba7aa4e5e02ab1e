"""The calls that each thread of this rank is in: when a wait lasts, they tell what for.

    with call:              # a collective, or the wait for a call that was started
        ...                 # running_call() is this call, in this thread
"""

import threading

from minidist.comm.signature import Signature


class _ThreadCalls(threading.local):
    """The calls of one thread."""

    def __init__(self) -> None:
        self.calls: list[RunningCall] = []      # outermost first


_here = _ThreadCalls()


class RunningCall:
    """What a program called; inside `with`, what its thread now runs or waits for.

    Attributes: signature    the call
                world_ranks  the ranks of its group
    """

    signature: Signature
    world_ranks: tuple[int, ...]

    def __enter__(self) -> None:
        _here.calls.append(self)

    def __exit__(self, *_: object) -> None:
        _here.calls.pop()


def running_call() -> RunningCall | None:
    """The innermost call that the calling thread is in."""
    return _here.calls[-1] if _here.calls else None
