"""The handle of a transfer: the object that a transport returns for a message that it has begun to
send or to receive."""

from abc import ABC, abstractmethod


class Handle(ABC):
    """A transfer in progress or finished. It keeps the arrays it needs alive."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the transfer is complete: the sent array may then change, the received array
        is full.

        Raises: PeerLostError, TimeoutError, the error given to `abort`, or the error of `accept` or
        `reduce`.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether wait() would return or raise at once. Never blocks."""


class Finished(Handle):
    """A transfer that is complete from the start."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True
