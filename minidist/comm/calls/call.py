"""A collective call as the algorithms see it: neighbours, and messages that are tagged, checked
and counted.

An algorithm is a function of (call, arrays). It names peers by their rank in the group and has no
access to transports, ledgers or other calls. Messages carry the call's signature; a message of
another call raises MismatchError that shows both signatures.

All collectives of a group use one tag, so that the messages between two ranks form one stream in
the order of the calls: a rank that left out or swapped a call receives its peer's next message at
once, and the check fails. With one tag per call, both would wait forever.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.comm.calls.buffers import Place, address_of
from minidist.comm.calls.header import CallHeader
from minidist.comm.calls.members import Members
from minidist.comm.calls.prepared import PreparedCall
from minidist.comm.device_lane import SideStream
from minidist.comm.handle import Handle
from minidist.comm.health.wait_state import RunningCall
from minidist.comm.native import Native
from minidist.comm.observers import CallMessage, MessageWatch, ObservedTransfer
from minidist.comm.signature import BlockHeader, Signature, pack_block
from minidist.comm.transport import Reduce
from minidist.device import account
from minidist.errors import CommError, MismatchError

Arrays = Sequence[np.ndarray]
Work = Callable[["Call"], Any]
Deliver = Callable[[Any, str | None], Any]
_NOTHING = np.empty(0, np.uint8)


def _as_returned(returned: Any, device: str | None) -> Any:
    return returned


def _on_side(call: "Call", begun: Any, work: Work, deliver: Deliver) -> Any:
    """Run the work and make the result of a call that has a side, both ordered on that stream."""
    assert call.side is not None, "a call with a side"
    result, call._done = call.side.carry_out(begun, lambda: deliver(work(call), call.device), call)
    return result


class Call(RunningCall):
    """A collective that this rank makes, or has queued. Inside `with` it is in progress, and its
    observers (observers.py) are notified.

    Attributes: rank, size, next_rank, prev_rank   within the group
                nodes       the machine of each rank, as a number
                world_ranks of the group
                work        `work(call)` is the algorithm with its arrays
                deliver     `deliver(returned, device)` makes the call's result from the return
                            value of the algorithm
                board       memory that the group's ranks share, or None
                device      the device of this rank's arrays; on a rank without an array None until
                            a message gives it
                origin      the device of the sender's array of the last received block; before a
                            block arrives, as device
                side        the stream on which the call runs on the GPU (device_lane.py), or None
                the rest    the fields for observers: observers.ObservedCall
    """

    started = False
    record = 0
    phase = ""
    axis = ""
    asked = 0.0
    began = 0.0
    _done: Any = None

    def __init__(
        self,
        group: Members,
        prepared: PreparedCall,
        work: Work,
        deliver: Deliver = _as_returned,
        *,
        device: str | None = "cpu",
        side: SideStream | None = None,
    ) -> None:
        """Take the group's next number. Raises: CommError if the group cannot be used."""
        sequence = group.next_sequence()
        self.rank = group.rank
        self.size = group.size
        self.nodes = group.nodes
        self.world_ranks = group.world_ranks
        self.next_rank = group.next_rank
        self.prev_rank = group.prev_rank
        self.verb = prepared.verb
        self.algorithm = prepared.algorithm
        self.device = self.origin = device
        self.ledger = group.ledger
        self.group_axis = group.axis
        # its fields from verb to where
        self.signature = Signature(group.id, sequence, *prepared[:7])
        self.meta = sequence.to_bytes(8, "big") + prepared.header
        self._group = group
        self._transport = group.transport
        self.board = group.board
        self._tag = group.tag
        self.nbytes = 0
        self.messages = 0
        self.sent_to: dict[int, int] = {}
        self.side = side
        if self.ledger.watchers:
            self.asked = time.perf_counter()
        if side is None:
            self.work = work
            self.deliver = deliver
        else:
            # the result is made on the side stream, too
            self.work = partial(_on_side, begun=side.begin(), work=work, deliver=deliver)
            self.deliver = _as_returned

    def __enter__(self) -> None:
        RunningCall.__enter__(self)  # faster than super(), in each call
        waits = self._transport.waits
        failure = self._group.guard.failure or (
            waits.error and waits.failure(self.world_ranks[self.rank])
        )
        # send nothing: a peer would take it for a part of the failed call
        if failure is not None:
            RunningCall.__exit__(self)
            self.queued()
            raise failure
        for observer in self.ledger.observers:
            observer.on_made(self, True)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        RunningCall.__exit__(self)
        if kind is not None and isinstance(error, CommError):
            self._group.guard.failure = self._group.guard.failure or error
        for observer in self.ledger.observers:
            observer.on_end(self, kind is not None)

    def queued(self) -> None:
        """Notify the observers that the call was made but not started: it is queued, or its group
        has failed."""
        for observer in self.ledger.observers:
            observer.on_made(self, False)

    @property
    def _header(self) -> CallHeader:
        """Return the object that compares this call's header in detail with a header that does not
        begin as this call's."""
        return CallHeader(self.signature, self._group, self.signature.pack()[0], self.meta)

    def settle(self, result: Any) -> Any:
        """Return `result` in the thread that gets it. On a GPU, first make the thread's stream wait
        for the side's work."""
        if self.side is not None:
            self.side.join(self._done)
        return result

    # -------------------------------------------------------- messages whose length both sides know

    def start_send(
        self,
        dst: int,
        array: np.ndarray,
        *,
        block: bool = False,
        step: int | None = None,
        chunk: int | None = None,
    ) -> Handle:
        """Begin to send a contiguous array to rank `dst`. As a `block`, the header carries its
        dtype, shape and device.

        step and chunk are for the ledger's subscribers.
        """
        peer = self.world_ranks[dst]
        nbytes = array.nbytes
        self.nbytes += nbytes
        self.messages += 1
        self.sent_to[peer] = self.sent_to.get(peer, 0) + nbytes
        meta = self.meta
        if block:
            meta += pack_block(array.dtype, array.shape, self.origin or "cpu")
        watches: list[MessageWatch] = []
        if self.ledger.message_observers:
            watches = self._watches_of_send(dst, nbytes, block, step, chunk)
        handle = self._transport.start_send(peer, self._tag, array.reshape(-1), meta)
        return ObservedTransfer(handle, watches) if watches else handle

    def start_recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> Handle:
        """Begin to receive from rank `src` into a contiguous array of the same length, or to
        `reduce` the message there.

        Raises (in wait): MismatchError if the sender is in another call, or the length differs.
        """
        watches: list[MessageWatch] = []
        if self.ledger.message_observers and into is not _NOTHING:
            watches = self._watches_of_receive(src, into.nbytes)
        into = into.reshape(-1)
        expected = self.meta

        def accept(meta: bytes, nbytes: int) -> np.ndarray:
            for watch in watches:
                watch.accepted(nbytes)
            if not meta.startswith(expected):
                self._header.compare(meta, src)
            if nbytes != into.nbytes:
                raise self._header.refusal(
                    MismatchError(
                        f"rank {self.world_ranks[self.rank]} in {self.signature.describe()} "
                        f"expects {into.nbytes} bytes from rank {self.world_ranks[src]}, which "
                        f"sent {nbytes}"
                    )
                )
            return into

        target = None if watches else into  # watches are told of every header
        handle = self._transport.start_recv(
            self.world_ranks[src], self._tag, accept, reduce, (expected, into.nbytes, target)
        )
        return ObservedTransfer(handle, watches) if watches else handle

    def _watches_of_send(
        self, dst: int, nbytes: int, block: bool, step: int | None, chunk: int | None
    ) -> list[MessageWatch]:
        """Notify the observers of a message to rank `dst`. Return their watches of it."""
        me = self.world_ranks[self.rank]
        message = CallMessage(me, self.world_ranks[dst], nbytes, block, step, chunk)
        watches = [observer.on_send(self, message) for observer in self.ledger.message_observers]
        return [watch for watch in watches if watch is not None]

    def _watches_of_receive(self, src: int, nbytes: int, block: bool = False) -> list[MessageWatch]:
        """Notify the observers of a message from rank `src`. Return their watches of it."""
        message = CallMessage(self.world_ranks[src], self.world_ranks[self.rank], nbytes, block)
        watches = [observer.on_receive(self, message) for observer in self.ledger.message_observers]
        return [watch for watch in watches if watch is not None]

    @property
    def others(self) -> list[int]:
        """The other ranks, from next_rank on, so that not all ranks begin with the same peer."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def wait(self, handles: Iterable[Handle]) -> None:
        """Wait for each of several transfers."""
        for handle in handles:
            handle.wait()

    def send(
        self, dst: int, array: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> None:
        """Run start_send and wait."""
        self.start_send(dst, array, step=step, chunk=chunk).wait()

    def recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> None:
        """Run start_recv and wait."""
        self.start_recv(src, into, reduce).wait()

    def exchange(
        self,
        dst: int,
        outgoing: np.ndarray,
        src: int,
        into: np.ndarray,
        reduce: Reduce | None = None,
        *,
        step: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Send to `dst` and receive from `src` at once, so the order of the two cannot deadlock."""
        received = self.start_recv(src, into, reduce)
        sent = self.start_send(dst, outgoing, step=step, chunk=chunk)
        # wait first for the receive: it detects a peer in another call, which may never take the
        # sent message
        received.wait()
        sent.wait()

    # ---------------------------------------------- messages that bring their dtype and shape along

    def start_send_block(
        self, dst: int, block: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> Handle:
        """Start to send a block."""
        return self.start_send(dst, block, block=True, step=step, chunk=chunk)

    def send_block(
        self, dst: int, block: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> None:
        """Run start_send_block and wait."""
        self.start_send_block(dst, block, step=step, chunk=chunk).wait()

    def start_recv_block(
        self, src: int, place: Place, like: np.ndarray | None = None
    ) -> tuple[Handle, list[np.ndarray]]:
        """Begin to receive a block as recv_block does. Return the handle, and a list that contains
        the block when it has arrived. `like`: an array whose dtype and shape it probably has."""
        arrived: list[np.ndarray] = []
        known = None if like is None else BlockHeader(like.dtype, like.shape, "cpu")
        expected = b"" if known is None else self.meta + pack_block(*known)
        watches: list[MessageWatch] = []
        if self.ledger.message_observers:
            watches = self._watches_of_receive(src, 0, block=True)

        def accept(meta: bytes, nbytes: int) -> np.ndarray:
            for watch in watches:
                watch.accepted(nbytes)
            block = known if meta is expected else self._header.block_in(meta, src)
            if block is None:
                raise self._header.mismatch(meta, src)
            self.device, self.origin = self.device or block.device, block.device
            arrived.append(place(block.shape, block.dtype))
            return arrived[0].reshape(-1)

        likely = None if like is None else (expected, like.nbytes, None)
        handle = self._transport.start_recv(self.world_ranks[src], self._tag, accept, likely=likely)
        return ObservedTransfer(handle, watches) if watches else handle, arrived

    def recv_block(self, src: int, place: Place) -> np.ndarray:
        """Receive a block from rank `src` into the array that `place(shape, dtype)` returns, and
        return that array."""
        handle, arrived = self.start_recv_block(src, place)
        handle.wait()
        return arrived[0]

    def exchange_blocks(
        self,
        dst: int,
        outgoing: np.ndarray,
        src: int,
        place: Place,
        *,
        step: int | None = None,
        chunk: int | None = None,
    ) -> np.ndarray:
        """Send a block to `dst` and receive one from `src` at once; return the received block."""
        received, arrived = self.start_recv_block(src, place, like=outgoing)
        sent = self.start_send(dst, outgoing, block=True, step=step, chunk=chunk)
        received.wait()  # first, as in exchange
        sent.wait()
        return arrived[0]

    # ------------------------------------------------------------------------------------- the rest

    def agree(self) -> None:
        """Compare signatures with both neighbours: send a header without payload to next_rank and
        receive one from prev_rank.

        Verbs in which some rank receives nothing, and algorithms whose first receive is not from
        prev_rank, begin with this. If any two ranks disagree, some two neighbours do, and the
        second of them detects it by its first message.
        """
        received = self.start_recv(self.prev_rank, _NOTHING)
        sent = self._transport.start_send(
            self.world_ranks[self.next_rank], self._tag, _NOTHING, self.meta
        )
        received.wait()
        sent.wait()

    @property
    def lends(self) -> bool:
        """True if the ranks may read each other's memory; the same on all ranks."""
        return self.board is not None and self.board.lends

    def show(self, *arrays: np.ndarray, lent: Arrays = ()) -> list[np.ndarray]:
        """Show contiguous 1-D arrays of one dtype, at most SHOWN_BYTES, to all ranks of the group,
        and read theirs.

        Arrays in `lent` are shown only by address, 8 bytes each, after the other arrays. Counted as
        one message of the arrays' bytes, including the lent arrays.

        Returns: for each rank, its arrays joined: a read-only array of that dtype in shared memory,
                 valid until the next show(); lent arrays may change after that.
        """
        meta = b"" if self.messages else self.meta
        return [shown.view(arrays[0].dtype) for _, shown in self._show(meta, arrays, lent)]

    def show_block(
        self, block: np.ndarray | None, *arrays: np.ndarray, lent: Arrays = ()
    ) -> list[tuple[BlockHeader | None, np.ndarray]]:
        """Run the first show() of a call in which ranks do not know each other's shapes: show
        `block`'s dtype and shape, and bytes of it or its address."""
        meta = (
            self.meta
            if block is None
            else self.meta + pack_block(block.dtype, block.shape, self.device or "cpu")
        )
        header = self._header
        told = [
            (header.block_in(theirs, rank), shown)
            for rank, (theirs, shown) in enumerate(self._show(meta, arrays, lent))
        ]
        self.device = self.device or next(
            (header.device for header, _ in told if header is not None), None
        )
        return told

    def read(self, src: int, address: int, into: np.ndarray) -> None:
        """Fill a contiguous array with the array that rank `src` lends at `address`."""
        assert self.board is not None, "it lends"
        self.board.read(src, address, into)

    def _show(self, meta: bytes, arrays: Arrays, lent: Arrays) -> list[tuple[bytes, np.ndarray]]:
        assert self.board is not None, "choose() has seen to that"
        nbytes = 0
        for array in arrays:
            nbytes += array.nbytes
        if lent:
            nbytes += sum(array.nbytes for array in lent)
            arrays = [*arrays, np.array([address_of(array) for array in lent], np.uint64)]
        self.count(nbytes)
        shown = self.board.show(meta, arrays)
        for rank, (theirs, _) in enumerate(shown):
            # only the first show of a call has a header
            if meta and not theirs.startswith(self.meta):
                self._header.compare(theirs, rank)
        return shown

    def native(self) -> Native:
        """Return the transport's own collectives for the ranks of this call."""
        library = self._transport if self.side is None else self._transport.device
        assert library is not None, "a call with a side has a device"
        return library.native(self.signature.group, self.world_ranks)

    def count(self, nbytes: int) -> None:
        """Count a message to no single rank: shown on the board, or handed to `native`."""
        self.nbytes += nbytes
        self.messages += 1

    def workspace(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Return a new 1-D array, counted in the memory account as communication."""
        return account.current().hold(np.empty(length, dtype), "communication")
