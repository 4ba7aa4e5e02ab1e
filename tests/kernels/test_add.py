"""The sum of two arrays: bit for bit the float32 sum, rounded once; b as a's last dims."""

import numpy as np
import pytest
from kernel_checks import KINDS, needs_compiler, on_each_device, there

from minidist.device.backend import to_host
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.add import VERSIONS, add, add_reference


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shapes",
    [((1,), (1,)), ((2049,), (2049,)), ((5, 16), (16,)), ((3, 4, 8), (4, 8)), ((3, 31), (3, 31))],
    ids=str,
)
def test_each_version_is_the_reference(version, kind, shapes, device):
    dtype, _ = KINDS[kind]
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    a.reshape(-1)[0] = np.nan
    want = add_reference(a.astype(np.float32), b.astype(np.float32)).astype(dtype)
    x, y, out = there(device, a, b, np.full(a.shape, 7, dtype))
    with on_cpu.watch(seed=1):
        new = add(x, y, version=version)
        assert add(x, y, out=out, version=version) is out
        add(x, y, out=x, version=version)
    for got in (new, out, x):
        np.testing.assert_array_equal(to_host(got).astype(np.float32), want.astype(np.float32))


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_moved(version):
    a = np.zeros((8, 64), np.float16)
    b = np.zeros(64, np.float16)
    with on_cpu.watch(count=True) as seen:
        add(a, a, version=version)
        add(a, b, version=version)
    # b's comes from a cache
    assert [s.loads.bytes + s.stores.bytes for s in seen] == [3 * a.nbytes] * 2


@needs_compiler
def test_what_does_not_fit():
    x = np.zeros((3, 9), np.float32)
    assert add(x[:0], x[:0]).shape == (0, 9)
    assert not add(x, x[0]).any()  # rows that are not whole packs: version 1
    with pytest.raises(KernelError, match="take version 1"):
        add(x, x[0], version=2)
    with pytest.raises(ShapeError, match=r"shapes \(3, 9\), \(3,\) and \(3, 9\)"):
        add(x, x[:, 0].copy())
    with pytest.raises(ShapeError, match=r"and \(9,\); b must be a's last dims, and y as a"):
        add(x, x, out=x[0])
    with pytest.raises(DtypeError, match="float32, float16 and float32"):
        add(x, x.astype(np.float16))
