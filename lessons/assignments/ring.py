"""Assignment 1: an all-reduce on a ring that is drawn.

Drawn: the number of ranks, their order on the ring and the direction of travel; which chunk each
rank has in the end of reduce-scatter; how long the chunks are; sum, maximum or minimum. The grade
is measured: what the chunks contain, where each message goes, how many bytes a rank sends.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from string import Template
from types import ModuleType
from typing import Any

import numpy as np

from minidist import lessons
from minidist.comm.group import Group
from minidist.grading import Result, Tasks, expect, judge, load_module, sent_since, totals
from minidist.lessons.assignments.draws import StudentDraw
from minidist.lessons.checking import on_ranks

TITLE = "An all-reduce on a ring of your own"
REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
ITEMSIZE = 8  # bytes of a float64


@dataclass(frozen=True)
class DrawnRing:
    """One student's ring.

    Attributes: circle: the ranks in their order round the ring; forward: messages travel in this
                order, else against it; owned: rank r has the finished chunk owned[r] after
                reduce-scatter; shares: chunk c has shares[c] of every sum(shares) elements;
                reduction: a name of REDUCTIONS.
    """

    circle: tuple[int, ...]
    forward: bool
    owned: tuple[int, ...]
    shares: tuple[int, ...]
    reduction: str

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.circle)

    def next_of(self, rank: int) -> int:
        """Return the rank to which a rank sends."""
        step = 1 if self.forward else -1
        return self.circle[(self.circle.index(rank) + step) % self.size]

    def length(self, chunk: int, elements: int) -> int:
        """Return the number of elements of a chunk."""
        return self.shares[chunk] * elements // sum(self.shares)


def drawn(draw: StudentDraw) -> DrawnRing:
    """Return a student's ring, which is never the ring 0, 1, 2, … of lesson 03."""
    size = draw.between(5, 7)
    while True:
        ring = DrawnRing(
            tuple(draw.shuffled(range(size))),
            draw.choice((True, False)),
            tuple(draw.shuffled(range(size))),
            tuple(draw.between(1, 4) for _ in range(size)),
            draw.choice(tuple(REDUCTIONS)),
        )
        neighbours = [(ring.next_of(rank) - rank) % size for rank in range(size)]
        plain = any(neighbours.count(step) == size for step in (1, size - 1))
        in_order = ring.owned == tuple(range(size))
        if not plain and not in_order and len({*ring.shares}) > 1:
            return ring


TEXTS = {
    "task": """\
Assignment 1 of @STUDENT@: an all-reduce on a ring of your own.

$size ranks stand on a ring in this order:

    $circle

Messages travel $direction: rank $example sends to rank $example_next. Each rank sends only to
its next rank. The all-reduce is a reduce-scatter of $last steps, then an all-gather of $last
steps; in each step every rank sends one chunk. It gives every rank the $reduction of all ranks'
arrays, element by element.

An array is cut into $size chunks, numbered from 0. Their lengths are as

    $shares

and the number of elements is a multiple of $total. After reduce-scatter

$owned

Replace each `hole(...)` by your own code; write more functions if you need them. Each hole is
graded alone. `group` is as in lesson 03: group.rank, group.size,
group.exchange(outgoing, dst=, src=) -> array, group.send(outgoing, dst=), group.recv(src=).
""",
    "circle": "$circle - and again $first",
    "owned": "rank $rank has chunk $chunk",
    "forward": "in this order",
    "backward": "against this order",
    **{name: name for name in REDUCTIONS},
}
"""The texts that a student reads. texts.zh.toml has them in Chinese."""

CODE = Template('''\

import numpy as np

from minidist.grading import hole


def next_of(rank):
    """Return the rank to which `rank` sends."""
    return hole(1, "to which rank does a rank send?", rank)


def sends(rank, step):
    """Return the number of the chunk that `rank` sends in a step of reduce-scatter, from 0."""
    return hole(2, "which chunk does a rank send in a step of reduce-scatter?", rank, step)


def passes_on(rank, step):
    """Return the number of the finished chunk that `rank` sends in a step of all-gather, from 0."""
    return hole(3, "which finished chunk does a rank send in a step of all-gather?", rank, step)


def cut(x):
    """Return the chunks of x (n,) in a list, chunk 0 first."""
    return hole(4, "cut an array into the chunks of this ring", x)


def all_reduce(group, x):
    """Return the $reduction of all ranks' x (n,), on every rank; x stays as it is."""
    return hole(5, "reduce-scatter, then all-gather, on this ring", group, x)


def bytes_sent(rank, n):
    """Return the bytes that `rank` sends in one all_reduce of n float64 numbers."""
    return hole(6, "how many bytes does a rank send in one all-reduce?", rank, n)
''')


def task_file(ring: DrawnRing, texts: Mapping[str, str] = TEXTS) -> str:
    """Return the student's Python file with holes. Args: texts: TEXTS, or its Chinese."""
    first = ring.circle[0]
    circle = " - ".join(map(str, ring.circle))
    holder = Template(texts["owned"])
    holders = [holder.substitute(rank=rank, chunk=chunk) for rank, chunk in enumerate(ring.owned)]
    owned = textwrap.fill(", ".join(holders), 90, initial_indent="    ", subsequent_indent="    ")
    told = Template(texts["task"]).substitute(
        size=ring.size,
        last=ring.size - 1,
        circle=Template(texts["circle"]).substitute(circle=circle, first=first),
        direction=texts["forward" if ring.forward else "backward"],
        example=first,
        example_next=ring.next_of(first),
        reduction=texts[ring.reduction],
        shares=" : ".join(map(str, ring.shares)),
        total=sum(ring.shares),
        owned=owned,
    )
    return f'"""{told}"""\n' + CODE.substitute(reduction=ring.reduction)


def tasks(ring: DrawnRing) -> dict[int, Tasks]:
    """Return what grades each hole."""
    return {
        1: lambda answer: _next(ring, answer),
        2: lambda answer: _reduce_scatter(ring, answer),
        3: lambda answer: _all_gather(ring, answer),
        4: lambda answer: _cut(ring, answer),
        5: lambda answer: _all_reduce(ring, answer),
        6: lambda answer: _bytes(ring, answer),
    }


def _next(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    ranks = range(ring.size)
    yield expect(
        "the next rank of each rank",
        [ring.next_of(rank) for rank in ranks],
        [answer.next_of(rank) for rank in ranks],
        "another ring",
        "follow the order of the ring in the direction of travel",
        known={
            "that is the other direction": [
                next(other for other in ranks if ring.next_of(other) == rank) for rank in ranks
            ],
            "that is the ring 0, 1, 2, … of lesson 03": [(rank + 1) % ring.size for rank in ranks],
        },
    )


def _chunk(asked: Any, rank: int, step: int, size: int, task: str) -> tuple[int, Result | None]:
    """Return the chunk that an answer names for a rank and a step; a failed Result if there is no
    such chunk."""
    if isinstance(asked, (int, np.integer)) and 0 <= asked < size:
        return int(asked), None
    found = f"{asked!r:.40} of rank {rank}, step {step}"
    return 0, judge(
        task, False, f"0 to {size - 1}", found, "no chunk", "chunks are numbered from 0"
    )


def _reduce_scatter(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    """Check that the finished chunk of each rank has every rank's part once."""
    task = "reduce-scatter: whose parts each rank's own chunk has"
    # parts[rank][chunk]: the ranks whose parts are in this rank's chunk. A rank that is there
    # twice is a mistake.
    parts = [[[rank] for _ in range(ring.size)] for rank in range(ring.size)]
    for step in range(ring.size - 1):
        sent = {}
        for rank in range(ring.size):
            chunk, wrong = _chunk(answer.sends(rank, step), rank, step, ring.size, task)
            if wrong:
                yield wrong
                return
            sent[rank] = chunk, parts[rank][chunk]
        for rank, (chunk, arriving) in sent.items():
            parts[ring.next_of(rank)][chunk] = parts[ring.next_of(rank)][chunk] + arriving
    whole = [*range(ring.size)]
    bad = [rank for rank in whole if sorted(parts[rank][ring.owned[rank]]) != whole]
    found = "all parts once"
    if bad:
        own = ring.owned[bad[0]]
        has = ", ".join(map(str, sorted(parts[bad[0]][own])))
        found = f"chunk {own} of rank {bad[0]} has the parts of ranks {has}"
    yield judge(
        task,
        not bad,
        "all parts once",
        found,
        "wrong chunk",
        "a rank passes on the chunk that has just arrived; count back from where a chunk ends",
    )


def _all_gather(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    """Check that a rank sends only chunks that it has, and that all ranks have all chunks."""
    task = "all-gather: which finished chunks each rank has"
    has = [{ring.owned[rank]} for rank in range(ring.size)]
    for step in range(ring.size - 1):
        sent = {}
        for rank in range(ring.size):
            chunk, wrong = _chunk(answer.passes_on(rank, step), rank, step, ring.size, task)
            if wrong is None and chunk not in has[rank]:
                wrong = judge(
                    task,
                    False,
                    "only finished chunks are sent",
                    f"rank {rank} sends chunk {chunk} in step {step}, a leftover",
                    "a leftover is sent",
                    "first its own chunk, then always what has just arrived",
                )
            if wrong:
                yield wrong
                return
            sent[rank] = chunk
        for rank, chunk in sent.items():
            has[ring.next_of(rank)].add(chunk)
    least = min(len(chunks) for chunks in has)
    yield judge(
        task,
        least == ring.size,
        f"all {ring.size}",
        f"a rank has {least}",
        "a chunk is sent twice",
        "first its own chunk, then always what has just arrived",
    )


def _sizes(ring: DrawnRing) -> tuple[int, ...]:
    """Return numbers of elements to try: also none."""
    return tuple(sum(ring.shares) * times for times in (1, 7, 0))


def _cut(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    for elements in _sizes(ring):
        x = np.arange(elements, dtype=np.float64)
        given = islice(answer.cut(x), 2 * ring.size)  # of a list that may never end
        chunks = [np.asarray(chunk) for chunk in given]
        yield expect(
            f"lengths of the chunks of {elements} elements",
            [ring.length(chunk, elements) for chunk in range(ring.size)],
            [chunk.size for chunk in chunks],
            "other lengths",
            "the lengths are as the numbers in the text",
            known={
                "that is np.array_split: equal chunks": [
                    part.size for part in np.array_split(x, ring.size)
                ]
            },
        )
        same = np.array_equal(np.concatenate(chunks), x)
        yield judge(
            f"the chunks of {elements} elements together",
            same,
            "the array",
            "the array" if same else "other numbers",
            "elements are lost or moved",
            "chunk 0 is the beginning",
        )


def _one_call(group: Group, answer: ModuleType, x: list[np.ndarray], link: Any) -> dict[str, Any]:
    """Return what one rank's all_reduce gives, where it sends, and how many bytes."""
    mine = x[group.rank].copy()
    linked = link(group)
    before = totals(group.ledger)
    given = answer.all_reduce(linked, mine)
    messages, nbytes = sent_since(group.ledger, before)
    return {
        "given": np.array(given),
        "unchanged": np.array_equal(mine, x[group.rank]),
        "to": [dst for dst, _ in linked.sends],
        "messages": messages,
        "nbytes": nbytes,
    }


def _all_reduce(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    link = load_module(lessons.find("03").part("check.py"), "03").Link
    for elements in _sizes(ring):
        numbers = np.random.default_rng(elements)
        x = [numbers.normal(size=elements) for _ in range(ring.size)]
        what = f"{elements} elements"
        ranks = on_ranks(
            _one_call,
            answer,
            x,
            link,
            size=ring.size,
            task=f"{what}: every rank returns",
            advice="each step sends to the next rank and receives from the previous one",
        )
        yield from _messages(ring, ranks, elements)
        target = REDUCTIONS[ring.reduction].reduce(x)
        wrong = [
            rank
            for rank, found in enumerate(ranks)
            if found["given"].shape != target.shape or not np.allclose(found["given"], target)
        ]
        first = f"other numbers on rank {wrong[0]}" if wrong else "equal"
        yield judge(
            f"{what}: the {ring.reduction} on every rank",
            not wrong,
            "equal",
            first,
            "wrong numbers",
            f"{ring.reduction} of what arrives and what is there; then finished chunks replace "
            "leftovers",
        )
        yield judge(
            f"{what}: x",
            all(found["unchanged"] for found in ranks),
            "as it was",
            "as it was" if all(found["unchanged"] for found in ranks) else "changed",
            "x is overwritten",
            "work on a copy",
        )


def _messages(ring: DrawnRing, ranks: list[dict[str, Any]], elements: int) -> Iterator[Result]:
    """Check to whom each rank sends, how many messages, and how many bytes."""
    what = f"{elements} elements"
    steps = 2 * (ring.size - 1)
    for rank, found in enumerate(ranks):
        astray = [dst for dst in found["to"] if dst != ring.next_of(rank)]
        yield judge(
            f"{what}: to whom rank {rank} sends",
            not astray,
            f"only rank {ring.next_of(rank)}",
            f"rank {(astray or [ring.next_of(rank)])[0]}",
            "not this ring",
            "every message goes to the next rank of the ring",
        )
        yield expect(
            f"{what}: messages of rank {rank}",
            steps,
            found["messages"],
            "another number of steps",
            "each half takes one step less than there are ranks",
        )
        yield expect(
            f"{what}: bytes of rank {rank}",
            _nbytes(ring, rank, elements),
            found["nbytes"],
            "other chunks",
            "each step sends one chunk, and the chunks have the lengths of the text",
        )


def _nbytes(ring: DrawnRing, rank: int, elements: int) -> int:
    """Return the bytes that a rank sends: in each half all chunks but one."""
    last_gathered = ring.length(ring.owned[ring.next_of(rank)], elements)
    own = ring.length(ring.owned[rank], elements)
    return ITEMSIZE * (2 * elements - own - last_gathered)


def _bytes(ring: DrawnRing, answer: ModuleType) -> Iterator[Result]:
    for elements in _sizes(ring):
        ranks = range(ring.size)
        yield expect(
            f"bytes that each rank sends, {elements} elements",
            [_nbytes(ring, rank, elements) for rank in ranks],
            [answer.bytes_sent(rank, elements) for rank in ranks],
            "other bytes",
            "which chunks does a rank never send, in each half?",
            known={
                "that is the formula of equal chunks": [
                    2 * (ring.size - 1) * elements * ITEMSIZE // ring.size
                ]
                * ring.size
            },
        )
