"""Bias + GELU and SwiGLU: references against differences, every version on the CPU build against
them in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import KINDS, check_gradient, close, needs_compiler

from minidist.autograd import ops
from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.activation import (
    VERSIONS,
    bias_gelu,
    bias_gelu_gradient,
    bias_gelu_gradient_reference,
    bias_gelu_reference,
    swiglu,
    swiglu_gradient,
    swiglu_gradient_reference,
    swiglu_reference,
)

shapes = st.tuples(st.integers(1, 40), st.sampled_from([1, 8, 33, 128, 264, 257]))


def test_references_are_the_differences():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4))
    bias = rng.normal(size=4)
    dy = rng.normal(size=(3, 4))
    check_gradient(bias_gelu_reference, bias_gelu_gradient_reference(x, bias, dy), (x, bias), dy)
    gate = rng.normal(size=(2, 5))
    up = rng.normal(size=(2, 5))
    check_gradient(
        swiglu_reference, swiglu_gradient_reference(gate, up, dy[:2, :1]), (gate, up), dy[:2, :1]
    )


def test_references_are_the_ops():
    x = np.linspace(-5, 5, 31)
    np.testing.assert_allclose(
        bias_gelu_reference(x, None), ops.gelu(x).data, rtol=1e-12, atol=1e-15
    )
    np.testing.assert_allclose(
        swiglu_reference(x, x[::-1]), ops.silu(x).data * x[::-1], rtol=1e-12, atol=1e-15
    )


def drawn(shape, dtype, version, seed, many):
    rows, columns = shape
    columns = columns if version == 1 else -(-columns // 8) * 8
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(rows, columns)) * 3).astype(dtype) for _ in range(many)]


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, biased=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=4)
def test_bias_gelu(version, kind, shape, biased, seed):
    dtype, bound = KINDS[kind]
    x, dy, third = drawn(shape, dtype, version, seed, 3)
    bias = third[0].copy() if biased else None
    with on_cpu.watch(seed=seed):
        y = bias_gelu(x, bias, version=version)
        dx, dbias = bias_gelu_gradient(x, bias, dy, version=version)
    assert y.dtype == dx.dtype == dbias.dtype == dtype
    wide = [None if a is None else a.astype(np.float64) for a in (x, bias, dy)]
    close(y, bias_gelu_reference(*wide[:2]), bound)
    want = bias_gelu_gradient_reference(*wide)
    close(dx, want[0], bound)
    close(dbias, want[1], bound, scale=np.abs(want[0]).sum(axis=0).max())


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, seed=st.integers(0, 99))
@settings(max_examples=4)
def test_swiglu(version, kind, shape, seed):
    dtype, bound = KINDS[kind]
    arrays = drawn(shape, dtype, version, seed, 3)
    with on_cpu.watch(seed=seed):
        y = swiglu(*arrays[:2], version=version)
        got = swiglu_gradient(*arrays, version=version)
    wide = [a.astype(np.float64) for a in arrays]
    close(y, swiglu_reference(*wide[:2]), bound)
    for mine, want in zip(got, swiglu_gradient_reference(*wide), strict=True):
        close(mine, want, bound)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_far_out(version):
    """Slopes are 0 and 1, without overflow; a NaN stays one; what is not one does not become
    one."""
    x = np.array([[-1e30, -1e4, -30, 0, 30, 1e4, 1e30, np.nan]], np.float32)
    dx, _ = bias_gelu_gradient(x, None, np.ones_like(x), version=version)
    np.testing.assert_allclose(dx, [[0, 0, 0, 0.5, 1, 1, 1, np.nan]], atol=1e-6)
    np.testing.assert_allclose(
        bias_gelu(x, version=version), [[0, 0, 0, 0, 30, 1e4, 1e30, np.nan]], atol=1e-6
    )
    y = swiglu(x, np.ones_like(x), version=version)
    np.testing.assert_allclose(y, [[0, 0, 0, 0, 30, 1e4, 1e30, np.nan]], atol=1e-6)
    dgate, _ = swiglu_gradient(x, np.ones_like(x), np.ones_like(x), version=version)
    np.testing.assert_allclose(dgate, [[0, 0, 0, 0.5, 1, 1, 1, np.nan]], atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_small_gates_and_small_slopes_hold_all_digits(version):
    """In relative error, while float32 holds the sigmoid. GELU's argument is rounded, and its
    exponential shows it."""
    x = np.linspace(-103, 103, 4096, dtype=np.float32).reshape(64, 64)
    one = np.ones_like(x)
    wide = x.astype(np.float64)
    y = swiglu(x, one, version=version)
    (dgate, dup) = swiglu_gradient(x, one, one, version=version)
    e = np.exp(-np.abs(wide))
    h, rest = np.where(wide < 0, [e, 1 + 0 * e], [1 + 0 * e, e]) / (1 + e)
    lost = np.abs(wide) * 3e-45
    np.testing.assert_array_less(np.abs(y - wide * h), 1e-6 * np.abs(wide * h) + lost)
    np.testing.assert_array_equal(dup, y)
    np.testing.assert_array_less(
        np.abs(dgate - h * (1 + wide * rest)), 1e-6 * h * (1 + np.abs(wide) * rest) + lost
    )
    x = x / 10
    dx, _ = bias_gelu_gradient(x, None, one, version=version)
    wide = x.astype(np.float64)
    z = 2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    dz = 2 * np.sqrt(2 / np.pi) * (1 + 0.134145 * wide**2)
    h = 1 / (1 + np.exp(-z))
    rest = 1 / (1 + np.exp(z))
    bound = 1e-6 * (1 + np.abs(z))
    np.testing.assert_array_less(
        np.abs(bias_gelu(x, version=version) - wide * h), bound * np.abs(wide * h) + lost
    )
    added = h * wide * rest * dz
    np.testing.assert_array_less(np.abs(dx - h - added), bound * (h + np.abs(added)) + lost)


@needs_compiler
def test_bytes_moved():
    """2, 3, 3 and 5 arrays, each once and in full sectors (and a row of bias and of its gradient's
    parts)."""
    x = np.zeros((16, 256), np.float32)
    for call, arrays in (
        (lambda: bias_gelu(x), 2),
        (lambda: bias_gelu_gradient(x, None, x), 3),
        (lambda: swiglu(x, x.copy()), 3),
        (lambda: swiglu_gradient(x, x.copy(), x.copy()), 5),
    ):
        with on_cpu.watch(count=True) as seen:
            call()
        first = seen[0]
        extra = 2 * 256 * 4 if "gradient" in first.kernel and "gelu" in first.kernel else 0
        assert first.loads.bytes + first.stores.bytes == arrays * x.nbytes + extra
        assert first.loads.sectors + first.stores.sectors == (arrays * x.nbytes + extra) // 32


@needs_compiler
def test_shapes():
    empty = np.zeros((0, 3), np.float32)
    assert bias_gelu(empty).shape == (0, 3)
    assert bias_gelu_gradient(empty, None, empty)[1].tolist() == [0, 0, 0]
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ShapeError, match="does not fit x"):
        bias_gelu(x, np.zeros(2, np.float32))
    for call in (
        lambda short: swiglu(x, short),
        lambda short: swiglu_gradient(x, x, short),
        lambda short: bias_gelu_gradient(x, None, short),
        lambda short: swiglu(np.ones(8, np.float32), short),
    ):
        with pytest.raises(ShapeError, match="must be alike"):  # of another length, or other dims
            call(np.zeros(3, np.float32))
    with pytest.raises(KernelError, match="take version 1"):
        swiglu(x, x.copy(), version=2)
