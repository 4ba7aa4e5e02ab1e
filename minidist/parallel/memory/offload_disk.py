"""Chapter 20 · Offload to disk (ZeRO-Infinity): weights, gradients and state lie in files, and come
through buffers.

offload.py has the idea, what lies where, and the traffic in bytes. Here is the store. With prefetch
the read of a unit hides behind the computation of the unit two before it; without a free buffer it
begins when the unit needs it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from minidist.parallel.memory.offload import OffDevice, StoredPiece, by_run, take_down
from minidist.parallel.memory.transfer_lanes import Pace
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder


@dataclass
class RunOnDisk:
    """This rank's chunk of a run on disk.

    Attributes: record: its file; pieces: the optimizer's; coming: weights that are read ahead;
                squares: for each piece the sums of the squares of its gradient's blocks, noted as
                gradients pass.
    """

    record: Record
    pieces: list[StoredPiece] = field(default_factory=list)
    coming: Loan | None = None
    squares: list[list[float]] = field(default_factory=list)

    def note_squares(self, flat: Flat, sums: np.ndarray) -> None:
        """Note the squares of the gradients' sums."""
        self.squares = [
            [*map(float, block_sums(sums[place]))] for _, place, _ in flat.chunk_spans()
        ]

    def show(self, sums: np.ndarray) -> None:
        """Let the gradients of the pieces be views of `sums`."""
        for piece in self.pieces:
            piece.grad = sums[piece.place].reshape(piece.grad.shape)


class OnDisk(OffDevice):
    """ZeRO-Infinity: weights, gradients, master weights and optimizer state in one record a run on
    disk. For ZeRO-3.

    Args:    folder, buffers, device: as Disk's; pace_read, pace_write: how slow a disk to imagine;
             pace_down, pace_up: as OffDevice's.
    Attributes: files: of each run what lies on disk.
    Raises:  DiskError for a folder that is missing, cannot be written or is full.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        buffers: int = 4,
        device: str = "cpu",
        recorder: Recorder | None = None,
        pace_read: Pace | None = None,
        pace_write: Pace | None = None,
        pace_down: Pace | None = None,
        pace_up: Pace | None = None,
    ) -> None:
        super().__init__(recorder=recorder, pace_down=pace_down, pace_up=pace_up)
        self.disk = Disk(
            folder,
            self.traffic,
            buffers=buffers,
            device=device,
            recorder=self.recorder,
            memory=self.host,
            paces=(pace_read, pace_write),
        )
        self.files: dict[Flat, RunOnDisk] = {}

    def take_name(self, who: str) -> None:
        self.disk.who = who

    def require(self, nbytes: int, who: str) -> None:
        """Raise DiskError unless the folder has room for this rank; where ranks share it, reserving
        files tells."""
        self.take_name(who)
        self.disk.require(nbytes)

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """Write the weights to disk; the device may forget them."""
        if flat not in self.files:
            record = self.disk.new_record(name)
            record.add("weights", flat.dtype, flat.chunk_size)
            self.files[flat] = RunOnDisk(record)
        self.files[flat].record.write("weights", weights)

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """Add a region for gradients behind the weights."""
        self.files[flat].record.add("gradients", flat.dtype, flat.chunk_size)

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """Return pieces without values: walk brings them."""
        run = self.files[flat]
        record = run.record
        if flat.dtype in LOW_PRECISION:
            record.add("master", np.float32, flat.chunk_size)
            weights = self._read_now(record, "weights")
            master = widen(weights)
            unround(master, weights, flat.chunk_spans())
            record.write("master", master)
        shape = (flat.chunk_size,)
        run.pieces = self.stored_pieces(
            flat, absent(record.regions[record.master_key].dtype, shape), absent(flat.dtype, shape)
        )
        return list(run.pieces)

    # ------------------------------------------------------------------------------ while computing

    def read_ahead(self, flat: Flat) -> None:
        """Begin to read, if a buffer is free and another stays so."""
        run = self.files[flat]
        if run.coming is None and self.disk.has_spare():
            run.coming = self.disk.start_read(run.record, ["weights"])

    def weights(self, flat: Flat, place: Array) -> Array:
        """Read into `place`, or take there what was read ahead."""
        run = self.files[flat]
        name = run.record.name
        loan = run.coming or self.disk.start_read(run.record, ["weights"])
        run.coming = None
        with self.recorder.span(f"wait for {name}"):
            loan.wait()
            work = partial(copy, loan.arrays["weights"], place, mark(place))
            self.up.start(f"weights {name} up", place.nbytes, work).wait()
        loan.end()
        return place

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Begin to take a sum down to a buffer, to add what is on disk, and to write it there."""
        run = self.files[flat]
        record = run.record
        ready = mark(chunk)
        holder = [chunk]
        loan = self.disk.lend(record) if first else self.disk.start_read(record, ["gradients"])
        sums = loan.arrays["gradients"]

        def work() -> None:
            loan.wait()
            take_down(holder, sums, ready, first=first)
            run.note_squares(flat, sums)

        down = self.start_down(record.name, chunk.nbytes, work)
        self.disk.start_write(loan, ["gradients"], after=down)

    @contextmanager
    def gradients(self, flats: Sequence[Flat]) -> Iterator[list[Array]]:
        """Read the sums from disk, and write them back."""
        runs = [self.files[flat] for flat in flats]
        with account.use(self.host):
            every = [
                self.host.hold(self._read_now(run.record, "gradients"), "gradients") for run in runs
            ]
            for run, sums in zip(runs, every, strict=True):
                run.show(sums)
            yield every
            for flat, run, sums in zip(flats, runs, every, strict=True):
                run.show(absent(flat.dtype, sums.shape))
                run.note_squares(flat, sums)
                loan = self.disk.lend(run.record)
                loan.arrays["gradients"][...] = sums
                self.disk.start_write(loan, ["gradients"])

    def squares(self, pieces: Iterable[Piece]) -> float:
        """Return the sum of the squares that were noted as gradients passed: the same bits as from
        the gradients."""
        some = set(pieces)
        return add_exactly(
            block
            for run in self.files.values()
            if run.squares
            for piece, blocks in zip(run.pieces, run.squares, strict=True)
            if piece in some
            for block in blocks
        )

    # ----------------------------------------------------------------------------------- the update

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Make regions of zeros with the first piece of a run; return arrays without values."""
        record = self.files[weights.flat].record
        for name in names:
            if name not in record.regions:
                record.add(name, weights.data.dtype, weights.flat.chunk_size)
        return {name: absent(weights.data.dtype, weights.data.shape) for name in names}

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Yield slots run by run: while a run is updated, the next is read and the previous is
        written."""
        if changes:
            # weights that were read ahead are about to change
            self._give_back_weights()
        updates = [(self.files[flat].record, some) for flat, some in by_run(slots)]
        ahead: Loan | None = None
        with account.use(self.host):
            for number, (record, some) in enumerate(updates, start=1):
                following = updates[number][0] if number < len(updates) else None
                loan, ahead = self._read_with_next(record, ahead, following)
                outside = [(slot.weights.data, slot.weights.grad, slot.state) for slot in some]
                for slot in some:
                    move_in(slot, loan.arrays, record.master_key)
                yield from some
                for slot, arrays in zip(some, outside, strict=True):
                    move_out(slot, *arrays)
                if not changes:
                    loan.end()
                    continue
                if "master" in record.regions:
                    loan.arrays["weights"][...] = loan.arrays["master"]
                self.disk.start_write(loan, [key for key in record.regions if key != "gradients"])

    def _read_with_next(
        self, record: Record, ahead: Loan | None, following: Record | None
    ) -> tuple[Loan, Loan | None]:
        """Return the loan of a record, read, and that of the following record, whose read begins.

        Args:    ahead: the record's loan, if its read has begun; following: None at the end. Where
                 no buffer is free for it, its read does not begin, and its loan is None.
        """
        loan = ahead or self.disk.start_read(record, record.needed)
        coming: Loan | None = None
        if following is not None and self.disk.has_spare():
            coming = self.disk.start_read(following, following.needed)
        with self.recorder.span(f"wait for {record.name}"):
            loan.wait()
        return loan, coming

    def _give_back_weights(self) -> None:
        """Give back the buffers of weights that were read ahead."""
        for run in self.files.values():
            if run.coming is not None:
                run.coming.end()
                run.coming = None

    def master(self, flat: Flat) -> Array:
        """Return a copy, read from disk."""
        record = self.files[flat].record
        return self._read_now(record, record.master_key)

    def _read_now(self, record: Record, key: str) -> np.ndarray:
        loan = self.disk.start_read(record, [key])
        values = loan.wait().arrays[key].copy()
        loan.end()
        return values

    def disk_bytes(self) -> int:
        """Return the bytes on disk, on whole pages."""
        return sum(record.nbytes for record in self.disk.records)

    def close(self) -> None:
        super().close()
        self.disk.close()


def absent(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of NaN that takes one element. What is not there reads so, and cannot pass
    unnoticed."""
    return np.broadcast_to(dtype.type(np.nan), shape)


def move_in(slot: Slot, arrays: Mapping[str, Array], master: str) -> None:
    """Let the slot's arrays be views of a chunk's: of its state by name, of `master` and of
    "gradients"."""
    piece: Any = slot.weights
    shape = piece.data.shape
    slot.state = {key: arrays[key][piece.place].reshape(shape) for key in slot.state}
    piece.data = arrays[master][piece.place].reshape(shape)
    piece.grad = arrays["gradients"][piece.place].reshape(shape)


def move_out(slot: Slot, data: Array, grad: Array | None, state: dict[str, Array]) -> None:
    """Give the slot back the arrays that it had outside the update."""
    piece: Any = slot.weights
    piece.data = data
    piece.grad = grad
    slot.state = state
