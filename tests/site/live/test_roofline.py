"""The numbers of the live figure `roofline`, computed another way."""

import re

import pytest
from live_figures import figure

from minidist import lessons
from minidist.site.live import (
    roofline,
)


def test_the_roofline_has_the_table_of_the_lesson() -> None:
    """The lesson counts the bytes of 64 tokens; a product's are counted by hand."""
    live = figure("roofline", "en")
    table = re.findall(
        r"^\| v(\d), .*? \| ([\d.]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| (\d+)% \|$",
        lessons.find("22").part("README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [row[0] for row in table] == ["1", "2", "3"]
    for version, intensity, long, ridge, rate, part in table:
        facts = live.picture(int(version) - 1, 0, 2).facts
        assert f"the ridge is at {ridge}." in facts[0]
        (found,) = re.findall(r"= ([\d.]+) operations", facts[0])
        assert float(found) == pytest.approx(float(intensity), abs=0.006)
        (found,) = re.findall(r"At most ([\d.]+) TFLOP", facts[1])
        assert float(found) == pytest.approx(float(rate), abs=0.06)
        assert f"{part}% of the peak: memory decides" in facts[1]
        endless = roofline.attention_rung(int(version), 65536).intensity
        assert endless == pytest.approx(float(long), abs=0.006)
    one_tile = roofline.product_rung(5, 128)
    assert one_tile.operations == 2 * 128**3 and one_tile.nbytes == 3 * 128 * 128 * 2
