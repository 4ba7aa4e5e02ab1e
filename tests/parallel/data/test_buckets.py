"""Buckets: every gradient in exactly one, in reverse order of use, written in place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.errors import ConfigError
from minidist.parallel.data.buckets import cut, make_buckets


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), bucket_bytes=st.integers(1, 400)
)
def test_cut_keeps_order_and_bound(sizes: list[int], bucket_bytes: int) -> None:
    parameters = [Parameter(np.zeros(n, np.float32), name=f"p{i}") for i, n in enumerate(sizes)]
    runs = cut(parameters, bucket_bytes)
    assert [p for run in runs for p in run] == parameters[::-1]
    for run in runs:
        assert len(run) == 1 or sum(p.data.nbytes for p in run) <= bucket_bytes
    # none could have taken in the next gradient as well
    for one, following in zip(runs, runs[1:], strict=False):
        assert sum(p.data.nbytes for p in one) + following[0].data.nbytes > bucket_bytes


def test_dtypes_do_not_share_a_bucket() -> None:
    parameters = [
        Parameter(np.zeros(2, kind), name=kind)
        for kind in ("float32", "float32", "float64", "float32")
    ]
    assert [[p.dtype.name for p in run] for run in cut(parameters, 1 << 20)] == [
        ["float32"],
        ["float64"],
        ["float32", "float32"],
    ]


def test_backward_writes_into_the_bucket() -> None:
    a = Parameter(np.array([1.0, 2.0]), name="a")
    b = Parameter(np.array([[3.0], [4.0]]), name="b")
    (bucket,) = make_buckets([a, b], 1 << 20)
    ops.sum(a * np.array([10.0, 20.0])).backward()
    (ops.sum(b * b)).backward()
    np.testing.assert_array_equal(bucket.data, [6.0, 8.0, 10.0, 20.0])
    assert np.shares_memory(a.grad, bucket.data) and np.shares_memory(b.grad, bucket.data)


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes=0"):
        cut([], 0)
