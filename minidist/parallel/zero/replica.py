"""What ZeRO-1 and ZeRO-2 share: each rank holds the whole model, updates its chunk, and gathers the
others' chunks.

Gathering hides behind the next forward. A step ends when the updated chunks have set out; a read of
a weight waits only for that weight's bucket. Forward takes weights in the order in which the model
declares them, so they set out in that order:

    compute         … optimizer | forward: layer 1 | layer 2  | layer 3  | backward …
    communication               | gather 1 | gather 2 | gather 3 |
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.data.buckets import BUCKET_BYTES, BucketOrder, cut
from minidist.parallel.step.flat import Flat, settle_in_vector, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.step import Counted, Loss
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.shards import ShardStore, ZeroAxis


class ParameterArrivals:
    """Gathers runs of parameters, of which each rank has its chunk, into whole vectors.

    Args:    flats: the runs, last used first; vectors: their whole weights, of which the
             parameters are views.
             axis: the strategy.
    """

    def __init__(self, flats: Sequence[Flat], vectors: Sequence[Array], axis: ZeroAxis) -> None:
        self.flats = flats
        self.vectors = vectors
        self.algorithm = axis.algorithm
        self.recorder = axis.recorder
        self._pending: dict[int, Pending] = {}

    def start(self) -> None:
        """This rank's chunks are new: begin to gather the chunks of all ranks.

        Cost:    one all-gather a flat; returns at once.
        """
        # forward order: buckets are last first
        for index in reversed(range(len(self.flats))):
            flat = self.flats[index]
            vector = self.vectors[index]
            self.recorder.announce(flat.group.axis, f"all_gather bucket {index}")
            self._pending[index] = flat.group.start_all_gather(
                vector[flat.chunk], out=vector, algorithm=self.algorithm
            )
            for parameter in flat.parameters:
                # Parameter.data calls it before its next read
                parameter.arrival = partial(self._arrive, index)

    def _arrive(self, index: int) -> None:
        """Wait for the all-gather of one run."""
        with self.recorder.span("wait for weights"):
            self._pending[index].wait()
        del self._pending[index]
        for parameter in self.flats[index].parameters:
            parameter.arrival = None

    def wait_for_all(self) -> None:
        """Wait for all all-gathers in flight: the vectors may change again."""
        for index in list(self._pending):
            self._arrive(index)


class ShardedReplica(ZeroAxis):
    """A replica of a model whose optimizer is divided among the ranks of a group.

    Args:    model: equal on all ranks; its weights move into vectors. Frozen weights stay as they
             are.
             bucket_bytes: largest size of a bucket, in bytes; the others, and Attributes: as
             ZeroAxis.
    Raises:  MismatchError if the replicas do not start equal.
    """

    name: str  # of the stage

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        loss: Loss | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "ring",
        shard: int | None = None,
        precision: Precision | None = None,
        store: ShardStore | None = None,
        recorder: Recorder | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__(
            model,
            group,
            loss=loss,
            algorithm=algorithm,
            shard=shard,
            precision=precision,
            store=store,
            recorder=recorder,
            scheme=scheme,
        )
        check_equal_replicas(model.parameters(), group, when="before the first step")
        self.weights = trainable(model.parameters())
        runs = cut(self.weights, bucket_bytes)
        self.flats = self.stored = [Flat(run, self.sharing.shard_group) for run in runs]
        vectors = [flat.join() for flat in self.flats]
        for flat in self.flats:
            settle_in_vector(flat.parameters)
        self.scheme.attach([self.sharing.gradient_run(flat) for flat in self.flats])
        for index, (flat, vector) in enumerate(zip(self.flats, vectors, strict=True)):
            self.store.keep(flat, vector[flat.chunk], f"bucket {index}")
        self._make_gradients()
        self.parameters = self.pieces()
        self.counted = Counted(self.parameters, self.sharing.shard_group)
        self.arrivals = ParameterArrivals(self.flats, vectors, self)
        self._bucket_order = BucketOrder(
            [flat.parameters for flat in self.flats],
            self._start_reduce,
            who=f"{self.name} rank {group.rank} of {group.size}",
            by=f"{type(self).__name__}.backward",
        )

    @abstractmethod
    def _make_gradients(self) -> None:
        """Say where the gradients of each bucket, and their sums, lie."""

    @abstractmethod
    def _start_reduce(self, index: int) -> None:
        """The gradients of a bucket are final, and those before it have set out: begin the
        reduce-scatter."""

    def update(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
        counted: Counted | None = None,
    ) -> None:
        """The optimizer's step on this rank's pieces; then the new weights set out. Args: as
        DataAxis.update."""
        # a bucket that no forward has read may still travel
        self.arrivals.wait_for_all()
        super().update(optimizer, lr=lr, clip=clip, counted=counted)
        self.arrivals.start()

    def collectives(self, scatters: Sequence[int]) -> list[Collective]:
        """Of each bucket so many reduce-scatters, its all-gather, and sums over copies."""
        sent = [
            None if self.sharing.has_copies(flat) else self.scheme.sent_bytes(run)
            for flat, run in zip(self.flats, self.scheme.runs, strict=True)
        ]
        return (
            [
                Collective("reduce_scatter", flat.nbytes, flat.group, sent=count)
                for flat, count, times in zip(self.flats, sent, scatters, strict=True)
                for _ in range(times)
            ]
            + [Collective("all_gather", flat.nbytes, flat.group) for flat in self.flats]
            + self.collectives_of_copies()
        )

    def state_replaced(self) -> None:
        self.arrivals.start()
