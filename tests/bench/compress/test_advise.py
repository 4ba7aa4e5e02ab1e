"""The adviser of minidist bench compress: steps by the link model, break-evens, the score, and the notes' claims."""

from dataclasses import replace
from math import inf

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
    predicted_break_even,
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
    assert step.over(shaped(2, 0.0, 1e7)) == pytest.approx(0.6 + 0.1)           # the first is gone by 0.3 s
    assert step.over(shaped(2, 0.0, 2e6)) == pytest.approx(0.6 + 0.7)           # the second waits until 0.7 s
    assert step.over(shaped(2, 0.01, 1e12)) == pytest.approx(0.6 + 0.02, rel=1e-4)
    assert LocalStep(0.6, 0, 0, [], []).over(shaped(2, 1.0, 1.0)) == 0.6


def test_break_even_is_where_both_take_as_long():
    """1 s and 1.2 s of computing, 3 MB and 1 MB: equal where 2 MB take 0.2 s."""
    plain, scheme = LocalStep(1.0, 3e6, 0, [0.9], [1]), LocalStep(1.2, 1e6, 0, [1.1], [1])
    edge = predicted_break_even(plain, scheme, 2, 0.0)
    assert edge == pytest.approx(1e7)
    assert plain.over(shaped(2, 0.0, edge)) == pytest.approx(scheme.over(shaped(2, 0.0, edge)))
    assert predicted_break_even(plain, replace(scheme, nbytes=4e6), 2, 0.0) == 0.0
    assert predicted_break_even(plain, replace(scheme, seconds=0.9), 2, 0.0) == inf
    assert break_even(lambda speed: speed < 123.0e4) == pytest.approx(1.23e6)


def test_measured_break_even_is_a_line_over_the_seconds_of_a_byte():
    assert measured_break_even({speed: 2e6 / speed - 0.2 for speed in (1e6, 5e6, 2e7, 1e8)}) == pytest.approx(1e7)
    assert measured_break_even({1e6: 1.0, 1e7: 0.5}) is None and measured_break_even({}) is None


def test_cells_that_are_close_do_not_count():
    cell = AdviceCell("sign", 2, 1e6, (2.0, 1.0))
    assert cell.compress and cell.right is None
    cells = [replace(cell, measured=times) for times in ((3.0, 1.0), (1.0, 3.0), (1.0, 0.96), (1.0, 1.04))]
    assert [each.right for each in cells] == [True, False, None, None]
    assert score(cells) == (1, 2)


def test_advice_over_a_virtual_clock():
    """Ranks whose steps follow the port exactly: every cell is right, and both break-evens agree."""
    links = Links(50e-6, bandwidths(ALL))
    ranks = ShapedRanks({"none": PLAIN_STEP, "sign": SIGN_STEP})
    found = check.advise(ranks, 2, [way_of("none", 100), way_of("sign", 100)], links, rounds=2, check=True,
                         progress=lambda line: None, kept=KeptMeasurements())
    [row] = found["rows"]
    assert found["score"][0] == found["score"][1] >= 6
    assert row["measured_break_even"] == pytest.approx(row["break_even"], rel=0.02)
    for cell in row["cells"]:
        assert cell["predicted"] == pytest.approx(cell["measured"], rel=1e-9)
    assert row["cells"][0]["compress"] and not row["cells"][-1]["compress"]


def test_the_claims_of_one_bit_adam():
    """Five times fewer bytes: 15 % of the steps in fp16, and a bit a number then. Sooner: only where the link rules."""
    assert bytes_ratio(0.15) == pytest.approx(4.92, abs=0.01)
    assert bytes_ratio(0.2, plain_bits=32) == pytest.approx(4.44, abs=0.01)
    assert speed_ratio(0.2, 2.0, 1.0) == pytest.approx(1 / 0.6)
    edge = bandwidth_for(3.5, 0.15, PLAIN_STEP, SIGN_STEP, 2, 0.0)
    link = shaped(2, 0.0, edge)
    assert speed_ratio(0.15, PLAIN_STEP.over(link), SIGN_STEP.over(link)) == pytest.approx(3.5)
    assert bandwidth_for(6.7, 0.15, PLAIN_STEP, SIGN_STEP, 2, 0.0) == 0.0          # 1 / 0.15 is the most
    told = check.claims(PLAIN_STEP, SIGN_STEP, 2, Links(0.0, [1e3, 1e12]))
    assert told["bits"] == pytest.approx(1.0) and told["rows"][0]["bytes_fp16"] == pytest.approx(4.92, abs=0.01)
    slow, fast = told["rows"][0]["speeds"]
    assert fast < 1 < slow < told["rows"][0]["bytes_fp32"]
