"""The add of a ring step: the float32 sum bit for bit, what travels rounded once."""

import numpy as np
import pytest
from kernel_checks import KINDS, needs_compiler, on_each_device, there

from minidist.device.backend import to_host
from minidist.errors import ConfigError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.ring_add import VERSIONS, ring_add, ring_add_reference


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 8, 31, 2049])
def test_each_version_is_the_reference(version, kind, n, device):
    dtype, bound = KINDS[kind]
    rng = np.random.default_rng(n)
    incoming = rng.normal(size=n).astype(dtype)
    own = rng.normal(size=n).astype(np.float32)
    incoming[n // 2] = np.nan
    want = ring_add_reference(incoming, own)
    a, b, out, total = there(device, incoming, own, np.full(n, 7, dtype), np.full(n, 7, np.float32))
    with on_cpu.watch(seed=n):
        ring_add(a, b, outgoing=out, total=total, version=version)
        ring_add(a, b, outgoing=a, version=version)
        ring_add(out, b, total=b, version=version)
    np.testing.assert_array_equal(to_host(total), want)
    wide = ring_add_reference(incoming, own.astype(np.float64))
    for rounded in (out, a):
        np.testing.assert_allclose(
            to_host(rounded).astype(np.float64), wide, rtol=bound * 1.01, atol=1e-7
        )
        np.testing.assert_array_equal(
            to_host(rounded).astype(np.float32), want.astype(dtype).astype(np.float32)
        )
    np.testing.assert_array_equal(to_host(b), ring_add_reference(to_host(out), own))


@needs_compiler
def test_small_numbers_do_not_vanish():
    """bf16 has 8 bits: 256 + 1 is 256 there; the float32 sum knows."""
    total = np.full(8, 256, np.float32)
    for _ in range(3):
        ring_add(np.ones(8, KINDS["bfloat16"][0]), total, total=total)
    assert total.tolist() == [259] * 8


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_moved(version):
    incoming = np.zeros(512, np.float16)
    own = np.zeros(512, np.float32)
    with on_cpu.watch(count=True) as seen:
        ring_add(incoming, own, outgoing=np.empty_like(incoming), version=version)
        ring_add(
            incoming,
            own,
            outgoing=np.empty_like(incoming),
            total=np.empty_like(own),
            version=version,
        )
    assert [s.loads.bytes + s.stores.bytes for s in seen] == [512 * 8, 512 * 12]
    # two packs of floats a thread: each sector is asked for twice, then cached
    times = {1: 1, 2: 2}[version]
    assert seen[0].loads.sectors == (incoming.nbytes + times * own.nbytes) // 32


@needs_compiler
def test_errors():
    x = np.zeros(9, np.float32)
    ring_add(x[:0], x[:0], total=x[:0])
    with pytest.raises(ConfigError, match="nowhere to write"):
        ring_add(x, x)
    with pytest.raises(ShapeError, match="must be alike"):
        ring_add(x, x, total=x[1:])
    with pytest.raises(KernelError, match="take version 1"):
        ring_add(x[1:], x[1:], total=x[1:], version=2)
