"""What the three ZeRO stages share: which ranks share a copy of the state, and where a rank's
chunks of it lie.

Hybrid sharding: the ranks of a node share one copy of the state, and every node has a copy.
Gathering and scattering use the links inside a node, which are fast; only sums of shards travel
between nodes:

    8 ranks, shard=4       node 0           node 1
    share a copy        0   1   2   3    4   5   6   7     gather weights, reduce-scatter gradients
    same shard          0 ─────────────── 4                 all-reduce that shard's gradients;
                                                            1-5, 2-6, 3-7 too

With S ranks a copy and R = P/S copies a rank holds 1/S where it would hold 1/P, and sends in a
step, for n bytes that are gathered or scattered in c collectives:

    inside, axis "dp.shard"         (S-1)/S × cn
    between, axis "dp.replicas"     2(R-1)/R × n/S, once a step, whatever the number of passes

A shard store says where a rank's chunk of a run (step/flat.py) lies between two uses: weights, sums
of gradients, the optimizer's state. ShardStore: on the device. With chapter 20's stores copies are
summed at the end, from host to host.

Source:  Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
         §3.2.2.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, array_module, to_host, widen
from minidist.device.memory_traffic import MemoryTraffic
from minidist.errors import ConfigError
from minidist.nn import Module, divisors
from minidist.optim import sum_of_squares
from minidist.parallel.step.flat import Flat, Piece, empty_like
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.scheme import GradientRun, Scheme
from minidist.parallel.step.step import Loss
from minidist.parallel.step.strategy import Collective, DataAxis


class HybridSharding:
    """The ranks that share a copy with this rank, and those that hold the same shard of other
    copies. With one copy it only passes each sum on to the scheme. (The paper's hybrid: sharded
    inside, replicated between. Chapter 17's Hybrid is a strategy.)

    Args:    group: all ranks of the data axis; shard: how many neighbours share one copy (None: all
             of them).
             algorithm: of the all-reduce between copies; scheme: how gradients travel, several
             copies': between them.
    Attributes: shard_group: the ranks that share this rank's copy of the state. copies: the
                number of copies; 1 by default, while the weights have a copy on each rank.
                replica_group: the ranks that hold this rank's shard, one per copy; None if there
                is one copy.
    Raises:  ConfigError if `shard` does not divide the group.
    """

    def __init__(
        self,
        group: Group,
        shard: int | None,
        *,
        algorithm: str,
        recorder: Recorder,
        scheme: Scheme | None = None,
    ) -> None:
        size = group.size if shard is None else shard
        if size not in divisors(group.size):
            raise ConfigError(
                f"shard={shard}: {group.size} ranks cannot be cut into copies of {size}; choose "
                f"one of {', '.join(map(str, divisors(group.size)))}"
            )
        self.group = group
        self.copies = group.size // size
        self.algorithm = algorithm
        self.recorder = recorder
        self.scheme = scheme or Scheme(algorithm)
        one = self.copies == 1
        self.shard_group = (
            group if one else group.split(group.rank // size, axis=f"{group.axis}.shard")
        )
        self.replica_group = (
            None if one else group.split(group.rank % size, axis=f"{group.axis}.replicas")
        )
        self._pending: list[Pending] = []

    def has_copies(self, flat: Flat) -> bool:
        """Return whether several copies hold the flat."""
        return self.copies > 1 and flat.group is self.shard_group

    def gradient_run(self, flat: Flat, chunk: slice | None = None) -> GradientRun:
        """Return what the scheme sums: all of a flat; with copies a chunk (default: this rank's)
        over them."""
        if self.replica_group is None or not self.has_copies(flat):
            return GradientRun.whole(flat.parameters, flat.group, "reduce_scatter")
        return GradientRun(
            tuple((p, part) for p, _, part in flat.chunk_spans(chunk)),
            self.replica_group,
            "all_reduce",
        )

    def start_reduce_scatter(self, index: int, flat: Flat, bucket: Array, out: Array) -> Pending:
        """Begin to sum a flat's gradients, which lie in `bucket`, within this copy; `out`: this
        rank's chunk of the sum."""
        if not self.has_copies(flat):
            return self.scheme.start_reduce_scatter(index, bucket, out)
        return flat.group.start_reduce_scatter(bucket, out=out, algorithm=self.algorithm)

    def start_sum_of_copies(self, index: int, chunk: Array, what: str) -> None:
        """Begin to sum the gradients of a flat's chunk, already summed within this copy, over all
        copies, in place.

        Only for a flat that has copies.
        Cost:    one all-reduce of the chunk over the copies.
        """
        assert self.replica_group is not None, "the flat has copies"
        self.recorder.announce(self.replica_group.axis, f"all_reduce {what}")
        self._pending.append(self.scheme.start_all_reduce(index, chunk))

    def wait_for_copies(self) -> None:
        """Wait for the sums over the copies of the state."""
        for pending in self._pending:
            pending.wait()
        self._pending = []


@dataclass
class StoredRun:
    """This rank's chunk of a run: its weights, their gradients' sums, the optimizer's own weights.

    Attributes: gradients, master: None in a frozen run.
    """

    name: str
    weights: Array
    gradients: Array = None
    master: Array = None


class ShardStore:
    """The plain store: everything on the device, nothing moves.

    Attributes: traffic: bytes moved between device, host and disk; host: the account of the host's
    memory.
    """

    def __init__(self) -> None:
        self.traffic = MemoryTraffic()
        self.host = MemoryAccount(whose="host memory")
        self._runs: dict[Flat, StoredRun] = {}

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """Keep this rank's chunk of a run's weights, (chunk_size,) on the device.

        Args:    name: of the run, for errors and spans; ignored if the run is kept already.
        """
        if flat in self._runs:
            self._runs[flat].weights = weights
        else:
            self._runs[flat] = StoredRun(name, weights)

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """Allocate the array for the sums of the chunk's gradients, or keep `shard`: an array on
        the device in which the sums arrive."""
        if shard is None:
            weights = self._runs[flat].weights
            zeros = array_module(weights).zeros(flat.chunk_size, flat.dtype)
            shard = account.current().hold(zeros, "gradients")
        self._runs[flat].gradients = shard

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Return the optimizer's tensors: a piece of each parameter of a run, for this rank's
        chunk."""
        run = self._runs[flat]
        run.master = precision.master(run.weights, flat.chunk_spans())
        if run.master is not run.weights:
            for parameter in flat.parameters:  # also those of which other ranks have all
                parameter.keep_by("its float32 master")
        return flat.pieces(run.master, run.gradients)

    def weights(self, flat: Flat, place: Array) -> Array:
        """Return the chunk's weights, on the device: in `place` (chunk_size,), or where they are
        anyway."""
        return self._runs[flat].weights

    def device_sums(self, flat: Flat) -> Array | None:
        """Return the array on the device with the sums of a run's gradients; None: an offload keeps
        the sums elsewhere, and `add` sends them there."""
        return self._runs[flat].gradients

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Add a sum of gradients (chunk_size,), on the device, to the chunk's; the `first` of a
        step replaces them."""
        sums = self._runs[flat].gradients
        if first:
            sums[...] = chunk
        else:
            sums += chunk

    @contextmanager
    def gradients(self, flats: Sequence[Flat]) -> Iterator[list[Array]]:
        """Yield the sums of some runs' gradients, in memory inside, as are their pieces'; what is
        written to them is kept."""
        yield [self._runs[flat].gradients for flat in flats]

    def squares(self, pieces: Iterable[Piece]) -> float:
        """Return the sum of the squares of some pieces' gradients, in float64; for pieces that name
        their store (Counted in step/step.py)."""
        return sum_of_squares(piece.grad for piece in pieces)

    def state(
        self, model: Module, flats: Sequence[Flat], *, algorithm: str
    ) -> dict[str, np.ndarray]:
        """Return copies of a model's master weights, whole, on the host, by dotted path; low
        precision comes as float32.

        What is in no flat is the model's. Every rank calls it.
        Cost:    one all-gather a flat, counted under `control`; a flat at a time.
        """
        whole: dict[Parameter, np.ndarray] = {}
        for flat in flats:
            chunk = self.master(flat)
            vector = empty_like(chunk, flat.size, "workspace")
            with flat.group.ledger.control():
                flat.group.all_gather(chunk, out=vector, algorithm=algorithm)
            for parameter, view in flat.views(vector):
                whole[parameter] = widen(np.array(to_host(view)))
        return {
            name: whole[p] if p in whole else widen(np.array(to_host(p.data)))
            for name, p in model.named_parameters()
        }

    def master(self, flat: Flat) -> Array:
        """Return the chunk's master weights, on the device or the host; of a frozen run its
        weights."""
        run = self._runs[flat]
        return run.weights if run.master is None else run.master

    # --------------------------------- nothing happens here; chapter 20's stores override these

    def take_name(self, who: str) -> None:
        """Take the rank's name, for errors."""

    def read_ahead(self, flat: Flat) -> None:
        """Take note that `weights` is called soon; only chapter 20's disk store reads."""

    def before_buffer(self) -> None:
        """With a memory limit: wait until gradients on their way down have left the device
        (GradientShards._lend)."""

    def wait_for_gradients(self) -> None:
        """Return when the gradients of a backward, which is over, are where they belong."""

    def disk_bytes(self) -> int:
        """Return the bytes on disk."""
        return 0

    def close(self) -> None:
        """End threads and give space back. The strategy is not used any more."""


class ZeroAxis(DataAxis):
    """A data axis whose ranks divide state: a rank updates its chunks. Its step is
    PassLoop.start_step (step/strategy.py).

    Args:    group: the ranks that share the batch; loss: of a part of the batch (default:
             `model.loss`).
             algorithm: of reduce-scatter and all-gather; pinned, so that the same run gives the
             same bits.
             shard: how many neighbours share one copy of the state (default: all); store: where
             chunks lie (default: on the device); precision: of weights and update (default: one
             dtype for all); recorder: is told what runs.
             scheme: how gradients travel (default: as they are; chapter 21). Weights always travel
             as they are.
    Attributes: parameters: what the optimizer is made of: this rank's pieces; store.
                sharing: the ranks that share this rank's copy of the state, and the sums of
                gradients over them (HybridSharding).
                flats: the runs of parameters that learn; stored: all that are divided.
    """

    stored: Sequence[Flat]

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        loss: Loss | None,
        algorithm: str,
        shard: int | None,
        precision: Precision | None,
        store: ShardStore | None,
        recorder: Recorder | None,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__(
            model, group, loss=loss, algorithm=algorithm, precision=precision, recorder=recorder
        )
        self.sharing = HybridSharding(
            group, shard, algorithm=algorithm, recorder=self.recorder, scheme=scheme
        )
        self.scheme: Scheme = self.sharing.scheme
        self.first_copy = group.rank < self.sharing.shard_group.size
        self.store = store or ShardStore()
        self.store.take_name(f"rank {group.world_rank}")

    def sum_stored(self) -> None:
        """Sum the shards whose gradients have left the device over the copies, one after
        another."""
        for index, flat in enumerate(self.flats):
            if self.sharing.has_copies(flat) and self.store.device_sums(flat) is None:
                with self.store.gradients([flat]) as (shard,):
                    self.sharing.start_sum_of_copies(index, shard, f"stored run {index}")
                    self.sharing.wait_for_copies()

    def pieces(self) -> list[Piece]:
        """This rank's piece of each parameter that learns, for the optimizer."""
        return [piece for flat in self.flats for piece in self.store.pieces(flat, self.precision)]

    def updated(self) -> list[tuple[Parameter, Piece]]:
        """The parameters that learn, each with this rank's piece of it."""
        return [(piece.parameter, piece) for piece in self.parameters]

    def state_dict(self) -> dict[str, np.ndarray]:
        """As Strategy's. Every rank calls it.

        A barrier comes first: the gathers look like a step's, which another rank may be making.
        Cost:    a barrier, and an all-gather per bucket or unit, under `control`; one at a time.
        """
        with self.group.ledger.control():
            self.sharing.shard_group.barrier()
        return self.store.state(self.model, self.stored, algorithm=self.algorithm)

    def collectives_of_copies(self) -> list[Collective]:
        """Return the all-reduces of every shard of one copy over the copies, once a step."""
        runs = [
            self.sharing.gradient_run(flat, slice(*edges))
            for flat in self.flats
            if self.sharing.has_copies(flat)
            for edges in pairwise(bounds(flat.size, flat.group.size))
        ]
        return [
            Collective(
                run.verb,
                run.size * run.dtype.itemsize,
                run.group,
                True,
                self.scheme.sent_bytes(run),
            )
            for run in runs
        ]
