"""The adviser of minidist bench compress: steps by the link model, break-evens, the score, and the
notes' claims."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from shaped_ranks import PLAIN_STEP, SIGN_STEP, ShapedRanks

from minidist.bench.compress import check
from minidist.bench.compress.advise import (
    AdviceCell,
    LocalStep,
    bandwidth_for,
    break_even,
    bytes_ratio,
    measured_break_even,
    predicted_gain,
    score,
    shaped,
    speed_ratio,
)
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.links import ALL, bandwidths
from minidist.bench.compress.time_to_loss import Links
from minidist.bench.compress.ways import way_of


def test_a_bucket_leaves_when_it_is_ready_and_the_port_is_free():
    """Two equal buckets of 1 MB, ready at 0.2 s and 0.5 s of a step of 0.6 s."""
    step = LocalStep(0.6, 2e6, 4, [0.2, 0.5], [1, 1])
    assert step.over(shaped(2, 0.0, 1e7)) == pytest.approx(0.6 + 0.1)  # the first is gone by 0.3 s
    # the second waits until 0.7 s
    assert step.over(shaped(2, 0.0, 2e6)) == pytest.approx(0.6 + 0.7)
    assert step.over(shaped(2, 0.01, 1e12)) == pytest.approx(0.6 + 0.02, rel=1e-4)
    assert LocalStep(0.6, 0, 0, [], []).over(shaped(2, 1.0, 1.0)) == 0.6


def test_break_even_is_where_both_take_as_long():
    """1 s and 1.2 s of computing, 3 MB and 1 MB: equal where 2 MB take 0.2 s."""
    plain = LocalStep(1.0, 3e6, 0, [0.9], [1])
    scheme = LocalStep(1.2, 1e6, 0, [1.1], [1])

    def edge_of(scheme):
        gain = predicted_gain(plain, scheme, 2, 0.0)
        return break_even(lambda speed: gain(speed) > 0)

    edge = edge_of(scheme)
    assert edge == pytest.approx(1e7)
    assert plain.over(shaped(2, 0.0, edge)) == pytest.approx(scheme.over(shaped(2, 0.0, edge)))
    assert edge_of(replace(scheme, nbytes=4e6)) == 0.0
    assert edge_of(replace(scheme, seconds=0.9)) == inf
    assert break_even(lambda speed: speed < 123.0e4) == pytest.approx(1.23e6)


def test_measured_break_even_moves_the_model_by_a_line():
    """2 MB saved for 0.2 s of encoding, where the model has 1 MB for 0.1 s, and where it has them
    right."""
    cells = {speed: (1.0 + 3e6 / speed, 1.2 + 1e6 / speed) for speed in (1e6, 5e6, 2e7, 1e8)}
    for gain in (lambda speed: 1e6 / speed - 0.1, lambda speed: 2e6 / speed - 0.2):
        assert measured_break_even(cells, gain) == pytest.approx(1e7)
    assert measured_break_even({5e6: cells[5e6], 1e6: cells[1e6]}, gain) is None, (
        "it lies beyond the links"
    )
    assert measured_break_even({1e6: (2.0, 1.0), 1e7: (1.5, 1.0)}, gain) is None
    assert measured_break_even({}, gain) is None


@pytest.mark.parametrize("disturbed", bandwidths(ALL))
def test_one_disturbed_cell_hardly_moves_a_measured_break_even(disturbed):
    """A tenth more on one plain step. By the two neighbours of the break-even alone, one of these
    is 65 % off."""
    cells = {speed: (1.0 + 3e6 / speed, 1.2 + 1e6 / speed) for speed in bandwidths(ALL)}
    plain, scheme = cells[disturbed]
    found = measured_break_even(
        {**cells, disturbed: (1.1 * plain, scheme)}, lambda speed: 2e6 / speed - 0.2
    )
    assert found == pytest.approx(1e7, rel=0.12)


def test_the_step_that_counts_is_the_mean_of_short_ones():
    """Twenty rounds of two steps: the second takes twice as long and sends twice as much in every
    round."""
    rounds = [
        [
            LocalStep(0.1 + late, 100.0, 1.0, [0.05], [1]),
            LocalStep(0.2 + late, 200.0, 3.0, [0.05], [1]),
        ]
        for late in np.linspace(0.2, 0, 21)
    ]
    times = check.AdviceTimes(
        {"threshold": rounds},
        {"threshold": [[[step.seconds for step in steps] for steps in rounds]]},
    )
    assert times.local_step("threshold") == LocalStep(pytest.approx(0.17), 150.0, 2.0, [0.05], [1])
    assert times.seconds("threshold", 0) == pytest.approx(0.17)
    assert times.seconds("threshold", 0, check.OTHER_HALF) == pytest.approx(0.178, abs=1e-3)


def test_cells_that_are_close_do_not_count():
    cell = AdviceCell("sign", 2, 1e6, (2.0, 1.0))
    assert cell.compress and cell.right is None
    cells = [
        replace(cell, measured=times)
        for times in ((3.0, 1.0), (1.0, 3.0), (1.0, 0.96), (1.0, 1.04))
    ]
    assert [each.right for each in cells] == [True, False, None, None]
    assert score(cells) == (1, 2)


def test_advice_over_a_virtual_clock():
    """Ranks whose steps follow the port exactly: every cell is right, and both break-evens
    agree."""
    links = Links(50e-6, bandwidths(ALL))
    ranks = ShapedRanks({"none": PLAIN_STEP, "sign": SIGN_STEP})
    found = check.advise(
        ranks,
        2,
        [way_of("none", 100), way_of("sign", 100)],
        links,
        rounds=2,
        check=True,
        progress=lambda line: None,
        kept=KeptMeasurements(),
    )
    [row] = found["rows"]
    assert found["score"][0] == found["score"][1] >= 6
    assert row["measured_break_even"] == pytest.approx(row["break_even"], rel=0.02)
    assert row["by_halves"] == pytest.approx([row["measured_break_even"]] * 2)
    for cell in row["cells"]:
        assert cell["predicted"] == pytest.approx(cell["measured"], rel=1e-9)
    assert row["cells"][0]["compress"] and not row["cells"][-1]["compress"]


def test_the_claims_of_one_bit_adam():
    """Five times fewer bytes: 15 % of the steps in fp16, and a bit a number then. Sooner: only
    where the link rules."""
    assert bytes_ratio(0.15) == pytest.approx(4.92, abs=0.01)
    assert bytes_ratio(0.2, plain_bits=32) == pytest.approx(4.44, abs=0.01)
    assert speed_ratio(0.2, 2.0, 1.0) == pytest.approx(1 / 0.6)
    edge = bandwidth_for(3.5, 0.15, PLAIN_STEP, SIGN_STEP, 2, 0.0)
    link = shaped(2, 0.0, edge)
    assert speed_ratio(0.15, PLAIN_STEP.over(link), SIGN_STEP.over(link)) == pytest.approx(3.5)
    assert bandwidth_for(6.7, 0.15, PLAIN_STEP, SIGN_STEP, 2, 0.0) == 0.0  # 1 / 0.15 is the most
    told = check.claims(PLAIN_STEP, SIGN_STEP, 2, Links(0.0, [1e3, 1e12]))
    assert told["bits"] == pytest.approx(1.0) and told["rows"][0]["bytes_fp16"] == pytest.approx(
        4.92, abs=0.01
    )
    slow, fast = told["rows"][0]["speeds"]
    assert fast < 1 < slow < told["rows"][0]["bytes_fp32"]
