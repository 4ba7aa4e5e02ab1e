"""Test what `minidist bench compress` is asked to show: each bound on either side of its edge."""

from typing import Any

import pytest

from minidist.bench.compress.bounds import AskedBound, bounds_of_advice, bounds_of_times
from minidist.cli import main


def row(way: str, above: float | None, seconds: float | None) -> dict[str, Any]:
    return {"way": way, "above_plain": above, "cells": [{"seconds": 1.0}, {"seconds": seconds}]}


def times(*rows: dict[str, Any], through: tuple[dict[str, Any], ...] = ()) -> list[AskedBound]:
    return bounds_of_times(
        {
            "bandwidths": [1.25e6, 1.25e7],
            "rows": [row("none", 0.0, 100.0), *rows],
            "through": list(through),
        }
    )


def through(measured: float | None) -> dict[str, Any]:
    return {"way": "top-k", "bandwidth": 1.25e7, "predicted": 10.0, "measured": measured}


@pytest.mark.parametrize(
    ("above", "seconds", "held"),
    [
        (0.01, 10.0, True),
        (0.011, 10.0, False),
        (0.0, 10.1, False),
        (-0.01, None, False),
        (None, 1.0, False),
    ],
)
def test_ten_times_sooner_at_nearly_the_same_loss(above, seconds, held):
    assert times(row("top-k", above, seconds))[0].held is held


def test_the_soonest_counts_of_those_that_are_good_enough():
    first = times(row("fp16", 0.0, 50.0), row("top-k", 0.005, 8.0), row("sign", 0.02, 2.0))[0]
    assert first.held and first.found == "top-k, 12.5 times"


def test_without_that_link_it_is_not_measured():
    [bound] = bounds_of_times(
        {"bandwidths": [1.25e6], "rows": [row("none", 0.0, 1.0)], "through": []}
    )
    assert bound.held is None and "not measured" in bound.line


@pytest.mark.parametrize(("above", "held"), [(0.015, True), (0.016, False), (-0.02, True)])
def test_local_steps_end_near_none(above, held):
    assert times(row("local-steps:every=25", above, 5.0))[1].held is held


@pytest.mark.parametrize(
    ("measured", "held"), [(10.4, True), (9.6, True), (10.6, False), (9.4, False), (None, None)]
)
def test_a_cell_that_was_run_to_its_end(measured, held):
    assert times(through=(through(measured),))[1].held is held


def advice(
    right: int, counted: int, predicted: float | None = None, found: float | None = 1.0
) -> list[dict[str, Any]]:
    return [
        {
            "ranks": 4,
            "score": (right, counted),
            "rows": [
                {
                    "way": "fp16",
                    "cells": [0] * counted,
                    "break_even": predicted,
                    "measured_break_even": found,
                    "by_halves": [0.9, 1.2],
                }
            ],
        }
    ]


@pytest.mark.parametrize(
    ("right", "counted", "held"), [(19, 20, True), (18, 20, False), (0, 0, None)]
)
def test_advice_is_right_in_most_cells(right, counted, held):
    [bound] = bounds_of_advice(advice(right, counted))
    assert bound.held is held


@pytest.mark.parametrize(
    ("predicted", "held"), [(1.14, True), (0.86, True), (1.16, False), (0.84, False)]
)
def test_a_break_even_is_near(predicted, held):
    bound = bounds_of_advice(advice(20, 20, predicted))[1]
    assert bound.held is held
    assert bound.found == f"{predicted - 1:+.0%}; as measured by two halves of the rounds 33% apart"


@pytest.mark.parametrize("words", [[], ["--advise"], ["--full", "--advise"]])
def test_hold_needs_bounds(words, capsys):
    assert main(["bench", "compress", "--hold", *words]) == 2
    assert "--hold: bounds are for --full" in capsys.readouterr().err
