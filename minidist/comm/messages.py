"""Point to point: send, recv and exchange between ranks of a group.

These do not queue behind the group's collectives: they go to the transport at once, under a tag of their own, so any
number may be under way beside each other. Messages from one rank to another arrive in the order they were started; each
says its dtype and shape. What a rank sends to itself is copied, kept until it is received, and not counted.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm import source
from minidist.comm.arrays import Result, argument, device_of
from minidist.comm.call import Told
from minidist.comm.ledger import Event
from minidist.comm.pending import PendingMessage
from minidist.comm.signature import Signature, dtype_code, pack_block, unpack
from minidist.comm.transport import Handle, Tag, Transport
from minidist.comm.transports.mailbox import loopback
from minidist.errors import MismatchError

if TYPE_CHECKING:
    from minidist.comm.group import Group

POINT_TO_POINT = 1 << 63
"""The sequence of the tag that a group's point-to-point messages share."""


class Messages:
    """A group's point-to-point messages."""

    def __init__(self, group: "Group") -> None:
        self._group, self._tag = group, Tag(group.id, POINT_TO_POINT)
        self._self_link: Transport | None = None
        self._started = 0

    def send(self, x: Any, dst: int) -> PendingMessage:
        """Start to send `x` to rank `dst`."""
        array = argument(x)
        signature = self.signature("send", array.dtype, array.shape)
        return self._pending(signature, [self._start_send(signature, array, dst, device_of(x))], lambda: None)

    def recv(self, src: int, out: Any) -> PendingMessage:
        """Start to receive from rank `src`."""
        incoming = _Incoming(self, "recv", src, out)
        return self._pending(incoming.signature, [incoming.handle], incoming.deliver)

    def exchange(self, x: Any, dst: int, src: int, out: Any) -> PendingMessage:
        """Start to send `x` to `dst` and to receive from `src`."""
        array = argument(x)
        if isinstance(out, np.ndarray) and np.may_share_memory(array, out):
            array = array.copy()  # what arrives would overwrite what is leaving
        incoming = _Incoming(self, "exchange", src, out)
        signature = self.signature("exchange", array.dtype, array.shape)
        sent = self._start_send(signature, array, dst, device_of(x))
        return self._pending(signature, [incoming.handle, sent], incoming.deliver)

    def signature(self, verb: str, dtype: np.dtype | None, shape: tuple[int, ...] | None) -> Signature:
        """What this rank says of its next message."""
        self._started += 1
        return Signature(self._group.id, self._started, verb, None, None, None,
                         None if dtype is None else dtype_code(dtype), shape, source.caller())

    def link(self, rank: int) -> tuple[Transport, int, Tag]:
        """Transport, world rank and tag for messages to and from `rank`."""
        world_rank = self._group.world_ranks[rank]
        if rank != self._group.rank:
            return self._group.transport, world_rank, self._tag
        if self._self_link is None:
            self._self_link = loopback(world_rank, self._group.transport.limit, self._group.transport.waits)
        return self._self_link, world_rank, self._tag

    def mismatch(self, mine: Signature, theirs: Signature, src: int) -> MismatchError:
        """The error of a message from rank `src` that is not what this rank expects."""
        return MismatchError(f"a message does not fit what was to come:\n"
                             f"  rank {self._group.world_rank} calls {mine.describe()}\n"
                             f"  rank {self._group.world_ranks[src]} calls {theirs.describe()}\n"
                             f"`out` must have the sender's shape and dtype; without it any fits")

    def _pending(self, signature: Signature, handles: list[Handle], deliver: Callable[[], Any]) -> PendingMessage:
        return PendingMessage(signature, self._group.world_ranks, handles, deliver)

    def _start_send(self, signature: Signature, array: np.ndarray, dst: int, device: str | None) -> Handle:
        key, where = signature.pack()
        meta = key + where + pack_block(array.dtype, array.shape, device or "cpu")
        transport, peer, tag = self.link(dst)
        if dst == self._group.rank:
            return transport.start_send(peer, tag, array.reshape(-1), meta)
        ledger = self._group.ledger
        axis = "control" if ledger.in_control else self._group.axis
        ledger.record(axis, signature.verb, "direct", array.nbytes)
        start = time.perf_counter()
        handle = transport.start_send(peer, tag, array.reshape(-1), meta)
        if not ledger.subscribers:
            return handle
        details = {"axis": axis, "verb": signature.verb, "algorithm": "direct", "src": self._group.world_rank,
                   "dst": peer, "nbytes": array.nbytes, "label": "", "step": None, "chunk": None}
        return Told(handle, lambda: ledger.publish(Event(
            "message", signature.verb, start, time.perf_counter(), ledger.world_rank, threading.current_thread().name,
            details)))


class _Incoming:
    """A message that is to come, and where it goes."""

    def __init__(self, messages: Messages, verb: str, src: int, out: Any) -> None:
        self._messages, self._src = messages, src
        self._result, self._device = Result(verb, out), device_of(out)
        self.signature = messages.signature(verb, *((None, None) if out is None else (out.dtype, out.shape)))
        transport, peer, tag = messages.link(src)
        self.handle = transport.start_recv(peer, tag, self._accept)

    def deliver(self) -> Any:
        """The array received: on the device of `out`, else where the sender's array lives."""
        return self._result.deliver(self._device)

    def _accept(self, meta: bytes, nbytes: int) -> np.ndarray:
        theirs, block = unpack(meta)
        if block is None or (self.signature.shape is not None
                             and (self.signature.dtype, self.signature.shape) != (theirs.dtype, theirs.shape)):
            raise self._messages.mismatch(self.signature, theirs, self._src)
        self._device = self._device or block.device
        return self._result.array(block.shape, block.dtype).reshape(-1)
