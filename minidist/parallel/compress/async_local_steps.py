"""Chapter 21 · Local steps without meetings: each worker meets the servers by itself.

The idea. Where ranks meet, the fastest waits for the slowest. So let a worker that has made its H
steps send its outer gradient to the parameter servers (chapter 06) at once, and continue from the
weights that they answer with. A server takes an outer step as soon as an outer gradient arrives.
How far a worker may be ahead of the slowest, in rounds of H steps, is bounded
(data/bounded_staleness.py).

    fast worker   steps | push, pull | steps | push, pull | steps | …
    slow worker   steps                 | push, pull | steps                | …
    server              outer step       outer step   outer step

An outer gradient counts by its worker's share of the rows, so that one of each worker is together
what one meeting would be. Each server keeps a record of its updates, and `replay_rounds` makes the
same updates in one process.

What each rank holds, Ψ parameters of w bytes with Adam inside, S servers: a worker 2wΨ (its own
weights, and those that it pulled last), gradients wΨ, which the outer gradient takes the place of,
and Adam's 2wΨ; a server about wΨ/S each of weights, outer momentum, and an array for each
worker's outer gradient.

Cost, H steps: as a step of the asynchronous server in chapter 06: a worker sends wΨ bytes and
receives as many.

notes:   N2 §11.2, N3 §2
Source:  Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (2401.09135).
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.comm.group import Group
from minidist.data.rank_batch import digests_of, targets_in
from minidist.device import account
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.compress.local_steps import inner_step
from minidist.parallel.compress.outer import OUTERS, Outer
from minidist.parallel.data.async_parameter_server import AsyncParameterServer
from minidist.parallel.data.bounded_staleness import Update
from minidist.parallel.data.server_keys import Shard, keys_by_server
from minidist.parallel.data.server_messages import Push
from minidist.parallel.step.flat import Piece, trainable
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Batch, Loss, part_of


class AsyncLocalSteps(AsyncParameterServer):
    """A worker that trains without messages between two pushes, or a server of outer steps.

    Args:    every: H, the steps of a round; outer: the servers' optimizer; staleness: how many
             rounds a worker may be ahead of the slowest (None: any number). The others: as
             AsyncParameterServer.
    Attributes: as AsyncParameterServer's; parameters: on a worker its weights, for its own
                optimizer; on a server nothing that an optimizer could change, as the outer one is
                its own.
    """

    workers_update = True

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        every: int,
        outer: Outer = OUTERS["nesterov"],
        servers: int = 1,
        staleness: int | None = 2,
        loss: Loss | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(
            model,
            group,
            servers=servers,
            staleness=staleness,
            loss=loss,
            recorder=recorder,
        )
        self.every = every
        self.made = 0
        if self.serves:
            self.outer = outer.make(self.parameters)
            self.parameters = [
                Piece(piece.parameter, empty, empty, range(0))
                for piece in self.parameters
                for empty in [piece.data.reshape(-1)[:0]]
            ]
        else:
            self.weights = self.parameters = trainable(model.parameters())
            self.pulled = [
                account.current().hold(vector.copy(), "parameters")
                for shard in self.shards
                for vector in shard.weights
            ]

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make a worker's step on its rows of the *global* batch; the last step of a round pushes
        and pulls.

        Args:    as Strategy.step; clip: of the worker's own gradient.
        Returns: the mean loss of the worker's own rows; a server's first call serves until all
        workers have finished.
        Raises:  ConfigError after `finish`; PeerLostError naming the server that was lost.
        """
        if self.service is not None:
            self.service.serve(self.outer)
            return LateLoss(float("nan"))
        self._require_unfinished()
        part = part_of(batch, size=self.workers, rank=self.group.rank)
        mean = inner_step(self, part, optimizer, lr=lr, clip=clip, accumulate=accumulate)
        self.made += 1
        if self.made % self.every == 0:
            own = [vector for shard in self.shards for vector in shard.weights]
            gradients = [vector for shard in self.shards for vector in shard.gradients]
            row_fraction = part.targets.size / targets_in(batch)
            _outer_gradients(gradients, self.pulled, own, row_fraction)
            self._ask(Push(self.pushes, tuple(self.versions), None, 1.0, digests_of(batch)))
            self.pushes += 1
            _write(self.pulled, [vector for shard in self.shards for vector in shard.weights])
        return LateLoss(mean)


def _outer_gradients(
    out: Sequence[Array], pulled: Sequence[Array], own: Sequence[Array], row_fraction: float
) -> None:
    """Set out = row_fraction · (pulled - own), the outer gradient of a round."""
    for gradient, before, now in zip(out, pulled, own, strict=True):
        gradient[...] = before
        gradient -= now
        gradient *= row_fraction


def replay_rounds(
    model: Module,
    records: Sequence[Update],
    batch: Callable[[int], Batch],
    make_optimizer: Callable[[list[Any]], Optimizer],
    *,
    workers: int,
    every: int,
    outer: Outer,
    rate: Callable[[int], float] | None = None,
    loss: Loss | None = None,
    clip: float | None = None,
) -> None:
    """Make the updates of a run with one server again, here; `model` starts as the run's, and ends
    as its server's.

    Args:    records: of the server; batch(step): the global batch; make_optimizer: as each worker
             made its own. rate(step): the inner learning rate (None: the optimizer's own); every,
             outer, loss, clip: the run's.
    Cost:    `every` steps for each update; keeps each version of the weights, and each worker's
             optimizer.
    """
    shard = Shard(keys_by_server(model, 1)[0])
    pieces = shard.pieces()
    replica = Single(model, loss=loss)
    server = outer.make(pieces)
    versions = [[vector.copy() for vector in shard.weights]]
    inner = [make_optimizer(replica.weights) for _ in range(workers)]
    for update in records:
        started = versions[update.versions[0]]
        _write(shard.weights, started)
        for step in range(update.step * every, (update.step + 1) * every):
            part = part_of(batch(step), size=workers, rank=update.worker)
            inner_step(
                replica, part, inner[update.worker], lr=rate and rate(step), clip=clip, accumulate=1
            )
        _outer_gradients(
            shard.gradients, started, shard.weights, part.targets.size / batch(step)[1].size
        )
        _write(shard.weights, versions[-1])
        server.step()
        versions.append([vector.copy() for vector in shard.weights])
    _write(shard.weights, versions[-1])


def _write(vectors: Sequence[Array], values: Sequence[Array]) -> None:
    for vector, value in zip(vectors, values, strict=True):
        vector[...] = value
