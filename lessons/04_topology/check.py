"""Grades exercise 04: counts against the lesson's wirings, sums and bytes between machines against
the library."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.collectives.hierarchical import plain_all_reduce
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.errors import CommError
from minidist.grading import Result, expect, judge, load_module
from minidist.launch import run

wiring = load_module(Path(__file__).resolve().parent / "wiring.py", "04")
LIMIT = 60.0  # seconds for the ranks to return: of a busy machine; a deadlock is found at once
# Rank r contributes BASE**r. The digits of a sum say how often each rank's part is in it.
BASE = 16
JOBS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 2), (2, 9, 9), (0, 0), (0,))


class Part:
    """Some ranks of a group, as a student's rank sees them, with a log of what it does."""

    def __init__(self, group: Group, ranks: list[int], nodes: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks
        self._nodes = nodes
        self.rank = ranks.index(group.rank)
        self.size = len(ranks)
        self.across = 0  # bytes to other machines

    def send(self, x: np.ndarray, dst: int) -> None:
        """Return when dst has taken it."""
        self._count(x, dst)
        self._group.send(x, dst=self._ranks[dst])

    def recv(self, src: int) -> np.ndarray:
        """Return when src has sent it."""
        return self._group.recv(src=self._ranks[src])

    def exchange(self, x: np.ndarray, dst: int, src: int) -> np.ndarray:
        """Send and receive at once."""
        self._count(x, dst)
        return self._group.exchange(x, dst=self._ranks[dst], src=self._ranks[src])

    def _count(self, x: np.ndarray, dst: int) -> None:
        self.across += x.nbytes * (self._nodes[self._ranks[dst]] != self._nodes[self._group.rank])


CUT_FROM = (plain_all_reduce,)
ANSWERS = {
    1: "min((a - b) % size, (b - a) % size)",
    2: "sum((a in half) != (b in half) for a, b in links)",
    3: "[other for other in range(len(nodes)) if nodes[other] == nodes[rank]]",
    4: "[nodes.index(node) for node in sorted(set(nodes))]",
    7: "2 * (size - 1) * (alpha + nbytes / size * beta)",
    8: "2 * (machines - 1) * (alpha + nbytes / machines * beta)",
    9: "tuple(np.polyfit(sizes, seconds, 1)[::-1])",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check every task, one after the other."""
    yield from _hops(exercise)
    yield from _cuts(exercise)
    for nodes in JOBS:
        yield from _groups(exercise, nodes)
    for nodes in JOBS:
        yield from _all_reduce(exercise, nodes)
    yield from _seconds(exercise)
    yield from _fit(exercise)


def _hops(exercise: ModuleType) -> Iterator[Result]:
    """Check hops on rings against those counted on the lesson's wiring."""
    for size in (8, 5):
        for a, b in ((0, 1), (1, 0), (0, size - 1), (size - 2, 1), (3, 3)):
            target = wiring.ways(wiring.ring(size), a)[b][0]
            yield expect(
                f"hops from {a} to {b}, ring of {size}",
                target,
                exercise.ring_hops(a, b, size),
                "wrong number of hops",
                "a ring is closed, and a message may go round either way: section 1 (hole 1)",
                known={
                    "a line, not a ring": abs(a - b),
                    "one way round only": max((b - a) % size, (a - b) % size),
                },
            )


def _cuts(exercise: ModuleType) -> Iterator[Result]:
    """Check the number of cut links of a torus, and of a full wiring."""
    for wires in (wiring.torus(16), wiring.full(6)):
        half = set(range(wires.devices // 2))
        links = [link if place % 3 else link[::-1] for place, link in enumerate(wires.links)]
        target = sum((a in half) != (b in half) for a, b in links)
        inside = sum(a in half and b in half for a, b in links)
        yield expect(
            f"cut of {wires.name}",
            target,
            exercise.cut(links, half),
            "wrong number of links",
            "a link is cut when exactly one of its ends is in the half: section 1 (hole 2)",
            known={
                "links that touch the half": inside + target,
                "links inside the half": inside,
                "each link counted twice": 2 * target,
            },
        )


# ------------------------------------------------------------------------------------- hierarchical


def _machine(rank: int, nodes: tuple[int, ...]) -> list[int]:
    return [other for other, node in enumerate(nodes) if node == nodes[rank]]


def _leaders(nodes: tuple[int, ...]) -> list[int]:
    return [nodes.index(node) for node in sorted(set(nodes))]


def _groups(exercise: ModuleType, nodes: tuple[int, ...]) -> Iterator[Result]:
    """Check which ranks share a machine, and which rank leads it."""
    for rank in range(len(nodes)):
        target = _machine(rank, nodes)
        came = _listed(exercise.machine(rank, nodes))
        yield expect(
            f"machine of rank {rank}, machines {nodes}",
            target,
            came,
            "the wrong ranks of a machine",
            "nodes say which ranks share a machine, and neither their order nor rank // 2 does: "
            "section 4 (hole 3)",
            known={
                "a rank missing on its own machine": [other for other in target if other != rank],
                "ranks that follow each other": list(range(target[0], target[0] + len(target))),
            },
        )
    target = _leaders(nodes)
    came = _listed(exercise.leaders(nodes))
    yield expect(
        f"leaders, machines {nodes}",
        target,
        came,
        "not one rank of each machine",
        "the leader of machine m is the first rank whose machine is m: section 4 (hole 4)",
        known={"machines' numbers are not ranks": sorted(set(nodes))},
    )


def _listed(came: Any) -> Any:
    return list(came) if isinstance(came, Iterable) else came


def _all_reduce(exercise: ModuleType, nodes: tuple[int, ...]) -> Iterator[Result]:
    """Check that every rank has the sum, and that no more bytes than needed go between machines.

    The ring of the leaders sends the bytes that are needed.
    """
    task = f"all_reduce, machines {nodes}"
    size = len(nodes)
    lead = _leaders(nodes)
    parts: list[Part] = []

    def ranks(group: Group) -> Any:
        node = Part(group, _machine(group.rank, nodes), nodes)
        ring = Part(group, lead, nodes) if group.rank in lead else None
        parts.extend(part for part in (node, ring) if part is not None)
        return exercise.plain_all_reduce(node, ring, np.full(6, BASE**group.rank, np.int64))

    try:
        got = run(ranks, size=size, transport="threads-unbuffered", limit=LIMIT)
    except CommError as error:
        yield Result(
            task,
            False,
            "every rank returns",
            str(error).splitlines()[0],
            "ranks wait for each other",
            "the leaders among themselves, then each machine: every rank of a group makes the "
            "same call: section 4 (holes 5, 6)",
        )
        return
    for rank, total in enumerate(got):
        counts = [(int(total[0]) // BASE**other) % BASE for other in range(size)]
        wrong = [f"rank {other} {count} times" for other, count in enumerate(counts) if count != 1]
        own = set(_machine(rank, nodes))
        if rank not in lead:
            mistake = "a rank is never told"
            advice = "each leader tells its machine the sum over all ranks: section 4 (hole 6)"
        elif any(count > 1 for count in counts):
            mistake = "parts are added more than once, or scaled"
            advice = (
                "the sum of each machine goes once into the leaders' sum: section 4 (holes 5, 6)"
            )
        elif len(own) > 1 and [other for other in range(size) if counts[other]] == [rank]:
            mistake = "a leader has its own array, not a sum"
            advice = "not x, but what was added up from it: section 4 (holes 5, 6)"
        elif any(counts[other] == 0 for other in own):
            mistake = "a leader has lost its own machine's sum"
            advice = "the sums of all machines, this one's too: section 4 (holes 5, 6)"
        else:
            mistake = "a leader without other machines' sums"
            advice = "what the leaders have is added up among them: section 4 (hole 5)"
        yield Result(
            task,
            not wrong,
            "every rank in the sum once",
            f"{', '.join(wrong)} in rank {rank}'s",
            mistake,
            advice,
        )
    target = FORMULAS["all_reduce", "ring"].bytes_of(Case(len(lead), nbytes=48))
    across = sum(part.across for part in parts)
    yield Result(
        f"{task}, bytes between machines",
        across <= target + 16 * size,
        f"{target} bytes",
        f"{across} bytes",
        "not a ring of the leaders",
        "their ring sends a chunk a step: section 4 (hole 5)",
    )


# ------------------------------------------------------------------------------------------ α and β


def _seconds(exercise: ModuleType) -> Iterator[Result]:
    """Check the seconds of the flat ring and of the leaders' ring against the α-β model."""
    for number, name, of in ((7, "ring_seconds", 8), (8, "hierarchical_seconds", 2)):
        for count, nbytes, alpha, beta in (
            (of, 0, 1.0, 1.0),
            (of, 800, 0.0, 1.0),
            (5, 3000, 50.0, 0.5),
            (3, 100, 0.0, 1.0),  # chunks of no whole number of bytes on average
            (1, 9, 1.0, 1.0),
        ):
            target = 2 * (count - 1) * (alpha + nbytes / count * beta)
            yield expect(
                f"{name} of {count}, n={nbytes}, α={alpha:g}, β={beta:g}",
                target,
                getattr(exercise, name)(count, nbytes, alpha, beta),
                "not the α-β model",
                f"reduce-scatter and all-gather, a chunk a step: section 4 (hole {number})",
                known={
                    "whole tensors round the ring": 2 * (count - 1) * (alpha + nbytes * beta),
                    "a chunk is rounded down": 2 * (count - 1) * (alpha + nbytes // count * beta),
                    "half of the ring": target / 2,
                    "one step too many": 2 * count * (alpha + nbytes / count * beta),
                },
                same=np.isclose,
                show="{:g}".format,
            )


def _fit(exercise: ModuleType) -> Iterator[Result]:
    """Check that α and β are found from points that lie on a line."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    alpha = 4e-5
    beta = 2e-10
    came = tuple(float(value) for value in exercise.fit(sizes, alpha + beta * sizes))
    yield judge(
        "fit",
        len(came) == 2 and np.allclose(came, (alpha, beta), rtol=1e-6, atol=0),
        f"α={alpha:g} s, β={beta:g} s/B",
        ", ".join(f"{value:g}" for value in came),
        "not the line",
        "α is what a message of no bytes takes, β what each byte adds: section 5 (hole 9)",
        signs={
            "α and β swapped": np.allclose(came, (beta, alpha), atol=0),
            "bandwidth for β": np.isclose(came[-1], 1 / beta),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "04", *sys.argv[1:]]))
