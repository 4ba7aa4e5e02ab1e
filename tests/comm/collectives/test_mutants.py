"""The test of the tests: algorithms that are wrong on purpose, each of which the checker must
catch, and say how.

A mutant takes the place of the algorithm it imitates, formula and all. Most are mistakes that
somebody has published.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_checker import Drawn, examine

from minidist.comm.calls.buffers import Place, PlaceOf, Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds, split
from minidist.comm.collectives import (
    bruck,
    halving_doubling,
    hierarchical,
    naive,
    ring,
    torus,
    torus_both,
    tree,
)
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.collectives.subset_call import SubsetCall
from minidist.errors import DeadlockError

MUTANTS: dict[str, tuple[Callable[..., Any], Drawn, type[BaseException], str]] = {}
EVEN = [12] * 4
UNEVEN = [13] * 4


def mutant(
    case: Drawn, error: type[BaseException], message: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a wrong algorithm: the case that must fail, the error, and what its message says."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[function.__name__] = (function, case, error, message)
        return function

    return register


@mutant(Drawn("all_reduce", "ring", 4, EVEN), AssertionError, "bytes, 2.P-1.n expected")
def whole_tensors_round_the_ring(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    travelling = x.copy()
    arrived = np.empty_like(x)
    total = x.copy()
    for _ in range(2):  # as many messages as the ring has, to hide in the message count
        travelling[...] = x
        total[...] = x
        for _ in range(call.size - 1):
            call.exchange(call.next_rank, travelling, call.prev_rank, arrived)
            travelling, arrived = arrived, travelling
            op.combine_all([total, travelling], out=total)
    op.finish(total, out)


@mutant(Drawn("all_reduce", "ring", 4, EVEN), AssertionError, "expected array")
def one_chunk_skipped(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    ring.all_reduce(call, x, out, op)
    split(out, call.size)[2][...] = split(x, call.size)[2]


@mutant(Drawn("all_reduce", "ring", 4, EVEN), AssertionError, "expected array")
def one_step_left_out(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    sums = split(out, call.size)
    own = split(x, call.size)
    outgoing = own[call.prev_rank]
    for step in range(call.size - 2):
        chunk = (call.rank - 2 - step) % call.size
        call.exchange(call.next_rank, outgoing, call.prev_rank, sums[chunk], op.into(own[chunk]))
        outgoing = sums[chunk]
    ring.gather_around(call, sums)


@mutant(Drawn("all_reduce", "ring", 4, UNEVEN), AssertionError, "expected array")
def remainder_forgotten(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    whole = len(x) // call.size * call.size
    out[whole:] = x[whole:]
    ring.all_reduce(call, x[:whole], out[:whole], op)


@mutant(Drawn("all_reduce", "ring", 4, EVEN), AssertionError, "argument was changed")
def sums_into_the_argument(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    ring.all_reduce(call, x, x, op)
    out[...] = x


@mutant(Drawn("all_reduce", "ring", 4, EVEN, op="mean"), AssertionError, "expected array")
def averaged_twice(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    ring.all_reduce(call, x, out, op)
    out /= call.size


@mutant(Drawn("all_reduce", "direct", 5, [64] * 5, rough=True), AssertionError, "different bits")
def own_value_added_first(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    total = x.copy()
    for step in range(1, call.size):
        arrived = np.empty_like(x)
        call.exchange((call.rank + step) % call.size, x, (call.rank - step) % call.size, arrived)
        op.combine_all([total, arrived], out=total)
    op.finish(total, out)


@mutant(Drawn("broadcast", "tree", 4, EVEN, root=2), AssertionError, "expected array")
def broadcast_from_rank_0(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    full = tree.broadcast(call, x, place, root)
    return full if call.rank == root else np.multiply(full, 0, out=full)


@mutant(Drawn("reduce", "tree", 4, EVEN, root=2), AssertionError, "the root has a result")
def root_ignored(
    call: Call, x: np.ndarray, out: np.ndarray | None, op: Reduction, root: int
) -> None:
    naive.reduce(call, x, out, op, root=0)


@mutant(Drawn("gather", "naive", 4, EVEN, root=1), AssertionError, "expected array")
def order_ignored(call: Call, own: np.ndarray, rows: Rows | None, root: int) -> np.ndarray | None:
    whole = naive.gather(call, own, rows, root)
    if whole is not None:
        whole[...] = whole.reshape(call.size, -1)[::-1].reshape(whole.shape)
    return whole


@mutant(
    Drawn("all_gather", "ring", 4, [8192] * 4, transport="threads-unbuffered"),
    DeadlockError,
    r"(\d waits for \d at \S*:\d+(, )?){4}\n",
)
def everyone_sends_first(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    blocks = {call.rank: own}
    for step in range(call.size - 1):
        outgoing = (call.rank - step) % call.size
        call.send_block(call.next_rank, blocks[outgoing])
        incoming = (outgoing - 1) % call.size
        blocks[incoming] = call.recv_block(call.prev_rank, rows.place(incoming))
    return rows.join([blocks[rank] for rank in range(call.size)])


@mutant(Drawn("reduce_scatter", "ring", 4, EVEN), AssertionError, "expected array")
def neighbours_chunk(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    chunks = split(x, call.size)
    ring.reduce_scatter(call, np.concatenate(chunks[1:] + chunks[:1]), out, op)


@mutant(
    Drawn("all_to_all", "pairwise", 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
    AssertionError,
    "expected .array",
)
def parts_not_transposed(call: Call, parts: list[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    received = {call.rank: parts[call.rank]}
    for step in range(1, call.size):
        dst = (call.rank + step) % call.size
        src = (call.rank - step) % call.size
        received[src] = call.exchange_blocks(dst, parts[src], src, place(src))
    return [received[src] for src in range(call.size)]


@mutant(Drawn("scatter", "naive", 4, EVEN, root=3), AssertionError, "expected array")
def parts_reversed(call: Call, x: np.ndarray | None, place: Place, root: int) -> np.ndarray:
    return naive.scatter(
        call, None if x is None else np.concatenate(split(x, call.size)[::-1]), place, root
    )


@mutant(
    Drawn("barrier", "dissemination", 4, EVEN), AssertionError, "messages, P ceil.log2 P. expected"
)
def barrier_of_neighbours(call: Call) -> None:
    nothing = np.empty(0, np.uint8)
    call.exchange(call.next_rank, nothing, call.prev_rank, nothing)


@mutant(Drawn("all_reduce", "halving-doubling", 5, [13] * 5), AssertionError, "expected array")
def surplus_rank_left_out(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    left_out = np.zeros_like(x) if call.rank == 1 else x
    halving_doubling.all_reduce(call, left_out, out, op)


@mutant(Drawn("reduce_scatter", "halving-doubling", 4, UNEVEN), AssertionError, "expected array")
def halves_from_near_to_far(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    cut = bounds(len(x), call.size)
    values = x.copy()
    for distance in (1, 2):
        partner = call.rank ^ distance
        kept, given = (
            slice(cut[rank - rank % distance], cut[rank - rank % distance + distance])
            for rank in (call.rank, partner)
        )
        call.exchange(partner, values[given], partner, values[kept], op.into(values[kept]))
    out[...] = values[cut[call.rank] : cut[call.rank + 1]]


@mutant(Drawn("all_reduce", "doubling", 6, [13] * 6), AssertionError, "expected array")
def surplus_added_twice(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    halving_doubling.double_whole(call, x * 2 if call.rank in (1, 3) else x, out, op)


@mutant(
    Drawn("all_reduce", "doubling", 4, [64] * 4, dtype="float16", rough=True),
    AssertionError,
    "different bits",
)
def more_precise_than_it_sends(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    total = x.astype(np.float32)
    sent = x.copy()
    arrived = np.empty_like(x)
    for partner in (call.rank ^ 1, call.rank ^ 2):
        sent[...] = total
        call.exchange(partner, sent, partner, arrived)
        total += arrived
    out[...] = total


@mutant(Drawn("all_gather", "halving-doubling", 4, [3] * 4), AssertionError, "expected array")
def own_blocks_in_front(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    have = own.copy()
    for distance in (1, 2):
        partner = call.rank ^ distance
        have = np.concatenate([have, call.exchange_blocks(partner, have, partner, np.empty)])
    return rows.complete(have)


@mutant(
    Drawn("all_to_all", "bruck", 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
    AssertionError,
    "expected .array",
)
def parts_jump_backwards(call: Call, parts: list[np.ndarray], place: PlaceOf) -> list[np.ndarray]:
    return bruck.all_to_all(
        call, [parts[(2 * call.rank - dst) % call.size] for dst in range(call.size)], place
    )


@mutant(Drawn("gather", "tree", 5, [1, 2, 3, 4, 5], root=3), AssertionError, "expected array")
def joined_as_they_come(
    call: Call, own: np.ndarray, rows: Rows | None, root: int
) -> np.ndarray | None:
    me, parent, children = tree.halved(call.rank, root, call.size)
    have = [own, *(call.recv_block(child.rank, np.empty) for child in reversed(children))]
    if parent is None:
        assert rows is not None
        return rows.complete(np.concatenate(have))
    call.send_block(parent, np.concatenate(have))
    return None


@mutant(
    Drawn("broadcast", "ring", 4, UNEVEN, root=1), AssertionError, "messages, .P-1..P.1. expected"
)
def root_is_told_what_it_has(
    call: Call, x: np.ndarray | None, place: Place, root: int
) -> np.ndarray:
    full = ring.broadcast(call, x, place, root)
    if call.next_rank == root:
        call.send(root, full[:0])
    elif call.rank == root:
        call.recv(call.prev_rank, full[:0].copy())
    return full


@mutant(Drawn("all_reduce", "torus", 6, [13] * 6), AssertionError, "expected array")
def columns_forgotten(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    ring.all_reduce(SubsetCall(call, torus.grid(call.size).row_of(call.rank)), x, out, op)


@mutant(
    Drawn("all_reduce", "torus-both", 6, [13] * 6), AssertionError, "messages, 4 P D .S-D. expected"
)
def one_long_ring(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    torus_both.all_reduce(call, x, out, op, sides=(6,))


@mutant(Drawn("all_reduce", "torus-both", 6, [13] * 6), AssertionError, "expected array")
def each_part_in_one_dim(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    rings = torus_both.rings_of(call.rank, (2, 3))
    for number, (mine, sums) in enumerate(zip(split(x, 4), split(out, 4), strict=True)):
        ring.all_reduce(SubsetCall(call, rings[number // 2]), mine, sums, op)


@mutant(
    Drawn("all_reduce", "hierarchical", 5, [12] * 5, op="mean", nodes=(0, 0, 1, 1, 1)),
    AssertionError,
    "expected array",
)
def each_level_divides(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    hierarchical.all_reduce(call, x, out, op)
    out /= 2


@mutant(
    Drawn("all_gather", "hierarchical", 4, [2] * 4, nodes=(0, 1, 0, 1)),
    AssertionError,
    "expected array",
)
def nodes_hold_ranks_that_follow_each_other(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    whole = hierarchical.all_gather(call, own, rows)
    whole[...] = np.concatenate([whole[:2], whole[4:6], whole[2:4], whole[6:]])
    return whole


@pytest.mark.sampled
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    wrong, case, error, message = MUTANTS[name]
    examine(case)  # the right algorithm passes this very case
    monkeypatch.setitem(ALGORITHMS[case.verb], case.algorithm, wrong)
    with pytest.raises(error, match=message):
        examine(case)
