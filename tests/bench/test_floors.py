"""The floors of minidist bench: every byte that no algorithm avoids, and no more."""

from contextlib import ExitStack

import numpy as np
import pytest
from helpers import run

from minidist.bench import floors
from minidist.bench.collectives import VERBS, timed
from minidist.bench.floors import board_call, connected, copies_call, tcp_call


@pytest.mark.parametrize(("title", "brought", "got", "expected"), [
    ("all-reduce", 6, 6, [6, 6, 6, 6, 6, 6]),               # chunk 0 of three is summed, and copied over the others
    ("reduce-scatter", 6, 2, [6, 6]),
    ("all-gather", 2, 6, [1, 1, 1, 1, 1, 1]),
    ("all-to-all", 6, 6, [1, 1, 2, 2, 3, 3]),
])
def test_copies_touch_every_number_that_a_rank_must(title, brought, got, expected, monkeypatch):
    """Where every rank brings what this one does, the sums are right."""
    monkeypatch.setattr(floors, "CACHED", 1)
    send = np.repeat(np.arange(1, brought // 2 + 1), 2).astype(np.float32)
    recv = send if title == "all-reduce" else np.zeros(got, np.float32)
    copies_call(VERBS[title], 3)(send, recv)
    assert recv.tolist() == expected


@pytest.mark.parametrize(("title", "brought", "got", "filled"), [
    ("all-reduce", 6, 6, [0, 1, 2, 3, 4, 5]),       # of three blocks of two numbers: two come from each
    ("all-reduce", 1, 1, [0]),                      # no byte more than there is
    ("reduce-scatter", 6, 2, [0, 1]),               # both come to the same place
    ("all-gather", 2, 6, [0, 1, 4, 5]),             # all but one block, each to its own place
    ("all-to-all", 6, 6, [0, 1, 4, 5])])
def test_tcp_carries_what_a_rank_must(title, brought, got, filled):
    """Every rank sends its rank, and gets those of the others."""
    def rank(world):
        send = np.full(brought, world.rank, np.float32)
        recv = send.copy() if title == "all-reduce" else np.full(got, -1, np.float32)
        with ExitStack() as opened:
            tcp_call(VERBS[title], [opened.enter_context(sock) for sock in connected(world)])(send, recv)
        others = [other for other in range(world.size) if other != world.rank]
        return np.flatnonzero(np.isin(recv, others)).tolist(), len(set(recv[filled].tolist()))

    found = run(rank, size=3)
    assert [places for places, _ in found] == [filled] * 3
    assert title in ("all-reduce", "reduce-scatter") or [values for _, values in found] == [2, 2, 2]


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.title)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_board_gives_what_the_verb_must(verb, size, monkeypatch):
    """In one piece, and in several of which the last is shorter."""
    def rank(world):
        call = board_call(verb, world.board, world.rank, size)
        timed(verb, call, world.barrier, world.rank, size)(nbytes=60 * size, repeats=1)
        monkeypatch.setattr(floors, "SHOWN_BYTES", 16)
        monkeypatch.setattr(floors, "piece_bytes", lambda size: 8)
        timed(verb, call, world.barrier, world.rank, size)(nbytes=60 * size, repeats=1)

    run(rank, size=size, transport="shm")
