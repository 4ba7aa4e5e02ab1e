"""Ranking, explanation, forecast, scaling: what they must say of a small model on small
clusters."""

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import minidist as md
from minidist.cli import main
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.plan.explain import advice, binding, chart_path, explain
from minidist.plan.forecast import ASSUMED, DAY, Prices, forecast, save_seconds
from minidist.plan.ranking import AFFORDABLE, Ranking, command, plan_for, replay_seconds
from minidist.plan.scaling import strong, weak
from minidist.simulate.cluster import Cluster
from minidist.simulate.models import model
from minidist.simulate.results import Simulation
from minidist.simulate.simulate import simulate
from minidist.survive.interval import best_interval, goodput

CONFIG = GPTConfig(vocabulary=4096, context=8192, layers=2, width=1024, heads=2, positions="rotary")
LARGE = GPTConfig(
    vocabulary=4096, context=512, layers=8, width=30720, heads=240, positions="rotary"
)
SIZES = [
    "--layers",
    "2",
    "--width",
    "1024",
    "--heads",
    "2",
    "--vocab",
    "4096",
    "--sequence",
    "8192",
]


@cache
def ranked(objective: str = "time", confirm: int = 0, cluster: str = "h100:2x2") -> Ranking:
    return plan_for(CONFIG, cluster, batch=8, objective=objective, confirm=confirm)


def test_the_best_is_least_of_what_was_asked_for() -> None:
    found = ranked()
    seconds = [choice.step_seconds for choice in found.top(50)]
    assert seconds == sorted(seconds) and 0 < found.mfu(found.best) < 1
    assert ranked("memory").best.total == min(
        ranked("memory").estimates.total[ranked("memory").order]
    )
    assert ranked("memory").best.total < found.best.total
    by_cost, by_energy = (ranked(objective, cluster="h100:1x2") for objective in ("cost", "energy"))
    assert by_cost.best.dollars == pytest.approx(
        2 / 3600 * by_cost.top(1)[0].step_seconds * (found.cluster.device.price_an_hour or 0)
    )
    assert by_energy.best.joules is not None


def test_the_replay_confirms_the_best() -> None:
    found = ranked(confirm=2)
    assert len(found.confirmed) == 2 and found.best is found.confirmed[0]
    first, second = (choice.confirmed for choice in found.confirmed)
    assert first and second and first.step_seconds <= second.step_seconds and first.fits
    assert found.best.step_seconds == pytest.approx(first.step_seconds, rel=0.15)
    assert found.best.known_by == "replayed" and found.best.known_seconds == first.step_seconds
    assert found.best.known_total == first.peak(first.fullest)["total"]
    assert found.top(3)[2].known_by == "estimated"


@pytest.fixture
def first_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan that is replayed needs more memory than its device has."""
    ran: list[Simulation] = []

    def run(*words: Any, **options: Any) -> Simulation:
        found = simulate(*words, **options)
        ran.append(found)
        cluster = found.cluster
        tiny = replace(cluster, device=replace(cluster.device, memory_bytes=1))
        return replace(found, cluster=tiny) if len(ran) == 1 else found

    monkeypatch.setattr("minidist.plan.ranking.simulate", run)


def test_a_plan_that_does_not_fit_when_replayed_loses_its_place(first_is_too_large: None) -> None:
    before = ranked()
    found = plan_for(CONFIG, "h100:2x2", batch=8, confirm=1)
    assert [choice.plan for choice in found.refused] == [before.best.plan]
    assert len(found) == len(before) - 1 and len(found.confirmed) == 1
    assert found.best.confirmed is not None and found.best.fits and not found.refused[0].fits
    lost = (found.refused[0].plan, found.refused[0].order)
    assert lost not in [(choice.plan, choice.order) for choice in found.top(len(found))]


@pytest.mark.parametrize(("affordable", "ran"), [(0.0, 0), (1.0, 1), (100.0, 3)])
def test_by_default_as_many_are_replayed_as_are_affordable(
    affordable: float, ran: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minidist.plan.ranking.AFFORDABLE", affordable)
    monkeypatch.setattr("minidist.plan.ranking.replay_seconds", lambda plan, config: 0.6)
    found = plan_for(CONFIG, "h100:2x2", batch=8, confirm=None)
    assert len(found.confirmed) == ran or ran == 3 < len(found.confirmed)
    seconds = [choice.known_seconds for choice in found.top(20)]
    assert seconds == sorted(seconds)
    assert affordable < 100 or found.best.known_by == "replayed"


def test_a_replay_is_expected_to_take_longer_for_more_passes_and_calls() -> None:
    few, more, tensor = (
        replay_seconds(md.Plan(**sizes), CONFIG)
        for sizes in (dict(dp=4), dict(dp=4, accumulate=2), dict(dp=2, tp=2, accumulate=2))
    )
    assert 0 < few < more < tensor < AFFORDABLE


def test_md_plan_for_is_the_function() -> None:
    assert md.plan_for is plan_for


def test_the_command_line_runs_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = ranked()
    words = shlex.split(command(found.best, SIZES, found))
    assert main(words[1:]) == 0
    assert "s a step" in capsys.readouterr().out


@pytest.mark.soak
def test_what_fits_nowhere_is_refused_with_a_cluster_that_does() -> None:
    with pytest.raises(
        ConfigError, match=r"fits into h100:1x1 with no plan; choose h100:\d+x1"
    ) as told:
        plan_for(LARGE, "h100:1x1", batch=64)  # nor does one layer, from disk
    nearest = str(told.value).split("choose ")[1].split(",")[0].split(" ")[0]
    assert len(plan_for(LARGE, nearest, batch=64))
    with pytest.raises(ConfigError, match="no cluster 'h10'; did you mean h100"):
        plan_for(CONFIG, "h10:1x8", batch=8)
    with pytest.raises(
        ConfigError, match="objective 'speed'; choose one of time, cost, energy, memory"
    ):
        plan_for(CONFIG, "h100:1x8", batch=8, objective="speed")


# -------------------------------------------------------------------------------------- explanation


def test_the_terms_of_the_explanation_add_up_and_more_hardware_never_hurts() -> None:
    found = ranked()
    told = explain(found)
    assert told.runner_up is not None and told.runner_up.plan != told.winner.plan
    assert sum(spent for _, spent in told.why) == pytest.approx(
        told.runner_up.step_seconds - told.winner.step_seconds
    )
    assert set(told.twice) == {"memory", "FLOP/s", "links in a node", "network"}
    assert (
        all(0.4 < share <= 1.0 + 1e-9 for share in told.twice.values())
        and told.twice["FLOP/s"] < 0.95
    )
    assert binding(found, found.best) == told.binds and "of the step" in told.binds


def test_the_notes_chart_and_table_row_by_row() -> None:
    """A box of the chart for what is too large; the table's row by the number of weights."""
    assert chart_path(CONFIG, Cluster.parse("h100:1x8")) == [
        "the batch is the limit: data parallelism"
    ]
    assert chart_path(model("gpt3-175b"), Cluster.parse("a100-80g:64x8")) == [
        "too many layers: pipeline parallelism"
    ]
    assert chart_path(model("megatron-1t"), Cluster.parse("a100-80g:64x8")) == [
        "a layer is too large: tensor parallelism",
        "too many layers: pipeline parallelism",
    ]
    long = replace(CONFIG, context=1 << 17)
    assert chart_path(long, Cluster.parse("h100:1x8")) == [
        "the sequence is too long: sequence parallelism"
    ]
    assert advice(ranked()).row.startswith("< 10B: data parallelism with ZeRO-2")


# ----------------------------------------------------------------------------- forecast and scaling


def test_the_forecast_is_the_formulas_of_chapter_26() -> None:
    found = ranked()
    taken = forecast(
        found.best,
        found,
        tokens=1e12,
        interruptions_a_day=24,
        prices=Prices(failures=1.0, save=30.0),
    )
    a_day = 24 + 4 / 1000
    interval = best_interval(30.0, DAY / a_day)
    assert taken.spot.interval == interval
    assert taken.spot.goodput == goodput(interval, save=30.0, between=DAY / a_day, restart=300.0)
    assert taken.steps == 1e12 / (8 * 8192)
    assert taken.days == pytest.approx(taken.steps * found.best.step_seconds / DAY)
    assert taken.spot.days > taken.cloud.days > taken.days
    price = found.cluster.device.price_an_hour
    assert price is not None and taken.cloud.dollars == pytest.approx(
        4 * price * 24 * taken.cloud.days
    )
    assert taken.spot.dollars == pytest.approx(0.4 * 4 * price * 24 * taken.spot.days)


def test_each_number_of_the_forecast_has_a_source_or_is_named_as_assumed() -> None:
    found = ranked()
    told = {
        one.name: one
        for one in forecast(found.best, found, tokens=1e12, prices=Prices(own=0.2)).premises
    }
    assert set(told) == {
        "price",
        "spot",
        "own",
        "kwh",
        "save",
        "restart",
        "failures",
        "interruptions",
    }
    assert {name for name, one in told.items() if one.source == ASSUMED} == {
        "restart",
        "interruptions",
    }
    assert told["own"].value == 0.2 and told["own"].source == "given"
    assert told["price"].source.startswith("AWS") and told["spot"].source.startswith("Google")
    assert (
        told["save"].value
        == save_seconds(found)
        == pytest.approx(12 * CONFIG.numbers / 2 / 3.8e9, rel=0.05)
    )
    here = forecast(
        found.best, replace(found, cluster=replace(found.cluster, tiers={})), tokens=1e12
    )
    assert {one.name for one in here.premises if one.source == ASSUMED} == {
        "own",
        "save",
        "restart",
        "interruptions",
    }


@pytest.mark.parametrize(
    "word, told",
    [
        ("spat=1", "did you mean spot"),
        ("spot=-1", "is not a number above 0"),
        ("kwh", "is not a number above 0"),
    ],
)
def test_a_premise_that_cannot_be_is_refused(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Prices.given([word])


@pytest.mark.soak
def test_weak_scaling_is_nearer_to_linear_than_strong() -> None:
    near = weak(CONFIG, "h100:2x2", a_device=4)
    far = strong(CONFIG, "h100:2x2", batch=8)
    assert [point.nodes for point in near] == [1, 2] and near[0].efficiency == far[
        0
    ].efficiency == 1.0
    assert far[-1].efficiency < near[-1].efficiency <= 1.01 and near[-1].batch == 16


# --------------------------------------------------------------------------------- the command line


def test_minidist_plan_tells_ranking_reasons_and_forecast(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "plan",
        "--cluster",
        "h100:2x2",
        *SIZES,
        "--batch",
        "4",
        "--tokens",
        "1e12",
        "--top",
        "3",
        "--scaling",
        "--json",
        str(tmp_path / "found.json"),
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert (
        "plans enumerated" in out
        and "run it: minidist simulate --cluster h100:2x2" in out
        and "spot" in out
    )
    assert "restart = 300 s until work goes on: assumed" in out and "tier.disk" in out
    assert (
        out.count("scaling ──") == 2 and "near-linear (N0:430, N1:100, N2:86; 90%, assumed)" in out
    )
    assert "ranked by time: by formulas, " in out and " of the best by replay" in out
    assert "replayed" in out and "known by" in out
    assert '"spot"' in (tmp_path / "found.json").read_text()


PLAN = ["plan", "--cluster", "h100:2x2", *SIZES, "--batch", "8"]


def test_without_a_replay_each_row_says_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--confirm", "0", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "by formulas (--confirm 1 simulates the best" in out
    assert out.count("estimated │") == 2 and "replayed" not in out


def test_the_table_marks_what_does_not_fit_when_replayed(
    first_is_too_large: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    assert main([*PLAN, "--confirm", "1", "--top", "2", "--json", str(path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    first, second, refused = (
        next(at for at, row in enumerate(rows) if row.split("│")[1].strip(" ≈") == number)
        for number in ("1", "2", "-")
    )
    assert "replayed" in rows[first] and "estimated" in rows[second]
    assert first < second < refused and "does not" in " ".join(rows[refused:])
    found = json.loads(path.read_text())
    assert [plan["fits"] for plan in found["plans"]] == [True, True]
    assert [plan["fits"] for plan in found["refused"]] == [False]
    assert found["refused"][0]["confirmed_bytes"] > 1


@pytest.mark.parametrize(
    "words, told",
    [
        (["--batch", "8"], "give one of the two"),
        (["--cluster", "h100:2x2", "--here", "--batch", "8"], "give one of the two"),
        (["--cluster", "h100:2x2", "--batch", "8", "--run", "3"], "--run goes with --here"),
        (["--cluster", "h100:2x2", "--batch", "8", "--model", "gpt9"], "the nearest name is"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1
