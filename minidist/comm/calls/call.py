"""One collective call, as the algorithms see it: neighbours, and messages that are tagged, checked
and counted.

An algorithm is a function of (call, arrays). It names peers by their rank in the group and knows
nothing of transports, ledgers or other calls. Messages go out under the call's signature; a message
of another call raises MismatchError that shows both.

All collectives of a group travel under one tag, so that between two ranks they form one stream in
the order of the
calls: a rank that left out or swapped a call meets its peer's next message at once. Tags that
counted the calls would let both wait for ever.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.comm import call_site
from minidist.comm.calls.buffers import Place, PlaceOf, address_of
from minidist.comm.calls.header import CallHeader
from minidist.comm.calls.members import Members
from minidist.comm.device_lane import SideStream
from minidist.comm.handle import Handle
from minidist.comm.health.wait_state import RunningCall
from minidist.comm.native import Native
from minidist.comm.observers import CallMessage, MessageWatch, ObservedTransfer
from minidist.comm.signature import BlockHeader, Signature, dtype_code, pack_block
from minidist.comm.transport import Reduce, ShortReceive
from minidist.device import account
from minidist.errors import CommError, MismatchError

Arrays = Sequence[np.ndarray]
Work = Callable[["Call"], Any]
Deliver = Callable[[Any, str | None], Any]
_NOTHING = np.empty(0, np.uint8)


def _as_returned(returned: Any, device: str | None) -> Any:
    return returned


def _on_side(call: "Call", begun: Any, work: Work, deliver: Deliver) -> Any:
    """The work of a call with a side: result and all, ordered on that stream."""
    assert call.side is not None, "a call with a side"
    result, call._done = call.side.carry_out(begun, lambda: deliver(work(call), call.device), call)
    return result


class Call(RunningCall):
    """A collective that this rank has entered, or will. Inside `with` it is under way, and its
    observers (observers.py) are told.

    Attributes: rank, size, next_rank, prev_rank   within the group
                nodes       the machine each rank is on, as a number
                world_ranks of the group
                work        `work(call)` is the algorithm with its arrays
                deliver     `deliver(returned, device)` makes the call's result of what the
                            algorithm returned
                board       memory that the group's ranks share, or None
                device      where this rank's arrays live; None until a message tells a rank that
                            brought none
                origin      where the array lives from which a block came; None while none has come
                side        the stream on which the call is carried out on the GPU (device_lane.py),
                            or None
                the rest    what observers read: observers.ObservedCall
    """

    started = False
    record = 0
    asked = 0.0
    began = 0.0
    _done: Any = None

    def __init__(
        self,
        group: Members,
        verb: str,
        algorithm: str,
        work: Work,
        deliver: Deliver = _as_returned,
        *,
        op: str | None = None,
        root: int | None = None,
        dtype: np.dtype | None = None,
        shape: tuple[int | None, ...] | None = None,
        device: str | None = "cpu",
        side: SideStream | None = None,
    ) -> None:
        ledger = group.ledger
        self.rank = group.rank
        self.size = group.size
        self.nodes = group.nodes
        self.world_ranks = group.world_ranks
        self.next_rank = group.next_rank
        self.prev_rank = group.prev_rank
        self.verb = verb
        self.algorithm = algorithm
        self.device = self.origin = device
        self.ledger = ledger
        self.phase, self.axis = ledger.labels(group.axis)
        self.group_axis = group.axis
        self.signature = Signature(
            group.id,
            group.next_sequence(),
            verb,
            algorithm,
            op,
            root,
            None if dtype is None else dtype_code(dtype),
            shape,
            # __init__ < the verb (verbs.py) < Group's method
            call_site.caller_at(2),
        )
        self.meta = b"".join(self.signature.pack())
        self._group = group
        self._transport = group.transport
        self.board = group.board
        self._tag = group.tag
        self.nbytes = 0
        self.messages = 0
        self.sent_to: dict[int, int] = {}
        self.side = side
        if ledger.watchers:
            self.asked = time.perf_counter()
        if side is None:
            self.work = work
            self.deliver = deliver
        else:
            # the result is made on the side, too
            self.work = partial(_on_side, begun=side.begin(), work=work, deliver=deliver)
            self.deliver = _as_returned

    def __enter__(self) -> None:
        RunningCall.__enter__(self)  # quicker than super(), in each call
        waits = self._transport.waits
        failure = self._group.guard.failure or (
            waits.error and waits.failure(self.world_ranks[self.rank])
        )
        # nothing is sent: it would be taken for a part of the call that failed
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
        """Tell the observers that the call was made and has not set out: it is in a queue, or its
        group has failed."""
        for observer in self.ledger.observers:
            observer.on_made(self, False)

    def wait_ended(self, start: float) -> None:
        """Tell the observers that the program has waited for the end of this call since `start`."""
        for observer in self.ledger.observers:
            observer.on_wait(self, start)

    @property
    def _header(self) -> CallHeader:
        """For a closer look at another rank's header, where that does not begin as this call's."""
        return CallHeader(self.signature, self._group, self.signature.pack()[0], self.meta)

    def settle(self, result: Any) -> Any:
        """`result`, in the thread that gets it: on a GPU its stream goes on when the side's work is
        done."""
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
        """Begin to send a contiguous array to rank `dst`; as a `block`, with its dtype, shape and
        device in the header.

        step and chunk are for the ledger's subscribers.
        """
        peer = self.world_ranks[dst]
        self.count(array.nbytes, peer)
        meta = self.meta
        if block:
            meta += pack_block(array.dtype, array.shape, self.origin or "cpu")
        watches: list[MessageWatch] = []
        if self.ledger.message_observers:
            watches = self._watches_of_send(dst, array.nbytes, block, step, chunk)
        handle = self._transport.start_send(peer, self._tag, array.reshape(-1), meta)
        return ObservedTransfer(handle, watches) if watches else handle

    def start_recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> Handle:
        """Begin to receive from rank `src` into a contiguous array of the same length, or to
        `reduce` it there.

        Raises (in wait): MismatchError if the sender is in another call, or the length differs.
        """
        watches: list[MessageWatch] = []
        if self.ledger.message_observers and into is not _NOTHING:
            watches = self._watches_of_receive(src, into.nbytes)
        into = into.reshape(-1)
        known = self.meta

        def accept(meta: bytes, nbytes: int) -> np.ndarray:
            for watch in watches:
                watch.accepted(nbytes)
            if not meta.startswith(known):
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

        handle = self._transport.start_recv(self.world_ranks[src], self._tag, accept, reduce)
        return ObservedTransfer(handle, watches) if watches else handle

    def _watches_of_send(
        self, dst: int, nbytes: int, block: bool, step: int | None, chunk: int | None
    ) -> list[MessageWatch]:
        """Tell the observers of a message to rank `dst`. Return what they follow it with."""
        me = self.world_ranks[self.rank]
        message = CallMessage(me, self.world_ranks[dst], nbytes, block, step, chunk)
        watches = [observer.on_send(self, message) for observer in self.ledger.message_observers]
        return [watch for watch in watches if watch is not None]

    def _watches_of_receive(self, src: int, nbytes: int, block: bool = False) -> list[MessageWatch]:
        """Tell the observers of a message from rank `src`. Return what they follow it with."""
        message = CallMessage(self.world_ranks[src], self.world_ranks[self.rank], nbytes, block)
        watches = [observer.on_receive(self, message) for observer in self.ledger.message_observers]
        return [watch for watch in watches if watch is not None]

    @property
    def others(self) -> list[int]:
        """The other ranks, from next_rank on: so all do not turn to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def wait(self, handles: Iterable[Handle]) -> None:
        """Wait for each of several transfers."""
        for handle in handles:
            handle.wait()

    def send(
        self, dst: int, array: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> None:
        """start_send and wait."""
        self.start_send(dst, array, step=step, chunk=chunk).wait()

    def recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> None:
        """start_recv and wait."""
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
        """Send to `dst` and receive from `src` at once; no order of the two could deadlock."""
        received = self.start_recv(src, into, reduce)
        sent = self.start_send(dst, outgoing, step=step, chunk=chunk)
        # first: a peer in another call shows here, and may never take what was sent
        received.wait()
        sent.wait()

    # ---------------------------------------------- messages that bring their dtype and shape along

    def start_send_block(
        self, dst: int, block: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> Handle:
        """start_send of a block."""
        return self.start_send(dst, block, block=True, step=step, chunk=chunk)

    def send_block(
        self, dst: int, block: np.ndarray, *, step: int | None = None, chunk: int | None = None
    ) -> None:
        """start_send_block and wait."""
        self.start_send_block(dst, block, step=step, chunk=chunk).wait()

    def start_recv_block(self, src: int, place: Place) -> tuple[Handle, list[np.ndarray]]:
        """Begin to receive a block as recv_block does: the handle, and the list that then holds the
        block."""
        arrived: list[np.ndarray] = []
        watches: list[MessageWatch] = []
        if self.ledger.message_observers:
            watches = self._watches_of_receive(src, 0, block=True)

        def accept(meta: bytes, nbytes: int) -> np.ndarray:
            for watch in watches:
                watch.accepted(nbytes)
            block = self._header.block_in(meta, src)
            if block is None:
                raise self._header.mismatch(meta, src)
            self.device, self.origin = self.device or block.device, block.device
            arrived.append(place(block.shape, block.dtype))
            return arrived[0].reshape(-1)

        handle = self._transport.start_recv(self.world_ranks[src], self._tag, accept)
        return ObservedTransfer(handle, watches) if watches else handle, arrived

    def recv_block(self, src: int, place: Place) -> np.ndarray:
        """Receive a block from rank `src` into the array that `place(shape, dtype)` returns, and
        return that."""
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
        """Send a block to `dst` and receive one from `src` at once; returns the one received."""
        received, arrived = self.start_recv_block(src, place)
        self.wait([received, self.start_send_block(dst, outgoing, step=step, chunk=chunk)])
        return arrived[0]

    def swap_blocks(
        self, parts: Arrays, place: PlaceOf
    ) -> tuple[list[Handle], dict[int, np.ndarray]] | None:
        """Send part r to rank r and take a block from each, where all is short and comes at once
        (transport.swap).

        A block is recognised if it looks like the part that goes the other way: so it is where all
        ranks send alike.

        Returns: the handles of what was sent, and the blocks that came, by rank; the others are
        still to be received.
                 None: nothing was sent.
        """
        # A swap tells subscribers nothing, and they must hear of every message: with subscribers
        # nothing is swapped.
        if self.ledger.subscribers or self.device != "cpu" or self.side is not None:
            return None
        came: dict[int, np.ndarray] = {}

        def into(rank: int) -> np.ndarray:
            came[rank] = place(rank)(parts[rank].shape, parts[rank].dtype)
            return came[rank].reshape(-1)

        metas = {
            rank: self.meta + pack_block(parts[rank].dtype, parts[rank].shape, "cpu")
            for rank in self.others
        }
        swapped = self._transport.swap(
            self._tag,
            [
                (self.world_ranks[rank], parts[rank].reshape(-1), meta)
                for rank, meta in metas.items()
            ],
            [
                ShortReceive(self.world_ranks[rank], meta, parts[rank].nbytes, partial(into, rank))
                for rank, meta in metas.items()
            ],
        )
        if swapped is None:
            return None
        for rank in metas:
            peer = self.world_ranks[rank]
            nbytes = parts[rank].nbytes
            self.count(nbytes, peer)
        return swapped[0], {
            rank: came[rank] for rank, there in zip(metas, swapped[1], strict=True) if there
        }

    # ------------------------------------------------------------------------------------- the rest

    def agree(self) -> None:
        """Compare signatures with both neighbours, by one header without payload to next_rank and
        one from prev_rank.

        Verbs in which some rank receives nothing, and algorithms whose first receive is not from
        prev_rank, begin with
        this: wherever two ranks disagree, some two neighbours do, and both learn it from their
        first message.
        """
        received = self.start_recv(self.prev_rank, _NOTHING)
        sent = self._transport.start_send(
            self.world_ranks[self.next_rank], self._tag, _NOTHING, self.meta
        )
        self.wait([received, sent])

    @property
    def lends(self) -> bool:
        """Whether the ranks may read each other's memory: the same on all of them."""
        return self.board is not None and self.board.lends

    def show(self, *arrays: np.ndarray, lent: Arrays = ()) -> list[np.ndarray]:
        """Show contiguous 1-D arrays of one dtype, at most SHOWN_BYTES, to all ranks of the group,
        and look.

        Of arrays `lent` only the addresses are shown, behind the others, 8 bytes each. Counted as
        one message of the arrays' bytes, also of those lent.

        Returns: what each rank shows, joined: arrays of that dtype in shared memory, only to be
        read, and only until
                 the next show(); what was lent may change after that.
        """
        meta = b"" if self.messages else self.meta
        return [shown.view(arrays[0].dtype) for _, shown in self._show(meta, arrays, lent)]

    def show_block(
        self, block: np.ndarray | None, *arrays: np.ndarray, lent: Arrays = ()
    ) -> list[tuple[BlockHeader | None, np.ndarray]]:
        """The first show() of a call whose ranks do not know each other's shapes: of bytes of
        `block`, or lent."""
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
        """Fill a contiguous array from the address that rank `src` has shown of an array it
        lends."""
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
        """The transport's own collectives among the ranks of this call."""
        library = self._transport if self.side is None else self._transport.device
        assert library is not None, "a call with a side has a device"
        return library.native(self.signature.group, self.world_ranks)

    def count(self, nbytes: int, peer: int | None = None) -> None:
        """Count a message, however it leaves: sent to the world rank `peer`, shown, or handed to
        `native`."""
        self.nbytes += nbytes
        self.messages += 1
        if peer is not None:
            self.sent_to[peer] = self.sent_to.get(peer, 0) + nbytes

    def workspace(self, length: int, dtype: np.dtype) -> np.ndarray:
        """A 1-D array to work in, told to the memory account as communication."""
        return account.current().hold(np.empty(length, dtype), "communication")
