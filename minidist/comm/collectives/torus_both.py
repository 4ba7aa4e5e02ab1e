"""Torus of any number of dims, in both directions of every ring at once: all links of a rank are
busy in every step.

The torus algorithm (torus.py) uses one direction of one dim at a time: only one of a rank's 2 D
links sends. Here the array is cut into 2 D parts. Each part has its own route: it begins with
another dim, or goes in the other direction:

    P=12, 3 x 4      part 0: along the 3, then the 4, rightwards     part 2: along the 4, then the
                     3, rightwards
                     part 1: the same, leftwards                     part 3: the same, leftwards

    a part           reduce-scatter in the ring of its first dim; of the resulting chunk,
                     reduce-scatter in the ring of the next; ...; then all-gather in the same rings,
                     the last first

The parts make the same step at the same time, so while part 0 uses the links to the right along the
first dim, the others use the other links. The bytes are the ring's; a link carries 1/(2 D) of the
bytes that it carries in a step of the torus algorithm.

The box: its sides are the prime factors of P, the largest innermost. Two factors of 2 become one
ring of 4: it uses the same links, since both neighbours in a ring of 2 are the same rank. 8 is
2 x 4, 12 is 3 x 4, 27 is 3 x 3 x 3, and a prime is one ring. A ring of 2 has one link for both
directions, and it then carries both parts.

notes:   N4 §3 环面网格 (N4:153)
Source:  Jain & Sabharwal 2010, "Optimal Bucket Algorithms for Large MPI Collectives on Torus
         Interconnects"; Sack & Gropp 2015, "Collective Algorithms for Multiported Torus Networks".
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import split
from minidist.comm.collectives import ring
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.cost.volume import box
from minidist.comm.transport import Reduce


class Backwards:
    """A group with its ranks in reverse order: a ring over it goes in the other direction."""

    def __init__(self, group: BlockingGroup) -> None:
        self.group, self.size, self.rank = group, group.size, group.size - 1 - group.rank

    def exchange(self, x: Any, dst: int, src: int) -> Any:
        """Exchange with renumbered ranks: see BlockingGroup.exchange."""
        return self.group.exchange(x, dst=self.size - 1 - dst, src=self.size - 1 - src)


def plain_part(rings: Sequence[Any], x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over a box of ranks; `rings` are the rings through this rank, the
    first dim's first."""
    if not rings:
        return x
    first, *others = rings
    chunks = np.array_split(x.copy(), first.size)
    ring.plain_reduce_scatter(first, chunks)  # the sum of chunk first.rank along this dim
    chunks[first.rank] = plain_part(others, chunks[first.rank])  # and along all others
    ring.plain_all_gather(first, chunks)
    return np.concatenate(chunks)


def plain_all_reduce(rings: Sequence[BlockingGroup], x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over a box of ranks: each of 2 D parts begins with another dim or
    runs in the other direction."""
    sums = []
    for number, part in enumerate(np.array_split(x, 2 * len(rings))):
        turned = [*rings[number // 2 :], *rings[: number // 2]]
        sums.append(
            plain_part([Backwards(each) for each in turned] if number % 2 else turned, part)
        )
    return np.concatenate(sums)


# The real version has all parts in flight at once, and makes the rings from the group's own ranks.


class Hop(NamedTuple):
    """A step of a part: a chunk is sent to the next rank of its ring, another is received from
    the previous rank."""

    dst: int
    outgoing: np.ndarray
    src: int
    incoming: np.ndarray
    reduce: Reduce | None


def rings_of(rank: int, sides: Sequence[int]) -> list[list[int]]:
    """Return the ring of each dim through `rank`; the ranks fill the box in row-major order."""
    places = np.arange(int(np.prod(sides))).reshape(sides)
    at = np.unravel_index(rank, sides)
    rings = []
    for dim in range(len(sides)):
        line: list[Any] = list(at)
        line[dim] = slice(None)
        rings.append(places[tuple(line)].tolist())
    return rings


def all_reduce(
    call: Call, x: np.ndarray, out: np.ndarray, op: Reduction, *, sides: Sequence[int] | None = None
) -> None:
    """Reduce each part along all dims and gather it back, all parts at once; in `out`.

    P=3      rightwards                          leftwards
    step 0   r0 -> r1    r1 -> r2    r2 -> r0    r0 -> r2    r1 -> r0    r2 -> r1     half a chunk each
    step 1   r0 -> r1    r1 -> r2    r2 -> r0    r0 -> r2    r1 -> r0    r2 -> r1
    step 2   r0 -> r1    r1 -> r2    r2 -> r0    r0 -> r2    r1 -> r0    r2 -> r1
    step 3   r0 -> r1    r1 -> r2    r2 -> r0    r0 -> r2    r1 -> r0    r2 -> r1

    Args:    sides: the sides of the box; their product is P. Along the last dim, ranks have
             consecutive numbers. Default: as above.
    Cost:    2 D messages per rank in each of 2 * (sum of sides - D) steps; 2(P-1)*nbytes over all
             ranks, exactly. No workspace.
    Rounding: low precision is added in float32 and rounded once per hop, sum of sides - D times in
    all.
    """
    call.agree()
    rings = [
        each
        for each in rings_of(call.rank, box(call.size) if sides is None else sides)
        if len(each) > 1
    ]
    ways = [
        [
            each[::-1] if number % 2 else each
            for each in (*rings[number // 2 :], *rings[: number // 2])
        ]
        for number in range(2 * len(rings))
    ]
    parts = [
        _hops(call.rank, way, mine, sums, op)
        for way, mine, sums in zip(ways, split(x, len(ways)), split(out, len(ways)), strict=True)
    ]
    for step, hops in enumerate(zip(*parts, strict=True)):
        received = [call.start_recv(hop.src, hop.incoming, hop.reduce) for hop in hops]
        sent = [call.start_send(hop.dst, hop.outgoing, step=step) for hop in hops]
        call.wait(received + sent)


def _hops(
    rank: int, way: Sequence[Sequence[int]], x: np.ndarray, out: np.ndarray, op: Reduction
) -> Iterator[Hop]:
    """Yield the steps of one part, which uses the rings of `way` in this order."""
    passed = []
    for ranks in way:
        size = len(ranks)
        place = ranks.index(rank)
        own = split(x, size)
        sums = split(out, size)
        outgoing = own[place - 1]
        for step in range(size - 1):
            chunk = (place - 2 - step) % size
            yield Hop(
                ranks[(place + 1) % size],
                outgoing,
                ranks[place - 1],
                sums[chunk],
                op.into(own[chunk]),
            )
            outgoing = sums[chunk]
        passed.append((ranks, place, sums))
        x = out = sums[place]
    if op.op == "mean":
        op.finish(out, out)
    for ranks, place, sums in reversed(passed):
        for step in range(len(ranks) - 1):
            chunk = (place - step) % len(ranks)
            yield Hop(
                ranks[(place + 1) % len(ranks)],
                sums[chunk],
                ranks[place - 1],
                sums[chunk - 1],
                None,
            )
