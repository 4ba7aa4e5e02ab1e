"""Weights divided between ranks: how the parts are drawn, gathered and cut.

A shard keeps the name of the whole tensor and draws its own part under that name, so any split
starts with the bits of the whole. Several ranks may hold the same part (a key head that more than
one rank needs). Each of these `sharers` then has one summand of the part's gradient, and the
gradient is the sum over the sharers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array, is_simulated
from minidist.errors import ShapeError
from minidist.nn.module import Module
from minidist.nn.weights import Part, Weight, positions_of, shape_of

ShardIndex = tuple[Any, ...]
"""Which elements of a tensor a rank has: a slice or an integer array for each leading dim."""


class WeightShard(Weight):
    """This rank's part of a declared weight; data, gradient and optimizer state are only of that
    part.

    Args:    weight: the whole weight, not yet drawn; or a shard, which is then cut further.
             parts: of every rank of the group, as indices of the whole tensor; rank: this rank in
             that list.
             sharers: the ranks that hold this part too, or None.
             among: the ranks that have the parts, if it is another group than that of the model's
             other shards.
             word: the last word of the name, if the rank has other parts of the same tensor.
    Attributes: whole: shape of the whole tensor
    """

    __slots__ = ("whole", "parts", "rank", "sharers", "among", "word")

    def __init__(
        self,
        weight: Weight,
        parts: Sequence[ShardIndex],
        rank: int,
        *,
        sharers: Group | None = None,
        among: Group | None = None,
        word: str = "",
    ) -> None:
        self.whole: tuple[int, ...] = (
            weight.whole if isinstance(weight, WeightShard) else weight.shape
        )
        super().__init__(
            shape_of(self.whole, parts[rank]), weight.init, dtype=weight.dtype, name=weight.name
        )
        self.requires_grad = weight.requires_grad
        self.seed = weight.seed
        self.parts = parts
        self.rank = rank
        self.sharers = sharers
        self.among = among
        self.word = word

    def whole_name(self, name: str) -> str:
        """Return the name of the whole tensor; `name` is the name of this part."""
        return name.removesuffix(f".{self.word}") if self.word else name

    def first_sharer(self) -> bool:
        """Return whether this rank counts the part in sums over all weights: only the first of the
        ranks that hold it does."""
        return self.sharers is None or self.sharers.rank == 0

    def draw(self, seed: int, part: Part = (), *, device: str = "cpu", dtype: Any = None) -> Array:
        """Draw the first values of this rank's part, or of `part` of it, as Weight.draw does."""
        if is_simulated():
            return super().draw(seed, part, device=device, dtype=dtype)
        places = positions_of(self.whole, self.parts[self.rank])
        if not (isinstance(part, tuple) and not part):
            places = places.reshape(-1)[np.asarray(positions_of(self.shape, part), np.int64)]
        return self.init.draw(
            self.whole_name(self.name), seed, places, dtype or self.dtype, device=device
        )


def _grid(index: ShardIndex, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return `index` as one NumPy index, in which integer arrays of several dims combine as a
    grid."""
    chosen = [
        np.arange(size)[index[dim] if dim < len(index) else slice(None)]
        for dim, size in enumerate(shape)
    ]
    return np.ix_(*chosen)


def assemble(model: Module, own: Mapping[str, np.ndarray], group: Group) -> dict[str, np.ndarray]:
    """Return all weights in the serial layout, on every rank: shards are gathered, other weights
    stay as they are.

    Args:    own: this rank's arrays by dotted path; group: the ranks that have the parts, unless a
             shard names others.
    Cost:    one all-gather for each sharded weight.
    """
    state: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, WeightShard):
            state[name] = own[name]
            continue
        flat = (parameter.among or group).all_gather(np.ascontiguousarray(own[name]).reshape(-1))
        whole = state.setdefault(
            parameter.whole_name(name), np.empty(parameter.whole, own[name].dtype)
        )
        for part in parameter.parts:
            where = _grid(part, parameter.whole)
            piece, flat = np.split(flat, [whole[where].size])
            whole[where] = piece.reshape(whole[where].shape)
    return state


def cut(model: Module, whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's arrays for `model.load_state_dict`, which checks names and dtypes: the
    inverse of `assemble`.

    Raises:  ShapeError if a weight has not the shape of the whole tensor.
    """
    own = dict(whole)
    for name, parameter in model.named_parameters():
        of = parameter.whole_name(name) if isinstance(parameter, WeightShard) else name
        if isinstance(parameter, WeightShard) and of in whole:
            if whole[of].shape != parameter.whole:
                raise ShapeError(
                    f"{of} is {whole[of].shape}, the whole weight {parameter.whole}; load what one "
                    f"process or state_dict saved, not a part"
                )
            if name != of:
                own.pop(of, None)
            own[name] = whole[of][_grid(parameter.parts[parameter.rank], parameter.whole)]
    return own
