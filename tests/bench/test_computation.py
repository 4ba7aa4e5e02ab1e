"""The fit of what computation costs, to seconds that the model itself made; and one real figure."""

from dataclasses import replace

import pytest

from minidist.bench import computation
from minidist.bench.computation import BYTES_A_PASS, FIGURES, fit, kernels_of, measure
from minidist.simulate.here import device_of
from minidist.simulate.rates import Rates

PLAIN = [figure for figure in FIGURES if figure[0] != "step"]
STEPS = [figure for figure in FIGURES if figure[0] == "step"]


def made(kind, dtype, size, launch=2e-6, peaks=(100e9, 40e9), half=12.0, cache=BYTES_A_PASS * (1 << 16)):
    if kind == "matmul":
        m, k, n = size
        peak = peaks[dtype == "float64"]
        return launch + 2 * m * k * n / peak * (1 + half * (1 / m + 1 / k + 1 / n))
    nbytes = BYTES_A_PASS * size[0]
    return launch + nbytes / (5e9 if nbytes > cache else 20e9)


def test_a_fit_finds_the_numbers_that_made_the_seconds():
    cost = fit(2, {figure: made(*figure) for figure in PLAIN})
    assert cost.ranks == 2
    assert cost.peaks == pytest.approx({"float32": 100e9, "float64": 40e9}, rel=1e-6)
    assert (cost.half, cost.launch, cost.bandwidth) == pytest.approx((12.0, 2e-6, 5e9), rel=1e-6)
    assert (cost.cache_bytes, cost.cache_factor) == pytest.approx((BYTES_A_PASS * (1 << 16), 4.0), rel=1e-6)
    assert cost.misfit < 1e-6


@pytest.mark.soak       # the test before has the fit, the next a step that is not as the others
def test_steps_tell_the_launch_and_how_much_dearer_their_passes_are():
    seconds = {figure: made(*figure) for figure in PLAIN}
    plain = fit(1, seconds)
    truth = replace(plain, launch=9e-6, bandwidth=plain.bandwidth / 2)
    rates = Rates.of(device_of([truth], 1, 1, {}))
    cost = fit(1, {**seconds, **{figure: rates.segment(kernels_of(figure[2])) for figure in STEPS}})
    assert cost.launch == pytest.approx(9e-6, rel=0.02)
    assert cost.bandwidth == pytest.approx(truth.bandwidth, rel=0.1)       # thin products are bound by memory, too
    assert cost.peaks == plain.peaks


def test_a_disturbed_figure_shows_in_the_misfit():
    seconds = {figure: made(*figure) for figure in PLAIN}
    seconds[FIGURES[4]] *= 1.5
    cost = fit(1, seconds)
    assert 0.15 < cost.misfit < 0.6
    assert cost.launch == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize("figure", [FIGURES[2], PLAIN[-5], STEPS[0]])
def test_a_figure_is_measured(figure):
    kind, dtype, size = figure
    seconds, = measure(kind, dtype, size)
    assert 1e-7 < seconds < 1


@pytest.mark.soak       # test_calibrate.py starts ranks that are measured, and the test above measures figures
def test_a_rank_is_started_and_measured(monkeypatch):
    few = [figure for figure in FIGURES if figure[0] == "pass" or max(figure[2]) <= 128]
    monkeypatch.setattr(computation, "FIGURES", few)
    told = []
    cost, = computation.measure_all([1], 1, told.append)
    assert cost.ranks == 1
    assert min(cost.peaks.values()) > 1e6
    assert cost.bandwidth > 1e6
    assert told == ["1 ranks compute, round 1 of 1"]
