"""Adam's update of all tensors in one launch on a GPU: the passes of adam.py, by kernels/adam.cu.

A model has hundreds of tensors, and the passes are a dozen launches for each. The kernel gets all
tensors through tables of pointers, which are made again only if an address has changed. The device
counts the updates too, so the host decides nothing in a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.device.backend import Array, is_array, narrow
from minidist.device.dispatch import kernel, launcher
from minidist.optim.optimizer import Slot, learns


@dataclass
class FusedAdam:
    """The tables of one optimizer. Args: apart: whether weight decay is separate from the gradient,
    as in AdamW."""

    apart: bool
    _arrays: list[Array] = field(default_factory=list)  # the tables point to these
    _tensors: Any = None
    _chunks: Any = None
    _places: Any = None  # addresses of the last step's gradients
    _weight_decay: float = math.nan  # in the tables
    _count: int = -1  # updates counted on the device

    def step(
        self,
        slots: Sequence[Slot],
        lr: float | Array,
        scale: float | Array,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        roundings: Sequence[tuple[Array, Array]],
    ) -> bool:
        """Run the update and the roundings. Args: as Adam.step's; betas, eps, weight_decay: Adam's.

        Returns: False, and nothing has changed, unless all weights are float32 on a GPU and learn,
                 with gradients of one dtype and an equal number of updates.
        """
        gradients = [slot.weights.grad if learns(slot.weights) else None for slot in slots]
        data = [slot.weights.data for slot in slots]
        if any(
            g is None or g.shape != p.shape or p.dtype != np.float32
            for g, p in zip(gradients, data, strict=True)
        ):
            return False
        moments = [[slot.state[name] for slot in slots] for name in ("m", "v")]
        alike = (
            len({slot.steps for slot in slots})
            == 1
            == len({g.dtype for g in gradients if g is not None})
        )
        fast = kernel("adam", *data, *moments[0], *moments[1], *gradients) if alike else None
        if fast is None:
            return False
        copies = _copies(data, roundings, gradients[0])
        self._place(slots, data, moments, copies, weight_decay)
        found = launcher("gradients")(gradients, self._chunks, self._places)
        self._chunks = found.chunks
        self._places = found.table.places
        factor = scale.astype(np.float32).reshape(1) if is_array(scale) else None
        fast(
            self._tensors,
            found,
            lr=lr,
            betas=betas,
            eps=eps,
            apart=self.apart,
            factor=factor,
            scale=1.0 if is_array(scale) else scale,
        )
        self.count(slots)
        written = {id(copy) for copy in copies or ()}
        for master, weights in roundings:
            if id(weights) not in written:
                narrow(master, weights.dtype, weights)
        return True

    def again(self, slots: Sequence[Slot]) -> None:
        """Count an update that a captured graph runs again on the same arrays (cuda_graph.py)."""
        self._tell_count(slots)
        self.count(slots)

    def count(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.steps += 1
        self._count += 1

    def _place(
        self,
        slots: Sequence[Slot],
        data: list[Array],
        moments: list[list[Array]],
        copies: list[Array] | None,
        weight_decay: float,
    ) -> None:
        arrays = [*data, *moments[0], *moments[1], *(copies or ())]
        kept = len(arrays) == len(self._arrays) and weight_decay == self._weight_decay
        if not kept or any(a is not b for a, b in zip(arrays, self._arrays, strict=True)):
            decays = [weight_decay if slot.decays else 0.0 for slot in slots]
            self._tensors = launcher("adam_tensors")(
                data, decays=decays, copies=copies, moments=moments
            )
            self._arrays = arrays
            self._chunks = None
            self._count = -1
            self._weight_decay = weight_decay
        self._tell_count(slots)

    def _tell_count(self, slots: Sequence[Slot]) -> None:
        """Correct the device's count of updates, if a state was loaded."""
        if self._count != slots[0].steps:
            self._count = slots[0].steps
            self._tensors.count[...] = self._count


def _copies(
    data: list[Array], roundings: Sequence[tuple[Array, Array]], gradient: Array
) -> list[Array] | None:
    """Return the weights of each master, if all have the gradients' dtype; else None."""
    found = {id(master): weights for master, weights in roundings}
    copies = [found.get(id(p)) for p in data]
    fits = all(
        copy is not None and copy.dtype == gradient.dtype and copy.flags.c_contiguous
        for copy in copies
    )
    return copies if fits else None
