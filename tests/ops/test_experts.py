"""Top-k, places in runs, grouped products, rows added up: values and errors. Gradients: test_gradients.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import ops
from minidist.errors import DtypeError, ShapeError
from minidist.ops.experts import places_in_runs, top_positions


def test_the_largest_first_and_of_equals_the_first() -> None:
    scores = np.array([[1.0, 5.0, 5.0, 2.0], [3.0, 0.0, -1.0, 3.0]])
    assert top_positions(scores, 2).tolist() == [[1, 2], [0, 3]]
    assert top_positions(scores.astype("float16"), 3).tolist() == [[1, 2, 3], [0, 3, 1]]
    assert top_positions(np.zeros((0, 4)), 2).shape == (0, 2)


@given(st.lists(st.integers(0, 4), max_size=20))
def test_places_count_the_equal_ids_before(ids: list[int]) -> None:
    expected = [ids[:place].count(one) for place, one in enumerate(ids)]
    assert places_in_runs(np.array(ids, int)).tolist() == expected


def test_each_run_of_rows_has_its_own_matrix() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 3)), rng.normal(size=(3, 3, 2))
    y = ops.grouped_linear(x, w, counts=[2, 0, 3]).data
    np.testing.assert_allclose(y, np.concatenate([x[:2] @ w[0], x[2:] @ w[2]]))


def test_rows_are_added_where_they_belong() -> None:
    y = ops.add_rows(np.array([[1.0], [2.0], [4.0]]), np.array([2, 0, 2]), count=4).data
    assert y.tolist() == [[2.0], [0.0], [5.0], [0.0]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"counts \[2, 2\] do not fit 5 rows of 2 groups; pass one a group"):
        ops.grouped_linear(np.ones((5, 3)), np.ones((2, 3, 4)), counts=[2, 2])
    with pytest.raises(ShapeError, match=r"x \(5, 3\) does not fit w \(2, 4, 3\)"):
        ops.grouped_linear(np.ones((5, 3)), np.ones((2, 4, 3)), counts=[2, 3])
    with pytest.raises(ShapeError, match=r"rows \(2,\) do not fit x \(3, 1\)"):
        ops.add_rows(np.ones((3, 1)), np.array([0, 1]), count=2)
    with pytest.raises(ShapeError, match=r"positions 0..2 among 2 rows"):
        ops.add_rows(np.ones((2, 1)), np.array([0, 2]), count=2)
    with pytest.raises(DtypeError, match="integers, not float64"):
        ops.add_rows(np.ones((2, 1)), np.ones(2), count=2)
