"""Test what all ranks must have alike: described so that equal values have equal texts, and
compared."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.comm.records import check_alike, described, named
from minidist.errors import MismatchError
from minidist.nn import MixtureConfig


class Rule:
    """A user's rule, which is called."""

    def __init__(self, rate: float, about: Any = None) -> None:
        self.rate = rate
        self.about = about

    def __call__(self, name: str) -> float:
        return self.rate

    def of(self, name: str) -> float:
        return self.rate


def rule_of(rate: float) -> Callable[[str], float]:
    return lambda name: rate


EQUAL = [
    (0.001, np.float64(0.001)),
    (3, np.int64(3)),
    (2.0, 2),
    ((1, 2), [1, 2]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({3, 1}, {1, 3}),
    (np.arange(3), np.arange(3)),
    (rule_of(0.1), rule_of(0.1)),
    (Rule(0.1), Rule(0.1, about=object())),
    (partial(rule_of, 0.1), partial(rule_of, 0.1)),
    (Rule(0.1).of, Rule(0.1).of),
    (object(), object()),
    (MixtureConfig(experts=3, top_k=1), MixtureConfig(experts=3, top_k=1)),
]

TWO = [lambda name: 0.1, lambda name: 0.2]  # on one line: they have the same source

DIFFERENT = [
    (0.001, 0.002),
    (None, 0),
    (1, "1"),
    (float("nan"), 0.0),
    ((1, 2), (2, 1)),
    ({"a": 1}, {"a": 2}),
    (np.arange(3), np.arange(3) + 1),
    (np.arange(3), np.arange(3.0)),
    (rule_of(0.1), rule_of(0.2)),
    (Rule(0.1), Rule(0.2)),
    (Rule(0.1).of, Rule(0.2).of),
    (TWO[0], TWO[1]),
    (partial(rule_of, 0.1), partial(rule_of, rate=0.1)),
    (Rule, EQUAL),
    (MixtureConfig(experts=3, top_k=1), MixtureConfig(experts=3, top_k=2)),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_have_equal_texts(one: Any, other: Any) -> None:
    assert described(one) == described(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    assert described(one) != described(other)


def test_a_function_may_hold_itself_or_nothing_yet() -> None:
    def outer() -> Any:
        def again(name: str) -> Any:
            return again if name else later

        text = described(again)
        later = 1
        return text, later

    assert outer()[0].startswith("function ")


def test_names_of_inner_values() -> None:
    assert named("config", {"width": 8, "mixture": {"top_k": 2}}) == {
        "config width": 8,
        "config mixture top_k": 2,
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 1, 2, 1], "rank 2: a is 2, rank 0 has 1; give every rank the same"),
        ([2, 1, 1, 1], "rank 0: a is 2, rank 1 has 1; give every rank the same"),
        (
            [1, 2, 1, 3],
            "rank 1: a is 2, rank 0 has 1; ranks 3 differ too; give every rank the same",
        ),
        (
            [2, 1, 2, 1],
            "rank 1: a is 1, rank 0 has 2; ranks 3 differ too; give every rank the same",
        ),
    ],
)
def test_the_ranks_that_differ_from_most_are_named(values: list[int], words: str) -> None:
    def rank(world: Any) -> str:
        check_alike(world, {"b": 0, "a": 7})
        with pytest.raises(MismatchError) as error:
            check_alike(world, {"b": 0, "a": values[world.rank]})
        return str(error.value)

    assert {*md.run(rank, size=4)} == {words}


def test_it_costs_eight_bytes_a_rank_under_control() -> None:
    def rank(world: Any) -> Any:
        check_alike(world, {f"part {number}": "x" * number for number in range(100)})
        return world.ledger.sent_bytes(), world.ledger.messages()

    assert (
        md.run(rank, size=3)
        == [({"control": {"all_gather": 16}}, {"control": {"all_gather": 2}})] * 3
    )
    assert md.run(rank, size=1) == [({}, {})]
