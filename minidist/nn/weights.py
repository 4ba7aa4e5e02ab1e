"""Weights that are declared first and drawn later, whole or in slices.

A model is built without values. A strategy may then cut it, and each rank draws only the slices
that it keeps. Every element is a hash of (name, seed, position in the whole tensor), so any split
starts with the same bits as the whole.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.device import account, backend
from minidist.device.backend import (
    LOW_PRECISION,
    Array,
    array_module,
    device_of,
    module_for,
    random_normal,
)
from minidist.errors import ConfigError, ShapeError

# positions in the flattened tensor, or a slice or integer array for each leading dim
Part = range | Sequence[Any]


@dataclass(frozen=True)
class Init:
    """The initial values of a tensor: normal with mean 0 and standard deviation `std`, or all zero
    or one."""

    law: Literal["normal", "zeros", "ones"]
    std: float = 1.0

    def draw(
        self, name: str, seed: int, positions: Any, dtype: Any, *, device: str = "cpu"
    ) -> Array:
        """Return the elements of the tensor `name` at integer `positions` (a range or an array of
        any shape).

        In low precision they are the rounded float32 values.
        Raises:  ConfigError for an empty name; as backend.module_for, backend.dtype.
        """
        if not name:
            raise ConfigError(
                "a parameter has no name yet, and its values depend on its name; call "
                "model.initialize(seed), or call model.assign_names() first"
            )
        xp = module_for(device)
        kind = backend.dtype(dtype)
        if self.law != "normal":
            shape = (len(positions),) if isinstance(positions, range) else positions.shape
            return xp.full(shape, 1.0 if self.law == "ones" else 0.0, kind)
        index = positions
        # asarray of an empty range would be of floats
        if xp is not np and isinstance(positions, range):
            index = xp.arange(positions.start, positions.stop, positions.step, dtype="int64")
        elif xp is not np:
            index = xp.asarray(positions)
        values = random_normal(name, seed, index, "float32" if kind in LOW_PRECISION else kind)
        values *= values.dtype.type(self.std)
        return values.astype(kind, copy=False)


ZEROS = Init("zeros")
ONES = Init("ones")


class Weight(Parameter):
    """A Parameter with a shape, a dtype and an Init, which has no values until they are drawn or
    loaded."""

    __slots__ = ("init", "drawn", "seed")

    def __init__(
        self, shape: Sequence[int], init: Init, *, dtype: Any = "float32", name: str = ""
    ) -> None:
        xp = module_for("cpu")
        # has a shape and one element
        nothing = xp.broadcast_to(xp.zeros((), backend.dtype(dtype)), tuple(shape))
        super().__init__(nothing, name=name)
        self.init = init
        self.drawn = False
        self.seed: int | None = None  # of its first values, if they were drawn

    @property
    def data(self) -> Array:
        """Return the array itself (see Parameter.data). Raises: ConfigError if no values were drawn
        or loaded."""
        if self.arrival is not None:
            self.arrival()
        if not self.drawn:
            raise ConfigError(
                f"parameter {self.name or '(unnamed)'} of shape {self.shape} has no values yet; "
                f"call model.initialize(seed) or model.load_state_dict(...) first"
            )
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self.assign(array)

    def place(self, array: Array) -> None:
        """Let `data` be this array, as Parameter.place does; the weight then counts as drawn."""
        # strides of 0, as above: one number, not worth counting
        holds = array.size <= 1 or any(array.strides)
        self._data = account.current().hold(array, "parameters") if holds else array
        self.drawn = True

    def draw(self, seed: int, part: Part = (), *, device: str = "cpu", dtype: Any = None) -> Array:
        """Return the initial values of `part` of this tensor; () is all of it. Only the part is
        computed.

            weight.draw(7, (slice(0, 4),))                    # rows 0 to 3
            weight.draw(7, (slice(None), [0, 1, 8, 9]))       # four columns
            weight.draw(7, range(1000, 2000))                 # a flat shard

        Args:    dtype: default: the weight's; in float32 the values that low precision rounds.
        Returns: a new array of the part's shape.
        Raises:  ConfigError if the weight has no name; ShapeError if the part does not fit.
        """
        kind = dtype or self.dtype
        if backend.is_simulated():
            return module_for(device).empty(shape_of(self.shape, part), backend.dtype(kind))
        if isinstance(part, tuple) and not part:
            return self.init.draw(self.name, seed, range(self.size), kind, device=device).reshape(
                self.shape
            )
        return self.init.draw(self.name, seed, positions_of(self.shape, part), kind, device=device)


def shape_of(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """Return the shape of `part` of a tensor of this shape, without its positions."""
    if isinstance(part, range):
        return (len(part),)
    chosen = [
        len(np.arange(size)[part[dim]]) if dim < len(part) else size
        for dim, size in enumerate(shape)
    ]
    return tuple(chosen)


def positions_of(shape: Sequence[int], part: Part) -> Any:
    """Return the positions of `part` in a flattened tensor: a range, or int64 of the part's shape.
    Raises: ShapeError."""
    if isinstance(part, range):
        if len(part) and not (
            min(part[0], part[-1]) >= 0 and max(part[0], part[-1]) < math.prod(shape)
        ):
            raise ShapeError(
                f"positions {part} are outside a tensor of shape {tuple(shape)}, "
                f"{math.prod(shape)} elements"
            )
        return part
    if len(part) > len(shape):
        raise ShapeError(f"{len(part)} indices are too many for a tensor of shape {tuple(shape)}")
    result = np.zeros((), np.int64)
    for dim, size in enumerate(shape):
        try:
            chosen = np.arange(size)[part[dim] if dim < len(part) else slice(None)]
        except IndexError as error:
            raise ShapeError(
                f"index {part[dim]!r} does not fit dim {dim} of shape {tuple(shape)}: {error}"
            ) from error
        result = result[..., None] * size + chosen
    return result


def unround(master: Array, weights: Array, spans: Iterable[tuple[Parameter, Any, Any]]) -> None:
    """Write the drawn float32 values into masters where the weights are still the rounded drawn
    values.

    Args:    spans: (parameter, its place in the arrays, which of its elements lie there).
    """
    for parameter, place, positions in spans:
        if (
            weights.dtype in LOW_PRECISION
            and isinstance(parameter, Weight)
            and parameter.seed is not None
        ):
            drawn = parameter.draw(
                parameter.seed, positions, device=device_of(weights), dtype="float32"
            )
            still = drawn.astype(weights.dtype) == weights[place]
            master[place] = array_module(weights).where(still, drawn, master[place])
