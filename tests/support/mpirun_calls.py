"""What ranks of a new mpirun run for tests/launch/test_mpirun.py: they import this module, without
pytest."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np


def work(world: Any, values: list[float], *, factor: int = 2) -> tuple[int, np.ndarray, str]:
    """A rank's number, a sum over the ranks, and the transport."""
    total = world.all_reduce(np.asarray(values) * world.rank)
    return world.rank, total * factor, world.transport.name


class Mute(Exception):
    """Its str() raises."""

    def __str__(self) -> str:
        raise OSError("no words")


def throw(error: BaseException) -> None:
    raise error


def end(world: Any, how: str) -> int:
    """Rank 1 ends so, while the others wait for it."""
    world.barrier()
    if world.rank == 1:
        {
            "raise": lambda: int("no number"),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda: throw(SystemExit(256)),
            "leave": sys.exit,
            "sleep": lambda: time.sleep(60),
            "mute": lambda: throw(Mute("mine")),
            "surrogate": lambda: throw(ValueError("\ud800")),
            "start": lambda: None,
        }[how]()
    if how == "start":  # the ranks disagree, and none waits for it
        world.start_all_reduce(np.ones(3 + world.rank))
    elif how != "sleep":
        world.barrier()
    return int(world.rank)
