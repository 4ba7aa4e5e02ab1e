"""Chapter 20 · Offload to disk (ZeRO-Infinity): weights, gradients and state lie in files, and come
through buffers.

offload.py has the idea, what lies where, and the traffic in bytes. Here is the store. With prefetch
the read of a unit hides behind the computation of the one before; without a free buffer it begins
when the unit needs it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist.device import account
from minidist.device.backend import LOW_PRECISION, Array, widen
from minidist.device.device_copies import copy, mark
from minidist.nn.weights import unround
from minidist.optim.clip import add_exactly, block_sums
from minidist.optim.optimizer import Slot
from minidist.parallel.memory.disk import Disk, Loan, Record
from minidist.parallel.memory.offload import OffDevice, by_run, take_down
from minidist.parallel.memory.transfer_lanes import Pace
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder


class OnDisk(OffDevice):
    """ZeRO-Infinity: weights, gradients, master weights and optimizer state in one record a run on
    disk. For ZeRO-3.

    Args:    folder, buffers, device: as Disk's; read, write: how slow a disk to imagine; down, up:
             as OffDevice's.
    Raises:  DiskError for a folder that is missing, cannot be written or is full.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        buffers: int = 4,
        device: str = "cpu",
        recorder: Recorder | None = None,
        read: Pace | None = None,
        write: Pace | None = None,
        down: Pace | None = None,
        up: Pace | None = None,
    ) -> None:
        super().__init__(recorder=recorder, down=down, up=up)
        self.disk = Disk(
            folder,
            self.traffic,
            buffers=buffers,
            device=device,
            recorder=self.recorder,
            memory=self.host,
            paces=(read, write),
        )
        self._records: dict[int, Record] = {}
        self._coming: dict[int, Loan] = {}  # weights that are read ahead
        # of each run, of each piece's gradient the blocks' sums
        self._squares: dict[int, list[list[float]]] = {}

    def begin(self, who: str) -> None:
        self.disk.who = who

    def require(self, nbytes: int, who: str) -> None:
        """Raise DiskError unless the folder has room for this rank; where ranks share it, reserving
        files tells."""
        self.begin(who)
        self.disk.require(nbytes)

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """Write the weights to disk; the device may forget them."""
        if id(flat) not in self._records:
            self._names[id(flat)], self._records[id(flat)] = name, self.disk.record(name)
            self._records[id(flat)].add("weights", flat.dtype, flat.chunk_size)
        self._records[id(flat)].write("weights", weights)

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """A region beside the weights."""
        self._records[id(flat)].add("gradients", flat.dtype, flat.chunk_size)

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Pieces without values: walk brings them."""
        record = self._records[id(flat)]
        if flat.dtype in LOW_PRECISION:
            record.add("master", np.float32, flat.chunk_size)
            weights = self._read_now(record, "weights")
            master = widen(weights)
            unround(master, weights, flat.chunk_spans())
            record.write("master", master)
        return self.stored_pieces(
            flat,
            nothing(record.regions[record.master].dtype, (flat.chunk_size,)),
            nothing(flat.dtype, (flat.chunk_size,)),
        )

    # ------------------------------------------------------------------------------ while computing

    def prefetch(self, flat: Flat) -> None:
        """Begin to read, if a buffer is free and another stays so."""
        if id(flat) not in self._coming and self.disk.has_spare():
            self._coming[id(flat)] = self.disk.start_read(self._records[id(flat)], ["weights"])

    def weights(self, flat: Flat, place: Array) -> Array:
        """Read into `place`, or take there what was read ahead."""
        loan = self._coming.pop(id(flat), None) or self.disk.start_read(
            self._records[id(flat)], ["weights"]
        )
        with self.recorder.span(f"wait for {self._names[id(flat)]}"):
            loan.wait()
            self.up.start(
                f"weights {self._names[id(flat)]} up",
                place.nbytes,
                partial(copy, loan.arrays["weights"], place, mark(place)),
            ).wait()
        loan.end()
        return place

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Begin to take a sum down to a buffer, to add what is on disk, and to write it there."""
        record = self._records[id(flat)]
        ready = mark(chunk)
        bus = [chunk]
        loan = self.disk.lend(record) if first else self.disk.start_read(record, ["gradients"])
        sums = loan.arrays["gradients"]

        def work() -> None:
            loan.wait()
            take_down(bus, sums, ready, first=first)
            self._note_squares(flat, sums)

        self.disk.start_write(loan, ["gradients"], after=self.go_down(flat, chunk.nbytes, work))

    def _note_squares(self, flat: Flat, sums: np.ndarray) -> None:
        self._squares[id(flat)] = [
            [*map(float, block_sums(sums[place]))] for _, place, _ in flat.chunk_spans()
        ]

    @contextmanager
    def gradients(self, flats: Sequence[Flat]) -> Iterator[list[Array]]:
        """Read from disk, and written back."""
        with account.use(self.host):
            runs = [
                (
                    flat,
                    self.host.hold(
                        self._read_now(self._records[id(flat)], "gradients"), "gradients"
                    ),
                )
                for flat in flats
            ]
            for flat, sums in runs:
                self._show(flat, sums)
            yield [sums for _, sums in runs]
            for flat, sums in runs:
                self._show(flat, nothing(flat.dtype, sums.shape))
                self._note_squares(flat, sums)
                loan = self.disk.lend(self._records[id(flat)])
                loan.arrays["gradients"][...] = sums
                self.disk.start_write(loan, ["gradients"])

    def _show(self, flat: Flat, sums: np.ndarray) -> None:
        """The gradients of a run's pieces become views of `sums`."""
        pieces: list[Any] = self._pieces[id(flat)]
        for piece in pieces:
            piece.grad = sums[piece.place].reshape(piece.grad.shape)

    def squares(self, pieces: Iterable[Piece]) -> float:
        """From the sums that were taken as gradients passed: the same bits as from the
        gradients."""
        some = set(map(id, pieces))
        return add_exactly(
            block
            for number, sums in self._squares.items()
            for piece, blocks in zip(self._pieces[number], sums, strict=True)
            if id(piece) in some
            for block in blocks
        )

    # ----------------------------------------------------------------------------------- the update

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Regions of zeros, made with the first piece of a run; returns arrays without values."""
        record = self._records[id(weights.flat)]
        for name in names:
            if name not in record.regions:
                record.add(name, weights.data.dtype, weights.flat.chunk_size)
        return {name: nothing(weights.data.dtype, weights.data.shape) for name in names}

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Run by run: while one is updated, the next is read and the one before written."""
        while self._coming and changes:  # read ahead in vain: it is about to change
            self._coming.popitem()[1].end()
        runs = [(self._records[id(flat)], run) for flat, run in by_run(slots)]
        ahead: Loan | None = None
        with account.use(self.host):
            for number, (record, run) in enumerate(runs, start=1):
                loan = ahead or self.disk.start_read(record, record.needed)
                following = (
                    runs[number][0] if number < len(runs) and self.disk.has_spare() else None
                )
                ahead = self.disk.start_read(following, following.needed) if following else None
                with self.recorder.span(f"wait for {record.name}"):
                    loan.wait()
                empty = [(slot.weights.data, slot.weights.grad, slot.state) for slot in run]
                for slot in run:
                    move_in(slot, loan.arrays, record.master)
                yield from run
                for slot, (data, grad, state) in zip(run, empty, strict=True):
                    slot.weights.data, slot.weights.grad, slot.state = data, grad, state  # type: ignore[misc]
                if not changes:
                    loan.end()
                    continue
                if "master" in record.regions:
                    loan.arrays["weights"][...] = loan.arrays["master"]
                self.disk.start_write(loan, [key for key in record.regions if key != "gradients"])

    def master(self, flat: Flat) -> Array:
        """Read from disk: a copy."""
        record = self._records[id(flat)]
        return self._read_now(record, record.master)

    def _read_now(self, record: Record, key: str) -> np.ndarray:
        loan = self.disk.start_read(record, [key])
        values = loan.wait().arrays[key].copy()
        loan.end()
        return values

    def disk_bytes(self) -> int:
        """On whole pages."""
        return sum(record.nbytes for record in self.disk.records)

    def close(self) -> None:
        super().close()
        self.disk.close()


def nothing(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """NaN that take one element: what is not there reads so, and cannot pass unnoticed."""
    return np.broadcast_to(dtype.type(np.nan), shape)


def move_in(slot: Slot, arrays: Mapping[str, Array], master: str) -> None:
    """The slot's arrays become views of a chunk's: of its state by name, of `master` and of
    "gradients"."""
    piece: Any = slot.weights
    shape = piece.data.shape
    slot.state = {key: arrays[key][piece.place].reshape(shape) for key in slot.state}
    piece.data = arrays[master][piece.place].reshape(shape)
    piece.grad = arrays["gradients"][piece.place].reshape(shape)
