"""A case of `minidist bench kernels`: one kernel at one size, its rungs (versions), their right
results and least bytes.

    inputs = case.draw(model, Draw(seed, "bfloat16"))           # on the host
    work = case.build(place(inputs, device), version)           # the function that is timed
    rows = sample(case, inputs, rng)                            # checked before it is timed:
    wrong = error(case, inputs, rows, case.want(inputs, rows), work())

The tables of cases are in row_cases.py, flat_cases.py and product_cases.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.bench.step.ranks import Model
from minidist.device import backend
from minidist.device.backend import Array, dtype_name, is_array, to_device, to_host

KIND = "bfloat16"  # dtype of the rungs that take it
EAGER = "PyTorch eager"
COMPILED = "torch.compile"
# ceilings of a case: bandwidth of a copy, rate of matrix products
COPY = "copy"
MATRIX = "matrix"
FLASH = 0.5  # the aim of attention: this share of the speed of PyTorch's flash attention
COPY_SHARE = 0.85  # the aim of all other kernels: this share of the copy bandwidth
_BLOCK = 1 << 24  # numbers drawn at once

# Error of one rounding, relative to the largest number; for float32 the error of a sum of ten
# thousand numbers in a row.
ROUNDING = {"float32": 2e-5, "float16": 5e-4, "bfloat16": 4e-3}

Inputs = dict[str, Any]
"""{name: array, or list of arrays}"""

Outputs = tuple[Array, ...]


def every(values: Iterable[Any]) -> Iterator[Array]:
    """Yield all arrays among values, also those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from every(value)
        elif is_array(value):
            yield value


def once(inputs: Inputs, outputs: Outputs) -> int:
    """Return the bytes of all inputs and outputs: the least that a kernel moves if no input is in a
    cache."""
    return sum(array.nbytes for array in every([*inputs.values(), *outputs]))


def _first(inputs: Inputs) -> Any:
    return next(iter(inputs.values()))


@dataclass(frozen=True)
class KernelCase:
    """A kernel at one size.

    Attributes: name, family     "softmax_gradient", of kernels/softmax.py
                versions         its rungs, from naive to fast
                draw             draw(model, draw) -> the inputs, on the host
                build            build(inputs, version) -> work() -> outputs: a rung over arrays of
                                 any device
                want             want(inputs, rows) -> the right outputs in float64 or integers,
                                 whole or only `rows`
                operations       operations(inputs): number of arithmetic operations, by the
                                 kernel's header
                moved            moved(inputs, outputs): the least bytes
                rows             rows(inputs): number of parts of an output that can be checked
                                 separately
                held             its ceiling, COPY or MATRIX
                flash            whether it has attention's aim, FLASH
                float32          versions that take only float32
                left_out         versions too slow at a step's size, and why
                sampled          number of rows that are checked
                slack            allowed error of an output, in roundings
    """

    name: str
    family: str
    versions: tuple[int, ...]
    draw: Callable[[Model, "Draw"], Inputs]
    build: Callable[[Inputs, int], Callable[[], Outputs]]
    want: Callable[[Inputs, np.ndarray], list[np.ndarray]]
    operations: Callable[[Inputs], float]
    moved: Callable[[Inputs, Outputs], int] = once
    rows: Callable[[Inputs], int] = lambda inputs: len(_first(inputs))
    held: str = COPY
    flash: bool = False
    float32: tuple[int, ...] = ()
    left_out: dict[int, str] = field(default_factory=dict)
    sampled: int = 64
    slack: float = 1.0

    def kind(self, version: int, kind: str) -> str:
        """Return the dtype of a version in a bench of `kind`."""
        return "float32" if version in self.float32 else kind


class Draw:
    """A source of random inputs. Args: seed; kind: default dtype."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.kind = kind

    def normal(self, *shape: int, kind: str | None = None, scale: float = 1.0) -> np.ndarray:
        """Return normal numbers of standard deviation `scale`."""
        array = np.empty(shape, backend.dtype(kind or self.kind))
        flat = array.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            part[...] = scale * self.rng.standard_normal(part.size, np.float32)
        return array

    def integers(self, end: int, *shape: int) -> np.ndarray:
        """Return integers from 0 to end - 1, int64."""
        return self.rng.integers(0, end, shape)


def wide(array: np.ndarray) -> np.ndarray:
    """Return the array in float64."""
    return array.astype(np.float64)


def place(inputs: Inputs, device: str) -> Inputs:
    """Return the inputs on a device; on the host, copies, because some rungs overwrite inputs."""

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(one) for one in value]
        return (
            value
            if not is_array(value)
            else value.copy()
            if device == "cpu"
            else to_device(value, device)
        )

    return {name: there(value) for name, value in inputs.items()}


def sample(case: KernelCase, inputs: Inputs, rng: np.random.Generator) -> np.ndarray:
    """Return the rows to check, in order: the first, the last and random rows between."""
    count = case.rows(inputs)
    if count <= case.sampled:
        return np.arange(count)
    between = rng.choice(np.arange(1, count - 1), case.sampled - 2, replace=False)
    return np.sort(np.concatenate([[0, count - 1], between]))


def error(
    case: KernelCase, inputs: Inputs, rows: np.ndarray, want: list[np.ndarray], outputs: Outputs
) -> float:
    """Return the largest difference between outputs and `want` / the largest number in `want`, in
    units of ROUNDING.

    Returns: inf for a wrong integer, NaN, a wrong size, or a number that was never written (before
             the launch all bits of the memory are ones).
    """
    if len(outputs) != len(want):
        return float("inf")
    return max(
        _error(to_host(output), one, rows, case.rows(inputs))
        for output, one in zip(outputs, want, strict=True)
    )


def _error(got: np.ndarray, want: np.ndarray, rows: np.ndarray, count: int) -> float:
    """Return the error of one output: of the whole output if `want` is whole, else of the rows."""
    if _unwritten(got):
        return float("inf")
    if got.size != want.size and got.size * len(rows) == want.size * count:
        got = got.reshape(count, -1)[rows]
    if got.size != want.size:
        return float("inf")
    got = got.reshape(-1)
    want = want.reshape(-1)
    if want.dtype.kind in "iub":
        return 0.0 if (got == want).all() else float("inf")
    off = float(np.abs(wide(got) - want).max(initial=0.0))
    largest = float(np.abs(want).max(initial=0.0)) or 1.0
    return off / largest / ROUNDING[dtype_name(got.dtype)] if np.isfinite(off) else float("inf")


def _unwritten(array: np.ndarray) -> bool:
    """Return whether some floating-point number has only ones in its bits: the NaN that memory
    holds before the launch."""
    if dtype_name(array.dtype) not in ROUNDING:
        return False
    bits: Any = np.uint32 if array.itemsize == 4 else np.uint16
    return bool((np.ascontiguousarray(array).view(bits) == np.iinfo(bits).max).any())
