"""Chapter 05 · DP: one process drives all devices, with a thread for each replica; all data goes
through device 0.

The idea. A program for one device shall use several, without starting processes. So the process
copies the model to every device in every step, sends each a part of the batch, and fetches the
outputs; the loss, the gradients' sum and the optimizer stay on device 0, as they were. It fits any
model in one line. Device 0 is its bottleneck: everything is sent from there and returns there.

                      rows, model                     outputs
    device 0   -------------------->  device 1..R-1  ---------->  device 0: loss
               -------------------->                 ---------->  device 0: sum, optimizer
                  outputs' gradients                  parameters' gradients

What each device holds, Ψ parameters in float32 with Adam, a batch of B rows with outputs of O
bytes, R devices:

                 device 0                            each other device
    batch        B rows                              B/R, cut in array_split order
    parameters   4Ψ                                  4Ψ   a copy, overwritten in every step
    gradients    4Ψ   own part's, then the sum; O    4Ψ   own part's
    optimizer    8Ψ                                  -
    activations  A/R + O   the outputs of all rows   A/R

Cost, per step (device 0 exchanges messages with each of the others; there is no ring):

    device 0 sends     (R-1) × 4Ψ  the model;  the inputs and the outputs' gradients of the others'
                                               rows
    the others send    4Ψ each     gradients;  the outputs of their rows
    messages           device 0: (R-1) × (2 + runs), each other 1 + runs; a run is the parameters of
                       a dtype, without frozen ones (these have no gradients); R-1 empty ones more
                       where a device has no row

So 2(R-1) × 4Ψ pass through device 0. In DDP it is 2(R-1)/R × 4Ψ into each rank and as much out of
it.

Steps are numbered as in N0:133. In DP 4 the *outputs' gradients* go to the others, not the loss,
which is one number; in DP 5 gradients are *summed*, because the loss is the mean of the whole batch
already. Replicas take turns in Python, since one interpreter runs bytecode of one thread at a time
(the GIL); but BLAS, and copying, run outside of it.

notes:   N0 DP, N1 DP
Source:  PyTorch's torch.nn.DataParallel: replicate, scatter, parallel_apply, gather.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.comm.group import Group
from minidist.comm.ledger import Ledger
from minidist.comm.transports.progress.mailbox import connect
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, array_module, on_gpu
from minidist.errors import CommError, ConfigError, PeerLostError
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.data.buckets import cut, make_buckets
from minidist.parallel.step.flat import join, settle_in_vector, trainable
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Counted, Part, micro_parts, rows_of, zero_unused
from minidist.parallel.step.strategy import Strategy


def plain_data_parallel(
    replicas: Sequence[Module], optimizer: Optimizer, batches: Iterable[Batch]
) -> float:
    """Train by DP on devices that work one after the other: replicas[0] learns, the others are
    overwritten in every step. Return the last loss."""
    for inputs, targets in batches:
        parts = np.array_split(inputs, len(replicas))  # DP 1: rows for each device
        for replica in replicas[1:]:
            for original, copied in zip(
                replicas[0].parameters(), replica.parameters(), strict=True
            ):
                copied.data[...] = original.data  # DP 2: the present model
        # DP 3: forward everywhere
        outputs = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
        # outputs to device 0
        gathered = tensor(np.concatenate([y.data for y in outputs]), requires_grad=True)
        # which has the loss
        loss = ops.cross_entropy(gathered, targets, divisor=targets.size)
        loss.backward()
        for y, dy in zip(
            outputs, np.array_split(np.asarray(gathered.grad), len(replicas)), strict=True
        ):
            y.backward(dy)  # DP 4: outputs' gradients
        for same in zip(*(replica.parameters() for replica in replicas), strict=True):
            same[0].grad = sum(p.grad for p in same)  # DP 5: sums on device 0
        optimizer.step()
        for replica in replicas:
            replica.zero_grad()
    return float(loss.item())


# `DataParallel` below runs each replica in a thread of its own. Where this assigns arrays, it sends
# messages that the ledger counts (comm/collectives/naive.py, by the mailboxes of
# comm/transports/progress/mailbox.py), so devices compute at the same time. It adds frozen weights,
# other losses, and devices without a row.

EVERYTHING = 1 << 62  # bytes of a bucket that holds all parameters of a dtype

Forward = Callable[[Module, Array, int], Tensor]
"""`forward(replica, inputs, first)`: outputs, a row for each row of inputs, which begin at row
`first` of the batch."""

OutputLoss = Callable[[Tensor, Array, int], Tensor]
"""`loss(outputs, targets, divisor)`: the sum of the losses over `divisor`, one number."""


def call_replica(replica: Module, inputs: Array, first: int) -> Tensor:
    """Return the outputs of a model called with its inputs."""
    return replica(inputs)


def cross_entropy(outputs: Tensor, targets: Array, divisor: int) -> Tensor:
    """Return the cross-entropy of logits (…, classes) and integer targets (…)."""
    return ops.cross_entropy(outputs, targets, divisor=divisor)


class ReplicaDevice:
    """One device: its number (0 has the user's model), replica, memory account, and its end of the
    links to the others."""

    def __init__(
        self,
        model: Module,
        group: Group,
        memory: MemoryAccount,
        recorder: Recorder,
        gpu: int | None = None,
    ) -> None:
        self.rank = group.rank
        self.group = group
        self.account = memory
        self.model = model
        self.recorder = recorder
        self.gpu = gpu
        learning, frozen = (
            [p for p in model.parameters() if p.requires_grad is wanted] for wanted in (True, False)
        )
        self.buckets = make_buckets(learning, EVERYTHING)
        self.weights = [
            join(run, copy=self.rank == 0)
            for kind in (learning, frozen)
            for run in cut(kind, EVERYTHING)
        ]
        settle_in_vector(model.parameters())


def replicate(model: Module) -> Module:
    """Return a copy of the model's structure, whose parameters have names, shapes and dtypes, and
    no values yet."""
    memo: dict[int, Parameter] = {}
    for parameter in model.parameters():
        xp = array_module(parameter.data)
        nothing = xp.broadcast_to(xp.zeros((), parameter.dtype), parameter.shape)
        memo[id(parameter)] = Parameter(
            nothing, name=parameter.name, requires_grad=parameter.requires_grad
        )
    return copy.deepcopy(model, memo)


def settings(module: Module) -> dict[str, Any]:
    """Return the plain values of a module: its mode, a rate of dropout."""
    plain = (bool, int, float, str)
    return {name: value for name, value in vars(module).items() if isinstance(value, plain)}


class DataParallel(Strategy):
    """A model on several devices of one process.

    Args:    model: stays on device 0, where it is updated.
             replicas: the number of devices; each is a thread of its own during a step, device 0
             the caller's.
             forward: of a replica (default: call it); loss: of the outputs of the whole batch
             (default: cross-entropy).
             recorders: one per device, for the spans of work; limit: seconds that a device waits
             for another.
             gpus: the number of each replica's GPU, the first the model's own (default: all on the
             caller's device). Data between GPUs goes through the host. Not yet measured on several
             GPUs.
    Attributes: parameters: device 0's, the arguments for the optimizer; devices.
    Raises:  ConfigError if there is no replica, or nothing to train; DeviceError for a GPU that is
             not there.
    """

    def __init__(
        self,
        model: Module,
        replicas: int,
        *,
        forward: Forward = call_replica,
        loss: OutputLoss = cross_entropy,
        recorders: Sequence[Recorder] = (),
        limit: float = 60.0,
        gpus: Sequence[int] = (),
    ) -> None:
        if replicas < 1 or len(recorders) not in (0, replicas) or len(gpus) not in (0, replicas):
            raise ConfigError(
                f"DataParallel: {replicas} replicas, {len(recorders)} recorders and {len(gpus)} "
                "GPUs; give at least one replica, and as many recorders and GPUs as replicas, or "
                "none"
            )
        self.model = model
        self.forward = forward
        self.loss = loss
        self.precision = Precision()
        self.parameters = trainable(model.parameters())
        self.devices: list[ReplicaDevice] = []
        self._failure: tuple[int, BaseException] | None = None
        self._transports = connect(replicas, limit, unbuffered=False)
        for rank, transport in enumerate(self._transports):
            group = Group(transport, Ledger(rank), range(replicas), axis="dp")
            memory = MemoryAccount() if rank else account.current()
            gpu = gpus[rank] if gpus else None
            with account.use(memory), on_gpu(gpu):
                self.devices.append(
                    ReplicaDevice(
                        replicate(model) if rank else model,
                        group,
                        memory,
                        recorders[rank] if recorders else Silent(),
                        gpu,
                    )
                )

    def copy_model(self, device: ReplicaDevice) -> None:
        """Copy device 0's weights to every device (DP 2). Cost: device 0 sends (R-1) models."""
        for weights in device.weights:
            device.group.broadcast(weights, out=weights, algorithm="naive")
        if device.rank:
            for mine, module in zip(device.model.modules(), self.model.modules(), strict=True):
                for name, value in settings(module).items():
                    setattr(mine, name, value)
            originals = self.model.parameters()
            for weight, original in zip(device.model.parameters(), originals, strict=True):
                weight.requires_grad = original.requires_grad

    def gather_outputs(
        self, device: ReplicaDevice, outputs: Tensor | None, *, idle: bool
    ) -> Array | None:
        """Return all outputs, in the order of the rows, on device 0; None elsewhere (DP 3). Cost:
        the others send theirs.

        Args:    idle: whether some device has no row, and so no outputs: device 0 then sends their
                 shape.
        """
        rows = None if outputs is None else outputs.data
        if idle:
            empty = device.group.broadcast(
                None if rows is None or device.rank else rows[:0], algorithm="naive"
            )
            rows = empty if rows is None else rows
        whole = device.group.gather(rows, algorithm="naive")
        return None if whole is None else account.current().hold(whole, "activations")

    def loss_of(self, outputs: Array, targets: Array, divisor: int) -> tuple[Array, float]:
        """Return the outputs' gradients, and the loss; on device 0."""
        leaf = Tensor(outputs, requires_grad=True)
        loss = self.loss(leaf, targets, divisor)
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad, float(loss.item())

    def backward(
        self, device: ReplicaDevice, outputs: Tensor | None, gradients: Array | None
    ) -> None:
        """Run backward through this device's replica from the outputs' gradients, which device 0
        scatters (DP 4)."""
        dy = account.current().hold(
            device.group.scatter(gradients, algorithm="naive"), "activations"
        )
        with device.recorder.span("backward", notes="DP 4"):
            if outputs is not None:
                outputs.backward(dy)

    def sum_gradients(self, device: ReplicaDevice) -> None:
        """Sum the replicas' gradients on device 0, in the order of the devices (DP 5)."""
        for bucket in device.buckets:
            zero_unused(bucket.parameters)
            device.group.reduce(bucket.data, out=bucket.data, algorithm="naive")

    def loss_share(self, part: Part) -> float:
        """Return the sum of the losses of some rows, on device 0; without gradients."""
        if not len(part.inputs):
            return 0.0
        return float(
            self.loss(self.forward(self.model, part.inputs, part.first), part.targets, 1).item()
        )

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make one step on the whole batch; return its mean loss.

        Args:    as Strategy.step. The model is copied before the first pass, gradients are summed
                 after the last.
        Raises:  the error of a replica, naming it; ConfigError for a batch without a row.
        """
        micros = [
            micro for micro in micro_parts(Part(*batch, first=0), accumulate) if len(micro.inputs)
        ]
        if not micros:
            raise ConfigError("DataParallel.step: the batch has no row; pass at least one")
        threads = [
            threading.Thread(
                target=self._replica,
                args=(device, micros, 1, device.account),
                daemon=True,
                name=f"replica {device.rank}",
            )
            for device in self.devices[1:]
        ]
        for thread in threads:
            thread.start()
        loss = self._replica(self.devices[0], micros, batch[1].size, account.current())
        for thread in threads:
            thread.join()
        if self._failure is not None:
            rank, failure = self._failure
            raise failure from CommError(f"on replica {rank} of {len(self.devices)}")
        with self.devices[0].recorder.span("optimizer"), on_gpu(self.devices[0].gpu):
            self.precision.update(optimizer, Counted(self.parameters), lr=lr, clip=clip)
        return LateLoss(loss)

    def _replica(
        self, device: ReplicaDevice, micros: list[Part], divisor: int, memory: MemoryAccount
    ) -> float:
        """Run the passes of one device. The first failure is kept for step() to raise, and ends
        every device's waits."""
        try:
            with account.use(memory), on_gpu(device.gpu):
                return self._passes(device, micros, divisor)
        except BaseException as error:
            if self._failure is None:
                self._failure = device.rank, error
            what = PeerLostError(
                f"replica {device.rank} failed with {type(error).__name__}: {error}", device.rank
            )
            for transport in self._transports:
                with suppress(CommError):
                    transport.abort(what)
            return float("nan")

    def _passes(self, device: ReplicaDevice, micros: list[Part], divisor: int) -> float:
        """Run DP 1 to DP 5 on one device; devices other than 0 read only the number of rows of the
        batch."""
        device.model.zero_grad()
        total = 0.0
        span = device.recorder.span
        for number, micro in enumerate(micros):
            rows, first = rows_of(len(micro.inputs), size=len(self.devices), rank=device.rank)
            with span("split the batch", "communication", notes="DP 1"):
                inputs = device.group.scatter(
                    None if device.rank else micro.inputs, algorithm="naive"
                )
            if number == 0:
                with span("copy the model", "communication", notes="DP 2"):
                    self.copy_model(device)
            with span("forward", notes="DP 3", rows=rows):
                outputs = self.forward(device.model, inputs, micro.first + first) if rows else None
            with span("gather outputs", "communication", notes="DP 3"):
                whole = self.gather_outputs(
                    device, outputs, idle=len(micro.inputs) < len(self.devices)
                )
            gradients = None
            if whole is not None:
                with span("loss", notes="DP 3"):
                    gradients, loss = self.loss_of(whole, micro.targets, divisor)
                total += loss
            self.backward(device, outputs, gradients)
        with span("sum gradients", "communication", notes="DP 5"):
            self.sum_gradients(device)
        return total
