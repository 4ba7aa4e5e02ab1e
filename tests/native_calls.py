"""What ranks of mpi do in tests/comm/collectives/test_native.py: in a module of its own, so that they can import it."""

import time
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.errors import ConfigError, TimeoutError


def in_many_groups(world: Group) -> list[Any]:
    """Native calls in the world, in two halves of it, and in a group that is the world again; two of them at once."""
    half, again = world.split(world.rank // 2), world.split(0, key=-world.rank)
    assert half is not None
    assert again is not None
    started = [half.start_all_reduce(np.full(5000, world.rank + 1.0), algorithm="native"),
               again.start_all_gather(np.array([world.rank]), algorithm="native"),
               world.start_all_reduce(np.array([world.rank]), op="max", algorithm="native")]
    return [pending.wait().tolist()[:8] for pending in reversed(started)]


def refused(world: Group) -> list[str]:
    """What MPI does not know is refused on every rank before anything is sent; the group stays usable."""
    texts = []
    for x, op in ((np.ones(3, np.float16), "sum"), (np.ones(3, ">f4"), "sum"), (np.ones(3, np.complex64), "max"),
                  (np.ones(3, bool), "sum")):
        try:
            world.all_reduce(x, op=op, algorithm="native")
        except ConfigError as error:
            texts.append(str(error))
    assert world.all_reduce(np.ones(3), algorithm="native").tolist() == [world.size] * 3
    return texts


def disagree(world: Group, kind: str) -> Any:
    """Rank 1 means something else than the others."""
    odd = world.rank == 1
    if kind == "op":
        return world.all_reduce(np.ones(4), op="max" if odd else "sum", algorithm="native")
    if kind == "root":
        return world.broadcast(np.ones(4), root=int(odd), algorithm="native")
    return world.all_gather(np.ones(4), algorithm="ring" if odd else "native")


def left_waiting(world: Group) -> float:
    """Rank 0 alone is in MPI's barrier: its wait ends at the limit, without burning its core."""
    native, began, burnt = world.transport.native(world.id, world.world_ranks), time.monotonic(), time.thread_time()
    if world.rank == 0:
        limit, world.transport.limit = world.transport.limit, 0.3
        try:
            native.barrier()
        except TimeoutError as error:
            assert "rank 0 waited 0.3 s in a collective of MPI's own" in str(error)
        else:
            raise AssertionError("the wait did not end")
        finally:
            world.transport.limit = limit
        assert 0.2 < time.monotonic() - began < 3
        assert time.thread_time() - burnt < 0.1
    else:
        time.sleep(0.5)     # in the barrier already, it would be seen that each waits for the other
    world.barrier()
    if world.rank != 0:
        native.barrier()
    return 1.0
