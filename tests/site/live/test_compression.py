"""The numbers of the live figure `compression`, computed another way."""

import re

from minidist import lessons
from minidist.site.live import (
    compression,
)


def test_the_times_of_compression_are_those_of_the_page_of_the_machine() -> None:
    """docs/measured has the bench's own table, at its own target."""
    page = (lessons.FOLDER.parent / "docs" / "measured" / "intel-xeon.md").read_text("utf-8")
    (target,) = re.findall(r"the validation loss is ([\d.]+) .* 3\.24 million", page)
    for text, name in compression.SHOWN.items():
        (row,) = re.findall(rf"^│ {re.escape(text)} +│(.*(?:never|\)) │)$", page, re.MULTILINE)
        cells = [cell.split()[0] for cell in row.split("│")[3:7]]
        found = [compression.reached(float(target), link)[name].seconds for link in range(4)]
        assert cells == ["never" if each is None else f"{each:,.1f}" for each in found]
