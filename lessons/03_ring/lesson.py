"""Lesson 03: ring all-reduce, measured: bytes, messages and time, compared with the formulas.

mpirun -n 4 python lessons/03_ring/lesson.py
python lessons/03_ring/lesson.py                       # no launcher: eight threads
python lessons/03_ring/lesson.py --break send-first    # see README.md, section 5
"""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.collectives import ring as ring_family
from minidist.comm.collectives.naive import plain_all_reduce
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.errors import DeadlockError, MismatchError
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.lab import median_seconds
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson

ELEMENTS = 840 * 256  # of float32: 840 is divisible by every P from 1 to 8
FLOAT32 = 4


def record_messages(group: Group) -> list[dict[str, Any]]:
    """Record the messages of one ring all-reduce; return them by step and sender on rank 0, and an
    empty list elsewhere.

    Each: src, dst (group ranks), chunk, nbytes, step (counted from 0 at each sender), holds (the
    ranks whose parts it contains).
    """
    events: list[Any] = []
    stop = group.ledger.subscribe(events.append)
    group.all_reduce(np.arange(60.0 * group.size), algorithm="ring")
    stop()
    sent = [event.details for event in events if event.kind == "message"]
    mine = [
        {
            "src": group.rank,
            "dst": group.world_ranks.index(details["dst"]),
            "chunk": details["chunk"],
            "nbytes": details["nbytes"],
            "step": step,
        }
        for step, details in enumerate(sent)
    ]
    messages = sorted(
        (message for rank in gather_records(group, mine) or [] for message in rank),
        key=lambda message: (message["step"], message["src"]),
    )
    return contributions(messages, group.size)


def contributions(messages: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Follow the chunks through the recorded messages: whose parts were in each when it was
    sent."""
    holds = [[{rank} for _ in range(size)] for rank in range(size)]  # by rank, by chunk
    for step in range(2 * (size - 1)):
        now = [message for message in messages if message["step"] == step]
        carried = [set(holds[message["src"]][message["chunk"]]) for message in now]
        for message, parts in zip(now, carried, strict=True):
            message["holds"] = sorted(parts)
            adds = step < size - 1
            holds[message["dst"]][message["chunk"]] = (
                parts | holds[message["dst"]][message["chunk"]] if adds else parts
            )
    return messages


def ring_all_reduce(group: Group, x: np.ndarray) -> np.ndarray:
    """All-reduce by the library's ring, not by the algorithm that `auto` would choose."""
    return group.all_reduce(x, algorithm="ring")


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Where the plain way is hot")
    hot_link(group, page)
    page.heading("3  The messages of one ring all-reduce")
    messages_of_one_ring(group, page)
    page.heading("3.3  What a rank sends, and how long it takes")
    bytes_and_messages(group, page)
    seconds(group, page)
    page.heading("3.5  Rounding")
    rounding(group, page)
    page.heading("6  'First broadcast, then add' (N3:26)")
    broadcast_then_add(group, page)


def messages_of_one_ring(group: Group, page: Page) -> None:
    """Show every recorded message: sender, receiver, chunk, and the ranks whose parts it
    contains."""
    ring = group.split(0 if group.rank < 4 else 1)
    recorded = record_messages(ring) if group.rank < 4 else []
    if not recorded:
        return
    size = ring.size
    rows = []
    for step in range(2 * (size - 1)):
        now = sorted((m for m in recorded if m["step"] == step), key=lambda m: m["src"])
        half = "add" if step < size - 1 else "pass on"
        rows.append(
            [
                f"{half} {step % (size - 1)}",
                *(f"c{m['chunk']} ({'+'.join(map(str, m['holds']))})" for m in now),
            ]
        )
    page.table(
        f"One all-reduce on {size} ranks, as recorded",
        ["step", *(f"r{rank} to r{(rank + 1) % size}" for rank in range(size))],
        rows,
        note="add: reduce-scatter, pass on: all-gather; c2 (0+3): chunk 2 with the parts of "
        "ranks 0 and 3",
    )


def bytes_and_messages(group: Group, page: Page) -> None:
    """Compare the busiest rank's bytes and messages with 2(P-1)/P n and 2(P-1), for P = 1 ..
    size."""
    rows = []
    nbytes = ELEMENTS * FLOAT32
    for size in range(1, group.size + 1):
        part = group.split(0 if group.rank < size else 1)
        if group.rank >= size:
            continue
        messages, ring = busiest(part, ring_all_reduce)
        _, loop = busiest(part, ring_family.plain_all_reduce)
        _, plain = busiest(part, plain_all_reduce)
        formula = 2 * (size - 1) * nbytes // size
        rows.append(
            [
                size,
                messages,
                2 * (size - 1),
                size_text(ring),
                size_text(formula),
                f"{ring / nbytes:.3f} n",
                verdict(ring, formula),
                verdict(loop, formula),
                size_text(plain),
            ]
        )
    page.table(
        f"n = {size_text(nbytes)}: the busiest rank's all-reduce",
        [
            "P",
            "messages",
            "2(P-1)",
            "ring: sent",
            "2(P-1)/P n",
            "",
            "",
            "section 3's loop",
            "plain: rank 0 sent",
        ],
        rows,
        note="bytes hardly grow, messages do: 'constant' (N1:42) is half the truth",
    )


def busiest(group: Group, all_reduce: Any) -> tuple[int, int]:
    """Return (messages, bytes) of the rank that sends most in one all-reduce of ELEMENTS
    float32."""
    x = np.ones(ELEMENTS, np.float32)
    before = totals(group.ledger)
    total = all_reduce(group, x)
    mine = np.array(sent_since(group.ledger, before))
    if not np.all(total == group.size):
        raise ValueError(f"rank {group.rank}: the sum of {group.size} ones came out as {total[0]}")
    with group.ledger.control():
        most = group.all_reduce(mine, op="max")
    return int(most[0]), int(most[1])


def hot_link(group: Group, page: Page) -> None:
    """Show the bytes that each rank sends and receives, plain and ring.

    Received bytes are those that the other ranks' events say they sent here.
    """
    figures = {
        name: traffic(group, work)
        for name, work in (("plain", plain_all_reduce), ("ring", ring_all_reduce))
    }
    rows = []
    if figures["plain"]:
        for rank in range(group.size):
            cells = [
                figures[name][kind][rank]
                for name in ("plain", "ring")
                for kind in ("sent", "received")
            ]
            rows.append([f"rank {rank}", *(size_text(cell) for cell in cells)])
    page.table(
        "Bytes through each rank's link",
        ["", "plain: sent", "plain: received", "ring: sent", "ring: received"],
        rows,
        note="the plain way makes rank 0 as slow as all of them together; in a ring no rank is "
        "special",
    )


def traffic(group: Group, all_reduce: Any) -> dict[str, list[int]]:
    """Return {"sent": [...], "received": [...]}, bytes by rank, on rank 0; an empty dict
    elsewhere."""
    events: list[Any] = []
    stop = group.ledger.subscribe(events.append)
    all_reduce(group, np.ones(ELEMENTS, np.float32))
    stop()
    mine = [
        (group.world_ranks.index(event.details["dst"]), event.details["nbytes"])
        for event in events
        if event.kind == "message"
    ]
    by_rank = gather_records(group, mine) or []
    if not by_rank:
        return {}
    sent = [sum(nbytes for _, nbytes in messages) for messages in by_rank]
    received = [
        sum(nbytes for messages in by_rank for dst, nbytes in messages if dst == rank)
        for rank in range(group.size)
    ]
    return {"sent": sent, "received": received}


def broadcast_then_add(group: Group, page: Page) -> None:
    """Compare N3:26, taken literally, with the ring: the same chunk on every rank, P times the
    bytes."""
    x = np.arange(ELEMENTS, dtype=np.float32) % 7 + group.rank
    rows = []
    results = []
    for name, work in (
        ("broadcast, then add (N3:26)", literally),
        ("ring reduce-scatter", lambda g, y: g.reduce_scatter(y, algorithm="ring")),
    ):
        before = totals(group.ledger)
        results.append(work(group, x))
        messages, nbytes = sent_since(group.ledger, before)
        rows.append([name, messages, size_text(nbytes), f"{nbytes / x.nbytes:.3f} n"])
    same = "the same numbers" if np.allclose(results[0], results[1]) else "different numbers"
    page.table(
        f"Rank 0's reduce-scatter on {group.size} ranks",
        ["", "messages", "bytes sent", ""],
        rows,
        note=f"{same}; (P-1) n against (P-1)/P n",
    )


def literally(group: Group, x: np.ndarray) -> np.ndarray:
    """Broadcast all ranks' whole tensors, then add, then keep the own chunk."""
    whole = group.all_gather(x, algorithm="ring").reshape(group.size, -1)
    return np.array_split(whole.sum(axis=0), group.size)[group.rank]


def seconds(group: Group, page: Page) -> None:
    """Show the median time of the plain all-reduce and of the ring.

    A wall clock's times differ from run to run; the counts above do not.
    """
    rows = []
    for nbytes in (16 * 1024, 1024 * 1024, 4 * 1024 * 1024):
        x = np.ones(nbytes // FLOAT32, np.float32)
        plain = median_seconds(group, lambda x=x: plain_all_reduce(group, x), 5)
        ring = median_seconds(group, lambda x=x: ring_all_reduce(group, x), 5)
        rows.append(
            [
                size_text(nbytes),
                f"{plain * 1e3:.2f} ms",
                f"{ring * 1e3:.2f} ms",
                f"{plain / ring:.1f} x",
            ]
        )
    page.table(
        f"Median of 5 calls, {group.size} ranks over {group.transport.name}",
        ["n", "plain", "ring", "plain / ring"],
        rows,
        note="wall clock on shared cores: it moves from run to run, unlike every count above",
    )


def rounding(group: Group, page: Page) -> None:
    """Compare the error of sums in half precision, against the sum in float64, with half a unit in
    the last place per rounding."""
    rows = []
    values = np.random.default_rng(group.rank).random(840)
    for algorithm, roundings in (("ring", group.size - 1), ("direct", min(1, group.size - 1))):
        x = values.astype(np.float16)
        exact = group.all_reduce(x.astype(np.float64))
        total = group.all_reduce(x, algorithm=algorithm)
        error = float(np.abs(total - exact).max() / exact.max())
        bound = roundings * float(np.finfo(np.float16).eps) / 2
        with group.ledger.control():
            bits = group.all_reduce(total.view(np.uint16), op="max") - group.all_reduce(
                total.view(np.uint16), op="min"
            )
        rows.append(
            [
                algorithm,
                roundings,
                "no" if bits.any() else "yes",
                f"{error:.1e}",
                f"{bound:.1e}",
                "ok" if error <= 1.01 * bound and not bits.any() else verdict(error, bound),
            ]
        )
    page.table(
        f"float16, {group.size} ranks: the largest error of the sum over its largest value",
        ["", "roundings", "same bits on all", "measured", "bound", ""],
        rows,
        note="both add in float32; the ring rounds what it passes on, once a hop; direct once, "
        "in the end",
    )


# ----------------------------------------------------------------------------------------- Break it


def send_first() -> None:
    """Let four ranks on links without a buffer all send first: a deadlock, which the monitor finds
    and ends."""

    def all_send_first(group: Group) -> None:
        group.send(np.ones(1000), dst=(group.rank + 1) % group.size)
        group.recv(src=(group.rank - 1) % group.size)

    md.run(all_send_first, size=4, transport="threads-unbuffered", limit=2.0)


def whole_tensors() -> None:
    """Run a 'ring' that passes whole tensors: the sum is right, the bytes are not."""

    def ring_of_whole_tensors(group: Group) -> tuple[float, int]:
        x = np.full(1000, group.rank + 1.0)
        total = x.copy()
        moving = x
        before = totals(group.ledger)
        for _ in range(group.size - 1):
            moving = group.exchange(
                moving, dst=(group.rank + 1) % group.size, src=(group.rank - 1) % group.size
            )
            total += moving
        return float(total[0]), sent_since(group.ledger, before)[1]

    for size in (2, 4, 8):
        total, nbytes = md.run(ring_of_whole_tensors, size=size)[0]
        ring = 2 * (size - 1) * 8000 // size
        print(
            f"P={size}: every element is {total:g} (right), and each rank sent {nbytes} bytes; "
            f"expected, as a ring of chunks: {ring}, {nbytes / ring:.1f} times less"
        )


def stop_early() -> None:
    """Run one all-gather step too few: each rank keeps one stale chunk."""

    def one_step_short(group: Group) -> list[int]:
        x = np.arange(8.0) + group.rank
        own = group.reduce_scatter(x, algorithm="ring")
        chunks = np.array_split(x.copy(), group.size)
        chunks[group.rank][...] = own
        for step in range(group.size - 2):
            moving = chunks[(group.rank - step) % group.size]
            arrived = group.exchange(
                moving, dst=(group.rank + 1) % group.size, src=(group.rank - 1) % group.size
            )
            chunks[(group.rank - step - 1) % group.size][...] = arrived
        return np.flatnonzero(np.concatenate(chunks) != group.all_reduce(x)).tolist()

    for rank, wrong in enumerate(md.run(one_step_short, size=4)):
        print(
            f"rank {rank}: elements {wrong} of 0..7 are stale, the others are right; expected: none stale"
        )


def odd_one_out() -> None:
    """Let rank 1 bring one element more: all ranks report it."""
    md.run(
        lambda group: group.all_reduce(np.ones(1000 + (group.rank == 1)), algorithm="ring"),
        size=4,
        limit=5.0,
    )


BREAKS = {
    "send-first": Break(
        send_first, says="no rank can continue: 0 waits for 1", error=DeadlockError
    ),
    "whole-tensors": Break(
        whole_tensors,
        says="each rank sent 56000 bytes; expected, as a ring of chunks: 14000",
    ),
    "stop-early": Break(stop_early, says="rank 3: elements [0, 1] of 0..7 are stale"),
    "odd-one-out": Break(odd_one_out, says="ranks disagree in shape", error=MismatchError),
    **load_module(Path(__file__).resolve().parent / "broken.py", "03").BREAKS,
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=8)
