"""A home: where what lasts of a run of parameters lies while nobody computes with it.

A rank owns a chunk of each flat run (flat.py): of its weights, of the sum of its gradients, of the optimizer's state.
A strategy says when a chunk is needed and when it has changed; its home says where it is in between. Home itself is the
plain one: everything stays on the device, where it is computed with, and nothing moves. parallel/memory/offload.py has
the host's memory and the disk.

    keep, keep_gradients, pieces      once: here are the weights, make room for gradients, what is the optimizer made of
    prefetch, weights                 before a unit computes (ZeRO-3): its weights will be wanted; are wanted now
    room, add, let_go, settle         when a run's gradients are final
    walk                              the optimizer takes one tensor after the other (optim/optimizer.py)
    state                             for a checkpoint
"""

from collections.abc import Sequence

import numpy as np

from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, array_module
from minidist.nn import Module
from minidist.optim.clip import sum_of_squares
from minidist.parallel.memory.transfer_lanes import Traffic
from minidist.parallel.step.flat import Flat, Piece, gather_state
from minidist.parallel.step.precision import Precision


class Home:
    """Everything on the device.

    Attributes: traffic   bytes moved between device, host and disk: none
                host      what fills the host's memory: nothing
    """

    frees_weights = False
    """Whether a unit's chunk of weights leaves the device too, so that `weights` must bring it."""

    def __init__(self) -> None:
        self.traffic, self.host = Traffic(), MemoryAccount(whose="host memory")
        self._weights: dict[int, Array] = {}        # by id(flat), as all below
        self._gradients: dict[int, Array] = {}
        self._masters: dict[int, Array] = {}
        self._pieces: list[Piece] = []

    # ------------------------------------------------------------------------------------------------------ once

    def begin(self, who: str) -> None:
        """A strategy moves in; `who` is its rank, for errors."""

    def keep(self, flat: Flat, weights: Array, name: str) -> None:
        """This rank's chunk of a run's weights, on the device: (owned,); `name` for errors and the timeline."""
        self._weights[id(flat)] = weights

    def keep_gradients(self, flat: Flat, shard: Array | None = None) -> None:
        """Make room for the sums of the chunk's gradients; `shard`: where on the device they arrive by themselves."""
        if shard is None:
            weights = self._weights[id(flat)]
            zeros = array_module(weights).zeros(flat.owned, flat.dtype)
            shard = account.current().hold(zeros, "gradients")
        self._gradients[id(flat)] = shard

    def pieces(self, flat: Flat, precision: Precision) -> list[Piece]:
        """What the optimizer is made of: a piece of each parameter of a run, for this rank's chunk."""
        self._masters[id(flat)] = precision.master(self._weights[id(flat)])
        pieces = flat.pieces(self._masters[id(flat)], self._gradients[id(flat)])
        self._pieces += pieces
        return pieces

    # --------------------------------------------------------------------------------------------- while computing

    def prefetch(self, flat: Flat) -> None:
        """The chunk's weights will be wanted soon."""

    def weights(self, flat: Flat, place: Array) -> Array:
        """The chunk's weights, on the device: in `place` (owned,), or wherever they are anyway."""
        return self._weights[id(flat)]

    def room(self, flat: Flat) -> Array | None:
        """Where a sum of gradients may be written instead of a call of add, or None."""
        return self._gradients[id(flat)]

    def add(self, flat: Flat, chunk: Array, *, first: bool) -> None:
        """Add a sum of gradients (owned,), on the device, to the chunk's; the `first` of a step replaces them."""
        if first:
            self._gradients[id(flat)][...] = chunk
        else:
            self._gradients[id(flat)] += chunk

    def let_go(self) -> None:
        """Memory on the device is about to be taken."""

    def settle(self) -> None:
        """A backward is over: return when the gradients are where they belong."""

    def squares(self) -> float:
        """Sum of the squares of this rank's gradients, in float64."""
        return sum_of_squares(piece.grad for piece in self._pieces)

    # ---------------------------------------------------------------------------------------------------- the rest

    def state(self, model: Module, flats: Sequence[Flat], *, algorithm: str) -> dict[str, np.ndarray]:
        """Copies of a model's master weights, whole, on the host; every rank calls it. Cost: as gather_state."""
        return gather_state(model, flats, map(self.master, flats), algorithm=algorithm)

    def master(self, flat: Flat) -> Array:
        """The chunk's master weights, on the device or the host; of a frozen run its weights."""
        return self._masters.get(id(flat), self._weights[id(flat)])

    def disk_bytes(self) -> int:
        """What lies on disk."""
        return 0

    def close(self) -> None:
        """End threads and give space back. The strategy is not used any more."""
