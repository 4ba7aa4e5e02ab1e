"""The MLP of a block: it maps each token by itself, through a wider layer."""

from typing import Any

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.errors import ConfigError
from minidist.nn.dropout import DropoutKey
from minidist.nn.linear import Linear
from minidist.nn.module import Module


class MLP(Module):
    """(…, width) -> (…, width), with `hidden` numbers inside.

    "gelu": down(gelu(up(x))).  "silu", gated (SwiGLU): down(silu(gate(x)) up(x)). Source: Shazeer 2020.
    Args:    std, out_std: standard deviations of the initial weights, of the last linear's if it differs.
    Raises:  ConfigError for another activation.
    """

    def __init__(self, width: int, hidden: int, *, activation: str = "gelu", std: float = 0.02,
                 out_std: float | None = None, dtype: Any = "float32") -> None:
        if activation not in ("gelu", "silu"):
            raise ConfigError(f"MLP: activation is {activation!r}; choose gelu or silu")
        self.gate = Linear(width, hidden, std=std, dtype=dtype) if activation == "silu" else None
        self.up = Linear(width, hidden, std=std, dtype=dtype)
        self.down = Linear(hidden, width, std=std if out_std is None else out_std, dtype=dtype)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """(…, width) -> (…, width). The key is unused here; a mixture (moe.py) in place of the MLP needs it."""
        if self.gate is None:
            return self.down(ops.gelu(self.up(x, bias=False), self.up.bias))
        return self.down(ops.swiglu(self.gate(x), self.up(x)))
