"""The observers of a rank's collective calls: each call notifies all in the list
`ledger.observers`.

    flight recorder   flight/recorder.py        always
    ledger            ledger.py                 always
    message times     flight/message_times.py   while `ledger.times` is set
    call events       ledger.py                 while the ledger has subscribers

Most observe only calls. Observers of messages make each message slower, so they are listed in
`ledger.message_observers`, too, which is usually empty.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from minidist.comm.handle import Handle
from minidist.comm.signature import Signature


class ObservedCall(Protocol):
    """The fields of a call (calls/call.py) that an observer may read; it may set `record`,
    `phase`, `axis` and `began`.

    Attributes: signature, verb, algorithm, size, world_ranks, meta: of the call, and its header
                group_axis  the axis of its group
                phase, axis under which the ledger counts it; "" until the ledger has set them
                started     whether the program continues while a worker carries it out
                nbytes, messages, sent_to   sent so far, in total, and bytes by world rank
                record      its number in the flight recorder, 0: none yet
                asked, began   the times when it was made and started, if an observer needs them;
                            else 0.0
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
    """A message of a call, between two world ranks.

    Fields: nbytes   of the payload; 0 for a block to receive: its header gives the number
            block    whether its header carries its dtype and shape
            step, chunk   as the algorithm gives them
    """

    src: int
    dst: int
    nbytes: int
    block: bool = False
    step: int | None = None
    chunk: int | None = None


class MessageWatch:
    """An observer's object for one message, notified until the message is complete."""

    def accepted(self, nbytes: int) -> None:
        """Receive the number of bytes, when the header of a message to this rank has arrived."""

    def over(self, was_there: bool) -> None:
        """Note that a wait for the message has ended; `was_there`: it was complete before."""


class Observer:
    """An observer of the calls of one rank, notified in the threads that make or run them."""

    def on_made(self, call: ObservedCall, begun: bool) -> None:
        """Note that the call was made; `begun`: it starts now. A queued call is reported twice; a
        call of a failed group only with begun=False."""

    def on_send(self, call: ObservedCall, message: CallMessage) -> MessageWatch | None:
        """Note that a message is about to be sent. Return a watch for it, or None."""

    def on_receive(self, call: ObservedCall, message: CallMessage) -> MessageWatch | None:
        """Note that a receive is about to be posted. Return a watch for it, or None."""

    def on_end(self, call: ObservedCall, failed: bool) -> None:
        """Note that the call has ended."""

    def on_wait(self, call: ObservedCall, start: float) -> None:
        """Note that the program has waited for the end of a started call, since `start`."""


class ObservedTransfer(Handle):
    """A transfer with watches: each is notified once, when the transfer is complete."""

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
