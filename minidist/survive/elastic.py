"""Chapter 26 · Elastic training: ranks may die and join, and the training goes on without a restart.

    generation 1, 4 ranks   step 40   step 41   step 42 ✗ rank 2 is killed
    generation 2, 3 ranks                       step 42   step 43            from the copies of step 41 in memory
    generation 3, 4 ranks                                          step 44   a new process has started and joins

The idea. A rank that waits for a lost one gets PeerLostError, in whatever call it is. Its process need not end: it
closes the world, and gets a rank in the next generation from the launcher (launch/elastic_job.py). There the ranks
agree on the newest step that they hold whole (peer_copies.py), make a Trainer for the new plan, and fill its state.

What holds: the update of each step is made once, on the state before it; a step that was broken off is made again
from the beginning. The batch of a step follows from seed and step, so the losses are those of a training that changes
its plan between the same steps on purpose (Trainer.change_plan); under the same plan they are the same bits.

notes:   N2 §12.4 资源弹性调度 (N2:557)
Source:  Thorpe et al. 2023, "Bamboo"; Jang et al. 2023, "Oobleck" (2309.08125).
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.ledger import Ledger
from minidist.comm.transports.progress.mailbox import loopback
from minidist.device import account
from minidist.errors import CheckpointError, MinidistError
from minidist.launch.generations import Generations
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.survive.peer_copies import PeerCopies

WAIT_LIMIT = 120.0      # seconds of one wait inside a generation


class Regrouping(Exception):
    """All ranks stop between two steps, because more of them can take part."""


class Survivor:
    """What a process keeps from one generation to the next.

    Args:       job: its place in the job. every: steps between copies.
                newest: the newest checkpoint on the disk, or None; asked when the copies in memory are not enough.
    Attributes: losses, seconds: of each step that was made, this process having been there or not.
    """

    def __init__(self, job: Generations, *, every: int = 1, newest: Callable[[], Path | None] = lambda: None) -> None:
        self.job, self._newest = job, newest
        self._copies = PeerCopies(every)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._fresh = True
        self._trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Before the first step of a generation: give a new Trainer the state that the ranks hold.

        Raises: CheckpointError if they do not hold it whole, and there is no checkpoint.
        """
        self._trainer = trainer
        restored, known = self._copies.restore(trainer, len(self.losses))
        if not restored and self.job.begun:
            folder = self._newest()
            if folder is None:
                why = "ranks were lost with the only copies of their state, and there is no checkpoint"
                self.job.tell("give_up", why=why)
                raise CheckpointError(why)
            trainer.load(folder)
        self._share_history(trainer, known)
        self._copies.begin(trainer, self.job.number)
        self._fresh = True
        if trainer.world.rank == 0:
            self.job.tell("formed", step=trainer.steps_done)

    def after_step(self, trainer: Trainer, loss: float, seconds: float) -> None:
        """After a step: note it and keep the state. Raises: Regrouping if all ranks are to stop here."""
        self.losses.append(loss)
        self.job.steps = trainer.steps_done
        self.seconds.append(seconds)
        self._copies.keep(trainer)
        if self._fresh and trainer.world.rank == 0:
            self.job.tell("stepped", step=trainer.steps_done)
        self._fresh = False
        if self.job.stops(trainer.steps_done):
            trainer.world.barrier()     # no rank leaves while another still takes its copies
            raise Regrouping

    def release(self) -> None:
        """After a generation: let its trainer's threads, files and arrays go."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            with suppress(MinidistError, OSError):
                trainer.close()
            del trainer
        gc.collect()

    def _share_history(self, trainer: Trainer, known: list[int]) -> None:
        """Losses and seconds of the steps so far, from the first rank that knows most, if one does not know them all.

        Args: known: how many steps each rank knows.
        """
        done, world = trainer.steps_done, trainer.world
        source = known.index(max(known))
        if min(known) >= min(done, max(known)):
            self.losses, self.seconds = self.losses[:done], self.seconds[:done]
            return
        told = np.array([self.losses[:done], self.seconds[:done]]) if world.rank == source else None
        with world.ledger.control():
            losses, seconds = world.broadcast(told, root=source)
        self.losses, self.seconds = losses.tolist(), seconds.tolist()


def go_on(survivor: Survivor, work: Callable[[Group], int], *, transport: str | None, threads: int | None) -> int:
    """Do `work(world)` in one generation after another, until it is done in one; returns what it returned.

    A process that the job no longer needs returns 0.
    Raises: what the work raises for another reason than a lost rank or connection.
    """
    job = survivor.job
    while True:
        try:
            world = job.next_world(transport, WAIT_LIMIT, threads)
            if world is None:
                return 0
            status = work(world)
            job.done()
            return status
        except Regrouping:
            job.leave()
        except Exception as error:
            if not job.breaks(error):
                raise
            job.leave(error)
        survivor.release()


def rehearse(zero: int = 0) -> None:
    """Train a tiny model alone: what is loaded at its first use is there before this process is needed."""
    world = Group(loopback(0, WAIT_LIMIT), Ledger(0), (0,))
    tokens, copies = np.zeros((1, 4), np.int64), PeerCopies()
    with account.use(account.MemoryAccount()):
        trainer = Trainer(Plan(zero=zero), GPTConfig(vocabulary=4, context=4, layers=1, width=8, heads=1), world)
        copies.begin(trainer, 0)
        trainer.step((tokens, tokens))
        copies.keep(trainer)
        copies.restore(trainer)
        trainer.close()
    world.close()


def describe(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The generations as metrics.json has them: `seconds` is from the end of the one before to a step that counts."""
    told = []
    for number, record in enumerate(records):
        ended = records[number - 1].get("broken", records[number - 1].get("left")) if number else 0.0
        stepped = record.get("stepped")
        told.append({**{key: record[key] for key in ("generation", "size", "processes", "joined", "lost")},
                     "step": record.get("step"),
                     "seconds": None if stepped is None or ended is None else round(stepped - ended, 4)})
    return told
