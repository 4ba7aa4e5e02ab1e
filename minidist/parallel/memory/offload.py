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

A home (zero/shard_store.py) says where a rank's chunks lie; ZeRO (chapters 14 to 16) says which chunks are a rank's. So
both compose with any number of ranks, and on one rank a chunk is the whole run. Who holds what, Ψ parameters in bytes,
each rank of P, with Adam in float32 (and in mixed precision, with masters in float32):

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

Nothing stays behind on disk, however the process ends: files have no names (memory/disk.py).

notes:   N2 §10.2
Source:  Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et al. 2021,
         "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning".
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import LOW_PRECISION, Array, device_of, to_host, widen
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.optim.clip import add_exactly, block_sums
from minidist.optim.optimizer import Slot
from minidist.parallel.data.device_copies import bring, copy, host_bytes, mark
from minidist.parallel.memory.disk import Disk
from minidist.parallel.memory.disk_file import Loan, Record
from minidist.parallel.memory.host_shard_store import Offload, by_run, move_in, nothing
from minidist.parallel.memory.transfer_lanes import Move, Pace
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
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

# ------------------------------------------------------------------------------------------------ on the host (Offload)

class OnHost(Offload):
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
        return self.lodge(flat, master, self._gradients[id(flat)])

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
        room = np.zeros(flat.owned, dtype)
        if device_of(self._weights[id(flat)]) != "cpu":
            room = host_bytes(room.nbytes, "cuda").view(dtype)
            room[...] = 0
        return self.host.hold(room, category)


# ---------------------------------------------------------------------------------------------- on disk (ZeRO-Infinity)

class OnDisk(Offload):
    """ZeRO-Infinity: weights, gradients, master weights and optimizer state in one record a run on disk. For ZeRO-3.

    Args:    folder: where (None: where the system keeps temporary files).
             buffers: how many records are in memory at most, the unit at work on the device apart.
             device: "cpu" or "cuda": buffers for a GPU lie in pinned memory.
             read, write: how slow a disk to imagine.
    Raises:  DiskError for a folder that is missing, cannot be written or is full.
    """

    frees_weights = True

    def __init__(self, folder: str | Path | None = None, *, buffers: int = 4, device: str = "cpu",
                 recorder: Recorder | None = None, read: Pace | None = None, write: Pace | None = None,
                 down: Pace | None = None, up: Pace | None = None) -> None:
        super().__init__(recorder=recorder, down=down, up=up)
        self.disk = Disk(None if folder is None else Path(folder), self.traffic, buffers=buffers, device=device,
                         recorder=self.recorder, memory=self.host, paces=(read, write))
        self._records: dict[int, Record] = {}
        self._coming: dict[int, Loan] = {}              # weights that are read ahead
        self._sums: dict[int, list[float]] = {}         # of each run's gradients, the blocks' sums of squares

    def begin(self, who: str) -> None:
        """Name the rank."""
        self.disk.who = who

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """Write the weights to disk; the device may forget them."""
        self._names[id(flat)] = name
        record = self._records[id(flat)] = self.disk.record(name)
        record.add("weights", flat.dtype, flat.owned)
        self.disk.put(record, "weights", weights)

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """A region beside the weights."""
        self._records[id(flat)].add("gradients", flat.dtype, flat.owned)

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Pieces without values: walk brings them."""
        record = self._records[id(flat)]
        if flat.dtype in LOW_PRECISION:
            record.add("master", np.float32, flat.owned)
            self.disk.put(record, "master", widen(self._read_now(record, "weights")))
        return self.lodge(flat, nothing(record.regions[record.master].dtype, flat.owned),
                          nothing(flat.dtype, flat.owned))

    # ------------------------------------------------------------------------------------------- while computing

    def prefetch(self, flat: Flat) -> None:
        """Begin to read, if a buffer is free and another stays so."""
        if id(flat) not in self._coming:
            loan = self.disk.start_read(self._records[id(flat)], ["weights"], spare=1)
            if loan is not None:
                self._coming[id(flat)] = loan

    def weights(self, flat: Flat, place: Array) -> Array:
        """Read into `place`, or take there what was read ahead."""
        loan = self._coming.pop(id(flat), None) or self.disk.start_read(self._records[id(flat)], ["weights"])
        assert loan is not None
        with self.recorder.span(f"wait for {self._names[id(flat)]}"):
            loan.wait()
            ready = mark(place)
            self.up.start(f"weights {self._names[id(flat)]} up", place.nbytes,
                          lambda: copy(loan.arrays["weights"], place, ready)).wait()
        loan.end()
        return place

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Begin to take a sum down to a buffer, to add what is on disk, and to write it there."""
        record, ready = self._records[id(flat)], mark(chunk)
        loan = self.disk.lend(record) if first else self.disk.start_read(record, ["gradients"])
        assert loan is not None
        sums, bus = loan.arrays["gradients"], [chunk]

        def work() -> None:
            chunk = bus.pop()           # so that its buffer is free when this returns
            loan.wait()
            if first:
                copy(chunk, sums, ready)
            else:
                np.add(sums, bring(chunk, ready), out=sums)
            self._sums[id(flat)] = [float(block) for _, place, _ in flat.owned_spans()
                                    for block in block_sums(sums[place])]

        self.disk.start_write(loan, ["gradients"], after=self.go_down(flat, chunk, work))

    def settle(self) -> None:
        """And forget what was read ahead in vain: it is about to change."""
        super().settle()
        while self._coming:
            self._coming.popitem()[1].end()

    def squares(self) -> float:
        """From the sums that were taken as gradients passed: the same bits as from the gradients."""
        return add_exactly(block for sums in self._sums.values() for block in sums)

    # ------------------------------------------------------------------------------------------------- the update

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Regions of zeros, made with the first piece of a run; returns arrays without values."""
        record = self._records[id(weights.flat)]
        for name in names:
            if name not in record.regions:
                record.add(name, weights.data.dtype, weights.flat.owned)
        return {name: np.broadcast_to(weights.data.dtype.type(np.nan), weights.data.shape) for name in names}

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Run by run: while one is updated, the next is read and the one before written."""
        runs = list(by_run(slots))
        ahead: Loan | None = None
        with account.use(self.host):
            for number, (flat, run) in enumerate(runs):
                record = self._records[id(flat)]
                loan = ahead or self.disk.start_read(record, record.needed)
                following = [self._records[id(other)] for other, _ in runs[number + 1:number + 2]]
                ahead = self.disk.start_read(following[0], following[0].needed, spare=1) if following else None
                assert loan is not None
                with self.recorder.span(f"wait for {self._names[id(flat)]}"):
                    loan.wait()
                empty = [(slot.weights.data, slot.weights.grad, slot.state) for slot in run]
                for slot in run:
                    move_in(slot, loan.arrays, record.master)
                yield from run
                for slot, (data, grad, state) in zip(run, empty, strict=True):
                    slot.weights.data, slot.weights.grad, slot.state = data, grad, state    # type: ignore[misc]
                self._write_back(record, loan) if changes else loan.end()

    def _write_back(self, record: Record, loan: Loan) -> None:
        if "master" in record.regions:
            loan.arrays["weights"][...] = loan.arrays["master"]
        self.disk.start_write(loan, [key for key in record.regions if key != "gradients"])

    # --------------------------------------------------------------------------------------------------- the rest

    def master(self, flat: Flat) -> Array:
        """Read from disk: a copy."""
        record = self._records[id(flat)]
        return self._read_now(record, record.master)

    def _read_now(self, record: Record, key: str) -> np.ndarray:
        loan = self.disk.start_read(record, [key])
        assert loan is not None
        values = np.array(loan.wait().arrays[key])
        loan.end()
        return values

    def disk_bytes(self) -> int:
        """On whole pages."""
        return sum(record.nbytes for record in self.disk.records)

    def close(self) -> None:
        """End the lanes; the files are gone."""
        super().close()
        self.disk.close()
