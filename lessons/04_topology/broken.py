"""Broken collectives of lesson 04, on two machines of four ranks: what the ranks have, and what
crossed between.

Find the fault first, then read the answer in README.md, section 9.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.errors import DeadlockError
from minidist.lessons.running import Break

NODES = (0, 0, 0, 0, 1, 1, 1, 1)
UNEVEN = (0, 0, 0, 0, 0, 0, 1, 1)  # of mean-of-means
ELEMENTS = 1000


def leaders_of(nodes: tuple[int, ...]) -> list[int]:
    """Return the first rank of each machine."""
    return [nodes.index(node) for node in sorted(set(nodes))]


def broken_one_leader(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce: reduce to the leader, then broadcast to all ranks."""
    total = group.reduce(x, root=0, algorithm="naive")
    return group.broadcast(total, root=0, algorithm="naive")


def broken_whole_machine(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce inside the machine; then each rank all-reduces with its counterpart on the other
    machine."""
    inside = group.split(NODES[group.rank])
    between = group.split(group.rank % 4)
    return between.all_reduce(inside.all_reduce(x, algorithm="ring"), algorithm="ring")


def broken_sum_of_sums(group: Group, x: np.ndarray) -> np.ndarray:
    """Average over each machine, then over the machines."""
    inside = group.split(UNEVEN[group.rank])
    mean = inside.all_reduce(x, op="mean")
    across = group.split(0 if group.rank in leaders_of(UNEVEN) else None)
    if across is not None:
        mean = across.all_reduce(mean, op="mean")
    return inside.broadcast(mean, root=0)


def broken_followers_asleep(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce: leaders add up, and all ranks of a machine continue when they have the result."""
    inside = group.split(NODES[group.rank])
    total = inside.reduce(x, root=0)
    across = group.split(0 if group.rank in leaders_of(NODES) else None)
    if across is None:
        return inside.broadcast(root=0)
    return across.all_reduce(total)


def _show(
    work: Callable[[Any, np.ndarray], np.ndarray], right: str, nodes: tuple[int, ...] = NODES
) -> None:
    """Print the first element on each rank, and the bytes between the machines."""

    def ranks(group: Group) -> tuple[float, int, int]:
        events: list[Any] = []
        group.ledger.subscribe(events.append)
        result = work(group, np.full(ELEMENTS, group.rank + 1.0))
        sent = [
            event.details
            for event in events
            if event.kind == "message" and event.details["axis"] != "control"
        ]
        across = sum(
            message["nbytes"] for message in sent if nodes[message["src"]] != nodes[message["dst"]]
        )
        return float(result[0]), across, sum(message["nbytes"] for message in sent)

    got = md.run(ranks, size=8, limit=2.0)
    n = ELEMENTS * 8
    print(f"element 0 on ranks 0 to 7: {[value for value, _, _ in got]} ({right})")
    print(
        f"bytes between the machines: {sum(across for _, across, _ in got) / n:g} n; "
        f"in all: {sum(nbytes for _, _, nbytes in got) / n:g} n"
    )


def one_leader() -> None:
    """Run broken_one_leader: the result is right; count the bytes between the machines."""
    _show(broken_one_leader, "36 is right")
    _show(lambda group, x: _hierarchical(group, x), "the library's hierarchical")


def whole_machine() -> None:
    """Run broken_whole_machine: it is quick inside a machine; count the bytes between machines."""
    _show(broken_whole_machine, "36 is right")
    _show(lambda group, x: _hierarchical(group, x), "the library's hierarchical")


def mean_of_means() -> None:
    """Run broken_sum_of_sums on machines of six and of two ranks."""
    _show(broken_sum_of_sums, "the mean of 1 .. 8 is 4.5", UNEVEN)


def followers_asleep() -> None:
    """Run broken_followers_asleep: no rank dies; which rank waits for which?"""
    _show(broken_followers_asleep, "36 is right")


def _hierarchical(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce by the library's algorithm, with ranks 0 to 3 on one machine and 4 to 7 on
    another."""
    group.nodes = NODES
    return group.all_reduce(x, algorithm="hierarchical")


BREAKS = {
    "one-leader": Break(
        one_leader,
        says="(36 is right)\nbytes between the machines: 8 n; in all: 14 n",
    ),
    "whole-machine": Break(
        whole_machine,
        says="(36 is right)\nbytes between the machines: 8 n; in all: 20 n",
    ),
    "mean-of-means": Break(mean_of_means, says="5.5] (the mean of 1 .. 8 is 4.5)"),
    "followers-asleep": Break(followers_asleep, says="1 waits for 0", error=DeadlockError),
}
