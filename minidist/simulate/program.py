"""Chapter 24 · The program of a collective: all messages, and every rank's operations, as
arrays.

    Program            the messages and operations of each rank
    SymmetricProgram   the messages and operations of one rank, where all ranks do the same with
                       peers equally far away

Of the ring all-reduce of 16,384 ranks a Program would have 537 million messages; a SymmetricProgram
has 32,766. walk.py walks both: round by round, and a round is a Program.

    for part, times in program.rounds():    # a ring has two: add what arrives, or store it
        ...                                 # `times` rounds that are equal, one after the other
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

SEND, POST, SENT, ARRIVED, ADD, SHOW, END = range(7)
"""Operations: begin to send, be ready to receive, wait for either, add arrays, show (and all wait),
nothing more."""


@dataclass
class Program:
    """What all ranks of a call do.

    Attributes: verb, size
                src, dst, nbytes   of each message
                adds       whether it is added to an array as it arrives
                meets      whether its sender does nothing else meanwhile (send, exchange): then it
                           leaves when its receiver is ready
                crowded    whether every rank sends to all others at once
                kind, arg  (size, steps): each rank's operations, END behind the last; a message's
                           number, or bytes
    """

    verb: str
    size: int
    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray
    adds: np.ndarray
    meets: np.ndarray
    crowded: bool
    kind: np.ndarray
    arg: np.ndarray

    @property
    def messages(self) -> int:
        """Return the messages of all ranks; what a rank shows at a time counts as one."""
        return len(self.src) + int((self.kind == SHOW).sum())

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that all ranks send."""
        return int(self.nbytes.sum()) + int(self.arg[self.kind == SHOW].sum())

    def rounds(self) -> Iterator[tuple["Program", int]]:
        """Yield this program, once: it is one round."""
        yield self, 1


class RankProgram(NamedTuple):
    """What one rank does, as arrays.

    Attributes: kinds, args   its operations; the arg of a transfer is its number among this rank's
                              sends or posts
                sends, posts  of each send peer, bytes, whether it meets; of each post peer, whether
                              it adds
    """

    kinds: np.ndarray
    args: np.ndarray
    sends: np.ndarray  # (messages, 3)
    posts: np.ndarray  # (messages, 2)

    def tells_all(self, size: int) -> bool:
        """Return True if the rank has sends to all others under way before it waits for any."""
        waits = np.flatnonzero(np.isin(self.kinds, (SENT, ARRIVED)))
        before = int((self.kinds[: waits[0]] == SEND).sum()) if len(waits) else 0
        return len(set(self.sends[:before, 0].tolist())) == size - 1


@dataclass
class SymmetricProgram:
    """What every rank of a call does where all do the same: a message goes from rank r to rank r +
    ahead, around. Turned: rank r's program is that of rank 0 with all peers moved on by r.

    Attributes: verb, size
                kinds, args   each rank's operations; the arg of a transfer is the number of its
                              message
                ahead, nbytes, adds, meets   of each message that a rank sends, as Program has them
                crowded       whether every rank sends to all others at once
    """

    verb: str
    size: int
    kinds: np.ndarray
    args: np.ndarray
    ahead: np.ndarray
    nbytes: np.ndarray
    adds: np.ndarray
    meets: np.ndarray
    crowded: bool

    @property
    def messages(self) -> int:
        """Return the messages of all ranks."""
        return self.size * len(self.ahead)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that all ranks send."""
        return self.size * int(self.nbytes.sum())

    def rounds(self) -> Iterator[tuple[Program, int]]:
        """Yield the program of each round, and how often it repeats. A round ends where no message
        is under way."""
        for each, times in self._rounds:
            yield self._expanded(each), times

    @cached_property
    def _rounds(self) -> list[tuple["_Round", int]]:
        return [(each, sum(1 for _ in equal)) for each, equal in groupby(self._each_round())]

    def _each_round(self) -> Iterator["_Round"]:
        columns = (self.ahead, self.nbytes, self.adds, self.meets)
        messages = [
            _Message(*row) for row in zip(*(column.tolist() for column in columns), strict=True)
        ]
        ops = list[tuple[int, int]]()
        here = dict[int, int]()  # a message's number -> its number in the round
        waits = 0
        for kind, arg in zip(self.kinds.tolist(), self.args.tolist(), strict=True):
            ops.append((kind, arg if kind == ADD else here.setdefault(arg, len(here))))
            waits += kind in (SENT, ARRIVED)
            if waits == 2 * len(here):  # the sender's and the receiver's
                yield _Round(tuple(ops), tuple(messages[number] for number in here))
                ops = []
                here = {}
                waits = 0
        assert not ops, "every message is waited for"

    def _expanded(self, each: "_Round") -> Program:
        """Return the program of all ranks in a round; message m of rank r has number m * size + r."""
        size = self.size
        count = len(each.messages)
        ranks = np.arange(size, dtype=np.int64)
        table = np.array(each.messages, np.int64).reshape(count, len(_Message._fields))
        columns = dict(zip(_Message._fields, np.repeat(table, size, axis=0).T, strict=True))
        src = np.tile(ranks, count)
        kind = np.array([*(kind for kind, _ in each.ops), END], np.int8)
        arg = np.zeros((size, len(kind)), np.int64)
        for step, (own, number) in enumerate(each.ops):
            if own == ADD:
                arg[:, step] = number
            elif own in (SEND, SENT):
                arg[:, step] = number * size + ranks
            else:
                arg[:, step] = number * size + (ranks - each.messages[number].ahead) % size
        return Program(
            self.verb,
            size,
            src,
            (src + columns["ahead"]) % size,
            columns["nbytes"],
            columns["adds"] != 0,
            columns["meets"] != 0,
            self.crowded,
            np.broadcast_to(kind, arg.shape),
            arg,
        )


class _Message(NamedTuple):
    """A message from each rank to the rank `ahead` places further."""

    ahead: int
    nbytes: int
    adds: bool
    meets: bool


class _Round(NamedTuple):
    """One rank's operations after which no message is under way: (kind, the message's number in the
    round, or bytes), and the messages."""

    ops: tuple[tuple[int, int], ...]
    messages: tuple[_Message, ...]


def symmetric_program(
    verb: str, ranks: Mapping[int, RankProgram], size: int
) -> SymmetricProgram | None:
    """Return one program for all ranks, if these few do the same with peers as far away; else
    None."""
    if len({_with_distances(rank, program, size) for rank, program in ranks.items()}) > 1:
        return None
    rank, one = next(iter(ranks.items()))
    sends = one.sends
    posts = one.posts
    ahead = (sends[:, 0] - rank) % size
    back = (rank - posts[:, 0]) % size
    left = np.argsort(ahead, kind="stable")
    right = np.argsort(back, kind="stable")
    if not np.array_equal(ahead[left], back[right]):
        return None
    message_of_post = np.empty(len(right), np.int64)
    adds = np.zeros(len(left), bool)
    message_of_post[right] = left
    adds[left] = posts[right, 1] != 0
    numbers = one.args.astype(np.int64)
    received = np.isin(one.kinds, (POST, ARRIVED))
    numbers[received] = message_of_post[numbers[received]]
    return SymmetricProgram(
        verb,
        size,
        one.kinds,
        numbers,
        ahead,
        sends[:, 1],
        adds,
        sends[:, 2] != 0,
        size > 2 and one.tells_all(size),
    )


def _with_distances(rank: int, program: RankProgram, size: int) -> tuple[bytes, ...]:
    """Return what a rank does, its peers counted from itself on."""
    columns = (
        (program.sends[:, 0] - rank) % size,
        program.sends[:, 1:],
        (program.posts[:, 0] - rank) % size,
        program.posts[:, 1],
        program.kinds,
        program.args,
    )
    return tuple(column.tobytes() for column in columns)


def program_of(verb: str, ranks: Sequence[RankProgram]) -> Program:
    """Number the messages, and bring the ranks' operations into one table."""
    size = len(ranks)
    sent = np.concatenate([rank.sends for rank in ranks])
    posted = np.concatenate([rank.posts for rank in ranks])
    src = np.repeat(np.arange(size), [len(rank.sends) for rank in ranks])
    dst = sent[:, 0]
    at = np.repeat(np.arange(size), [len(rank.posts) for rank in ranks])
    origin = posted[:, 0]
    left = np.argsort(src * size + dst, kind="stable")
    right = np.argsort(origin * size + at, kind="stable")
    matched = len(left) == len(right) and bool(
        (src[left] == origin[right]).all() and (dst[left] == at[right]).all()
    )
    assert matched, "every message is received"
    number_of_post = np.empty(len(right), np.int64)  # a message's number is that of its send
    number_of_post[right] = left
    adds = np.zeros(len(left), bool)
    adds[left] = posted[right, 1] != 0
    steps = max(len(rank.kinds) for rank in ranks) + 1
    kind = np.full((size, steps), END, np.int8)
    arg = np.zeros((size, steps), np.int64)
    sends = posts = 0
    for number, rank in enumerate(ranks):
        args = rank.args.astype(np.int64)
        args[np.isin(rank.kinds, (SEND, SENT))] += sends
        theirs = np.isin(rank.kinds, (POST, ARRIVED))
        args[theirs] = number_of_post[args[theirs] + posts]
        kind[number, : len(args)] = rank.kinds
        arg[number, : len(args)] = args
        sends = sends + len(rank.sends)
        posts = posts + len(rank.posts)
    crowded = size > 2 and all(rank.tells_all(size) for rank in ranks)
    return Program(verb, size, src, dst, sent[:, 1], adds, sent[:, 2] != 0, crowded, kind, arg)
