"""fp8: the inputs of matrix products in one byte, each tensor with a scale of its own that lags one
step behind.

A float8 has so small a range that every tensor needs its own scale, a power of two that brings its
largest element just below the format's end. To know the largest, one would have to read the tensor
before it is rounded; so the scale comes from earlier steps: from the largest |element| of the last
HISTORY of them ("delayed scaling"). What grew since is cut off at the end of the range. A tensor
without a history is not rounded: the first step runs in bf16 and only looks.

    x, w    e4m3: 4 digits, up to 448              y  = x w     in float32, rounded once to bf16
    dy      e5m2: 3 digits, up to 57,344           dx = dy wᵀ,  dw = xᵀ dy     likewise

Hardware multiplies the bytes; here their values are looked up in a table and multiplied in float32:
rounding is exact, speed is not gained. What backward needs of x is kept as bytes, half of bf16's.

On a GPU kernels/casts.cu rounds, and finds the largest element in the same read; CuPy has no dtype
for a byte's values, which go into bf16, exactly, for tensor cores to multiply: cuBLAS does that
faster than kernels/matmul_float8.cu, which multiplies the bytes, and which is there to see how.
What was seen stays there, and the host waits for it once a step, to agree on scales.

Source:  Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; delayed scaling as in NVIDIA's
         Transformer Engine.
"""

import math
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

import ml_dtypes
import numpy as np

from minidist.autograd.ops.linear import column_sums, product_and_bias, rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.autograd.tensor import is_grad_enabled
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, matmul, narrow, to_host, widen
from minidist.device.dispatch import launcher
from minidist.nn import GPT, Linear

HISTORY = 16
FORMATS = {
    "x": np.dtype(ml_dtypes.float8_e4m3fn),
    "w": np.dtype(ml_dtypes.float8_e4m3fn),
    "dy": np.dtype(ml_dtypes.float8_e5m2),
}
MULTIPLIES_BYTES = ContextVar("multiplies_bytes", default=False)
"""Whether the GPU of a simulated rank multiplies the bytes (simulate/byte_products.py); no training
does."""
LARGEST = {kind: float(ml_dtypes.finfo(kind).max) for kind in FORMATS.values()}
_VALUES = {
    kind: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32) for kind in FORMATS.values()
}


def to_float8(array: Array, kind: np.dtype, scale: float) -> Array:
    """array × scale, cut off at the format's ends, rounded once to nearest (ties to even). NaN
    stays NaN."""
    return _round(array, kind, scale)[0]


def to_float32(array: np.ndarray, scale: float) -> np.ndarray:
    """float8 / scale, exactly."""
    return np.take(_VALUES[array.dtype], array.view(np.uint8), mode="clip") * np.float32(
        1.0 / scale
    )


def _round(array: Array, kind: np.dtype, scale: float) -> tuple[Array, Array | None]:
    """to_float8's bytes; from a kernel (as uint8), which reads the array anyway, also its largest
    |element|: (1,)."""
    if device_of(array) == "cuda":
        xp = array_module(array)
        return launcher("to_float8")(  # type: ignore[no-any-return]
            xp.ascontiguousarray(array),
            kind.name,
            xp.full(1, scale, np.float32),
        )
    wide = widen(array) * np.float32(scale)
    np.clip(wide, -LARGEST[kind], LARGEST[kind], out=wide)
    return wide.astype(kind), None


class Scales:
    """The largest elements of a linear's x, w and dy so far, and the scales that follow.

    Attributes: history  of each tensor the largest |element| of recent steps, agreed by all ranks;
                         0: no step
                seen     of each the largest of this step, on this rank: (1,), or 0.0
    """

    def __init__(self) -> None:
        self.history = {name: deque([0.0] * HISTORY, maxlen=HISTORY) for name in FORMATS}
        self.seen: dict[str, Array] = dict.fromkeys(FORMATS, 0.0)

    def scale(self, name: str) -> float | None:
        """The largest power of two that keeps the history's largest element in range; None without
        a history."""
        largest = max(self.history[name])
        return 2.0 ** math.floor(math.log2(LARGEST[FORMATS[name]] / largest)) if largest else None

    def store(self, name: str, array: Array) -> Array:
        """The tensor as bytes, or as it is without a history; its largest element is noted for the
        steps to come."""
        scale = self.scale(name)
        stored, largest = (array, None) if scale is None else _round(array, FORMATS[name], scale)
        if is_grad_enabled() or name == "dy":
            xp = array_module(array)
            if largest is None:
                largest = (
                    xp.abs(widen(array)).max().reshape(1) if array.size else xp.zeros(1, np.float32)
                )
            finite = xp.where(xp.isfinite(largest), largest, largest.dtype.type(0))
            self.seen[name] = xp.maximum(self.seen[name], finite)
        return stored

    def read(self, name: str, stored: Array) -> Array:
        """What `store` gave, exactly: in float32, on a GPU in bf16."""
        scale = self.scale(name) or 1.0
        if isinstance(stored, np.ndarray):
            return to_float32(stored, scale) if stored.dtype == FORMATS[name] else widen(stored)
        if stored.dtype != np.uint8:
            return stored
        if MULTIPLIES_BYTES.get():
            return stored.view(FORMATS[name])
        factor = array_module(stored).full(1, scale, np.float32)
        return launcher("from_float8")(stored, FORMATS[name].name, factor, kind="bfloat16")


@op
def linear_fp8(
    x: Array, w: Array, b: Array | None = None, *, scales: Scales
) -> tuple[Array, Saved]:
    """(…, in) @ (in, out) + (out,) -> (…, out), with x and w rounded to e4m3, and dy to e5m2 in
    backward."""
    stored = scales.store("x", rows(x))
    y = product_and_bias(scales.read("x", stored), scales.read("w", scales.store("w", w)), b)
    return narrow(y, x.dtype).reshape(*x.shape[:-1], w.shape[1]), saved(
        stored=stored, w=w, scales=scales
    )


def _rounded_dy(node: Node, dy: Array) -> Array:
    """dy as its e5m2 values: (rows, out)."""
    return node.scales.read("dy", node.scales.store("dy", rows(dy)))


@linear_fp8.gradient("x")
def _(node: Node, dy: Array) -> Array:
    # the weight's bytes are not kept, because ZeRO-3 frees the weight in between
    scale = node.scales.scale("w")
    w = node.scales.read("w", node.w if scale is None else to_float8(node.w, FORMATS["w"], scale))
    return narrow(matmul(node.once(_rounded_dy, dy), w.T), dy.dtype).reshape(node.shapes["x"])


@linear_fp8.gradient("w")
def _(node: Node, dy: Array) -> Array:
    dw = matmul(node.scales.read("x", node.stored).T, node.once(_rounded_dy, dy))
    return narrow(dw, dy.dtype, node.room("w"))


@linear_fp8.gradient("b")
def _(node: Node, dy: Array) -> Array:
    return column_sums(rows(dy), out=node.room("b"))


class Float8:
    """All linears of a model's blocks, multiplying in fp8. Embedding and output layer stay as they
    are.

    Args:    group: the ranks that must use the same scales: they share the batch, or have parts of
             the same matrices.
    """

    def __init__(self, model: GPT, group: Group | None) -> None:
        # by dotted path in the whole model
        self.model = model
        self.group = group
        self.scales = dict[str, Scales]()
        for path, module in model.named_modules():
            if isinstance(module, Linear) and path.startswith("blocks."):
                self.scales[path] = Scales()
                module.product = partial(linear_fp8, scales=self.scales[path])

    def agree(self) -> None:
        """End of a step: the largest elements that any rank has seen enter every rank's history.

        Cost:    one all-gather of three float64 a linear, counted under `control`; from a GPU one
                 copy, which the host waits for.
        """
        own = [scales.seen[name] for scales in self.scales.values() for name in FORMATS]
        xp = array_module(*own)
        joined = to_host(
            xp.concatenate(
                [
                    xp.full(1, value, np.float32) if isinstance(value, float) else value
                    for value in own
                ]
            )
        )
        seen = joined.astype(np.float64).reshape(-1, len(FORMATS))
        if self.group is not None and self.group.size > 1:
            with self.group.ledger.control():
                every = self.group.all_gather(seen[None], algorithm="ring")
            seen = every.max(axis=0)
        for scales, largest in zip(self.scales.values(), seen, strict=True):
            for name, value in zip(FORMATS, largest, strict=True):
                scales.history[name].append(float(value))
                scales.seen[name] = 0.0

    def has(self, linear: str) -> bool:
        """Whether this rank has the block of a linear: a pipeline takes the others out of the model
        later."""
        block = ".".join(linear.split(".")[:2])
        return any(path == block for path, _ in self.model.named_modules())

    def state(self) -> np.ndarray:
        """All histories, (linears, 3, HISTORY) float64, oldest first, zeros before the first: part
        of a run's state."""
        return np.array(
            [[scales.history[name] for name in FORMATS] for scales in self.scales.values()]
        )

    def load(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take over what `state` returned."""
        for scales, histories in zip(self.scales.values(), state, strict=True):
            for name, history in zip(FORMATS, histories, strict=True):
                scales.history[name].extend(history)
