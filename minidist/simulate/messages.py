"""Chapter 24 · What each rank does in a collective: the algorithm's own code, run once a rank
without data.

    program = record("all_reduce", "ring", Operands(nbytes=4096), size=4)
    program.src, program.dst, program.nbytes        # every message
    program.kind, program.arg                       # every rank's operations, in its order

A ProgramCall stands in for the Call that algorithms know. (CountingCall, counting_call.py, only
counts, for the ledger.) Its arrays have lengths but no memory of their own, and its reductions add
nothing. An algorithm's control flow does not depend on values, so each rank runs alone, to its end.

Where an algorithm learns a length from a message (gather along a tree, say), the receiver needs the
sender's array: a rank that asks for a message that is not sent yet is put back, and run again when
the others have run.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.calls.buffers import Place
from minidist.comm.calls.call import Arrays as Shown
from minidist.comm.calls.call import Call
from minidist.comm.chunks import bounds
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.handle import Handle
from minidist.comm.signature import BlockHeader
from minidist.comm.transport import Reduce
from minidist.errors import ConfigError
from minidist.simulate.hollow import BYTE, HollowReduction, HollowRows, Known, hollow
from minidist.simulate.program import (
    ADD,
    ARRIVED,
    POST,
    SEND,
    SENT,
    SHOW,
    Program,
    RankProgram,
    SymmetricProgram,
    program_of,
    symmetric_program,
)

REDUCES = ("reduce", "all_reduce", "reduce_scatter")


class Operands(NamedTuple):
    """The arrays of a call, as comm/cost/volume.py's Case has them.

    Attributes: nbytes   of each rank's array, or the root's; of each block or part where all are
                         alike
                blocks   of a gather: bytes of each rank; of an all_to_all: bytes to each rank, from
                         any
    """

    nbytes: int = 0
    blocks: tuple[int, ...] = ()
    itemsize: int = 1
    dims: int = 1

    def block(self, rank: int) -> int:
        """Return bytes of a rank's block, or of the part for it."""
        return self.blocks[rank] if self.blocks else self.nbytes


def record(
    verb: str, algorithm: str, operands: Operands, size: int, nodes: Sequence[int] = ()
) -> Program:
    """Run the algorithm on every rank; the root is rank 0.

    Raises: ConfigError for an algorithm that the verb does not have, or that is no code of ours
    (native).
    """
    _check(verb, algorithm)
    mail = _Mail(size, algorithm)
    ranks: dict[int, RankProgram] = {}
    waiting = list(range(size))
    before = -1
    while waiting:
        left = []
        for rank in waiting:
            call = ProgramCall(rank, size, nodes or (0,) * size, mail)
            try:
                _run(verb, algorithm, operands, call)
            except _NotYetSent:
                left.append(rank)
            ranks[rank] = RankProgram(*call.arrays())
        done = sum(len(recorded.kinds) for recorded in ranks.values())
        assert not left or done > before, (
            f"{verb} by {algorithm}: ranks {left} wait for messages that no rank sends"
        )
        waiting = left
        before = done
    return program_of(verb, [ranks[rank] for rank in range(size)])


def record_symmetric(
    verb: str, algorithm: str, operands: Operands, size: int, nodes: Sequence[int] = ()
) -> SymmetricProgram | None:
    """Run the algorithm on a few ranks: if they do the same, with peers equally far away, then all
    ranks do; else return None.

    Algorithms treat some ranks differently from others: the first, the last, powers of two. The few
    ranks are among these.
    Raises: as record.
    """
    _check(verb, algorithm)
    mail = _Mail(size, algorithm)
    ranks = dict[int, RankProgram]()
    for rank in sorted({0, 1, 2, 3, size // 2, size - 1} & set(range(size))):
        call = ProgramCall(rank, size, nodes or (0,) * size, mail)
        try:
            _run(verb, algorithm, operands, call)
        except _NotYetSent:
            return None
        ranks[rank] = RankProgram(*call.arrays())
        if symmetric_program(verb, ranks, size) is None:
            return None
    return symmetric_program(verb, ranks, size)


def _check(verb: str, algorithm: str) -> None:
    if algorithm not in ALGORITHMS[verb] or algorithm == "native":
        raise ConfigError(
            f"{verb} has no algorithm {algorithm!r} whose messages can be followed; choose "
            f"{', '.join(name for name in ALGORITHMS[verb] if name != 'native')}"
        )


def _run(verb: str, algorithm: str, operands: Operands, call: "ProgramCall") -> None:
    ALGORITHMS[verb][algorithm](call, **_arguments(verb, operands, call))


# ---------------------------------------------------------------- the call


class _NotYetSent(Exception):
    """A rank asks for the length of a message whose sender has not come so far."""


class _Mail:
    """What all ranks sent and showed so far, in order; `read`: whether receivers look into it
    (labels of shapes)."""

    def __init__(self, size: int, algorithm: str) -> None:
        self.read = algorithm in ("bruck", "shared")
        self.sent: list[defaultdict[int, list[np.ndarray]]] = [
            defaultdict(list) for _ in range(size)
        ]
        self.shown: list[list[tuple[Any, np.ndarray]]] = [[] for _ in range(size)]


class _Waiting(Handle):
    """The handle of a recorded transfer."""

    def __init__(self, call: "ProgramCall", kind: int, number: int) -> None:
        self._call = call
        self._kind = kind
        self._number = number

    def wait(self) -> None:
        self._call.waited(self._kind, self._number)

    def done(self) -> bool:
        return False


class ProgramCall(Call):
    """One rank's call, which notes operations in place of carrying them out.

    Attributes: kinds, args   the operations; the arg of a transfer is its number among this rank's
                              sends or posts
                sends, posts  of each send peer, bytes, and whether it meets; of each post peer, and
                              whether it adds
    """

    def __init__(self, rank: int, size: int, nodes: Sequence[int], mail: _Mail) -> None:
        self.rank = rank
        self.size = size
        self.nodes = tuple(nodes)
        self.world_ranks = tuple(range(size))
        self.next_rank = (rank + 1) % size
        self.prev_rank = (rank - 1) % size
        self.device = self.origin = "cpu"
        self.side = None
        self.board = None
        self.signature = None  # type: ignore[assignment]  # SubsetCall hands it on, unread
        self.kinds: list[int] = []
        self.args: list[int] = []
        self.sends: list[int] = []
        self.posts: list[int] = []
        self._mail = mail
        self._received = defaultdict[int, int](int)
        self._shows = 0
        mail.sent[rank].clear()
        mail.shown[rank].clear()

    def note(self, kind: int, arg: int) -> None:
        """Write down one more operation."""
        self.kinds.append(kind)
        self.args.append(arg)

    def start_send(
        self,
        dst: int,
        array: np.ndarray,
        *,
        block: bool = False,
        step: int | None = None,
        chunk: int | None = None,
    ) -> Handle:
        number = len(self.sends) // 3
        self.note(SEND, number)
        self.sends += (dst, array.nbytes, 0)
        if block:
            self._mail.sent[self.rank][dst].append(array)
        return _Waiting(self, SENT, number)

    def start_recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> Handle:
        number = len(self.posts) // 2
        self.note(POST, number)
        self.posts += (src, reduce is not None)
        return _Waiting(self, ARRIVED, number)

    def start_recv_block(
        self, src: int, place: Place, like: np.ndarray | None = None
    ) -> tuple[Handle, list[np.ndarray]]:
        number = self._received[src]
        self._received[src] += 1
        if isinstance(place, Known):
            return self.start_recv(src, place.array), [place.array]
        letters = self._mail.sent[src][self.rank]
        if len(letters) <= number:
            raise _NotYetSent
        sent = letters[number]
        array = place(sent.shape, sent.dtype)
        if self._mail.read and sent.size:
            array[...] = sent
        return self.start_recv(src, array), [array]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the operations as arrays: of a thousand ranks they would be millions of Python's
        numbers."""
        return (
            np.array(self.kinds, np.int8),
            np.array(self.args, np.int64),
            np.array(self.sends, np.int64).reshape(-1, 3),
            np.array(self.posts, np.int32).reshape(-1, 2),
        )

    def waited(self, kind: int, number: int) -> None:
        """Write down a wait; a send meets its receiver if the rank does nothing else meanwhile, but
        for an exchange's receive."""
        alone = kind == SENT and self.args[-1] == number
        exchange = kind == ARRIVED and self.kinds[-2:] == [POST, SEND] and self.args[-2] == number
        if self.kinds[-1] == SEND and (alone or exchange):
            self.sends[-1] = 1
        self.note(kind, number)

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
        """Write down what Call.exchange does, at once: rings make thousands of them."""
        sends = len(self.sends) // 3
        posts = len(self.posts) // 2
        self.posts += (src, reduce is not None)
        self.sends += (dst, outgoing.nbytes, 1)
        self.kinds += (POST, SEND, ARRIVED, SENT)
        self.args += (posts, sends, posts, sends)

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
        """Write down what Call.exchange_blocks does; the peer may look at what is sent before this
        rank knows what it receives."""
        self._mail.sent[self.rank][dst].append(outgoing)
        received, (array,) = self.start_recv_block(src, place)
        self.wait([received, self.start_send(dst, outgoing)])
        return array

    def agree(self) -> None:
        """Do nothing: a header without payload is in no cost."""

    def workspace(self, length: int, dtype: np.dtype) -> np.ndarray:
        return np.empty(length, dtype) if self._mail.read else hollow(length, dtype)

    def show(self, *arrays: np.ndarray, lent: Shown = ()) -> list[np.ndarray]:
        return [shown for _, shown in self._show_all(None, arrays)]

    def show_block(
        self, block: np.ndarray | None, *arrays: np.ndarray, lent: Shown = ()
    ) -> list[tuple[BlockHeader | None, np.ndarray]]:
        return self._show_all(
            None if block is None else BlockHeader(block.dtype, block.shape, "cpu"), arrays
        )

    def _show_all(self, header: BlockHeader | None, arrays: Shown) -> list[tuple[Any, np.ndarray]]:
        number = self._shows
        shown = self._mail.shown
        self._shows += 1
        self.note(SHOW, sum(array.nbytes for array in arrays))
        shown[self.rank].append((header, np.concatenate(arrays)))
        if any(len(theirs) <= number for theirs in shown):
            raise _NotYetSent
        return [theirs[number] for theirs in shown]


def _arguments(verb: str, operands: Operands, call: ProgramCall) -> dict[str, Any]:
    """Return what comm/verbs.py hands to the algorithm, without memory."""
    if verb == "barrier":
        return {}
    root = {"root": 0} if verb in ("broadcast", "scatter", "reduce", "gather") else {}
    at_root = call.rank == 0
    rank = call.rank
    size = call.size
    if verb in REDUCES:
        item = np.dtype(f"V{operands.itemsize}")
        length = operands.nbytes // operands.itemsize
        kept = bounds(length, size)[rank : rank + 2] if verb == "reduce_scatter" else (0, length)
        out = hollow(kept[1] - kept[0], item) if at_root or verb != "reduce" else None
        return {
            "x": hollow(length, item),
            "out": out,
            "op": HollowReduction(item, partial(call.note, ADD)),
            **root,
        }
    if verb in ("broadcast", "scatter"):
        item = np.dtype(f"V{operands.itemsize}") if verb == "scatter" else BYTE
        length = operands.nbytes // item.itemsize
        kept = bounds(length, size)[rank : rank + 2] if verb == "scatter" else (0, length)
        return {
            "x": hollow(length, item) if at_root else None,
            "place": Known(hollow(kept[1] - kept[0], item)),
            **root,
        }
    if verb == "all_to_all":
        shape = (*(1,) * (operands.dims - 1), -1)
        own = hollow(operands.block(rank)).reshape(shape)
        return {
            "parts": [hollow(operands.block(dst)).reshape(shape) for dst in range(size)],
            "place": lambda src: Known(own),
        }
    rows = HollowRows([operands.block(other) for other in range(size)])
    return {
        "own": hollow(operands.block(rank)),
        "rows": rows if at_root or not root else None,
        **root,
    }
