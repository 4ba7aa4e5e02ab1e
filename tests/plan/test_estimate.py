"""The fast path beside the replay: memory and seconds of plans of all kinds, and what must not depend on what."""

import numpy as np
import pytest

from minidist.nn import GPTConfig
from minidist.plan.candidates import COLUMNS, Candidates, candidates
from minidist.plan.estimate import TERMS, Estimates, Estimator
from minidist.simulate.cluster import Cluster
from minidist.simulate.simulate import simulate

CONFIG = GPTConfig(vocabulary=4096, context=2048, layers=4, width=2048, heads=16, positions="rotary")
CLUSTER = Cluster.parse("h100:2x2")
PLANS = [dict(dp=4, zero=0), dict(dp=4, zero=1, pieces=2), dict(dp=4, zero=3), dict(dp=2, tp=2, zero=2, pieces=2),
         dict(dp=2, tp=2, sequence=1, recomputed=1), dict(pp=2, tp=2, pieces=4), dict(dp=2, pp=2, zero=1, pieces=4),
         dict(dp=2, pp=2, pieces=4, schedule=1), dict(dp=2, pp=2, pieces=4, schedule=2, recomputed=1),
         dict(dp=2, pp=2, pieces=4, schedule=3)]
"""Ten of all axes, stages and schedules; what is not named is 1, or 0."""
SECONDS, BYTES = 0.09, 0.09
"""The bounds of one plan; the worst of these ten are 8.1 % and 8.5 %."""


@pytest.fixture(scope="module")
def estimates() -> Estimates:
    found = candidates(CONFIG, CLUSTER, batch=8)
    return Estimator(CONFIG, CLUSTER).of(found.only(np.array([number_of(found, wanted) for wanted in PLANS])))


def number_of(found: Candidates, wanted: dict[str, int]) -> int:
    """The candidate with these values."""
    usual = {name: 1 if name in ("dp", "pp", "ep", "cp", "tp", "pieces") else 0 for name in COLUMNS}
    row = {**usual, **wanted}
    row["rows"] = 8 // (row["dp"] * row["pieces"])
    where = np.flatnonzero((found.table == [row[name] for name in COLUMNS]).all(axis=1))
    assert len(where) == 1, wanted
    return int(where[0])


@pytest.mark.parametrize("wanted", PLANS, ids=lambda wanted: ",".join(f"{k}={v}" for k, v in wanted.items()))
def test_the_fast_path_is_near_the_replay(estimates: Estimates, wanted: dict[str, int]) -> None:
    number = PLANS.index(wanted)
    found = simulate(estimates.candidates.plan(number), CONFIG, CLUSTER, batch=8)
    seconds = estimates.step_seconds[number] / found.step_seconds - 1
    nbytes = estimates.total[number] / found.peak(found.fullest)["total"] - 1
    print(f"{wanted}: seconds {seconds:+.1%}, bytes {nbytes:+.1%}")
    assert abs(seconds) < SECONDS and abs(nbytes) < BYTES, (seconds, nbytes)


def test_all_terms_are_there_and_none_is_negative(estimates: Estimates) -> None:
    assert set(estimates.seconds) == set(TERMS)
    for spent in (*estimates.seconds.values(), *estimates.memory.values()):
        assert np.isfinite(spent).all() and (spent >= 0).all()
