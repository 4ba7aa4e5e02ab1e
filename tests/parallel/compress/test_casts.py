"""fp16 and bf16 on the wire: two bytes a number, rounded as NumPy does, and an overflow stays
one."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from minidist.parallel.compress.casts import Cast
from minidist.parallel.compress.two_phase import RandomStream

NO_STREAM = RandomStream("", 0, 0)
KINDS = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def there_and_back(name: str, values: np.ndarray) -> np.ndarray:
    codec = Cast(name)
    payload = codec.encode(values, NO_STREAM)
    assert payload.dtype == np.uint8 and payload.shape == (codec.nbytes(values.size, values.dtype),)
    return codec.decode(payload, values.size, values.dtype)


@pytest.mark.parametrize("name", KINDS)
@given(
    arrays.arrays(
        st.sampled_from(["float32", "float64"]),
        st.integers(0, 40),
        elements=st.floats(-6e4, 6e4, width=32),
    )
)
def test_numbers_are_rounded_once(name: str, values: np.ndarray) -> None:
    result = there_and_back(name, values)
    assert result.dtype == values.dtype
    np.testing.assert_array_equal(
        result, values.astype(np.float32).astype(KINDS[name]).astype(values.dtype)
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_is_too_large_stays_finite_and_an_overflow_does_not(name: str) -> None:
    values = np.array([1e300, -1e300, 7e4, np.inf, -np.inf, np.nan, 0.0])
    result = there_and_back(name, values)
    assert np.isfinite(result[:3]).all() and result[0] == -result[1] >= 65504
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(values))
    np.testing.assert_array_equal(result[3:], values[3:])
