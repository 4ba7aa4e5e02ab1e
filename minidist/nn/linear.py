"""Linear: y = x W + b."""

from collections.abc import Callable
from typing import Any

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.nn.module import Module
from minidist.nn.weights import ZEROS, Init, Weight


class Linear(Module):
    """(…, inputs) -> (…, outputs), with weight (inputs, outputs) and bias (outputs,).

    Args:    std: standard deviation of the initial weight; default: 1/sqrt(inputs), which keeps the size of x.
    Attributes: product   the op that multiplies x, weight and bias; a precision may replace it
    """

    product: Callable[..., Tensor] = ops.linear

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float | None = None,
                 dtype: Any = "float32") -> None:
        self.weight = Weight((inputs, outputs), Init("normal", inputs ** -0.5 if std is None else std), dtype=dtype)
        self.bias = Weight((outputs,), ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """(…, inputs) -> (…, outputs); bias=False: without the bias, if the next op adds it."""
        return self.product(x, self.weight, self.bias if bias else None)
