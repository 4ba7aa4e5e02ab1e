"""Gradients that nobody holds whole: each run of parameters borrows a buffer, is reduced, and keeps a shard.

    lend         the first gradient of a run comes: the run gets a buffer, its parameters views of it
    start(i)     the run's gradients are final: reduce-scatter begins; the run started before is waited for, and freed
    settle()     the last one is waited for

So at most two buffers live beside the shards: one that fills and one in flight (and those of runs that are in use all
along, as a tied weight's, or that wait for their turn). Where shards lie is a home's affair (home.py); one that is not
the device holds a third buffer, while its sum is on the way there.
"""

from collections.abc import Sequence
from functools import partial

from minidist.backend import Array
from minidist.comm.group import Group
from minidist.comm.pending import Pending
from minidist.parallel.common.flat import Flat, empty_like
from minidist.parallel.common.home import Home
from minidist.parallel.common.recorder import Recorder
from minidist.parallel.common.update import zero_unused
from minidist.tensor import Parameter


class Scattered:
    """The gradients of some runs of parameters, of which this rank keeps its chunks.

    Args:    flats: the runs; their parameters' gradients are lent from here on.
             home: keeps for each run its chunk's sum over the ranks and over the backwards since `forget`.
             algorithm: of the reduce-scatter; what: "bucket" or "unit", for the recorder.
    """

    def __init__(self, flats: Sequence[Flat], group: Group, *, home: Home, algorithm: str, recorder: Recorder,
                 what: str) -> None:
        self.flats, self.group, self.home, self.algorithm = flats, group, home, algorithm
        self.recorder, self.what = recorder, what
        self._empty = [True] * len(flats)               # nothing has been added to the shard yet
        self._buffers: dict[int, Array] = {}
        self._in_flight: tuple[int, Pending, bool] | None = None    # the last: whether its sum must still be added
        for index, flat in enumerate(flats):
            home.keep_gradients(flat)
            for parameter in flat.parameters:
                parameter.lender = partial(self._lend, index)

    def forget(self) -> None:
        """A step begins: the next sums replace the shards."""
        self._empty = [True] * len(self.flats)

    def _lend(self, index: int, parameter: Parameter) -> Array:
        """The parameter's view of its run's buffer, which is made when the run's first gradient comes."""
        flat = self.flats[index]
        if index not in self._buffers:
            if sum(earlier < index for earlier in self._buffers) > 1:
                self.settle()       # one flies and one still fills (a bias may come after the weight behind it)
            self._buffers[index] = empty_like(flat.parameters[0].data, flat.size, "gradients")
        return next(view for other, view in flat.views(self._buffers[index]) if other is parameter)

    def start(self, index: int) -> None:
        """Begin to reduce a run; what was not reached by this backward counts as zero here.

        Cost:    one reduce-scatter; returns when the one before has ended.
        """
        flat = self.flats[index]
        zero_unused(flat.parameters)
        buffer = self._buffers[index]
        room = self.home.room(flat) if self._empty[index] else None
        out = buffer[flat.own] if room is None else room
        self.recorder.announce(self.group.axis, f"reduce_scatter {self.what} {index}")
        pending = self.group.start_reduce_scatter(buffer, out=out, algorithm=self.algorithm)
        self.settle()
        self._in_flight = index, pending, room is None

    def settle(self) -> None:
        """Wait for the run in flight, add its sum to the shard, and free its buffer."""
        if self._in_flight is None:
            return
        (index, pending, apart), self._in_flight = self._in_flight, None
        with self.recorder.span(f"wait for {self.what} {index}"):
            pending.wait()
        buffer, flat = self._buffers.pop(index), self.flats[index]
        if apart:
            self.home.add(flat, buffer[flat.own], first=self._empty[index])
        self._empty[index] = False
        for parameter in flat.parameters:
            parameter.bind_gradient(None)
