"""Chapter 06 · The parameter server: workers make gradients, servers keep the weights and make the
steps.

The idea. Some ranks only keep the weights. A worker takes its part of the batch, pushes its
gradients to the servers, and pulls new weights. A server adds up the gradients that arrive, runs
the optimizer, and sends the weights back. No worker needs another worker's numbers: a slow worker
need not delay the others, and a lost worker need not end the job. But all gradients and weights go
through the servers, and the traffic of their links grows with the number of workers.

                    gradients                        weights
    worker 0..N-1  ----------->  server of key k  ------------->  worker 0..N-1
                      push          sum, step         pull

Ranks 0 to N-1 are workers, the last S are servers. A key is a parameter; keys are divided among
servers by size (data/server_keys.py). What each rank holds, Ψ parameters in float32 with Adam, N
workers, S servers:

                 each worker                    each server
    batch        B/N sequences                  -
    parameters   4Ψ                             about 4Ψ/S    its keys
    gradients    4Ψ   own part's                4Ψ/S          their sum
    optimizer    -                              8Ψ/S
    in flight    -                              4Ψ/S: a receive buffer. Asynchronous: (N-1) × 4Ψ/S,
                                                one for each worker; the first is the gradients'

Cost, per step, of keys of one dtype:

    each worker         sends 4Ψ bytes and receives as many; S messages each way
    all servers         2N × 4Ψ pass through them, N × 4Ψ each way; 2NS messages.  A ring moves
                        2(N-1)/N × 4Ψ into each rank, and as much out of it: the N ranks of a ring
                        share what S servers have to carry
    at the end          asynchronous workers get the last weights once more: N × 4Ψ
    control             synchronous: the loss, with a Trainer two digests of the batch and, with
                        clip, the squares of the gradient's norm; asynchronous: 5 + S numbers per
                        push, with a Trainer two digests more; 2 per pull
                        (data/server_messages.py)

Synchronous, below: the servers wait for all workers, and the step is that of one process on the
whole batch. Asynchronous (data/async_parameter_server.py): each gradient is a separate update, made
as soon as it arrives. Workers and servers may be on different kinds of device (GPU workers, CPU
servers). Synchronous servers may keep masters, sums and state in a wider dtype than that of the
messages: with w bytes per number sent and d in the master's dtype, a server holds (w + 4d)Ψ/S with
Adam, and wΨ/S in its receive buffer.

notes:   N1 DP, N3 §2
Source:  Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses, targets_in
from minidist.device.backend import array_module, dtype, to_host
from minidist.errors import ConfigError, PeerLostError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.data.server_keys import Shard, keys_by_server
from minidist.parallel.step.flat import Piece, forget
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import (
    Batch,
    Counted,
    Loss,
    Part,
    loss_of,
    micro_parts,
    part_of,
    zero_unused,
)
from minidist.parallel.step.strategy import Strategy


def plain_worker(model: GPT, group: Group, workers: int, batches: Iterable[Batch]) -> None:
    """Run a worker of one server, which is rank `workers` of the group: push every gradient, pull
    every weight."""
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=workers, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        for p in model.parameters():
            group.send(p.grad, dst=workers)  # push
            p.zero_grad()
        for p in model.parameters():
            group.recv(src=workers, out=p.data)  # pull


def plain_server(model: GPT, optimizer: Optimizer, group: Group, workers: int, steps: int) -> None:
    """Run the server of plain_worker: add up what all workers push, update, and answer all of
    them."""
    for _ in range(steps):
        for p in model.parameters():
            p.grad = sum(group.recv(src=worker) for worker in range(workers))
        optimizer.step()
        for p in model.parameters():
            for worker in range(workers):
                group.send(p.data, dst=worker)


# `ParameterServer` below adds several servers, which divide the parameters (keys) between them,
# because the link of one server carries the gradients of all workers; messages of many keys; and
# masters in a wider dtype than that of the messages.


class ParameterServer(Strategy):
    """A worker or a server, by rank. All ranks of the group make one with equal arguments, and call
    `step` (Strategy's, which calls start_step below) in a loop.

    It has a step of its own, because a server has no forward and no backward. The order of its
    messages, for N workers and S servers:

        worker   gradients    no message: backward writes into the vectors that push sends
        worker   push         a vector to each server, for each dtype
        server   collect      the first worker's into the sum, each other's into a buffer, added;
                              with wider masters the first worker's into the buffer, too
        server   clip         with `clip`: an all-gather of one float64 among the servers
        server   give_back    a vector to each worker, for each dtype
        worker   pull         into the vectors whose views are the parameters
        all      loss         an all-gather of one float64, three where batches are compared

    Args:    model: equal on all ranks; a server keeps only its keys.
             servers: the number of ranks that are servers: the last ones.
             loss: of a part of the batch (default: `model.loss`); recorder: gets the spans of work.
             server_dtype: of the servers' masters, sums and update, if wider than the workers'
             (default: as these); messages have the workers' dtype. A server's model may be on
             another device than a worker's.
    Attributes: parameters: the arguments for the optimizer: a server's keys; on a worker, pieces
                without elements: its optimizer changes nothing.
                serves, workers.
    Raises:  ConfigError for a number of servers that cannot work; MismatchError if ranks do not
             start equal.
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        servers: int = 1,
        loss: Loss | None = None,
        recorder: Recorder | None = None,
        server_dtype: str | None = None,
    ) -> None:
        self.model = model
        self.group = group
        self.workers = group.size - servers
        self.servers = servers
        self.precision = Precision()
        if self.workers < 1:
            raise ConfigError(
                f"{servers} parameter servers in a job of {group.size} ranks leave no worker; "
                "start more ranks, or use fewer servers"
            )
        self.masters_apart = server_dtype is not None
        self.serves = group.rank >= self.workers
        self.loss = loss or loss_of(model)
        self.recorder = recorder or Silent()
        check_equal_replicas(model.parameters(), group, when="before the first step")
        self.peers = group.split(int(self.serves), axis=group.axis)  # the workers, or the servers
        keys_of = keys_by_server(model, servers)
        self._server_of = {id(key): server for server, keys in enumerate(keys_of) for key in keys}
        if self.serves:
            self._keep_own_keys(keys_of, server_dtype)
        else:
            self._keep_all_keys(keys_of, server_dtype)
        if self.masters_apart:
            self._weights_are_the_servers()
        self._begin()

    def _keep_own_keys(
        self, keys_of: Sequence[Sequence[Parameter]], server_dtype: str | None
    ) -> None:
        """Move a server's keys into vectors, and forget the other servers'."""
        own = keys_of[self.group.rank - self.workers]
        others = [key for keys in keys_of for key in keys if keys is not own]
        forget(others, array_module(own[0].data))
        for key in others:
            key.keep_by("another server")
        wide = None if server_dtype is None else dtype(server_dtype)
        self.shards = [Shard(own, dtype=wide)]
        self.parameters = self.shards[0].pieces()

    def _keep_all_keys(
        self, keys_of: Sequence[Sequence[Parameter]], server_dtype: str | None
    ) -> None:
        """Move a worker's keys into vectors, by server."""
        self.shards = [Shard(keys) for keys in keys_of]
        # a worker's optimizer has the names, and no elements
        empty_masters = [
            (key, key.data.reshape(-1)[:0].astype(server_dtype or key.dtype))
            for keys in keys_of
            for key in keys
        ]
        self.parameters = [Piece(key, empty, empty, range(0)) for key, empty in empty_masters]

    def _weights_are_the_servers(self) -> None:
        """Let the program write no weight from now on; pull and the update write the vectors."""
        for key in (key for shard in self.shards for key in shard.keys):
            key.keep_by("the servers")

    def _begin(self) -> None:
        """Allocate a server's receive buffers, and wait until all ranks are ready."""
        self._buffers = self.shards[0].new_buffers("communication") if self.serves else []
        self._meet()

    def _meet(self) -> None:
        with self._naming_servers():  # one may be lost when others have left it
            self.group.barrier()

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """Return the sum of the part's losses over `divisor`; None without a row."""
        return self.loss(part, divisor) if len(part.inputs) else None

    def gradients(self, batch: Batch, accumulate: int) -> float:
        """Run forward and backward of this worker's part; return its share of the loss."""
        part = part_of(batch, size=self.workers, rank=self.group.rank)
        divisor = self._divisor(part, batch)
        total = 0.0
        self.model.zero_grad()
        for micro in micro_parts(part, accumulate):
            with self.recorder.span("forward", rows=len(micro.inputs)):
                share = self.forward(micro, divisor=divisor)
            if share is not None:
                total += float(share.item())
                with self.recorder.span("backward"):
                    share.backward()
        return total

    def _divisor(self, part: Part, batch: Batch) -> int:
        """Return the divisor of the loss: the targets of all workers (asynchronous: of the worker's
        own part)."""
        return targets_in(batch)

    # -------------------------------------------------------------------------------- push and pull

    def push(self) -> None:
        """Send this worker's gradients to the servers of their keys. Cost: one message per server
        and dtype."""
        for shard in self.shards:
            zero_unused(shard.keys)
        with self.recorder.span("push", "communication"), self._naming_servers():
            for pending in [
                self.group.start_send(vector, self.workers + server)
                for server, shard in enumerate(self.shards)
                for vector in shard.gradients
            ]:
                pending.wait()

    def pull(self) -> None:
        """Receive new weights from the servers, in place. Cost: a message from each server for each
        dtype."""
        with self.recorder.span("pull", "communication"), self._naming_servers():
            for server, shard in enumerate(self.shards):
                for vector in shard.weights:
                    self.group.recv(self.workers + server, out=vector)

    def collect(self) -> None:
        """Sum all workers' gradients, in the workers' order; on a server. Cost: N shards arrive."""
        with self.recorder.span("collect", "communication"):
            for total, buffer in zip(self.shards[0].gradients, self._buffers, strict=True):
                if total.dtype == buffer.dtype:
                    self.group.recv(0, out=total)
                else:  # wider masters
                    self.group.recv(0, out=buffer)
                    total[...] = buffer
                for worker in range(1, self.workers):
                    self.group.recv(worker, out=buffer)
                    total += buffer

    def give_back(self) -> None:
        """Send the weights to every worker; on a server. Cost: N messages for each dtype of the
        shard."""
        with self.recorder.span("give back", "communication"):
            self.shards[0].round()
            for pending in [
                self.group.start_send(vector, worker)
                for worker in range(self.workers)
                for vector in self.shards[0].weights
            ]:
                pending.wait()

    # ----------------------------------------------------------------------------------------- step

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make one step on the *global* batch. Args, Returns: as Strategy.step; only a server's
        optimizer changes anything.

        Raises:  PeerLostError naming the server that was lost.
        """
        share = 0.0
        if self.serves:
            self.collect()
            with self.recorder.span("optimizer"):
                counted = Counted(self.parameters, self.peers)
                self.precision.update(optimizer, counted, lr=lr, clip=clip)
            self.give_back()
        else:
            share = self.gradients(batch, accumulate)
            self.push()
            self.pull()
        with self.recorder.span("loss", "communication"), self._naming_servers():
            return LateLoss(add_losses(self.group, share, batch))

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """Return the workers, which divide the rows: the ranks that are left, except the last ones,
        the servers."""
        return everyone, everyone.size - self.servers

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare the workers' weights, as Strategy.check_replicas."""
        if not self.serves:
            super().check_replicas(
                group.without(range(group.size - self.servers, group.size)), when=when
            )

    def state_replaced(self) -> None:
        """Send the servers' new weights to the workers."""
        if self.serves:
            self.give_back()
        else:
            self.pull()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all weights, as Strategy.state_dict. Every server calls it, and every
        worker if only servers have the masters.

        Cost:    each key, broadcast among the servers, or with masters of their own among all,
                 under `control`.
        """
        self.finish()
        state = self.model.state_dict()
        if not (self.serves or self.masters_apart):
            return state
        if self.masters_apart and self.serves:
            names = {id(p): name for name, p in self.model.named_parameters()}
            state |= {
                names[id(piece.parameter)]: to_host(piece.data).reshape(piece.parameter.shape)
                for piece in self.parameters
            }
        among, first = (self.group, self.workers) if self.masters_apart else (self.peers, 0)
        with self._naming_servers(), self.group.ledger.control():
            for name, p in self.model.named_parameters():
                if id(p) in self._server_of:  # the others are frozen, and equal everywhere
                    root = first + self._server_of[id(p)]
                    state[name] = among.broadcast(
                        state[name] if among.rank == root else None, root=root
                    )
        return state

    @contextmanager
    def _naming_servers(self) -> Iterator[None]:
        """Name a lost server as such in the error."""
        try:
            yield
        except PeerLostError as error:
            ranks = self.group.world_ranks[self.workers :]
            if error.world_rank not in ranks:
                raise
            raise PeerLostError(
                f"parameter server {ranks.index(error.world_rank)} of {self.servers} is lost, and "
                f"its keys with it: {error}",
                error.world_rank,
            ) from error
