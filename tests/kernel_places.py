"""Where a kernel test runs, and kernels with a planted mistake."""

import numpy as np
import pytest
from minidist.kernels import on_cpu
from minidist.kernels.loader import HERE, Source

from minidist.backend import to_device, to_host

needs_compiler = pytest.mark.skipif(on_cpu.compiler() is None, reason="no C++ compiler (g++) on this machine")
PLACES = [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)]


def there(place, *arrays):
    """The arrays on the CPU build's side or on the GPU."""
    return tuple(to_device(array, place) for array in arrays)


def wide(array):
    """A result in float64 on the host."""
    return to_host(array).astype(np.float64)


def planted(folder, source, kernels, *changes):
    """The source with some words replaced, each (words, other words, how many times they stand there)."""
    text = (HERE / source.path).read_text()
    for old, new, times in changes:
        assert text.count(old) == times, f"{old!r} stands {text.count(old)} times in {source.path.name}"
        text = text.replace(old, new)
    path = folder / source.path.name
    path.write_text(text)
    return Source(path, kernels)
