"""Casts with scale and amax: bit for bit what ml_dtypes rounds to, at every exponent, tie and end
of a format."""

import ml_dtypes
import numpy as np
import pytest
from kernel_checks import needs_compiler, on_each_device, there

from minidist.device.backend import to_host
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.casts import EXPONENT_BITS, TARGETS, VERSIONS, cast, cast_reference, restore
from minidist.parallel.precision.float8 import to_float8

PAIRS = [(source, target) for source, targets in TARGETS.items() for target in targets]


def hard(source, target):
    """Codes of the target, the middles between neighbours, a bit to either side; ends, tiny
    numbers, inf, NaN."""
    bits = (
        np.arange(256, dtype=np.uint8)
        if target in EXPONENT_BITS
        else np.arange(0, 65536, 67, dtype=np.uint16)
    )
    with np.errstate(invalid="ignore"):  # signalling NaN codes
        codes = bits.view(target).astype(np.float64)
    codes = np.sort(codes[np.isfinite(codes)])
    ties = np.concatenate([codes, codes[:-1] / 2 + codes[1:] / 2]).astype(np.float32)
    near = [np.nextafter(ties, np.float32(end), dtype=np.float32) for end in (np.inf, -np.inf)]
    ends = np.array(
        [
            0,
            -0.0,
            1e-45,
            -1e-38,
            448,
            464,
            465,
            57344,
            61440,
            65504,
            65520,
            1e38,
            -3e38,
            np.inf,
            -np.inf,
            np.nan,
        ],
        np.float32,
    )
    with np.errstate(over="ignore"):
        return np.concatenate([ties, *near, ends]).astype(source)


def same_bits(got, want):
    got = got.view(want.dtype)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    unsigned = f"uint{8 * want.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


@pytest.mark.parametrize("target", EXPONENT_BITS)
def test_the_reference_is_that_of_fp8_training(target):
    x = hard("float32", target)
    with np.errstate(over="ignore", invalid="ignore"):
        same_bits(cast_reference(x, target, 0.5)[0], to_float8(x, np.dtype(target), 0.5))


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bits(version, source, target, device):
    x = hard(source, target)[:-1]  # without NaN, so that amax is a number
    for numbers, scale in ((x[:-2], None), (x, 1.0), (np.append(x, np.nan).astype(source), 3.7)):
        placed, factor = there(
            device, numbers, None if scale is None else np.array([scale], np.float32)
        )
        y, amax = cast(placed, target, factor, version=version)
        want, top = cast_reference(numbers, target, scale or 1.0)
        same_bits(to_host(y), want)
        np.testing.assert_array_equal(to_host(amax), [top])


@on_each_device
@pytest.mark.parametrize("target", EXPONENT_BITS)
def test_restoring_is_exact(target, device):
    codes = np.arange(256, dtype=np.uint8)
    placed, scale = there(device, codes, np.array([0.25], np.float32))
    np.testing.assert_array_equal(
        to_host(restore(placed, target)), codes.view(target).astype(np.float32)
    )
    np.testing.assert_array_equal(
        to_host(restore(placed, target, scale)), codes.view(target).astype(np.float32) * 4
    )
    narrow = to_host(restore(placed, target, scale, kind="bfloat16"))
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        narrow.astype(np.float32), codes.view(target).astype(np.float32) * 4
    )


@needs_compiler
def test_bytes_moved_and_errors():
    x = np.ones(4096, np.float32)
    for version in VERSIONS:
        with on_cpu.watch(count=True) as seen:
            cast(x, "float8_e4m3fn", version=version)
        assert seen[0].loads.bytes >= x.nbytes
        assert seen[0].loads.bytes - x.nbytes <= 4 * 4096  # shared memory and atomics are small
        assert seen[0].stores.bytes >= x.size
    assert cast(x[:0], "float16")[1].tolist() == [0]
    assert cast(x[1:], "bfloat16")[0].dtype == ml_dtypes.bfloat16
    with pytest.raises(ShapeError, match=r"scale has shape \(0,\)"):
        cast(x, "bfloat16", x[:0])
    with pytest.raises(KernelError, match="take version 2"):
        cast(x[1:], "bfloat16", version=3)
    with pytest.raises(DtypeError, match="no kernel from float16"):
        cast(x.astype(np.float16), "float8_e5m2")
    with pytest.raises(DtypeError, match="it takes uint8"):
        restore(x, "float8_e5m2")
    with pytest.raises(DtypeError, match="choose float32 or bfloat16"):
        restore(x.view(np.uint8), "float8_e5m2", kind="float16")
    with pytest.raises(ShapeError, match=r"restore: scale has shape \(2,\)"):
        restore(x.view(np.uint8), "float8_e5m2", np.ones(2, np.float32))
