"""Weights of which each rank holds a part, and what must be known of them to train: drawing, norms, sums, saving.

A shard keeps the whole tensor's name, and draws its own part under that name, so that any split starts with the bits of
the whole. Where a rank has several parts of one tensor, each has a name below that: `word`. Ranks may have a part in
common: a key head that several ranks need is held by each, `sharers` being the group of those; the gradient of each is
then a summand, and the sum over the sharers is the head's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import GradientError, ShapeError
from minidist.nn import Module, Weight
from minidist.nn.weights import Part, positions_of
from minidist.optim import sum_of_squares
from minidist.parallel.step.flat import Piece

Place = tuple[Any, ...]
"""A part of a tensor: a slice or an integer array for each leading dim."""


class WeightShard(Weight):
    """This rank's part of a declared weight; its data, gradient and optimizer state are of that part alone.

    Args:    weight: the whole one, not yet drawn; or a shard, to be cut into smaller `parts` of the whole.
             parts: of every rank of the group; rank: this one's.
             sharers: the ranks that hold this part too, or None.
             among: the ranks that have the parts, if others than those of most shards of the model.
             word: the last of its name, where the rank has other parts of the tensor too.
    Attributes: whole: the whole tensor's shape
    """

    __slots__ = ("whole", "parts", "rank", "sharers", "among", "word")

    def __init__(self, weight: Weight, parts: Sequence[Place], rank: int, *, sharers: Group | None = None,
                 among: Group | None = None, word: str = "") -> None:
        self.whole: tuple[int, ...] = weight.whole if isinstance(weight, WeightShard) else weight.shape
        own = np.broadcast_to(np.zeros(()), self.whole)[_mesh(parts[rank], self.whole)]
        super().__init__(own.shape, weight.init, dtype=weight.dtype, name=weight.name)
        self.requires_grad = weight.requires_grad
        self.parts, self.rank, self.sharers, self.among, self.word = parts, rank, sharers, among, word

    def whole_name(self, name: str) -> str:
        """The whole tensor's name, of this part's."""
        return name.removesuffix(f".{self.word}") if self.word else name

    def first_sharer(self) -> bool:
        """Whether this rank is the one, of those that hold this part, that counts it."""
        return self.sharers is None or self.sharers.rank == 0

    def draw(self, seed: int, part: Part = (), *, device: str = "cpu") -> Array:
        """The first values of this rank's part, or of `part` of that."""
        places = positions_of(self.whole, self.parts[self.rank])
        if not (isinstance(part, tuple) and not part):
            places = places.reshape(-1)[np.asarray(positions_of(self.shape, part), np.int64)]
        self._require_name()
        return self.init.draw(self.whole_name(self.name), seed, places, self.dtype, device=device)


def _mesh(part: Place, shape: Sequence[int]) -> tuple[Any, ...]:
    """`part` as one NumPy index: integer arrays of several dims combine as a grid."""
    chosen = [np.arange(size)[part[dim] if dim < len(part) else slice(None)] for dim, size in enumerate(shape)]
    return np.ix_(*chosen)


def assemble(model: Module, own: Mapping[str, np.ndarray], group: Group) -> dict[str, np.ndarray]:
    """Weights in the serial layout, whole, on every rank: shards put together, the others as they are.

    Args:    own: this rank's arrays by dotted path; group: the ranks that have the parts, if a shard names no others.
    Cost:    an all-gather of each split weight.
    """
    state: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, WeightShard):
            state[name] = own[name]
            continue
        flat = (parameter.among or group).all_gather(np.ascontiguousarray(own[name]).reshape(-1))
        whole = state.setdefault(parameter.whole_name(name), np.empty(parameter.whole, own[name].dtype))
        start = 0
        for part in parameter.parts:
            where = _mesh(part, parameter.whole)
            shape = tuple(index.size for index in where)
            whole[where] = flat[start:start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
    return state


def cut(model: Module, whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """This rank's arrays of weights in the serial layout, for `model.load_state_dict`: what `assemble` put together.

    Raises:  ShapeError for a weight of another shape than the whole one's; load_state_dict tells of names and dtypes.
    """
    own, taken = {}, set()
    for name, parameter in model.named_parameters():
        of = parameter.whole_name(name) if isinstance(parameter, WeightShard) else name
        if isinstance(parameter, WeightShard) and of in whole:
            if whole[of].shape != parameter.whole:
                raise ShapeError(f"{of} is {whole[of].shape}, the whole weight {parameter.whole}; load what one "
                                 f"process or state_dict saved, not a part")
            own[name] = whole[of][_mesh(parameter.parts[parameter.rank], parameter.whole)]
            taken.add(of)
    return {**{name: array for name, array in whole.items() if name not in taken}, **own}


class Summand(NamedTuple):
    """A gradient, or with ZeRO this rank's piece of it, that must be added up over the ranks of `group`."""

    parameter: Parameter | Piece
    group: Group


def summands(parameters: Iterable[Parameter], outside: Group | None = None) -> list[Summand]:
    """The gradients that are summands after backward.

    Args:    outside: the group over which the gradients of weights that are not split must be added up; None if each
             rank has them whole.
    """
    found = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, WeightShard):
            if parameter.sharers is not None and parameter.sharers.size > 1:
                found.append(Summand(parameter, parameter.sharers))
        elif outside is not None:
            found.append(Summand(parameter, outside))
    return found


def add_up(parts: Sequence[Summand], *, algorithm: str = "ring") -> None:
    """All-reduce what is a summand, in place: one call a group and dtype, in the order of the parameters.

    Call it once a step, after the last backward.
    Raises:  GradientError for a parameter without a gradient.
    """
    runs: dict[tuple[int, str], list[Summand]] = {}
    for part in parts:
        if part.parameter.grad is None:
            raise GradientError(f"{part.parameter.name!r} has no gradient to add up; call zero_unused first")
        runs.setdefault((part.group.id, part.parameter.grad.dtype.name), []).append(part)
    for run in runs.values():
        pieces: list[Any] = [part.parameter.grad for part in run]
        xp = array_module(*pieces)
        flat = account.current().hold(xp.concatenate([piece.reshape(-1) for piece in pieces]), "communication")
        run[0].group.all_reduce(flat, out=flat, algorithm=algorithm)
        start = 0
        for piece in pieces:
            piece[...] = flat[start:start + piece.size].reshape(piece.shape)
            start += piece.size


def squares_once(parameters: Iterable[Parameter], group: Group) -> float:
    """The sum of the squares of the whole gradient, each weight counted once: the same bits on every rank.

    Split weights count where they are, shared ones at the first of their sharers, all others at rank 0.
    Cost:    one all-gather of a float64 a rank, counted under `control`.
    """
    with group.ledger.control():
        own = sum_of_squares(p.grad for p in parameters if counts_at(p, group.rank))
        each = group.all_gather(np.array([own]))
    return float(math.fsum(each)) if np.isfinite(each).all() else float(np.sum(each))


def counts_at(parameter: Parameter, rank: int) -> bool:
    """Whether this rank of the group counts a parameter in the norm, so that every number counts at one rank."""
    return parameter.first_sharer() if isinstance(parameter, WeightShard) else rank == 0
