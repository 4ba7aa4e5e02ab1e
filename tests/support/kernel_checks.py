"""Provide what tests of kernels share: dtypes and what one rounding loses, differences, and the one
allowed skip."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minidist.device.backend import to_device, to_host
from minidist.errors import KernelError
from minidist.kernels import on_cpu
from minidist.kernels.compile import sources
from minidist.kernels.loader import Source

needs_compiler = pytest.mark.skipif(
    on_cpu.compiler() is None, reason="no C++ compiler (g++) on this machine"
)

# The same check on the CPU build, and with `pytest -m gpu` on a GPU.
on_each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)],
)

# Half a unit in the last place, and for float32 several: its sums and exp round too.
KINDS = {
    "float32": (np.float32, 1e-6),
    "float16": (np.float16, 5e-4),
    "bfloat16": (ml_dtypes.bfloat16, 4e-3),
}


def build_all(first: int) -> None:
    """Every kernel of the CPU build, from the `first` on; one that does not compile is for its own
    tests to tell."""
    every = sources()
    for number in range(len(every)):
        with contextlib.suppress(KernelError):
            on_cpu.build(every[(first + number) % len(every)])


def close(got: Any, want: np.ndarray, bound: float, scale: float | None = None) -> None:
    """Within `bound`, relative to the number or to the largest of all (`scale`); NaN only where NaN
    is wanted."""
    scale = float(np.abs(want[np.isfinite(want)]).max(initial=0.0)) if scale is None else scale
    np.testing.assert_allclose(
        np.asarray(to_host(got)).astype(np.float64), want, rtol=bound * 1.01, atol=bound * scale
    )


def there(device: str, *arrays: Any) -> list[Any]:
    """Copies on `device`; None stays None."""
    return [None if array is None else to_device(array.copy(), device) for array in arrays]


def check_gradient(
    forward: Callable[..., np.ndarray],
    gradients: Sequence[np.ndarray],
    arrays: Sequence[np.ndarray],
    dy: np.ndarray,
    step: float = 1e-6,
) -> None:
    """Each gradient of sum(forward(*arrays) * dy) against differences, number by number."""
    for which, (array, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        for place in np.ndindex(array.shape):
            kept = array[place]
            sums = []
            for moved in (kept + step, kept - step):
                array[place] = moved
                sums.append(float((forward(*arrays) * dy).sum()))
            array[place] = kept
            np.testing.assert_allclose(
                gradient[place],
                (sums[0] - sums[1]) / (2 * step),
                rtol=1e-5,
                atol=1e-7,
                err_msg=f"argument {which} at {place}",
            )


def wide(array: Any) -> np.ndarray:
    """A result in float64 on the host."""
    return np.asarray(to_host(array)).astype(np.float64)


def planted(
    folder: Path, source: Source, kernels: Sequence[str], change: tuple[str, str, int]
) -> Source:
    """The source with a mistake in it: some words replaced by others, and how many times they stand
    there."""
    text = source.path.read_text(encoding="utf-8")
    (old, new, times) = change
    assert text.count(old) == times, f"{old!r} stands {text.count(old)} times in {source.path.name}"
    path = folder / source.path.name
    path.write_text(text.replace(old, new), encoding="utf-8")
    return Source(path, kernels)
