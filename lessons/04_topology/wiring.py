"""Wirings of lesson 04: which devices a link joins, how far it is, how much passes when all devices
talk across.

A wiring is a list of links (a, b). Devices are 0 .. P-1; numbers from P on are switches, which only
pass things on.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from minidist.comm.collectives.torus import grid


class Wiring(NamedTuple):
    """Devices, switches and the links between them; a link carries as much in one direction as in
    the other."""

    name: str
    devices: int
    switches: int
    links: list[tuple[int, int]]


def ring(size: int) -> Wiring:
    """Return a ring: each device has two neighbours."""
    return Wiring("ring", size, 0, _distinct((rank, (rank + 1) % size) for rank in range(size)))


def torus(size: int) -> Wiring:
    """Return the most square grid; each row and each column is closed to a ring (环面网格, N4:153)."""
    return box(grid(size))


def box(sides: Sequence[int]) -> Wiring:
    """Return a torus of any number of dims: each line of devices along a dim is closed to a
    ring."""
    places = np.arange(int(np.prod(sides))).reshape(sides)
    near = [np.roll(places, -1, axis=dim) for dim in range(len(sides))]
    return Wiring(
        "torus",
        places.size,
        0,
        _distinct(
            link
            for there in near
            for link in zip(places.ravel().tolist(), there.ravel().tolist(), strict=True)
        ),
    )


def switch(size: int) -> Wiring:
    """Return all devices on one switch, by one link each (NVSwitch, N4:46)."""
    return Wiring("switch", size, 1, [(rank, size) for rank in range(size)])


def two_machines(size: int) -> Wiring:
    """Return two halves, each on its own switch, and one link between the switches."""
    half = (size + 1) // 2
    return Wiring(
        "two machines",
        size,
        2,
        [*((rank, size + (rank >= half)) for rank in range(size)), (size, size + 1)],
    )


def full(size: int) -> Wiring:
    """Return a link for each pair of devices."""
    return Wiring("fully connected", size, 0, list(combinations(range(size), 2)))


WIRINGS: tuple[Callable[[int], Wiring], ...] = (ring, torus, switch, two_machines)


def _distinct(links: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return each link once, without links from a device to itself (a ring of two has one link)."""
    return sorted({(min(link), max(link)) for link in links if link[0] != link[1]})


def ways(wiring: Wiring, start: int) -> dict[int, tuple[int, int]]:
    """Return, for every place, its distance from `start` in links, and the number of shortest ways
    to it."""
    near: dict[int, list[int]] = {}
    for a, b in wiring.links:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    found = {start: (0, 1)}
    frontier = {start: 1}
    far = 0
    while frontier:
        far += 1
        reached: Counter[int] = Counter()
        for here, count in frontier.items():
            reached.update({there: count for there in near.get(here, ()) if there not in found})
        found.update({there: (far, count) for there, count in reached.items()})
        frontier = dict(reached)
    return found


def hops(wiring: Wiring) -> list[int]:
    """Return the links between each pair of devices, by the shortest way (跳数)."""
    return [
        ways(wiring, a)[b][0] for a in range(wiring.devices) for b in range(a + 1, wiring.devices)
    ]


def bisection(wiring: Wiring) -> int:
    """Return 对分带宽 in links: the fewest links that join one half of the devices with the other, over
    all halves."""
    ends = [((1 << a), (1 << b)) for a, b in wiring.links]
    fewest = len(ends)
    # device 0 is always in the other
    for half in combinations(range(1, wiring.devices), wiring.devices // 2):
        devices = sum(1 << device for device in half)
        for sides in product((0, 1), repeat=wiring.switches):  # a switch may stand on either side
            mine = devices | sum(
                side << (wiring.devices + place) for place, side in enumerate(sides)
            )
            fewest = min(fewest, sum(bool(mine & a) != bool(mine & b) for a, b in ends))
    return fewest


def load(wiring: Wiring, messages: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], float]:
    """Return the bytes over each link, separately for each direction, if (src, dst, bytes) take
    their shortest ways.

    Where there are several shortest ways, each carries an equal part.
    """
    found = [ways(wiring, place) for place in range(wiring.devices + wiring.switches)]
    carried: dict[tuple[int, int], float] = defaultdict(float)
    for src, dst, nbytes in messages:
        far, count = found[src][dst]
        for a, b in (end for link in wiring.links for end in (link, link[::-1])):
            if found[src][a][0] + 1 + found[b][dst][0] == far:
                carried[a, b] += nbytes * found[src][a][1] * found[b][dst][1] / count
    return carried
