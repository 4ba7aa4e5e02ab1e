"""Grad mode: whether ops leave nodes on the tape. Each thread has its own switch, because ranks may
be threads."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _Mode(threading.local):
    # of a thread that has not switched; getattr with a default costs an op seven times as much
    grad = True


_mode = _Mode()


def is_grad_enabled() -> bool:
    """Return whether ops called on this thread leave nodes on the tape."""
    return _mode.grad


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Context manager: switch recording on or off inside the block, on this thread."""
    before = _mode.grad
    _mode.grad = enabled
    try:
        yield
    finally:
        _mode.grad = before


def no_grad() -> AbstractContextManager[None]:
    """Context manager: ops inside the block compute and leave no nodes, on this thread."""
    return grad_mode(False)
