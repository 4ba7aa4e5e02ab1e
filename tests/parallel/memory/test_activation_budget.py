"""An activation budget: the knapsack is exact, the choice never takes more than the budget, and
changes no weights."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import difference, global_batch, tiny

import minidist as md
from minidist.errors import MemoryLimitError, PlanError
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activation_budget import (
    MEASURED,
    Stage,
    Way,
    _with_last,
    knapsack,
    plain_knapsack,
)

CONFIG = tiny(layers=4, context=16, width=16)


def cost(blocks: list[dict[str, Way]], chosen: list[str] | None) -> tuple[int, float] | None:
    """Bytes and seconds of a choice."""
    if chosen is None:
        return None
    ways = [block[name] for block, name in zip(blocks, chosen, strict=True)]
    return sum(way.nbytes for way in ways), sum(way.seconds for way in ways)


@given(
    blocks=st.lists(
        st.fixed_dictionaries(
            {
                name: st.builds(Way, st.integers(0, 9), st.integers(0, 9).map(float))
                for name in ("none", "scores", "all")
            }
        ),
        min_size=1,
        max_size=5,
    ),
    limit=st.integers(0, 40),
    more=st.integers(-9, 9),
)
@settings(max_examples=60)
def test_the_knapsack_is_the_best_of_all_choices(
    blocks: list[dict[str, Way]], limit: int, more: int
) -> None:
    found = [
        cost(blocks, list(names))
        for names in product(("none", "scores", "all"), repeat=len(blocks))
    ]
    best = min((each[1] for each in found if each and each[0] <= limit), default=None)
    for solve in (plain_knapsack, knapsack):
        ours = cost(blocks, solve(blocks, limit))
        assert (ours and ours[1]) == best
        assert ours is None or ours[0] <= limit
    last = [
        (cost(blocks[:-1], list(names[:-1])), blocks[-1][names[-1]])
        for names in product(("none", "scores", "all"), repeat=len(blocks))
    ]
    best = min(
        (
            rest[1] + way.seconds
            for rest, way in last
            if rest and rest[0] <= limit + more and rest[0] + way.nbytes <= limit
        ),
        default=None,
    )
    ours = cost(blocks, _with_last(blocks, limit, limit + more) or None)
    assert (ours and ours[1]) == best


def train(
    plan: dict[str, Any], *, steps: int = MEASURED + 2, config: Any = CONFIG
) -> list[dict[str, Any]]:
    """Return what each rank of a plan holds after some steps."""

    def rank(world: Any) -> dict[str, Any]:
        trainer = Trainer(Plan(**plan), config, world, lr=1e-2, seed=3)
        try:
            for step in range(steps):
                trainer.step(global_batch(step, 8, config))
            budget = trainer.budget
            return {
                "weights": trainer.state_dict(),
                "peak": trainer.account.peak["activations"],
                "chosen": budget and budget.chosen,
                "again": budget and budget.recomputed_steps(steps),
            }
        finally:
            trainer.close()

    return md.run(rank, size=Plan(**plan).size, limit=300.0)


def check(plan: dict[str, Any], parts: list[float]) -> None:
    """For budgets between the peak of "all" and that of "none": within the budget, and the same
    weights."""
    ends = [train({**plan, "checkpoint_blocks": which}) for which in ("all", "none")]
    least, most = (max(rank["peak"] for rank in ranks) for ranks in ends)
    for part in parts:
        limit = int(least + part * (most - least)) + 64  # a loss more or less
        ours = train({**plan, "activation_memory": limit})
        assert max(rank["peak"] for rank in ours) <= limit
        assert len({tuple(rank["chosen"]) for rank in ours}) == 1
        assert difference(ours[0]["weights"], ends[0][0]["weights"]) < 1e-10
        assert part < 1 or plan.get("pp", 1) > 1 or set(ours[0]["chosen"]) == {"none"}
        assert ours[0]["again"] == [MEASURED + 2 * (way == "all") for way in ours[0]["chosen"]]
    with pytest.raises(MemoryLimitError, match="raise it, or use fewer sequences per pass"):
        train({**plan, "activation_memory": least // 2}, steps=MEASURED)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({}, [0.5, 1.0]),
        ({"dp": 2, "zero": 3, "accumulate": 2}, [0.5]),
        ({"pp": 2, "microbatches": 4}, [0.5]),
    ],
    ids=str,
)
def test_within_the_budget(plan: dict[str, Any], parts: list[float]) -> None:
    check(plan, parts)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2},
        {"tp": 2},
        {"tp": 2, "pp": 2, "microbatches": 4},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "schedule": "interleaved", "microbatches": 4},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 3, "dp": 2},
        {"pp": 2, "schedule": "zb-v"},
        {"dp": 2, "zero": 1},
        {"tp": 2, "keep_activations": "shard"},
        {"keep_activations": "offload"},
    ],
    ids=str,
)
def test_within_the_budget_for_long(plan: dict[str, Any]) -> None:
    kept = (
        {**plan}
        if "keep_activations" not in plan
        else {name: value for name, value in plan.items() if name != "keep_activations"}
    )
    check(kept, [0.0, 0.25, 0.5, 0.75, 1.0])
    if kept != plan:
        ends = [train({**kept, "checkpoint_blocks": which}) for which in ("all", "none")]
        limit = sum(max(rank["peak"] for rank in ranks) for ranks in ends) // 2
        ours = train({**plan, "activation_memory": limit})
        assert max(rank["peak"] for rank in ours) <= limit
        assert difference(ours[0]["weights"], ends[0][0]["weights"]) < 1e-10


def test_the_peak_of_the_whole_run_is_told() -> None:
    """The account's peaks are reset while the first steps are measured, and put together
    afterwards."""

    def rank(world: Any) -> tuple[int, int]:
        trainer = Trainer(Plan(activation_memory=1 << 30), CONFIG, world)
        large = trainer.account.hold(np.zeros(1 << 20), "workspace")
        trainer.step(global_batch(0, 8, CONFIG))
        del large
        for step in range(1, MEASURED):
            trainer.step(global_batch(step, 8, CONFIG))
        peak = trainer.account.peak["workspace"]
        trainer.close()
        return peak, len(trainer.model.blocks[0]._hooks["backward"])

    peak, hooks = md.run(rank, size=1)[0]
    assert peak >= 8 << 20
    assert hooks == 0


def test_a_new_plan_measures_anew() -> None:
    def rank(world: Any) -> tuple[Any, Any]:
        trainer = Trainer(Plan(), CONFIG, world)
        trainer.step(global_batch(0, 8, CONFIG))
        trainer.change_plan(Plan(activation_memory=1 << 30))
        for step in range(MEASURED):
            trainer.step(global_batch(step, 8, CONFIG))
        chosen = trainer.budget.chosen
        trainer.close()
        return chosen, trainer.steps_done

    assert md.run(rank, size=1)[0] == (["none"] * CONFIG.layers, MEASURED + 1)


def test_how_many_microbatches_a_rank_holds() -> None:
    from minidist.parallel.pipeline.schedules import make_schedule  # noqa: PLC0415 - beside its numbers

    assert [make_schedule("1f1b", 3, 6).held(rank) for rank in range(3)] == [3, 2, 1]
    assert [make_schedule("gpipe", 3, 6).held(rank) for rank in range(3)] == [6, 6, 6]
    assert Stage((0, 1)).held == 1


def test_experts_are_refused() -> None:
    config = tiny(mixture=md.nn.MixtureConfig(experts=2))
    with pytest.raises(PlanError, match="how many tokens these get changes from step to step"):
        train({"activation_memory": 1 << 30}, config=config)
