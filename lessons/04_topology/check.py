"""Grades exercise 04: counts against the lesson's wirings, sums and bytes between machines against the library."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.errors import CommError
from minidist.grading import Result, load_module
from minidist.launch import run

wiring = load_module(Path(__file__).resolve().parent / "wiring.py", "04")
LIMIT = 60.0  # seconds for the ranks to return: of a busy machine; a deadlock is found at once
BASE = 16    # rank r contributes BASE**r, so the digits of a sum tell whose parts are in it, and how often
JOBS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 2), (0, 1, 2), (0, 0), (0,))


class Outsider(ValueError):
    """A rank calls for a ring that it is not in."""


class Link:
    """What a student's rank sees of a group that is spread over machines, with a log of what it does."""

    def __init__(self, group: Group, nodes: tuple[int, ...]) -> None:
        self._group = group
        self.rank, self.size, self.nodes = group.rank, group.size, nodes
        self.doing = "nothing"
        self.across = 0                     # bytes to other machines
        self.rings: list[list[int]] = []

    def send(self, outgoing: np.ndarray, *, dst: int) -> None:
        """Return when dst has taken it."""
        self.doing = f"sends to rank {dst}"
        self.across += outgoing.nbytes * (self.nodes[dst] != self.nodes[self.rank])
        self._group.send(outgoing, dst=dst)

    def recv(self, *, src: int) -> np.ndarray:
        """Return when src has sent it."""
        self.doing = f"waits for rank {src}"
        return self._group.recv(src=src)

    def ring_all_reduce(self, ranks: Any, x: np.ndarray) -> np.ndarray:
        """The sum over `ranks`, this rank among them: whole arrays to the first, counted as the ring of lesson 03."""
        ranks = list(ranks)
        self.rings.append(ranks)
        self.doing = f"all-reduces among ranks {ranks}"
        if self.rank not in ranks:
            raise Outsider(f"rank {self.rank} calls ring_all_reduce(ranks={ranks}) and is not among them")
        chunk = -(-x.nbytes // len(ranks)) if len(ranks) > 1 else 0
        self.across += 2 * (len(ranks) - 1) * chunk
        total = x.copy()
        if self.rank == ranks[0]:
            for src in ranks[1:]:
                total += self._group.recv(src=src)
            for dst in ranks[1:]:
                self._group.send(total, dst=dst)
            return total
        self._group.send(x, dst=ranks[0])
        return self._group.recv(src=ranks[0])

ANSWERS = {
    1: "min((a - b) % size, (b - a) % size)",
    2: "sum((a in half) != (b in half) for a, b in links)",
    3: "link.nodes.index(link.nodes[link.rank])",
    4: "[rank for rank in range(link.size) if link.nodes[rank] == link.nodes[link.rank] and rank != link.rank]",
    5: "[link.nodes.index(node) for node in sorted(set(link.nodes))]",
    6: "followers",
    7: "2 * (size - 1) * (alpha + nbytes / size * beta)",
    8: "2 * (machines - 1) * (alpha + nbytes / machines * beta)",
    9: "tuple(np.polyfit(sizes, seconds, 1)[::-1])",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Every task, one after the other."""
    yield from _hops(exercise)
    yield from _cuts(exercise)
    for nodes in JOBS:
        yield from _all_reduce(exercise, nodes)
    yield from _seconds(exercise)
    yield from _fit(exercise)


def _hops(exercise: ModuleType) -> Iterator[Result]:
    """Hops on rings, beside those counted on the lesson's wiring."""
    for size in (8, 5):
        for a, b in ((0, 1), (1, 0), (0, size - 1), (size - 2, 1), (3, 3)):
            target, came = wiring.ways(wiring.ring(size), a)[b][0], exercise.ring_hops(a, b, size)
            mistake = "wrong number of hops"
            if came == abs(a - b):
                mistake = "a line, not a ring"
            elif came in ((b - a) % size, (a - b) % size):
                mistake = "one way round only"
            yield Result(f"hops from {a} to {b}, ring of {size}", bool(came == target), str(target), str(came), mistake,
                         "a ring is closed, and a message may go round either way: section 1 (hole 1)")


def _cuts(exercise: ModuleType) -> Iterator[Result]:
    """Links across a cut of a torus, and of a wiring that joins each with each."""
    for wires in (wiring.torus(16), wiring.full(6)):
        half = set(range(wires.devices // 2))
        target = sum((a in half) != (b in half) for a, b in wires.links)
        inside = sum(a in half and b in half for a, b in wires.links)
        came = exercise.cut(wires.links, half)
        mistake = {2 * target: "each link counted twice", inside: "links inside the half",
                   inside + target: "links that touch the half"}.get(came, "wrong number of links")
        yield Result(f"cut of {wires.name}", bool(came == target), str(target), str(came), mistake,
                     "a link is cut when exactly one of its ends is in the half: section 1 (hole 2)")


# ------------------------------------------------------------------------------------------------ hierarchical

def _all_reduce(exercise: ModuleType, nodes: tuple[int, ...]) -> Iterator[Result]:
    """The sum on every rank, and no more bytes between machines than the leaders' ring sends."""
    task, size = f"all_reduce, machines {nodes}", len(nodes)
    links: dict[int, Link] = {}

    def ranks(group: Group) -> Any:
        link = links.setdefault(group.rank, Link(group, nodes))
        return exercise.all_reduce(link, np.full(6, BASE**group.rank, np.int64))

    try:
        got = run(ranks, size=size, transport="threads-unbuffered", limit=LIMIT)
    except (CommError, Outsider) as error:
        yield from _stuck(task, links, nodes, str(error).splitlines()[0])
        return
    yield from _among(task, links, nodes)
    for rank, total in enumerate(got):
        counts = [(int(total[0]) // BASE**other) % BASE for other in range(size)]
        wrong = [f"rank {other} {count} times" for other, count in enumerate(counts) if count != 1]
        if wrong:
            yield Result(task, False, "every rank in the sum once", f"{', '.join(wrong)} in rank {rank}'s",
                         "a rank missing or added twice", "each follower is added once: section 4 (hole 4)")
    leaders = _leaders(nodes)
    case = Case(len(leaders), nbytes=48)
    target = FORMULAS["all_reduce", "ring"].bytes_of(case)
    across = sum(link.across for link in links.values())
    yield Result(f"{task}, bytes between machines", across <= target + 16 * size, f"{target} bytes", f"{across} bytes",
                 "followers talk to other machines", "a follower's leader is on its own machine: section 4 (hole 3)")


def _leaders(nodes: tuple[int, ...]) -> list[int]:
    return [nodes.index(node) for node in sorted(set(nodes))]


def _among(task: str, links: dict[int, Link], nodes: tuple[int, ...]) -> Iterator[Result]:
    """A result where a ring was not of the leaders; nothing where all were."""
    for rank, link in sorted(links.items()):
        for ranks in link.rings:
            if ranks == sorted(set(nodes)) != _leaders(nodes):
                yield Result(task, False, f"a ring of ranks {_leaders(nodes)}", f"of {ranks}, on rank {rank}",
                             "machines' numbers are not ranks", "the leader of machine m is the first rank whose "
                             "machine is m: section 4 (hole 5)")
            elif ranks != _leaders(nodes) and rank in _leaders(nodes):
                yield Result(task, False, f"a ring of ranks {_leaders(nodes)}", f"of {ranks}, on rank {rank}",
                             "not a ring of leaders", "one rank of each machine, and no others: section 4 (hole 5)")


def _stuck(task: str, links: dict[int, Link], nodes: tuple[int, ...], error: str) -> Iterator[Result]:
    """Why the ranks wait for each other."""
    doing = "; ".join(f"rank {rank} {link.doing}" for rank, link in sorted(links.items()))
    for rank, link in links.items():
        words = link.doing.split()
        peer = int(words[-1]) if words[-1].isdigit() else None
        if peer == rank:
            yield Result(task, False, "every rank returns", doing, "a leader among its own followers",
                         "followers are the others: section 4 (hole 4)")
    yield from _among(task, links, nodes)
    foreign = [link for link in links.values() if link.doing.split()[-1].isdigit()
               and nodes[int(link.doing.split()[-1])] != nodes[link.rank]]
    if any(link.rank in _leaders(nodes) for link in foreign if link.doing.startswith("sends") and link.rings):
        yield Result(task, False, "every rank returns", doing, "a leader tells another machine's ranks",
                     "each leader tells its own followers: section 4 (hole 6)")
    if foreign:
        yield Result(task, False, "every rank returns", doing, "a leader on another machine",
                     "nodes say which ranks share a machine; neither rank 0 nor rank // 2 does: section 4 (hole 3)")
    if any(link.rings for link in links.values()):
        yield Result(task, False, "every rank returns", doing, "a rank is never told",
                     "each leader tells all its followers: section 4 (hole 6)")
    yield Result(task, False, "every rank returns", f"{doing}; {error}", "ranks wait for each other",
                 "each follower sends once and hears once, and its leader the other way round: section 4")


# ---------------------------------------------------------------------------------------------------------- α and β

def _seconds(exercise: ModuleType) -> Iterator[Result]:
    """Flat ring and leaders' ring by the α-β model."""
    for number, name, of in ((7, "ring_seconds", 8), (8, "hierarchical_seconds", 2)):
        for count, nbytes, alpha, beta in ((of, 0, 1.0, 1.0), (of, 800, 0.0, 1.0), (5, 3000, 50.0, 0.5),
                                           (1, 9, 1.0, 1.0)):
            target = 2 * (count - 1) * (alpha + nbytes / count * beta)
            came = getattr(exercise, name)(count, nbytes, alpha, beta)
            mistake = "not the α-β model"
            if np.isclose(came, 2 * (count - 1) * (alpha + nbytes * beta)):
                mistake = "whole tensors round the ring"
            elif np.isclose(came, target / 2):
                mistake = "half of the ring"
            elif np.isclose(came, 2 * count * (alpha + nbytes / count * beta)):
                mistake = "one step too many"
            yield Result(f"{name} of {count}, n={nbytes}, α={alpha:g}, β={beta:g}", bool(np.isclose(came, target)),
                         f"{target:g}", f"{came:g}", mistake,
                         f"reduce-scatter and all-gather, a chunk a step: section 4 (hole {number})")


def _fit(exercise: ModuleType) -> Iterator[Result]:
    """α and β of points that lie on a line."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    alpha, beta = 4e-5, 2e-10
    came = tuple(float(value) for value in exercise.fit(sizes, alpha + beta * sizes))
    mistake = "not the line"
    if np.allclose(came, (beta, alpha), atol=0):
        mistake = "α and β swapped"
    elif np.isclose(came[-1], 1 / beta):
        mistake = "bandwidth for β"
    yield Result("fit", len(came) == 2 and bool(np.allclose(came, (alpha, beta), rtol=1e-6, atol=0)),
                 f"α={alpha:g} s, β={beta:g} s/B", ", ".join(f"{value:g}" for value in came), mistake,
                 "α is what a message of no bytes takes, β what each byte adds: section 5 (hole 9)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "04", *sys.argv[1:]]))
