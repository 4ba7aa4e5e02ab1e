"""Embedding and take: values, and sums by id in a fixed order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import backend, ops
from minidist.errors import DtypeError, ShapeError
from minidist.ops.gather import sum_by_id


def test_values():
    table = np.arange(12.0).reshape(4, 3)
    ids = np.array([[3, 0], [1, 1]])
    np.testing.assert_array_equal(ops.embedding(table, ids).data, table[ids])
    np.testing.assert_array_equal(ops.take(table, ids).data, table[ids])
    np.testing.assert_array_equal(ops.take(table, np.array([2, 0]), dim=-1).data, table[:, [2, 0]])


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 99))
def test_sums_by_id(count, n, seed):
    rng = np.random.default_rng(seed)
    ids, values = rng.integers(0, count, size=n), rng.normal(size=(n, 3))
    expected = np.zeros((count, 3))
    np.add.at(expected, ids, values)
    np.testing.assert_allclose(sum_by_id(ids, values, count), expected, rtol=1e-12, atol=1e-14)


def test_many_equal_ids_in_low_precision():
    ones = np.ones((4096, 1), backend.dtype("bfloat16"))
    assert float(sum_by_id(np.zeros(4096, int), ones, 1)[0, 0]) == 4096.0


def test_errors():
    table = np.ones((4, 3))
    for wrong in (-1, 4):
        with pytest.raises(ShapeError, match="embedding: positions .* among 4 rows; they must lie in 0..3"):
            ops.embedding(table, np.array([0, wrong]))
    with pytest.raises(DtypeError, match="integers, not float64"):
        ops.embedding(table, np.ones(2))
    with pytest.raises(ShapeError, match=r"\(vocabulary, width\), not \(4,\)"):
        ops.embedding(np.ones(4), np.array([0]))
    with pytest.raises(ShapeError, match=r"take: no dim 2 in x \(4, 3\)"):
        ops.take(table, np.array([0]), dim=2)
