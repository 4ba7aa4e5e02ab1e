"""Softmax and its gradient: the reference against differences, every version on the CPU build
against it in float64."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.softmax import (
    VERSIONS,
    softmax,
    softmax_gradient,
    softmax_gradient_reference,
    softmax_reference,
)

needs_compiler = pytest.mark.skipif(
    on_cpu.compiler() is None, reason="no C++ compiler (g++) on this machine"
)
KINDS = {
    "float32": (np.float32, 2e-7),
    "float16": (np.float16, 6e-4),
    "bfloat16": (ml_dtypes.bfloat16, 5e-3),
}


def test_the_reference_gradient_is_the_difference():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5))
    dy = rng.normal(size=(3, 5))
    dx = softmax_gradient_reference(softmax_reference(x), dy)
    step = 1e-6
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        difference = ((softmax_reference(x + moved) - softmax_reference(x - moved)) * dy).sum() / (
            2 * step
        )
        np.testing.assert_allclose(dx[place], difference, rtol=1e-6, atol=1e-9)


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 2, 31, 33, 128, 129, 264, 1000]),
    spread=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=4)
def test_each_version_is_the_reference(version, kind, rows, columns, spread, seed):
    dtype, bound = KINDS[kind]
    columns = columns if version < 3 else -(-columns // 8) * 8  # packs
    rng = np.random.default_rng(seed)
    x, dy = ((rng.normal(size=(rows, columns)) * scale).astype(dtype) for scale in (spread, 1.0))
    with on_cpu.watch(seed=seed):
        y = softmax(x, version=version)
        dx = None
        dx = softmax_gradient(y, dy, version=version)
    assert y.dtype == dx.dtype == dtype
    want = softmax_reference(x.astype(np.float64))
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=bound * 20, atol=bound)
    wide_y = y.astype(np.float64)
    wide_dy = dy.astype(np.float64)
    np.testing.assert_allclose(
        dx.astype(np.float64),
        softmax_gradient_reference(wide_y, wide_dy),
        rtol=bound * 4,
        atol=bound * np.abs(wide_dy).max(),
    )


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_edges(version):
    """-inf alone gives zeros, some -inf gives zeros there, huge numbers do not overflow, NaN stays
    in its row."""
    x = np.zeros((5, 40), np.float32)
    x[0] = -np.inf
    x[1, ::2] = -np.inf
    x[2] = 3e38
    x[3, 17] = np.nan
    y = softmax(x, version=version)
    np.testing.assert_array_equal(y[0], 0)
    np.testing.assert_allclose(y[1], np.arange(40) % 2 / 20, rtol=1e-6)
    np.testing.assert_allclose(y[[2, 4]], 1 / 40, rtol=1e-6)
    assert np.isnan(y[3]).all()
    dy = np.ones_like(x)
    dy[4, 3] = np.nan
    dx = softmax_gradient(np.nan_to_num(y), dy, version=version)
    assert np.isnan(dx[4]).all()
    assert np.isfinite(dx[:4]).all()


@needs_compiler
def test_shapes():
    assert softmax(np.zeros((0, 5), np.float32)).shape == (0, 5)
    assert softmax(np.zeros((2, 0), np.float32)).shape == (2, 0)
    np.testing.assert_allclose(softmax(np.zeros((2, 3, 4), np.float32)), 0.25)
    assert softmax(np.zeros(7, np.float32)).shape == (7,)
    with pytest.raises(ShapeError, match="must be alike"):
        softmax_gradient(np.zeros((4, 8), np.float32), np.zeros((2, 8), np.float32))


@needs_compiler
def test_the_fastest_version_is_one_that_fits():
    x = np.zeros(4 * 8 + 1, np.float32)
    for version, fitting in (
        (3, x[:32].reshape(4, 8)),
        (2, x[1:].reshape(4, 8)),
        (2, np.zeros((4, 9), np.float32)),
    ):
        with on_cpu.watch() as seen:  # the second begins 4 bytes late
            softmax(fitting)
        assert seen[0].kernel == f"softmax_v{version}<float>"
    with pytest.raises(KernelError, match="take version 2"):
        softmax(x[1:].reshape(4, 8), version=3)


@needs_compiler
def test_bytes_moved():
    """What the header of softmax.cu says of each rung: reads of x, and whether a warp's sectors are
    full."""
    x = np.zeros((32, 256), np.float32)
    for version, reads, sectors_a_read in (
        (1, 3, x.size),
        (2, 3, x.nbytes // 32),
        (3, 2, x.nbytes // 32),
    ):
        with on_cpu.watch(count=True) as seen:
            softmax(x, version=version)
        loads = seen[0].loads
        stores = seen[0].stores
        assert (loads.bytes, loads.sectors) == (reads * x.nbytes, reads * sectors_a_read), version
        assert (stores.bytes, stores.sectors) == (x.nbytes, sectors_a_read), version
