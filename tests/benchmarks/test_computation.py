"""The fit of what computation costs, to seconds that the model itself made; and one real figure."""

from dataclasses import replace

import numpy as np
import pytest

from minidist.bench import computation
from minidist.bench.computation import (
    BYTES_A_PASS,
    FIGURES,
    GAPS,
    STACKS,
    bounded_least_squares,
    fit,
    gaps_kernel,
    kernels_of,
    measure,
    stack_kernel,
)
from minidist.simulate.here import device_of
from minidist.simulate.rates import Rates

PLAIN = [figure for figure in FIGURES if figure[0] in ("matmul", "pass")]
KERNELS = {"stack": stack_kernel, "gaps": gaps_kernel}
STEPS = [figure for figure in FIGURES if figure[0] == "step"]


def made(
    kind, dtype, size, launch=2e-6, peaks=(100e9, 40e9), half=12.0, cache=BYTES_A_PASS * (1 << 16)
):
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
    assert (cost.cache_bytes, cost.cache_factor) == pytest.approx(
        (BYTES_A_PASS * (1 << 16), 4.0), rel=1e-6
    )
    assert cost.misfit < 1e-6


def test_a_fit_finds_what_a_matrix_of_a_stack_and_an_inner_loop_take():
    seconds = {figure: made(*figure) for figure in PLAIN}
    truth = replace(fit(1, seconds), matrix=0.3e-6, loop=20e-9)
    rates = Rates.of(device_of([truth], 1, 1, {}))
    seconds |= {
        (kind, dtype, size): rates.seconds(KERNELS[kind](size))
        for kind, dtype, size in FIGURES
        if kind in KERNELS
    }
    cost = fit(1, seconds)
    assert (cost.matrix, cost.loop) == pytest.approx((0.3e-6, 20e-9))


def test_products_that_lose_nothing_by_their_size_are_told_from_others():
    """Those whose matrices have up to 64 KiB together run at the peak."""
    seconds = {
        (kind, dtype, size): made(
            kind,
            dtype,
            size,
            half=12.0
            if kind == "pass"
            or 4 * (size[0] * size[1] + size[1] * size[2] + size[0] * size[2]) > 1 << 16
            else 0.0,
        )
        for kind, dtype, size in PLAIN
        if dtype == "float32"
    }
    seconds |= {figure: made(*figure) for figure in PLAIN if figure[1] == "float64"}
    cost = fit(1, seconds)
    assert (cost.half, cost.peaks["float32"]) == pytest.approx((12.0, 100e9), rel=1e-6)
    assert 1 << 15 < cost.small_bytes <= 1 << 16


def test_numbers_stay_in_their_bounds():
    columns = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    sums = columns @ (3.0, -1.0)
    for low, high, best in (
        ((0, -2), (9, 9), (3, -1)),
        ((0, 0), (9, 9), (2.5, 0)),
        ((0, -2), (2, 9), (2, -0.5)),
    ):
        assert bounded_least_squares(
            columns, sums, np.array(low, float), np.array(high, float)
        ) == pytest.approx(best)


@pytest.mark.soak  # the tests before have the fit, the next a step that is not as the others
def test_steps_tell_python_and_how_much_dearer_their_passes_are():
    seconds = {figure: made(*figure) for figure in PLAIN}
    plain = fit(1, seconds)
    truth = replace(
        plain,
        python=15e-6,
        bandwidth=plain.bandwidth / 2,
        cache_bytes=1 << 19,
        peaks={"float32": 120e9, "float64": 48e9},
        cold=5e-11,
    )
    rates = Rates.of(device_of([truth], 1, 1, {}))
    cost = fit(1, {**seconds, **{figure: rates.segment(kernels_of(figure[2])) for figure in STEPS}})
    assert (cost.python, cost.bandwidth) == pytest.approx((15e-6, truth.bandwidth), rel=0.02)
    assert (cost.cache_bytes, cost.cache_factor) == (
        1 << 19,
        pytest.approx(truth.cache_factor, rel=0.02),
    )
    assert cost.peaks == pytest.approx(truth.peaks, rel=0.02)
    assert cost.cold == pytest.approx(5e-11, rel=0.05)


def test_a_disturbed_figure_shows_in_the_misfit():
    seconds = {figure: made(*figure) for figure in PLAIN}
    seconds[FIGURES[4]] *= 1.5
    cost = fit(1, seconds)
    assert 0.15 < cost.misfit < 0.6
    assert cost.launch == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize(
    "figure",
    [
        FIGURES[2],
        PLAIN[-5],
        ("stack", "float32", STACKS[-1]),
        ("gaps", "float32", GAPS[0]),
        STEPS[0],
    ],
)
def test_a_figure_is_measured(figure):
    kind, dtype, size = figure
    (seconds,) = measure(kind, dtype, size)
    assert 1e-7 < seconds < 1


# test_calibrate.py starts ranks that are measured, and the test above measures figures
@pytest.mark.soak
def test_a_rank_is_started_and_measured(monkeypatch):
    few = [figure for figure in FIGURES if figure[0] == "pass" or max(figure[2]) <= 128]
    monkeypatch.setattr(computation, "FIGURES", few)
    told = []
    (cost,) = computation.measure_all([1], 1, told.append)
    assert cost.ranks == 1
    assert min(cost.peaks.values()) > 1e6
    assert cost.bandwidth > 1e6
    assert told == ["1 ranks compute, round 1 of 1"]
