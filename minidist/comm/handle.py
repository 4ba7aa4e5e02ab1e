"""The handle of a transfer: what a transport returns for a message that it has begun to send or to
receive."""

from abc import ABC, abstractmethod
from collections.abc import Callable


class Handle(ABC):
    """A transfer under way. It keeps the arrays it needs alive."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the transfer is complete: the array sent may change, the array received is
        full.

        Raises: PeerLostError, TimeoutError, what `abort` was given, or what `accept` or `reduce`
        raised.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether wait() would return, or raise, at once. Never blocks."""


class Finished(Handle):
    """A transfer that was complete at once."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Reported(Handle):
    """A transfer that the ledger's subscribers see: `report()` is called once, when it is
    complete."""

    def __init__(self, handle: Handle, report: Callable[[], None]) -> None:
        self._handle = handle
        self._report = report

    def wait(self) -> None:
        self._handle.wait()
        report = self._report
        self._report = lambda: None
        report()

    def done(self) -> bool:
        return self._handle.done()


class NotedReceive(Handle):
    """A receive whose end is noted: `waited(was_there)` is called after wait(), with whether it was
    complete before."""

    def __init__(self, handle: Handle, waited: Callable[[bool], None]) -> None:
        self._handle = handle
        self._waited = waited

    def wait(self) -> None:
        was_there = self._handle.done()
        self._handle.wait()
        self._waited(was_there)

    def done(self) -> bool:
        return self._handle.done()
