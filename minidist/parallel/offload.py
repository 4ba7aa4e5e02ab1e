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

A home (common/home.py) says where a rank's chunks lie; ZeRO (chapters 14 to 16) says which chunks are a rank's. So both
compose with any number of ranks, and on one rank a chunk is the whole run. Who holds what, Ψ parameters in bytes, each
rank of P, with Adam in float32 (and in mixed precision, with masters in float32):

                  one device     OnHost, ZeRO-2                        OnDisk, ZeRO-3
    device        16Ψ (16Ψ)      4Ψ (2Ψ), and three buckets: one       two units, the root's; gradients of three units:
                                 fills, one is reduced, one goes down  one fills, one is reduced, one goes down
    host                         16Ψ/P (14Ψ/P): master, m, v,          `buffers` records
                                 gradients
    disk                                                               16Ψ/P (16Ψ/P), on whole pages

ZeRO-1 keeps its gradients on the device, so OnHost saves 8Ψ (12Ψ) there; with ZeRO-3 the device holds 4Ψ/P (2Ψ/P).

Traffic, a step and rank, A backward passes, w bytes a weight and a gradient, s a state array and a master, each Ψ/P
long; K the optimizer's bytes a parameter, the master's among them in mixed precision:

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

Nothing stays behind on disk, however the process ends: files lose their names when they are opened (common/disk.py).

notes:   N2 §10.2
Source:  Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et al. 2021,
         "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning".
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from minidist import account
from minidist.backend import LOW_PRECISION, Array, device_of, to_host, widen
from minidist.errors import MemoryLimitError
from minidist.optim.clip import add_exactly, block_sums
from minidist.optim.optimizer import Slot
from minidist.parallel.common.copies import copy, host_bytes, mark
from minidist.parallel.common.disk import Disk, Loan, Record
from minidist.parallel.common.flat import Flat, Piece
from minidist.parallel.common.home import Home
from minidist.parallel.common.moves import Lane, Move, Pace
from minidist.parallel.common.precision import Precision
from minidist.parallel.common.recorder import Recorder, Silent
from minidist.parallel.common.units import Unit


class Lodger(Piece):
    """A piece whose arrays its home brings.

    Attributes: home; flat: the run; place: where in the rank's chunk
    """

    home: "Offload"
    flat: Flat
    place: slice


class Offload(Home):
    """What both homes share: the lanes between device and host, and the walk by runs.

    Args:    recorder: is told what moves when; down, up: how slow a bus to imagine, device to host and back.
    """

    def __init__(self, *, recorder: Recorder | None = None, down: Pace | None = None, up: Pace | None = None) -> None:
        super().__init__()
        self.recorder = recorder or Silent()
        self.down = Lane("device", "host", self.traffic, recorder=self.recorder, pace=down)
        self.up = Lane("host", "device", self.traffic, recorder=self.recorder, pace=up)
        self._names: dict[int, str] = {}
        self._going: Move | None = None         # the gradients that are on their way down

    def lodge(self, flat: Flat, weights: Array, gradients: Array) -> list[Piece]:
        """flat.pieces whose home is this one."""
        pieces: list[Piece] = []
        for parameter, place, _ in flat.owned_spans():
            piece = Lodger(parameter, weights[place], gradients[place])
            piece.home, piece.flat, piece.place = self, flat, place
            pieces.append(piece)
        self._pieces += pieces
        return pieces

    def room(self, flat: Flat) -> Array | None:
        """None: sums are to pass through add."""
        return None

    def go_down(self, flat: Flat, chunk: Array, work: Callable[[], Any]) -> Move:
        """Begin to take gradients down, once those before are: at most one buffer waits for the bus."""
        if self._going is not None:
            self._going.wait()
        self._going = self.down.start(f"gradients {self._names[id(flat)]} down", chunk.nbytes, work)
        return self._going

    def settle(self) -> None:
        """Return when the last gradients have left the device."""
        if self._going is not None:
            self._going.wait()
            self._going = None

    def close(self) -> None:
        """End the lanes."""
        self.down.close()
        self.up.close()


def by_run(slots: Sequence[Slot]) -> Iterator[tuple[Flat, list[Slot]]]:
    """Slots in their order, by the run that their pieces belong to."""
    for _, run in groupby(slots, key=lambda slot: id(slot.weights.flat)):   # type: ignore[attr-defined]
        chosen = list(run)
        yield chosen[0].weights.flat, chosen                                # type: ignore[attr-defined]


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
        sums, ready = self._gradients[id(flat)], mark(chunk)

        def work() -> None:
            if first:
                copy(chunk, sums, ready)
            else:
                arrived = chunk
                if device_of(chunk) != "cpu":
                    arrived = host_bytes(chunk.nbytes, "cuda").view(chunk.dtype)
                    copy(chunk, arrived, ready)
                np.add(sums, arrived, out=sums)

        self.go_down(flat, chunk, work)

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Zeros on the host."""
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

    Args:    folder: where (None: where the system keeps temporary files); its files never have names for long.
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
        return self.lodge(flat, nothing(record.regions[_master(record)].dtype, flat.owned),
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
        sums = loan.arrays["gradients"]

        def work() -> None:
            loan.wait()
            if first:
                copy(chunk, sums, ready)
            else:
                np.add(sums, to_host(chunk), out=sums)
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
                loan = ahead or self.disk.start_read(record, _needed(record))
                ahead = self._read_ahead(runs[number + 1][0]) if number + 1 < len(runs) else None
                assert loan is not None
                with self.recorder.span(f"wait for {self._names[id(flat)]}"):
                    loan.wait()
                empty = [(slot.weights.data, slot.weights.grad, slot.state) for slot in run]
                for slot in run:
                    _move_in(slot, loan, _master(record))
                yield from run
                for slot, (data, grad, state) in zip(run, empty, strict=True):
                    slot.weights.data, slot.weights.grad, slot.state = data, grad, state    # type: ignore[misc]
                self._write_back(record, loan) if changes else loan.end()

    def _read_ahead(self, flat: Flat) -> Loan | None:
        record = self._records[id(flat)]
        return self.disk.start_read(record, _needed(record), spare=1)

    def _write_back(self, record: Record, loan: Loan) -> None:
        if "master" in record.regions:
            loan.arrays["weights"][...] = loan.arrays["master"]
        self.disk.start_write(loan, [key for key in record.regions if key != "gradients"])

    # --------------------------------------------------------------------------------------------------- the rest

    def master(self, flat: Flat) -> Array:
        """Read from disk: a copy."""
        record = self._records[id(flat)]
        return self._read_now(record, _master(record))

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


def nothing(dtype: Any, count: int) -> np.ndarray:
    """(count,) of NaN that take one element: what is not there reads so, and cannot pass unnoticed."""
    return np.broadcast_to(np.dtype(dtype).type(np.nan), (count,))


def _master(record: Record) -> str:
    return "master" if "master" in record.regions else "weights"


def _needed(record: Record) -> list[str]:
    """What an update reads: all, but weights that are a rounding of their masters."""
    return [key for key in record.regions if key != "weights" or "master" not in record.regions]


def _move_in(slot: Slot, loan: Loan, master: str) -> None:
    """The slot's arrays become views of the loan's."""
    piece: Any = slot.weights
    shape = piece.data.shape
    slot.state = {key: loan.arrays[key][piece.place].reshape(shape) for key in slot.state}
    piece.data = loan.arrays[master][piece.place].reshape(shape)
    piece.grad = loan.arrays["gradients"][piece.place].reshape(shape)


# --------------------------------------------------------------------------------------------------- choosing a home

def make_home(offload: str, folder: str | Path | None = None, *, device: str = "cpu",
              recorder: Recorder | None = None) -> Home:
    """The home that a plan's `offload` names: "none", "optimizer" or "all"; `folder` for the last.

    Raises:  DiskError, as OnDisk.
    """
    if offload == "all":
        return OnDisk(folder, device=device, recorder=recorder)
    return OnHost(recorder=recorder) if offload == "optimizer" else Home()


def require_memory(limit: int | None, units: Sequence[Unit], root: Unit) -> None:
    """Raise MemoryLimitError, before training, if units cannot fit: two whole ones, a unit's gradients, and the root.

    Activations, which nobody knows beforehand, come on top.
    """
    if limit is None or not units:
        return
    pairs = [(one, other) for one, other in zip(units, [*units[1:], units[-1]], strict=True)]
    one, other = max(pairs, key=lambda pair: pair[0].nbytes + pair[1].nbytes)
    weights = one.nbytes + other.nbytes * (one is not other)
    gradients = max(unit.nbytes for unit in units)
    need = weights + gradients + 2 * root.nbytes
    if need > limit:
        raise MemoryLimitError(f"device memory: two units at work ({one.name}, {other.name}: {weights:,} bytes), the "
                               f"gradients of one ({gradients:,}) and the root with its own ({2 * root.nbytes:,}) need "
                               f"{need:,} bytes and the limit is {limit:,}; raise it, or make the model narrower")
