"""The floors of minidist bench: every byte that no algorithm avoids, and no more."""

from contextlib import ExitStack

import numpy as np
import pytest
from helpers import run

from minidist.bench import floors
from minidist.bench.collectives import VERBS
from minidist.bench.floors import BoardCalls, connected, copies_call, tcp_call
from minidist.comm.collectives.shared_memory import piece_bytes
from minidist.comm.limits import SHOWN_BYTES


@pytest.mark.parametrize(
    ("title", "brought", "got", "expected"),
    [
        # chunk 0 of three is summed, and copied over the others
        ("all-reduce", 6, 6, [6, 6, 6, 6, 6, 6]),
        ("reduce-scatter", 6, 2, [6, 6]),
        ("all-gather", 2, 6, [1, 1, 1, 1, 1, 1]),
        ("all-to-all", 6, 6, [1, 1, 2, 2, 3, 3]),
    ],
)
def test_copies_touch_every_number_that_a_rank_must(title, brought, got, expected, monkeypatch):
    """Where every rank brings what this one does, the sums are right."""
    monkeypatch.setattr(floors, "CACHED", 1)
    send = np.repeat(np.arange(1, brought // 2 + 1), 2).astype(np.float32)
    recv = send if title == "all-reduce" else np.zeros(got, np.float32)
    copies_call(VERBS[title], 3)(send, recv)
    assert recv.tolist() == expected


@pytest.mark.parametrize(
    ("title", "brought", "got", "filled"),
    [
        (
            "all-reduce",
            6,
            6,
            [0, 1, 2, 3, 4, 5],
        ),  # of three blocks of two numbers: two come from each
        ("all-reduce", 1, 1, [0]),  # no byte more than there is
        ("reduce-scatter", 6, 2, [0, 1]),  # both come to the same place
        ("all-gather", 2, 6, [0, 1, 4, 5]),  # all but one block, each to its own place
        ("all-to-all", 6, 6, [0, 1, 4, 5]),
    ],
)
def test_tcp_carries_what_a_rank_must(title, brought, got, filled):
    """Every rank sends its rank in the first half, and 10 more in the second, and gets those of the
    others."""

    def rank(world):
        send = np.full(brought, world.rank, np.float32)
        send[brought // 2 :] += 10 * (title == "all-to-all")
        recv = send.copy() if title == "all-reduce" else np.full(got, -1, np.float32)
        with ExitStack() as opened:
            tcp_call(VERBS[title], [opened.enter_context(sock) for sock in connected(world)])(
                send, recv
            )
        others = [other for other in range(world.size) if other != world.rank]
        return np.flatnonzero(np.isin(recv % 10, others)).tolist(), recv[filled].tolist()

    found = run(rank, size=3)
    assert [places for places, _ in found] == [filled] * 3
    if title in ("all-gather", "all-to-all"):  # one from each
        assert [len({value % 10 for value in values}) for _, values in found] == [2, 2, 2]
    if title == "all-to-all":  # each sends its first block to one, and its last to the other
        assert sorted(value for _, values in found for value in values) == [
            0,
            0,
            1,
            1,
            2,
            2,
            10,
            10,
            11,
            11,
            12,
            12,
        ]


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.title)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_board_gives_what_the_verb_must(verb, size, monkeypatch):
    """In one piece, and in several of which the last is shorter; a sum's length need not divide by
    the ranks."""
    length = {"all_reduce": 31, "all_gather": 15}.get(verb.name, 15 * size)
    brought = np.random.default_rng(0).integers(0, 1000, (size, length)).astype(np.float32)
    expected = {
        "all_reduce": lambda rank: brought.sum(axis=0),
        "all_gather": lambda rank: brought,
        "reduce_scatter": lambda rank: brought.sum(axis=0)[15 * rank : 15 * (rank + 1)],
        "all_to_all": lambda rank: brought[:, 15 * rank : 15 * (rank + 1)],
    }

    def rank(world):
        right = expected[verb.name](world.rank)
        send = brought[world.rank].copy()
        call = getattr(BoardCalls(world.board, world.rank, size), verb.name)
        for shown, piece in ((SHOWN_BYTES, piece_bytes(size)), (16, 8)):
            monkeypatch.setattr(floors, "SHOWN_BYTES", shown)
            monkeypatch.setattr(floors, "piece_bytes", lambda size, piece=piece: piece)
            recv = send.copy() if verb.in_place else np.full(right.size, -1, np.float32)
            call(recv if verb.in_place else send, recv)
            np.testing.assert_array_equal(recv, right.reshape(-1))
            world.barrier()

    run(rank, size=size, transport="shm")
