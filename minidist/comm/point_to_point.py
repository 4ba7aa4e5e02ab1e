"""Point to point: send, recv and exchange between ranks of a group.

These messages do not queue behind the group's collectives: they go to the transport at once, under
a tag of their own, so any number may be in progress at the same time. Messages from one rank to
another arrive in the order of their start; each carries its dtype and shape. A message of a rank to
itself is copied, kept until it is received, and not counted. If the transport has a lane
(device_lane.py), an array on the GPU goes through the lane, and only its header here.
"""

from collections import Counter, defaultdict, deque
from functools import partial
from typing import Any

import numpy as np

from minidist.comm import call_site
from minidist.comm.calls.async_call import PendingMessage
from minidist.comm.calls.buffers import OutputArray, argument, device_of, from_caller
from minidist.comm.calls.members import Members
from minidist.comm.device_lane import VIA_LANE, DeviceLane
from minidist.comm.handle import Handle
from minidist.comm.ledger import MessageEvent
from minidist.comm.observers import ObservedTransfer
from minidist.comm.signature import BlockHeader, Signature, dtype_code, pack_block, unpack
from minidist.comm.transport import Tag, Transport
from minidist.device import backend
from minidist.errors import MismatchError

POINT_TO_POINT = 1 << 63
"""The sequence of the tag that a group's point-to-point messages share."""


class PointToPoint:
    """A group's point-to-point messages. send, recv and exchange only start one; Group's methods of
    the same names also wait for it."""

    def __init__(self, group: Members) -> None:
        self._group = group
        self.tag = Tag(group.id, POINT_TO_POINT)
        self._self_link: Transport | None = None
        self._started = 0
        # to, and from, each rank
        self._sends = Counter[int]()
        self._receives = Counter[int]()
        # receives through the lane, by source rank, in the order of their headers
        self.by_lane: defaultdict[int, deque[Incoming]] = defaultdict(deque)

    def send(self, x: Any, dst: int) -> PendingMessage:
        """Start to send `x` to rank `dst`."""
        x = from_caller("send", x)
        array = argument("send", x, self._way_of(x, dst))
        signature = self.signature("send", array.dtype, array.shape)
        record = self._record_send(signature, dst)
        sent = self._start_send(signature, array, dst, device_of(x))
        return PendingMessage(
            signature,
            self._group.world_ranks,
            sent,
            lambda: None,
            partial(self._over, [(record, array.nbytes)]),
        )

    def recv(self, src: int, out: Any) -> PendingMessage:
        """Start to receive from rank `src`."""
        incoming = Incoming(self, src, OutputArray("recv", out))
        record = self._record_recv(incoming.signature, src)
        return PendingMessage(
            incoming.signature,
            self._group.world_ranks,
            [incoming],
            incoming.deliver,
            partial(self._over, [(record, 0)]),
        )

    def exchange(self, x: Any, dst: int, src: int, out: Any) -> PendingMessage:
        """Start to send `x` to `dst` and to receive from `src`."""
        x = from_caller("exchange", x)
        array = argument("exchange", x, self._way_of(x, dst))
        result = OutputArray("exchange", out)
        if isinstance(result.target, type(array)) and backend.array_module(array).may_share_memory(
            array, result.target
        ):
            array = array.copy()  # the arriving message would overwrite the leaving one
        incoming = Incoming(self, src, result)
        received = self._record_recv(incoming.signature, src)
        # one call
        signature = incoming.signature._replace(dtype=dtype_code(array.dtype), shape=array.shape)
        record = self._record_send(signature, dst)
        sent = self._start_send(signature, array, dst, device_of(x))
        return PendingMessage(
            signature,
            self._group.world_ranks,
            [incoming, *sent],
            incoming.deliver,
            partial(self._over, [(received, 0), (record, array.nbytes)]),
        )

    def named(self, number: int) -> str:
        """Return the name of message `number` (from 1, per sender and receiver), for
        subscribers."""
        return f"{self._group.id:x}.{number}"

    def event(self, kind: str, verb: str, src: int, dst: int, **details: Any) -> MessageEvent:
        """Return the event of a message between two ranks of the group, for subscribers."""
        group = self._group
        _, axis = group.ledger.labels(group.axis)
        return MessageEvent(
            group.ledger,
            kind,
            {
                "axis": axis,
                "verb": verb,
                "algorithm": "direct",
                "src": group.world_ranks[src],
                "dst": group.world_ranks[dst],
                **details,
            },
        )

    def event_of_receive(self, verb: str, src: int) -> MessageEvent | None:
        """Return the event of the next message from rank `src`; None without a subscriber."""
        if not self._group.ledger.receivers or src == self._group.rank:
            return None
        named = self.named(self._receives[src] + 1)
        return self.event("receive", verb, src, self._group.rank, nbytes=0, message=named)

    def signature(
        self, verb: str, dtype: np.dtype | None, shape: tuple[int, ...] | None
    ) -> Signature:
        """Return the signature of this rank's next message."""
        self._group.guard.check()
        self._started += 1
        signature = Signature(
            self._group.id,
            self._started,
            verb,
            None,
            None,
            None,
            None if dtype is None else dtype_code(dtype),
            shape,
            call_site.caller(),
        )
        failure = self._group.transport.waits.failure(self._group.world_rank, signature)
        if failure is not None:
            raise failure
        return signature

    def lane(self, src: int, dst: int | None = None) -> DeviceLane | None:
        """Return the lane from rank `src` to `dst` (default: this rank) for arrays on the GPU;
        None: send through the host."""
        dst = self._group.rank if dst is None else dst
        ranks = self._group.world_ranks
        device = self._group.transport.device
        return (
            None
            if device is None or src == dst
            else device.lane(self._group.id, ranks[src], ranks[dst])
        )

    def mismatch(self, mine: Signature, theirs: Signature, src: int) -> MismatchError:
        """Return the error for a message from rank `src` that does not fit this rank's receive."""
        return MismatchError(
            f"a message does not fit the receive:\n"
            f"  rank {self._group.world_rank} calls {mine.describe()}\n"
            f"  rank {self._group.world_ranks[src]} calls {theirs.describe()}\n"
            f"`out` must have the sender's shape and dtype; without out any message fits"
        )

    def link(self, rank: int) -> tuple[Transport, int]:
        """Return the transport and world rank for messages to and from `rank`."""
        if rank == self._group.rank and self._self_link is None:
            self._self_link = self._group.transport.loopback()
        own = self._self_link if rank == self._group.rank else None
        return own or self._group.transport, self._group.world_ranks[rank]

    def close(self) -> None:
        """Close this rank's link to itself."""
        if self._self_link is not None:
            self._self_link.close()

    def _record_send(self, signature: Signature, dst: int) -> int:
        """Record a message to rank `dst` in the flight recorder; return its number there."""
        self._sends[dst] += 1
        return self._group.ledger.flight.message(
            signature.group,
            self._sends[dst],
            signature.verb,
            signature.dtype,
            signature.shape,
            signature.where,
            axis=self._group.axis,
            world_ranks=self._group.world_ranks,
            dst=dst,
        )

    def _record_recv(self, signature: Signature, src: int) -> int:
        """Record a message from rank `src` in the flight recorder; return its number there."""
        self._receives[src] += 1
        return self._group.ledger.flight.message(
            signature.group,
            self._receives[src],
            signature.verb,
            signature.dtype,
            signature.shape,
            signature.where,
            axis=self._group.axis,
            world_ranks=self._group.world_ranks,
            src=src,
        )

    def _over(self, records: list[tuple[int, int]], failed: bool, waited: float) -> None:
        """Record the outcome of messages; `records`: their numbers, and the bytes that each sent.

        The first is charged with the program's wait of `waited` seconds.
        """
        for place, (number, nbytes) in enumerate(records):
            self._group.ledger.flight.ended(
                number, nbytes, int(nbytes > 0), failed=failed, stood=0.0 if place else waited
            )

    def _way_of(self, x: Any, dst: int) -> str:
        """Return the device from which a message to rank `dst` is sent."""
        return (
            "cpu" if device_of(x) != "cuda" or self.lane(self._group.rank, dst) is None else "cuda"
        )

    def _start_send(
        self, signature: Signature, array: np.ndarray, dst: int, device: str | None
    ) -> list[Handle]:
        """Start a send. Return its handles: the message, or its header and the lane's message."""
        lane = None if isinstance(array, np.ndarray) else self.lane(self._group.rank, dst)
        meta = b"".join(signature.pack()) + pack_block(
            array.dtype, array.shape, VIA_LANE if lane is not None else device or "cpu"
        )
        if lane is None:
            return [self._start_message(signature, array.reshape(-1), array.nbytes, dst, meta)]
        header = self._start_message(signature, lane.introduction(), array.nbytes, dst, meta)
        return [header, lane.send(array)]

    def _start_message(
        self, signature: Signature, view: np.ndarray, nbytes: int, dst: int, meta: bytes
    ) -> Handle:
        transport, peer = self.link(dst)
        ledger = self._group.ledger
        event = None
        if ledger.subscribers and dst != self._group.rank:
            event = self.event(
                "message",
                signature.verb,
                self._group.rank,
                dst,
                nbytes=nbytes,
                label="",
                step=None,
                chunk=None,
                **({"message": self.named(self._sends[dst])} if ledger.receivers else {}),
            )
        handle = transport.start_send(peer, self.tag, view, meta)
        if dst != self._group.rank:
            phase, axis = ledger.labels(self._group.axis)
            ledger.record(axis, signature.verb, "direct", nbytes, phase=phase, to={peer: nbytes})
        return handle if event is None else ObservedTransfer(handle, [event])


class Incoming(Handle):
    """A message to receive, and its result. As a handle it is complete when its header has arrived
    and, in a lane, its receive has been started."""

    def __init__(self, messages: PointToPoint, src: int, result: OutputArray) -> None:
        self._messages = messages
        self._src = src
        self._result = result
        verb = result.verb
        out = result.target
        self._device = device_of(out)
        self.signature = messages.signature(
            verb, *((None, None) if out is None else (out.dtype, out.shape))
        )
        self._block: BlockHeader | None = None  # of a message that arrives through the lane
        self._word = np.empty(0, np.uint8)
        self._arriving: Handle | None = None
        transport, peer = messages.link(src)
        self._event = messages.event_of_receive(verb, src)
        header = transport.start_recv(peer, messages.tag, self._accept)
        self._header = header if self._event is None else ObservedTransfer(header, [self._event])

    def wait(self) -> None:
        self._header.wait()
        if self._block is not None:
            waiting = self._messages.by_lane[self._src]
            while self._arriving is None:  # in the order of the headers
                waiting.popleft().arrive()

    def done(self) -> bool:
        return self._header.done()

    def deliver(self) -> Any:
        """Return the received array: on the device of `out`, else on the device of the sender's
        array."""
        if self._arriving is not None:
            self._arriving.wait()
        result = self._result
        self._result = OutputArray(self.signature.verb, None)
        # the transport's handle leads here and back: keep no array by it
        return result.deliver(None, self._device)

    def arrive(self) -> None:
        """Begin to receive through the lane; the header has given dtype and shape."""
        lane = self._messages.lane(self._src)
        block = self._block
        assert lane is not None and block is not None
        self._result.device = "cuda"
        self._arriving = lane.recv(self._word, self._result.array(block.shape, block.dtype))

    def _accept(self, meta: bytes, nbytes: int) -> np.ndarray:
        theirs, block = unpack(meta)
        if block is None or (
            self.signature.shape is not None
            and (self.signature.dtype, self.signature.shape) != (theirs.dtype, theirs.shape)
        ):
            raise self._messages.mismatch(self.signature, theirs, self._src)
        if block.device == VIA_LANE:
            self._device = self._device or "cuda"
            self._block = block
            self._word = np.empty(nbytes, np.uint8)
            self._messages.by_lane[self._src].append(self)
            return self._word
        self._device = self._device or block.device
        if self._event is not None:
            self._event.accepted(nbytes)
        return self._result.array(block.shape, block.dtype).reshape(-1)
