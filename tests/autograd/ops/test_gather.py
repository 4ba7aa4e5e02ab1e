"""Embedding and take: values, and sums by id in a fixed order."""

import fake_gpu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import needs_compiler

from minidist.autograd import ops
from minidist.autograd.ops.gather import sum_by_id
from minidist.autograd.tensor import tensor
from minidist.device import backend
from minidist.device.backend import to_host
from minidist.errors import DtypeError, ShapeError


def test_values():
    table = np.arange(12.0).reshape(4, 3)
    ids = np.array([[3, 0], [1, 1]])
    np.testing.assert_array_equal(ops.embedding(table, ids).data, table[ids])
    np.testing.assert_array_equal(ops.take(table, ids).data, table[ids])
    np.testing.assert_array_equal(ops.take(table, np.array([2, 0]), dim=-1).data, table[:, [2, 0]])


def test_positions_in_the_other_byte_order():
    """Read as the numbers they are, by every op that takes integers."""
    table = np.arange(12.0).reshape(4, 3)
    ids = np.array([[3, 0], [1, 1]])
    strange = ids.astype(ids.dtype.newbyteorder())
    x = np.random.default_rng(0).normal(size=(2, 4, 6))

    def results(ids):
        leaf = tensor(table, requires_grad=True)
        y = ops.embedding(leaf, ids)
        dropped = ops.dropout(y, rate=0.5, name="d", seed=0, step=0, tokens=ids)
        loss = ops.cross_entropy(ops.take(leaf, ids.reshape(-1)) @ table.T, ids.reshape(-1))
        (loss + dropped.sum() + leaf[ids].sum()).backward()
        return y.data, dropped.data, loss.data, leaf.grad, ops.rotary(x, ids.reshape(-1)).data

    for ours, theirs in zip(results(ids), results(strange), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 99))
def test_sums_by_id(count, n, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, count, size=n)
    values = rng.normal(size=(n, 3))
    expected = np.zeros((count, 3))
    np.add.at(expected, ids, values)
    np.testing.assert_allclose(sum_by_id(ids, values, count), expected, rtol=1e-12, atol=1e-14)


def test_many_equal_ids_in_low_precision():
    ones = np.ones((4096, 1), backend.dtype("bfloat16"))
    assert float(sum_by_id(np.zeros(4096, int), ones, 1)[0, 0]) == 4096.0


def test_errors():
    table = np.ones((4, 3))
    for wrong in (-1, 4):
        with pytest.raises(
            ShapeError, match="embedding: positions .* in a table of 4 rows; they must lie in 0..3"
        ):
            ops.embedding(table, np.array([0, wrong]))
    with pytest.raises(DtypeError, match="integers, not float64"):
        ops.embedding(table, np.ones(2))
    with pytest.raises(ShapeError, match=r"\(vocabulary, width\), not \(4,\)"):
        ops.embedding(np.ones(4), np.array([0]))
    with pytest.raises(ShapeError, match=r"take: x \(4, 3\) has no dim 2"):
        ops.take(table, np.array([0]), dim=2)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_positions_on_the_host_of_rows_on_a_gpu(dtype, monkeypatch):
    """Values and gradient, by kernel and without, and nobody waits; a wrong position is an error at
    once."""
    cupy = fake_gpu.install(monkeypatch)
    ids = np.array([[3, 0], [1, 1]])
    dy = np.arange(12.0, dtype=dtype).reshape(2, 2, 3)
    results = []
    for put in (np.array, cupy.asarray):
        table = tensor(put(np.arange(12, dtype=dtype).reshape(4, 3)), requires_grad=True)
        y = ops.embedding(table, ids) * ops.take(table, ids)
        y.backward(put(dy))
        results.append((y.data, table.grad))
    assert not fake_gpu.waits
    for want, got in zip(*results, strict=True):
        np.testing.assert_array_equal(to_host(got), want)
    with pytest.raises(ShapeError, match="positions 0..4 in a table of 4 rows"):
        ops.embedding(table, np.array([0, 4]))


def test_positions_on_a_gpu_are_not_looked_at(monkeypatch):
    """They would have to be waited for; what is outside gives NaN, along whichever dim."""
    cupy = fake_gpu.install(monkeypatch)
    table = np.arange(12.0).reshape(4, 3)
    ids = np.array([[3, -1], [0, 2]])
    y = ops.take(cupy.asarray(table), cupy.asarray(ids), dim=0).data
    across = ops.take(cupy.asarray(table), cupy.asarray(ids[0]), dim=1).data
    assert not fake_gpu.waits
    want = table[ids]
    want[0, 1] = np.nan
    np.testing.assert_array_equal(to_host(y), want)
    assert np.isnan(to_host(across)).all()
    np.testing.assert_array_equal(
        to_host(ops.take(cupy.asarray(table), cupy.asarray(ids[1]), dim=1).data), table[:, [0, 2]]
    )
