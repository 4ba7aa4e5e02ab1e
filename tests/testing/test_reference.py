"""The numbers of examples: other numbers per rank and call, and sums that are exact in any order."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from minidist.testing.reference import (
    EVERY_DTYPE,
    LAYOUTS,
    Example,
    argument,
    dtype_of,
    expected,
    laid_out,
    same,
)

FLOATS = [name for name in EVERY_DTYPE if dtype_of(name).kind not in "iub"]


def test_an_example_is_written_as_the_call_that_makes_it():
    short = Example("all_reduce", 2, (3, 3))
    long = Example("reduce", 2, (3, 3), "int8", "max", 1, "strided", "large", (2, 0), "threads")
    assert repr(short) == "Example('all_reduce', 2, (3, 3))"
    assert eval(repr(short)) == short
    assert eval(repr(long)) == long
    assert "transport" not in repr(long) and "world_ranks=(2, 0)" in repr(long)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("values", ["whole", "large"])
def test_sums_are_exact_in_every_order(dtype, size, values):
    """In the dtype itself: a collective of one's own need not add in a wider one."""
    example = Example("all_reduce", size, (40,) * size, dtype, values=values)
    arrays = [argument(example, rank) for rank in range(size)]
    (want, *_) = expected(example)
    for order in (range(size), reversed(range(size)), [*range(1, size, 2), *range(0, size, 2)]):
        total = np.zeros_like(arrays[0])
        for rank in order:
            total = (total + arrays[rank]).astype(total.dtype)
        assert same(total, want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_floats_use_the_whole_mantissa(dtype):
    example = Example("all_reduce", 2, (1000, 1000), dtype, values="large")
    numbers = argument(example, 0).astype(np.clongdouble).real
    # the sum of two may need as many bits as the mantissa has
    assert np.abs(numbers).max() * 2 > 0.9 / float(ml_dtypes.finfo(dtype_of(dtype)).eps)


def test_large_integers_leave_the_range_of_every_narrower_dtype():
    example = Example("all_reduce", 2, (100, 100), "int64", values="large")
    assert np.abs(argument(example, 1).astype(float)).max() > 1e18


@pytest.mark.parametrize("values", ["whole", "large", "rough"])
def test_ranks_and_calls_bring_other_numbers(values):
    example = Example("all_reduce", 3, (9, 9, 9), values=values)
    seen = [argument(example, rank, call) for rank in range(3) for call in range(2)]
    assert all(not same(a, b) for a, b in itertools.combinations(seen, 2))
    assert same(argument(example, 2, 1), argument(example, 2, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_value(layout):
    array = np.arange(6.0).reshape(2, 3)
    other = laid_out(array, layout)
    assert same(other, array) and not np.shares_memory(other, array)
    assert other.flags.c_contiguous == (layout in ("plain", "read-only"))
    assert other.flags.writeable == (layout != "read-only")


def test_the_mean_of_a_low_precision_is_rounded_once():
    example = Example("all_reduce", 3, (5, 5, 5), "bfloat16", "mean")
    arrays = [argument(example, rank).astype(np.float32) for rank in range(3)]
    want = (sum(arrays) / np.float32(3)).astype(ml_dtypes.bfloat16)
    assert all(same(one, want) for one in expected(example))
