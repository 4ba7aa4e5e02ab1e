"""Whether ops leave nodes on the tape: a switch of each thread, since ranks may run as threads."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _Mode(threading.local):
    grad = True


_mode = _Mode()


def is_grad_enabled() -> bool:
    """Whether ops called on this thread leave nodes on the tape."""
    return _mode.grad


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Switch recording on or off inside the block, on this thread."""
    before, _mode.grad = _mode.grad, enabled
    try:
        yield
    finally:
        _mode.grad = before


def no_grad() -> AbstractContextManager[None]:
    """Context manager: ops inside compute only and remember nothing."""
    return grad_mode(False)
