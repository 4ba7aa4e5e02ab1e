"""Run three broken rings of lesson 03: each prints what each chunk holds, and the ledger.

Find the fault first, then read the answer in README.md, section 5.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.grading import sent_since, totals
from minidist.lessons.running import Break

RANKS = 4
ELEMENTS = 400
BASE = 16  # rank r's number is BASE**r: the digits of a sum show whose parts it has, and how often

AllReduce = Callable[[Any, np.ndarray], np.ndarray]


def first(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce by a reduce-scatter, then an all-gather."""
    size = group.size
    rank = group.rank
    chunks = np.array_split(x.copy(), group.size)
    for step in range(size - 1):
        chunks[(rank - step - 1) % size] += _pass(group, chunks[(rank - step) % size])
    for step in range(size - 1):
        chunks[(rank - step - 1) % size][...] = _pass(group, chunks[(rank - step) % size])
    return np.concatenate(chunks)


def second(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce by a reduce-scatter, then an all-gather."""
    size = group.size
    rank = group.rank
    chunks = np.array_split(x.copy(), group.size)
    for step in range(size - 1):
        chunks[(rank - step - 2) % size] += _pass(group, chunks[(rank - step - 1) % size])
    for step in range(size - 1):
        chunks[(rank - step - 1) % size] += _pass(group, chunks[(rank - step) % size])
    return np.concatenate(chunks)


def third(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce by a reduce-scatter, then an all-gather."""
    size = group.size
    rank = group.rank
    known = [group.reduce_scatter(x, algorithm="ring")]
    for _ in range(size - 1):
        arrived = _pass(group, np.concatenate(known))
        known = [known[0], *np.array_split(arrived, len(known))]
    chunks = {(rank - far) % size: chunk for far, chunk in enumerate(known)}
    return np.concatenate([chunks[place] for place in range(size)])


def _pass(group: Group, chunk: np.ndarray) -> np.ndarray:
    """Send a chunk to the next rank; return what the previous rank sent."""
    return group.exchange(
        chunk, dst=(group.rank + 1) % group.size, src=(group.rank - 1) % group.size
    )


def examine(all_reduce: AllReduce) -> None:
    """Run `all_reduce` and the library's ring; print whose parts each chunk of each rank holds, and
    the messages and bytes of both."""

    def ranks(group: Group) -> tuple[list[str], list[tuple[int, int]]]:
        x = np.full(ELEMENTS, BASE**group.rank, np.int64)
        costs = []
        for work in (all_reduce, lambda group, x: group.all_reduce(x, algorithm="ring")):
            before = totals(group.ledger)
            result = work(group, x)
            costs.append(sent_since(group.ledger, before))
            if work is all_reduce:
                told = [_who(int(chunk[0])) for chunk in np.array_split(result, group.size)]
        return told, costs

    everyone = "+".join(map(str, range(RANKS)))
    print(
        f"expected on every rank: {everyone} in each chunk; messages and bytes of the library's ring"
    )
    for rank, (told, costs) in enumerate(md.run(ranks, size=RANKS, limit=5.0)):
        print(f"rank {rank}: " + ", ".join(f"c{place} = {who}" for place, who in enumerate(told)))
        (messages, nbytes), (ring_messages, ring_nbytes) = costs
        print(
            f"        {messages} messages, {nbytes} bytes; the library's ring: {ring_messages}, "
            f"{ring_nbytes}"
        )


def _who(value: int) -> str:
    """Return whose parts a sum holds: 0x1021 -> "0+2*1+3"."""
    counts = [(value // BASE**rank) % BASE for rank in range(RANKS)]
    return "+".join(
        f"{count}*{rank}" if count > 1 else str(rank) for rank, count in enumerate(counts) if count
    )


BREAKS = {
    "first": Break(partial(examine, first), says="rank 3: c0 = 0, c1 = 1, c2 = 2, c3 = 3"),
    "second": Break(partial(examine, second), says="rank 3: c0 = 0+4*1+3*2+2*3"),
    "third": Break(
        partial(examine, third),
        says="6 messages, 7200 bytes; the library's ring: 6, 4800",
    ),
}
