"""Chapter 26 · Ranks that meet seldom: what each keeps when another is lost, and what a new one
takes.

    generation 1   ranks 0 1 2   meeting 4 ... step 47   step 48   ✗ rank 1 is killed
    generation 2   ranks 0   1                           step 48   step 49   step 50: meeting 5 of two
    generation 3   ranks 0 2 1                                                       step 51   a new rank has joined

With local steps (chapter 21) each rank has weights of its own. So no copy of them is kept anywhere,
no step is made again, and nothing is done from step to step: after a loss each rank goes on from
the weights that it has.

What the ranks of a new generation agree on:

    the step        the newest that one of them has made. A rank that was a step behind leaves that
                    step out: its weights stay, and it goes on with the same step as the others.
    the meetings    the most that one of them has held (compress/broken_meeting.py). A rank that has
                    held fewer takes the common weights and the outer momentum from the first that
                    has held so many. A meeting that no rank of them has held is held again, by
                    them.

So common weights and outer momentum have the same bits on all ranks, and each rank's own weights
are its own. A rank that is new, or has missed two periods, begins with the common weights and with
the inner optimizer's state of the first rank that goes on: Adam's moments are similar on all ranks,
and zeros would give large first steps.

Losses of steps whose sum never came are the mean over the rows of the ranks that are left.

Cost:    nothing from step to step. After a loss: the outer state once for each rank that has held
         fewer meetings; for each new rank the inner optimizer's state beside it.
Source:  Douillard et al. 2023 (2311.08105), section 3.1: ranks that come and go; Jaghouar et al.
         2024, "INTELLECT-1 Technical Report" (2412.01152): new ranks take the outer state from a
         peer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.observe.records import share_records
from minidist.optim import Optimizer
from minidist.parallel.compress.broken_meeting import catch_up, leave
from minidist.parallel.compress.local_steps import LocalSteps
from minidist.parallel.hybrid.hybrid import Trainer


def plain_go_on(group: Group, held: int, common: np.ndarray, momentum: np.ndarray) -> int:
    """After a loss, in the group of the ranks that are left: how many meetings count; their outer
    state, on all."""
    counts = group.all_gather(np.array([held]))
    source = int(counts.argmax())  # a sum that has arrived on one rank is whole
    for state in (common, momentum):
        state[...] = group.broadcast(state, root=source)
    return int(counts[source])  # one fewer than are due: that meeting is held again


# `KeptReplica` below adds what a process keeps from one group to the next, ranks that are a step
# behind, new ranks, fragments that are on their way (streaming.py), and sends the state to those
# ranks alone that lack it.

Marks = dict[str, Any]
"""How far a rank is: steps, met, merged, rows, recent, as in LocalSteps."""


class Replica(NamedTuple):
    """What a rank had when it left a generation. The arrays are those of its trainer, which is
    gone."""

    marks: Marks
    own: Array
    outer: list[Array]  # the common weights, then the outer momentum by fragment
    inner: list[Array]  # the inner optimizer's, by tensor
    counts: list[int]  # updates of each tensor: the inner optimizer's, then the outer one's


class KeptReplica:
    """As PeerCopies, for ranks with weights of their own.

    Args:       period: H, the steps from meeting to meeting.
    Attributes: missing: losses of the newest steps, which no rank's sum of losses has.
                formed: for the job's record: `met`, and `made`: how many steps each rank had made
                (None: it is new).
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self._kept: Replica | None = None
        self._whole = False  # the present trainer's state is
        self.missing: list[float] = []
        self.formed: dict[str, Any] = {}

    def restore(self, trainer: Trainer, known: int = 0) -> tuple[bool, list[int]]:
        """Fill the trainer's state: with what this rank has, and what it lacks from the others.

        Args:    known: the number of losses that this rank knows.
        Returns: whether a rank has a state, else nothing is changed; and how many losses each
        knows.
                 Every rank calls it.
        """
        self._whole = False
        kept = self._kept
        strategy = _local(trainer)
        told = share_records(trainer.world, [known, None if kept is None else kept.marks])
        known_by = [int(record[0]) for record in told]
        marks = [record[1] for record in told]
        there = [each for each in marks if each is not None]
        if not there:
            return False, known_by
        step = max(each["steps"] for each in there)
        met = max(each["met"] for each in there)
        going_on = [
            each is not None and each["steps"] + 2 * strategy.every > step for each in marks
        ]
        mine = kept if going_on[trainer.world.rank] else None
        strategy.steps = step
        strategy.met = met
        strategy.rows = max(each["rows"] for each in there)
        if mine is not None:
            _fill(trainer, mine)
        _hand_out(trainer, going_on, [each is not None and each["met"] == met for each in marks])
        if mine is None:
            strategy.own[...], strategy.merged = strategy.common, min(strategy.due(step)[1], met)
        trainer.steps_done = trainer.steps_before = step
        self.missing = [_mean_loss(there, each) for each in range(max(known_by) + 1, step + 1)]
        self.formed = {
            "met": met,
            "made": [
                each["steps"] if goes else None for each, goes in zip(marks, going_on, strict=True)
            ],
        }
        self._whole = True
        self._kept = None
        catch_up(strategy)
        return True, known_by

    def begin(self, trainer: Trainer, generation: int) -> None:
        """The trainer's state is whole: of a run that begins, of a checkpoint, or of `restore`."""
        self._whole = True
        self._kept = None

    def keep(self, trainer: Trainer) -> None:
        """After a step: nothing."""

    def boundary(self, step: int) -> int:
        """The meeting after which all may leave, `step` steps being done on rank 0: others may be a
        step ahead of it."""
        return -(-(step + 2) // self.period) * self.period

    def leave(self, trainer: Trainer) -> None:
        """All ranks stop after the same meeting."""
        _local(trainer).settle()
        trainer.world.barrier()

    def release(self, trainer: Trainer) -> None:
        """The generation is over: keep what this rank has. Sends nothing."""
        if not self._whole:
            return
        self._whole = False
        strategy = _local(trainer)
        leave(strategy)
        marks = {name: getattr(strategy, name) for name in ("steps", "met", "merged", "rows")}
        self._kept = Replica(
            {**marks, "recent": [list(each) for each in strategy.recent]},
            strategy.own,
            _outer_arrays(strategy),
            _inner_arrays(trainer.optimizer),
            [slot.steps for slot in (*trainer.optimizer.slots, *strategy.outer.slots)],
        )


def _local(trainer: Trainer) -> LocalSteps:
    strategy = trainer.strategy
    assert isinstance(strategy, LocalSteps)
    return strategy


def _outer_arrays(strategy: LocalSteps) -> list[Array]:
    return [
        strategy.common,
        *(array for slot in strategy.outer.slots for array in slot.state.values()),
    ]


def _inner_arrays(optimizer: Optimizer) -> list[Array]:
    return [array for slot in optimizer.slots for array in slot.state.values()]


def _fill(trainer: Trainer, kept: Replica) -> None:
    """This rank's own state, and the outer one as far as it has it."""
    strategy = _local(trainer)
    strategy.own[...] = kept.own
    strategy.merged = kept.marks["merged"]
    strategy.recent.extend(tuple(each) for each in kept.marks["recent"])
    arrays = [*_outer_arrays(strategy), *_inner_arrays(trainer.optimizer)]
    for array, had in zip(arrays, [*kept.outer, *kept.inner], strict=True):
        array[...] = had
    for slot, count in zip(
        (*trainer.optimizer.slots, *strategy.outer.slots), kept.counts, strict=True
    ):
        slot.steps = count


def _hand_out(trainer: Trainer, going_on: Sequence[bool], met_all: Sequence[bool]) -> None:
    """The first rank that has held all meetings sends the outer state to those that have not. New
    ranks get the inner state of the first rank that goes on, too.

    Args: of each rank: whether it goes on with weights of its own; whether it has held all
    meetings.
    """
    world = trainer.world
    strategy = _local(trainer)
    source = met_all.index(True)
    teacher = going_on.index(True)
    with world.ledger.during("state"):
        for rank in range(world.size):
            if not (going_on[rank] and met_all[rank]):
                _send_state(world, source, rank, _outer_arrays(strategy), strategy.outer)
            if not going_on[rank]:
                _send_state(
                    world, teacher, rank, _inner_arrays(trainer.optimizer), trainer.optimizer
                )


def _send_state(
    world: Group, source: int, rank: int, arrays: Sequence[Array], optimizer: Optimizer
) -> None:
    """Arrays, and how often the optimizer has updated each of its tensors, from one rank to
    another."""
    if world.rank == source:
        for array in arrays:
            world.send(array, rank)
        world.send(np.array([slot.steps for slot in optimizer.slots]), rank)
    elif world.rank == rank:
        for array in arrays:
            world.recv(source, out=array)
        for slot, count in zip(optimizer.slots, world.recv(source).tolist(), strict=True):
            slot.steps = count


def _mean_loss(marks: Sequence[Marks], step: int) -> float:
    """The mean loss of a step over the rows of those that remember it; NaN if none does."""
    shares = [
        (loss, rows) for each in marks for number, loss, rows in each["recent"] if number == step
    ]
    rows = sum(share for _, share in shares)
    return sum(loss for loss, _ in shares) / rows if rows else float("nan")
