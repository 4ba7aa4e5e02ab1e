"""Grades exercise 03: values, messages and bytes, held against the library's own ring."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.collectives.ring import plain_all_gather, plain_all_reduce, plain_reduce_scatter
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import DeadlockError, MismatchError, TimeoutError
from minidist.grading import Result, TaskFailed, expect, sent_since, totals
from minidist.launch import run

LIMIT = 60.0  # seconds for the ranks to return: of a busy machine; a deadlock is found at once
# Rank r contributes BASE**r. The digits of a sum say how often each rank's part is in it.
BASE = 16
# (ranks, elements); among them P = 1, n < P and n = 0.
SIZES = ((4, 4096), (1, 5), (2, 6), (3, 10), (4, 3), (5, 0))


class Link:
    """A group as a student's rank sees it, with a log of what the rank does.

    The rank sees its neighbours and three verbs.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.sends: list[tuple[int, int]] = []  # (destination, elements)
        self.doing = "nothing"

    def exchange(self, outgoing: np.ndarray, *, dst: int, src: int) -> np.ndarray:
        """Send and receive at once."""
        self.sends.append((dst, outgoing.size))
        self.doing = "exchange"
        return self._group.exchange(outgoing, dst=dst, src=src)

    def send(self, outgoing: np.ndarray, *, dst: int) -> None:
        """Return when dst has taken it."""
        self.sends.append((dst, outgoing.size))
        self.doing = "send"
        self._group.send(outgoing, dst=dst)

    def recv(self, *, src: int) -> np.ndarray:
        """Return when src has sent it."""
        self.doing = "recv"
        return self._group.recv(src=src)


CUT_FROM = (plain_reduce_scatter, plain_all_gather, plain_all_reduce)


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check every task, one after the other."""
    links: dict[int, Link] = {}
    for size in (4, 3, 5):  # an index that is off by 4 is right on 4 ranks only
        task = f"reduce_scatter on {size} ranks ends"
        ranks = _on_ranks(task, links, size, _contributions, exercise.plain_reduce_scatter)
        yield _finished_chunk(ranks)
    for size, elements in SIZES:
        task = f"all_reduce on {size} ranks ends"
        measured = _on_ranks(task, links, size, _one_call, exercise, elements)
        yield from _steps(size, elements, measured, links)
        yield _values(size, elements, measured)
        yield _cost(size, elements, measured)


def _on_ranks(
    task: str, links: dict[int, Link], size: int, work: Callable[..., Any], *args: Any
) -> list[Any]:
    """Return the result of `work` on each rank. Raises: TaskFailed if the ranks never return."""
    links.clear()
    try:
        return run(work, *args, links, size=size, transport="threads-unbuffered", limit=LIMIT)
    except (TimeoutError, DeadlockError):
        raise TaskFailed(_stuck(task, links)) from None
    except MismatchError:
        counts = [len(links[rank].sends) for rank in sorted(links)]
        if len(set(counts)) == 1:
            raise
        result = Result(
            task,
            False,
            "as many messages from each rank",
            ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            "ranks make different numbers of steps",
            "no rank is special, each half takes P-1 steps on every rank: section 3.2 (hole 4)",
        )
        raise TaskFailed(result) from None


def _contributions(group: Group, reduce_scatter: Any, links: dict[int, Link]) -> list[np.ndarray]:
    """Return this rank's chunks after the student's function.

    Before it, each chunk holds the rank's contribution BASE**rank, and the chunk's number.
    """
    link = links.setdefault(group.rank, Link(group))
    chunks = [np.array([BASE**group.rank, chunk], dtype=np.int64) for chunk in range(group.size)]
    reduce_scatter(link, chunks)
    return chunks


def _one_call(
    group: Group, exercise: ModuleType, elements: int, links: dict[int, Link]
) -> dict[str, Any]:
    """Run the student's all_reduce and the library's ring on the same values.

    Return the results of both, and the messages and bytes of both.
    """
    link = links.setdefault(group.rank, Link(group))
    x = np.arange(elements, dtype=np.float64) + 1000.0 * group.rank
    before = totals(group.ledger)
    mine = exercise.plain_all_reduce(link, x)
    mine_cost = sent_since(group.ledger, before)
    before = totals(group.ledger)
    library = group.all_reduce(x, algorithm="ring")
    return {
        "mine": mine,
        "library": library,
        "cost": mine_cost,
        "target": sent_since(group.ledger, before),
    }


def _finished_chunk(ranks: list[list[np.ndarray]]) -> Result:
    """Check that after reduce_scatter chunk r of rank r holds every rank's chunk r once."""
    size = len(ranks)
    task = f"reduce_scatter on {size} ranks, values"
    for rank, chunks in enumerate(ranks):
        story = _who(chunks[rank][:1], size)
        if not story and chunks[rank][1] != size * rank:
            story = "mixes other chunks in"
        if story:
            return Result(
                task,
                False,
                f"chunk {rank} of rank {rank} sums ranks 0..{size - 1} once",
                story,
                "wrong chunk index",
                "a rank must pass on the chunk it has just added to: read section 3.1 again "
                "(holes 1 and 2)",
            )
    return Result(task, True, "every rank's chunk complete", "every rank's chunk complete")


def _who(chunk: np.ndarray, size: int) -> str:
    """Return which ranks a chunk misses or counts more than once, as text.

    The text is empty if the chunk counts each rank once.
    """
    for value in chunk.tolist():
        counts = [(int(value) // BASE**rank) % BASE for rank in range(size)]
        missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
        repeated = [f"{rank} ({count} times)" for rank, count in enumerate(counts) if count > 1]
        parts = [
            f"misses rank {', '.join(missing)}" if missing else "",
            f"counts rank {', '.join(repeated)}" if repeated else "",
        ]
        if any(parts):
            return " and ".join(part for part in parts if part)
    return ""


def _steps(
    size: int, elements: int, measured: list[dict[str, Any]], links: dict[int, Link]
) -> Iterator[Result]:
    """Yield a failed result for each mistake in a rank's messages.

    A mistake is a wrong length, a wrong number of messages, or a wrong destination.
    """
    largest = -(-elements // size)
    for rank, figures in enumerate(measured):
        messages, nbytes = figures["cost"]
        target_messages, target_bytes = figures["target"]
        where = f"P={size}, n={elements}, rank {rank}"
        whole = [count for _, count in links[rank].sends if count > largest]
        if whole:
            yield Result(
                f"{where}, bytes sent",
                False,
                size_text(target_bytes),
                size_text(nbytes),
                "whole tensors",
                f"a message carried {whole[0]} elements where a chunk has at most {largest}: "
                "read section 2 again",
            )
        if messages == target_messages - 1:
            yield Result(
                f"{where}, messages",
                False,
                str(target_messages),
                str(messages),
                "one step short",
                "the last all-gather step is missing, one chunk stays stale: read section 3.2 "
                "again (hole 4)",
            )
        if messages != target_messages:
            yield Result(
                f"{where}, messages",
                False,
                str(target_messages),
                str(messages),
                "wrong number of steps",
                "each half of the ring takes P-1 steps: read section 3.3 again",
            )
        astray = [dst for dst, _ in links[rank].sends if dst != links[rank].next_rank]
        if astray:
            yield Result(
                f"{where}, neighbours",
                False,
                f"only rank {links[rank].next_rank}",
                f"rank {astray[0]}",
                "not a ring",
                "every message goes to next_rank: read section 3 again",
            )


def _values(size: int, elements: int, measured: list[dict[str, Any]]) -> Result:
    """Check every rank's all_reduce against the library's."""
    task = f"P={size}, n={elements}, values"
    for rank, figures in enumerate(measured):
        mine = figures["mine"]
        library = figures["library"]
        if np.shape(mine) != np.shape(library):
            return Result(
                task,
                False,
                f"shape {np.shape(library)}",
                f"shape {np.shape(mine)} on rank {rank}",
                "wrong shape",
                "all_reduce returns an array like x",
            )
        if not np.allclose(mine, library, rtol=1e-12):
            wrong = int(np.flatnonzero(~np.isclose(mine, library, rtol=1e-12))[0])
            return Result(
                task,
                False,
                f"x[{wrong}] = {library[wrong]:g}",
                f"x[{wrong}] = {mine[wrong]:g} on rank {rank}",
                "stale or doubled chunk",
                "a finished chunk replaces the leftover, in the order in which the "
                "chunks arrive: read section 3.2 again (holes 5 and 6)",
            )
    return Result(task, True, "as the library's ring", "as the library's ring")


def _cost(size: int, elements: int, measured: list[dict[str, Any]]) -> Result:
    """Check the messages and bytes of the rank that sends most."""
    messages, nbytes = (max(figures["cost"][part] for figures in measured) for part in (0, 1))
    most = max(figures["target"][1] for figures in measured)
    return expect(
        f"P={size}, n={elements}, cost of a rank",
        most,
        nbytes,
        "wrong chunks",
        "each step sends one chunk: section 3.3",
        show=lambda sent: f"{messages} messages, {size_text(sent)}",
    )


def _stuck(task: str, links: dict[int, Link]) -> Result:
    """Return a failed result that says what each rank was doing when no rank could continue."""
    doing = ", ".join(f"rank {rank}: {links[rank].doing}" for rank in sorted(links))
    if links and all(link.doing == "send" for link in links.values()):
        return Result(
            task,
            False,
            "every rank returns",
            doing,
            "deadlock: all ranks send first",
            "each send waits for a receive that no rank has reached; send and receive at once with "
            "group.exchange: read section 3.4 again (hole 3)",
        )
    if links and all(link.doing == "recv" for link in links.values()):
        return Result(
            task,
            False,
            "every rank returns",
            doing,
            "deadlock: all ranks receive first",
            "no rank has sent yet; send and receive at once with group.exchange: read section 3.4 "
            "again (hole 3)",
        )
    return Result(
        task,
        False,
        "every rank returns",
        doing,
        "deadlock",
        "a rank waits for a message that no rank sends: to which rank does each send, from which does "
        "it receive, and how many times? sections 3 and 3.3",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "03", *sys.argv[1:]]))
