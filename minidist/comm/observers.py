"""What hears of a rank's collective calls: one list, `ledger.observers`, which each call tells what
happens to it.

    flight recorder   flight/recorder.py        always
    ledger            ledger.py                 always
    message times     flight/message_times.py   while `ledger.times` is set
    call events       ledger.py                 while the ledger has subscribers

Most hear of calls only. Those of messages make each message dearer, so they are in
`ledger.message_observers`, too, which is mostly empty.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from minidist.comm.handle import Handle
from minidist.comm.signature import Signature


class ObservedCall(Protocol):
    """What an observer may read of a call (calls/call.py); `record` and `began` it may set.

    Attributes: signature, verb, algorithm, size, world_ranks, meta: of the call, and its header
                group_axis  what its group is for; `axis`: what its messages are counted under
                phase       of the ledger, when it was made
                started     whether the program goes on while a worker carries it out
                nbytes, messages, sent_to   sent so far, in all, and bytes by world rank
                record      its number in the flight recorder, 0: none yet
                asked, began   when it was made, and when it set out, if somebody asks; else 0.0
    """

    verb: str
    algorithm: str
    size: int
    signature: Signature
    world_ranks: tuple[int, ...]
    meta: bytes
    group_axis: str
    axis: str
    phase: str
    started: bool
    nbytes: int
    messages: int
    sent_to: dict[int, int]
    record: int
    asked: float
    began: float


class CallMessage(NamedTuple):
    """One message of a call, between two world ranks.

    Fields: nbytes   of the payload; 0 of a block to come, whose header tells
            block    whether its header tells its dtype and shape
            step, chunk   what the algorithm says of it
    """

    src: int
    dst: int
    nbytes: int
    block: bool = False
    step: int | None = None
    chunk: int | None = None


class MessageWatch:
    """One message that an observer follows to its end."""

    def accepted(self, nbytes: int) -> None:
        """The header of a message to this rank is there, and tells its bytes."""

    def over(self, was_there: bool) -> None:
        """A wait for the message has ended; `was_there`: it was complete before."""


class Observer:
    """Hears of the calls of one rank, in the threads that make them and carry them out."""

    def on_made(self, call: ObservedCall, begun: bool) -> None:
        """The call was made; `begun`: it sets out now. A call that first stands in a queue is told
        twice, one whose group has failed is told without."""

    def on_send(self, call: ObservedCall, message: CallMessage) -> MessageWatch | None:
        """A message is about to leave. Return what follows it, or None."""

    def on_receive(self, call: ObservedCall, message: CallMessage) -> MessageWatch | None:
        """A message is about to be asked for. Return what follows it, or None."""

    def on_end(self, call: ObservedCall, failed: bool) -> None:
        """The call is over."""

    def on_wait(self, call: ObservedCall, start: float) -> None:
        """The program has waited for the end of a started call, since `start`."""


class ObservedTransfer(Handle):
    """A transfer that observers follow: each watch is told once, when the transfer is complete."""

    def __init__(self, handle: Handle, watches: Sequence[MessageWatch]) -> None:
        self._handle = handle
        self._watches = watches

    def wait(self) -> None:
        was_there = self._handle.done()
        self._handle.wait()
        watches = self._watches
        self._watches = ()
        for watch in watches:
            watch.over(was_there)

    def done(self) -> bool:
        return self._handle.done()
