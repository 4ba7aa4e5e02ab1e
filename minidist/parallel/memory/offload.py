"""Chapter 20 · Offload: what does not fit on the device lies on the host or on disk, and comes when it is needed.

The idea. Of a parameter's 16 bytes a device computes with few at any moment: the optimizer's state is touched once a
step, the weights of a layer twice. So each byte lies where it is cheap to keep, and moves while the device computes
with others. What a device must hold shrinks to what is at work, and what moves is known to the byte:

    OnHost  (ZeRO-Offload)      device   weights | forward, backward            | wait |              |
                                         gradients of a bucket go down -->
                                host                                            | Adam | weights go up -->

    OnDisk  (ZeRO-Infinity)     disk     read 1 | read 2   | read 3   | …         write gradients 3 | …
                                host     a few buffers: what comes, what is worked on, what goes
                                device            unit 1   | unit 2   | unit 3

A store (zero/shards.py) says where a rank's chunks lie; ZeRO (chapters 14 to 16) says which chunks are a rank's. So
both compose with any number of ranks, and on one rank a chunk is the whole run. What each rank holds, Ψ parameters in
bytes, P ranks, with Adam in float32 (and in mixed precision, with masters in float32):

                  one device     OnHost, ZeRO-2                        OnDisk, ZeRO-3
    device        16Ψ (16Ψ)      4Ψ (2Ψ), and three buckets: one       two units, the root's; gradients of three units:
                                 fills, one is reduced, one goes down  one fills, one is reduced, one goes down
    host                         16Ψ/P (14Ψ/P): master, m, v,          `buffers` records
                                 gradients
    disk                                                               16Ψ/P (16Ψ/P), on whole pages

ZeRO-1 keeps its gradients on the device, so OnHost saves 8Ψ (12Ψ) there; with ZeRO-3 the device holds 4Ψ/P (2Ψ/P).
Under a limit of device memory the third buffer or unit is waited for, so that the peak is the same in every run.

Traffic, a step and rank, A backward passes, w bytes a weight and a gradient, each Ψ/P long; K the optimizer's bytes a
parameter, the master's among them in mixed precision:

    OnHost   device to host    A w Ψ/P      gradients (ZeRO-1: once, whatever A)
             host to device    w Ψ/P        new weights: 2Ψ + 2Ψ for A = 1 in fp16, as the paper has it
    OnDisk   disk to host      2A w         weights, before forward and backward (the root's once)
                               + (A-1) w    gradients so far
                               + w + K'     for the update: gradients, masters and states (K' = K, and w where the
                                            weights are their own masters)
             host to device    2A w
             device to host    A w          gradients
             host to disk      A w          gradients
                               + w + K      new weights, masters and states
             In float32 with Adam, A = 1: 24Ψ/P read, 16Ψ/P written.

Weights are read ahead of their unit, gradients are written behind the next one's backward, and the update of a run
hides the read of the next and the write of the last. The number of buffers bounds what is in flight: one is enough, and
hides nothing. Which arithmetic is done, in which order, does not change: the same bits as without.

OnHost stands here, OnDisk in offload_disk.py. Nothing stays behind on disk, however the process ends: files have no
names (memory/disk.py).

notes:   N2 §10.2
Source:  Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et al. 2021,
         "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning".
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import LOW_PRECISION, Array, device_of, to_host
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.optim.optimizer import Slot
from minidist.parallel.data.device_copies import bring, copy, host_bytes, mark
from minidist.parallel.memory.host_shard_store import OffDevice, by_run
from minidist.parallel.memory.transfer_lanes import Move
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.step import Batch


def plain_offload(model: GPT, optimizer: Optimizer, batches: Iterable[Batch], host: Sequence[Parameter]) -> float:
    """ZeRO-Offload on one process: the optimizer is made of `host`, copies of the weights; returns the last loss."""
    for inputs, targets in batches:
        loss = model.loss(inputs, targets, divisor=targets.size)
        loss.backward()
        for p, h in zip(model.parameters(), host, strict=True):
            h.grad = np.array(p.grad)                          # gradients go down: 1 × the model
            p.zero_grad()                                      # and are freed on the device
        optimizer.step()                                       # Adam on the host, beside its m and v
        for p, h in zip(model.parameters(), host, strict=True):
            p.data[...] = h.data                               # new weights come up: 1 × the model
    return float(loss.item())


# `OnHost` below moves a rank's chunks only (chapter 15 says which), bucket by bucket and at the same time as the device
# computes: a bucket goes down while the next one fills. `OnDisk` moves everything, the weights too, and reads ahead.


class OnHost(OffDevice):
    """ZeRO-Offload: master weights, optimizer state, summed gradients and the update on the host.

    Where weights are float32 the host's copy is the master, under `parameters` of the host's account.
    """

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """Room on the host; `shard` only says where a sum will be when it goes down."""
        self._gradients[id(flat)] = self._host_zeros(flat, flat.dtype, "gradients")

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """The weights stay on the device."""
        super().keep(flat, weights, name)
        self._names[id(flat)] = name

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Over a float32 (float64) copy on the host."""
        low = flat.dtype in LOW_PRECISION
        master = self._host_zeros(flat, np.dtype(np.float32) if low else flat.dtype,
                                  "optimizer" if low else "parameters")
        master[...] = to_host(self._weights[id(flat)])
        self._masters[id(flat)] = master
        return self.stored_pieces(flat, master, self._gradients[id(flat)])

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Begin to take a sum down; returns at once, or when the one before is down."""
        sums, ready, bus = self._gradients[id(flat)], mark(chunk), [chunk]

        def work() -> None:
            chunk = bus.pop()           # so that its buffer is free when this returns
            if first:
                copy(chunk, sums, ready)
            else:
                np.add(sums, bring(chunk, ready), out=sums)

        self.go_down(flat, chunk, work)

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Zeros."""
        return {name: self.host.hold(np.zeros(weights.data.shape, weights.data.dtype), "optimizer") for name in names}

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Run by run: while one is updated, the new weights of the one before go up."""
        moves: list[Move] = []
        with account.use(self.host):
            for flat, run in by_run(slots):
                yield from run
                if changes:
                    moves.append(self._go_up(flat))
            for move in moves:
                move.wait()

    def _go_up(self, flat: Flat) -> Move:
        master, weights = self._masters[id(flat)], self._weights[id(flat)]
        ready = mark(weights)
        return self.up.start(f"weights {self._names[id(flat)]} up", weights.nbytes,
                             lambda: copy(master, weights, ready))

    def _host_zeros(self, flat: Flat, dtype: Any, category: str) -> Array:
        room = np.zeros(flat.chunk_size, dtype)
        if device_of(self._weights[id(flat)]) != "cpu":
            room = host_bytes(room.nbytes, "cuda").view(dtype)
            room[...] = 0
        return self.host.hold(room, category)
