"""LayerNorm and RMSNorm over the last dim."""

from typing import Any

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.nn.module import Module
from minidist.nn.weights import ONES, ZEROS, Weight


class LayerNorm(Module):
    """Scale each row to mean 0 and variance 1, then multiply by weight and add bias: (…, width) -> (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.bias = Weight((width,), ZEROS, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) -> (…, width)."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Scale each row to mean square 1, then multiply by weight: (…, width) -> (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) -> (…, width)."""
        return ops.rms_norm(x, self.weight, eps=self.eps)
