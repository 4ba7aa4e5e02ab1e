"""The published tables: each can be read, says its source, and agrees with itself."""

from dataclasses import replace

import pytest

from minidist.lessons import FOLDER
from minidist.simulate.calibrate import PUBLISHED, Predictor, read_runs
from minidist.simulate.rates import CostProfile

ROWS = {
    "narayanan-2021-table-1": 4,
    "narayanan-2021-table-2": 6,
    "llm-foundry-a100": 9,
    "llm-foundry-a100-roce": 10,
    "llm-foundry-h100": 12,
    "dgxc-llama-3.1-8b-h100": 5,
    "dgxc-nemotron-15b-h100": 8,
}


def test_every_table_is_tested():
    assert {path.stem for path in PUBLISHED.glob("*.csv")} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_table_can_be_read_and_says_where_it_is_from(name):
    text = (PUBLISHED / f"{name}.csv").read_text(encoding="utf-8")
    assert text.startswith("# ") and ("arXiv" in text or "github.com/" in text)
    runs = read_runs(PUBLISHED / f"{name}.csv", "a100-80g" if "h100" not in name else "h100")
    assert len(runs) == ROWS[name]
    for run in runs:
        assert run.plan.size == run.cluster.size
        assert run.batch >= run.plan.dp * run.plan.accumulate


DAYS = {384: 90, 768: 74, 1536: 74, 640: 169, 1120: 137, 2240: 140}
"""Of 300 billion tokens, in table 2 of Narayanan et al. 2021, beside the FLOP/s that our seconds
come from."""


def test_seconds_from_flops_agree_with_the_days_of_the_same_table():
    for run in read_runs(PUBLISHED / "narayanan-2021-table-2.csv", "a100-80g"):
        days = run.seconds * 300e9 / (run.batch * 2048) / 86400
        assert days == pytest.approx(DAYS[run.cluster.size], rel=0.01)


MFU = {
    128: (0.4336, 0.4185, 0.4218, 0.4571, 0.4243, 0.4060),
    512: (0.4125, 0.4027, 0.4112, 0.4220, 0.3924, 0.3665),
}
"""Of 70b, 30b, 13b, 7b, 3b and 1b in llm-foundry's table of H100s."""


def test_seconds_agree_with_the_mfu_of_the_same_table():
    """Its formula: 6 FLOPs a weight and token, 12 · layers · width · sequence² of attention, of
    989.4 TFLOP/s."""
    of_size = {size: iter(mfu) for size, mfu in MFU.items()}
    for run in read_runs(PUBLISHED / "llm-foundry-h100.csv", "h100"):
        config = replace(run.config, tied=True)
        tokens = run.batch * 2048
        flops = tokens * (6 * config.numbers + 12 * config.layers * config.width * 2048)
        mfu = flops / (run.seconds * run.cluster.size * 989.4e12)
        assert mfu == pytest.approx(next(of_size[run.cluster.size]), rel=0.01)


PAGE = FOLDER / "24_simulate" / "CALIBRATION.md"


def test_the_page_has_every_row():
    """Each measured step that the page can have stands there, in the order of its table."""
    text = PAGE.read_text(encoding="utf-8")
    for name in ROWS:
        section = text.split(f"### {name}\n")[1].split("\n##")[0]
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
        runs = read_runs(PUBLISHED / f"{name}.csv", "a100-80g" if "h100" not in name else "h100")
        most = 8 if "llama" in name else 768
        assert [float(row[2]) for row in rows] == [
            pytest.approx(run.seconds, rel=1e-3) for run in runs if run.cluster.size <= most
        ]


def test_the_page_says_what_the_simulator_predicts():
    """By the default and by the fitted constants, for the cheapest row of a table that was
    fitted."""
    profile = CostProfile.load(PAGE.with_name("a100.json"))
    predicted = Predictor()
    section = PAGE.read_text(encoding="utf-8").split("### llm-foundry-a100\n")[1]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    for row, run in list(
        zip(rows, read_runs(PUBLISHED / "llm-foundry-a100.csv", "a100-80g"), strict=False)
    )[:1]:
        assert predicted(run, CostProfile("a100-80g")) == pytest.approx(float(row[3]), rel=1e-3)
        assert predicted(run, profile) == pytest.approx(float(row[5]), rel=1e-3)
