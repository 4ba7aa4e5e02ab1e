"""Saves that are killed: file-system calls are counted, and at a chosen one the process sends
itself SIGKILL.

    python torn_saves.py BASE OUT SAMPLE     kills a save of two ranks (threads of one process,
                                             which all die) in copies of the run BASE, at SAMPLE
                                             calls of each rank, spread evenly (0: at each)

Prints a JSON list of [folder of the copy, rank, number of the call, the call].
"""

import json
import os
import pathlib
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CALLS = (
    "open",
    "pwrite",
    "fsync",
    "close",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "stat",
    "scandir",
)
CHANGES: dict[str, Any] = {"layers": 1}
PLAN: dict[str, Any] = {"dp": 2, "zero": 2}


@contextmanager
def watched(before: Callable[..., Any]) -> Iterator[None]:
    """In the block `before(name, *arguments)` is called ahead of each file-system call, in the
    thread that makes it.

    It may raise; or return a number, which the call then returns, and which is not made.
    """

    def watching(name: str, call: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            instead = before(name, *arguments)
            return call(*arguments, **options) if instead is None else instead

        return made

    saved = [(os, name, getattr(os, name)) for name in CALLS] + [
        (pathlib.Path, "open", pathlib.Path.open)
    ]
    # in Python 3.10 a Path took its calls from os before this
    accessor = getattr(pathlib, "_normal_accessor", None)
    saved += [
        (accessor, name, getattr(accessor, name))
        for name in set(CALLS) - {"open"}
        if hasattr(accessor, name)
    ]
    for owner, name, call in saved:
        setattr(owner, name, watching(name, call))
    try:
        yield
    finally:
        for owner, name, call in saved:
            setattr(owner, name, call)


def torn_save(world: Any, folder: str, victim: int, at: int, told: str = "") -> None:
    """Train two steps and save; rank `victim` is killed at call number `at` of the save, a write
    half made.

    `told`: a file that gets the names of the calls so far.
    """
    from checkpoints import make, steps

    trainer = make(world, PLAN, CHANGES, {})
    steps(trainer, 2)
    me = threading.current_thread()
    names = list[str]()
    pwrite = os.pwrite

    def before(name: str, *arguments: Any) -> None:
        if threading.current_thread() is not me or world.rank != victim:
            return
        if len(names) == at:
            if name == "pwrite":
                descriptor, data, start = arguments
                pwrite(descriptor, data[: len(data) // 2], start)
            os.kill(os.getpid(), signal.SIGKILL)
        names.append(name)

    world.barrier()
    if world.rank == victim:  # threads share `os`: one of them watches it
        with watched(before):
            world.barrier()
            trainer.save(folder)
            world.barrier()
        if told:
            Path(told).write_text(json.dumps(names))
    else:
        world.barrier()
        trainer.save(folder)
        world.barrier()
    trainer.close()


def in_fork(*arguments: Any) -> int:
    """How a process that runs torn_save on two threads ends: its exit status."""
    import minidist as md

    child = os.fork()
    if not child:
        try:
            md.run(torn_save, *arguments, size=2)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(base: str, out: str, sample: int) -> None:
    killed: list[Any] = []
    for victim in range(2):
        counted = Path(out, f"calls-{victim}")
        names = Path(out, f"names-{victim}")
        shutil.copytree(base, counted)
        assert in_fork(str(counted / "step-000002"), victim, -1, str(names)) == 0
        calls = json.loads(names.read_text())
        for at in (
            range(len(calls))
            if not sample
            else np.linspace(1, len(calls) - 1, sample).astype(int).tolist()
        ):
            run = Path(out, f"run-{victim}-{at}")
            shutil.copytree(base, run)
            assert in_fork(str(run / "step-000002"), victim, at) == -signal.SIGKILL, (victim, at)
            killed.append([str(run), victim, at, calls[at]])
    print(json.dumps(killed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
