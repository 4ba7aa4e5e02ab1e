"""The numbers of the live figure `compression`, computed another way."""

import gzip
import json
import re
import shlex
from typing import Any
import pytest
from minidist import lessons
from minidist.grading import load_module
from minidist.simulate.simulate import simulate
from minidist.site.live import (
    NAMES,
    Live,
    checkpoint,
    compression,
    data_of,
    every,
    roofline,
    sick_job,
    thousand,
)
from minidist.site.pages import LANGUAGES, say
from figures_of import figure


def test_the_times_of_compression_are_those_of_the_page_of_the_machine() -> None:
    """docs/measured has the bench's own table, at its own target."""
    page = (lessons.FOLDER.parent / "docs" / "measured" / "intel-xeon.md").read_text("utf-8")
    (target,) = re.findall(r"the validation loss is ([\d.]+) .* 3\.24 million", page)
    for text, name in compression.SHOWN.items():
        (row,) = re.findall(rf"^│ {re.escape(text)} +│(.*(?:never|\)) │)$", page, re.MULTILINE)
        cells = [cell.split()[0] for cell in row.split("│")[3:7]]
        found = [compression.reached(float(target), link)[name].seconds for link in range(4)]
        assert cells == ["never" if each is None else f"{each:,.1f}" for each in found]
