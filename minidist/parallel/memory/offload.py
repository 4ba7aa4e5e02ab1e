"""Chapter 20 · Offload: what does not fit on the device lies on the host or on disk, and comes when
it is needed.

The idea. Of a parameter's 16 bytes a device computes with few at any moment: the optimizer's state
is touched once a step, the weights of a layer twice. So each byte lies where it is cheap to keep,
and moves while the device computes with others. What a device must hold shrinks to what is at work,
and what moves is known to the byte:

    OnHost  (ZeRO-Offload)     device   | forward, backward       | wait |
                                            | gradients go down -->
                               host                               | Adam | weights go up -->

    OnDisk  (ZeRO-Infinity)    disk     read 1 | read 2 | read 3 | …    write gradients 3 | …
                               host     a few buffers: what arrives, is worked on, leaves
                               device            unit 1 | unit 2 | unit 3

A store (zero/shards.py) says where a rank's chunks lie; ZeRO (chapters 14 to 16) says which chunks
are a rank's. So both compose with any number of ranks, and on one rank a chunk is the whole run.
What each rank holds, Ψ parameters in bytes, P ranks, with Adam in float32 (and in mixed precision,
with masters in float32):

                  one device     OnHost, ZeRO-2        OnDisk, ZeRO-3
    device        16Ψ (16Ψ)      4Ψ (2Ψ)               two units and the root
                                 and three buckets     and gradients of three units
    host                         16Ψ/P (14Ψ/P)         `buffers` records (a record: a run's file)
    disk                                               16Ψ/P (16Ψ/P), on whole pages

Of the three buckets (units) one fills, one is reduced, one goes down. The host has master, m, v and
gradients.

ZeRO-1 keeps its gradients on the device, so OnHost saves 8Ψ (12Ψ) there; with ZeRO-3 the device
holds 4Ψ/P (2Ψ/P).

Traffic, a step and rank (times Ψ/P where it is not written), A backward passes, w bytes a weight
and a gradient; K the optimizer's bytes a parameter, the master's among them in mixed precision:

    OnHost   device to host    A w Ψ/P      gradients (ZeRO-1: once, whatever A)
             host to device    w Ψ/P        new weights
             Both at A = 1, P = 1 in fp16: 2Ψ + 2Ψ, as in the paper.
    OnDisk   disk to host      2A w         weights, before forward and backward (the root's once)
                               + (A-1) w    gradients so far
                               + w + K'     for the update: gradients, masters and states (K' = K,
                                            and w where the weights are their own masters)
             host to device    2A w
             device to host    A w          gradients
             host to disk      A w          gradients
                               + w + K      new weights, masters and states
             In float32 with Adam, A = 1: 24Ψ/P read, 16Ψ/P written.

Where a gradient is a sum over more ranks than those of the data axis that share a copy (hybrid
sharding: over copies; chapter 17: of what ranks of tp, or both ends of a pipeline, hold alike),
that sum is made at the end of the step, from host to host: nothing moves for it with OnHost, and
OnDisk reads and writes these gradients once more. In a pipeline each microbatch is a pass of ZeRO-2
and 3.

Weights are read ahead of their unit, gradients are written behind the backward of the unit after the
next, and the update of a run hides the read of the next and the write of the last. The number of
buffers bounds what is in flight: one is enough, but then no read is begun early. The arithmetic and
its order do not change: the same bits as without. OnDisk is in offload_disk.py.

notes:   N2 §10.2
Source:  Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et
         al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import LOW_PRECISION, Array, array_module, device_of, to_host
from minidist.device.device_copies import bring, copy, host_bytes, mark
from minidist.nn import GPT, Module
from minidist.nn.weights import unround
from minidist.optim import Optimizer
from minidist.optim.optimizer import Slot
from minidist.parallel.memory.transfer_lanes import Move, Pace, TransferLane
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch
from minidist.parallel.zero.shards import ShardStore


def plain_offload(
    model: GPT, optimizer: Optimizer, batches: Iterable[Batch], host: Sequence[Parameter]
) -> float:
    """Train by ZeRO-Offload on one process; return the last loss.

    The optimizer updates `host`, copies of the weights.
    """
    for inputs, targets in batches:
        loss = model.loss(inputs, targets, divisor=targets.size)
        loss.backward()
        for p, h in zip(model.parameters(), host, strict=True):
            h.grad = np.array(p.grad)  # gradients go down: 1 × the model
            p.zero_grad()  # and are freed on the device
        optimizer.step()  # Adam on the host, where m and v are
        for p, h in zip(model.parameters(), host, strict=True):
            p.data[...] = h.data  # new weights to the device: 1 × the model
    return float(loss.item())


# `OnHost` below moves only a rank's chunks (chapters 14 to 16 say which), bucket by bucket and while
# the device computes: a bucket goes down while the next one fills. `OnDisk` moves everything, the
# weights too, and reads ahead.


class OffDevice(ShardStore, ABC):
    """What both stores share: the lanes between device and host, and pieces whose arrays are
    brought for the update.

    Args:    recorder: is told what moves when; pace_down, pace_up: how slow a bus to imagine,
             device to host and back.
    Attributes: down, up: the lanes.
    """

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        pace_down: Pace | None = None,
        pace_up: Pace | None = None,
    ) -> None:
        super().__init__()
        self.recorder = recorder or Silent()
        self.down = TransferLane(
            "device", "host", self.traffic, recorder=self.recorder, pace=pace_down
        )
        self.up = TransferLane("host", "device", self.traffic, recorder=self.recorder, pace=pace_up)
        self._going: Move | None = None  # the gradients that are on their way down

    def stored_pieces(self, flat: Flat, weights: Array, gradients: Array) -> list["StoredPiece"]:
        """Return the pieces of a run over this rank's chunks of the weights and of their
        gradients."""
        for parameter in flat.parameters:
            # what a user writes to p.data would be lost: it is refused from here on
            parameter.keep_by("the store of offloaded state")
        return [
            StoredPiece(parameter, weights[place], gradients[place], part, self, flat, place)
            for parameter, place, part in flat.chunk_spans()
        ]

    def device_sums(self, flat: Flat) -> Array | None:
        """Return None: sums leave the device, through add."""
        return None

    def start_down(self, name: str, nbytes: int, work: Callable[[], None]) -> Move:
        """Begin to take a run's gradients down, once those before are: at most one buffer waits for
        the bus."""
        if self._going is not None:
            self._going.wait()
        self._going = self.down.start(f"gradients {name} down", nbytes, work)
        return self._going

    def before_buffer(self) -> None:
        """With a memory limit, wait until what is on its way down has left: so the peak does not
        depend on the speed of the bus."""
        if self._going is not None and account.current().limit is not None:
            self._going.wait()

    def wait_for_gradients(self) -> None:
        """Return when the last gradients have left the device."""
        if self._going is not None:
            self._going.wait()
            self._going = None

    @contextmanager
    def gradients(self, flats: Sequence[Flat]) -> Iterator[list[Array]]:
        """As ShardStore's, on the host; what sums them takes memory there."""
        with account.use(self.host), super().gradients(flats) as sums:
            yield sums

    def state(
        self, model: Module, flats: Sequence[Flat], *, algorithm: str
    ) -> dict[str, np.ndarray]:
        """Masters come from the host or the disk, and nothing of it touches the device."""
        with account.use(self.host):
            return super().state(model, flats, algorithm=algorithm)

    def close(self) -> None:
        self.down.close()
        self.up.close()

    # what the optimizer asks (StateStore in optim/optimizer.py): Optimizer._slot, Optimizer.walk

    @abstractmethod
    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Return new state arrays of a piece, zero, by name; walk brings them."""

    @abstractmethod
    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Yield each slot, its arrays in memory until the next is requested; `changes`: what is
        written is kept."""


class StoredPiece(Piece):
    """A piece whose arrays its store brings for the update.

    Attributes: store: the StateStore that the optimizer asks; flat: its run; place: its place in
                the rank's chunk of that.
    """

    def __init__(
        self,
        parameter: Parameter,
        data: Array,
        grad: Array,
        part: range,
        store: OffDevice,
        flat: Flat,
        place: slice,
    ) -> None:
        super().__init__(parameter, data, grad, part)
        self.store = store
        self.flat = flat
        self.place = place


def take_down(holder: list[Array], sums: np.ndarray, ready: Any, *, first: bool) -> None:
    """Add the chunk in `holder` to sums, or copy it there if `first`. `holder` is a list, so that
    pop ends the last reference: the chunk's buffer on the device is free when this returns."""
    chunk = holder.pop()
    if first:
        copy(chunk, sums, ready)
    else:
        # float16's that overflowed: `update` finds them
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(sums, bring(chunk, ready), out=sums)


def by_run(slots: Sequence[Slot]) -> Iterator[tuple[Flat, list[Slot]]]:
    """Yield (run, its slots): slots in their order, by the run that their pieces belong to."""

    def run_of(slot: Slot) -> Flat:
        piece: Any = slot.weights  # a StoredPiece
        flat: Flat = piece.flat
        return flat

    for flat, chosen in groupby(slots, key=run_of):
        yield flat, list(chosen)


class OnHost(OffDevice):
    """ZeRO-Offload: master weights (in float32 too), optimizer state, summed gradients and the
    update on the host."""

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """Make room on the host; `shard` only says where a sum will be when it goes down."""
        self._runs[flat].gradients = self._host_zeros(flat, flat.dtype, "gradients")

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Return pieces over a float32 (float64) copy on the host."""
        run = self._runs[flat]
        low = flat.dtype in LOW_PRECISION
        master = self._host_zeros(
            flat, np.dtype(np.float32) if low else flat.dtype, "optimizer" if low else "parameters"
        )
        weights = to_host(run.weights)
        master[...] = weights
        unround(master, weights, flat.chunk_spans())
        run.master = master
        return list(self.stored_pieces(flat, master, run.gradients))

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Begin to take a sum down; returns at once, or when the one before is down."""
        run = self._runs[flat]
        work = partial(take_down, [chunk], run.gradients, mark(chunk), first=first)
        self.start_down(run.name, chunk.nbytes, work)

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Return zeros on the host."""
        zeros = array_module(weights.data).zeros_like
        return {name: self.host.hold(zeros(weights.data), "optimizer") for name in names}

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Yield slots run by run: while a run is updated, the new weights of the run before go
        up."""
        moves: list[Move] = []
        with account.use(self.host):
            for flat, some in by_run(slots):
                yield from some
                if changes:
                    run = self._runs[flat]
                    work = partial(copy, run.master, run.weights, mark(run.weights))
                    moves.append(self.up.start(f"weights {run.name} up", run.weights.nbytes, work))
            for move in moves:
                move.wait()

    def _host_zeros(self, flat: Flat, dtype: np.dtype, category: str) -> Array:
        device = device_of(self._runs[flat].weights)
        room = host_bytes(flat.chunk_size * dtype.itemsize, device).view(dtype)
        room[...] = 0
        return self.host.hold(room, category)
