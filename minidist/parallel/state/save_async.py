"""Chapter 26 · Asynchronous saves: training stops only for one copy, and the disk writes during the
next steps.

The idea. A save waits for a disk, and meanwhile no rank computes. But while the disk writes, the
state only has to stay unchanged. So the state is copied in memory, which is ten times faster, and a
thread writes the copy.

    training   step 99 | copy | step 100 | step 101 | step 102 | …      updates do not touch the
    copy
    a thread                  | checksums, shard to the disk | all ranks? manifest |

The thread does what a blocking save does (checkpoint.py). It has a group of its own, so its
messages are never mixed with those of training. There the ranks agree whether all shards are on the
disk. No step of the training waits for that. A rank that waits there is no deadlock, because the
threads of the other ranks still run. If a rank dies, this wait ends as any other wait. There is one
save at a time: the next waits until the copy is free (`minidist train` postpones it until then, and
no step waits: cli/train/saving.py). If a disk fails, the draft is removed, rank 0 prints the reason
in a line, and training continues; the older checkpoints stay.

Memory: a second copy, on the host, of what a rank writes, allocated once and used for every save;
and a piece of 4 MiB. Cost, in the training's thread: at the first save, an exchange of the places
of each rank; at each save, one copy of what this rank writes (with offload=all it reads that from
its disk). In the background as checkpoint.save, in the phase "save".

notes:   N2 §12.4 抢占式实例 (N2:555)
Source:  Mohan et al. 2021, "CheckFreq": snapshot, then persist.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.health.failure import say_line, words
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.device.backend import device_of
from minidist.device.device_copies import copy, host_bytes, mark
from minidist.errors import CheckpointError, CommError
from minidist.optim import Optimizer
from minidist.parallel.state.checkpoint import chosen, layout_of, share_out, write_checkpoint
from minidist.parallel.state.state_map import small_state, state_arrays, state_places
from minidist.parallel.step.strategy import Strategy

# seconds between looks, while the training waits for a save, whether the job still stands
_LOOK = 0.1
_LINE = 64  # bytes on which each copy begins
_LINGER = 2.0  # seconds that a thread gets to leave a world that is lost, before that is closed
_LONG = 0.1  # seconds of a wait for the save before, from which on the user gets a message


def plain_start_save(file: Path, state: np.ndarray, room: np.ndarray) -> threading.Thread:
    """Save a vector behind the steps that follow. Join the thread before the next save: it reads
    `room`.

    Args:    room: like `state`, used for every save.
    """
    room[...] = state  # training stands still here, and only here

    def write() -> None:
        draft = file.with_suffix(".draft")
        with draft.open("wb") as stream:
            np.save(stream, room)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)  # at once: the old checkpoint or the new one

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


# The real one below copies the part of a strategy's state that one rank writes (checkpoint.py),
# lets all ranks agree before the manifest, keeps saves one after the other, and reports errors.


class PendingSave:
    """A save in progress.

    Attributes: folder; waited, copied: seconds for which the training stopped, for the save before
                and for the copy.
                seconds: of the writing, once it is done.
    """

    def __init__(self, folder: Path, group: Group, waited: float) -> None:
        self.folder = folder
        self.waited = waited
        self.copied = 0.0
        self.seconds = 0.0
        self._group = group
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether wait() would return or raise at once."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:  CheckpointError on every rank if one could not write; PeerLostError, TimeoutError
                 as any wait.
        """
        while not self._finished.wait(_LOOK):
            if error := self._group.transport.waits.failure(self._group.world_rank):
                raise error  # the thread may still hang on a disk
        if self._error is not None:
            raise self._error

    def linger(self) -> None:
        """Wait a short time, so that the thread can notice that the job is over."""
        self._finished.wait(_LINGER)

    def finish(self, error: BaseException | None, seconds: float) -> None:
        """Record the end of the save, or its error; the thread calls it."""
        self._error = error
        self.seconds = seconds
        self._finished.set()


class AsyncSaver:
    """The background saves of one training, any number of them. Every rank makes one AsyncSaver,
    between two steps.

    Args:    group: all ranks; it is split once. memory: the account of the host's memory that holds
             the copies.
             tell: called on rank 0 with a line about each save that failed, in the thread that
             writes; and by start() with one about the first save that had to wait.
    Raises:  MemoryLimitError if the copies do not fit.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        group: Group,
        *,
        memory: MemoryAccount | None = None,
        tell: Callable[[str], None] = say_line,
    ) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._tell = tell
        self._memory = memory or account.current()
        self._group = group.split(0, axis="save")
        places = state_places(strategy, optimizer)
        self._mine = share_out(places, group)
        self._places = [places[index] for index in self._mine]
        self._layout, self._copies = layout_of(self._places), self._room()
        self._last: PendingSave | None = None
        self._told = False  # the message that a save had to wait was printed
        self._saves: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._saves.put, None)
        threading.Thread(
            target=_carry_out,
            args=[self._saves],
            name=f"rank {group.world_rank} save",
            # once: a start waits until the system lets the thread run
            daemon=True,
        ).start()

    def start(self, folder: Path, about: dict[str, Any]) -> PendingSave:
        """Copy the state, and begin to write it. Every rank calls it, between two steps.

        Waits for the save before it. If that save failed, its error was reported already, and this
        save runs.

        Args:    as checkpoint.save; about may change afterwards.
        Raises:  PeerLostError, TimeoutError if the job is over.
        """
        begun = time.perf_counter()
        self.wait()
        save = PendingSave(folder, self._group, time.perf_counter() - begun)
        if save.waited > _LONG and self._group.rank == 0 and not self._told:
            self._told = True
            self._tell(
                f"minidist: {folder}: training waited {save.waited:.1f} s for the save before it; "
                f"save less often, or to a faster disk"
            )
        begun = time.perf_counter()
        arrays = chosen(state_arrays(self._strategy, self._optimizer, changes=False), self._mine)
        for array, target in zip(arrays, self._copies, strict=True):
            copy(array, target, mark(array))
        small = small_state(self._strategy, self._optimizer)
        about = deepcopy(about) | {"optimizer": type(self._optimizer).__name__}
        save.copied = time.perf_counter() - begun
        self._last = save
        self._saves.put(partial(self._write, save, small, about))
        return save

    def wait(self) -> None:
        """Return when no save is in progress. Raises: as start."""
        if self._last is not None:
            with suppress(CheckpointError):  # reported when it happened
                self._last.wait()
            self._last = None

    def close(self) -> None:
        """Wait for the last save, and free the copies. Raises: as start; the copies are freed then,
        too."""
        last = self._last
        try:
            self.wait()
            self._group.close()
        finally:
            if last is not None:
                last.linger()
            self._end()
            self._copies = []

    def _write(self, save: PendingSave, small: dict[str, Any], about: dict[str, Any]) -> None:
        """Write the copy as a blocking save does; runs in the thread."""
        begun = time.perf_counter()
        error: BaseException | None = None
        try:
            with account.use(self._memory), self._group.ledger.aside("save"):
                write_checkpoint(save.folder, about, self._layout, self._copies, small, self._group)
        except CheckpointError as failed:  # on all ranks
            error = failed
            if self._group.rank == 0:
                self._tell(f"minidist: {failed}")
        except BaseException as failed:  # on this rank: the others wait for it, so the job ends
            error = failed
            self._group.transport.abort(
                failed
                if isinstance(failed, CommError)
                else CommError(
                    f"the save of {save.folder} failed: {type(failed).__name__}: {words(failed)}"
                )
            )
        save.finish(error, time.perf_counter() - begun)

    def _room(self) -> list[np.ndarray]:
        """Return host memory for the numbers that this rank writes; its pages are allocated
        already."""
        sizes = [place.size * place.dtype.itemsize for place in self._places]
        ends = np.cumsum([-(-size // _LINE) * _LINE for size in sizes], dtype=np.int64).tolist()
        device = device_of(self._optimizer.slots[0].weights.data)
        room = self._memory.hold(host_bytes(ends[-1] if ends else 0, device), "workspace")
        room.fill(0)
        return [
            room[start : start + size].view(place.dtype)
            for place, size, start in zip(self._places, sizes, [0, *ends], strict=False)
        ]


def _carry_out(saves: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Run save after save in the thread, until None arrives."""
    while (save := saves.get()) is not None:
        save()
        del save  # it holds the copies
