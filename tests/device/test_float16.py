"""float16 casts: NumPy's bits."""

import numpy as np
import pytest

from minidist.device import backend, float16


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits, but for the digits of a NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert np.isnan(ours[~numbers]).all()
    np.testing.assert_array_equal(ours[numbers].view(np.uint8), theirs[numbers].view(np.uint8))


EDGES = np.array(
    [
        0,
        -0.0,
        65504,
        65519.99,
        65520,
        -65520,
        1e30,
        np.inf,
        -np.inf,
        np.nan,
        2.0**-14,
        2.0**-24,
        2.0**-25,
        np.nextafter(np.float32(2.0**-25), np.float32(1)),
        -3 * 2.0**-25,
        1e-45,
    ],
    np.float32,
)


@pytest.mark.parametrize(
    "values", [EDGES, np.arange(0, 2**32, 65537, dtype=np.uint64).astype(np.uint32).view("f4")]
)
def test_down_is_numpys(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    same(backend.narrow(values, np.dtype("float16")), expected)


@pytest.mark.soak
def test_down_is_numpys_for_every_float32() -> None:
    for top in range(256):
        values = (np.arange(1 << 24, dtype=np.uint32) + np.uint32(top << 24)).view(np.float32)
        with np.errstate(all="ignore"):
            same(
                float16.from_float32(values, np.empty(values.shape, np.float16)),
                values.astype(np.float16),
            )


def test_up_is_numpys_for_every_float16() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    same(backend.widen(every), every.astype(np.float32))
    square = every.reshape(256, 256)
    same(backend.widen(square.T), square.T.astype(np.float32))
    assert backend.widen(square.T).flags.f_contiguous
    same(backend.widen(square[::2, 3:]), square[::2, 3:].astype(np.float32))


def test_narrow() -> None:
    x = np.float32([1.0, 1.0 + 2.0**-9, 1e30])
    assert backend.narrow(x, x.dtype) is x
    out = np.zeros((2, 3), np.float16)[:, ::2]
    assert backend.narrow(np.ones((2, 2), np.float32), out.dtype, out) is out and (out == 1).all()
    np.testing.assert_array_equal(
        backend.narrow(x, backend.dtype("bfloat16")).astype("f4")[:2], [1, 1]
    )
    assert np.isinf(backend.narrow(x, np.dtype("float16"))[2])
