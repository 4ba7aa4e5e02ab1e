"""Dropout keyed by the global token, so that a split batch drops the same elements as the whole one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.nn.module import Module


@dataclass(frozen=True)
class DropoutKey:
    """The key of a dropout mask, beside the layer: the run's seed, the step, and the global number of each token."""

    seed: int
    step: int
    tokens: Array                                   # (B, T) integers
    streams: Mapping[str, Array] | None = None      # by layer path, uint64 (1,) on a GPU: in place of seed and step

    @staticmethod
    def of_sequences(seed: int, step: int, first: int, count: int, length: int) -> "DropoutKey":
        """The key of `count` whole sequences of `length` tokens; the first has number `first` in the batch."""
        return DropoutKey(seed, step, np.arange(first * length, (first + count) * length).reshape(count, length))


class Dropout(Module):
    """In training, zero a share `rate` of x (B, T, width) and scale the rest. Raises: ConfigError outside [0, 1)."""

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"dropout rate {rate!r} is not in [0, 1)")
        self.rate = rate

    def forward(self, x: Tensor, key: DropoutKey | None = None, *, residual: Tensor | None = None) -> Tensor:
        """x after dropout, plus `residual`, in one pass. Raises: ConfigError if a rate above 0 trains without a key."""
        if not self.training or self.rate == 0.0:
            return x if residual is None else residual + x
        if key is None:
            raise ConfigError(f"dropout {self.path!r} of rate {self.rate} trains without a key; "
                              f"pass key=DropoutKey(seed, step, tokens) to the model, or call model.eval()")
        stream = None if key.streams is None else key.streams[self.path]
        return ops.dropout(x, residual, rate=self.rate, name=self.path, seed=key.seed, step=key.step,
                           tokens=key.tokens, key=stream)
