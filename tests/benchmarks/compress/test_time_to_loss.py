"""minidist bench compress: the time to a loss from one curve and one step, over a virtual clock and
for real."""

import json
import re

import pytest
from shaped_ranks import PLAIN_STEP, SIGN_STEP, ShapedRanks

from minidist.bench.compress.advise import LocalStep, shaped
from minidist.bench.compress.command import FULL, MODEL
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.links import bandwidths
from minidist.bench.compress.time_to_loss import Links, best, measure, steps_to
from minidist.bench.compress.ways import way_of
from minidist.cli import main

STEPS = {
    "none": PLAIN_STEP,
    "sign": SIGN_STEP,
    "1-bit": SIGN_STEP,
    "adaptive": PLAIN_STEP,
    "local-steps": LocalStep(0.1, 0, 0, [], []),
}
# less a step
LOSSES = {"none": 0.010, "sign": 0.009, "1-bit": 0.0098, "adaptive": 0.010, "local-steps": 0.005}


def test_the_first_step_at_the_target():
    curve = [(10, 3.0), (20, 2.0), (30, 2.1), (40, 1.9)]
    assert [steps_to(curve, target) for target in (3.5, 2.0, 1.95, 1.0)] == [10, 20, 40, None]


def measured(
    *names: str, kept: KeptMeasurements | None = None, **losses: float
) -> tuple[dict, ShapedRanks]:
    """100 steps, the loss at every fifth, over 100 Mbit/s and 1 Gbit/s. losses: other ones than
    LOSSES."""
    ranks = ShapedRanks(STEPS, {**LOSSES, **losses})
    links = Links(50e-6, bandwidths("100Mbit,1Gbit"))
    ways = [way_of(name, 100) for name in names]
    return measure(
        ranks,
        ways,
        links,
        steps=100,
        every=5,
        rounds=2,
        target=None,
        through=1.25e7,
        progress=lambda line: None,
        keep=lambda line: None,
        kept=kept or KeptMeasurements(),
    ), ranks


def test_time_is_steps_times_step():
    result, ranks = measured("none", "sign", "local-steps:every=10")
    slow, fast = (shaped(2, 50e-6, speed) for speed in (1.25e7, 1.25e8))
    assert result["target"] == pytest.approx(1.015 * 3.0)
    none, sign, local = result["rows"]
    assert [cell["steps"] for row in result["rows"] for cell in row["cells"]] == [
        100,
        100,
        None,
        None,
        None,
        None,
    ]
    assert [cell["seconds"] for cell in none["cells"]] == pytest.approx(
        [100 * PLAIN_STEP.over(slow), 100 * PLAIN_STEP.over(fast)]
    )
    assert local["cells"][0]["step_seconds"] == pytest.approx(0.1)  # the mean of a period
    assert (
        sign["above_plain"] == pytest.approx(3.1 / 3.0 - 1) and none["nbytes"] == PLAIN_STEP.nbytes
    )
    assert ("sign", True) in ranks.opened  # timed apart from its curve


def test_cells_run_to_their_end_agree():
    """`none` over the fastest link, and the best other way at 100 Mbit/s; 1-bit's first fifth is
    plain."""
    result, _ = measured("none", "1-bit")
    slow = shaped(2, 50e-6, 1.25e7)
    cell = result["rows"][1]["cells"][0]
    assert cell["seconds"] == pytest.approx(20 * PLAIN_STEP.over(slow) + 80 * SIGN_STEP.over(slow))
    none, one_bit = result["through"]
    assert none["measured"] == pytest.approx(none["predicted"]) and none["bandwidth"] == 1.25e8
    assert one_bit["way"] == "1-bit:warmup=20" and one_bit["bandwidth"] == 1.25e7
    assert best(result["rows"], 0)["way"] == "1-bit:warmup=20"


def test_adaptive_is_run_over_each_link():
    result, _ = measured("none", "adaptive")
    row = result["rows"][1]
    assert [cell["steps"] for cell in row["cells"]] == [100, 100]
    assert row["cells"][0]["seconds"] == pytest.approx(
        100 * PLAIN_STEP.over(shaped(2, 50e-6, 1.25e7))
    )
    assert [cell["way"] for cell in result["through"]] == ["none"]
    assert row["above_plain"] is None  # it ends at the target, with another number of steps


def test_adaptive_that_never_is_at_the_target_has_a_last_loss():
    row = measured("none", "adaptive", adaptive=0.005)[0]["rows"][1]
    assert [cell["steps"] for cell in row["cells"]] == [None, None]
    assert row["above_plain"] == pytest.approx(3.5 / 3.0 - 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check"], "add --advise"),
        (["-n", "1"], "at least 2"),
        (["-n", "2,4"], "only with --advise"),
        (["--ways", "fp16,fp16"], "name each way once"),
        (["--bandwidths", "1Kbit"], "slowest of --bandwidths"),
        (["--advise", "--ways", "local-steps"], "local steps train otherwise"),
        (["--vocab", "3"], "different symbols"),
    ],
)
def test_options_that_do_not_go_together(words, said, capsys):
    assert main(["bench", "compress", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_says_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "compress", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1.5 % above the last of `none`" in said
    for name, value in vars(FULL).items():
        assert re.search(
            rf"--{name} N [^(]*\(({getattr(MODEL, name)}; with --full )?{value}\)", said
        ), name


SMALL = [
    "bench",
    "compress",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--steps",
    "20",
    "--rounds",
    "1",
    "-n",
    "2",
]


@pytest.mark.soak
def test_for_real(tmp_path, capsys):
    file = tmp_path / "times.json"
    picture = tmp_path / "times.png"
    assert (
        main(
            [
                *SMALL,
                "--every",
                "5",
                "--ways",
                "fp16,1-bit,adaptive:period=3,local-steps:every=4",
                "--bandwidths",
                "1Mbit,1Gbit",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert [row["way"] for row in result["rows"]] == [
        "none",
        "fp16",
        "1-bit:warmup=4",
        "local-steps:every=4",
        "adaptive:period=3",
    ]
    none, fp16 = result["rows"][:2]
    assert fp16["nbytes"] == none["nbytes"] / 2
    slow, fast = (cell["step_seconds"] for cell in none["cells"])
    assert slow > fast and slow > none["nbytes"] * 8 / 1e6  # no link is faster than it says
    for cell in result["through"]:
        if cell["steps"] is not None:  # the link changes no number of a training
            curve = next(row["curve"] for row in result["rows"] if row["way"] == cell["way"])
            assert cell["loss"] == dict(map(tuple, curve))[cell["steps"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "seconds until the validation loss" in capsys.readouterr().out


@pytest.mark.soak
def test_advice_for_real(tmp_path, capsys):
    """Over a slow link bytes decide: fp16 and top-k are faster, as advised."""
    file = tmp_path / "advice.json"
    picture = tmp_path / "advice.png"
    assert (
        main(
            [
                *SMALL,
                "--width",
                "64",
                "--advise",
                "--check",
                "--ways",
                "fp16,top-k",
                "--bandwidths",
                "2Mbit,100Mbit",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    [advice] = result["advice"]
    assert [row["way"] for row in advice["rows"]] == ["fp16", "top-k"]
    for row in advice["rows"]:
        assert row["cells"][0]["compress"] and row["cells"][0]["right"]
    assert result["claims"]["bits"] == pytest.approx(1.0, abs=0.1)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1-bit Adam" in capsys.readouterr().out
