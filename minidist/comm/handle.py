"""The handle of a transfer: what a transport returns for a message that it has begun to send or to
receive."""

from abc import ABC, abstractmethod


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
