"""What every optimizer shares: state beside each tensor, and an update that walks through memory once.

An update is a dozen passes of simple arithmetic. Run over whole tensors each pass would fetch everything from main
memory again; so an optimizer runs all of its passes on one block of BLOCK elements, which stays in the cache, before it
takes the next. Nothing as large as a tensor is allocated in a step.

What is optimized is anything with `.data` and `.grad`: a Parameter, or a flat shard of many (ZeRO).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from minidist.device import account
from minidist.device.backend import (
    LOW_PRECISION,
    Array,
    array_module,
    device_of,
    dtype_name,
    is_array,
    narrow,
    to_device,
    to_host,
    widen,
)
from minidist.errors import ConfigError, DataError, DtypeError, ShapeError

BLOCK = 65536           # elements, 256 KiB in float32: data, gradient, two states and scratch fit the outer caches
DEVICE_BLOCK = 1 << 22  # on a GPU a launch costs more than a trip to memory


class Optimizable(Protocol):
    """Weights and their gradient: arrays of one shape, data contiguous; grad is None where there is none.

    An attribute `home`, where there is one, is the StateStore of all tensors of an optimizer.
    """

    @property
    def data(self) -> Array: ...

    @property
    def grad(self) -> Array | None: ...


def at_least_two_dims(weights: Optimizable) -> bool:
    """Which tensors GPT-2's recipe decays: matrices and tables, but not biases and norms."""
    return bool(weights.data.ndim >= 2)


@dataclass
class Slot:
    """One tensor under optimization, with its state."""

    weights: Optimizable
    name: str
    decays: bool
    state: dict[str, Array]
    steps: int = 0


class StateStore(Protocol):
    """Where tensors and their state lie between updates, if not beside each other (offloading)."""

    def make_state(self, weights: Any, names: tuple[str, ...]) -> dict[str, Array]:
        """Zero state arrays of one tensor, by name; read and written only inside walk()."""
        ...

    def walk(self, slots: Sequence[Slot], *, changes: bool = True) -> Iterator[Slot]:
        """Each slot in turn, its arrays there from when it is yielded until the next is asked for.

        With `changes` what is written into them lasts.
        """
        ...


@dataclass(frozen=True)
class Step:
    """The numbers of one update of one tensor; arrays multiply faster by `constant(x)` than by x."""

    count: int                 # how many updates this tensor has had, this one included
    lr: float
    scale: float | Array       # gradients are multiplied by it first (clipping, loss scaling)
    decay: float               # 0 for a tensor that does not decay
    xp: Any
    dtype: np.dtype
    constants: dict[float, Array] = field(default_factory=dict)

    def constant(self, value: float | Array) -> Array:
        """`value` as an array of no dims: NumPy would convert a Python number anew, 0.4 µs, in thousands of calls."""
        if is_array(value):
            return value.astype(self.dtype)
        if value not in self.constants:
            self.constants[value] = self.xp.asarray(value, self.dtype)
        return self.constants[value]


class Optimizer(ABC):
    """Base: slots, blocks, and saving. A rule says what it keeps (`state_names`) and how a block changes (`update`).

    Args:    parameters: Parameters, or flat shards with .data and .grad, in a fixed order; float64 or float32.
             lr: learning rate; `step` may give another.
             weight_decay: strength; decay: which tensors it acts on.
    Raises:  ConfigError for a value out of range or no parameters; DtypeError for low precision.
    """

    state_names: tuple[str, ...] = ()
    scratch_blocks = 1         # preallocated blocks handed to `update`

    def __init__(self, parameters: Iterable[Optimizable], lr: float, *, weight_decay: float = 0.0,
                 decay: Callable[[Optimizable], bool] = at_least_two_dims) -> None:
        self.lr = in_range(self, "lr", lr, 0.0)
        self.weight_decay = in_range(self, "weight_decay", weight_decay, 0.0)
        self.slots = [self._slot(i, weights, decay) for i, weights in enumerate(parameters)]
        if not self.slots:
            raise ConfigError(f"{type(self).__name__}: no parameters to optimize; pass model.parameters()")
        names = [slot.name for slot in self.slots]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{type(self).__name__}: two tensors are called {twice!r}; each needs a name of its own")
        self._home: StateStore | None = getattr(self.slots[0].weights, "home", None)
        self._scratch: dict[tuple[str, np.dtype], Array] = {}

    def _slot(self, index: int, weights: Optimizable, decay: Callable[[Optimizable], bool]) -> Slot:
        data = weights.data
        name = getattr(weights, "name", "") or str(index)
        if data.dtype in LOW_PRECISION or data.dtype.kind != "f":
            raise DtypeError(f"{type(self).__name__}: {name} is {dtype_name(data.dtype)}; "
                             f"optimize float32 or float64 master weights instead")
        home: StateStore | None = getattr(weights, "home", None)
        if home is not None:
            return Slot(weights, name, bool(decay(weights)), home.make_state(weights, self.state_names))
        xp, memory = array_module(data), account.current()
        state = {key: memory.hold(xp.zeros(data.shape, data.dtype), "optimizer") for key in self.state_names}
        return Slot(weights, name, bool(decay(weights)), state)

    def _walk(self, *, changes: bool = True) -> Iterator[Slot]:
        """The slots, each with its arrays there."""
        return iter(self.slots) if self._home is None else self._home.walk(self.slots, changes=changes)

    # ------------------------------------------------------------------------------------------------ the update

    def step(self, lr: float | None = None, scale: float | Array = 1.0, *,
             roundings: Iterable[tuple[Array, Array]] = ()) -> None:
        """Update every tensor that has a gradient, in place.

        Args:    lr: this step's learning rate, for schedules; scale: multiplies every gradient (without touching it): a
                 number, or on a GPU an array of no dims there, which nobody has to wait for.
                 roundings: (master, weights): then weights become the masters in their own dtype.
        Raises:  ShapeError if a gradient does not fit; ConfigError if weights are not contiguous.
        """
        self.move_all(self.lr if lr is None else lr, scale)
        for master, weights in roundings:
            narrow(master, weights.dtype, weights)

    def move_all(self, lr: float, scale: float | Array) -> None:
        """The update of every tensor that has a gradient, block by block."""
        shared: dict[Any, Step] = {}         # tensors of one kind share their constants
        for slot in self._walk():
            data, gradient = slot.weights.data, slot.weights.grad
            if gradient is None:
                continue
            self._check(slot, data, gradient)
            slot.steps += 1
            xp = array_module(data)
            key = (slot.steps, slot.decays, xp, data.dtype)
            if key not in shared:
                decay = self.weight_decay if slot.decays else 0.0
                shared[key] = Step(slot.steps, lr, scale, decay, xp, data.dtype)
            arrays = (data, gradient, *slot.state.values())
            for p, g, *state in blocks(arrays, BLOCK if xp is np else DEVICE_BLOCK):
                if g.dtype != p.dtype:
                    g = widen(g)             # gradients in low precision beside float32 master weights
                self.update(p, g, state, self._scratch_like(xp, p), shared[key])

    def _check(self, slot: Slot, data: Array, gradient: Array) -> None:
        if gradient.shape != data.shape or any(array.shape != data.shape for array in slot.state.values()):
            raise ShapeError(f"{type(self).__name__}: {slot.name} is {data.shape}, its gradient {gradient.shape} and "
                             f"its state {[array.shape for array in slot.state.values()]}; they must agree")
        if not data.flags.c_contiguous:
            raise ConfigError(f"{type(self).__name__}: {slot.name} is not contiguous and cannot be updated in place; "
                              f"pass contiguous weights")

    def _scratch_like(self, xp: Any, p: Array) -> list[Array]:
        """`scratch_blocks` arrays like block p, the same memory each time."""
        key = (xp.__name__, p.dtype)
        if key not in self._scratch or self._scratch[key].shape[1] < len(p):
            room = xp.empty((self.scratch_blocks, len(p)), p.dtype)
            self._scratch[key] = account.current().hold(room, "workspace")
        return [row[:len(p)] for row in self._scratch[key]]

    @abstractmethod
    def update(self, p: Array, g: Array, state: list[Array], scratch: list[Array], step: Step) -> None:
        """Change block p and its state by gradient g; all (n,), one dtype. g is only read."""

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for slot in self.slots:
            weights: Any = slot.weights
            if hasattr(weights, "zero_grad"):
                weights.zero_grad()
            else:
                weights.grad = None

    # --------------------------------------------------------------------------------------------------- saving

    def state_arrays(self) -> dict[str, Array]:
        """The live state arrays (no copies), "<tensor>/<state>" -> array; offloaded ones have no values here."""
        return {f"{slot.name}/{key}": array for slot in self.slots for key, array in slot.state.items()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies on the host of all state arrays, and "<tensor>/steps" (int64, no dims): what a checkpoint needs."""
        arrays = {f"{slot.name}/{key}": np.array(to_host(array)) for slot in self._walk(changes=False)
                  for key, array in slot.state.items()}
        return arrays | {f"{slot.name}/steps": np.asarray(slot.steps, np.int64) for slot in self.slots}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` of an optimizer of the same kind and tensors returned; nothing changes on error.

        Raises: DataError if names, shapes or dtypes differ.
        """
        live, steps = self.state_arrays(), {f"{slot.name}/steps": slot for slot in self.slots}
        wrong = sorted(arrays.keys() ^ (live.keys() | steps.keys()))
        if wrong:
            kind = "lacks" if wrong[0] not in arrays else "has an unexpected"
            raise DataError(f"{type(self).__name__}: the saved state {kind} {wrong[0]!r} ({len(wrong)} names differ); "
                            f"it comes from another optimizer or model")
        for name, target in live.items():
            saved = arrays[name]
            if saved.shape != target.shape or saved.dtype != target.dtype:
                raise DataError(f"{type(self).__name__}: saved {name} is {saved.dtype} {saved.shape}, "
                                f"expected {target.dtype} {target.shape}")
        for slot in self._walk():
            for key, target in slot.state.items():
                target[...] = to_device(arrays[f"{slot.name}/{key}"], device_of(target))
        for name, slot in steps.items():
            slot.steps = int(arrays[name])


def blocks(arrays: Iterable[Array], size: int) -> Iterator[list[Array]]:
    """Arrays of one shape, flattened, as matching blocks of at most `size` elements; views where contiguous."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, len(flat[0]), size):
        yield [array[start:start + size] for array in flat]


def in_range(optimizer: object, name: str, value: float, low: float, below: float | None = None) -> float:
    """`value` if low <= value < below.

    Raises: ConfigError otherwise (also for NaN).
    """
    if not low <= value or (below is not None and not value < below) or value == float("inf"):
        limits = f"at least {low:g}" + (f" and below {below:g}" if below is not None else "")
        raise ConfigError(f"{type(optimizer).__name__}: {name} is {value!r}; it must be {limits}")
    return value


def add_decay(g: Array, p: Array, spare: Array, step: Step) -> None:
    """g += decay p: weight decay as a term of the loss, decay/2 |p|²."""
    if step.decay:
        step.xp.multiply(p, step.constant(step.decay), spare)
        step.xp.add(g, spare, g)
