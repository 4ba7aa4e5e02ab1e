"""Cross-entropy in one pass: the reference against differences and ops, every version against it in
float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import KINDS, check_gradient, close, needs_compiler

from minidist.autograd import ops
from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.cross_entropy import (
    MOST_KEPT,
    VERSIONS,
    cross_entropy,
    cross_entropy_reference,
    is_kept,
)


def test_the_reference_is_the_difference_and_the_op():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5))
    targets = rng.integers(0, 5, 3)
    losses, gradient = cross_entropy_reference(logits, targets, 0.5)
    check_gradient(
        lambda x: cross_entropy_reference(x, targets, 0.5)[0], [gradient], [logits], np.full(3, 0.5)
    )
    np.testing.assert_allclose(
        losses.sum() / 7, ops.cross_entropy(logits, targets, divisor=7).data, rtol=1e-12
    )


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 5),
    columns=st.sampled_from([1, 2, 31, 257, 264, 2100]),
    spread=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 99),
    place=st.booleans(),
)
@settings(max_examples=4)
@example(rows=2, columns=2100, spread=1.0, seed=0, place=False)  # every warp has its part
def test_each_version_is_the_reference(version, kind, rows, columns, spread, seed, place):
    dtype, bound = KINDS[kind]
    columns = columns if version < 3 else -(-columns // 8) * 8
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, columns)) * spread).astype(dtype)
    targets = rng.integers(0, columns, rows)
    wide = x.astype(np.float64)
    with on_cpu.watch(seed=seed):
        alone, none = cross_entropy(x, targets, scale=1.0, gradient=False, version=version)
        losses, dx = cross_entropy(
            x,
            targets,
            scale=0.5,
            factor=np.array([0.5], np.float32),
            out=x if place else None,
            version=version,
        )
    assert none is None
    assert (dx is x) == place
    assert (losses.dtype, dx.dtype) == (np.float32, dtype)
    np.testing.assert_array_equal(alone, losses)
    want, gradient = cross_entropy_reference(wide, targets, 0.25)
    np.testing.assert_allclose(losses, want, rtol=1e-5, atol=1e-5)
    close(dx, gradient, bound * 2, scale=0.25)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_edges(version):
    """Large logits keep the loss, NaN and a target outside stay in their row and are NaN all over
    it."""
    x = np.zeros((5, 40), np.float32)
    x[0] = 1e30
    x[1, 3:] = -np.inf
    x[2, 17] = np.nan
    losses, dx = cross_entropy(x, np.array([5, 1, 0, 40, -1]), scale=1.0, version=version)
    np.testing.assert_allclose(losses[:2], np.log([40, 3]), rtol=1e-6)
    np.testing.assert_allclose(dx[1, :4], [1 / 3, -2 / 3, 1 / 3, 0], rtol=1e-5)
    assert np.isnan(losses[2:]).all()
    assert np.isnan(dx[2:]).all()
    assert np.isfinite(dx[:2]).all()


@needs_compiler
def test_bytes_moved():
    """Reads of the logits: 3, 2 and 1 times their bytes (and a number a row: the target's)."""
    x = np.zeros((8, 1024), np.float32)
    targets = np.zeros(8, np.int64)
    for version, reads in ((1, 3), (2, 2), (3, 1)):
        with on_cpu.watch(count=True) as seen:
            cross_entropy(x, targets, scale=1.0, version=version)
        loads = seen[0].loads
        stores = seen[0].stores
        few = loads.bytes - reads * x.nbytes
        assert 0 < few <= 8 * 256 * 8 + 32, version
        assert stores.bytes == x.nbytes + 8 * 4
        if version > 1:
            assert loads.sectors <= reads * x.nbytes // 32 + 8 * 9
            assert stores.sectors <= x.nbytes // 32 + 8


@needs_compiler
def test_the_version_that_fits():
    rows = {3: np.zeros((1, 64), np.float32), 2: np.zeros((1, MOST_KEPT // 4 + 4), np.float32)}
    for version, x in rows.items():
        with on_cpu.watch() as seen:
            cross_entropy(x, np.zeros(1, np.int64), scale=1.0)
        assert seen[0].kernel == f"cross_entropy_v{version}<float>"
    a100 = SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": 163 << 10})
    for nbytes, fits in ((48 << 10, True), ((163 << 10) - 256, True), (163 << 10, False)):
        assert (
            is_kept(
                SimpleNamespace(shape=(1, nbytes // 4), dtype=np.dtype(np.float32), device=a100)
            )
            == fits
        )
    with pytest.raises(KernelError, match="take version 2"):
        cross_entropy(np.zeros((2, 3), np.float32), np.zeros(2, np.int64), scale=1.0, version=3)
    with pytest.raises(ShapeError, match=r"need shape \(2,\)"):
        cross_entropy(np.zeros((2, 3), np.float32), np.zeros(3, np.int64), scale=1.0)
    with pytest.raises(ShapeError, match="must be alike"):
        cross_entropy(x, np.zeros(1, np.int64), scale=1.0, out=x[:, 4:].copy())
    with pytest.raises(ShapeError, match=r"factor has shape \(0,\)"):
        cross_entropy(x, np.zeros(1, np.int64), scale=1.0, factor=np.zeros(0, np.float32))
    assert cross_entropy(np.zeros((0, 3), np.float32), np.zeros(0, np.int64), scale=1.0)[
        1
    ].shape == (0, 3)
