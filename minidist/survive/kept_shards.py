"""Chapter 26 · Asynchronous servers and workers: what each keeps when another is lost, and what a
new one takes.

    lost       what is lost with it                                    what the others do
    a worker   the gradients that it was making                        nothing: no rank stops
    a server   the updates of its keys since it last sent a copy       leave, and begin again with the same weights

Workers of asynchronous servers (chapter 06) never wait for each other, so the loss of a worker
stops no rank. When a new process has started in its place, every worker pauses after the step that
it is in, and all ranks meet in a new generation (launch/elastic_job.py). There each process goes on
from what it has:

    a server           its keys, its optimizer's state, and the record of its updates
    a worker           the step that it was at. With local steps (chapter 21) also its own weights,
                       which are in the middle of a round, and its optimizer's state
    a new worker       the step of the worker that is ahead, and the weights that it pulls. What the
                       lost worker has not made stays unmade: else the others would have to wait
                       until the new one is as far as they are.
    a new server       the newest copy that a worker has: every so many updates a server sends its
                       optimizer's state behind the weights, to the worker that made the last of
                       them, and to each worker with its first push (bounded_staleness.Service)

The last copy is lost if it is on its way when the server is lost; then an older one is taken. If no
worker has a copy of a lost server's keys, the job ends with one line: their optimizer's state is
nowhere else.

Source:  Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section
         4.3 (replicas of a server's keys on other machines; here workers hold them, because they
         have the weights anyway).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.device.backend import Array
from minidist.observe.records import share_records
from minidist.optim import Optimizer
from minidist.parallel.compress.async_local_steps import AsyncLocalSteps
from minidist.parallel.data.bounded_staleness import ShardState, Update, state_of
from minidist.parallel.data.parameter_server import ParameterServer
from minidist.parallel.hybrid.hybrid import Trainer

UPDATES = 50  # from one copy of a server's state to the next, where the user does not say


class OwnRound(NamedTuple):
    """What a worker with local steps has of its own, in the middle of a round."""

    vectors: list[Array]  # its weights, then those that it pulled last
    versions: list[int]


class HeldState(NamedTuple):
    """What a process had when it left a generation.

    Attributes: steps: of a worker, as the trainer counts them; rounds: its pushes; None of a
    server.
                shards: by server; record: of its updates, if it was one.
                own, inner, counts: of a worker with local steps; own: None if its round was broken
                off.
    """

    steps: int | None
    rounds: int | None
    shards: dict[int, ShardState]
    record: list[Update] | None
    own: OwnRound | None
    inner: list[Array]
    counts: list[int]


class KeptShards:
    """As PeerCopies, for asynchronous servers and their workers.

    Args:       every: updates from one copy of a server's state to the next.
    Attributes: missing: losses that no rank knows; formed: for the job's record: `step`, of the
    worker that is ahead;
                `made`, of each (None: a server, or new); `versions` of the servers' keys.
    """

    def __init__(self, every: int = UPDATES) -> None:
        self.every = every
        self._kept: HeldState | None = None
        self._whole = self._paused = False
        self.missing: list[float] = []
        self.formed: dict[str, Any] = {}

    def restore(self, trainer: Trainer, known: int = 0) -> tuple[bool, list[int]]:
        """Give servers their shards and workers their places. Args, Returns: as
        KeptReplica.restore."""
        strategy = _central(trainer)
        world = trainer.world
        kept = self._kept
        self._whole = self._paused = False
        told = share_records(
            world,
            [
                known,
                None
                if kept is None
                else [
                    kept.steps,
                    kept.rounds,
                    [
                        [server, shard.version, kept.record is not None]
                        for server, shard in sorted(kept.shards.items())
                    ],
                    kept.own is not None,
                ],
            ],
        )
        known_by = [int(record[0]) for record in told]
        marks = [record[1] for record in told]
        holders = [_holder(marks, server) for server in range(strategy.servers)]
        if None in holders:
            return False, known_by
        self._hand_over(trainer, [holder for holder in holders if holder is not None])
        starts = self._starts(trainer, marks)
        strategy.state_replaced()  # all workers pull
        versions = [holder[0] for holder in holders if holder is not None]
        self._go_on(trainer, starts, versions)
        self.formed = {
            "step": max(steps for steps, _ in starts),
            "made": [mark and mark[0] for mark in marks],
            "versions": versions,
        }
        self.missing = [float("nan")] * max(0, trainer.steps_done - max(known_by))
        return True, known_by

    def begin(self, trainer: Trainer, generation: int) -> None:
        """The trainer's state is whole. Servers send copies from now on."""
        strategy = _central(trainer)
        if strategy.service is not None:
            strategy.service.copies = self.every
        self._whole = True
        self._kept = None

    def keep(self, trainer: Trainer) -> None:
        """After a step: nothing."""

    def boundary(self, step: int) -> int:
        """Each rank leaves when it hears that it is to."""
        return step

    def leave(self, trainer: Trainer) -> None:
        """This worker stops between two steps, because the ranks of the job change."""
        self._paused = True
        _central(trainer).pause()

    def release(self, trainer: Trainer) -> None:
        """The generation is over: keep what this process has. Sends nothing."""
        if not self._whole:
            return
        self._whole = False
        strategy = _central(trainer)
        service = strategy.service
        if service is not None:
            optimizer = (
                strategy.outer if isinstance(strategy, AsyncLocalSteps) else trainer.optimizer
            )
            shard = ShardState(
                service.version,
                strategy.shards[0].weights,
                state_of(optimizer),
                [slot.steps for slot in optimizer.slots],
            )
            number = strategy.group.rank - strategy.workers
            self._kept = HeldState(None, None, {number: shard}, service.record, None, [], [])
            return
        own = None
        inner = list[Array]()
        counts = list[int]()
        steps = strategy.pushes
        if isinstance(strategy, AsyncLocalSteps):
            inner = state_of(trainer.optimizer)
            counts = [slot.steps for slot in trainer.optimizer.slots]
            if self._paused:
                own = OwnRound([*_vectors(strategy), *strategy.pulled], strategy.versions)
                steps = strategy.made
            else:
                steps = strategy.every * strategy.pushes  # a round that was broken off begins again
        self._kept = HeldState(steps, strategy.pushes, strategy.copies, None, own, inner, counts)

    def _hand_over(self, trainer: Trainer, holders: Sequence[tuple[int, int]]) -> None:
        """Each shard goes from the rank that holds its newest version to its server. Args:
        (version, rank) of each."""
        strategy = _central(trainer)
        world = trainer.world
        optimizer = (
            strategy.outer
            if isinstance(strategy, AsyncLocalSteps) and strategy.serves
            else trainer.optimizer
        )
        with world.ledger.during("state"):
            for server, (version, source) in enumerate(holders):
                target = strategy.workers + server
                held = (
                    None
                    if world.rank != source or self._kept is None
                    else self._kept.shards[server]
                )
                if source != target and held is not None:
                    for array in [np.array(held.counts), *held.weights, *held.state]:
                        world.send(array, target)
                if world.rank != target:
                    continue
                if source != target:
                    vectors = strategy.shards[0].weights
                    counts, *arrays = [
                        world.recv(source)
                        for _ in range(1 + len(vectors) + len(state_of(optimizer)))
                    ]
                    held = ShardState(
                        version, arrays[: len(vectors)], arrays[len(vectors) :], counts.tolist()
                    )
                assert held is not None and strategy.service is not None
                _fill(strategy, optimizer, held)
                strategy.service.begin_at(
                    version, self._kept.record if source == target and self._kept else None
                )

    def _starts(self, trainer: Trainer, marks: Sequence[Any]) -> list[tuple[int, int]]:
        """(steps, pushes) that each worker begins with: its own, or those of the one that is
        ahead."""
        strategy = _central(trainer)
        every = strategy.every if isinstance(strategy, AsyncLocalSteps) else 1
        pushed = max([mark[1] for mark in marks if mark and mark[1] is not None], default=0)
        ahead = -(
            -max([mark[0] for mark in marks if mark and mark[0] is not None], default=0) // every
        )
        starts = [
            (mark[0], mark[1])
            if mark and mark[0] is not None
            else (every * max(ahead, pushed), max(ahead, pushed))
            for mark in marks[: strategy.workers]
        ]
        if strategy.service is not None:
            strategy.service.clocks.done = [pushes for _, pushes in starts]
        return starts

    def _go_on(
        self, trainer: Trainer, starts: Sequence[tuple[int, int]], versions: list[int]
    ) -> None:
        """After the pull: a worker's place; with local steps its own weights, unless its round was
        broken off."""
        strategy = _central(trainer)
        kept = self._kept
        trainer.steps_done = max(steps for steps, _ in starts)
        if not strategy.serves:
            trainer.steps_done, strategy.pushes = starts[strategy.group.rank]
            strategy.versions = versions
            strategy.copies = {} if kept is None else kept.shards
            if isinstance(strategy, AsyncLocalSteps):
                strategy.made = trainer.steps_done
                strategy.note_pulled()
                if kept is not None and kept.inner:
                    _fill_optimizer(trainer.optimizer, kept.inner, kept.counts)
                if kept is not None and kept.own is not None:
                    strategy.versions = kept.own.versions
                    for vector, had in zip(
                        [*_vectors(strategy), *strategy.pulled], kept.own.vectors, strict=True
                    ):
                        vector[...] = had
        trainer.steps_before = trainer.steps_done


def _central(trainer: Trainer) -> ParameterServer:
    strategy = trainer.strategy
    assert isinstance(strategy, ParameterServer)
    return strategy


def _vectors(strategy: ParameterServer) -> list[Array]:
    return [vector for shard in strategy.shards for vector in shard.weights]


def _holder(marks: Sequence[Any], server: int) -> tuple[int, int] | None:
    """(version, rank) of the newest state of a server's keys; its own comes before a copy of the
    same version."""
    found = [
        (version, own, -rank)
        for rank, mark in enumerate(marks)
        if mark is not None
        for number, version, own in mark[2]
        if number == server
    ]
    if not found:
        return None
    version, _, rank = max(found)
    return version, -rank


def _fill(strategy: ParameterServer, optimizer: Optimizer, held: ShardState) -> None:
    for vector, had in zip(strategy.shards[0].weights, held.weights, strict=True):
        vector[...] = had
    _fill_optimizer(optimizer, held.state, held.counts)


def _fill_optimizer(optimizer: Optimizer, state: Sequence[Array], counts: Sequence[int]) -> None:
    for array, had in zip(state_of(optimizer), state, strict=True):
        array[...] = had
    for slot, count in zip(optimizer.slots, counts, strict=True):
        slot.steps = count
