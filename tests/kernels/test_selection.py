"""The k largest and those of at least a threshold: exactly the reference, ties and NaN too, planted
mistakes caught."""

import numpy as np
import pytest
from kernel_checks import needs_compiler, on_each_device, planted, there

from minidist.device.backend import to_host
from minidist.errors import ConfigError, DtypeError, KernelError
from minidist.kernels import on_cpu
from minidist.kernels import selection as family
from minidist.kernels.selection import (
    KINDS,
    SOURCE,
    VERSIONS,
    at_least,
    at_least_reference,
    top_k,
    top_k_reference,
)


def drawn(count, kind):
    """Many ties, both signs, zeros of both signs, numbers that differ in their last bits alone."""
    rng = np.random.default_rng(count)
    x = rng.integers(-9, 10, count).astype(np.float32)
    x[::3] = rng.normal(size=len(x[::3])) * 10.0 ** rng.integers(-40, 38, len(x[::3]))
    x[1::7] = np.float32(2) + np.arange(len(x[1::7])) * np.float32(2.0**-22)
    x[-1] = -0.0
    return x.astype(kind)


def same(got, x, want):
    indices, values = map(to_host, got)
    assert indices.dtype == np.int32
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(values.astype(np.float64), x.astype(np.float64)[want])


def check(device, kind, count, version, places=(0.0, 0.1, 0.5, 1.0)):
    x = drawn(count, kind)
    (placed,) = there(device, x)
    for k in sorted({max(1, int(count * place)) for place in places}):
        with on_cpu.watch(seed=k):
            same(top_k(placed, k, version=version), x, top_k_reference(x.astype(np.float64), k))


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 77, 1025])
def test_top_k(version, kind, count, device):
    check(device, kind, count, version, (0.0, 0.1, 0.5, 1.0) if count < 1025 else (0.3,))


@on_each_device
@pytest.mark.parametrize("kind", KINDS)
def test_at_least(kind, device):
    x = drawn(1100, kind)
    x[[5, 800]] = np.nan, -np.inf
    (placed,) = there(device, x)
    for threshold in (0.0, 1e-41, 2.0 + 2.0**-23, 8, 1e300):
        with on_cpu.watch(seed=3):
            same(
                at_least(placed, threshold), x, at_least_reference(x.astype(np.float64), threshold)
            )


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_is_the_largest(version, device):
    x = np.full(300, np.inf, np.float32)
    x[[7, 290]] = np.nan
    (placed,) = there(device, x)
    same(top_k(placed, 2, version=version), x, [7, 290])
    same(top_k(placed, 3, version=version), x, [0, 7, 290])
    # NaN of other bits: no larger
    x[[290, 33]] = np.array([0x7FC00001, 0xFFFFFFFF], np.uint32).view(np.float32)
    (placed,) = there(device, x)
    same(top_k(placed, 2, version=version), x, [7, 33])


@needs_compiler
def test_bytes_moved_and_errors():
    x = drawn(2048, np.float32)
    with on_cpu.watch(count=True) as seen:
        top_k(x, 20)
    # state, sums
    tables = [
        4 * 2048,
        0,
        4 * 2048,
        0,
        4 * 2048,
        0,
        4 * 2048,
        0,
        4 * 512,
        2 * 4 * 512 + 2 * 4 * 256,
    ]
    reads = [s.loads.bytes - table for s, table in zip(seen, tables, strict=True)]
    # the second of two is from a cache
    assert reads[:8:2] + reads[8:] == [x.nbytes] * 4 + [2 * x.nbytes, x.nbytes]
    assert seen[-1].stores.bytes == 20 * 8
    for got in (top_k(x, 0), at_least(x[:0], 1.0), at_least(np.ones(3, np.float32), 2.0)):
        assert [part.size for part in got] == [0, 0]
    with pytest.raises(ConfigError, match="from 0 to 2048"):
        top_k(x, 2049)
    with pytest.raises(ConfigError, match="choose 0 or more"):
        at_least(x, np.nan)
    with pytest.raises(DtypeError, match="no kernel for float16"):
        top_k(x[:0].astype(np.float16), 0)


MISTAKES = {
    "no barrier between rounds": (
        2,
        (
            "            values[place] = number;\n        }\n        __syncthreads();",
            "            values[place] = number;\n        }",
            1,
        ),
        "race on warps_",
    ),
    "equal ones have no place": (
        2,
        (
            "place = larger_mine + (equal_mine < taken ? equal_mine : taken)",
            "place = larger_mine",
            1,
        ),
        "race on indices",
    ),
    "the sign decides": (2, ("& 0x7fffffffu", "", 1), None),
    "digits of all": (2, ("if ((size & above) == found) ", "", 1), None),
    "one too few": (1, ("state[1] = k - larger;", "state[1] = k - larger - 1;", 1), None),
}


@pytest.mark.sampled(every=5)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    version, change, says = MISTAKES[mistake]
    kernels = [kernel for kernel in SOURCE.kernels if "bfloat" not in kernel]
    monkeypatch.setattr(family, "SOURCE", planted(tmp_path, SOURCE, kernels, change))
    with pytest.raises(KernelError if says else AssertionError, match=says):
        check("cpu", "float32", 1025, version, (0.5,))
