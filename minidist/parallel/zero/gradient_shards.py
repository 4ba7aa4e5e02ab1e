"""Gradients of which a rank keeps only a shard. Each run of parameters borrows a buffer until its
gradients are reduced.

    lend         the first gradient of a run comes: the run gets a buffer, its parameters views of
                 it
    start(i)     the run's gradients are final: reduce-scatter begins; the run started before is
                 waited for, and freed
    finish()     the last one is waited for, and in the last backward of a step the sums over other
                 copies

So at most two buffers live in addition to the shards: one that fills and one in flight (and those
of runs in use all along, as a tied weight's, or that wait for their turn); with a store off the
device (shards.py) a third, on its way there.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.device.backend import Array
from minidist.parallel.step.flat import empty_like
from minidist.parallel.step.step import zero_unused
from minidist.parallel.zero.shards import ZeroAxis


class InFlight(NamedTuple):
    """A run whose reduce-scatter is under way; `add`: its sum arrives in the buffer, and take_sum
    adds it to the shard."""

    run: int  # its index
    pending: Pending
    add: bool


class GradientShards:
    """The gradients of some runs of parameters, of which this rank keeps its chunks.

    Args:    axis: the strategy; its store keeps for each run its chunk's sum over the ranks and
             over the backwards since `forget`. what: "bucket" or "unit part", for the recorder.
    """

    def __init__(self, axis: ZeroAxis, what: str) -> None:
        self.flats = axis.flats
        self.sharing = axis.sharing
        self.store = axis.store
        self.recorder = axis.recorder
        self.what = what
        self._last = True  # this is the step's last backward
        self._empty = [True] * len(self.flats)  # nothing has been added to the shard yet
        self._buffers: dict[int, Array] = {}
        self._in_flight: InFlight | None = None
        for index, flat in enumerate(self.flats):
            self.store.keep_gradients(flat)
            for parameter in flat.parameters:
                parameter.lender = partial(self._lend, index)

    def forget(self) -> None:
        """A step begins: the next sums replace the shards."""
        self._empty = [True] * len(self.flats)

    def begin(self, *, last: bool = True) -> None:
        """A backward begins; in the `last` of a step shards are summed over the copies too."""
        self._last = last

    def _lend(self, index: int, parameter: Parameter) -> Array:
        """Give a run a buffer, because its first gradient comes: each of its parameters gets a view
        of it. Return the view of `parameter`."""
        # For ZeRO-2, whose buckets fill in ascending order. Two earlier buckets still have buffers:
        # one is in flight, one still fills (a bias's gradient comes after that of its weight, which
        # may be in the next bucket). Wait for the one in flight. ZeRO-3's order descends: start()
        # keeps the bound.
        if sum(earlier < index for earlier in self._buffers) > 1:
            self.take_sum()
        self.store.before_buffer()
        flat = self.flats[index]
        self._buffers[index] = empty_like(flat.parameters[0].data, flat.size, "gradients")
        places = dict(flat.views(self._buffers[index]))
        for other, view in places.items():
            other.bind_gradient(view)
        return places[parameter]

    def start(self, index: int) -> None:
        """Begin to reduce a run; what was not reached by this backward counts as zero here.

        Cost:    one reduce-scatter; returns when the one before has ended.
        """
        flat = self.flats[index]
        # may itself lend the buffer; for ZeRO-2 BucketOrder has done it
        zero_unused(flat.parameters)
        buffer = self._buffers[index]
        # the step's first sum is written to the shard; a later one to the buffer, and added by
        # take_sum
        shard = self.store.device_sums(flat) if self._empty[index] else None
        self.recorder.announce(flat.group.axis, f"reduce_scatter {self.what} {index}")
        pending = self.sharing.start_reduce_scatter(
            index, flat, buffer, buffer[flat.chunk] if shard is None else shard
        )
        self.take_sum()
        self._in_flight = InFlight(index, pending, add=shard is None)

    def finish(self) -> None:
        """Backward is over: return when the shards have their sums, wherever they lie."""
        self.take_sum()
        if self.sharing.copies > 1:
            self.sharing.wait_for_copies()
        self.store.wait_for_gradients()

    def sum_copies(self) -> None:
        """All backwards of a step are over, and none was the `last`: sum the shards over the
        copies."""
        for index in range(len(self.flats)):
            self._start_sum_of_copies(index)
        self.sharing.wait_for_copies()

    def _start_sum_of_copies(self, index: int) -> None:
        shard = self.store.device_sums(self.flats[index])
        if shard is not None and self.sharing.has_copies(self.flats[index]):
            self.sharing.start_sum_of_copies(index, shard, f"{self.what} {index}")

    def take_sum(self) -> None:
        """Wait for the run in flight, add its sum to the shard, and free its buffer (with a store
        off the device: when the sum has gone down)."""
        if self._in_flight is None:
            return
        index, pending, add = self._in_flight
        self._in_flight = None
        with self.recorder.span(f"wait for {self.what} {index}"):
            pending.wait()
        buffer = self._buffers.pop(index)
        flat = self.flats[index]
        if add:
            # float16's that overflowed: `update` finds them
            with np.errstate(over="ignore", invalid="ignore"):
                self.store.add(flat, buffer[flat.chunk], first=self._empty[index])
        self._empty[index] = False
        for parameter in flat.parameters:
            parameter.bind_gradient(None)
        if self._last and self.sharing.copies > 1:
            self._start_sum_of_copies(index)
