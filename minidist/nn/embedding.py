"""Embedding: a table with a row of numbers for each id."""

from typing import Any

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.nn.module import Module
from minidist.nn.weights import Init, Weight


class Embedding(Module):
    """Integers (…) in 0..count-1 -> (…, width), with weight (count, width).

    Args:    std: standard deviation of the initial weight.
    """

    def __init__(self, count: int, width: int, *, std: float = 0.02, dtype: Any = "float32") -> None:
        self.weight = Weight((count, width), Init("normal", std), dtype=dtype)

    def forward(self, ids: Array) -> Tensor:
        """ids (…) -> (…, width)."""
        return ops.embedding(self.weight, ids)

    def unembed(self, x: Tensor) -> Tensor:
        """Logits from the same (tied) table: (…, width) -> (…, count)."""
        return ops.unembed(x, self.weight)
