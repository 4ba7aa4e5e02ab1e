"""Where the numbers of a state lie: runs, stripes and overlaps beside a version that asks number by
number."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import tiny

import minidist as md
from minidist.nn import GPT
from minidist.optim import SGD, AdamW
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.state import state_map
from minidist.parallel.state.state_map import (
    overlap,
    runs_of,
    small_state,
    state_arrays,
    state_places,
    stripes_of,
)
from minidist.parallel.step.single import Single


@st.composite
def any_runs(draw: Any, numbers: int = 40) -> np.ndarray:
    """Runs of some of so many numbers, in any order, perhaps none, also such that touch."""
    edges = sorted(draw(st.sets(st.integers(0, numbers), max_size=12)))
    runs = [(start, stop) for start, stop in pairwise(edges) if draw(st.booleans())]
    return np.array(draw(st.permutations(runs)), np.int64).reshape(-1, 2)


def elements(runs: np.ndarray) -> list[int]:
    """The positions that an array of these runs has, one by one."""
    return [position for start, stop in runs.tolist() for position in range(start, stop)]


@settings(max_examples=60)
@given(any_runs(), any_runs())
def test_overlap_is_every_number_that_both_have(have: np.ndarray, want: np.ndarray) -> None:
    mine = elements(have)
    wanted = elements(want)
    expected = {
        (mine.index(position), wanted.index(position)) for position in mine if position in wanted
    }
    copies = overlap(have, want).tolist()
    found = [(source + i, target + i) for source, target, count in copies for i in range(count)]
    assert len(found) == len(expected) and set(found) == expected
    # a file is read forward
    assert [source for source, _, _ in copies] == sorted(source for source, _, _ in copies)
    joined = [
        source + count == following and target + count == then
        for (source, target, count), (following, then, _) in pairwise(copies)
    ]
    assert not any(joined) and all(count > 0 for _, _, count in copies)


@settings(max_examples=60)
@given(
    any_runs()
    | st.builds(
        lambda start, length, gap, count: np.array(
            [[start + i * gap, start + i * gap + length] for i in range(count)], np.int64
        ).reshape(-1, 2),
        st.integers(0, 9),
        st.integers(1, 4),
        st.integers(4, 9),
        st.integers(0, 9),
    )
)
def test_stripes_say_the_same_as_runs(runs: np.ndarray) -> None:
    stripes = stripes_of(runs)
    again = runs_of(stripes)
    assert again.dtype == np.int64 and again.tolist() == runs.tolist()
    assert len(stripes) <= len(runs) and all(
        type(number) is int for stripe in stripes for number in stripe
    )


def test_a_part_by_columns_is_one_stripe() -> None:
    assert stripes_of(np.array([[3 + 6 * row, 6 + 6 * row] for row in range(1000)])) == [
        [3, 3, 6, 1000]
    ]


def misplaced(
    world: Any, plan: dict[str, Any], changes: dict[str, Any]
) -> tuple[list[str], dict[str, list[int]]]:
    """(weights of a rank that are not the serial model's at the positions that the map names, all
    those positions)."""
    trainer = Trainer(
        md.Plan(bucket_bytes=700, **plan), tiny(**changes), world, seed=3, optimizer="sgd"
    )
    serial = GPT(tiny(**changes))
    serial.initialize(3)
    whole = dict(serial.named_parameters())
    wrong = []
    positions = dict[str, list[int]]()
    for place, array in zip(
        state_places(trainer.strategy, trainer.optimizer),
        state_arrays(trainer.strategy, trainer.optimizer, changes=False),
        strict=True,
    ):
        assert (
            array.ndim == 1 and place.size == array.size and place.shape == whole[place.name].shape
        )
        mine = elements(place.runs)
        positions.setdefault(place.name, []).extend(mine)
        if not np.array_equal(whole[place.name].data.reshape(-1)[mine], array):
            wrong.append(place.name)
    trainer.close()
    return wrong, positions


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ({"dp": 3, "zero": 2}, {}),
        ({"tp": 3, "dp": 2, "zero": 3}, {"heads": 4, "kv_heads": 2, "tied": True}),
        ({"pp": 2, "tp": 2, "schedule": "interleaved"}, {"layers": 3}),
        ({"dp": 4, "zero": 3, "shard": 2}, {}),
        ({"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-v"}, {"tied": True}),
    ],
    ids=["zero-2", "tp and zero-3", "interleaved", "shared by 2", "there and back"],
)
def test_the_map_is_where_the_numbers_lie(plan: dict[str, Any], changes: dict[str, Any]) -> None:
    """Each rank's numbers are those at its positions, and together the ranks have all of them."""
    changes = {"width": 12, "heads": 3, **changes}
    ranks = md.run(misplaced, plan, changes, size=md.Plan(**plan).size)
    assert [wrong for wrong, _ in ranks] == [[]] * len(ranks)
    for name, weight in GPT(tiny(**changes)).named_parameters():
        assert {p for _, positions in ranks for p in positions.get(name, [])} == set(
            range(weight.size)
        ), name


def test_kinds_frozen_weights_and_updates() -> None:
    """Each tensor of the optimizer comes with its state; a frozen weight comes alone; updates are
    by whole names."""
    model = GPT(tiny(layers=1))
    model.initialize(0)
    frozen = dict(model.named_parameters())["blocks.0.mlp.up.bias"]
    frozen.requires_grad = False
    strategy = Single(model)
    for optimizer, kinds in ((AdamW, ["weight", "m", "v"]), (SGD, ["weight"])):
        rule: Any = optimizer([p for p in strategy.parameters if p.requires_grad], 0.1)
        by_name: dict[str, list[str]] = {}
        for place in state_places(strategy, rule):
            by_name.setdefault(place.name, []).append(place.kind)
        assert by_name.pop("blocks.0.mlp.up.bias") == ["weight"]
        assert {*map(tuple, by_name.values())} == {tuple(kinds)} and "tokens.weight" in by_name
        state = {"updates": {name: 7 for name in by_name}, "precision": {"skipped": 2}}
        state_map.set_small_state(strategy, rule, state, rank=0)
        assert small_state(strategy, rule) == state
