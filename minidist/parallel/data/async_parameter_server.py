"""Chapter 06 · Asynchronous servers: each gradient is an update as soon as it arrives, and no
worker waits for the slowest.

So other workers may have updated the weights after this worker read them and before its gradient
arrives. A worker may be `staleness` steps ahead of the slowest; then it has to wait. A server has a
thread for each worker (bounded_staleness.py), and keeps a record of its updates; replay_updates.py
makes the same updates again in one process.

    worker   gradients, of the mean loss of its own part
    worker   Push and a vector to each server       (server_messages.py)
    server   updates by it, waits for the worker's turn
    server   Weights and a vector back
    …
    worker   LastPull at the end: waits for all workers, gets the last weights

Cost: in parameter_server.py.

notes:   N1 DP, N3 §2
"""

from typing import Any, ClassVar

from minidist.comm.group import Group
from minidist.data.rank_batch import digests_of
from minidist.errors import ConfigError, PeerLostError
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.data.bounded_staleness import Service, Update, own_scale
from minidist.parallel.data.parameter_server import ParameterServer
from minidist.parallel.data.server_messages import (
    LastPull,
    Push,
    Refusal,
    Weights,
    receive_answer,
    send_message,
)
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Batch, Loss, Part


class AsyncParameterServer(ParameterServer):
    """A worker or a server of asynchronous updates. Args, Attributes, Raises: as ParameterServer.

    Args:    staleness: the most steps that a worker may be ahead of the slowest (None: any number).
    Attributes: record: a server's updates; lost: workers that a server has lost, with the reason.
    """

    asynchronous = True
    workers_update: ClassVar[bool] = False  # chapter 21: workers change their weights, too

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        servers: int = 1,
        staleness: int | None = 2,
        loss: Loss | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if staleness is not None and staleness < 0:
            raise ConfigError(
                f"staleness {staleness}: it is how many steps a worker may be ahead of the "
                "slowest; choose 0 or more, or None for no bound"
            )
        self.staleness = staleness
        super().__init__(model, group, servers=servers, loss=loss, recorder=recorder)

    def _begin(self) -> None:
        """Make the service of the workers, and wait until all ranks are ready."""
        if not self.workers_update:
            self._weights_are_the_servers()
        self.service: Service | None = None
        if self.serves:
            self.service = Service(
                self.group,
                self.workers,
                self.shards[0],
                self.parameters,
                staleness=self.staleness,
                recorder=self.recorder,
            )
        else:
            self.group.expendable()
        self.lost: dict[int, PeerLostError] = {} if self.service is None else self.service.lost
        self.versions = [0] * self.servers
        self.pushes = 0
        self._finished = False
        self._gone: set[int] = set()
        self._options: dict[str, Any] = {}  # the optimizer's at the first step
        self._meet()

    @property
    def gone(self) -> set[int]:
        """The ranks of the group that were lost; workers know them when they have finished."""
        return set(self.lost) if self.serves else self._gone

    @property
    def record(self) -> list[Update]:
        """A server's updates."""
        return [] if self.service is None else self.service.record

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make a worker's step on its rows of the *global* batch. Args: as Strategy.step; clip:
        bound of the norm of the worker's own gradient.

        Returns: the mean loss of the worker's own part; a server's first call serves until all
                 workers have finished, its later ones do nothing.
        Raises:  ConfigError after `finish`; PeerLostError naming the server that was lost.
        """
        if self.service is not None:
            self.service.serve(optimizer)
            return LateLoss(float("nan"))
        self._require_unfinished()
        self._check_unchanged(optimizer)
        loss = self.gradients(batch, accumulate)
        scale = own_scale([key for shard in self.shards for key in shard.keys], clip)
        self._ask(Push(self.pushes, tuple(self.versions), lr, scale, digests_of(batch)))
        self.pushes += 1
        return LateLoss(loss)

    def _divisor(self, part: Part, batch: Batch) -> int:
        """Return the divisor of the loss: the targets of the worker's own part."""
        return int(part.targets.size)

    def _require_unfinished(self) -> None:
        if self._finished:
            raise ConfigError(
                f"worker {self.group.rank} of {self.workers} has finished and makes no more "
                "steps; evaluate or read the weights of an asynchronous run only after its last "
                "step"
            )

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        """Raise ConfigError for a change of the optimizer that does not reach the servers, which
        are serving."""
        options = optimizer.options_now()
        del options["lr"]  # sent with each gradient
        self._options = self._options or options
        changed = [name for name in options if options[name] != self._options[name]]
        frozen = [key.name for shard in self.shards for key in shard.keys if not key.requires_grad]
        if changed or frozen:
            what = f"the optimizer's {changed[0]}" if changed else f"requires_grad of {frozen[0]!r}"
            raise ConfigError(
                f"asynchronous servers: {what} was changed, but running servers do not get the "
                "change; set it before the first step, or use synchronous servers"
            )

    def finish(self) -> set[int]:
        """Wait, after the last step, for the other workers and the last weights; it may be called
        any number of times.

        Returns: ranks of the group that were lost.
        """
        if not self.serves and not self._finished:
            self._finished = True
            answers = self._ask(LastPull())
            self._gone = {worker for answer in answers for worker in answer.lost}
        return self.gone

    def _ask(self, request: Push | LastPull) -> list[Weights]:
        """Send a request to all servers, followed in a push by this worker's gradient; pull, and
        note the versions of the weights.

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
