"""The fast path beside the replay: memory and seconds of plans of all kinds, and what must not
depend on what."""

from dataclasses import replace

import numpy as np
import pytest

from minidist.nn import GPT, GPTConfig
from minidist.parallel.pipeline.instructions import BackwardInput, BackwardWeights
from minidist.parallel.pipeline.schedule_checker import peak_held
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.plan.candidates import COLUMNS, SCHEDULES, Candidates, candidates
from minidist.plan.estimate import TERMS, Estimates, Estimator
from minidist.plan.ranking import plan_words
from minidist.simulate.cluster import Cluster
from minidist.simulate.simulate import simulate
from minidist.simulate.topology import Topology, Wire

CONFIG = GPTConfig(
    vocabulary=4096, context=2048, layers=4, width=2048, heads=16, positions="rotary"
)
CLUSTER = Cluster.parse("h100:2x2")
PLANS = [
    dict(dp=4, zero=0),
    dict(dp=4, zero=1, pieces=2),
    dict(dp=4, zero=3),
    dict(dp=2, tp=2, zero=2, pieces=2),
    dict(dp=2, tp=2, sequence=1, recomputed=1),
    dict(pp=2, tp=2, pieces=4),
    dict(dp=2, pp=2, zero=1, pieces=4),
    dict(dp=2, pp=2, pieces=4, schedule=1),
    dict(dp=2, pp=2, pieces=4, schedule=2, recomputed=1),
    dict(dp=2, pp=2, pieces=4, schedule=3),
    dict(dp=2, pp=2, pieces=4, schedule=4),
    dict(pp=2, tp=2, pieces=8, schedule=4),
    dict(dp=4, zero=3, pieces=2, recomputed=1, offload=2),
]
"""Thirteen of all axes, stages and schedules; what is not named is 1, or 0."""
SECONDS = 0.09
BYTES = 0.09
"""The bounds of one plan; the worst of these are 8.1 % and 8.5 %."""


MEMORY_PLANS = [
    dict(pp=4, pieces=8, schedule=3),
    dict(pp=4, pieces=4, schedule=3, recomputed=1),
    dict(pp=2, tp=2, pieces=8, schedule=3),
    dict(dp=4, zero=3, shard=2, pieces=2, recomputed=1),
    dict(dp=4, zero=3, recomputed=1),
    dict(dp=4, zero=3, offload=2),
]
"""Deferred backwards for the weights, as many as there can be; hybrid sharding; all on disk."""


def estimated(plans: list[dict[str, int]]) -> Estimates:
    found = candidates(CONFIG, CLUSTER, batch=8)
    return Estimator(CONFIG, CLUSTER).of(
        found.only(np.array([number_of(found, wanted) for wanted in plans]))
    )


@pytest.fixture(scope="module")
def estimates() -> Estimates:
    return estimated(PLANS)


def number_of(found: Candidates, wanted: dict[str, int]) -> int:
    """The candidate with these values."""
    usual = {name: 1 if name in ("dp", "pp", "ep", "cp", "tp", "pieces") else 0 for name in COLUMNS}
    row = {**usual, **wanted}
    row["rows"] = 8 // (row["dp"] * row["pieces"])
    where = np.flatnonzero((found.table == [row[name] for name in COLUMNS]).all(axis=1))
    assert len(where) == 1, wanted
    return int(where[0])


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    "wanted", PLANS, ids=lambda wanted: ",".join(f"{k}={v}" for k, v in wanted.items())
)
def test_the_fast_path_is_near_the_replay(estimates: Estimates, wanted: dict[str, int]) -> None:
    number = PLANS.index(wanted)
    found = simulate(estimates.candidates.plan(number), CONFIG, CLUSTER, batch=8)
    seconds = estimates.step_seconds[number] / found.step_seconds - 1
    nbytes = estimates.total[number] / found.peak(found.fullest)["total"] - 1
    print(f"{wanted}: seconds {seconds:+.1%}, bytes {nbytes:+.1%}")
    assert abs(seconds) < SECONDS and abs(nbytes) < BYTES, (seconds, nbytes)


# ------------------------------------------------------------------------------ plans that are drawn

SLOW = Cluster.parse("a100-80g:2x4")
WIDE = GPTConfig(vocabulary=8192, context=2048, layers=8, width=4096, heads=32, positions="rotary")
"""Calls of the data axis take as long as the computing that they could hide behind."""
ANY = {"seconds": 0.08, "bytes": 0.06}
"""The bounds of a drawn plan, as shares of the replay's; the worst of the 144 below are 5.7 % and
4.6 %, their means 1.1 % and 0.8 %."""


def drawn(schedule: str | None, zero: int, count: int) -> Candidates:
    """Some plans on a slow network with this schedule (None: without a pipeline) and ZeRO stage."""
    found = candidates(WIDE, SLOW, batch=32, offload=False)
    piped = found.column("pp") > 1
    kind = piped & (found.column("schedule") == SCHEDULES.index(schedule)) if schedule else ~piped
    kind &= (found.column("zero") == zero) & (found.column("pieces") <= 8)
    kind &= found.rows("dp", "ep", "cp").prod(axis=1) > 1
    draw = np.random.default_rng([zero, SCHEDULES.index(schedule) if schedule else 9])
    return found.only(draw.choice(np.flatnonzero(kind), count, replace=False))


def differences(found: Candidates) -> list[tuple[dict[str, float], str]]:
    """(estimate over replay - 1 of seconds and bytes, the plan) of each."""
    model = Estimator(WIDE, SLOW).of(found)
    made = []
    for number in range(len(found)):
        plan = found.plan(number)
        exact = simulate(plan, WIDE, SLOW, batch=32, order=found.order(number))
        off = {
            "seconds": float(model.step_seconds[number] / exact.step_seconds - 1),
            "bytes": float(model.total[number] / exact.peak(exact.fullest)["total"] - 1),
        }
        made.append((off, " ".join([*plan_words(plan), *found.order(number)])))
        print({name: f"{share:+.1%}" for name, share in off.items()}, made[-1][1])
    return made


def require_near(found: Candidates) -> None:
    for off, plan in differences(found):
        assert all(abs(off[name]) < bound for name, bound in ANY.items()), (off, plan)


@pytest.mark.sampled
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_any_plan_is_near_the_replay(schedule: str | None, zero: int) -> None:
    """With ZeRO-2 and 3 the backward of each microbatch waits for its reductions, and of zb-h1 and
    zb-v none is hidden: such an estimate was once a third too short."""
    require_near(drawn(schedule, zero, 1))


@pytest.mark.soak
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_many_plans_are_near_the_replay(schedule: str | None, zero: int) -> None:
    require_near(drawn(schedule, zero, 6))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("wanted", "seconds", "nbytes"),
    [
        (dict(dp=4, zero=1, offload=1), 0.05, 0.09),
        pytest.param(
            dict(dp=2, tp=2, zero=2, offload=1, pieces=2), 0.05, 0.09, marks=pytest.mark.soak
        ),
        pytest.param(dict(pp=2, tp=2, pieces=4, offload=1), 0.2, 0.09, marks=pytest.mark.soak),
        pytest.param(
            dict(dp=2, pp=2, zero=2, pieces=4, offload=1), 0.2, 0.09, marks=pytest.mark.soak
        ),
        pytest.param(dict(dp=2, tp=2, zero=3, offload=2), 0.2, 0.09, marks=pytest.mark.soak),
        pytest.param(
            dict(dp=2, pp=2, zero=3, pieces=4, offload=2), 0.2, 0.15, marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_an_offload_beside_other_axes_is_near_the_replay(
    wanted: dict[str, int], seconds: float, nbytes: float
) -> None:
    """What is not hidden where a pipeline turns, and at the begin of each direction, is left out:
    it is too quick."""
    found = estimated([wanted])
    exact = simulate(found.candidates.plan(0), CONFIG, CLUSTER, batch=8)
    assert found.step_seconds[0] == pytest.approx(exact.step_seconds, rel=seconds)
    assert found.total[0] == pytest.approx(exact.peak(exact.fullest)["total"], rel=nbytes)


@pytest.mark.soak
def test_memory_of_deferred_backwards_and_of_copies_in_each_node() -> None:
    found = estimated(MEMORY_PLANS)
    for number, wanted in enumerate(MEMORY_PLANS):
        exact = simulate(found.candidates.plan(number), CONFIG, CLUSTER, batch=8)
        assert found.total[number] == pytest.approx(
            exact.peak(exact.fullest)["total"], rel=BYTES
        ), wanted


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 7), (4, 4), (8, 32)])
def test_zb_h1_defers_one_backward_a_stage(ranks: int, microbatches: int) -> None:
    """Cells.late counts with this: rank r defers r backwards at most, and with the one at work
    holds min(m, p)."""
    schedule = make_schedule("zb-h1", ranks, microbatches)
    assert peak_held(schedule) == [min(ranks, microbatches)] * ranks
    for rank in range(ranks):
        waiting = most = 0
        for instruction in schedule.computes(rank):
            waiting += isinstance(instruction, BackwardInput) - isinstance(
                instruction, BackwardWeights
            )
            most = max(most, waiting)
        assert most == min(rank + 1, microbatches)


def test_a_copy_in_each_node_costs_what_the_replay_says() -> None:
    """Hybrid sharding beside ZeRO-3 over all ranks: both estimates are as far from the replay, to 2
    % of the step."""
    found = estimated([dict(dp=4, zero=3), dict(dp=4, zero=3, shard=2)])
    whole, copies = (
        seconds / simulate(found.candidates.plan(number), CONFIG, CLUSTER, batch=8).step_seconds
        for number, seconds in enumerate(found.step_seconds)
    )
    assert copies == pytest.approx(whole, abs=0.02)
    assert found.memory["optimizer"][1] == 2 * found.memory["optimizer"][0]


def test_all_terms_are_there_and_none_is_negative(estimates: Estimates) -> None:
    assert set(estimates.seconds) == set(TERMS)
    for spent in (*estimates.seconds.values(), *estimates.memory.values()):
        assert np.isfinite(spent).all() and (spent >= 0).all()


def test_a_small_model_sends_one_bucket_which_nothing_hides() -> None:
    """Over a slow link: its layers share a bucket of gradients, complete when backward ends."""
    config = GPTConfig(vocabulary=64, context=32, layers=4, width=64, heads=4, dtype="float32")
    slow = Topology(2, Wire("slow", 1e-5, 3e6))
    cluster = replace(CLUSTER, nodes=1, per_node=2, topology=slow)
    found = candidates(config, cluster, batch=8, precision="fp32", offload=False)
    wanted = number_of(found, dict(dp=2, pieces=1))
    model = Estimator(config, cluster, precision="fp32")
    plan = found.plan(wanted)
    replay = simulate(plan, config, cluster, batch=8).step_seconds
    seconds = model.of(found.only(np.array([wanted]))).step_seconds[0]
    assert seconds == pytest.approx(replay, rel=0.05)
    assert seconds > 4 * config.numbers / 3e6
    layer, ends = model.cells.data_calls(1, 0)
    sent = [
        sum(call.nbytes * count for call, count in calls.items() if call.verb == "all_reduce")
        for calls in (layer, ends)
    ]
    assert 4 * sent[0] + sent[1] == 4 * sum(p.size for p in GPT(config).parameters())
