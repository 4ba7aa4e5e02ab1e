"""What stores off the device share: lanes to and from it, and pieces whose arrays are brought for the update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from minidist.device import account
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.optim.optimizer import Slot
from minidist.parallel.memory.transfer_lanes import Move, Pace, TransferLane
from minidist.parallel.step.flat import Flat, Piece
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.zero.shards import ShardStore


class StoredPiece(Piece):
    """A piece whose arrays are brought by its store.

    Attributes: store; flat: the run; place: where in the rank's chunk
    """

    store: "OffDevice"
    flat: Flat
    place: slice


class OffDevice(ShardStore):
    """What both stores share: the lanes between device and host, and the walk by runs.

    Args:    recorder: is told what moves when; down, up: how slow a bus to imagine, device to host and back.
    """

    def __init__(self, *, recorder: Recorder | None = None, down: Pace | None = None, up: Pace | None = None) -> None:
        super().__init__()
        self.recorder = recorder or Silent()
        self.down = TransferLane("device", "host", self.traffic, recorder=self.recorder, pace=down)
        self.up = TransferLane("host", "device", self.traffic, recorder=self.recorder, pace=up)
        self._names: dict[int, str] = {}
        self._going: Move | None = None         # the gradients that are on their way down

    def stored_pieces(self, flat: Flat, weights: Array, gradients: Array) -> list[Piece]:
        """flat.pieces whose arrays this store brings."""
        pieces: list[Piece] = []
        for parameter, place, _ in flat.chunk_spans():
            piece = StoredPiece(parameter, weights[place], gradients[place])
            piece.store, piece.flat, piece.place = self, flat, place
            pieces.append(piece)
        self._pieces += pieces
        return pieces

    def gradient_room(self, flat: Flat) -> Array | None:
        """None: sums are to pass through add."""
        return None

    def go_down(self, flat: Flat, chunk: Array, work: Callable[[], Any]) -> Move:
        """Begin to take gradients down, once those before are: at most one buffer waits for the bus."""
        if self._going is not None:
            self._going.wait()
        self._going = self.down.start(f"gradients {self._names[id(flat)]} down", chunk.nbytes, work)
        return self._going

    def before_use(self) -> None:
        """Wait for what is on its way down, under a limit: else how much is held would depend on how fast it goes."""
        if self._going is not None and account.current().limit is not None:
            self._going.wait()

    def settle(self) -> None:
        """Return when the last gradients have left the device."""
        if self._going is not None:
            self._going.wait()
            self._going = None

    def state(self, model: Module, flats: Sequence[Flat], *, algorithm: str) -> dict[str, np.ndarray]:
        """Masters come from the host or the disk, and nothing of it touches the device."""
        with account.use(self.host):
            return super().state(model, flats, algorithm=algorithm)

    def close(self) -> None:
        """End the lanes."""
        self.down.close()
        self.up.close()


def by_run(slots: Sequence[Slot]) -> Iterator[tuple[Flat, list[Slot]]]:
    """Slots in their order, by the run that their pieces belong to."""
    for _, run in groupby(slots, key=lambda slot: id(slot.weights.flat)):   # type: ignore[attr-defined]
        chosen = list(run)
        yield chosen[0].weights.flat, chosen                                # type: ignore[attr-defined]


def nothing(dtype: Any, count: int) -> np.ndarray:
    """(count,) of NaN that take one element: what is not there reads so, and cannot pass unnoticed."""
    return np.broadcast_to(np.dtype(dtype).type(np.nan), (count,))


def move_in(slot: Slot, arrays: Mapping[str, Array], master: str) -> None:
    """The slot's arrays become views of a chunk's: of its state by name, of `master` and of "gradients"."""
    piece: Any = slot.weights
    shape = piece.data.shape
    slot.state = {key: arrays[key][piece.place].reshape(shape) for key in slot.state}
    piece.data = arrays[master][piece.place].reshape(shape)
    piece.grad = arrays["gradients"][piece.place].reshape(shape)
