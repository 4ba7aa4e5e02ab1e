"""Chapter 06 · The parameter server: workers make gradients, servers keep the weights and make the
steps.

The idea. Some ranks do nothing but keep the weights. A worker takes its part of the batch, pushes
its gradients to the servers, and pulls new weights. A server adds up what comes, runs the
optimizer, and gives the weights back. Workers know nothing of each other: one that is slow need not
hold up the others, one that dies need not end the job. In return everything goes through the
servers, and their links carry the more the more workers there are.

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
    in flight    -                              4Ψ/S; asynchronous, (N-1) × 4Ψ/S: a room a worker,
                 one the gradients'

Cost, a step, of keys of one dtype:

    each worker         sends 4Ψ bytes and receives as many; S messages each way
    all servers         2N × 4Ψ pass through them, N × 4Ψ each way; 2NS messages.  A ring moves
                        2(N-1)/N × 4Ψ in and out of each rank: the N ranks of a ring share what S
                        servers have to carry
    at the end          asynchronous workers get the last weights once more: N × 4Ψ
    control             synchronous: the loss and, with clip, the squares of the gradient's norm;
                        asynchronous: 5 + S numbers per push, 2 per pull
                        (data/server_messages.py)

Synchronous: the servers wait for all workers, and the step is that of one process on the whole
batch. Asynchronous: each gradient is an update by itself, of the mean loss of the worker's own
part, as soon as it comes, made from weights that others may have updated meanwhile. A worker may be
`staleness` steps ahead of the slowest, then it has to wait (data/bounded_staleness.py). Each server
keeps a record of its updates; replay_updates.py makes them in one process. Workers and servers need
not be on the same kind of device (GPU workers, CPU servers); and synchronous servers may keep
masters, sums and state in a wider dtype than what travels: w bytes a number sent and d in the
master's dtype, a server holds (w + 4d)Ψ/S with Adam.

notes:   N1 DP, N3 §2
Source:  Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses, digests_of, targets_in
from minidist.device.backend import array_module, dtype, to_host
from minidist.errors import ConfigError, PeerLostError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel.data.bounded_staleness import (
    Service,
    Update,
    key_shards,
    own_scale,
)
from minidist.parallel.data.server_keys import Shard
from minidist.parallel.data.server_messages import (
    LastPull,
    Push,
    Refusal,
    Weights,
    receive_answer,
    send_message,
)
from minidist.parallel.step.flat import Piece, forget, sum_in_order
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import (
    Batch,
    Loss,
    Part,
    loss_of,
    micro_parts,
    part_of,
    zero_unused,
)
from minidist.parallel.step.strategy import Strategy


def plain_worker(model: GPT, group: Group, workers: int, batches: Iterable[Batch]) -> None:
    """A worker of one server, which is rank `workers` of the group: push every gradient, pull every
    weight."""
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=workers, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        for p in model.parameters():
            group.send(p.grad, dst=workers)  # push
            p.zero_grad()
        for p in model.parameters():
            group.recv(src=workers, out=p.data)  # pull


def plain_server(model: GPT, optimizer: Optimizer, group: Group, workers: int, steps: int) -> None:
    """Its server: add up what all workers push, update, and answer all of them."""
    for _ in range(steps):
        for p in model.parameters():
            p.grad = sum(group.recv(src=worker) for worker in range(workers))
        optimizer.step()
        for p in model.parameters():
            for worker in range(workers):
                group.send(p.data, dst=worker)


# `ParameterServer` below adds several servers, which divide the parameters (keys) between them,
# because the link of one server carries the gradients of all workers; messages of many keys; and
# steps in which no worker waits for the slowest (asynchronous updates, with a bound on how far one
# may be ahead).


class ParameterServer(Strategy):
    """A worker or a server, by rank. All ranks of the group make one with equal arguments, and call
    `step` in a loop.

    Args:    model: equal on all ranks; a server keeps its keys alone.
             servers: how many ranks are servers: the last.
             asynchronous: update by each gradient as it comes; staleness: how many steps a worker
             may then be ahead of the slowest (None: any number).
             loss: of a part of the batch (default: `model.loss`); recorder: is told what runs when.
             server_dtype: of synchronous servers' masters, sums and update, if wider than the
             workers' (default: as these); what travels has the workers'. A server's model may be on
             another device than a worker's.
    Attributes: parameters: what the optimizer is made of: a server's keys; on a worker, pieces
    without elements.
             serves, workers; record: a server's updates; lost: workers that a server has lost, and
             how.
    Raises:  ConfigError for a number of servers that cannot work; MismatchError if ranks do not
             start equal.
    """

    workers_update: ClassVar[bool] = False  # whether workers too change their weights

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        servers: int = 1,
        asynchronous: bool = False,
        staleness: int | None = 2,
        loss: Loss | None = None,
        recorder: Recorder | None = None,
        server_dtype: str | None = None,
    ) -> None:
        self.model = model
        self.group = group
        self.asynchronous = asynchronous
        self.staleness = staleness
        self.workers = group.size - servers
        self.servers = servers
        self.precision = Precision()
        if self.workers < 1:
            raise ConfigError(
                f"{servers} parameter servers in a job of {group.size} ranks leave no worker; "
                "start more ranks, or take fewer servers"
            )
        if staleness is not None and staleness < 0:
            raise ConfigError(
                f"staleness {staleness}: a worker is 0 or more steps ahead of the slowest, or None"
            )
        if asynchronous and server_dtype is not None:
            raise ConfigError(
                f"server_dtype={server_dtype}: asynchronous servers keep the workers' own dtype; "
                "leave it out, or take synchronous ones"
            )
        self.masters_apart = server_dtype is not None
        self.serves = group.rank >= self.workers
        self.loss = loss or loss_of(model)
        self.recorder = recorder or Silent()
        self.precision = Precision()
        check_equal_replicas(model.parameters(), group, when="before the first step")
        self.peers = group.split(int(self.serves), axis=group.axis)  # the workers, or the servers
        shards = key_shards(model, servers)
        self._server_of = {id(key): server for server, keys in enumerate(shards) for key in keys}
        if self.serves:
            own = shards[group.rank - self.workers]
            others = [key for keys in shards for key in keys if keys is not own]
            forget(others, array_module(own[0].data))
            for key in others:
                key.keep_by("another server")
            self.shards = [Shard(own, dtype=None if server_dtype is None else dtype(server_dtype))]
            self.parameters = self.shards[0].pieces()
        else:
            self.shards = [Shard(keys) for keys in shards]
            nothing = [
                (key, key.data.reshape(-1)[:0].astype(server_dtype or key.dtype))
                for keys in shards
                for key in keys
            ]
            self.parameters = [Piece(key, empty, empty, range(0)) for key, empty in nothing]
        if self.masters_apart or (asynchronous and not self.workers_update):
            for key in (key for keys in shards for key in keys):
                key.keep_by("the servers")
        self._rooms = (
            self.shards[0].rooms("communication") if self.serves and not asynchronous else []
        )
        self.service = (
            None
            if not (self.serves and asynchronous)
            else Service(
                group,
                self.workers,
                self.shards[0],
                self.parameters,
                staleness=staleness,
                recorder=self.recorder,
            )
        )
        self.lost: dict[int, PeerLostError] = {} if self.service is None else self.service.lost
        self.versions = [0] * servers
        self.pushes = 0
        self._finished = False
        self._gone: set[int] = set()
        self._options: dict[str, Any] = {}  # the optimizer's at the first step
        if asynchronous and not self.serves:
            group.expendable()
        with self._naming_servers():  # one may be lost when others have left it
            group.barrier()

    @property
    def gone(self) -> set[int]:
        """Ranks of the group that were lost; workers know it when they have finished."""
        return set(self.lost) if self.serves else self._gone

    @property
    def record(self) -> list[Update]:
        """A server's updates."""
        return [] if self.service is None else self.service.record

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """The sum of the part's losses over `divisor`; None without a row."""
        return self.loss(part, divisor) if len(part.inputs) else None

    def gradients(self, batch: Batch, accumulate: int) -> float:
        """Forward and backward of this worker's part; its loss, or when synchronous its share of
        the global one."""
        part = part_of(batch, size=self.workers, rank=self.group.rank)
        total = 0.0
        divisor = part.targets.size if self.asynchronous else targets_in(batch)
        self.model.zero_grad()
        for micro in micro_parts(part, accumulate):
            with self.recorder.span("forward", rows=len(micro.inputs)):
                share = self.forward(micro, divisor=divisor)
            if share is not None:
                total += float(share.item())
                with self.recorder.span("backward"):
                    share.backward()
        return total

    # -------------------------------------------------------------------------------- push and pull

    def push(self) -> None:
        """This worker's gradients, to the servers of their keys. Cost: a message a server and
        dtype."""
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
        """New weights from the servers, in place. Cost: a message from each server for each
        dtype."""
        with self.recorder.span("pull", "communication"), self._naming_servers():
            for server, shard in enumerate(self.shards):
                for vector in shard.weights:
                    self.group.recv(self.workers + server, out=vector)

    def collect(self) -> None:
        """On a server: the sum of all workers' gradients, in the workers' order. Cost: N shards
        come."""
        with self.recorder.span("collect", "communication"):
            for total, room in zip(self.shards[0].gradients, self._rooms, strict=True):
                self.group.recv(0, out=total if total.dtype == room.dtype else room)
                if total.dtype != room.dtype:
                    total[...] = room
                for worker in range(1, self.workers):
                    self.group.recv(worker, out=room)
                    total += room

    def give_back(self) -> None:
        """On a server: its weights, to every worker. Cost: N messages for each dtype of the
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
        """One step on the *global* batch.

        Args:    as Strategy.step. A worker's optimizer has nothing to do. clip: of the sum when
                 synchronous, else of each worker's own gradient.
        Returns: synchronous: the batch's mean loss, the same on every rank. Asynchronous: the mean
        loss of the worker's
                 own part; a server's first call serves until all workers have finished, its later
                 ones do nothing.
        Raises:  PeerLostError naming the server that was lost.
        """
        if self.service is not None:
            self.service.serve(optimizer)
            return LateLoss(float("nan"))
        if self._finished:
            raise ConfigError(
                f"worker {self.group.rank} of {self.workers} has finished and makes no more steps; "
                f"evaluate and take the weights of an asynchronous run after its last step"
            )
        if self.asynchronous:
            self._check_unchanged(optimizer)
            loss = self.gradients(batch, accumulate)
            scale = own_scale([key for shard in self.shards for key in shard.keys], clip)
            self._ask(Push(self.pushes, tuple(self.versions), lr, scale, digests_of(batch)))
            self.pushes += 1
            return LateLoss(loss)
        share = 0.0
        if self.serves:
            self.collect()
            with self.recorder.span("optimizer"):
                self.precision.update(
                    optimizer,
                    lambda: sum_in_order(
                        self.peers, sum_of_squares(piece.grad for piece in self.parameters)
                    ),
                    lr=lr,
                    clip=clip,
                )
            self.give_back()
        else:
            share = self.gradients(batch, accumulate)
            self.push()
            self.pull()
        with self.recorder.span("loss", "communication"), self._naming_servers():
            return LateLoss(add_losses(self.group, share, batch))

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        """Raise ConfigError for a change that does not reach the servers, which serve meanwhile."""
        options = optimizer.options_now()
        del options["lr"]  # travels with each gradient
        self._options = self._options or options
        changed = [name for name in options if options[name] != self._options[name]]
        frozen = [key.name for shard in self.shards for key in shard.keys if not key.requires_grad]
        if changed or frozen:
            what = f"the optimizer's {changed[0]}" if changed else f"requires_grad of {frozen[0]!r}"
            raise ConfigError(
                f"asynchronous servers: {what} was changed, which the servers do not "
                f"learn while they serve; set it before the first step, or take "
                f"synchronous servers"
            )

    def finish(self) -> set[int]:
        """After the last step, any number of times: an asynchronous worker waits for the others and
        the last weights.

        Returns: ranks of the group that were lost.
        """
        if self.asynchronous and not self.serves and not self._finished:
            self._finished = True
            answers = self._ask(LastPull())
            self._gone = {worker for answer in answers for worker in answer.lost}
        return self.gone

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """The workers divide the rows: the ranks that are left, but for the last, the servers."""
        return everyone, everyone.size - self.servers

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """As Strategy's, of the workers."""
        if not self.serves:
            super().check_replicas(
                group.without(range(group.size - self.servers, group.size)), when=when
            )

    def state_replaced(self) -> None:
        """Servers give their new weights to the workers."""
        if self.serves:
            self.give_back()
        else:
            self.pull()

    def state_dict(self) -> dict[str, np.ndarray]:
        """As Strategy's; every server calls it, and every worker where masters are the servers'
        alone.

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
                if id(p) in self._server_of:  # the others are frozen, and alike everywhere
                    root = first + self._server_of[id(p)]
                    state[name] = among.broadcast(
                        state[name] if among.rank == root else None, root=root
                    )
        return state

    def _ask(self, request: Push | LastPull) -> list[Weights]:
        """Send a request to all servers, with this worker's gradient behind a push; pull, and note
        the versions of the weights.

        Returns: the servers' answers.
        Raises:  MismatchError if a server finds two batches that differ.
        """
        ranks = range(self.workers, self.group.size)
        with self._naming_servers():
            for rank in ranks:
                send_message(self.group, rank, request)
        if isinstance(request, Push):
            self.push()
        with self._naming_servers():
            told = [receive_answer(self.group, rank) for rank in ranks]
        answers = list[Weights]()
        for answer in told:
            if isinstance(answer, Refusal):
                answer.fail()
            else:
                answers.append(answer)
        self.versions = [answer.version for answer in answers]
        self.pull()
        return answers

    @contextmanager
    def _naming_servers(self) -> Iterator[None]:
        """A lost rank that is a server is called one."""
        try:
            yield
        except PeerLostError as error:
            ranks = self.group.world_ranks[self.workers :]
            if error.world_rank not in ranks:
                raise
            raise PeerLostError(
                f"parameter server {ranks.index(error.world_rank)} of {self.servers} is lost, "
                f"and with it its keys: {error}",
                error.world_rank,
            ) from error
