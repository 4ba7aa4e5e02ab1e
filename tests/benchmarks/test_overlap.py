"""minidist bench overlap: each alone, both at once, and the hidden part."""

import json

import pytest

from minidist.bench.overlap import OverlapRow
from minidist.cli import main


@pytest.mark.soak
def test_overlap_measures_each_alone_and_both(tmp_path):
    """Over links that hold 64 KiB back for 40 ms and more, the products run meanwhile."""
    file = tmp_path / "overlap.json"
    picture = tmp_path / "overlap.png"
    assert (
        main(
            [
                "bench",
                "overlap",
                "--only",
                "delayed",
                "--bytes",
                "64KiB",
                "--alpha",
                "0.02",
                "--bandwidth",
                "10MB",
                "--rounds",
                "1",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    (row,) = json.loads(file.read_text())["rows"]
    assert row["communicate"] > 2 * (0.02 + (32 << 10) / 10e6)
    assert row["of_longer"] == pytest.approx(row["both"] / max(row["communicate"], row["compute"]))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_overlap_hides_some(tmp_path):
    file = tmp_path / "overlap.json"
    assert (
        main(
            [
                "bench",
                "overlap",
                "--only",
                "delayed",
                "--bytes",
                "64KiB",
                "--alpha",
                "0.05",
                "--bandwidth",
                "10MB",
                "--rounds",
                "3",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    (row,) = json.loads(file.read_text())["rows"]
    assert row["both"] < 0.9 * (row["communicate"] + row["compute"])


def test_what_is_hidden():
    """Wholly hidden: both take as long as the longer; not at all: as long as one after the
    other."""
    assert (OverlapRow("", 2.0, 3.0, 3.0).of_longer, OverlapRow("", 2.0, 3.0, 3.0).hidden) == (
        1.0,
        1.0,
    )
    assert (OverlapRow("", 3.0, 3.0, 6.0).of_longer, OverlapRow("", 3.0, 3.0, 6.0).hidden) == (
        2.0,
        0.0,
    )
