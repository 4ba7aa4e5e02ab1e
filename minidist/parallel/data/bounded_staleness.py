"""An asynchronous server: a thread for each worker, and a bound on how far a worker may be ahead.

    thread of worker 0     recv | update | wait for its turn | copy | send        recv | ...
    thread of worker 1          recv     | update | copy | send     recv | ...
                                         one update at a time: its place in the record

    staleness 1        step 0   step 1   step 2
    fast worker        ######|  ######|  . . . . ######|     it may be one step ahead of the
                                                             slowest, not two
    slow worker        ################|  ################|

The server makes an update of each gradient when it arrives. The weights then depend on the order of
the updates, and on the weights from which each gradient was made: the record of the server.
data/replay_updates.py makes the same updates again.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server".
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import CommError, PeerLostError, TimeoutError
from minidist.optim import Optimizer, clip_scale, global_norm
from minidist.parallel.data.server_keys import Shard
from minidist.parallel.data.server_messages import (
    Push,
    Refusal,
    Weights,
    receive_request,
    send_message,
)
from minidist.parallel.step.flat import Piece
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import zero_unused


class Update(NamedTuple):
    """One update of a server, in its record.

    Attributes: worker    the worker that made the gradient, in its step `step`
                versions  for each server, the number of its updates when the worker read the
                weights of that step
                lr        the learning rate; None: the optimizer's own
    """

    worker: int
    step: int
    versions: tuple[int, ...]
    lr: float | None


class Clocks:
    """The number of steps that each worker has done, as one server sees it. A worker's own thread
    calls the methods.

    Args:    staleness: the most steps that a worker may be ahead of the slowest; None: any number.
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
        """Count a step of the worker."""
        with self.lock:
            self.done[worker] += 1
            self.lock.notify_all()

    def leave(self, worker: int) -> None:
        """Remove a worker that has done all its steps, or is lost: no wait counts it any more."""
        with self.lock:
            self.running.discard(worker)
            self.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that the server has failed: every wait raises `error`."""
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
    """The work of one server: rank `workers + number` of the group; the ranks below `workers` are
    its workers.

    A worker that is lost leaves: its thread ends, and no other thread waits for it any more.
    Args:       shard: its keys; pieces: the arguments for its optimizer; staleness: of Clocks.
    Attributes: record  its updates, in their order
                lost    workers that are lost, by number, with the reason
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
        self.refusal: Refusal | None = None  # the answer to every worker, if there is one
        # of a step: the first worker to push it, and the digests of its batch
        self._batches: dict[int, tuple[int, tuple[float, ...]]] = {}
        self.buffers = [
            shard.gradients,
            *(shard.new_buffers("communication") for _ in range(workers - 1)),
        ]
        self.clocks = Clocks(workers, staleness, group.transport.limit)

    @property
    def version(self) -> int:
        """The number of updates of the weights."""
        return len(self.record)

    def serve(self, optimizer: Optimizer) -> None:
        """Serve the workers; return when every worker has finished or is lost.

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
        """Run one worker's thread."""
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
            if self.refusal is not None:
                with suppress(CommError):
                    send_message(self.group, worker, self.refusal)

    def _serve_step(self, worker: int, optimizer: Optimizer) -> bool:
        """Take a worker's request and send it the weights; return whether it will ask again."""
        request = receive_request(self.group, worker, self.servers)
        buffers = self.buffers[worker]
        if isinstance(request, Push):
            self._take_push(worker, request, optimizer)
            self.clocks.tick(worker)
            self.clocks.wait_turn(worker)
        else:
            self.clocks.leave(worker)
            self.clocks.wait_end(worker)
        with self.clocks.lock:
            lost = () if isinstance(request, Push) else tuple(self.lost)
            answer = Weights(self.version, lost)
            # others may update while this is being sent
            for vector, weights in zip(buffers, self.shard.weights, strict=True):
                vector[...] = weights
        send_message(self.group, worker, answer)
        for vector in buffers:
            self.group.send(vector, worker)
        return isinstance(request, Push)

    def _take_push(self, worker: int, push: Push, optimizer: Optimizer) -> None:
        """Receive a worker's gradient, and update by it."""
        for vector in self.buffers[worker]:
            self.group.recv(worker, out=vector)
        with self.clocks.lock:
            self._compare(worker, push)
            self._update(Update(worker, push.step, push.versions, push.lr), push.scale, optimizer)

    def _compare(self, worker: int, push: Push) -> None:
        """Compare the batch of a step with that of the first worker that made it. Under the lock.

        Raises:  MismatchError if they differ.
        """
        if self.refusal is not None:
            self.refusal.fail()
        if not push.digests:
            return
        slowest = min((self.clocks.done[other] for other in self.clocks.running), default=push.step)
        self._batches = {made: told for made, told in self._batches.items() if made >= slowest}
        first, theirs = self._batches.setdefault(push.step, (worker, push.digests))
        if theirs != push.digests:
            ranks = self.group.world_ranks
            one, other = sorted([(ranks[first], theirs), (ranks[worker], push.digests)])
            self.refusal = Refusal((one[0], other[0]), (one[1], other[1]))
            self.refusal.fail()

    def _update(self, update: Update, scale: float, optimizer: Optimizer) -> None:
        """Make one update by one worker's gradient, which is in its buffers. Under the lock."""
        own = update.versions[self.group.rank - self.workers]
        self.shard.point(self.pieces, self.buffers[update.worker])
        with self.recorder.span(
            "update", worker=update.worker, clock=update.step, stale=self.version - own
        ):
            optimizer.step(update.lr, scale)
        self.record.append(update)


def own_scale(keys: Sequence[Parameter], clip: float | None) -> float:
    """Return the factor that scales a worker's own gradient to a norm of at most `clip`; missing
    gradients become zero."""
    zero_unused(keys)
    return 1.0 if clip is None else clip_scale(global_norm(key.grad for key in keys), clip)


def copies_of(vectors: Sequence[Array]) -> list[Array]:
    return [vector.copy() for vector in vectors]
