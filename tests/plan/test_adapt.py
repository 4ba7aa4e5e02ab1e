"""The planner of a run: with planted measurements it advises a change exactly where the gain exceeds
the price; bytes that move are those of a real change."""

from dataclasses import replace
from typing import Any

import pytest
from training import tiny

import minidist as md
from minidist.nn import GPTConfig
from minidist.observe.link_times import LinkProfile
from minidist.observe.rank_steps import RankSteps
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.plan.adapt import (
    DOUBT,
    NOISE,
    Adviser,
    Look,
    by_pace,
    look_at,
    moved_bytes,
    plain_choice,
    with_latency,
)
from minidist.simulate.device import Device, Efficiency

CONFIG = GPTConfig(vocabulary=64, context=32, layers=4, width=64, heads=4, dtype="float32")
DEVICE = Device(
    "planted",
    {"float32": 1e11, "float64": 5e10},
    1 << 33,
    1e10,
    kind="cpu",
    efficiency=Efficiency(matmul_share=1.0, half=8.0, launch=1e-6, shortest=0.0, python=1e-5),
)
FAST = 1e-10  # seconds a byte
SLOW = 1e-6


def planted(seconds: float, beta: float, compute: tuple[float, ...] = (0.1,)) -> Look:
    """What two ranks of one node measured."""
    links = {
        (src, dst): LinkProfile(src, dst, 1e-5, beta, 1.0, 20, 1 << 20)
        for src, dst in ((0, 1), (1, 0))
    }
    return Look(seconds, compute, links, {0: "a", 1: "a"})


def adviser(**changes: Any) -> Adviser:
    return Adviser(CONFIG, 8, DEVICE, ["a", "a"], **{"first": 0.5, **changes})


def test_the_plain_choice_ends_the_rest_of_the_run_first() -> None:
    seconds = {"now": 1.0, "a": 0.5, "b": 0.4}
    assert plain_choice("now", seconds, {"a": 2.0, "b": 4.5}, 4) == "now"  # 2 s gain a price of 2
    assert plain_choice("now", seconds, {"a": 2.0, "b": 4.5}, 5) == "a"
    assert plain_choice("now", seconds, {"a": 2.0, "b": 4.5}, 25) == "a"
    assert plain_choice("now", seconds, {"a": 2.0, "b": 4.5}, 26) == "b"


def test_over_a_fast_link_no_change_pays() -> None:
    advice = adviser().advise(Plan(dp=2), planted(0.11, FAST), left=1000)
    assert advice is not None
    assert not advice.pays
    assert advice.gain < 0 < advice.price


def test_over_a_slow_link_a_change_pays_if_enough_steps_are_left() -> None:
    """Both sides of the threshold: one step fewer, and the price is not covered."""
    look = planted(0.9, SLOW)
    advice = adviser().advise(Plan(dp=2), look, left=1000)
    assert advice is not None
    assert advice.pays
    assert advice.plan.pp == 2
    assert advice.nbytes == 0  # both ranks have all of the state
    enough = int(advice.price / (advice.now - advice.then)) + 1
    for left, pays in ((enough, True), (enough - 1, False)):
        again = adviser().advise(Plan(dp=2), look, left=left)
        assert again is not None
        assert (again.pays, again.plan) == (pays, advice.plan)
        assert again.gain == pytest.approx(left * (0.9 - again.then))


def test_a_slow_first_step_is_part_of_the_price() -> None:
    look = planted(0.9, SLOW)
    cheap, dear = (adviser(first=first).advise(Plan(dp=2), look, left=10) for first in (0.1, 100.0))
    assert cheap is not None and dear is not None
    assert dear.price - cheap.price == pytest.approx(99.9)
    assert cheap.pays and not dear.pays


def test_a_plan_that_turned_out_worse_is_left_for_one_that_was_measured() -> None:
    planner = adviser(first=0.0)
    slow = planted(0.9, SLOW)
    advice = planner.advise(Plan(dp=2), slow, left=1000)
    assert advice is not None and advice.pays
    planner.changed(1.0, 0.0)
    assert planner.is_news(slow)
    worse = replace_seconds(slow, 2.0)
    back = planner.advise(advice.plan, worse, left=1000, layers=(2, 2))
    assert back is not None and back.pays
    assert back.plan.axes == Plan(dp=2).axes
    assert back.then == pytest.approx(0.9 * (1 + NOISE), rel=0.05)  # as measured
    assert back.price == pytest.approx(1.0 + back.nbytes * SLOW, rel=1e-3)  # as the last change
    # one that was never measured is expected to be as far off
    assert max(planner.ratios.values()) > 1 + DOUBT


def replace_seconds(look: Look, seconds: float) -> Look:
    return look._replace(seconds=seconds)


def test_only_news_is_a_question() -> None:
    planner = adviser()
    look = planted(0.9, SLOW)
    assert planner.is_news(look)
    planner.advise(Plan(dp=2), look, left=10)
    assert not planner.is_news(replace_seconds(look, 1.0))
    assert planner.is_news(replace_seconds(look, 1.2))
    assert planner.is_news(replace_seconds(planted(0.9, SLOW / 3), 0.9))
    assert not planner.is_news(replace_seconds(planted(0.9, SLOW / 1.5), 0.9))
    assert not planner.is_news(replace_seconds(look, 1.2), dear=True)
    assert planner.is_news(replace_seconds(look, 1.4), dear=True)
    assert not planner.is_news(planted(0.9, SLOW * 3), dear=True)
    assert planner.is_news(planted(0.9, SLOW * 5), dear=True)


def test_a_slow_stage_gets_fewer_layers() -> None:
    plan = Plan(pp=2, microbatches=4)
    look = planted(0.9, SLOW, (0.2, 0.6))
    advice = adviser().advise(plan, look, left=1000, layers=(2, 2))
    assert advice is not None and advice.pays
    assert (advice.plan.axes, advice.plan.stage_layers) == (plan.axes, "3,1")
    assert advice.then == pytest.approx(0.9 - (1 - DOUBT) * (0.6 - 0.3))
    assert 0 < advice.nbytes == moved_bytes(plan, advice.plan, CONFIG)


def test_layers_by_pace() -> None:
    assert by_pace(8, [1.0, 1.0, 1.0, 1.0], [0.0] * 4) == [2, 2, 2, 2]
    assert by_pace(8, [1.0, 3.0], [0.0, 0.0]) == [6, 2]
    assert by_pace(8, [1.0, 1.0], [0.0, 2.0]) == [5, 3]
    assert by_pace(2, [1.0, 9.0], [0.0, 0.0]) == [1, 1]


def test_a_look_at_records() -> None:
    """The slowest rank of each stage counts, outside of its calls; and one size of messages gets the
    latency of the other links."""

    def rank(number: int, stage: int, compute: float) -> RankSteps:
        steps: list[dict[str, Any]] = []
        for step in range(8):
            at = 1_000_000 * step
            one = {"step": step, "seconds": 1.0, "calls": 0.9 - compute, "input": 0.1}
            nbytes = 100_000 if step % 2 == 0 or number < 2 else 4
            taken = 1000 + nbytes // 10  # microseconds
            one["out"] = [[number ^ 1, 7, step, nbytes, at]]
            one["in"] = [[number ^ 1, 7, step, nbytes, at - 5, at + taken]]
            steps.append(one)
        steps.append({"step": 8, "out": [], "in": []})  # messages without a step
        return RankSteps(number, 4, "host", 0.0, 0.0, f"pp{stage}", steps)

    look = look_at({n: rank(n, n // 2, (0.2, 0.3, 0.5, 0.4)[n]) for n in range(4)})
    assert look.seconds == 1.0
    assert look.compute == pytest.approx((0.3, 0.5))
    for link in ((0, 1), (2, 3)):
        assert look.links[link].alpha == pytest.approx(1e-3, rel=0.01)
        assert look.links[link].beta == pytest.approx(1e-7, rel=0.01)


def test_links_of_one_size_get_the_latency_of_the_others() -> None:
    known = LinkProfile(0, 1, 0.01, 1e-6, 1.0, 8, 1 << 20)
    one_size = LinkProfile(1, 0, 0.03, 0.0, 1.0, 8, 10_000)
    short = replace(known, src=0, dst=2, beta=0.0, alpha=0.005, large=4)
    found = with_latency({(0, 1): known, (1, 0): one_size, (0, 2): short})
    assert found[0, 1] == known
    assert (0, 2) not in found  # says nothing of bandwidth
    assert found[1, 0] == replace(one_size, alpha=0.01, beta=pytest.approx(2e-6))


def received(world: Any, old: Plan, new: Plan) -> int:
    config = tiny(layers=3, heads=4)
    trainer = Trainer(old, config, world)
    trainer.change_plan(new)
    sent = world.ledger.sent_bytes("state")
    sent.pop("control")  # the descriptions
    trainer.close()
    return sum(sum(verbs.values()) for verbs in sent.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Plan(dp=2), Plan(pp=2)),
        (Plan(pp=2), Plan(dp=2)),
        (Plan(dp=2, zero=3), Plan(tp=2)),
        (Plan(dp=2), Plan(dp=2, zero=1)),
    ],
    ids=["dp-pp", "pp-dp", "zero3-tp", "zero1"],
)
def test_the_bytes_of_the_price_are_those_of_the_change(old: Plan, new: Plan) -> None:
    """Of two ranks each receives what the other sends."""
    config = tiny(layers=3, heads=4)
    assert moved_bytes(old, new, config) == max(md.run(received, old, new, size=2))
