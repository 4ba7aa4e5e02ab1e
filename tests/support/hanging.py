"""Ways in which ranks come to wait in vain, as functions of (world), for
tests/comm/test_never_hangs.py.

In each of WAYS rank 1 is the odd one; `says` is what every error must name.
"""

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed

ONES = np.ones(6, np.float32)
HERE = r".*hanging\.py:\d+"


class Way(NamedTuple):
    """What the ranks do, and what comes of it."""

    usual: Callable[[Group], Any]
    odd: Callable[[Group], Any]
    error: str
    says: str


def groups(world: Group) -> tuple[Group, Group]:
    """Two groups of all ranks."""
    first = world.split(0, axis="first")
    second = world.split(0, axis="second")
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
    "verb": Way(
        lambda w: w.all_reduce(ONES), lambda w: w.reduce_scatter(ONES), "MismatchError", MISMATCH
    ),
    "shape": Way(
        lambda w: w.all_reduce(ONES),
        lambda w: w.all_reduce(ONES.reshape(2, 3)),
        "MismatchError",
        MISMATCH,
    ),
    "dtype": Way(
        lambda w: w.all_reduce(ONES),
        lambda w: w.all_reduce(ONES.view(np.int32)),
        "MismatchError",
        MISMATCH,
    ),
    "op": Way(
        lambda w: w.all_reduce(ONES),
        lambda w: w.all_reduce(ONES, op="max"),
        "MismatchError",
        MISMATCH,
    ),
    "root": Way(
        lambda w: w.broadcast(ONES, root=0),
        lambda w: w.broadcast(ONES, root=1),
        "MismatchError",
        MISMATCH,
    ),
    "algorithm": Way(
        lambda w: w.all_reduce(ONES, algorithm="ring"),
        lambda w: w.all_reduce(ONES, algorithm="tree"),
        "MismatchError",
        MISMATCH,
    ),
    "group": Way(
        lambda w: in_order(w, 0, 1),
        lambda w: in_order(w, 1, 0),
        "MismatchError",
        rf"ranks disagree in group:\n  {MISMATCH}",
    ),
    "order": Way(
        lambda w: (w.all_reduce(ONES), w.all_gather(ONES)),
        lambda w: (w.all_gather(ONES), w.all_reduce(ONES)),
        "MismatchError",
        MISMATCH,
    ),
    "one rank in a message": Way(
        lambda w: w.all_reduce(ONES),
        lambda w: w.recv(src=0),
        "MismatchError",
        rf"rank 1 calls recv\(\), its call 1, at {HERE}",
    ),
    "one rank in a message, the others in started calls": Way(
        started,
        lambda w: w.recv(src=0),
        "MismatchError",
        rf"rank 1 calls recv\(\), its call 1, at {HERE}",
    ),
    "one rank not calling": Way(
        lambda w: w.all_reduce(ONES),
        lambda w: None,
        "DeadlockError",
        rf"\d waits for 1 at {HERE}, rank 1 has ended",
    ),
    "a ring of receives": Way(
        ring, ring, "DeadlockError", rf"\d waits for \d at {HERE}, \d waits for \d at {HERE}"
    ),
    "a ring of sends": Way(
        much, much, "DeadlockError", rf"calls send\(uint8 \(20971520,\)\), its call 1, at {HERE}"
    ),
    "a receive from oneself": Way(
        lambda w: w.recv(src=w.rank),
        lambda w: w.recv(src=1),
        "DeadlockError",
        rf"(\d) waits for \1 at {HERE}",
    ),
}


def hang(world: Group, way: str) -> Any:
    """Go that way."""
    return (WAYS[way].odd if world.rank == 1 else WAYS[way].usual)(world)


# --- ranks that disagree at random
# -----------------------------------------------------------------------------------

KINDS = ("verb", "shape", "dtype", "op", "root", "algorithm", "group", "order", "not calling")
ALL_REDUCES = (
    "auto",
    "naive",
    "tree",
    "ring",
    "direct",
    "pairwise",
    "doubling",
    "halving-doubling",
)
CALLS: dict[str, Callable[[Group, np.ndarray], Any]] = {
    "all_reduce": lambda w, x: w.all_reduce(x),
    "reduce_scatter": lambda w, x: w.reduce_scatter(x),
    "all_gather": lambda w, x: w.all_gather(x),
    "all_to_all": lambda w, x: w.all_to_all([x] * w.size),
    "barrier": lambda w, x: w.barrier(),
    "reduce": lambda w, x: w.reduce(x),
    "gather": lambda w, x: w.gather(x),
    "broadcast": lambda w, x: w.broadcast(x),
    "scatter": lambda w, x: w.scatter(x),
}
"""In the first four every rank hears of every other, so that after one of them nobody is ahead."""


def drawn(draw: Any) -> dict[str, Any]:
    """A way for one rank to disagree: `draw` is a random.Random."""
    kind = draw.choice(KINDS)
    size = draw.choice((2, 3, 4))
    one, other = draw.sample(sorted(CALLS), 2)
    algorithm, another = draw.sample(ALL_REDUCES[1:], 2)
    return {
        "kind": kind,
        "size": size,
        "odd": draw.randrange(size),
        "length": draw.choice((1, 7, 5000, 300_000)),
        "before": draw.choice((0, 1, 5)),
        "verbs": [one, other],
        "algorithms": [algorithm, another],
        "ops": draw.sample(("sum", "max", "min", "prod"), 2),
        "roots": draw.sample(range(size), 2),
        "start": draw.random() < 0.3,
    }


def disagree(world: Group, case: dict[str, Any]) -> None:
    """Calls that all make alike, the call in which rank `odd` differs, and a barrier."""
    odd = int(world.rank == case["odd"])
    x = np.ones(case["length"], np.float32)
    both = groups(world)
    for _ in range(case["before"]):
        world.all_reduce(x)
    one, other = case["verbs"]
    match case["kind"]:
        case "verb":
            CALLS[case["verbs"][odd]](world, x)
        case "shape":
            _all_reduce(world, case, x[odd:] if case["length"] % 2 else x.reshape((-1, 2 - odd)))
        case "dtype":
            _all_reduce(world, case, x.view(np.int32) if odd else x)
        case "op":
            _all_reduce(world, case, x, op=case["ops"][odd])
        case "root":
            world.broadcast(x, root=case["roots"][odd])
        case "algorithm":
            _all_reduce(world, case, x, algorithm=case["algorithms"][odd])
        case "group":
            both[odd].all_reduce(x)
            both[1 - odd].all_reduce(x)
        case "order":
            CALLS[other if odd else one](world, x)
            CALLS[one if odd else other](world, x)
        case "not calling":
            if not odd:
                _all_reduce(world, case, x)
    world.barrier()


def _all_reduce(world: Group, case: dict[str, Any], x: np.ndarray, **options: str) -> None:
    if case["start"]:
        world.start_all_reduce(x, **options).wait()
    else:
        world.all_reduce(x, **options)


# --- long waits that end
# ---------------------------------------------------------------------------------------------


def patient(world: Group, alpha: float, rounds: int, seed: int) -> int:
    """Rounds of calls over links so slow that every wait is told; and ranks that come late. Returns
    what it counted."""
    with delayed(world, alpha=alpha, beta=0.0) as slow:
        after = (world.rank + 1) % world.size
        before = (world.rank - 1) % world.size
        total = int(slow.exchange(world.rank, dst=after, src=before))
        total += int(slow.all_reduce(world.rank, algorithm="direct"))
        draw = random.Random(seed)  # the same on every rank
        for _ in range(rounds):
            lazy = draw.randrange(world.size)
            seconds = draw.uniform(0.0, 3 * alpha)
            if world.rank == lazy:
                time.sleep(seconds)
            kind = draw.randrange(4)
            pending = None
            if kind == 0:
                pending = slow.start_all_reduce(
                    world.rank, algorithm=draw.choice(("ring", "tree", "direct"))
                )
            if kind == 1:
                total += int(slow.exchange(world.rank, dst=after, src=before))
            if kind == 2 and world.rank == lazy:
                for other in set(range(world.size)) - {lazy}:
                    slow.send(np.zeros(100_000), dst=other)
            elif kind == 2:
                total += len(slow.recv(src=lazy))
            total += int(world.all_reduce(1))
            if pending is not None:
                total += int(pending.wait())
    return total
