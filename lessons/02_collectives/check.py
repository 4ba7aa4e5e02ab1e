"""Grades exercise 02: values, messages, and which rank heard of which, beside the library's
algorithms and formulas."""

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.collectives.pairwise import plain_all_to_all
from minidist.comm.collectives.tree import plain_broadcast
from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.errors import CommError
from minidist.grading import Result, expect
from minidist.launch import run
from minidist.testing import check_example
from minidist.testing.every_dtype import every_dtype

LIMIT = 60.0  # seconds for the ranks to return: of a busy machine; a deadlock is found at once
MOST = 40  # messages of a rank in one call: more than any way on eight ranks takes
SIZES = (5, 4, 2, 1)
OTHERS = {"broadcast": "plain_broadcast", "all_to_all": "plain_all_to_all", "barrier": "barrier"}
"""The function of each collective of the exercise."""


class Link:
    """A group as a student's rank sees it, with a log of the messages that the rank begins."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self.sends: list[int] = []  # the receivers, in order
        self.hears: list[int] = []  # the senders it has heard, or waits for

    def _count(self, dst: int) -> None:
        """Log a message. Raise CommError if a loop never ends."""
        self.sends.append(dst)
        if len(self.sends) > MOST:
            raise CommError(f"rank {self.rank} has begun more than {MOST} messages in one call")

    def send(self, outgoing: Any, *, dst: int) -> None:
        """Return when dst has taken it."""
        self._count(dst)
        self._group.send(outgoing, dst=dst)

    def recv(self, *, src: int) -> np.ndarray:
        """Return when src has sent it."""
        self.hears.append(src)
        return self._group.recv(src=src)

    def exchange(self, outgoing: Any, *, dst: int, src: int) -> np.ndarray:
        """Send and receive at once."""
        self._count(dst)
        self.hears.append(src)
        return self._group.exchange(outgoing, dst=dst, src=src)


Work = Callable[[Link], Any]

CUT_FROM = (plain_broadcast, plain_all_to_all)
ANSWERS = {
    7: "distance < group.size",
    8: "2 * distance",
    9: "2 * levels * (alpha + nbytes * beta)",
    10: "2 * (size - 1) * (alpha + nbytes / size * beta)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check every task, one after the other."""
    for size in SIZES:
        for root in {0, size // 2, size - 1}:
            yield from _broadcast(exercise, size, root)
    for size in SIZES:
        yield from _all_to_all(exercise, size)
    for size in (8, *SIZES):
        yield from _barrier(exercise, size)
    for verb, name in OTHERS.items():
        yield _other_arrays(getattr(exercise, name), verb)
    for algorithm in ("tree", "ring"):
        yield from _seconds(exercise, algorithm)


def _on_ranks(size: int, work: Work) -> tuple[list[Any] | None, list[Link], str]:
    """Run `work` on every rank; return (results, logs, error).

    If the ranks never end, the results are None, and `error` says why. Else `error` is empty.
    """
    links: dict[int, Link] = {}

    def ranks(group: Group) -> Any:
        return work(links.setdefault(group.rank, Link(group)))

    try:
        return (
            run(ranks, size=size, transport="threads-unbuffered", limit=LIMIT),
            _in_order(links),
            "",
        )
    except CommError as error:
        # The error says who waits for whom. The line of this file is left out.
        first = re.sub(r" at \S+:\d+", "", str(error).splitlines()[0])
        return None, _in_order(links), first


def _in_order(links: dict[int, Link]) -> list[Link]:
    return [links[rank] for rank in sorted(links)]


# ---------------------------------------------------------------------------------------- broadcast


def _broadcast(exercise: ModuleType, size: int, root: int) -> Iterator[Result]:
    """Check that every rank has the root's values, after P-1 messages."""
    task = f"broadcast, P={size}, root {root}"
    got, links, error = _on_ranks(
        size, lambda link: exercise.plain_broadcast(link, np.array([7.0, link.rank]), root)
    )
    wrong = [
        rank for rank, array in enumerate(got or ()) if array is None or list(array) != [7.0, root]
    ]
    if got is not None and wrong:
        have = "nothing" if got[wrong[0]] is None else str(list(map(int, got[wrong[0]])))
        yield Result(
            task,
            False,
            f"[7, {root}] on every rank",
            f"{have} on rank {wrong[0]}",
            "root ignored" if root else "wrong values",
            _advice_root(root),
        )
    told = [dst for link in links for dst in link.sends]
    twice = sorted({rank for rank in told if told.count(rank) > 1 or rank == root})
    if root in twice:
        yield Result(
            task,
            False,
            "no rank tells the root",
            f"a rank sends to rank {root}",
            "the root is told",
            _advice_root(root)
            if root
            else "the last places have no place further on: section 2.2 (hole 2)",
        )
    if twice:
        yield Result(
            task,
            False,
            "each rank is told once",
            f"rank {twice[0]} is told {told.count(twice[0])} times",
            "told twice",
            "past the last place there is no rank: section 2.2 (hole 2)",
        )
    if got is None:
        deaf = [
            f"rank {link.rank} waits for rank {link.hears[-1]}"
            for link in links
            if link.hears and link.rank not in links_of(links, link.hears[-1])
        ]
        yield Result(
            task,
            False,
            "every rank returns",
            ", ".join(deaf) or error,
            "waits for a rank that never sends",
            "the array goes from each place that has it to the place `distance` further on, if there is one: "
            "section 2.2 (holes 1 to 4)",
        )
        return
    yield expect(
        task,
        FORMULAS["broadcast", "tree"].messages_of(Case(size)),
        len(told),
        "wrong number of messages",
        "every rank but the root is told, once: section 2.2",
        show="{} messages".format,
    )


def links_of(links: list[Link], rank: int) -> list[int]:
    """Return the ranks to which a rank sent; an empty list if the rank never began."""
    return next((link.sends for link in links if link.rank == rank), [])


def _advice_root(root: int) -> str:
    return (
        f"with root {root}, place 0 is rank {root}: count places from the root and back "
        "again, modulo P: section 2.2"
    )


# --------------------------------------------------------------------------------------- all-to-all


def _all_to_all(exercise: ModuleType, size: int) -> Iterator[Result]:
    """Check that every part arrives where it belongs, with one message per part."""
    task = f"all_to_all, P={size}"
    got, links, error = _on_ranks(
        size,
        lambda link: exercise.plain_all_to_all(
            link, [np.array([100 * link.rank + dst]) for dst in range(size)]
        ),
    )
    for link in links:
        missed = [rank for rank in range(size) if rank != link.rank and rank not in link.sends]
        if got is not None and missed:
            yield Result(
                task,
                False,
                f"rank {link.rank} sends to every other rank",
                f"never to rank {missed[0]}",
                "a partner is left out",
                "another partner in every step: section 2.5 (hole 5)",
            )
    if got is None:
        pairs = [
            link for link in links if link.sends and link.hears and link.sends[-1] == link.hears[-1]
        ]
        if pairs and all(
            link.sends[-1] == link.hears[-1] for link in links if link.sends and link.hears
        ):
            yield Result(
                task,
                False,
                "every rank returns",
                f"rank {pairs[0].rank} sends to rank {pairs[0].sends[-1]} and waits for the same",
                "sends to the rank it hears from",
                "a rank sends `step` places on, and receives from `step` places back: section "
                "2.5 (holes 5, 6)",
            )
        yield Result(
            task,
            False,
            "every rank returns",
            error,
            "partners do not match",
            "if r sends to r + s, then r + s must expect it from r: section 2.5 (holes 5 and 6)",
        )
        return
    for rank, parts in enumerate(got):
        values = [int(part[0]) for part in parts]
        if values != [100 * src + rank for src in range(size)]:
            yield Result(
                task,
                False,
                str([100 * src + rank for src in range(size)]),
                f"{values} on rank {rank}",
                "parts in the wrong places",
                "what comes from src is part src: section 2.5 (hole 6)",
            )
    yield expect(
        task,
        FORMULAS["all_to_all", "pairwise"].messages_of(Case(size)),
        sum(len(link.sends) for link in links),
        "wrong number of messages",
        "P-1 a rank: section 2.5",
        show="{} messages".format,
    )


# ------------------------------------------------------------------------------------------ barrier


def _barrier(exercise: ModuleType, size: int) -> Iterator[Result]:
    """Check that no rank leaves before it has heard of all ranks.

    The ranks must need as few steps as the library.
    """
    task = f"barrier, P={size}"
    got, links, error = _on_ranks(size, lambda link: exercise.barrier(link))
    if got is None:
        yield Result(
            task,
            False,
            "every rank returns",
            error,
            "the loop never ends"
            if any(len(link.sends) > MOST for link in links)
            else "ranks take different numbers of steps",
            "all ranks must leave the loop after the same step: section 2.6 (holes 7 and 8)",
        )
        return
    target = FORMULAS["barrier", "dissemination"].messages_of(Case(size)) // size
    steps = max(len(link.sends) for link in links)
    unheard = sorted(set(range(size)) - _heard_of(links, 0))
    if unheard:
        yield Result(
            task,
            False,
            "no rank leaves before all have come",
            f"rank 0 left without having heard of rank {', '.join(map(str, unheard))}",
            "left too early",
            "after a message from distance d a rank has heard of 2d ranks, itself among them; "
            "it may leave when that is all of them: section 2.6 (hole 7)",
        )
    yield expect(
        task,
        target,
        steps,
        "more steps than needed",
        "each message can tell of all that its sender has heard of, so the distance "
        "doubles: section 2.6 (hole 8)",
        show="{} messages a rank".format,
    )


def _heard_of(links: list[Link], rank: int) -> set[int]:
    """Return every rank whose message has reached `rank`, directly or through other ranks: a
    message passes on all that its sender has received."""
    heard = [{link.rank} for link in links]
    for step in range(max((len(link.hears) for link in links), default=0)):
        heard = [
            heard[link.rank] | (heard[link.hears[step]] if step < len(link.hears) else set())
            for link in links
        ]
    return heard[rank]


# ------------------------------------------------------------------------------------ other arrays


def _other_arrays(function: Callable[..., Any], verb: str) -> Result:
    """Check other dtypes, memory layouts and lengths with the checker of minidist.testing."""
    task = f"{verb}, other arrays"
    examples = list(every_dtype(verb, sizes=SIZES, dtypes=("float64", "int8"), subgroups=False))
    for example in examples:
        try:
            check_example(example, function, limit=LIMIT)
        except AssertionError as error:
            told = str(error).splitlines()
            return Result(
                task,
                False,
                "as NumPy",
                f"{told[0]}: {told[1].strip()}: {told[2].strip()}",
                "not for every array",
                "arrays of any dtype and length must arrive as they left: section 2",
            )
    return Result(task, True, "as NumPy", f"{len(examples)} examples as NumPy")


# ------------------------------------------------------------------------------------ the α-β model


def _seconds(exercise: ModuleType, algorithm: str) -> Iterator[Result]:
    """Check the student's seconds against the library's path: waits·α + bytes·β."""
    for size, nbytes, alpha, beta in (
        (8, 0, 1.0, 1.0),
        (8, 800, 0.0, 1.0),
        (6, 3001, 50.0, 0.5),
        (1, 100, 1.0, 1.0),
    ):
        path = PATHS["all_reduce", algorithm](size)
        target = path.waits * alpha + path.moved * nbytes * beta
        round_the_ring = 2 * (size - 1) * (alpha + nbytes * beta)
        ring = algorithm == "ring"
        yield expect(
            f"seconds of the {algorithm}, P={size}, n={nbytes}, α={alpha:g}, β={beta:g}",
            target,
            exercise.seconds(algorithm, size, nbytes, alpha, beta),
            "not the α-β model",
            f"{path.waits} messages wait for each other, {path.moved:g} n bytes go: read section "
            f"3 again (hole {10 if ring else 9})",
            known={
                "half of the way": target / 2,
                "whole tensors round the ring" if ring else "as many steps as ranks": (
                    round_the_ring
                ),
            },
            same=np.isclose,
            show="{:g}".format,
        )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "02", *sys.argv[1:]]))
