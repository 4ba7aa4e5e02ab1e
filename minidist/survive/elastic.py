"""Chapter 26 · Elastic training: ranks may die and join, and the training continues without a
restart.

    generation 1, 4 ranks   step 40   step 41   step 42 ✗ rank 2 is killed
    generation 2, 3 ranks                       step 42   step 43            from the copies of step 41 in memory
    generation 3, 4 ranks                                          step 44   a new process has started and joins

The idea. A rank that waits for a lost rank gets PeerLostError, in whatever call it is. Its process
need not end: it closes the world, and gets a rank in the next generation from the launcher
(launch/elastic_job.py). There the ranks agree on the newest step whose state they hold complete
(peer_copies.py), make a Trainer for the new plan, and fill its state. If they hold no complete
state, because a rank was lost together with its partner, they load the newest checkpoint.

The guarantee: the update of each step is applied once, to the state before it; an interrupted step
is made again from the beginning. Seed and step determine the batch of a step. So the losses equal
those of a training that changes its plan between the same steps on purpose (Trainer.change_plan);
under the same plan they are the same bits.

notes:   N2 §12.4 资源弹性调度 (N2:557)
Source:  Thorpe et al. 2023, "Bamboo"; Jang et al. 2023, "Oobleck" (2309.08125).
"""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.health.failure import say_line
from minidist.comm.ledger import Ledger
from minidist.comm.records import gather_records, share_records
from minidist.comm.transports.progress.mailbox import loopback
from minidist.device import account
from minidist.errors import CheckpointError, MinidistError
from minidist.launch.generations import Generations
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.state.manifest import unpacked
from minidist.survive.peer_copies import PeerCopies

WAIT_LIMIT = 120.0  # seconds of one wait inside a generation


class Regrouping(Exception):
    """Raised on all ranks between two steps when they stop because more ranks can take part."""


class Survivor:
    """The data that a process keeps from one generation to the next.

    Args:       job: its membership in the job. copies: of its state (None: PeerCopies, after each
                step). newest: returns the complete checkpoints, the newest first; if the ranks of a
                generation hold no state, they load the first that is undamaged. Rank 0's list
                counts.
    Attributes: losses, seconds, generations: one entry for each step that counts, even if this
                process did not take part; generation 0: the step was made before this job.
                past: what this process sent in each earlier generation.
    """

    def __init__(
        self,
        job: Generations,
        *,
        copies: PeerCopies | None = None,
        newest: Callable[[], Sequence[Path]] = lambda: (),
    ) -> None:
        self.job = job
        self._newest = newest
        self._copies = copies or PeerCopies()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.generations: list[int] = []
        self.past: list[dict[str, Any]] = []
        self._fresh = True
        self._trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Give a new Trainer the state that the ranks hold, or a checkpoint's, before a
        generation's first step.

        Raises: CheckpointError if no checkpoint can be loaded; without any, only if the job has
                begun and does not save.
        """
        self._trainer = trainer
        restored, known = self._copies.restore(trainer, len(self.losses))
        if restored:
            self._share_history(trainer, known)
        else:
            self._load(trainer)
        self._copies.begin(trainer, self.job.number)
        self._fresh = True
        if trainer.world.rank == 0:
            self.job.tell("formed", step=trainer.steps_done)

    def after_step(
        self,
        trainer: Trainer,
        loss: float,
        seconds: float,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Record a finished step, keep the state, then call `then`.

        Raises: Regrouping if all ranks stop here.
        """
        self.job.steps = trainer.steps_done
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.generations.append(self.job.number)
        self._copies.keep(trainer)
        if self._fresh and trainer.world.rank == 0:
            self.job.tell("stepped", step=trainer.steps_done)
        self._fresh = False
        then()
        if self.job.stops(trainer.steps_done, self._copies.boundary(trainer.steps_done)):
            self._copies.leave(trainer)
            raise Regrouping

    def release(self) -> None:
        """After a generation: note what was sent in it, and release its trainer's threads, files
        and arrays."""
        trainer = self._trainer
        self._trainer = None
        if trainer is not None:
            ledger = trainer.world.ledger
            self.past.append(
                {
                    "generation": self.job.number,
                    "process": self.job.process,
                    "rank": trainer.world.rank,
                    "steps": trainer.steps_here,
                    "sent_bytes": ledger.sent_bytes("step"),
                    "messages": ledger.messages("step"),
                }
            )
            with suppress(MinidistError, OSError):
                trainer.close()
            del trainer
        gc.collect()

    def _load(self, trainer: Trainer) -> None:
        """Load the newest undamaged checkpoint.

        Without any, a job begins; it begins again only if it saves.
        """
        problems = []
        for name in share_records(
            trainer.world, [os.fsencode(folder) for folder in self._newest()]
        )[0]:
            name = os.fsdecode(name)
            try:
                about = trainer.load(name)
                break
            except CheckpointError as error:
                problems.append(str(error))
        else:
            if not problems and (self.job.saves or not self.job.begun):
                if self.job.begun and trainer.world.rank == 0:
                    say_line(
                        "minidist: ranks were lost with the only copies of their state, before "
                        "the first checkpoint; beginning anew"
                    )
                self._take_history({}, 0)
                return
            why = problems[0] if problems else "there is no checkpoint"
            why = (
                f"ranks were lost with the only copies of their state, and {why}"
                if self.job.begun
                else why
            )
            self.job.tell("give_up", why=why)
            raise CheckpointError(why)
        if trainer.world.rank == 0:
            for problem in problems:
                say_line(
                    f"minidist: {problem.removesuffix('; take an older checkpoint')}; taking "
                    f"{Path(name).name}"
                )
            if self.job.begun:
                say_line(
                    "minidist: ranks were lost with the only copies of their state; continuing "
                    f"from {name}"
                )
        self._take_history(about.get("metrics", {}), trainer.steps_done)

    def _take_history(self, told: dict[str, Any], done: int) -> None:
        """Take the record of the first `done` steps from a checkpoint, if this process does not
        know them all."""
        if len(self.losses) < done:
            self.losses = unpacked(told.get("losses", []))
            self.seconds = [told.get("step_seconds", 0.0)] * len(self.losses)
            self.generations = unpacked(told.get("generations", [])) if self.job.begun else []
        self.losses, self.seconds = self.losses[:done], self.seconds[:done]
        self.generations = [*[0] * (len(self.losses) - len(self.generations)), *self.generations][
            : len(self.losses)
        ]

    def _share_history(self, trainer: Trainer, known: list[int]) -> None:
        """Share the record of the steps from the first rank that knows most, if some rank does not
        know them all.

        Args: known: the number of steps that each rank knows.
        """
        world = trainer.world
        source = known.index(max(known))
        mine = len(self.losses)
        notes = np.array([self.losses, self.seconds, self.generations])
        if min(known) < max(known):
            with world.ledger.control():
                told = world.broadcast(notes if world.rank == source else None, root=source)
            notes = np.concatenate([notes, told[:, mine:]], axis=1)
        notes = notes[:, : trainer.steps_done]
        self.losses = notes[0].tolist()
        self.seconds = notes[1].tolist()
        self.generations = [int(number) for number in notes[2]]

    def records(self, world: Group) -> list[dict[str, Any]]:
        """Return the generations for metrics.json on rank 0, nothing on others.

        Every rank calls it at the end.
        """
        past = gather_records(world, self.past)
        return (
            []
            if past is None
            else describe(self.job.records(), [sent for own in past for sent in own])
        )


def go_on(
    survivor: Survivor, work: Callable[[Group], int], *, transport: str | None, threads: int | None
) -> int:
    """Call `work(world)` in one generation after another until it finishes; return its result.

    A process that the job no longer needs returns 0.
    Raises: the exception of `work`, if its reason is not a lost rank or connection.
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
            job.leave(None, survivor.release)
        except Exception as error:
            if not job.breaks(error):
                raise
            job.leave(error, survivor.release)


def rehearse(zero: int = 0) -> None:
    """Train a tiny model in this process, so that everything that loads at its first use is loaded
    before it is needed."""
    np.median([0.0])  # for the median step: 10 ms of modules
    world = Group(loopback(0, WAIT_LIMIT), Ledger(0), (0,))
    tokens = np.zeros((1, 4), np.int64)
    copies = PeerCopies()
    with account.use(account.MemoryAccount()):
        trainer = Trainer(
            Plan(zero=zero), GPTConfig(vocabulary=4, context=4, layers=1, width=8, heads=1), world
        )
        copies.begin(trainer, 0)
        trainer.step((tokens, tokens))
        copies.keep(trainer)
        copies.restore(trainer)
        trainer.close()
    world.close()


def describe(
    records: list[dict[str, Any]], past: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the generations for metrics.json.

    Args:    past: `Survivor.past` of the living processes; the record of the others is lost with
             them.
    Returns: for each generation, `processes` by rank; `lost`: since the previous generation;
             `began`, `ended`: seconds of the job; `seconds`: from the end of the previous
             generation to a step that counts; `ranks`: from `past`.
    """
    told: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        ended = _end(records[number - 1]) if number else 0.0
        stepped = record.get("stepped")
        told.append(
            {
                **{
                    key: record[key]
                    for key in ("generation", "size", "processes", "joined", "lost")
                },
                "step": record.get("step"),
                "began": record.get("forming"),
                "ended": _end(record),
                "seconds": None if stepped is None or ended is None else round(stepped - ended, 4),
                "ranks": sorted(
                    (
                        {key: value for key, value in sent.items() if key != "generation"}
                        for sent in past
                        if sent["generation"] == record["generation"]
                    ),
                    key=lambda sent: sent["rank"],
                ),
            }
        )
    return told


def _end(record: dict[str, Any]) -> float | None:
    """Return when a generation broke, or stopped so that more ranks could join; None if neither."""
    ended: float | None = record.get("broken", record.get("left"))
    return ended
