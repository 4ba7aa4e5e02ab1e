"""An asynchronous server: a thread for each worker, and how far one may be ahead.

    thread of worker 0     recv | update | wait for its turn | copy | send        recv | ...
    thread of worker 1          recv     | update | copy | send     recv | ...
                                         one update at a time: its place in the record

    staleness 1        step 0   step 1   step 2
    fast worker        ######|  ######|  . . . . ######|       it may be one step ahead of the
                                                               slowest, not two
    slow worker        ################|  ################|

The server makes an update of each gradient as it comes. What the weights then are depends on the
order of the updates, and on which weights each gradient was made from: its record.
data/replay_updates.py makes the same updates again.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server".
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.data.rank_batch import check_digests
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import CommError, PeerLostError, TimeoutError
from minidist.nn import Module
from minidist.optim import Optimizer, clip_scale, global_norm
from minidist.parallel.data.server_keys import Shard, assign
from minidist.parallel.step.flat import Piece, trainable
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import zero_unused

FINISHED = -1.0
"""Step that a worker names when it pushes nothing: it has made all of them."""

REFUSED = -3
"""In place of its version, in a server's answer: two workers' batches differ. Of each follow its
rank and digests."""


class Update(NamedTuple):
    """One update of a server, in its record.

    Attributes: worker    whose gradient it was, of its step `step`
                versions  for each server, how many updates it had made when the worker read the
                          weights of that step
                lr        the learning rate; NaN: the optimizer's own
    """

    worker: int
    step: int
    versions: tuple[int, ...]
    lr: float


class Clocks:
    """The number of steps that each worker has done, as one server sees it. A worker's own thread
    calls the methods.

    Args:    staleness: how many steps a worker may be ahead of the slowest; None: any number.
             limit: seconds that it may have to wait.
    """

    def __init__(self, workers: int, staleness: int | None, limit: float) -> None:
        self.done = [0] * workers
        self.staleness = staleness
        self.limit = limit
        self.running = set(range(workers))
        self.failure: BaseException | None = None
        self.lock = threading.Condition()  # held while weights change or are copied

    def tick(self, worker: int) -> None:
        """The worker has done a step."""
        with self.lock:
            self.done[worker] += 1
            self.lock.notify_all()

    def leave(self, worker: int) -> None:
        """The worker has done all its steps, or is lost: no wait counts it any more."""
        with self.lock:
            self.running.discard(worker)
            self.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """The server cannot go on: every wait raises `error`."""
        with self.lock:
            self.failure = self.failure or error
            self.lock.notify_all()

    def wait_turn(self, worker: int) -> None:
        """Return when the worker is no more than `staleness` steps ahead."""
        self._wait(
            lambda: (
                self.staleness is None
                or not self.running
                or self.done[worker] - min(self.done[other] for other in self.running)
                <= self.staleness
            ),
            worker,
        )

    def wait_end(self, worker: int) -> None:
        """Return when all workers have left."""
        self._wait(lambda: not self.running, worker)

    def _wait(self, ready: Callable[[], bool], worker: int) -> None:
        with self.lock:
            self.lock.wait_for(lambda: ready() or self.failure is not None, self.limit)
            if self.failure is not None:
                raise CommError(f"worker {worker} is not served any more: {self.failure}")
            if not ready():
                slowest = min(self.running, key=lambda other: self.done[other])
                raise TimeoutError(
                    f"worker {worker}, {self.done[worker]} steps done, waited {self.limit:g} s "
                    f"for worker {slowest}, {self.done[slowest]} done; raise the limit, or the "
                    "staleness"
                )


class Service:
    """The work of one server: rank `workers + number` of the group, whose ranks below `workers` it
    serves.

    A worker that is lost leaves: its thread ends, and no other thread waits for it any more.
    Args:       shard: its keys; pieces: what its optimizer is made of; staleness: of Clocks.
    Attributes: record  its updates, in their order
                lost    workers that are lost, by number, and how
    """

    def __init__(
        self,
        group: Group,
        workers: int,
        shard: Shard,
        pieces: Sequence[Piece],
        *,
        staleness: int | None,
        recorder: Recorder,
    ) -> None:
        self.group = group
        self.workers = workers
        self.shard = shard
        self.pieces = pieces
        self.recorder = recorder
        self.record: list[Update] = []
        self.lost: dict[int, PeerLostError] = {}
        self.over = False
        self.servers = group.size - workers
        self.refusal: list[float] = []  # the answer to every worker, if there is one
        # of a step: the first worker to push it, and the digests of its batch
        self._batches: dict[int, tuple[int, list[float]]] = {}
        self.rooms = [shard.gradients, *(shard.rooms("communication") for _ in range(workers - 1))]
        self.clocks = Clocks(workers, staleness, group.transport.limit)

    @property
    def version(self) -> int:
        """How many updates the weights have had."""
        return len(self.record)

    def serve(self, optimizer: Optimizer) -> None:
        """Return when every worker has finished or is lost.

        Raises:  what ended the service: a lost server, an optimizer's error; PeerLostError if every
                 worker is lost.
        """
        if self.over:
            return
        self.over = True
        memory = account.current()
        threads = [
            threading.Thread(
                target=self._body,
                args=(worker, optimizer, memory),
                daemon=True,
                name=f"server of worker {worker}",
            )
            for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.clocks.failure is not None:
            raise self.clocks.failure
        if len(self.lost) == self.workers:
            worker, error = next(iter(self.lost.items()))
            raise PeerLostError(
                f"all {self.workers} workers are lost, worker {worker} first: {error}",
                error.world_rank,
            )

    def _body(self, worker: int, optimizer: Optimizer, memory: account.MemoryAccount) -> None:
        """One worker's thread."""
        try:
            with account.use(memory):
                while self._serve_step(worker, optimizer):
                    pass
        except PeerLostError as error:
            if error.world_rank == self.group.world_ranks[worker]:
                self.lost[worker] = error
                self.clocks.leave(worker)
            else:
                self.clocks.fail(error)
        except BaseException as error:  # serve() raises it
            self.clocks.fail(error)
            if self.refusal:
                with suppress(CommError), self.group.ledger.control():
                    self.group.send(np.array(self.refusal, np.float64), worker)

    def _serve_step(self, worker: int, optimizer: Optimizer) -> bool:
        """Take a push, update, give the weights back; whether the worker will come again."""
        room = self.rooms[worker]
        with self.group.ledger.control():
            step, lr, scale, *rest = self.group.recv(worker).tolist()
        versions = rest[: self.servers]
        digests = rest[self.servers :]
        comes_again = bool(step >= 0)
        if comes_again:
            for vector in room:
                self.group.recv(worker, out=vector)
            with self.clocks.lock:
                self._compare(worker, int(step), digests)
                self._update(
                    Update(worker, int(step), tuple(map(int, versions)), lr), scale, optimizer
                )
            self.clocks.tick(worker)
            self.clocks.wait_turn(worker)
        else:
            self.clocks.leave(worker)
            self.clocks.wait_end(worker)
        with self.clocks.lock:
            header = [self.version, *([] if comes_again else self.lost)]
            for vector, weights in zip(room, self.shard.weights, strict=True):
                vector[...] = weights  # others may update while this is on its way
        with self.group.ledger.control():
            self.group.send(np.array(header, np.float64), worker)
        for vector in room:
            self.group.send(vector, worker)
        return comes_again

    def _compare(self, worker: int, step: int, digests: list[float]) -> None:
        """Compare the batch of a step with that of the first worker that made it. Under the lock.

        Raises:  MismatchError if they differ.
        """
        raise_refusal(self.refusal)
        if not digests:
            return
        slowest = min((self.clocks.done[other] for other in self.clocks.running), default=step)
        self._batches = {made: told for made, told in self._batches.items() if made >= slowest}
        first, those = self._batches.setdefault(step, (worker, digests))
        if those != digests:
            ranks = self.group.world_ranks
            both = sorted([[ranks[first], *those], [ranks[worker], *digests]])
            self.refusal = [REFUSED, *both[0], *both[1]]
            raise_refusal(self.refusal)

    def _update(self, update: Update, scale: float, optimizer: Optimizer) -> None:
        """One update by one worker's gradient, which lies in its room. Under the lock."""
        own = update.versions[self.group.rank - self.workers]
        self.shard.point(self.pieces, self.rooms[update.worker])
        with self.recorder.span(
            "update", worker=update.worker, clock=update.step, stale=self.version - own
        ):
            optimizer.step(None if np.isnan(update.lr) else update.lr, scale)
        self.record.append(update)


def raise_refusal(answer: Sequence[float]) -> None:
    """Raise MismatchError, the same on server and workers, if a server's answer is REFUSED."""
    if answer and answer[0] == REFUSED:
        told = np.array(answer[1:]).reshape(2, -1)
        check_digests(told[:, 1:], [int(rank) for rank in told[:, 0]])


def key_shards(model: Module, servers: int) -> list[list[Parameter]]:
    """The keys of each server: the parameters that learn, by size."""
    learning = trainable(model.parameters())
    return [
        [learning[key] for key in share]
        for share in assign([p.data.nbytes for p in learning], servers)
    ]


def own_scale(keys: Sequence[Parameter], clip: float | None) -> float:
    """The factor that scales a worker's own gradient to a norm of at most `clip`; missing gradients
    become zero."""
    zero_unused(keys)
    return 1.0 if clip is None else clip_scale(global_norm(key.grad for key in keys), clip)


def copies_of(vectors: Sequence[Array]) -> list[Array]:
    return [vector.copy() for vector in vectors]
