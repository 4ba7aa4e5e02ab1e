"""Chapter 23 · Sums in slices, the most urgent first: the next forward begins before all gradients
have arrived.

Backward ends with the first layer, so DDP's queue sends that layer's gradients last. But the next
forward begins with this layer. Here each bucket is cut into slices, and a layer is updated when its
own sums have arrived. Of the waiting slices the most urgent is sent first: the slice of the layer
that forward needs first:

    compute         … backward: layer 2 | layer 1 | wait | forward: layer 1 | layer 2 | …
    communication            | layer 2, slice 0 | layer 1, slice 0 | layer 1, slice 1
                             | layer 2, slice 1

A slice that has started is not interrupted. So with smaller slices an urgent slice waits less, but
each slice costs one latency more. While a slice is sent the next one is chosen already, or the link
would be idle during the choice. The n-th collective of a group must be the same on all ranks, and
their backwards are not equally far. So rank 0 chooses, and broadcasts its choice before each slice
(ByteScheduler does the same for all-reduce).

Limits: it cannot clip the gradient, because the norm needs all sums before the first update; nor
scale a loss (float16), for the same reason.

Cost, per step and rank: as DDP's bytes; 2(P-1) messages per slice, and under `control` one
broadcast of 8 bytes per slice.

notes:   N2 §11.1
Source:  Peng et al. 2019, "A Generic Communication Scheduler for Distributed DNN Training
         Acceleration", which is ByteScheduler.
"""

import heapq
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Tensor
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import ConfigError, TimeoutError
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.data.buckets import BUCKET_BYTES
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Counted, Loss

SLICE_BYTES = 1 << 19
"""The largest size of a slice by default."""

Slice = tuple[int, int]  # (urgency: 0 is needed first, place in its bucket)


class UrgentSums:
    """The sums of one step's slices over the ranks; of the waiting slices the most urgent is summed
    first. Rank 0 chooses.

    Args:    sums, told: groups of the same ranks, for the slices and for rank 0's choices; count:
             slices of the step.
    """

    def __init__(self, sums: Group, told: Group, count: int) -> None:
        self.sums = sums
        self.told = told
        self.count = count
        self._ready: dict[Slice, Array] = {}  # this rank's part is complete
        self._waiting: list[Slice] = []  # a heap: slices that rank 0 has not chosen yet
        self._sent: dict[Slice, Any] = {}  # chosen: the call
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.order: list[Slice] = []  # in which they were chosen
        self._account = account.current()
        self._phase = sums.ledger.phase
        threading.Thread(
            target=self._run, name=f"rank {sums.world_rank} slices", daemon=True
        ).start()

    def put(self, piece: Slice, array: Array) -> None:
        """Add a slice that is complete on this rank."""
        with self._changed:
            self._ready[piece] = array
            heapq.heappush(self._waiting, piece)
            self._changed.notify_all()

    def wait(self, piece: Slice) -> None:
        """Wait until the slice holds the sum over all ranks. Raises: what its call raised,
        TimeoutError."""
        self._until(lambda: piece in self._sent)
        self._sent[piece].wait()

    def _run(self) -> None:
        """Choose a slice, or receive rank 0's choice, and start its sum, as soon as at most one
        slice is being sent."""
        before: Any = None
        try:
            with account.use(self._account), self.sums.ledger.aside(self._phase):
                for _ in range(self.count):
                    piece = self._agreed()
                    self._until(partial(self._ready.__contains__, piece))
                    call: Any = self.sums.start_all_reduce(
                        self._ready[piece], out=self._ready[piece], algorithm="ring"
                    )
                    with self._changed:
                        self._sent[piece] = call
                        self.order.append(piece)
                        self._changed.notify_all()
                    # its own waits have limits
                    while before is not None and not before.ended_within(1.0):
                        pass
                    before = call
        except BaseException as error:  # raised by wait()
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _agreed(self) -> Slice:
        """Return the next slice, the same on all ranks."""
        piece: Slice = (0, 0)
        if self.told.rank == 0:
            self._until(lambda: bool(self._waiting))
            with self._changed:
                piece = heapq.heappop(self._waiting)
        with self.told.ledger.control():
            urgency, place = self.told.broadcast(
                np.array(piece, np.int32), root=0, algorithm="naive"
            )
        return int(urgency), int(place)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises: the error of a call before; TimeoutError after the
        limit."""
        limit = self.sums.transport.limit
        deadline = time.monotonic() + limit
        with self._changed:
            while not holds():
                if self._error is not None:
                    raise self._error
                if (
                    not self._changed.wait(deadline - time.monotonic())
                    and time.monotonic() > deadline
                ):
                    raise TimeoutError(
                        f"rank {self.sums.world_rank} waited {limit:g} s for a slice of gradients; "
                        f"does every rank make the same steps?"
                    )


class SlicedDDP(DDP):
    """DDP whose sums are sent in slices, and whose forward waits for each layer's own sums.

    Args:    model, group, loss, bucket_bytes, recorder: as DDP's; on a host. A bucket is updated at
             once.
             slice_bytes: largest size of a slice, in bytes.
             priority: False: slices are sent in the order of backward, as DDP's buckets are.
    Attributes: as DDP's; order: (urgency, place) of the last step's slices as they were sent; with
    priority only.
    Raises:  ConfigError for a slice without a number; MismatchError if the replicas do not start
             equal.
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        loss: Loss | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        slice_bytes: int = SLICE_BYTES,
        priority: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, group, loss=loss, bucket_bytes=bucket_bytes, recorder=recorder)
        self.priority = priority
        self._sums = group.split(0, axis=group.axis)
        self._told = group.split(0, axis=group.axis)
        self._slices = [self._cut(index, slice_bytes) for index in range(len(self.buckets))]
        self._urgent: UrgentSums | None = None
        self._in_turn: dict[Slice, Pending] = {}
        self._late: dict[int, Any] = {}  # buckets whose update waits for their sums

    def _cut(self, index: int, slice_bytes: int) -> list[tuple[Slice, Array]]:
        data = self.buckets[index].data
        numbers = slice_bytes // data.itemsize
        if numbers < 1:
            raise ConfigError(
                f"SlicedDDP: slice_bytes={slice_bytes}; a slice has at least one number, "
                f"{data.itemsize} bytes"
            )
        return [
            ((len(self.buckets) - 1 - index, place), data[start : start + numbers])
            for place, start in enumerate(range(0, data.size, numbers))
        ]

    @property
    def order(self) -> list[Slice]:
        """The order of the last step's slices (see Attributes)."""
        return [] if self._urgent is None else self._urgent.order

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add gradients into the buckets, as DDP.backward; the last returns before all sums have
        arrived."""
        self.settle()
        if last and self.priority:
            self._urgent = UrgentSums(self._sums, self._told, sum(map(len, self._slices)))
        return super().backward(share, dy, segment=segment, last=last, defer=defer)

    def _start_reduce(self, index: int) -> None:
        """Queue the slices of a bucket whose last gradient is final."""
        for piece, array in self._slices[index]:
            self.recorder.announce(self.group.axis, f"all_reduce bucket {index} slice {piece[1]}")
            if self._urgent is not None:
                self._urgent.put(piece, array)
            else:
                self._in_turn[piece] = self._sums.start_all_reduce(
                    array, out=array, algorithm=self.algorithm
                )

    def update(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
        counted: Counted | None = None,
    ) -> None:
        """Prepare the update: each bucket is updated when one of its weights is read. Raises:
        ConfigError for a clip."""
        if clip is not None:
            raise ConfigError(
                "SlicedDDP: clip needs the norm of the whole gradient, which is known only after "
                "all sums, but layers update earlier; leave clip out, or use DDP"
            )
        for index, bucket in enumerate(self.buckets):
            self._late[index] = partial(self._arrive, index, optimizer, lr)
            for parameter in bucket.parameters:
                parameter.zero_grad()  # its numbers stay in the bucket
                parameter.arrival = self._late[index]

    def _arrive(self, index: int, optimizer: Optimizer, lr: float | None) -> None:
        del self._late[index]
        with self.recorder.span("wait for gradients"):
            for piece, _ in self._slices[index]:
                if self._urgent is not None:
                    self._urgent.wait(piece)
                else:
                    self._in_turn.pop(piece).wait()
        parameters = self.buckets[index].parameters
        for parameter in parameters:
            parameter.arrival = None
            view = parameter.gradient_room()
            assert view is not None
            parameter.accumulate(view)  # the sum lies there already
        with self.recorder.span("optimizer"):
            optimizer.step_of(parameters, lr)
        for parameter in parameters:
            parameter.zero_grad()

    def settle(self) -> None:
        """Wait for all sums that have not arrived, and update their buckets."""
        for index in reversed(list(self._late)):
            self._late[index]()

    def state_replaced(self) -> None:
        """Wait for all sums, so that none is pending when state is replaced."""
        self.settle()
