"""Ways in which ranks come to wait in vain, as functions of (world), for tests/comm/test_never_hangs.py.

In each of WAYS rank 1 is the odd one; `says` is what every error must name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group

ONES = np.ones(6, np.float32)
HERE = r"\S*hanging\.py:\d+"


class Way(NamedTuple):
    """What the ranks do, and what comes of it."""

    usual: Callable[[Group], Any]
    odd: Callable[[Group], Any]
    error: str
    says: str


def groups(world: Group) -> tuple[Group, Group]:
    """Two groups of all ranks."""
    first, second = world.split(0, axis="first"), world.split(0, axis="second")
    assert first is not None and second is not None
    return first, second


def in_order(world: Group, *order: int) -> None:
    both = groups(world)
    for which in order:
        both[which].all_reduce(ONES)


def ring(world: Group) -> None:
    """Everybody receives from the next one."""
    world.recv(src=(world.rank + 1) % world.size)


def much(world: Group) -> None:
    """Everybody sends to the next one more than any link holds."""
    world.send(np.zeros(20 << 20, np.uint8), dst=(world.rank + 1) % world.size)


def started(world: Group) -> None:
    """The collective is carried out by a worker; the program waits for that."""
    world.start_all_reduce(ONES).wait()


MISMATCH = rf"rank \d calls .*, at {HERE}.*\n  rank \d calls .*, at {HERE}"
WAYS = {
    "verb": Way(lambda w: w.all_reduce(ONES), lambda w: w.reduce_scatter(ONES), "MismatchError", MISMATCH),
    "shape": Way(lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES.reshape(2, 3)), "MismatchError", MISMATCH),
    "dtype": Way(lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES.view(np.int32)), "MismatchError", MISMATCH),
    "op": Way(lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES, op="max"), "MismatchError", MISMATCH),
    "root": Way(lambda w: w.broadcast(ONES, root=0), lambda w: w.broadcast(ONES, root=1), "MismatchError", MISMATCH),
    "algorithm": Way(lambda w: w.all_reduce(ONES, algorithm="ring"), lambda w: w.all_reduce(ONES, algorithm="tree"),
                     "MismatchError", MISMATCH),
    "group": Way(lambda w: in_order(w, 0, 1), lambda w: in_order(w, 1, 0), "MismatchError",
                 rf"ranks disagree in group:\n  {MISMATCH}"),
    "order": Way(lambda w: (w.all_reduce(ONES), w.all_gather(ONES)), lambda w: (w.all_gather(ONES), w.all_reduce(ONES)),
                 "MismatchError", MISMATCH),
    "one rank in a message": Way(lambda w: w.all_reduce(ONES), lambda w: w.recv(src=0), "MismatchError",
                                 rf"rank 1 calls recv\(\), its call 1, at {HERE}"),
    "one rank in a message, the others in started calls": Way(started, lambda w: w.recv(src=0), "MismatchError",
                                                              rf"rank 1 calls recv\(\), its call 1, at {HERE}"),
    "one rank not calling": Way(lambda w: w.all_reduce(ONES), lambda w: None, "DeadlockError",
                                rf"\d waits for 1 at {HERE}, rank 1 has ended"),
    "a ring of receives": Way(ring, ring, "DeadlockError", rf"\d waits for \d at {HERE}, \d waits for \d at {HERE}"),
    "a ring of sends": Way(much, much, "DeadlockError", rf"calls send\(uint8 \(20971520,\)\), its call 1, at {HERE}"),
    "a receive from oneself": Way(lambda w: w.recv(src=w.rank), lambda w: w.recv(src=1), "DeadlockError",
                                  rf"(\d) waits for \1 at {HERE}"),
}


def hang(world: Group, way: str) -> Any:
    """Go that way."""
    return (WAYS[way].odd if world.rank == 1 else WAYS[way].usual)(world)
