"""The small layers of a GPT: linear, embedding, dropout, norms, and the MLP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.nn.module import Module
from minidist.nn.weights import ONES, ZEROS, Init, Weight


class Linear(Module):
    """x W + b: (…, inputs) -> (…, outputs), with weight (inputs, outputs) and bias (outputs,).

    Args:    std: standard deviation of the initial weight; default: 1/sqrt(inputs), which keeps the
             size of x.
    Attributes: product   the op that multiplies x, weight and bias; a precision may replace it
    """

    product: Callable[..., Tensor] = ops.linear

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        std: float | None = None,
        dtype: Any = "float32",
    ) -> None:
        std = max(1, inputs) ** -0.5 if std is None else std
        self.weight = Weight((inputs, outputs), Init("normal", std), dtype=dtype)
        self.bias = Weight((outputs,), ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """Return x W + b; bias=False: without the bias, if the next op adds it."""
        return self.product(x, self.weight, self.bias if bias else None)


class Embedding(Module):
    """Integers (…) in 0..count-1 -> (…, width), with weight (count, width), drawn with standard
    deviation `std`."""

    def __init__(
        self, count: int, width: int, *, std: float = 0.02, dtype: Any = "float32"
    ) -> None:
        self.weight = Weight((count, width), Init("normal", std), dtype=dtype)

    def forward(self, ids: Array) -> Tensor:
        return ops.embedding(self.weight, ids)

    def unembed(self, x: Tensor) -> Tensor:
        """Return logits from the same (tied) table: (…, width) -> (…, count)."""
        return ops.unembed(x, self.weight)


@dataclass(frozen=True)
class DropoutKey:
    """The key of a dropout mask (with the layer): the run's seed, the step, and the global number
    of each token."""

    seed: int
    step: int
    tokens: Array  # (B, T) integers
    # by layer path, uint64 (1,) on a GPU: in place of seed and step
    streams: Mapping[str, Array] | None = None

    @staticmethod
    def of_sequences(seed: int, step: int, first: int, count: int, length: int) -> "DropoutKey":
        """Return the key of `count` whole sequences of `length` tokens; the first has number
        `first` in the batch."""
        return DropoutKey(
            seed, step, np.arange(first * length, (first + count) * length).reshape(count, length)
        )


class Dropout(Module):
    """In training, zero a share `rate` of x (B, T, width) and scale the rest. Raises: ConfigError
    outside [0, 1)."""

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"dropout rate {rate!r} is not in [0, 1)")
        self.rate = rate

    def forward(
        self, x: Tensor, key: DropoutKey | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return x after dropout, plus `residual`, in one pass. Raises: ConfigError if a rate above
        0 trains without a key."""
        if not self.training or self.rate == 0.0:
            return x if residual is None else residual + x
        if key is None:
            raise ConfigError(
                f"dropout {self.path!r} of rate {self.rate} is in training mode but got no key; "
                "pass key=DropoutKey(seed, step, tokens) to the model, or call model.eval()"
            )
        stream = None if key.streams is None else key.streams[self.path]
        return ops.dropout(
            x,
            residual,
            rate=self.rate,
            name=self.path,
            seed=key.seed,
            step=key.step,
            tokens=key.tokens,
            key=stream,
        )


class LayerNorm(Module):
    """Scale each row to mean 0 and variance 1, then multiply by weight and add bias: (…, width) ->
    (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.bias = Weight((width,), ZEROS, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Scale each row to mean square 1, then multiply by weight: (…, width) -> (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)


class MLP(Module):
    """(…, width) -> (…, width), computed for each token separately, with `hidden` numbers inside.

    "gelu": down(gelu(up(x))).  "silu", gated (SwiGLU): down(silu(gate(x)) up(x)). Source: Shazeer
                                2020.
    Args:    std, out_std: standard deviations of the initial weights, of the last linear's if it
             differs.
    Raises:  ConfigError for another activation.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        std: float = 0.02,
        out_std: float | None = None,
        dtype: Any = "float32",
    ) -> None:
        if activation not in ("gelu", "silu"):
            raise ConfigError(f"MLP: activation is {activation!r}; choose gelu or silu")
        self.gate = Linear(width, hidden, std=std, dtype=dtype) if activation == "silu" else None
        self.up = Linear(width, hidden, std=std, dtype=dtype)
        self.down = Linear(hidden, width, std=std if out_std is None else out_std, dtype=dtype)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Return the MLP's result. `key` is unused here; a mixture (moe.py) in place of the MLP
        needs it."""
        if self.gate is None:
            return self.down(ops.gelu(self.up(x, bias=False), self.up.bias, overwrite=True))
        return self.down(ops.swiglu(self.gate(x), self.up(x)))
