"""Rotary positions: the angle between a query and a key depends on the distance of their tokens."""

import math
from dataclasses import dataclass
from typing import Any

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.device.dispatch import kernel
from minidist.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotation of the slow pairs, with which Llama 3.1 reads more tokens than it was first
    trained on. The fields have the published names.

    Raises:  ConfigError, one line, for numbers that do not fit together.
    """

    factor: float  # the speed of a slow pair is divided by it
    low_freq_factor: float  # a pair with fewer full turns in the original context is slow
    high_freq_factor: float  # a pair with more full turns there keeps its speed
    original_max_position_embeddings: int  # tokens in a sequence of the first training

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_positive(value):
                raise ConfigError(
                    f"rope_scaling: {name} is {value!r}; it must be a finite number above 0"
                )
        if type(self.original_max_position_embeddings) is not int:
            raise ConfigError(
                "rope_scaling: original_max_position_embeddings is "
                f"{self.original_max_position_embeddings!r}; it must be a whole number"
            )
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling: low_freq_factor {self.low_freq_factor} is not below "
                f"high_freq_factor {self.high_freq_factor}"
            )


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, int | float) and value is not True and 0 < value < 1e300


def speeds(xp: Any, width: int, base: float, scaling: RopeScaling | None) -> Array:
    """Return the angle between neighbouring tokens for each pair i of a head: 1 / base^(2 i /
    width), float64 (width/2,).

    With scaling, a pair makes turns = original_max_position_embeddings speed / 2π in the original
    context. Its speed is divided by `factor` below low_freq_factor turns, is unchanged above
    high_freq_factor turns, and changes linearly with the turns in between.
    Source:  Su et al. 2021; scaling: Llama 3.1's published program, `apply_scaling`.
    """
    found = base ** (-2.0 / max(1, width) * xp.arange(width // 2, dtype="float64"))
    if scaling is None:
        return found
    turns = found * (scaling.original_max_position_embeddings / (2 * math.pi))
    between = scaling.high_freq_factor - scaling.low_freq_factor
    kept = xp.clip((turns - scaling.low_freq_factor) / between, 0.0, 1.0)
    return found * (kept + (1.0 - kept) / scaling.factor)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate each pair (x[i], x[i + n/2]) by its angle: (…, T, n), (T, n/2) twice -> (…, T, n)."""
    xp = array_module(x)
    wide = widen(x)
    half = x.shape[-1] // 2
    y = xp.empty(x.shape, wide.dtype)
    a = wide[..., :half]
    b = wide[..., half:]
    y[..., :half] = a * cos - b * sin
    y[..., half:] = b * cos + a * sin
    return narrow(y, x.dtype)


@op
def rotary(
    x: Array, positions: Array, *, base: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[Array, Saved]:
    """Rotate the pairs (x[i], x[i + n/2]) by angles that grow with the global position of the
    token.

    Args:    x: (…, T, n), n even; positions: (T,) integers. A shard of the sequence passes its own
             global positions. base, scaling: see speeds.
    Raises:  ShapeError if they do not fit.
    Source:  Su et al. 2021; pairs as in GPT-NeoX.
    """
    if x.ndim < 2 or x.shape[-1] % 2 or positions.shape != (x.shape[-2],):
        raise ShapeError(
            f"rotary: x {x.shape} with positions {positions.shape}; x needs shape (…, T, even), "
            f"positions (T,)"
        )
    xp = array_module(x)
    width = x.shape[-1]
    kind = widen(x).dtype
    # (T, width/2)
    angles = positions.astype("float64")[..., None] * speeds(xp, width, base, scaling)
    cos = xp.cos(angles).astype(kind)
    sin = xp.sin(angles).astype(kind)
    fast = kernel("rotary", x)
    return fast(x, cos, sin) if fast is not None else _rotate(x, cos, sin), saved(cos=cos, sin=sin)


@rotary.gradient("x")
def _(node: Node, dy: Array) -> Array:
    fast = kernel("rotary_gradient", dy)
    return fast(dy, node.cos, node.sin) if fast is not None else _rotate(dy, node.cos, -node.sin)
