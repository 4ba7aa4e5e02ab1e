"""Pieces of a divided sequence: the keys that one rank needs of another under a pattern, and their
exchange.

Both follow from the pattern (nn/attention_pattern.py) and the zigzag (token_shard.py), which every
rank knows.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from minidist.autograd.ops.block_sparse import SIDE
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.nn.attention_pattern import pattern_blocks
from minidist.parallel.context.token_shard import own_blocks, zigzag

# ---------------------------------------------------------------------------- which rank needs what


class NeededTokens(NamedTuple):
    """The tokens that one rank needs of another: their places among the source's own tokens, as
    runs, `total` in all.

    tiles: (queries, keys, causal): slices of the rank's own tokens and of these; causal: queries
    and keys are the same tokens.
    """

    runs: tuple[slice, ...]
    total: int
    tiles: tuple[tuple[slice, slice, bool], ...]


@lru_cache(maxsize=4096)
def needed(pattern: str, length: int, rank: int, source: int, size: int) -> NeededTokens:
    """Return the tokens of rank `source` whose keys the queries of `rank` see, in a sequence of
    `length` tokens cut by `zigzag`.

    If both are one rank, these are all its tokens.
    """
    blocks = pattern_blocks(pattern, length)
    keys = zigzag(length, source, size)
    # from `first` on: own, or ahead
    seen = [
        (queries, first, blocks[first // SIDE, keys // SIDE] & (keys < first))
        for queries, first in query_blocks(length, rank, size)
    ]
    here = source == rank
    any_row = (
        np.any([shown for *_, shown in seen], axis=0)
        if seen and not here
        else np.full(len(keys), here)
    )
    tiles = [(queries, run, False) for queries, _, shown in seen for run in runs(shown[any_row])]
    if here:
        tiles += [
            (queries, queries, True)
            for queries, first, _ in seen
            if blocks[first // SIDE, first // SIDE]
        ]
    return NeededTokens(tuple(runs(any_row)), int(any_row.sum()), tuple(tiles))


def query_blocks(length: int, rank: int, size: int) -> list[tuple[slice, int]]:
    """Return a rank's tokens, cut where the zigzag or the pattern cuts them: (own tokens, position
    of the first)."""
    found = []
    positions = zigzag(length, rank, size)
    for _, own in own_blocks(length, rank, size):
        start = own.start
        while start < own.stop:
            first = int(positions[start])
            stop = min(own.stop, start + SIDE - first % SIDE)
            found.append((slice(start, stop), first))
            start = stop
    return found


def runs(shown: np.ndarray) -> list[slice]:
    """Return the runs of True in (n,) bool, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], shown, [False]]).astype(np.int8)))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def tokens_sent(pattern: str, length: int, size: int) -> int:
    """Return M of the cost in sparse_ring_attention.py: tokens that ranks need of each other,
    counted once per rank that needs one."""
    return sum(
        needed(pattern, length, rank, source, size).total
        for rank in range(size)
        for source in range(size)
        if source != rank
    )


# ----------------------------------------------------------------------------------------- exchange

AHEAD = 2  # pieces being received while the rank computes with one: those of both neighbours
# messages that may not have left yet when a hop starts: pieces, and gradients of pieces
UNSENT = 2 * AHEAD


class PieceExchange:
    """The exchange of pieces between ranks: keys and values arrive hop by hop, and gradients of
    pieces return to their rank.

    All ranks take the hops in one order and start a hop's messages at the same point of it. So the
    messages between two ranks match, and no rank waits for a later hop of another.
    """

    def __init__(self, group: Group, kv: Array, pattern: str, length: int) -> None:
        self.group = group
        self.kv = kv
        self.needed = partial(needed, pattern, length, size=group.size)
        near = range(1, group.size // 2 + 1)
        self.hops = list(
            dict.fromkeys(hop for distance in near for hop in (distance, group.size - distance))
        )
        self._leaving: list[Pending] = []
        self._home: tuple[Pending, tuple[slice, ...]] | None = None

    def source(self, hop: int) -> int:
        """Return the rank whose piece arrives at a hop; at hop 0 this rank."""
        return (self.group.rank - hop) % self.group.size

    def pieces(self) -> Iterator[tuple[int, Array | None]]:
        """Yield (hop, the keys and values that this rank needs of that hop's source, or None) for
        each hop, from hop 0 on.

        Returns: (2, B, H_kv, n, D); the arrays must not be written to.
        Cost:    a message from each rank that this rank needs something of, with only the needed
                 tokens.
        """
        started = [self._start(hop) for hop in self.hops[:AHEAD]]
        yield 0, self.kv
        for hop, after in zip(self.hops, [*self.hops[AHEAD:], *[0] * AHEAD], strict=False):
            coming = started.pop(0)
            arrived = None if coming is None else coming.wait()
            if after:
                started.append(self._start(after))
            yield hop, arrived

    def send_home(self, hop: int, gradients: Array | None, total: Array) -> None:
        """Start to send a piece's gradients to the rank that has its tokens, and to receive
        gradients of own tokens at `hop`.

        Every rank calls it after each hop, with None where it had no piece. Gradients that arrived
        at the hop before are added to `total`, the gradients of the own keys and values.
        """
        self._add_home(total)
        if gradients is not None:
            self._leaving.append(self.group.start_send(gradients, self.source(hop)))
        back = (self.group.rank + hop) % self.group.size
        mine = self.needed(back, self.group.rank)
        if mine.total:
            self._home = self.group.start_recv(back, out=self._room(total, mine.total)), mine.runs

    def finish(self, total: Array | None = None) -> None:
        """Wait until all messages of this rank have left; in backward add the last gradients that
        arrived to `total`."""
        if total is not None:
            self._add_home(total)
        while self._leaving:
            self._leaving.pop(0).wait()

    def _start(self, hop: int) -> Pending | None:
        """Start a hop's messages, except empty ones. Returns: the pending receive of the next
        piece, or None."""
        self._leaving = [pending for pending in self._leaving if not _left(pending)]
        while len(self._leaving) > UNSENT:
            self._leaving.pop(0).wait()
        dst = (self.group.rank + hop) % self.group.size
        theirs = self.needed(dst, self.group.rank)
        mine = self.needed(self.group.rank, self.source(hop))
        if theirs.total:
            part = array_module(self.kv).concatenate(
                [self.kv[..., run, :] for run in theirs.runs], axis=-2
            )
            self._leaving.append(
                self.group.start_send(account.current().hold(part, "communication"), dst)
            )
        return (
            self.group.start_recv(self.source(hop), out=self._room(self.kv, mine.total))
            if mine.total
            else None
        )

    def _add_home(self, total: Array) -> None:
        if self._home is not None:
            (pending, needed) = self._home
            self._home = None
            at = 0
            came = pending.wait()
            for run in needed:
                total[..., run, :] += came[..., at : at + run.stop - run.start, :]
                at += run.stop - run.start

    @staticmethod
    def _room(like: Array, tokens: int) -> Array:
        """Return a new array like (…, own, D), of `tokens` tokens."""
        room = array_module(like).empty((*like.shape[:-2], tokens, like.shape[-1]), like.dtype)
        return account.current().hold(room, "communication")


def _left(pending: Pending) -> bool:
    """Return whether a message has left; if so, finish it."""
    if pending.done():
        pending.wait()
        return True
    return False
