"""1-bit: Adam whose momentum travels in signs, once its variance has settled.

Signs of the *gradient* ruin Adam: its variance would be that of ±scale. But the variance changes
little after the first part of training. So 1-bit Adam has two stages:

    warm-up   `warmup` updates of plain Adam: gradients travel as they are; bit for bit Adam
    then      the variance v stays as it is. Rank r puts its part of the new momentum, b1 m / P + (1
              - b1) g_r, through the exchange of two_phase.py in signs (sign.py), with worker and
              server error. The sum is the momentum of all ranks, and the update is lr m / (sqrt(v)
              + eps)

A momentum is an average over ten steps, so its signs are steadier than those of a gradient. The
optimizer keeps the momentum: the scheme returns the gradient that makes Adam's own formula give it,
(sum - b1 m) / (1 - b1). A weight without variance (a row of a table that no warm-up step used)
stays still, because its steps would have no bound.

    warmup=100   updates; the paper takes a sixth to a fifth of all
    block=4096   numbers that share a scale; 0: the whole chunk, as in the paper

State: worker and server errors, n + n/P numbers a rank. ZeRO divides the momentum, which every rank
must read whole here, so the scheme is DDP's (and that of ZeRO's sums over copies); and the
optimizer is Adam or AdamW.

Cost, ranks together: 2(P-1) × s n bytes in warm-up, s bytes a number; then as sign.py.

notes:   N3 §3.2
Source:  Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
         Convergence Speed".
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.errors import ConfigError
from minidist.optim import Adam, Optimizer
from minidist.parallel.compress.pending_sum import Alone, Then
from minidist.parallel.compress.sign import BLOCK, Sign
from minidist.parallel.compress.two_phase import TwoPhase
from minidist.parallel.step.scheme import GradientRun


class OneBitAdam(TwoPhase):
    """Sums gradients in warm-up, and then momenta in signs. Args: as above."""

    def __init__(self, warmup: int, block: int = BLOCK) -> None:
        super().__init__("1-bit", Sign(block), feedback=True)
        if warmup < 1:
            raise ConfigError(
                f"compress 1-bit: warmup={warmup}; the variance is measured in the warm-up; "
                "choose 1 or more updates"
            )
        self.warmup = warmup
        self._slots = dict[str, Any]()
        self._optimizer: Adam | None = None

    @property
    def _b1(self) -> float:
        """Adam's first beta, as it is in this step."""
        return 0.0 if self._optimizer is None else self._optimizer.betas[0]

    def attach(self, runs: Sequence[GradientRun]) -> None:
        if any(run.verb != "all_reduce" for run in runs):
            raise ConfigError(
                "compress 1-bit: every rank reads the whole momentum, and ZeRO divides it; use DDP "
                "(zero=0), or another scheme"
            )
        super().attach(runs)

    def take_optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Adam):
            raise ConfigError(
                f"compress 1-bit: it sends Adam's momentum, and the optimizer is "
                f"{type(optimizer).__name__}; choose adam or adamw, or another scheme"
            )
        optimizer.variance_steps = self.warmup
        self._optimizer = optimizer
        self._slots = {slot.name: slot for slot in optimizer.slots}

    def start_all_reduce(self, index: int, bucket: Array) -> Pending:
        run = self.runs[index]
        if run.group.size == 1:
            return Alone(bucket, None)
        slots = [self._slots.get(parameter.name) for parameter, _ in run.spans]
        if any(slot is None for slot in slots):
            raise ConfigError(
                "compress 1-bit: the scheme does not know the optimizer; call take_optimizer first"
            )
        if min(slot.steps for slot in slots if slot is not None) < self.warmup:
            return run.group.start_all_reduce(bucket, out=bucket, algorithm="ring")
        old = self._state(slots, "m") * self._b1
        with np.errstate(over="ignore", invalid="ignore"):
            wide = widen(bucket) * (1 - self._b1)
            old *= self.counters["scale"]
            wide += old / run.group.size
        return Then(
            super().start_all_reduce(index, wide), partial(self._gradient, bucket, slots, old)
        )

    def sent_bytes(self, run: GradientRun) -> int | None:
        """Return -1 for several ranks: the warm-up sends more than the later steps of a run."""
        return -1 if run.group.size > 1 else 0

    def _gradient(self, bucket: Array, slots: list[Any], old: Array, momentum: Array) -> Array:
        """Write the gradient from which Adam makes this momentum into the bucket; `old`: b1 times
        the momentum before."""
        with np.errstate(over="ignore", invalid="ignore"):
            momentum -= old
            momentum /= 1 - self._b1
            momentum[self._state(slots, "v") == 0] = 0
        narrow(momentum, bucket.dtype, bucket)
        return bucket

    def _state(self, slots: list[Any], name: str) -> Array:
        """Return a copy of one of Adam's arrays for a whole bucket."""
        arrays = [slot.state[name].reshape(-1) for slot in slots]
        return array_module(arrays[0]).concatenate(arrays)


def make(name: str, *, warmup: int = 100, block: int = BLOCK) -> OneBitAdam:
    """Return the scheme."""
    return OneBitAdam(warmup, block)
