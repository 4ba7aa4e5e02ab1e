"""Rotary positions: the reference against differences and ops.rotary, each version against it in
float64."""

import numpy as np
import pytest
from kernel_checks import KINDS, check_gradient, close, needs_compiler, on_each_device, there

from minidist.autograd import ops
from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.rotary import VERSIONS, rotary, rotary_gradient, rotary_reference


def angles(tokens, width, base=10000.0):
    turned = np.arange(tokens)[:, None] * base ** (-2 / width * np.arange(width // 2))
    return np.cos(turned), np.sin(turned)


def test_the_reference_is_the_difference_and_the_op():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4))
    dy = rng.normal(size=(2, 3, 4))
    (cos, sin) = angles(3, 4)
    check_gradient(
        lambda x: rotary_reference(x, cos, sin), [rotary_reference(dy, cos, -sin)], (x,), dy
    )
    np.testing.assert_allclose(
        rotary_reference(x, cos, sin), ops.rotary(x, np.arange(3)).data, rtol=1e-12
    )


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 7, 10), (3, 5, 48)])
def test_each_version_is_the_reference(version, kind, shape, device):
    dtype, bound = KINDS[kind]
    shape = shape if version == 1 else (*shape[:-1], -(-shape[-1] // 16) * 16)
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    (cos, sin) = angles(*shape[-2:])
    x.reshape(-1)[1] = np.nan
    wide = x.astype(np.float64)
    cos = cos.astype(np.float32)
    sin = sin.astype(np.float32)
    placed = there(device, x, cos, sin)
    with on_cpu.watch(seed=1):
        y = rotary(*placed, version=version)
        dx = rotary_gradient(*placed, version=version)
    assert y.dtype == dx.dtype == dtype
    close(y, rotary_reference(wide, cos, sin), bound)
    close(dx, rotary_reference(wide, cos, -sin), bound)


@needs_compiler
def test_bytes_moved_and_errors():
    x = np.zeros((4, 8, 32), np.float32)
    (cos, sin) = angles(8, 32)
    cos = cos.astype(np.float32)
    sin = sin.astype(np.float32)
    for version in VERSIONS:
        with on_cpu.watch(count=True) as seen:
            rotary(x, cos, sin, version=version)
        assert seen[0].loads.bytes == 2 * x.nbytes  # x, and an angle's cos and sin for each pair
        assert seen[0].stores.bytes == x.nbytes
        assert seen[0].stores.sectors == x.nbytes // 32
    assert rotary(x[:0], cos, sin).shape == (0, 8, 32)
    with pytest.raises(ShapeError, match="do not fit x"):
        rotary(x, cos[1:], sin[1:])
    with pytest.raises(KernelError, match="take version 1"):
        rotary(x[..., :6].copy(), cos[:, :3].copy(), sin[:, :3].copy(), version=2)
