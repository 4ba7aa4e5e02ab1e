"""Chapter 09 · Mixed precision: weights and gradients in two bytes, the update in four.

The idea. Numbers of two bytes halve what weights, gradients and activations take, halve what
travels, and multiply faster on hardware made for them. They are too coarse for two things: an
update is often smaller than the gap between a weight and its neighbour, and would be lost; and
float16 ends at 6e-8 below and 65,504 above, so small gradients vanish. Hence float32 master
weights, which the optimizer updates and whose rounding the model computes with; and for float16 a
loss scale: the loss is multiplied by S before backward, so all gradients are S times larger, and
divided by S again in float32, when the optimizer reads them.

    float32    master weights, m, v <----------- update <------------------ / S <-----+
                    |                                                                 |
    float16    weights = round(master) -> forward -> loss × S -> backward -> S × gradients

What a value can be (backend.py; a float32 has 24 significant bits and the range of bfloat16):

                significant bits    largest     smallest normal    smallest
    float16     11                  65,504      6.1e-5             6.0e-8
    bfloat16    8                   3.4e38      1.2e-38            9.2e-41

What each rank holds, Ψ parameters with Adam on P ranks (K = 12 bytes a parameter: master weights,
m, v):

                 float32    mixed, one process or DDP   ZeRO-1        ZeRO-2            ZeRO-3
    parameters   4Ψ         2Ψ                          2Ψ            2Ψ                2Ψ/P, and units in flight
    gradients    4Ψ         2Ψ                          2Ψ            2Ψ/P              2Ψ/P
    optimizer    8Ψ         12Ψ                         12Ψ/P         12Ψ/P             12Ψ/P
    together     16Ψ        16Ψ                         4Ψ + 12Ψ/P    2Ψ + 14Ψ/P        16Ψ/P

So mixed precision saves nothing of the state; it saves activations and traffic, and ZeRO divides
the larger part.

Several passes (accumulation) and several ranks add gradients up in two bytes, each addition in
float32 and rounded once, so that the 2Ψ hold: A passes are off their exact sum by less than 2^-9 √A
of it in bf16 and 2^-12 √A in fp16 (for A well below 2^8 and 2^11: then sums no longer hear their
summands). A ring so rounds P-1 times; with `Plan(algorithm="direct")` DDP sums in float32 and
rounds once, at P/2 times the bytes, and so does "naive" in every stage. fp8 is bf16, but the inputs
of the blocks' matrix products are rounded to one byte (precision/float8.py).

Cost: half of float32's bytes for gradients and weights; no messages of its own but fp8's (three
float64 a linear under `control`). Whether a gradient overflowed is seen in the norm that clipping
needs: infinities and NaN survive sums.

notes:   N2 混合精度, N3 §3.2 (its five steps lack the loss scale)
Source:  Micikevicius et al. 2018, "Mixed Precision Training".
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.autograd.backward import Surveyed, WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device import account, backend
from minidist.device.backend import LOW_PRECISION, Array, array_module, dtype_name, narrow, to_host
from minidist.errors import ConfigError, GradientError
from minidist.nn import GPT, Module
from minidist.nn.weights import unround
from minidist.optim import Optimizer, clip_scale
from minidist.parallel.precision.float8 import FORMATS, HISTORY, Float8
from minidist.parallel.step.precision import Precision, Span
from minidist.parallel.step.step import Batch, Counted, gradient_norm


def plain_mixed_precision(
    model: GPT,
    masters: Sequence[Parameter],
    optimizer: Optimizer,
    batches: Iterable[Batch],
    scale: float,
) -> None:
    """Train in mixed precision on one process.

    `masters` has one float32 Parameter for each low-precision Parameter of the model.
    """
    for inputs, targets in batches:
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data[...] = master.data  # 2 half the bytes: here numbers are rounded
            p.zero_grad()
        loss = model.loss(inputs, targets, divisor=targets.size)  # 3 forward in low precision
        loss.backward(np.asarray(scale, "float32"))  #   and backward, from `scale` times the loss
        # 4 first to float32, then divide
        gradients = [np.asarray(p.grad, "float32") for p in model.parameters()]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient / np.float32(scale)
        if all(np.isfinite(gradient).all() for gradient in gradients):
            optimizer.step()  #   the masters move
        else:
            scale /= 2  #   a gradient overflowed: skip this step


# `MixedPrecision` below is the part of this that any strategy takes over: masters made of weights
# or of a rank's pieces of them, the division in the optimizer's own pass over the gradients, a
# scale that also grows again, the test for overflow in the norm that clipping needs, and one
# decision on all ranks.

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""The dtype of weights and gradients under each name that a plan may give; fp8 rounds products'
inputs further."""


def check_dtype(precision: str, dtype: str) -> None:
    """A model declared in `dtype` can have `precision`.

    Raises:  ConfigError for master weights other than float32.
    """
    if precision != "fp32" and dtype != "float32":
        raise ConfigError(
            f"precision {precision} keeps float32 master weights, and the model asks for "
            f"{dtype}; choose dtype float32, or precision fp32, which follows the dtype"
        )


class Master:
    """The float32 master of one parameter, which the optimizer updates; its gradient is the
    parameter's."""

    def __init__(self, parameter: Parameter, data: Array) -> None:
        self.parameter = parameter
        self.name = parameter.name
        self.data = data
        self.shared_by = parameter.shared_by
        self.zero_grad = parameter.zero_grad

    @property
    def grad(self) -> Array | None:
        """In low precision, and multiplied by the loss scale."""
        return self.parameter.grad


class LossScale:
    """The factor of the loss: halved when a gradient overflows, doubled after `patience` steps
    without.

    So it stays near the largest that does not overflow. A power of two, so that scaling changes no
    digit.

    Attributes: value: this step's scale; good: steps since it last changed.
    """

    def __init__(
        self, value: float = 2.0**16, *, patience: int = 2000, smallest: float = 1.0
    ) -> None:
        for name, number in (("value", value), ("smallest", smallest)):
            if not (0 < number < math.inf and math.frexp(number)[0] == 0.5):
                raise ConfigError(
                    f"loss scale: {name} is {number!r}; it must be a power of two, such as 65536"
                )
        if patience < 1:
            raise ConfigError(
                f"loss scale: patience is {patience}; the scale grows after this many good steps; "
                "choose 1 or more"
            )
        self.value = value
        self.patience = patience
        self.smallest = smallest
        self.good = 0

    def grow_or_halve(self, *, overflow: bool) -> None:
        """Choose the next step's scale by whether this step's gradients overflowed.

        Raises:  GradientError if gradients overflow at the smallest scale: then the scale is not
                 why.
        """
        if overflow and self.value <= self.smallest:
            raise GradientError(
                f"gradients overflow float16 at a loss scale of {self.value:g}, the smallest "
                "allowed: the training diverges; lower the rate, or use bf16, which does not "
                "overflow"
            )
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value /= 2
        elif self.good == self.patience:
            self.value = self.value * 2
            self.good = 0


class MixedPrecision(Precision):
    """Weights and gradients in low precision, float32 master weights, and for float16 a dynamic
    loss scale.

    Args:    name: "bf16", "fp16" or "fp8" (which also needs `attach`); the model's dtype must be
             its (DTYPES).
             loss_scale: how the loss is scaled (default: for fp16 LossScale(), for bf16 None, not
             at all).
             masters: the dtype asked for master weights.
    Raises:  ConfigError for another name, or for masters other than float32.
    """

    def __init__(
        self, name: str, *, loss_scale: LossScale | None = None, masters: str = "float32"
    ) -> None:
        if name not in DTYPES:
            raise ConfigError(f"mixed precision {name!r}: choose {' or '.join(DTYPES)}")
        check_dtype(name, masters)
        self.name = name
        self.dtype = backend.dtype(DTYPES[name])
        self.loss_scale = LossScale() if loss_scale is None and name == "fp16" else loss_scale
        self.skipped = 0
        self.float8: Float8 | None = None
        self._masters: dict[Parameter, Array] = {}  # where weights are whole
        self._pairs: list[tuple[Array, Array]] = []  # (master, the weights that are its rounding)

    def attach(self, model: GPT, group: Group | None = None) -> None:
        """For fp8: the linears of the model's blocks multiply in fp8 from here on; `group` shares
        the batch."""
        self.float8 = Float8(model, group)

    # -------------------------------------------------------------------------------------- masters

    def masters(self, parameters: Iterable[Parameter]) -> list[Master]:
        """A master for each parameter that is not frozen."""
        masters = [
            Master(p, self.master(p.data, [(p, ..., ())])) for p in parameters if p.requires_grad
        ]
        self._masters.update({master.parameter: master.data for master in masters})
        return masters

    def master(self, weights: Array, spans: Iterable[Span]) -> Array:
        """A float32 array whose rounding is `weights`, now and after each update.

        It begins with the drawn numbers, not with their rounding (`unround`).
        Raises:  ConfigError if the weights are not in this precision.
        """
        if weights.dtype != self.dtype or weights.dtype not in LOW_PRECISION:
            raise ConfigError(
                f"mixed precision {self.name}: the weights are {dtype_name(weights.dtype)}; "
                f"build the model with dtype {dtype_name(self.dtype)!r}"
            )
        if self.name == "fp8" and self.float8 is None:
            raise ConfigError(
                "mixed precision fp8: no linear multiplies in fp8 yet; call attach(model, "
                "group) first"
            )
        master = account.current().hold(weights.astype(np.float32), "optimizer")
        unround(master, weights, spans)
        self._pairs.append((master, weights))
        for parameter, _, _ in spans:
            parameter.keep_by("its float32 master")
        return master

    def state_dict(self, model: Module) -> dict[str, np.ndarray]:
        """Copies on the host, by dotted path, all float32: masters, and frozen weights as they
        are."""
        return {
            name: np.array(to_host(self._masters.get(p, p.data)), np.float32)
            for name, p in model.named_parameters()
        }

    def state(self) -> dict[str, Any]:
        """The loss scale, the steps it skipped, and fp8's histories of the linears that this rank
        computes."""
        scale = self.loss_scale
        float8 = self.float8
        histories = (
            {} if float8 is None else dict(zip(float8.scales, float8.state().tolist(), strict=True))
        )
        return {
            "skipped": self.skipped,
            "loss_scale": None if scale is None else [scale.value, scale.good],
            "float8": {linear: history for linear, history in histories.items() if np.any(history)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if self.loss_scale is not None and state.get("loss_scale"):
            self.loss_scale.value, self.loss_scale.good = state["loss_scale"]
        if self.float8 is not None:
            none = np.zeros((len(FORMATS), HISTORY)).tolist()
            saved = state.get("float8", {})
            self.float8.load(
                [
                    saved.get(linear, none) if self.float8.has(linear) else none
                    for linear in self.float8.scales
                ]
            )
        for master, weights in self._pairs:
            narrow(master, weights.dtype, weights)

    # ------------------------------------------------------------------------------------- backward

    def backward(
        self,
        loss: Tensor,
        dy: Array | None = None,
        *,
        defer_weights: bool = False,
        surveyed: Surveyed | None = None,
    ) -> list[WeightGradient]:
        """Backward from the loss times the scale; the loss itself stays as it is. A `dy` has been
        scaled already.

        What is too large for float16 becomes infinite here, without a word: `update` finds it.
        """
        seed = (
            array_module(loss.data).full(loss.shape, self.scale, loss.dtype) if dy is None else dy
        )
        with np.errstate(over="ignore", invalid="ignore"):
            return loss.backward(seed, defer_weights=defer_weights, surveyed=surveyed)

    def backward_weights(self, deferred: Iterable[WeightGradient]) -> None:
        """Compute the gradients that a backward has deferred; too large ones become infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            super().backward_weights(deferred)

    @property
    def scale(self) -> float:
        """The loss scale."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    # --------------------------------------------------------------------------------------- update

    def update(
        self,
        optimizer: Optimizer,
        counted: Counted,
        *,
        lr: float | None,
        clip: float | None,
    ) -> None:
        """Update the masters by the unscaled gradients, and round them to the weights; or skip all
        of it.

        With a loss scale a norm that is not finite means that a gradient has overflowed, perhaps on
        another rank. Every rank sees the same norm, so all skip, and nothing changes. Only that
        decision waits for a GPU.
        """
        if self.float8 is not None:
            self.float8.agree()
        scale = self.scale
        needed = self.loss_scale is not None or clip is not None
        norm = gradient_norm(counted) / scale if needed else 0.0
        if self.loss_scale is not None:
            norm = float(norm)
            overflow = not math.isfinite(norm)
            self.loss_scale.grow_or_halve(overflow=overflow)
            if overflow:
                self.skipped += 1
                return
        optimizer.step(
            lr, (1.0 if clip is None else clip_scale(norm, clip)) / scale, roundings=self._pairs
        )
