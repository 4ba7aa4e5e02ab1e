"""Chapter 26 · The places of the numbers of a training's state: the map from any plan to any other.

Each strategy cuts weights and optimizer state in its own way. A checkpoint only needs to know which
numbers of a whole tensor a rank has. So each array of state is described by runs of positions in
the flattened whole tensor:

    weight (4, 6), tp=2 by columns        rank 0: [0, 3) [6, 9) [12, 15) [18, 21)        rank 1: [3, 6) [9, 12) …
    of rank 0's part, ZeRO on 2 ranks     chunk 0: [0, 3) [6, 9)                         chunk 1: [12, 15) [18, 21)

If ranks have weights and optimizer state of their own (local steps, chapter 21), each saves its
own, under its number: "m of rank 2/blocks.0.norm.weight". The common state has the plain names.

Two plans need not know each other: where the runs of a saved array and of a wanted array overlap,
numbers are copied (`overlap`). Runs of one length at equal distances are written in short as a
stripe (start, length, step, count): [0, 3, 6, 4].
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.health.failure import say_line
from minidist.device.backend import Array, array_module, device_of, to_device
from minidist.errors import CheckpointError
from minidist.nn.weight_shard import WeightShard
from minidist.nn.weights import positions_of
from minidist.optim import Optimizer
from minidist.parallel.state.scheme_state import (
    StateEntry,
    described,
    own_entries,
    take_counters,
    wanted_entries,
)
from minidist.parallel.step.flat import Piece
from minidist.parallel.step.strategy import Strategy

# the kind of weights, in mixed precision of their masters; other kinds are the optimizer's
WEIGHT = "weight"
OF_RANK = " of rank "  # and its number, behind the kind of what one rank has for itself


class Place(NamedTuple):
    """The numbers of the state that an array has.

    Attributes: kind: WEIGHT, or the optimizer's name of a state array; name: the whole tensor's
                dotted path.
                shape: of the whole tensor; runs: (n, 2) int64, [start, stop) in it, in the order of
                the array.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    runs: np.ndarray
    dtype: np.dtype

    @property
    def key(self) -> str:
        """Kind and name, as a checkpoint's tensors are called."""
        return f"{self.kind}/{self.name}"

    @property
    def size(self) -> int:
        """The count of numbers."""
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())

    @property
    def whole(self) -> bool:
        """Whether this is the whole tensor, in order."""
        return len(self.runs) == 1 and self.size == int(np.prod(self.shape, dtype=np.int64))


def require_together(strategy: Strategy) -> None:
    """Raise CheckpointError for a strategy whose ranks are never at the same step."""
    if strategy.asynchronous:
        raise CheckpointError(
            f"{type(strategy).__name__}, asynchronous: its ranks are at different steps, so no "
            "state of the whole job can be saved or loaded; use synchronous updates"
        )


def state_places(
    strategy: Strategy, optimizer: Optimizer, saved: dict[str, Any] | None = None
) -> list[Place]:
    """Return the places of this rank's state, in the order of `state_arrays`.

    Args:    saved: the small state of a training, perhaps of another plan; then the places are
             those that this rank loads of its state.
    Raises:  CheckpointError for a strategy whose ranks are never at the same step.
    """
    require_together(strategy)
    names = _names(strategy)
    common = strategy.common_state_of
    places = []
    mark = "" if common is None else f"{OF_RANK}{common.rank}"
    for slot in optimizer.slots:
        owner, part = _owner_of(slot.weights)
        name = _whole_name(names[owner], owner)
        shape = _whole_shape(owner)
        runs = _runs_of(owner, part)
        arrays: dict[str, Array] = {WEIGHT: slot.weights.data, **slot.state}
        places += [
            Place(kind + mark, name, shape, runs, array.dtype) for kind, array in arrays.items()
        ]
    places += [
        Place(WEIGHT, _whole_name(names[p], p), _whole_shape(p), _runs_of(p, part), p.dtype)
        for p, part, _ in strategy.frozen(changes=False)
    ]
    places += [
        Place(kind, name, array.shape, np.array([[0, array.size]], np.int64), array.dtype)
        for kind, name, array in _in_common(strategy)
    ]
    return places + [_place_of(entry, names) for entry in _entries(strategy, saved)]


def _entries(strategy: Strategy, saved: dict[str, Any] | None) -> list[StateEntry]:
    return (
        own_entries(strategy)
        if saved is None
        else wanted_entries(strategy, saved, whole_names(strategy))
    )


def _place_of(entry: StateEntry, names: dict[Parameter, str]) -> Place:
    p = entry.parameter
    dtype = entry.array.dtype
    if p is None:
        return Place(
            entry.kind, "", (len(entry.part),), np.array([[0, len(entry.part)]], np.int64), dtype
        )
    return Place(
        entry.kind, _whole_name(names[p], p), _whole_shape(p), _runs_of(p, entry.part), dtype
    )


def state_arrays(
    strategy: Strategy, optimizer: Optimizer, *, changes: bool, saved: dict[str, Any] | None = None
) -> Iterator[Array]:
    """Yield the arrays of state_places, flat views, each valid until the next is requested;
    `changes`: writes to them are kept.

    After changes call strategy.state_replaced().
    """
    for slot in optimizer.walk(changes=changes):
        owner, _ = _owner_of(slot.weights)
        if owner.arrival is not None:  # a gather of the old weights is not finished
            owner.arrival()
        for array in (slot.weights.data, *slot.state.values()):
            yield array.reshape(-1)
    for _, _, array in strategy.frozen(changes=changes):
        yield array
    for _, _, array in _in_common(strategy):
        yield array.reshape(-1)
    for entry in _entries(strategy, saved):
        if entry.adds:
            owed = array_module(entry.array).zeros_like(entry.array)
            yield owed
            entry.array[...] += owed
        else:
            yield entry.array


def set_weights(
    strategy: Strategy, optimizer: Optimizer, read: Callable[[str], np.ndarray]
) -> None:
    """Write whole weights into this rank's parts, before the first step; each rank reads all that it
    has a part of.

    Args:    read: read(name) -> the whole tensor of that dotted path, in the dtype of the masters.
    """
    arrays = state_arrays(strategy, optimizer, changes=True)
    for place, array in zip(state_places(strategy, optimizer), arrays, strict=True):
        if place.kind == WEIGHT:
            whole = read(place.name).reshape(-1)
            part = np.concatenate([whole[:0], *(whole[start:stop] for start, stop in place.runs)])
            array[...] = to_device(part, device_of(array))
    strategy.state_replaced()


def _in_common(strategy: Strategy) -> Iterator[tuple[str, str, Array]]:
    """Yield (kind, name, array) of the common state of ranks that also have a state of their own;
    nothing for other strategies."""
    return iter(()) if strategy.common_state_of is None else strategy.common_state_of.common_state()


def ranks_apart(keys: Iterable[str]) -> int:
    """Return the number of ranks that have a state of their own, by the keys of their places; 0:
    all ranks share one state."""
    kinds = {key.partition("/")[0].partition(OF_RANK)[2] for key in keys}
    return len(kinds - {""})


def taken_by(key: str) -> int:
    """Return the rank whose own state the key of a place belongs to; -1: the common state."""
    number = key.partition("/")[0].partition(OF_RANK)[2]
    return int(number) if re.fullmatch("[0-9]{1,9}", number) else -1


def of_rank(place: Place, rank: int) -> Place:
    """Return the same place in another rank's own state; a place of the common state stays."""
    kind, own, _ = place.kind.partition(OF_RANK)
    return place._replace(kind=f"{kind}{own}{rank}") if own else place


def of_all(place: Place) -> Place:
    """Return the place in the common state that a rank without a state of its own begins with."""
    return place._replace(kind=place.kind.partition(OF_RANK)[0])


def small_state(strategy: Strategy, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's state that is not in arrays, as JSON: the number of updates of each whole
    tensor, and the precision's state."""
    kept = described(strategy, whole_names(strategy))
    common = strategy.common_state_of
    return {
        "updates": {
            name: slot.steps
            for name, slot in _slots_by_name(strategy, optimizer)
            if slot.weights.data.size
        },
        "precision": strategy.precision.state(),
        **({"scheme": kept} if kept else {}),
        **({} if common is None else {"local steps": common.steps}),
    }


def merged_state(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the small_state of all ranks as one: tables are joined, the rest is equal on all."""
    merged: dict[str, Any] = {}
    for small in ranks:
        for name, value in small.items():
            merged[name] = (
                merged_state([merged.get(name, {}), value]) if isinstance(value, dict) else value
            )
    return merged


def set_small_state(
    strategy: Strategy, optimizer: Optimizer, state: dict[str, Any], rank: int
) -> None:
    """Load a merged small_state. Rank 0 prints what is left out."""
    for name, slot in _slots_by_name(strategy, optimizer):
        slot.steps = state["updates"].get(name, 0)
    strategy.precision.load_state(state["precision"])
    if strategy.common_state_of is not None:
        strategy.common_state_of.begin_at(state["local steps"])
    left_out = take_counters(strategy, state.get("scheme", {}))
    if left_out and rank == 0:
        say_line(f"minidist: {left_out}")


def whole_names(strategy: Strategy) -> dict[Parameter, str]:
    """Return the dotted path of each parameter, as in the whole model."""
    return {p: _whole_name(name, p) for name, p in strategy.model.named_parameters()}


def _slots_by_name(strategy: Strategy, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    names = _names(strategy)
    for slot in optimizer.slots:
        owner, _ = _owner_of(slot.weights)
        yield _whole_name(names[owner], owner), slot


def _names(strategy: Strategy) -> dict[Parameter, str]:
    return {parameter: name for name, parameter in strategy.model.named_parameters()}


def _owner_of(weights: Any) -> tuple[Parameter, range]:
    """Return the parameter that an optimizer's tensor belongs to, and the elements that it has: a
    Piece's, or all."""
    if isinstance(weights, Piece):
        return weights.parameter, weights.part
    owner = getattr(weights, "parameter", weights)  # a Master has one
    return owner, range(owner.size)


def _whole_name(name: str, owner: Parameter) -> str:
    return owner.whole_name(name) if isinstance(owner, WeightShard) else name


def _whole_shape(owner: Parameter) -> tuple[int, ...]:
    return tuple(owner.whole if isinstance(owner, WeightShard) else owner.shape)


def _runs_of(owner: Parameter, part: range) -> np.ndarray:
    """Return the runs of elements `part` of a parameter."""
    if not part:
        return np.empty((0, 2), np.int64)
    if not isinstance(owner, WeightShard):
        return np.array([[part.start, part.stop]], np.int64)
    positions = np.asarray(positions_of(owner.whole, owner.parts[owner.rank])).reshape(-1)[
        part.start : part.stop
    ]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.stack([positions[[0, *edges]], positions[[*edges - 1, -1]] + 1], axis=1).astype(
        np.int64
    )


# ----------------------------------------------------------------------------------------- overlaps


def overlap(have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the numbers that two arrays have in common.

    Args:    have, want: their runs; no run of an array overlaps another of the same.
    Returns: (n, 3) int64: offset in the one, offset in the other, length; each row is one copy of
    numbers.
    """
    if not len(have) or not len(want) or have.min() >= want.max() or want.min() >= have.max():
        return np.empty((0, 3), np.int64)
    if np.array_equal(have, want):
        return np.array([[0, 0, (have[:, 1] - have[:, 0]).sum()]], np.int64)
    edges = np.unique(np.concatenate([have, want]))
    starts = edges[:-1]
    lengths = np.diff(edges)
    offsets = np.stack([_offsets(have, starts), _offsets(want, starts), lengths], axis=1)
    return _joined(offsets[(offsets[:, 0] >= 0) & (offsets[:, 1] >= 0)])


def _offsets(runs: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the offsets of positions in an array of these runs; -1 for positions that it does not
    have."""
    if not len(runs):
        return np.full(len(positions), -1, np.int64)
    begins = np.cumsum(runs[:, 1] - runs[:, 0]) - (runs[:, 1] - runs[:, 0])
    order = np.argsort(runs[:, 0])
    found = order[np.maximum(np.searchsorted(runs[order, 0], positions, side="right") - 1, 0)]
    inside = (runs[found, 0] <= positions) & (positions < runs[found, 1])
    return np.where(inside, begins[found] + positions - runs[found, 0], -1)


def _joined(copies: np.ndarray) -> np.ndarray:
    """Return the copies with neighbouring ones joined: each that begins where the one before
    ends."""
    if len(copies) < 2:
        return copies
    copies = copies[np.argsort(copies[:, 0])]
    goes_on = (np.diff(copies[:, 0]) == copies[:-1, 2]) & (np.diff(copies[:, 1]) == copies[:-1, 2])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    copies[first, 2] = np.add.reduceat(copies[:, 2], first)
    return copies[first]


# ------------------------------------------------------------------------------------------ stripes


def stripes_of(runs: np.ndarray) -> list[list[int]]:
    """Return runs in short form: [start, length, step, count] for each group of runs of one length
    at equal distances."""
    stripes: list[list[int]] = []
    for start, stop in runs.tolist():
        if stripes and stripes[-1][1] == stop - start:
            first, _, step, count = last = stripes[-1]
            if count == 1 or start == first + step * count:
                last[2] = start - first if count == 1 else step
                last[3] = count + 1
                continue
        stripes.append([start, stop - start, 0, 1])
    return stripes


def runs_of(stripes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the runs of stripes: the inverse of stripes_of."""
    starts = [
        start + step * np.arange(count)[:, None] + [0, length]
        for start, length, step, count in stripes
    ]
    return np.concatenate([np.empty((0, 2), np.int64), *starts])
