"""Residual + dropout: the stream of backend.random_bits, every version against the reference,
shards of the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import KINDS, check_gradient, close, needs_compiler, on_each_device, there

from minidist.autograd import ops
from minidist.device.backend import random_bits, stream_key, to_host
from minidist.errors import ConfigError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.dropout import VERSIONS, residual_dropout, residual_dropout_reference


def test_the_reference_gradient_is_itself_without_residual():
    rng = np.random.default_rng(0)
    x, residual, dy, bits = (
        *rng.normal(size=(3, 2, 5)),
        random_bits("layer", 1, np.arange(10).reshape(2, 5)),
    )
    gradient = residual_dropout_reference(dy, None, bits, 0.4)
    check_gradient(
        lambda x, r: residual_dropout_reference(x, r, bits, 0.4), (gradient, dy), (x, residual), dy
    )


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 8, 33, 264]),
    rate=st.sampled_from([0.0, 0.1, 0.9]),
    added=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=4)
def test_each_version_is_the_reference(version, kind, rows, columns, rate, added, seed):
    dtype, bound = KINDS[kind]
    columns = columns if version == 1 else -(-columns // 8) * 8
    rng = np.random.default_rng(seed)
    x, residual = ((rng.normal(size=(rows, columns))).astype(dtype) for _ in range(2))
    residual = residual if added else None
    with on_cpu.watch(seed=seed):
        y = residual_dropout(x, residual, rate=rate, key=stream_key("layer", seed), version=version)
    bits = random_bits("layer", seed, np.arange(x.size).reshape(x.shape))
    want = residual_dropout_reference(
        x.astype(np.float64), None if residual is None else residual.astype(np.float64), bits, rate
    )
    assert y.dtype == dtype
    close(y, want, bound)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_op(kind):
    """ops.dropout on the CPU and the kernel: not one bit apart, in whole and in shards of tokens
    and of columns."""
    x = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(KINDS[kind][0])
    whole = ops.dropout(x, rate=0.3, name="a", seed=5, step=2).data
    key = stream_key("a/dropout/2", 5)
    np.testing.assert_array_equal(residual_dropout(x, rate=0.3, key=key), whole)
    np.testing.assert_array_equal(
        residual_dropout(x, x[::-1].copy(), rate=0.3, key=key),
        ops.dropout(x, x[::-1].copy(), rate=0.3, name="a", seed=5, step=2).data,
    )
    tokens = np.array([[4, 1], [0, 5]])
    rows = np.ascontiguousarray(x.reshape(6, 16)[tokens][..., 8:])
    part = residual_dropout(rows, rate=0.3, key=key, tokens=tokens, first_column=8, width=16)
    np.testing.assert_array_equal(part, whole.reshape(6, 16)[tokens][..., 8:])


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_the_key_may_lie_in_memory(version, device):
    """And is read when the kernel runs: the same launch draws by another key later."""
    x, key = there(device, np.ones((4, 16), np.float32), np.zeros(1, np.uint64))
    masks = []
    for number in (stream_key("a", 0), stream_key("b", 0)):
        key[...] = number
        masks.append(to_host(residual_dropout(x, rate=0.5, key=key, version=version)).copy())
        want = to_host(residual_dropout(x, rate=0.5, key=number, version=version))
        np.testing.assert_array_equal(masks[-1], want)
    assert (masks[0] != masks[1]).any()


@needs_compiler
def test_bytes_moved():
    x = np.zeros((16, 64), np.float32)
    for residual, arrays in ((None, 2), (x.copy(), 3)):
        for version in VERSIONS:
            with on_cpu.watch(count=True) as seen:
                residual_dropout(x, residual, rate=0.5, key=1, version=version)
            assert seen[0].loads.bytes + seen[0].stores.bytes == arrays * x.nbytes
            assert seen[0].loads.sectors + seen[0].stores.sectors == arrays * x.nbytes // 32


@needs_compiler
def test_edges():
    x = np.full((4, 8), np.nan, np.float32)
    assert np.isnan(residual_dropout(x, rate=0.5, key=1)).all()
    assert residual_dropout(x[:0], rate=0.5, key=1).shape == (0, 8)
    with pytest.raises(ConfigError, match=r"rate 1.0 is not in \[0, 1\)"):
        residual_dropout(x, rate=1.0, key=1)
    with pytest.raises(ShapeError, match="does not fit x"):
        residual_dropout(x, x[:2], rate=0.5, key=1)
    with pytest.raises(ShapeError, match=r"tokens of shape \(4,\), not \(3,\)"):
        residual_dropout(x, rate=0.5, key=1, tokens=np.zeros(3, np.int64))
    with pytest.raises(KernelError, match="take version 1"):
        residual_dropout(np.zeros((2, 3), np.float32), rate=0.5, key=1, version=2)
