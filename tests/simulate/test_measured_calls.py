"""The published tables of all-reduces, and how far library.py is from them."""

import numpy as np
import pytest

from minidist.grading import load_module
from minidist.lessons import FOLDER
from minidist.simulate.cluster import Cluster
from minidist.simulate.library import SWITCH_HOP
from minidist.simulate.measured_calls import MIB, defaults, errors, fit, tables
from minidist.simulate.runs import PUBLISHED

ROWS = {
    "dudeperf3ct-h100": 17,
    "gcm-a100": 12,
    "nccl-tests-309-a": 42,
    "nccl-tests-309-b": 38,
    "nccl-tests-309-b-ring": 14,
    "oke-a100": 20,
    "sheffield-a100": 14,
    "vidur-a100": 21,
    "vidur-h100": 21,
}


def test_every_table_has_its_rows_and_its_source():
    assert {name: len(rows) for name, rows in tables().items()} == ROWS
    for name, rows in tables().items():
        text = (PUBLISHED / "collectives" / f"{name}.csv").read_text(encoding="utf-8")
        assert text.startswith("# ") and "github.com/" in text
        assert all(row.nbytes & (row.nbytes - 1) == 0 for row in rows)
        for cluster in {row.cluster for row in rows}:
            assert Cluster.parse(cluster).size > 1


@pytest.mark.parametrize("name", ROWS)
def test_a_longer_array_takes_longer(name):
    """Of arrays from 8 MiB on: shorter ones wait more than they move."""
    rows = [row for row in tables()[name] if row.nbytes >= 8 * MIB]
    for row, after in zip(rows, rows[1:], strict=False):
        assert after.seconds > row.seconds or after.cluster != row.cluster


def mean_of_tables(constants, low, high):
    return float(
        np.mean(
            [
                np.abs(errors(chosen, constants)).mean()
                for rows in tables().values()
                for chosen in [[row for row in rows if low <= row.nbytes <= high]]
                if chosen
            ]
        )
    )


def test_the_errors_are_small():
    """Of the tables in which NCCL chose the way, 23 % from 1 to 64 MiB and 12 % above before
    protocols had measured shares."""
    assert mean_of_tables(defaults(), MIB, 64 * MIB) < 0.12
    assert mean_of_tables(defaults(), 65 * MIB, 1 << 40) < 0.058


@pytest.mark.parametrize(
    ("key", "value"), [("start", 0.0), ("fill", 0.0), ("ll128", 0.92), ("start", 60e-6)]
)
def test_each_constant_is_needed(key, value):
    """A constant as NCCL's own tables have it, or far off, makes the A100s' errors larger."""
    rows = [row for name, rows in tables().items() if "a100" in name for row in rows]
    rows = [row for row in rows if row.nbytes >= MIB]
    usual = np.abs(errors(rows)).mean()
    assert np.abs(errors(rows, {("nvlink3", key): value})).mean() > 1.03 * usual


def test_the_defaults_are_what_fits_best():
    """Rounded: none is more than a sixth from the fit's."""
    fitted = fit(tables())
    for constant, value in defaults().items():
        assert value == pytest.approx(fitted[constant], rel=1 / 6), constant


def test_a_constant_that_no_row_depends_on_keeps_its_default():
    fitted = fit({"vidur-a100": tables()["vidur-a100"]})
    changed = {constant for constant in fitted if fitted[constant] != defaults()[constant]}
    assert changed and all(wire == "nvlink3" for wire, _ in changed)


def test_a_hop_between_nodes_with_switches_is_slower_than_nccl_expects():
    assert SWITCH_HOP > 20.9 / 2.7


PAGE = FOLDER / "24_simulate" / "CALIBRATION.md"


def test_the_page_says_the_errors_of_the_defaults():
    lesson = load_module(PAGE.with_name("calibration.py"), "24")
    text = PAGE.read_text(encoding="utf-8").split("## NCCL's all-reduce")[1]
    for name, rows in tables().items():
        cells = text.split(f"| {name} | {len(rows)} | ")[1].split(" | ")[:3]
        means = np.array(lesson.mean_errors(rows, defaults()))
        assert cells == lesson._cells(means).split(" | ")


@pytest.mark.soak
def test_the_page_is_the_program_s():
    lesson = load_module(PAGE.with_name("calibration.py"), "24")
    assert lesson.collectives() in PAGE.read_text(encoding="utf-8")
