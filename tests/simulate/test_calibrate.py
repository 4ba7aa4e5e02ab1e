"""The cost model fitted to step times: constants found again, errors told, files of runs read."""

import math
import random

import numpy as np
import pytest

from minidist.errors import ConfigError
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.calibrate import CONSTANTS, Predictor, fit
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT
from minidist.simulate.rates import CostProfile
from minidist.simulate.runs import Run, read_runs

HEAD = "layers,width,heads,sequence,vocab,devices,batch,plan,seconds\n"
TINY = "2,64,4,32,128"


def step(run, profile):
    """A made-up cost model: products, memory, launches, two kinds of links, in shares that differ
    from run to run."""
    rates = profile.rates
    weights = run.config
    near = {"bandwidth": 234e9, "alpha": 0.6e-6, **profile.wires.get("nvlink3", {})}
    far = {"bandwidth": 23e9, "alpha": 2.7e-6, **profile.wires.get("ib-hdr", {})}
    return (
        weights[0] / rates.matmul_share * (1 + rates.half / weights[1])
        + weights[2] / rates.memory_share
        + weights[3] * rates.launch
        + weights[4] / near["bandwidth"]
        + weights[5] / far["bandwidth"]
    )


def runs_of(truth, count=12, noise=0.0, seed=1):
    dice = random.Random(seed)
    cluster = Cluster.parse("a100-80g:4x8")
    found = []
    for number in range(count):
        weights = (
            dice.uniform(0.2, 1),
            dice.choice([256, 1024, 4096]),
            dice.uniform(0, 0.5),
            dice.uniform(0, 2e5),
            dice.uniform(0, 1e11),
            dice.uniform(0, 2e10),
        )
        run = Run(f"run {number}", Plan(dp=32), weights, 32, cluster, 1.0)
        found.append(run._replace(seconds=step(run, truth) * math.exp(dice.gauss(0, noise))))
    return found


TRUTH = CostProfile(
    "a100-80g",
    DEFAULT.__class__(matmul_share=0.55, half=300.0, memory_share=0.7, launch=2e-6),
    {"ib-hdr": {"bandwidth": 15e9}},
)


def test_constants_are_found_again():
    fitted = fit(runs_of(TRUTH), step, "a100-80g")
    rates = fitted.profile.rates
    assert (rates.matmul_share, rates.memory_share) == pytest.approx((0.55, 0.7), rel=0.1)
    assert rates.half == pytest.approx(300, rel=0.2)
    assert fitted.profile.wires["ib-hdr"]["bandwidth"] == pytest.approx(15e9, rel=0.1)
    assert max(map(abs, fitted.errors)) < 0.04  # constants are drawn a little to their defaults
    assert max(map(abs, fitted.left_out)) < 0.08
    assert max(map(abs, fitted.default)) > 0.2
    assert fitted.profile.fit["runs"] == 12


def test_a_constant_that_no_run_tells_of_stays():
    fitted = fit(runs_of(TRUTH), step, "a100-80g")
    assert fitted.profile.rates.attention_share == pytest.approx(DEFAULT.attention_share)
    assert fitted.profile.wires["nvlink3"]["alpha"] == pytest.approx(0.6e-6)


def test_errors_of_runs_left_out_are_those_of_runs_that_are_new():
    """Measured with 8 % noise: left-out errors are near those on runs that are new to the fit, and
    above its own."""
    fitted = fit(runs_of(TRUTH, 10, noise=0.08), step, "a100-80g")
    new = runs_of(TRUTH, 200, noise=0.08, seed=7)
    unseen = np.mean([abs(step(run, fitted.profile) / run.seconds - 1) for run in new])
    own, left_out = (np.mean(np.abs(errors)) for errors in (fitted.errors, fitted.left_out))
    assert own < left_out
    assert 0.5 * unseen < left_out < 2 * unseen


def test_left_out_errors_are_those_of_fits_without_the_run():
    runs = runs_of(TRUTH, 8, noise=0.05)
    fitted = fit(runs, step, "a100-80g")
    for number in (0, 5):
        without = fit(runs[:number] + runs[number + 1 :], step, "a100-80g")
        error = step(runs[number], without.profile) / runs[number].seconds - 1
        assert fitted.left_out[number] == pytest.approx(error, abs=0.03)


def test_a_share_is_no_more_than_the_whole():
    cheap = CostProfile("a100-80g", DEFAULT.__class__(matmul_share=1.6))
    assert fit(runs_of(cheap), step, "a100-80g").profile.rates.matmul_share <= 1


@pytest.mark.parametrize(
    ("names", "count", "message"),
    [(["matmul_shares"], 5, "did you mean matmul_share"), (CONSTANTS, 1, "give two or more")],
)
def test_what_cannot_be_fitted(names, count, message):
    with pytest.raises(ConfigError, match=message):
        fit(runs_of(TRUTH, count), step, "a100-80g", names)


def test_the_simulator_predicts_and_its_constants_are_found_again(tmp_path):
    """Steps that the simulator itself took with two thirds of the products' rate."""
    path = tmp_path / "runs.csv"
    path.write_text(
        HEAD
        + "".join(
            f"2,{width},32,2048,512,{devices},{8 * devices},dp={devices},1\n"
            for width in (1024, 2048, 4096)
            for devices in (1, 2)
        )
    )
    predict = Predictor()
    truth = CostProfile("h100", DEFAULT.__class__(matmul_share=0.6))
    runs = [run._replace(seconds=predict(run, truth)) for run in read_runs(path, "h100")]
    fitted = fit(runs, predict, "h100", ["matmul_share", "memory_share", "launch"])
    assert max(map(abs, fitted.errors)) < 0.02
    assert fitted.profile.rates.matmul_share == pytest.approx(0.6, rel=0.1)
