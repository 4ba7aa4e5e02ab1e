"""8bit and 4bit: the nearest of a book, a scale a block; what rounding at random costs and what it
keeps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from minidist.kernels.quantise import GROUP, quantise_reference, restore_reference
from minidist.parallel.compress import quantise
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.compress.quantise import KERNEL_BLOCK, LARGEST, Quantiser, book_of
from minidist.parallel.compress.two_phase import RandomStream

STREAM = RandomStream("w/worker/0/0/1", 0, 0)


def codec(bits: int, block: int = 8, book: str = "linear", rounding: str = "nearest") -> Quantiser:
    return Quantiser(bits, block=block, book=book, rounding=rounding)


def there_and_back(
    found: Quantiser, values: np.ndarray, stream: RandomStream = STREAM
) -> np.ndarray:
    payload = found.encode(values, stream)
    assert payload.dtype == np.uint8 and payload.shape == (found.nbytes(values.size, values.dtype),)
    result = found.decode(payload, values.size, values.dtype)
    assert result.shape == values.shape and result.dtype == values.dtype
    return result


def largest_of_blocks(values: np.ndarray, block: int) -> np.ndarray:
    """Of each number, the largest size in its block."""
    blocks = np.pad(np.abs(values), (0, -values.size % block)).reshape(-1, block)
    return np.repeat(blocks.max(axis=1, initial=0), block)[: values.size]


def widest(book: np.ndarray) -> float:
    """The largest error that rounding to the nearest of a book makes."""
    return float(np.diff(book.astype(np.float64)).max() / 2)


some_numbers = arrays.arrays(
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 50),
    elements=st.floats(-1e6, 1e6, width=32),
)
every_codec = pytest.mark.parametrize(
    ("bits", "book"), [(8, "linear"), (4, "linear"), (8, "dynamic"), (4, "dynamic")]
)


@pytest.mark.sampled
@every_codec
@given(values=some_numbers, block=st.sampled_from([2, 6, 16]))
def test_the_error_is_at_most_half_a_gap_of_the_book(
    bits: int, book: str, values: np.ndarray, block: int
) -> None:
    # of float16
    gap = 0.5 / LARGEST[bits] if book == "linear" else widest(book_of(bits)) + 2**-12
    # and where a scale is subnormal
    bound = gap * largest_of_blocks(values, block) * (1 + 1e-6) + 1e-30
    assert (np.abs(there_and_back(codec(bits, block, book), values) - values) <= bound).all()


@pytest.mark.sampled
@every_codec
@given(values=some_numbers)
def test_stochastic_rounding_takes_a_neighbour(bits: int, book: str, values: np.ndarray) -> None:
    gap = 1 / LARGEST[bits] if book == "linear" else 2 * widest(book_of(bits)) + 2**-11
    bound = gap * largest_of_blocks(values, 8) * (1 + 1e-6) + 1e-30
    assert (
        np.abs(there_and_back(codec(bits, 8, book, "stochastic"), values) - values) <= bound
    ).all()


@every_codec
@given(
    count=st.integers(0, 90),
    block=st.sampled_from([2, 6, 16, 40]),
    length=st.sampled_from([1, 16, 33]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    kind=st.sampled_from(["float32", "float64"]),
)
def test_stretches_are_the_bytes_of_the_whole(
    bits: int, book: str, count: int, block: int, length: int, rounding: str, kind: str
) -> None:
    values = np.random.default_rng(count).normal(size=count).astype(kind)
    values[count // 2 : count // 2 + 1] = np.inf
    whole = codec(bits, block, book, rounding)
    payload = whole.encode(values, STREAM)
    numbers = whole.decode(payload, count, values.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise, "STRETCH", length)
        assert np.array_equal(whole.encode(values, STREAM), payload)
        np.testing.assert_array_equal(whole.decode(payload, count, values.dtype), numbers)


@pytest.mark.sampled
@every_codec
def test_stochastic_rounding_is_right_on_average(bits: int, book: str) -> None:
    values = np.random.default_rng(0).normal(size=16)
    found = codec(bits, 8, book, "stochastic")
    draws = [
        there_and_back(found, values, RandomStream(f"step {step}", 0, 0)) for step in range(2000)
    ]
    error = np.mean(draws, axis=0) - values
    spread = np.std(draws, axis=0) / np.sqrt(len(draws))
    # float16 rounds a share of the dynamic book
    assert (np.abs(error) <= 5 * spread + 1e-3 * np.abs(values)).all()
    nearest = there_and_back(codec(bits, 8, book), values) - values
    assert np.abs(error).sum() < 0.2 * np.abs(nearest).sum() + 0.03 * (bits == 8)
    np.testing.assert_array_equal(
        draws[0], there_and_back(found, values, RandomStream("step 0", 0, 0))
    )
    assert not np.array_equal(draws[0], draws[1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [0, 1, 127, 129, 1000])
def test_the_bytes_are_those_of_the_kernel(bits: int, count: int) -> None:
    """So a rank with a GPU and one without understand each other."""
    assert KERNEL_BLOCK == GROUP
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    codes, scales = quantise_reference(values, bits)
    payload = codec(bits, GROUP).encode(values, STREAM)
    np.testing.assert_array_equal(payload[: scales.nbytes].view(np.float32), scales)
    if bits == 8:
        np.testing.assert_array_equal(payload[scales.nbytes :].view(np.int8), codes)
    np.testing.assert_array_equal(
        codec(bits, GROUP).decode(payload, count, np.dtype("float32")),
        restore_reference(codes, scales),
    )


def test_a_dynamic_book() -> None:
    book = book_of(4)
    np.testing.assert_allclose(
        book[8:], [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1], rtol=1e-6
    )
    for bits in (8, 4):
        book = book_of(bits)
        assert (
            book.shape == (2**bits,)
            and (np.diff(book) > 0).all()
            and (book[0], book[-1]) == (-1, 1)
        )
        assert 0 in book
    assert ((book_of(8) > 0.001) & (book_of(8) < 0.01)).sum() == 16
    assert 1 / widest(book_of(8)) > 94 and 1 / widest(book_of(4)) > 5.9  # the docstring's


@every_codec
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_an_overflow_is_seen_in_its_block_alone(
    bits: int, book: str, rounding: str, wrong: float
) -> None:
    values = np.linspace(-1, 1, 24, dtype=np.float32)
    values[3] = wrong
    result = there_and_back(codec(bits, 8, book, rounding), values)
    assert np.isnan(result[:8]).all() and np.isfinite(result[8:]).all()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("8bit", True),
        ("4bit:book=dynamic", True),
        ("8bit:rounding=stochastic", False),
        ("8bit:feedback=no", False),
        ("4bit:rounding=stochastic,feedback=yes", True),
    ],
)
def test_feedback_by_default_where_rounding_is_always_the_same(text: str, kept: bool) -> None:
    scheme: Any = scheme_of(text)
    assert scheme.feedback == kept
