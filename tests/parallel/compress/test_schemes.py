"""Test what every scheme owes: bytes by its formula, nothing lost, the same bits on all ranks,
overflow seen everywhere."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import SHAPES, expected_bytes, gradients, not_applied, sum_by

from minidist.comm.chunks import bounds
from minidist.errors import ConfigError
from minidist.parallel.compress.adaptive import PROBE
from minidist.parallel.compress.compress import scheme_of

FEEDBACK = [
    "fp16:feedback=yes",
    "bf16:feedback=yes",
    "8bit",
    "4bit",
    "8bit:block=6",
    "4bit:book=dynamic",
    "4bit:rounding=stochastic,feedback=yes",
    "8bit:book=dynamic,rounding=stochastic,feedback=yes",
    "top-k:density=0.05",
    "top-k:density=0.02,warmup=5",
    "threshold:value=0.5",
    "random-k:density=0.05",
    "sign",
    "sign:block=16",
    "powersgd:rank=2",
    "predict",
    "predict:codec=sign,tolerance=0.9",
    "predict:codec=8bit,tolerance=0",
    "adaptive:period=4",
]
OTHERS = [
    "fp16",
    "bf16",
    "8bit:rounding=stochastic",
    "4bit:feedback=no",
    "top-k:momentum=0.9",
    "top-k:feedback=no",
    "random-k:feedback=no",
    "sign:majority=yes",
    "powersgd:feedback=no",
]
VERBS = ["all_reduce", "reduce_scatter"]
N = sum(math.prod(shape) for shape in SHAPES)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("text", FEEDBACK)
def test_nothing_is_lost(text: str, verb: str) -> None:
    """Fifty steps: what was applied and what is kept are together what was given."""
    numbers = partial(gradients, steps=50, size=N)
    assert not_applied(sum_by(text, 3, verb=verb, given=numbers), verb, numbers) < 1e-12


any_sum = given(
    text=st.sampled_from(FEEDBACK),
    verb=st.sampled_from(VERBS),
    size=st.integers(2, 8),
    shapes=st.lists(
        st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ),
)


@settings(max_examples=5, deadline=None)
@any_sum
def test_nothing_is_lost_of_any_shape(
    text: str, verb: str, size: int, shapes: list[tuple[int, ...]]
) -> None:
    check_sum(text, verb, size, shapes)


@pytest.mark.soak
@settings(max_examples=500, deadline=None)
@any_sum
def test_nothing_is_lost_of_very_many_shapes(
    text: str, verb: str, size: int, shapes: list[tuple[int, ...]]
) -> None:
    """The same, more often."""
    check_sum(text, verb, size, shapes)


def check_sum(text: str, verb: str, size: int, shapes: list[tuple[int, ...]]) -> None:
    """Ten steps of one bucket."""
    numbers = partial(gradients, steps=10, size=sum(math.prod(shape) for shape in shapes))
    assert (
        not_applied(sum_by(text, size, verb=verb, shapes=shapes, given=numbers), verb, numbers)
        < 1e-12
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text", ["top-k:feedback=no", "random-k:feedback=no", "powersgd:feedback=no"]
)
def test_without_feedback_much_is_lost(text: str) -> None:
    numbers = partial(gradients, steps=50, size=N)
    sums = sum_by(text, 3, given=numbers)
    total = sum(numbers(rank).sum(axis=0) for rank in range(3))
    assert np.abs(sums.results[0].sum(axis=0) - total).max() > 0.1 * np.abs(total).max()


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*FEEDBACK, *OTHERS])
def test_same_bits_on_all_ranks_and_in_a_second_run(text: str) -> None:
    first = sum_by(text, 3, kind="float32")
    second = sum_by(text, 3, kind="float32")
    for rank in range(3):
        np.testing.assert_array_equal(first.results[rank], first.results[0])
        if not text.startswith("adaptive"):  # that one measures times
            np.testing.assert_array_equal(second.results[rank], first.results[0])


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*FEEDBACK, *OTHERS])
def test_one_rank_has_its_sum(text: str) -> None:
    np.testing.assert_array_equal(sum_by(text, 1, steps=2).results[0], gradients(0, 2, N))
    np.testing.assert_array_equal(
        sum_by(text, 1, steps=2, verb="reduce_scatter").results[0], gradients(0, 2, N)
    )


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("text", [*FEEDBACK, *OTHERS])
def test_fewer_numbers_than_ranks(text: str, verb: str) -> None:
    numbers = partial(gradients, steps=30, size=3)
    sums = sum_by(text, 5, verb=verb, given=numbers, shapes=((3,),))
    if text in FEEDBACK:
        assert not_applied(sums, verb, numbers) < 1e-12


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", [*FEEDBACK, *OTHERS])
def test_an_overflow_is_seen_on_every_rank_and_then_forgotten(
    text: str, wrong: float, verb: str
) -> None:
    """One number of one rank, in the first of three steps."""

    def numbers(rank: int) -> np.ndarray:
        drawn = gradients(rank, 3, N, "float32")
        if rank == 1:
            drawn[0, 100] = wrong
        return drawn

    sums = sum_by(text, 3, verb=verb, kind="float32", given=numbers)
    first = [np.isfinite(result[0]).all() for result in sums.results]
    assert not any(first) if verb == "all_reduce" else not all(first)
    assert all(np.isfinite(result[1:]).all() for result in sums.results)


# -------------------------------------------------------------------------------- bytes on the wire


def two_phase(size: int, verb: str, nbytes: Callable[[int], int], n: int = N) -> int:
    """The formula of two_phase.py."""
    phases = 2 if verb == "all_reduce" else 1
    return (
        phases * (size - 1) * sum(nbytes(stop - start) for start, stop in pairwise(bounds(n, size)))
    )


def formula(text: str, size: int, verb: str, item: int) -> int:
    """The formulas of the docstrings, for SHAPES: matrices 12 × 10 and 10 × 13, and 7 numbers
    beside them."""
    name = text.partition(":")[0]
    reduce = 2 if verb == "all_reduce" else 1
    if name == "top-k":
        return size * (size - 1) * (4 + (4 + item) * round(0.05 * N))
    if name == "random-k":
        return reduce * (size - 1) * item * max(round(0.05 * N), size)
    if name == "powersgd":
        return 2 * (size - 1) * item * (7 + 2 * (12 + 10) + 2 * (10 + 13))
    block = 16 if "16" in text else 4096
    return two_phase(
        size, verb, lambda m: 4 * math.ceil(m / min(block, m)) + math.ceil(m / 8) if m else 0
    )


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("top-k:density=0.05", "all_reduce"),
        *(
            (text, verb)
            for text in (
                "random-k:density=0.05",
                "sign",
                "sign:block=16",
                "sign:majority=yes",
                "powersgd:rank=2",
            )
            for verb in VERBS
        ),
    ],
)
def test_bytes_are_the_formula(text: str, verb: str, size: int, kind: str) -> None:
    sums = sum_by(text, size, verb=verb, kind=kind, steps=2)
    wanted = formula(text, size, verb, np.dtype(kind).itemsize)
    assert sums.bytes_on() == 2 * wanted
    assert expected_bytes(text, size, verb, kind=kind) == wanted


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_bytes_that_the_numbers_decide(size: int) -> None:
    """threshold: of the pairs that pass; a pair of a rank's own chunk stays at home. value=1, one
    step, no history."""
    own = [gradients(rank, 1, N) for rank in range(size)]
    passed = [np.flatnonzero(np.abs(one[0]) >= 1) for one in own]
    assert all(0 < len(places) < N / 2 for places in passed)
    whole = sum_by("threshold:value=1", size, given=own.__getitem__)
    edges = bounds(N, size)
    assert whole.bytes_on() == (size - 1) * sum(4 + 12 * len(places) for places in passed)
    away = sum(
        np.sum((places < edges[rank]) | (places >= edges[rank + 1]))
        for rank, places in enumerate(passed)
    )
    parts = sum_by("threshold:value=1", size, verb="reduce_scatter", given=own.__getitem__)
    assert parts.bytes_on() == size * (size - 1) * 4 + 12 * away
    assert expected_bytes("threshold:value=1", size, "all_reduce") == -1


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("verb", VERBS)
def test_bytes_of_predictions(verb: str, size: int) -> None:
    """First nothing is predicted, and every chunk travels; the same gradients again and again
    become silence."""
    same = partial(lambda rank, steps: np.repeat(gradients(rank, 1, N), steps, axis=0))
    spoken = two_phase(size, verb, lambda m: 1 + 4 * math.ceil(m / 128) + m if m else 0)
    text = "predict:codec=8bit,rate=0.9,tolerance=0.1"
    assert sum_by(text, size, verb=verb, given=partial(same, steps=1)).bytes_on() == spoken
    three, four = (
        sum_by(text, size, verb=verb, given=partial(same, steps=steps)).bytes_on()
        for steps in (3, 4)
    )
    assert four - three == two_phase(size, verb, lambda m: min(m, 1))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_bytes_of_an_agreement(size: int) -> None:
    sums = sum_by("adaptive:hide=1e-12,least=0.05,start=0.05,keep=0.999,period=3", size, steps=3)
    assert sums.bytes_on("control") == size * (size - 1) * (PROBE + 24)
    assert sums.bytes_on() == 3 * formula("top-k", size, "all_reduce", 8)


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top-k:density=0", "density"),
        ("top-k:density=2", "density"),
        ("top-k:warmup=-1", "warmup"),
        ("top-k:momentum=1", "momentum"),
        ("top-k:momentum=0.5,feedback=no", "feedback"),
        ("threshold:value=-1", "value"),
        ("random-k:density=0", "density"),
        ("sign:block=7", "block"),
        ("1-bit:warmup=0", "warmup"),
        ("powersgd:rank=0", "rank"),
        ("predict:codec=zip", "codec"),
        ("predict:rate=1", "rate"),
        ("adaptive:period=2", "period"),
        ("adaptive:keep=1", "keep"),
    ],
)
def test_wrong_options_get_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        scheme_of(text)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("compress")
