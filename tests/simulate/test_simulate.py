"""A simulated step: its accounts add up, folded and unfolded agree, and what slows it down is
felt."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import minidist as md
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPTConfig, MixtureConfig
from minidist.observe.timeline import write_perfetto
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.pipeline.schedule_checker import Times, clock_of
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.simulate.draw import draw_simulation, shown_ranks
from minidist.simulate.failure import describe, stalls
from minidist.simulate.model_flops import flops_a_token, weights_used
from minidist.simulate.one_rank import run_rank
from minidist.simulate.results import Simulation
from minidist.simulate.simulate import simulate
from minidist.simulate.timelines import timelines

CONFIG = GPTConfig(vocabulary=512, context=256, layers=4, width=256, heads=4, positions="rotary")
PLAN = Plan(dp=2, pp=2, tp=2, zero=1, precision="bf16", microbatches=4)
remembered = cache(run_rank)


def simulated(
    plan: Plan = PLAN, config: GPTConfig = CONFIG, cluster: str = "h100:2x4", **options: Any
) -> Simulation:
    """A step; a rank's trace is made once."""
    return simulate(plan, config, cluster, **{"batch": 16, "traces": remembered, **options})


@pytest.fixture(scope="module")
def found() -> Simulation:
    return simulated()


def test_md_simulate_is_the_function_and_the_package() -> None:
    for _ in range(2):  # the second time the package is loaded, and stands in the name
        again = md.simulate(PLAN, CONFIG, "h100:2x4", batch=16, traces=remembered)
        assert isinstance(again, Simulation)
    assert md.simulate.results.Simulation is Simulation  # type: ignore[attr-defined]


def test_the_parts_of_a_step_add_up(found: Simulation) -> None:
    assert sum(sum(parts.values()) for parts in found.parts.values()) == pytest.approx(
        found.step_seconds
    )
    assert sum(found.path_parts.values()) == pytest.approx(found.step_seconds)
    assert {"forward", "backward"} < set(found.parts["busy"]) and {"tp", "pp", "dp"} <= set(
        found.axes
    )
    assert found.tokens == 16 * 256 and found.tokens_per_second == found.tokens / found.step_seconds
    assert 0 < found.mfu < found.hfu * 1.5 < 1.5


def test_the_traffic_is_the_ledgers(found: Simulation) -> None:
    """Of a plan that divides evenly by formula: tp's all-reduces of a block, two in forward and two
    in backward."""
    sent = found.axes["tp"].nbytes
    rows = [
        row
        for rank in range(8)
        for row in found.traces[found.role_of[rank]].last_step
        if row["axis"] == "tp" and row["phase"] == "step"
    ]
    assert sent == sum(row["nbytes"] for row in rows) > 4 * CONFIG.layers * 16 * 256 * 256 * 2
    assert found.axes["pp"].messages == 2 * 4 * PLAN.dp * PLAN.tp  # a microbatch there and back


def test_folded_and_unfolded_agree(found: Simulation) -> None:
    unfolded = simulated(folded=False)
    assert len(unfolded.replayed.ranks) == 8 > len(found.replayed.ranks)
    assert unfolded.step_seconds == pytest.approx(found.step_seconds, rel=1e-9)
    assert unfolded.parts["busy"] == pytest.approx(found.parts["busy"])


def test_memory_over_time_peaks_where_the_account_does(found: Simulation) -> None:
    for rank in (0, found.fullest):
        changes = found.memory(rank)
        assert [when for when, _ in changes] == sorted({when for when, _ in changes})
        highest = max(sum(held.values()) for _, held in changes)
        assert 0.9 < highest / found.peak(rank)["total"] <= 1.0
    assert (
        found.fits
        and not simulated(replace(PLAN, device_memory=found.peak(found.fullest)["total"] - 1)).fits
    )


def test_a_straggler_holds_everybody_up(found: Simulation) -> None:
    slow = simulated(stragglers={5: 3.0})
    busy = found.times[0].busy["forward"] + found.times[0].busy["backward"]
    assert slow.step_seconds > found.step_seconds + 1.5 * busy
    assert slow.bubble > 2 * found.bubble
    assert {
        piece.rank for piece in slow.path if piece.kind == "busy" and piece.name == "backward"
    } >= {5}


def test_a_rank_that_fails_stops_its_tensor_group_first_and_then_all(found: Simulation) -> None:
    after = found.step_seconds / 3
    spread = stalls(found, 5, after)
    assert sorted(stall.rank for stall in spread) == list(range(8))
    times = {stall.rank: stall for stall in spread}
    assert times[5].waits_for == "nothing: it failed" and times[5].seconds <= after
    others = [stall for stall in spread if stall.rank != 5]
    assert others[0].rank == 4 and "all_reduce of the tp group of ranks 4, 5" in others[0].waits_for
    assert all(stall.seconds <= found.step_seconds and stall.waits_for for stall in spread)
    assert "rank 5 fails" in describe(found, spread) and "7 of 7 others" in describe(found, spread)
    with pytest.raises(ConfigError, match="no rank 8 can fail.*choose one below 8"):
        stalls(found, 8, 0.0)
    with pytest.raises(ConfigError, match="rank 5 cannot fail after .* the step takes"):
        stalls(found, 5, found.step_seconds)


def test_a_slow_link_is_felt_on_its_axis(found: Simulation) -> None:
    slow = simulated(slow_links={"node0.nic*": 500.0})
    assert slow.axes["dp"].exposed > 20 * found.axes["dp"].exposed
    assert slow.axes["tp"].exposed == pytest.approx(found.axes["tp"].exposed)
    with pytest.raises(ConfigError, match="no link is called 'node9.*'"):
        simulated(slow_links={"node9.*": 2.0})


def test_the_axis_inside_a_node_is_a_choice(found: Simulation) -> None:
    """Tensor ranks on different nodes: their all-reduces cross the network."""
    apart = simulated(order=("tp", "pp", "dp"))
    assert apart.axes["tp"].exposed > 1.8 * found.axes["tp"].exposed
    assert apart.axes["dp"].seconds < found.axes["dp"].seconds


def test_the_bubble_of_long_stages_is_the_schedules() -> None:
    """Blocks alone: the waiting share is the checker's, of forward and backward as long as they are
    here."""
    config = GPTConfig(vocabulary=8, context=128, layers=4, width=1024, heads=8, positions="rotary")
    found = simulated(Plan(pp=4, microbatches=6, schedule="gpipe"), config, "h100:1x4", batch=6)
    busy = found.times[0].busy
    clock = clock_of(
        make_schedule("gpipe", 4, 6), Times(forward=busy["forward"], backward=busy["backward"])
    )
    assert found.bubble == pytest.approx(clock.bubble, rel=0.1)


def test_energy_and_price_by_hand(found: Simulation) -> None:
    device = found.cluster.device
    assert device.watts is not None and found.joules is not None and found.dollars is not None
    busy = sum(found.parts["busy"].values())
    host = found.cluster.host_watts or 0.0
    idle = device.watts if device.idle_watts is None else device.idle_watts
    each = device.watts * busy + idle * (found.step_seconds - busy) + host * found.step_seconds
    assert found.joules == pytest.approx(8 * each)
    whole = found.for_tokens(1e9)
    assert whole.steps == 1e9 / 4096 and whole.seconds == pytest.approx(
        whole.steps * found.step_seconds
    )
    assert whole.dollars == pytest.approx(8 * device.price_an_hour * whole.seconds / 3600)  # type: ignore[operator]


def test_flops_of_gpt3() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs for 300e9 tokens, 6 a weight, without
    attention's."""
    config = GPTConfig(vocabulary=50257, context=2048, layers=96, width=12288, heads=96)
    assert 6 * weights_used(config) * 300e9 == pytest.approx(3.14e23, rel=0.01)
    assert flops_a_token(config) == 6 * weights_used(config) + 12 * 96 * 12288 * 2048
    experts = replace(config, mixture=MixtureConfig(experts=8, top_k=2))
    assert weights_used(experts) == pytest.approx(
        weights_used(config) + 96 * 12288 * (8 * 12288 + 8)
    )


def test_json_timelines_and_picture(found: Simulation, tmp_path: Path) -> None:
    record = json.loads(json.dumps(found.as_json(1e9)))
    assert record["step_seconds"] == found.step_seconds and record["tokens"]["tokens"] == 1e9
    assert record["memory"]["fits"] and len(record["roles"]["of_rank"]) == 8
    shown = timelines(found, range(8))
    for timeline in shown:
        assert all(
            0 <= span.start < span.stop <= found.step_seconds + 1e-12 for span in timeline.spans
        )
        assert {"compute", "communication"} <= {span.row for span in timeline.spans}
    write_perfetto(tmp_path / "trace.json", shown)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100
    assert {found.placement.coordinates(rank)["pp"] for rank in shown_ranks(found)} == {0, 1}
    draw_simulation(tmp_path / "step.png", found)
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "plan, options, told",
    [
        (
            Plan(dp=2),
            {},
            "dp=2 are 2 ranks, h100:2x4 has 8 devices; choose dp=8, or the cluster h100:2",
        ),
        (
            Plan(dp=3, tp=4),
            {},
            "dp=3 × tp=4 are 12 ranks, h100:2x4 has 8 devices; choose dp=2, or the cluster "
            "h100:3x4",
        ),
        (
            Plan(dp=4, pp=2, microbatches=8),
            {},
            "a batch of 16 sequences for 4 data ranks of 8 microbatches each; choose at "
            "least 32, or fewer microbatches",
        ),
        (
            PLAN,
            {"stragglers": {8: 2.0}},
            "no rank 8 can be slow: the plan has 8 ranks; choose one below 8",
        ),
        (PLAN, {"order": ("dp", "xp")}, "order dp,xp: name different axes"),
        (PLAN, {"cluster": "h10:2x4"}, "no cluster 'h10'; did you mean h100 or "),
    ],
)
def test_what_cannot_be_is_one_line(plan: Plan, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulated(plan, **options)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)
    assert options or isinstance(caught.value, PlanError)
