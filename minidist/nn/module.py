"""Module: a function with parameters, made of smaller modules.

    class Twice(Module):
        def __init__(self, width):
            self.inner = Linear(width, width)

        def forward(self, x):
            return self.inner(self.inner(x))

    model = Twice(8)
    model.initialize(seed=0)     # parameters have shapes before, values after

Any attribute that is a Module, a Parameter, or a list, tuple or dict of them belongs to the module.
The order is that of assignment.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from minidist.autograd.recompute import Kept, recompute
from minidist.autograd.tensor import Parameter, Tensor
from minidist.device.backend import Array, device_of, to_device, to_host
from minidist.errors import DataError
from minidist.nn import hooks
from minidist.nn.hooks import HookHandle, Hooks
from minidist.nn.weights import Weight

M = TypeVar("M", bound="Module")


class Module(ABC):
    """Base of all modules. A subclass assigns its parts in `__init__` and computes in `forward`."""

    training = True
    path = ""  # dotted path in the whole model, set by assign_names or initialize
    # whether backward computes the inside again (parallel/memory/activations.py)
    recomputed = False
    # keeps its input until then
    keeper: "Callable[[str, tuple[Any, ...], Array], Kept] | None" = None
    # made for the first hook, so that a module without hooks has no overhead
    _hooks: Hooks | None = None

    @abstractmethod
    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the function of the module. Call the module itself, so that its hooks run."""

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        """Return the result of forward, with the hooks run around it."""
        result: Tensor
        if self._hooks is not None:
            result = hooks.call(self, self._hooks, args, options)
        elif self.recomputed:
            result = self.run(*args, **options)
        else:
            result = self.forward(*args, **options)
        return result

    def run(self, *args: Any, **options: Any) -> Any:
        """Return the result of forward, without hooks; a recomputed module keeps no arrays from
        inside."""
        if not self.recomputed:
            return self.forward(*args, **options)
        keep = None if self.keeper is None else partial(self.keeper, self.path, args[1:])
        return recompute(self.forward, *args, keep=keep, **options)

    # ------------------------------------------------------------------------------------ its parts

    def children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield (name, module) of the direct parts: "norm", "blocks.0", …; in order of
        assignment."""
        return ((name, part) for name, part in self._parts() if not isinstance(part, Parameter))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield (dotted path, module) of this module (its path is the prefix) and of all below,
        each once."""
        return ((path, module) for path, module, _ in self._walk(prefix))

    def _walk(self, prefix: str) -> Iterator[tuple[str, "Module", list[tuple[str, Any]]]]:
        """Yield (dotted path, module, its direct parts) of this module and of all below, each
        once."""
        seen: set[int] = set()
        ahead: list[tuple[str, Module]] = [(prefix, self)]  # the next one last
        while ahead:
            path, module = ahead.pop()
            if id(module) not in seen:
                seen.add(id(module))
                parts = module._parts()
                yield path, module, parts
                ahead += [
                    (_join(path, name), part)
                    for name, part in reversed(parts)
                    if not isinstance(part, Parameter)
                ]

    def modules(self) -> Iterator["Module"]:
        """Return this module and all below, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted path, parameter), each parameter once, under its first path: tied weights
        appear once."""
        seen: set[int] = set()
        for path, _, parts in self._walk(prefix):
            for name, part in parts:
                if isinstance(part, Parameter) and id(part) not in seen:
                    seen.add(id(part))
                    yield _join(path, name), part

    def parameters(self) -> Iterator[Parameter]:
        """Return each parameter once, in the order of named_parameters, which is the same on every
        rank."""
        return (parameter for _, parameter in self.named_parameters())

    def _parts(self) -> list[tuple[str, Any]]:
        """Return (name, Module or Parameter) of the direct parts, also those in lists, tuples and
        dicts."""
        parts: list[tuple[str, Any]] = []
        for name, value in vars(self).items():
            if _is_part(type(value)):
                parts.append((name, value))
            elif isinstance(value, (list, tuple, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                parts += [(f"{name}.{key}", part) for key, part in items if _is_part(type(part))]
        return parts

    # ------------------------------------------------------------------------------------ its state

    def assign_names(self, prefix: str = "") -> None:
        """Set the dotted paths of modules and the names of parameters in the whole model; all begin
        with `prefix`."""
        for path, module in self.named_modules(prefix):
            module.path = path
        for name, parameter in self.named_parameters(prefix):
            parameter.name = name

    def initialize(self, seed: int, *, device: str = "cpu", prefix: str = "") -> None:
        """Draw all declared weights on "cpu" or "cuda". The values depend only on name and seed.

        Args:    prefix: the path of this module in the whole model; a part then draws the same
                 values as in the whole.
        Raises:  DeviceError, ConfigError for a device that is not there.
        """
        self.assign_names(prefix)
        for parameter in self.parameters():
            if isinstance(parameter, Weight):
                parameter.data = parameter.draw(seed, device=device)
                parameter.seed = seed

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters on the host, by dotted path."""
        return {
            name: np.array(to_host(parameter.data)) for name, parameter in self.named_parameters()
        }

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays, by dotted path, into the parameters, in place if they have values. On error
        nothing changes.

        Raises:  DataError if a name is missing or unknown, or a shape or dtype differs;
                 ConfigError if a strategy keeps the numbers elsewhere (Parameter.kept_by).
        """
        mine = dict(self.named_parameters())
        model = type(self).__name__
        missing = sorted(mine.keys() - arrays.keys())
        unknown = sorted(arrays.keys() - mine.keys())
        if missing or unknown:
            raise DataError(
                f"{model}: the saved weights do not fit this model: missing {_some(missing)}, "
                f"unknown {_some(unknown)}; load them into the model they were saved from"
            )
        for name, parameter in mine.items():
            parameter.check_assignable()
            array = arrays[name]
            if array.shape != parameter.shape or array.dtype != parameter.dtype:
                raise DataError(
                    f"{model}: saved {name} is {array.dtype} {array.shape}, the model needs "
                    f"{parameter.dtype} {parameter.shape}; cast or build the model they were "
                    "saved from"
                )
        for name, parameter in mine.items():
            parameter.name = parameter.name or name
            if isinstance(parameter, Weight) and not parameter.drawn:
                parameter.data = np.array(arrays[name], order="C")
            else:
                parameter.data[...] = to_device(arrays[name], device_of(parameter.data))

    def train(self: M, mode: bool = True) -> M:
        """Switch training behaviour (dropout) on or off, here and below. Returns: self."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: M) -> M:
        """Switch training behaviour off: train(False)."""
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: dropout is off, here and below; at its end each module is as it was."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.zero_grad()

    # ------------------------------------------------------------------------------------ its hooks

    def register_forward_pre_hook(
        self, hook: Callable[["Module", tuple[Any, ...]], Any]
    ) -> HookHandle:
        """Call `hook(module, args)` before forward. A result other than None replaces the
        positional arguments."""
        return self._add_hook("forward_pre", hook)

    def register_forward_hook(
        self, hook: Callable[["Module", tuple[Any, ...], Any], Any]
    ) -> HookHandle:
        """Call `hook(module, args, result)` after forward. A result other than None replaces that
        of forward."""
        return self._add_hook("forward", hook)

    def register_backward_pre_hook(self, hook: Callable[["Module"], None]) -> HookHandle:
        """Call `hook(module)` in backward before any node of the module runs; an outer module's
        before an inner's.

        Register backward hooks before the forward. They run once for each call of the module that
        backward reaches.
        """
        return self._add_hook("backward_pre", hook)

    def register_backward_hook(self, hook: Callable[["Module"], None]) -> HookHandle:
        """Call `hook(module)` in backward when all nodes of this call of the module have run; inner
        modules' first.

        Deferred gradients of weights arrive later. A weight used elsewhere too may wait for more; see
        Parameter.hooks.
        """
        return self._add_hook("backward", hook)

    def _add_hook(self, kind: str, hook: Callable[..., Any]) -> HookHandle:
        if self._hooks is None:
            self._hooks = defaultdict(list)
        self._hooks[kind].append(hook)
        return HookHandle(self._hooks[kind], hook)


_PARTS = frozenset((Module, Parameter))


def _is_part(kind: type) -> bool:
    """Return whether a class is of modules or parameters. (issubclass of an abstract class is slow:
    it answers in Python.)"""
    return not _PARTS.isdisjoint(kind.__mro__)


def _join(path: str, name: str) -> str:
    """Return the dotted path of the part `name` of the module at `path`."""
    return f"{path}.{name}" if path else name


def _some(names: list[str]) -> str:
    """Return "none", or the first three names and the number of the others."""
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if names
        else "none"
    )
