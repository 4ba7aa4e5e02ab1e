"""LayerNorm and RMSNorm over the last dim."""

from typing import Any

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.nn.module import Module
from minidist.nn.weights import ONES, ZEROS, Weight


class LayerNorm(Module):
    """Each row shifted to mean 0, scaled to variance 1, then times weight plus bias: (…, width) -> (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.bias = Weight((width,), ZEROS, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Each row scaled to mean square 1, then times weight: (…, width) -> (…, width)."""

    def __init__(self, width: int, *, eps: float = 1e-5, dtype: Any = "float32") -> None:
        self.weight = Weight((width,), ONES, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)
