"""Layer norm and RMS norm: references against differences and ops, each version against the
references in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import KINDS, check_gradient, close, needs_compiler, on_each_device, there

from minidist.autograd import ops
from minidist.device.backend import to_host
from minidist.errors import KernelError, ShapeError
from minidist.kernels import norm as family
from minidist.kernels import on_cpu
from minidist.kernels.norm import (
    VERSIONS,
    layer_norm,
    layer_norm_gradient,
    norm_gradient_reference,
    norm_reference,
    rms_norm,
    rms_norm_gradient,
)


def drawn(rows, columns, dtype, seed, far=0.0):
    """x, w, b, dy; `far`: how far the rows of x lie from 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * 2 + far
    return [
        a.astype(dtype)
        for a in (x, rng.normal(size=columns), rng.normal(size=columns), rng.normal(size=x.shape))
    ]


def test_references_are_the_differences_and_the_ops():
    x, w, b, dy = drawn(3, 5, np.float64, 0)
    check_gradient(norm_reference, norm_gradient_reference(x, w, dy, centre=True), (x, w, b), dy)
    gradients = norm_gradient_reference(x, w, dy, centre=False)[:2]
    check_gradient(lambda x, w: norm_reference(x, w, None), gradients, (x, w), dy)
    np.testing.assert_allclose(norm_reference(x, w, b), ops.layer_norm(x, w, b).data, rtol=1e-12)
    np.testing.assert_allclose(norm_reference(x, w, None), ops.rms_norm(x, w).data, rtol=1e-12)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.sampled_from([1, 2, 9, 40]),
    columns=st.sampled_from([1, 7, 32, 129, 264]),
    centre=st.booleans(),
    far=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=4)
def test_each_version_is_the_reference(device, version, kind, rows, columns, centre, far, seed):
    dtype, bound = KINDS[kind] if version > 1 else KINDS["float32"]
    x, w, b, dy = drawn(rows, columns if version < 3 else -(-columns // 8) * 8, dtype, seed, far)
    wide_x, wide_w, wide_b, wide_dy = (a.astype(np.float64) for a in (x, w, b, dy))
    x, w, b, dy = there(device, x, w, b, dy)
    with on_cpu.watch(seed=seed):
        y, *kept = (
            layer_norm(x, w, b, version=version) if centre else rms_norm(x, w, version=version)
        )
        got = (layer_norm_gradient if centre else rms_norm_gradient)(
            x, w, dy, *kept, version=version
        )
    assert all(array.dtype == dtype for array in (y, *got))
    # Far from 0, x itself is known to 6e-8 of `far` only, and so is what the mean leaves of it.
    bound = bound + 1e-6 * (1 + far) * (20 if columns == 1 else 1)
    close(y, norm_reference(wide_x, wide_w, wide_b if centre else None), bound)
    want = norm_gradient_reference(wide_x, wide_w, wide_dy, centre=centre)
    # 1/sqrt(eps): a column alone has no variance
    large = np.abs(wide_dy).max() * (316 if columns == 1 else 1)
    close(got[0], want[0], bound, scale=large * 4)
    for mine, wanted in zip(got[1:], want[1:], strict=False):
        close(mine, wanted, bound, scale=np.sqrt(rows) * 4)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_stays_in_its_row(version, device):
    x, w, b, dy = drawn(4, 40, np.float32, 0)
    x[2, 7] = np.nan
    x, w, b, dy = there(device, x, w, b, dy)
    for y, *kept in (layer_norm(x, w, b, version=version), rms_norm(x, w, version=version)):
        dx, dw, *_ = (layer_norm_gradient if len(kept) == 2 else rms_norm_gradient)(
            x, w, dy, *kept, version=version
        )
        for each in map(to_host, (y, dx)):
            assert np.isnan(each).any(axis=1).tolist() == [False, False, True, False]
            assert np.isnan(each[2]).all()
        assert np.isnan(to_host(dw)).all()


@needs_compiler
def test_a_large_mean_does_not_swallow_the_variance():
    """1000 ± 1: a variance taken as mean(x²) - mean(x)² would lose 6 of float32's 7 digits."""
    x = np.float32(1000) + np.tile(np.float32([1, -1]), 64)[None]
    one = np.ones(128, np.float32)
    zero = np.zeros(128, np.float32)
    for version in VERSIONS:
        y, mean, scale = layer_norm(x, one, zero, version=version)
        np.testing.assert_allclose(y, x - 1000, rtol=1e-5)
        np.testing.assert_allclose([mean[0], scale[0]], [1000, 1], rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_sums_have_the_same_bits_in_any_order_of_threads(version):
    x, w, b, dy = drawn(33, 40, np.float32, 1)
    _, *kept = layer_norm(x, w, b)
    results = []
    for seed in range(3):
        with on_cpu.watch(seed=seed):
            results.append(layer_norm_gradient(x, w, dy, *kept, version=version))
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)


@needs_compiler
def test_a_block_takes_several_rows(monkeypatch):
    """Version 3 backward: the next row is fetched while one is computed, and sums of warps have two
    places in turn."""
    monkeypatch.setattr(family, "PARTS_OF_ROWS", 2)
    x, w, _, dy = drawn(7, 264, np.float32, 0)  # three warps
    _, scale = rms_norm(x, w)
    want = rms_norm_gradient(x, w, dy, scale, version=1)
    with on_cpu.watch(seed=1):
        got = rms_norm_gradient(x, w, dy, scale, version=3)
    for ours, right in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_bytes_moved():
    """How often each rung reads x and dy, as the header of norm.cu says; RMS norm, whose one vector
    is counted too."""
    x, w, _, dy = drawn(32, 256, np.float32, 0)
    for version, reads, w_reads in ((1, 2, 1), (2, 2, 1), (3, 2, 1)):
        with on_cpu.watch(count=True) as seen:
            _, scale = rms_norm(x, w, version=version)
        assert seen[0].loads.bytes == (reads + w_reads) * x.nbytes
        assert seen[0].stores.bytes == x.nbytes + scale.nbytes
        full = (reads + w_reads) * x.nbytes // 32
        assert (
            (seen[0].loads.sectors == full) if version > 1 else (seen[0].loads.sectors > 4 * full)
        )
        with on_cpu.watch(count=True) as seen:
            rms_norm_gradient(x, w, dy, scale, version=version)
        large = sum(launch.loads.bytes // x.nbytes for launch in seen)
        # x, dy, w twice; x and dy again, parts; 3: once
        assert large == {1: 6 + 2 + 1, 2: 6 + 3, 3: 2 + 2}[version]


@needs_compiler
def test_shapes_and_errors():
    one = np.ones(3, np.float32)
    assert layer_norm(np.zeros((0, 3), np.float32), one, one)[0].shape == (0, 3)
    empty = np.zeros((0, 3), np.float32)
    dx, dw = rms_norm_gradient(empty, one, empty, np.zeros(0, np.float32))
    assert dx.shape == (0, 3)
    assert dw.tolist() == [0, 0, 0]
    y, mean, scale = layer_norm(np.ones((2, 1, 3), np.float32), one, one)
    assert y.tolist() == np.ones((2, 1, 3)).tolist()
    assert mean.shape == scale.shape == (2, 1)
    with pytest.raises(ShapeError, match="needs shape"):
        rms_norm(np.ones((2, 4), np.float32), one)
    with pytest.raises(KernelError, match="take version 2"):
        rms_norm(np.ones((2, 3), np.float32), one, version=3)
