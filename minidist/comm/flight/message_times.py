"""Times when messages left and arrived: one message per step of each link, from which diagnosis
computes the link's alpha and beta.

    ledger.times = MessageTimes(rank)   # from now on calls report their messages
    ledger.times.take()                 # after each step: {"out": [...], "in": [...]};
                                        # the next step begins

    out     [peer, group, number, bytes, sent]                  sent: the sender's start_send
    in      [peer, group, number, bytes, posted, arrived]       posted: the receiver's start_recv

All times are microseconds of time.perf_counter(). If the receive was posted before the message was
sent, the message took arrived - sent; else the receiver was late, and the time of the arrival is
unknown. Both ends choose the same message of a step without communication: in even steps the
largest to a peer, in odd ones the smallest, and among equals the first. They count the messages of
a group from the job's first one, so a reader can match both ends.
"""

import time
from typing import Any

from minidist.comm.observers import CallMessage, MessageWatch, ObservedCall, Observer

# links per rank and direction that one step reports; with more ranks, each step reports others
MOST = 12
SHORT = 16 << 10  # bytes of a message that arrives with its header
_MICRO = 1e6


class MessageTimes(Observer):
    """The times of messages of one rank's collectives. Safe to use from several threads: a group's
    messages are reported in order."""

    def __init__(self, world_rank: int, world_size: int) -> None:
        self.world_rank = world_rank
        self.world_size = world_size
        self._step = 0
        # (direction, group, peer) -> messages so far
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._out: dict[int, list[Any]] = {}
        self._in: dict[int, list[Any]] = {}

    def on_send(self, call: ObservedCall, message: CallMessage) -> None:
        if not message.block:
            self.sent(call.signature.group, message.dst, message.nbytes)

    def on_receive(self, call: ObservedCall, message: CallMessage) -> "Arrival | None":
        if message.block:
            return None
        return self.posted(call.signature.group, message.src, message.nbytes)

    def sent(self, group: int, peer: int, nbytes: int) -> None:
        """Note that a message of this rank is sent."""
        number = self._next("out", group, peer)
        if nbytes and self._kept(self._out, peer, group, number, nbytes):
            self._out[peer] = [peer, group & 0xFFFF, number, nbytes, _now()]

    def posted(self, group: int, peer: int, nbytes: int) -> "Arrival | None":
        """Note that a receive is about to be posted. Returns: the watch of its arrival; None if the
        message is not kept."""
        number = self._next("in", group, peer)
        if not nbytes or not self._kept(self._in, peer, group, number, nbytes):
            return None
        kept = self._in[peer] = [peer, group & 0xFFFF, number, nbytes, _now(), 0]
        return Arrival(kept)

    def take(self) -> dict[str, list[list[int]]]:
        """Return the messages kept in this step, and begin the next step."""
        found = {
            "out": list(self._out.values()),
            "in": [kept for kept in self._in.values() if kept[-1]],
        }
        self._out = {}
        self._in = {}
        self._step += 1
        return found

    def _next(self, direction: str, group: int, peer: int) -> int:
        key = direction, group, peer
        self._numbers[key] = number = self._numbers.get(key, 0) + 1
        return number

    def _kept(
        self, found: dict[int, list[Any]], peer: int, group: int, number: int, nbytes: int
    ) -> bool:
        """Return whether this message is, so far, the one to report for its step."""
        turns = -(-self.world_size // MOST)
        if peer == self.world_rank or (peer + self.world_rank + self._step) % turns:
            return False
        if peer not in found:
            return True
        best = found[peer]
        sign = -1 if self._step % 2 == 0 else 1
        return (sign * nbytes, group & 0xFFFF, number) < (sign * best[3], best[1], best[2])


class Arrival(MessageWatch):
    """The watch of a message's arrival: at the end of a wait for it. If it had arrived before the
    wait began, only the time of its header is known, which is enough for a short message; a long
    one is left out."""

    def __init__(self, kept: list[Any]) -> None:
        self._kept = kept
        self._header = 0

    def accepted(self, nbytes: int) -> None:
        self._header = _now()

    def over(self, was_there: bool) -> None:
        if not self._kept[-1]:
            short = self._kept[3] <= SHORT
            self._kept[-1] = _now() if not was_there else self._header if short else 0


def _now() -> int:
    return round(time.perf_counter() * _MICRO)
