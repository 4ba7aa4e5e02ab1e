"""Broken collectives of lesson 02: each runs, and prints what the ranks have and what the ledgers
say.

Find the fault first, then read the answer in README.md, section 6.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.errors import MismatchError
from minidist.grading import sent_since, totals
from minidist.lessons.running import Break


def broken_broadcast(group: Group, x: np.ndarray, root: int) -> np.ndarray:
    """Broadcast by a binomial tree."""
    distance = 1
    while distance < group.size:
        if group.rank < distance and group.rank + distance < group.size:
            group.send(x, dst=group.rank + distance)
        elif distance <= group.rank < 2 * distance:
            x = group.recv(src=group.rank - distance)
        distance *= 2
    return x


def root_ignored() -> None:
    """Broadcast 30, which rank 2 has, to all ranks."""
    for root in (0, 2):
        print(f"broadcast from rank {root}:")
        print(f"  expected on every rank: [{10 * (root + 1)}]")
        work = partial(_broadcast_own, root=root)
        print("\n".join(_each(work)))


def _broadcast_own(group: Group, root: int) -> np.ndarray:
    return broken_broadcast(group, np.array([10 * (group.rank + 1)]), root)


def broken_all_reduce(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce: every rank sends to every other, and every rank adds."""
    total = x.copy()
    for step in range(1, group.size):
        total += group.exchange(
            x, dst=(group.rank + step) % group.size, src=(group.rank - step) % group.size
        )
    return total


def own_first() -> None:
    """Add 0.1, 0.2, 0.3 and 0.4 on every rank, and look at the last bit; then as the library does
    it."""
    print(
        "\n".join(
            [
                "broken:",
                *_each(lambda group: float(broken_all_reduce(group, _tenths(group))[0]).hex()),
            ]
        )
    )
    print(
        "\n".join(
            [
                "direct:",
                *_each(
                    lambda group: float(
                        group.all_reduce(_tenths(group), algorithm="direct")[0]
                    ).hex()
                ),
            ]
        )
    )


def _tenths(group: Group) -> np.ndarray:
    return np.array([0.1 * (group.rank + 1)])


def broken_barrier(group: Group) -> None:
    """Wait for all ranks by dissemination."""
    nothing = np.empty(0)
    distance = 1
    while distance < group.size // 2:
        group.exchange(
            nothing,
            dst=(group.rank + distance) % group.size,
            src=(group.rank - distance) % group.size,
        )
        distance *= 2


def deaf_barrier() -> None:
    """Let rank 0 arrive 0.2 s late; no rank may leave the barrier earlier."""

    def late(group: Group) -> str:
        begin = time.perf_counter()
        if group.rank == 0:
            time.sleep(0.2)
        broken_barrier(group)
        return f"left after {time.perf_counter() - begin:.1f} s"

    print("  expected: rank 0 comes after 0.2 s, then all ranks leave; each rank sends 3 messages")
    for line in _each(late, size=8):
        print(line)


def broken_all_to_all(group: Group, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return what every other rank had for this one."""
    everything = group.all_gather(np.concatenate(parts), algorithm="ring")
    return [row.reshape(group.size, -1)[group.rank] for row in everything.reshape(group.size, -1)]


def everything_to_all() -> None:
    """Send 1000 elements from each rank to each other; the result is right."""

    def both(group: Group) -> str:
        parts = [np.full(1000, 10.0 * group.rank + dst) for dst in range(group.size)]
        told = []
        for work in (
            broken_all_to_all,
            lambda group, parts: group.all_to_all(parts, algorithm="pairwise"),
        ):
            before = totals(group.ledger)
            got = work(group, parts)
            messages, nbytes = sent_since(group.ledger, before)
            told.append(f"{[int(part[0]) for part in got]}, {messages} messages, {nbytes} bytes")
        return f"  rank {group.rank}: broken {told[0]}; library {told[1]}"

    for line in md.run(both, size=4, limit=5.0):
        print(line)


def two_orders() -> None:
    """Let rank 2 make the same two calls as the others in the other order."""

    def ranks(group: Group) -> None:
        x = np.ones(8)
        for op in ("max", "sum") if group.rank == 2 else ("sum", "max"):
            group.all_reduce(x, op=op)

    md.run(ranks, size=4, limit=5.0)


def _each(work: Callable[[Group], object], size: int = 4) -> list[str]:
    """Return one line per rank: its result of `work`, and what it sent."""

    def ranks(group: Group) -> str:
        before = totals(group.ledger)
        result = work(group)
        messages, nbytes = sent_since(group.ledger, before)
        return f"  rank {group.rank}: {result}   ({messages} messages, {nbytes} bytes sent)"

    return md.run(ranks, size=size, limit=5.0)


BREAKS = {
    "root-ignored": Break(root_ignored, says="expected on every rank: [30]\n  rank 0: [10]"),
    "own-first": Break(own_first, says="rank 3: 0x1.0000000000001p+0"),
    "deaf-barrier": Break(deaf_barrier, says="rank 4: left after"),
    "everything-to-all": Break(
        everything_to_all,
        says="3 messages, 96000 bytes; library [0, 10, 20, 30], 3 messages, 24000",
    ),
    "two-orders": Break(two_orders, says="ranks disagree in op", error=MismatchError),
}
