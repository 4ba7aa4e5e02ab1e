"""What ranks of mpi do in tests/comm/collectives/test_native.py: in a module of its own, so that
they can import it."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from conformance import meeting

from minidist.comm.group import Group
from minidist.errors import CommError, ConfigError, TimeoutError


def in_many_groups(world: Group) -> list[Any]:
    """Native calls in the world, in two halves of it, and in a group that is the world again; two
    of them at once."""
    half = world.split(world.rank // 2)
    again = world.split(0, key=-world.rank)
    assert half is not None
    assert again is not None
    started = [
        half.start_all_reduce(np.full(5000, world.rank + 2.0), algorithm="native"),
        again.start_all_gather(np.array([world.rank]), algorithm="native"),
        world.start_all_reduce(np.array([world.rank]), op="max", algorithm="native"),
    ]
    return [pending.wait().tolist()[:8] for pending in reversed(started)]


def refused(world: Group) -> list[str]:
    """What MPI does not know is refused on every rank before anything is sent; the group stays
    usable."""
    texts = []
    for x, op in (
        (np.ones(3, np.float16), "sum"),
        (np.ones(3, ">f4"), "sum"),
        (np.ones(3, np.complex64), "max"),
        (np.ones(3, bool), "sum"),
    ):
        try:
            world.all_reduce(x, op=op, algorithm="native")
        except ConfigError as error:
            texts.append(str(error))
    assert world.all_reduce(np.ones(3), algorithm="native").tolist() == [world.size] * 3
    return texts


def in_its_place(world: Group) -> list[Any]:
    """reduce_scatter into the own chunk of x: also where that is empty, and begins where x does."""
    results = []
    for length in (0, 1, 3, 5):
        x = np.arange(float(length))
        results.append(
            world.reduce_scatter(
                x, out=np.array_split(x, world.size)[world.rank], algorithm="native"
            ).tolist()
        )
    return results


def peaceful(world: Group) -> tuple[list[Any], list[str], list[Any]]:
    return in_many_groups(world), refused(world), in_its_place(world)


ONES = np.ones(6, np.float32)
HERE = r".*native_calls\.py:\d+"


def reduced(
    world: Group, x: np.ndarray = ONES, *, op: str = "sum", algorithm: str = "native"
) -> Any:
    return world.all_reduce(x, op=op, algorithm=algorithm)


def gathered(world: Group) -> Any:
    return world.all_gather(ONES, algorithm="native")


def in_groups(world: Group, *order: int) -> None:
    """A call in each of two groups of all ranks."""
    both = world.split(0), world.split(0)
    for which in order:
        group = both[which]
        assert group is not None
        reduced(group)


WAYS = {  # what all ranks but one do, and what that one does
    "verb": (reduced, lambda w: w.reduce_scatter(ONES, algorithm="native")),
    "shape": (reduced, lambda w: reduced(w, ONES.reshape(2, 3))),
    "dtype": (reduced, lambda w: reduced(w, ONES.view(np.int32))),
    "op": (reduced, lambda w: reduced(w, op="max")),
    "root": (
        lambda w: w.broadcast(ONES, root=0, algorithm="native"),
        lambda w: w.broadcast(ONES, root=1, algorithm="native"),
    ),
    "algorithm": (reduced, lambda w: reduced(w, algorithm="ring")),
    "group": (lambda w: in_groups(w, 0, 1), lambda w: in_groups(w, 1, 0)),
    "order": (lambda w: (reduced(w), gathered(w)), lambda w: (gathered(w), reduced(w))),
    "not calling": (reduced, lambda w: None),
}


def disagree(world: Group, kind: str, odd: int, folder: str) -> None:
    """Rank `odd` goes another way than the others; each leaves in a file what it raises."""
    usual, other = WAYS[kind]
    try:
        (other if world.rank == odd else usual)(world)
        text = "returned"
    except CommError as error:
        text = f"{type(error).__name__}: {error}"
        Path(folder, str(world.rank)).write_text(text)
        # mpirun kills the others within milliseconds of the first end
        deadline = time.monotonic() + 5
        while len(os.listdir(folder)) < world.size and time.monotonic() < deadline:
            time.sleep(0.01)
        raise
    Path(folder, str(world.rank)).write_text(text)


def left_waiting(world: Group) -> float:
    """Rank 0 alone is in MPI's barrier: its wait ends at the limit, without burning its core."""
    native = world.transport.native(world.id, world.world_ranks)
    meet = meeting(world)
    began = time.monotonic()
    burnt = time.thread_time()
    if world.rank == 0:
        limit = world.transport.limit
        world.transport.limit = 0.3
        try:
            native.barrier()
        except TimeoutError as error:
            assert "rank 0 waited 0.3 s in a collective of MPI's own" in str(error)
        else:
            raise AssertionError("the wait did not end")
        finally:
            world.transport.limit = limit
        assert 0.2 < time.monotonic() - began < limit / 2
        assert time.thread_time() - burnt < 0.1
    meet()  # in the barrier already, it would be seen that each waits for the other
    world.barrier()
    if world.rank != 0:
        native.barrier()
    return 1.0
