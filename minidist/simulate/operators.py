"""The operators and reductions of an array, handed to its array module: `a + b` is
module.elementwise(np.add, …)."""

from typing import Any

import numpy as np

_BINARY: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "rshift": np.right_shift,
}
_COMPARED: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_NAMED = ("sum", "max", "min")


class Operators:
    """The base of a class of arrays with a `module` that has `elementwise` and the reductions."""

    __slots__ = ()
    module: Any

    def __matmul__(self, other: Any) -> Any:
        return self.module.matmul(self, other)

    def __neg__(self) -> Any:
        return self.module.elementwise(np.negative, (self,))

    def clip(self, low: Any, high: Any) -> Any:
        return self.module.elementwise(np.maximum, (self, low))  # one pass, as a clip of numbers


def _binary(ufunc: np.ufunc) -> Any:
    return lambda self, other: self.module.elementwise(ufunc, (self, other))


def _reversed(ufunc: np.ufunc) -> Any:
    return lambda self, other: self.module.elementwise(ufunc, (other, self))


def _in_place(ufunc: np.ufunc) -> Any:
    return lambda self, other: self.module.elementwise(ufunc, (self, other), self)


def _named(name: str) -> Any:
    return lambda self, *args, **options: getattr(self.module, name)(self, *args, **options)


for _name, _ufunc in _BINARY.items():
    setattr(Operators, f"__{_name}__", _binary(_ufunc))
    setattr(Operators, f"__r{_name}__", _reversed(_ufunc))
    setattr(Operators, f"__i{_name}__", _in_place(_ufunc))
for _name, _ufunc in _COMPARED.items():
    setattr(Operators, f"__{_name}__", _binary(_ufunc))
for _name in _NAMED:
    setattr(Operators, _name, _named(_name))
