"""The base of all optimizers: state for each tensor, and an update that reads memory once.

An update is a dozen passes of simple arithmetic. Over whole tensors, each pass would read all data
from main memory again. So an optimizer runs all passes on one block, which stays in the cache,
before the next block. A step allocates no array as large as a tensor. It optimizes objects with
`.data` and `.grad`: Parameters, or flat shards of many (ZeRO).
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from minidist.device import account, backend
from minidist.device.backend import (
    LOW_PRECISION,
    Array,
    array_module,
    dtype_name,
    is_array,
    narrow,
    on_host,
    widen,
)
from minidist.errors import ConfigError, DataError, DtypeError, ShapeError

# elements, 256 KiB in float32: data, gradient, two states and scratch fit the outer caches
BLOCK = 65536
DEVICE_BLOCK = 1 << 22  # larger on a GPU, where a launch costs more than reading memory


class Optimizable(Protocol):
    """Weights and their gradient. An attribute `store`, if set, is the StateStore of all tensors of
    an optimizer."""

    @property
    def data(self) -> Array:
        """Return the weights, contiguous."""

    @property
    def grad(self) -> Array | None:
        """Return the gradient, of the weights' shape; None if there is none."""


@dataclass(frozen=True)
class WholeParameter:
    """A whole parameter as a decay rule sees it: the same on every plan, however its numbers are
    divided.

    A rule chooses by name, shape and dtype. The numbers are not there: `data` reads as NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @staticmethod
    def of(weights: Optimizable, name: str) -> "WholeParameter":
        """Return the description of a tensor of an optimizer: a parameter, a master or a piece of
        one."""
        parameter: Any = getattr(weights, "parameter", weights)
        shape = (
            weights.data.shape if (whole := getattr(parameter, "whole", None)) is None else whole
        )
        if hasattr(parameter, "whole_name"):
            name = parameter.whole_name(name)
        return WholeParameter(name, shape, weights.data.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> np.ndarray:
        """Return an array of this shape and dtype that takes one element."""
        return np.broadcast_to(np.full((), np.nan, self.dtype), self.shape)

    @property
    def grad(self) -> None:
        """Return None: a rule is asked before the first step."""
        return None


Rule = Callable[[WholeParameter], bool]
"""`rule(parameter)`: whether something is done to a parameter."""


def at_least_two_dims(parameter: WholeParameter) -> bool:
    """Return whether GPT-2's recipe decays this tensor: matrices and tables, but not biases and
    norms."""
    return parameter.ndim >= 2


def learns(weights: Optimizable) -> bool:
    """Return whether requires_grad is on for a parameter, or for the parameter that this is part
    of."""
    return bool(getattr(getattr(weights, "parameter", weights), "requires_grad", True))


@dataclass
class Slot:
    """One tensor under optimization, with its state."""

    weights: Optimizable
    name: str
    decays: bool
    state: dict[str, Array]
    steps: int = 0


class StateStore(Protocol):
    """The storage of tensors and their state between updates, for offloading."""

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Return new state arrays of one tensor, zero, by name; they may be read and written only
        inside walk()."""

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Yield each slot, its arrays in memory until the next is requested; `changes`: writes to
        them are kept."""


@dataclass(frozen=True)
class Step:
    """The numbers of one update of one tensor."""

    count: int  # updates of this tensor, this one included
    lr: float
    scale: float | Array  # gradients are multiplied by it first (clipping, loss scaling)
    decay: float  # weight decay; 0 for a tensor without
    xp: Any

    def scaled(self, g: Array, out: Array, *, factor: float = 1.0) -> None:
        """Write g · scale · factor to out; the product of the numbers is rounded to g's dtype
        first."""
        number = self.scale * factor
        self.xp.multiply(g, number.astype(g.dtype) if is_array(number) else float(number), out=out)


class Option:
    """A number of an optimizer. A new value counts from the next step on.

    Args:    low, below: the value is at least `low`, and less than `below` if that is given.
    Raises:  ConfigError, where a value is set that is out of range.
    """

    def __init__(self, low: float, below: float | None = None) -> None:
        self.low = low
        self.below = below

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, owner: type) -> float:
        value: float = vars(optimizer)[self.name]
        return value

    def __set__(self, optimizer: Any, value: float) -> None:
        vars(optimizer)[self.name] = in_range(optimizer, self.name, value, self.low, self.below)


class Optimizer(ABC):
    """Base of all optimizers. A subclass names its state (`state_names`) and updates a block
    (`update`).

    Its options, `lr` and the others of its constructor, may be changed between two steps. It
    updates the parameters whose requires_grad is on.

    Args:    parameters: Parameters, or flat shards with .data and .grad, in a fixed order; float64
             or float32.
             lr: learning rate; weight_decay: strength; decay: whether it acts on a parameter, which
             it is given whole (WholeParameter), also where this rank has only a part of it.
    Raises:  ConfigError for a value out of range or no parameters; DtypeError for low precision.
    """

    options: tuple[str, ...] = ("lr", "weight_decay")  # the attributes that may be changed
    lr = Option(0.0)
    weight_decay = Option(0.0)
    state_names: tuple[str, ...] = ()
    scratch_blocks = 1  # the number of preallocated blocks that `update` gets

    def __init__(
        self,
        parameters: Iterable[Optimizable],
        lr: float,
        *,
        weight_decay: float = 0.0,
        decay: Rule = at_least_two_dims,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.slots = [self._slot(i, weights, decay) for i, weights in enumerate(parameters)]
        if not self.slots:
            raise ConfigError(
                f"{type(self).__name__}: got no parameters to optimize; pass model.parameters()"
            )
        ((name, count),) = Counter(slot.name for slot in self.slots).most_common(1)
        if count > 1:
            raise ConfigError(
                f"{type(self).__name__}: two tensors have the name {name!r}; give each its own name"
            )
        # with an offload the tensors are StoredPieces, which name their store (chapter 20)
        self._store: StateStore | None = getattr(self.slots[0].weights, "store", None)
        self._scratch: dict[tuple[str, np.dtype], Array] = {}

    def _slot(self, index: int, weights: Optimizable, decay: Rule) -> Slot:
        """Return the slot of one tensor, with zero state."""
        data = weights.data
        name = getattr(weights, "name", "") or str(index)
        if data.dtype in LOW_PRECISION or data.dtype.kind != "f":
            raise DtypeError(
                f"{type(self).__name__}: {name} is {dtype_name(data.dtype)}; "
                f"optimize float32 or float64 master weights instead"
            )
        if (store := getattr(weights, "store", None)) is not None:
            state = store.make_state(weights, self.state_names)
        else:
            new = partial(array_module(data).zeros, data.shape, data.dtype)
            state = {key: account.current().hold(new(), "optimizer") for key in self.state_names}
        return Slot(weights, name, bool(decay(WholeParameter.of(weights, name))), state)

    def options_now(self) -> dict[str, Any]:
        """Return the options by name, as they are at present."""
        return {name: getattr(self, name) for name in self.options}

    def walk(self, *, changes: bool = True) -> Iterator[Slot]:
        """Yield the slots, each with its arrays in memory until the next is requested; `changes`:
        writes to them are kept."""
        return (
            iter(self.slots)
            if self._store is None
            else self._store.walk(self.slots, changes=changes)
        )

    # ----------------------------------------------------------------------------------- the update

    def step(
        self,
        lr: float | None = None,
        scale: float | Array = 1.0,
        *,
        roundings: Iterable[tuple[Array, Array]] = (),
    ) -> None:
        """Update every tensor that has a gradient and whose requires_grad is on, in place.

        Args:    lr: the learning rate of this step; default: the optimizer's.
                 scale: a factor for every gradient, which is not overwritten: a number, or a GPU's
                 array without dims.
                 roundings: (master, weights) pairs; after the update each master is rounded into
                 its weights.
        Raises:  ShapeError if a gradient does not fit; ConfigError if weights are not contiguous.
        """
        rate = float(self.lr if lr is None else lr)
        for slot in self.walk():
            data = slot.weights.data
            gradient = slot.weights.grad
            if gradient is None or not learns(slot.weights):
                continue
            self._check(slot, data, gradient)
            slot.steps += 1
            xp = array_module(data)
            step = Step(slot.steps, rate, scale, self.weight_decay if slot.decays else 0.0, xp)
            arrays = (data, gradient, *slot.state.values())
            for p, g, *state in blocks(arrays, BLOCK if on_host(data) else DEVICE_BLOCK):
                if g.dtype != p.dtype:
                    g = widen(g)  # gradients in low precision beside float32 master weights
                self.update(p, g, state, self._scratch_like(xp, p), step)
        for master, weights in roundings:
            narrow(master, weights.dtype, weights)

    def step_of(self, tensors: Iterable[Optimizable], lr: float | None = None) -> None:
        """Update only these tensors, as `step` does if there are no others. Args: lr: as step's.
        Raises: as step.
        """
        every = self.slots
        wanted = set(map(id, tensors))
        self.slots = [slot for slot in every if id(slot.weights) in wanted]
        try:
            self.step(lr)
        finally:
            self.slots = every

    def _check(self, slot: Slot, data: Array, gradient: Array) -> None:
        if gradient.shape != data.shape or any(
            array.shape != data.shape for array in slot.state.values()
        ):
            raise ShapeError(
                f"{type(self).__name__}: {slot.name} is {data.shape}, its gradient "
                f"{gradient.shape} and its state {[array.shape for array in slot.state.values()]}; "
                "all must have the same shape"
            )
        if not data.flags.c_contiguous:
            raise ConfigError(
                f"{type(self).__name__}: {slot.name} is not contiguous and cannot be updated in "
                "place; pass contiguous weights"
            )

    def _scratch_like(self, xp: Any, p: Array) -> list[Array]:
        """Return `scratch_blocks` arrays like block p, in the same memory each time."""
        key = (xp.__name__, p.dtype)
        held = self._scratch[key].shape if key in self._scratch else (0, 0)
        if held[0] < self.scratch_blocks or held[1] < len(p):
            room = xp.empty((self.scratch_blocks, len(p)), p.dtype)
            self._scratch[key] = account.current().hold(room, "workspace")
        return [row[: len(p)] for row in self._scratch[key][: self.scratch_blocks]]

    @abstractmethod
    def update(
        self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step
    ) -> None:
        """Update block p and its state by gradient g, in place; all (n,), one dtype. g is not
        written."""

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for slot in self.slots:
            weights: Any = slot.weights
            if hasattr(weights, "zero_grad"):
                weights.zero_grad()
            else:
                weights.grad = None

    # --------------------------------------------------------------------------------------- saving

    def state_arrays(self) -> dict[str, Array]:
        """Return the live state arrays (no copies), "<tensor>/<state>" -> array; offloaded arrays
        have no values here."""
        return {
            f"{slot.name}/{key}": array for slot in self.slots for key, array in slot.state.items()
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return host copies of all state arrays, and "<tensor>/steps" (int64, without dims), for a
        checkpoint."""
        arrays = {
            f"{slot.name}/{key}": np.array(backend.to_host(array))
            for slot in self.walk(changes=False)
            for key, array in slot.state.items()
        }
        return arrays | {
            f"{slot.name}/steps": np.asarray(slot.steps, np.int64) for slot in self.slots
        }

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy a `state_dict`. On error nothing changes. Raises: DataError if names, shapes or
        dtypes differ."""
        live = self.state_arrays()
        steps = {f"{slot.name}/steps": slot for slot in self.slots}
        wrong = sorted(arrays.keys() ^ (live.keys() | steps.keys()))
        if wrong:
            kind = "lacks" if wrong[0] not in arrays else "has an unexpected"
            raise DataError(
                f"{type(self).__name__}: the saved state {kind} {wrong[0]!r} ({len(wrong)} names "
                "differ); it is from another optimizer or model"
            )
        for name, target in live.items():
            saved = arrays[name]
            if (saved.shape, saved.dtype) != (target.shape, target.dtype):
                raise DataError(
                    f"{type(self).__name__}: saved {name} is {saved.dtype} {saved.shape}, "
                    f"expected {target.dtype} {target.shape}"
                )
        for slot in self.walk():
            for key, target in slot.state.items():
                target[...] = backend.to_device(
                    arrays[f"{slot.name}/{key}"], backend.device_of(target)
                )
        for name, slot in steps.items():
            slot.steps = int(arrays[name])


def blocks(arrays: Iterable[Array], size: int) -> Iterator[list[Array]]:
    """Yield arrays of the same shape, flattened, as matching blocks of at most `size` elements;
    views where contiguous."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, len(flat[0]), size):
        yield [array[start : start + size] for array in flat]


def in_range(
    optimizer: object, name: str, value: float, low: float, below: float | None = None
) -> float:
    """Return `value` if low <= value < below. Raises: ConfigError otherwise (also for NaN)."""
    if not low <= value or (below is not None and not value < below) or value == float("inf"):
        limits = f"at least {low:g}" + (f" and below {below:g}" if below is not None else "")
        raise ConfigError(f"{type(optimizer).__name__}: {name} is {value!r}; it must be {limits}")
    return float(value)


def add_decay(g: Array, p: Array, spare: Array, step: Step) -> None:
    """Add decay p to g: weight decay as a term of the loss, decay/2 |p|²."""
    if step.decay:
        step.xp.multiply(p, step.decay, out=spare)
        g += spare
