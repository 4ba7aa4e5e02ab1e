"""A training step as one CUDA graph: the launches of a step are recorded once, and then launched as
a whole.

    step = CapturedStep(trainer)
    losses = [step.start_step(batch) for batch in batches]   # the numbers of trainer.start_step

In a step the host walks over the model, with one or several launches for each op. While a stream is
captured nothing runs: each launch becomes a node of a graph, with its arguments as they are.
Launching the graph runs them all, and the host does a step's work in one call:

    step 1, 2    run as they are        kernels are compiled, tables sent, the pool of memory filled
    step 3       captured, launched     the host walks the model for the last time
    step 4, …    launched

So numbers that differ from step to step may not be arguments. They have fixed places on the device
(Given), and one copy from pinned memory refills all of them before each launch: ids and targets,
the positions of each id (the embedding's gradient adds in that order), the learning rate, and the
dropout layers' keys. Loss and gradients have fixed places too. Intermediate results are in a pool
of the graph's own; matrices are multiplied by a cuBLAS of its own (cublas.py).

Code in which the host reads a number, or decides by one, cannot be captured; nor can messages
between ranks (refuse).

A step of GPT-2 124M took 34.9 ms so on an H200, and 52 ms eagerly (benchmarks/results/gpu/).
Source: the CUDA C++ Programming Guide's chapter on graphs and stream capture.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from minidist.autograd.ops.gather import SortedIds, positions_in
from minidist.autograd.ops.random import dropout_key
from minidist.autograd.tensor import Tensor
from minidist.data.rank_batch import check_batch
from minidist.device import account
from minidist.device.backend import Array, device_of
from minidist.device.cublas import Products
from minidist.device.dispatch import launcher
from minidist.errors import ConfigError, KernelError, MinidistError, ShapeError
from minidist.nn.layers import Dropout, DropoutKey
from minidist.optim import Adam
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Batch, Counted, Part, micro_parts, zero_unused

WARM_UP = 2  # steps that run as they are
_ALIGN = 256  # bytes; where CUDA's own allocations begin


class CountedInPlace(Counted):
    """Gradients in fixed places. `tensors` is the kernel's table of them: a capture can make
    none."""

    def squares(self) -> Array:
        squares: Array = launcher("sum_of_squares")(self.tensors)
        return squares


class Given:
    """Arrays like these, by name: in fixed places on the device (`there`), sent in one copy from
    pinned memory."""

    def __init__(self, like: Mapping[str, np.ndarray]) -> None:
        import cupy  # noqa: PLC0415 - only where a GPU was asked for
        import cupyx  # noqa: PLC0415

        self._cuda = cupy.cuda
        total = 0
        self._places: dict[str, tuple[int, int, np.ndarray]] = {}
        for name, array in like.items():
            self._places[name] = total, total + array.nbytes, np.empty(array.shape, array.dtype)
            total += -(-array.nbytes // _ALIGN) * _ALIGN
        self._device = account.current().hold(cupy.zeros((total,), np.uint8), "workspace")
        self.there = self._views(self._device)
        # one is filled, one may be read yet
        self._hosts = [cupyx.empty_pinned((total,), np.uint8) for _ in range(2)]
        self._read: list[Any] = [None, None]  # the event behind the copy of each

    def _views(self, octets: Array) -> dict[str, Array]:
        return {
            name: octets[start:stop].view(like.dtype).reshape(like.shape)
            for name, (start, stop, like) in self._places.items()
        }

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy these arrays to their places, in the current stream. The host waits only if it is
        two steps ahead of the copies.

        Raises:  ShapeError if an array has another shape or dtype than the first one.
        """
        self._hosts.reverse()
        self._read.reverse()
        if self._read[0] is not None and not self._read[0].done:
            self._read[0].synchronize()
        for name, view in self._views(self._hosts[0]).items():
            array = arrays[name]
            if array.shape != view.shape or array.dtype != view.dtype:
                raise ShapeError(
                    f"captured step: {name} is {array.dtype} {array.shape}, but was {view.dtype} "
                    f"{view.shape} when the step was captured; a graph needs batches of one shape"
                )
            view[...] = array
        self._device.set(self._hosts[0], stream=self._cuda.get_current_stream())
        self._read[0] = self._cuda.Event(disable_timing=True)
        self._read[0].record()


class CapturedStep:
    """A trainer's step, captured when it has run twice; step and start_step as the trainer's.

    Args:    warm_up: steps that run as they are before, at least one.
    Attributes: pool: the memory of intermediate results; launches: of the graph, so far.
    Raises:  ConfigError for a trainer whose step cannot be captured.
    """

    def __init__(self, trainer: Trainer, *, warm_up: int = WARM_UP) -> None:
        refuse(trainer)
        import cupy  # noqa: PLC0415 - the trainer's weights are on a GPU

        self.trainer = trainer
        self._cupy = cupy
        self._warm_up = warm_up
        self.launches = 0
        self._optimizer: Any = trainer.optimizer
        self._layers = [m for m in trainer.model.modules() if isinstance(m, Dropout) and m.rate]
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()
        self._products = Products()
        self._steps = 0
        self._graph: Any = None
        self._fixed: Any = None  # what the graph has of the trainer's options
        self._given: Given | None = None
        self._late: list[LateLoss] = []

    def step(self, batch: Batch) -> float:
        """Make one optimizer step; return its mean loss."""
        return self.start_step(batch).wait()

    def start_step(self, batch: Batch) -> LateLoss:
        """Make a step, as `step`; the loss may not have arrived yet.

        Raises:  KernelError if the step cannot be captured; as check_batch; as send.
        """
        trainer = self.trainer
        late = LateLoss()
        check_batch("captured step", batch, trainer.config.context)
        self._late = [each for each in self._late if not each.done()] + [late]
        trainer.world.tell_step(trainer.steps_done)
        with (
            trainer.world.ledger.during("step"),
            trainer.recorder.span("step", step=trainer.steps_done),
            self._in_own_stream(),
        ):
            arrays = self._arrays(batch)
            if self._given is None:
                self._settle(arrays, batch)
            assert self._given is not None
            self._given.send(arrays)
            self._run()
            for number in range(len(self._passes)):
                late.add(Tensor(self._losses[number : number + 1].reshape(())))
        trainer.steps_done += 1
        return late

    def _run(self) -> None:
        """Run the step's work: op by op, or as the graph."""
        self._steps += 1
        if self._steps <= self._warm_up:
            self._work()
            return
        if self._graph is None:
            self._graph, self._fixed = self._capture(), self._read_once()
        elif self._fixed != self._read_once():
            raise ConfigError(
                "captured step: clip, an option of the optimizer, requires_grad, "
                "data of a weight or the mode of a module was changed, but the graph has the old "
                "state; make a new CapturedStep"
            )
        else:
            self._optimizer.again()
        self._graph.launch()
        self.launches += 1

    def _read_once(self) -> tuple[Any, ...]:
        """Return the values that a graph keeps from its capture. The learning rate is not one of
        them."""
        model = self.trainer.model
        options = self._optimizer.options_now()
        del options["lr"]
        places = [(p.requires_grad, id(p.data)) for p in model.parameters()]
        return self.trainer.clip, options, places, [module.training for module in model.modules()]

    def _capture(self) -> Any:
        self._stream.begin_capture()
        try:
            self._work()
        except BaseException as error:
            with suppress(RuntimeError):
                self._stream.end_capture()  # which has failed already, and would fail here too
            if isinstance(error, RuntimeError) and not isinstance(error, MinidistError):
                raise KernelError(
                    f"captured step: something in it cannot be captured: {error}; train without "
                    f"--graph"
                ) from error
            raise
        return self._stream.end_capture()

    def _work(self) -> None:
        """Launch the kernels of Single.start_step, on arrays in fixed places; no number is read
        from the host."""
        trainer = self.trainer
        optimizer = self._optimizer
        optimizer.zero_grad()
        for number, (inputs, targets, key) in enumerate(self._passes):
            loss = trainer.model.loss(
                inputs, targets, self._tokens, positions=self._positions, key=key
            )
            trainer.precision.backward(loss)
            self._losses[number : number + 1] = loss.data.reshape(1)
        zero_unused(self._weights)
        trainer.precision.update(
            optimizer,
            CountedInPlace(self._gradients),
            lr=self._given.there["rate"],  # type: ignore[union-attr]
            clip=trainer.clip,
        )

    def _settle(self, arrays: Mapping[str, np.ndarray], batch: Batch) -> None:
        """Make a fixed place for each array that a step reads or writes, at the first batch."""
        cupy = self._cupy
        trainer = self.trainer
        hold = account.current().hold
        self._given = Given(arrays)
        there = self._given.there
        parts = self._parts(batch)
        streams = {layer.path: there["keys"][i : i + 1] for i, layer in enumerate(self._layers)}
        self._passes = [
            (
                SortedIds(there[f"inputs {i}"], there[f"order {i}"], there[f"starts {i}"]),
                there[f"targets {i}"],
                self._key(part, streams),
            )
            for i, part in enumerate(parts)
        ]
        self._tokens = batch[1].size
        length = np.arange(batch[0].shape[1])
        found = launcher("embedding_runs")(length, trainer.config.context)
        self._positions = SortedIds(*map(cupy.asarray, (length, *found)))
        self._losses = cupy.zeros((len(parts),), np.float32)
        strategy: Any = trainer.strategy
        self._weights = strategy.weights
        views = [
            hold(cupy.zeros(weights.shape, weights.dtype), "gradients") for weights in self._weights
        ]
        for weights, view in zip(self._weights, views, strict=True):
            weights.bind_gradient(view)
        self._gradients = launcher("gradients")(views)

    def _key(self, part: Part, streams: Mapping[str, Array]) -> DropoutKey | None:
        if not self._layers:
            return None
        key = DropoutKey.of_sequences(self.trainer.seed, 0, part.first, *part.inputs.shape)
        return DropoutKey(key.seed, key.step, self._cupy.asarray(key.tokens), streams)

    def _parts(self, batch: Batch) -> list[Part]:
        parts = micro_parts(Part(*batch, first=0), self.trainer.plan.accumulate)
        return [part for part in parts if len(part.inputs)]

    def _arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the arrays of this step, by name. Raises: ShapeError for ids outside the
        vocabulary."""
        trainer = self.trainer
        count = self.trainer.config.vocabulary
        arrays = {"rate": np.array([trainer.learning_rate(trainer.updates_done)])}
        if self._layers:
            arrays["keys"] = np.array(
                [
                    dropout_key(layer.path, trainer.seed, trainer.steps_done)
                    for layer in self._layers
                ],
                np.uint64,
            )
        for i, part in enumerate(self._parts(batch)):
            for name, ids in (("inputs", part.inputs), ("targets", part.targets)):
                arrays[f"{name} {i}"] = positions_in(f"captured step: {name}", ids, count)
            arrays[f"order {i}"], arrays[f"starts {i}"] = launcher("embedding_runs")(
                part.inputs.reshape(-1), count
            )
        return arrays

    @contextmanager
    def _in_own_stream(self) -> Iterator[None]:
        """Context manager: work inside runs in the step's own stream and memory, after the caller's
        earlier work and before its later work."""
        cuda = self._cupy.cuda
        caller, before, after = (
            cuda.get_current_stream(),
            *(cuda.Event(disable_timing=True) for _ in range(2)),
        )
        before.record(caller)
        self._stream.wait_event(before)
        with self._stream, cuda.using_allocator(self.pool.malloc), self._products.instead():
            yield
            after.record(self._stream)
        caller.wait_event(after)


def refuse(trainer: Trainer) -> None:
    """Raise ConfigError for a trainer whose step cannot be captured, and say why."""
    plan = trainer.plan
    config = trainer.config
    reasons = {
        "its arrays are on the cpu": device_of(next(trainer.model.parameters()).data) == "cpu",
        "what ranks send each other, and state that is divided or kept elsewhere, is the host's "
        "to order": not isinstance(trainer.strategy, Single),
        f"precision {plan.precision}: fp16's loss scale is the host's to decide, and fp32 has "
        "attention's products, of more than two dims": plan.precision != "bf16",
        "inputs that are put away, and a choice of blocks by time, are the host's to order": bool(
            plan.ways
        )
        or plan.activation_memory is not None,
        "experts: the host reads the routing": config.mixture is not None,
        "an attention pattern: its mask is copied from the host": config.attention_pattern
        is not None,
        "the optimizer counts its steps on the host; take adamw or adam": not isinstance(
            trainer.optimizer, Adam
        ),
        f"heads of {config.head_width} columns: the attention kernel takes at most 128": config.head_width
        > 128,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"--graph: this step cannot be captured: {reason}; a captured step needs one "
                "process on a GPU "
                f"(--device cuda) with --precision bf16"
            )
