"""An asynchronous server's work: a thread for each worker, which takes a gradient, updates, and gives weights back.

    thread of worker 0     recv | update | wait for its turn | copy | send        recv | ...
    thread of worker 1          recv     | update | copy | send     recv | ...
                                         one update at a time: its place in the record

A worker that is lost leaves: its thread ends, and no other thread waits for it any more.
"""

import threading
from collections.abc import Sequence

import numpy as np

from minidist.comm.group import Group
from minidist.device import account
from minidist.errors import PeerLostError
from minidist.optim import Optimizer
from minidist.parallel.data.bounded_staleness import Clocks, Update
from minidist.parallel.data.server_keys import Shard
from minidist.parallel.step.flat import Piece
from minidist.parallel.step.recorder import Recorder


class Service:
    """Of one server: rank `workers + number` of the group, whose ranks below `workers` it serves.

    Args:       shard: its keys; pieces: what its optimizer is made of; staleness: of Clocks.
    Attributes: record  its updates, in their order
                lost    workers that are lost, by number, and how
    """

    def __init__(self, group: Group, workers: int, shard: Shard, pieces: Sequence[Piece], *, staleness: int | None,
                 recorder: Recorder) -> None:
        self.group, self.workers, self.shard, self.pieces, self.recorder = group, workers, shard, pieces, recorder
        self.record: list[Update] = []
        self.lost: dict[int, PeerLostError] = {}
        self.over = False
        self.rooms = [shard.gradients, *(shard.rooms("communication") for _ in range(workers - 1))]
        self.clocks = Clocks(workers, staleness, group.transport.limit)

    def serve(self, optimizer: Optimizer) -> None:
        """Return when every worker has finished or is lost.

        Raises:  what ended the service: a lost server, an optimizer's error; PeerLostError if every worker is lost.
        """
        if self.over:
            return
        self.over = True
        memory = account.current()
        threads = [threading.Thread(target=self._body, args=(worker, optimizer, memory), daemon=True,
                                    name=f"server of worker {worker}") for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.clocks.failure is not None:
            raise self.clocks.failure
        if len(self.lost) == self.workers:
            worker, error = next(iter(self.lost.items()))
            raise PeerLostError(f"all {self.workers} workers are lost, worker {worker} first: {error}",
                                error.world_rank)

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

    def _serve_step(self, worker: int, optimizer: Optimizer) -> bool:
        """Take a push, update, give the weights back; whether the worker will come again."""
        room = self.rooms[worker]
        with self.group.ledger.control():
            step, lr, scale, *versions = self.group.recv(worker).tolist()
        comes_again = bool(step >= 0)
        if comes_again:
            for vector in room:
                self.group.recv(worker, out=vector)
            with self.clocks.lock:
                self._update(Update(worker, int(step), tuple(map(int, versions)), lr), scale, optimizer)
            self.clocks.tick(worker)
            self.clocks.wait_turn(worker)
        else:
            self.clocks.leave(worker)
            self.clocks.wait_end(worker)
        with self.clocks.lock:
            header = [len(self.record), *([] if comes_again else self.lost)]
            for vector, weights in zip(room, self.shard.weights, strict=True):
                vector[...] = weights           # others may update while this is on its way
        with self.group.ledger.control():
            self.group.send(np.array(header, np.float64), worker)
        for vector in room:
            self.group.send(vector, worker)
        return comes_again

    def _update(self, update: Update, scale: float, optimizer: Optimizer) -> None:
        """One update by one worker's gradient, which lies in its room. Under the lock."""
        own = update.versions[self.group.rank - self.workers]
        self.shard.point(self.pieces, self.rooms[update.worker])
        with self.recorder.span("update", worker=update.worker, clock=update.step,
                                       stale=len(self.record) - own):
            optimizer.step(None if np.isnan(update.lr) else update.lr, scale)
        self.record.append(update)
