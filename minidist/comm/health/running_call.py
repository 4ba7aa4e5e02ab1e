"""The calls that each thread of this rank is in: when a wait lasts, they tell what for.

    with call:              # a collective, or the wait for a call that was started
        ...                 # running_call() is this call, in this thread
"""

import threading

from minidist.comm.signature import Signature

_stacks: dict[int, list["RunningCall"]] = {}      # by thread, outermost call first


class RunningCall:
    """What a program called; inside `with`, what its thread now runs or waits for.

    Attributes: signature    the call
                world_ranks  the ranks of its group
    """

    signature: Signature
    world_ranks: tuple[int, ...]

    def __enter__(self) -> None:
        _stacks.setdefault(threading.get_ident(), []).append(self)

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        stack = _stacks[thread]
        stack.pop()
        if not stack:
            del _stacks[thread]


def running_call() -> RunningCall | None:
    """The innermost call that the calling thread is in."""
    stack = _stacks.get(threading.get_ident())
    return stack[-1] if stack else None
