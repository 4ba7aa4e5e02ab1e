"""Lessons 01 and 02 read plain_tcp.py aloud: what they quote is its code."""

import re
import textwrap

import pytest

from minidist import lessons
from minidist.comm.transports import plain_tcp


@pytest.mark.parametrize(("number", "title", "blocks"), [
    ("01", "### How ranks meet and connect", 3), ("02", "### 2.7 The path of a message", 5)])
def test_the_lessons_quote_the_transport_as_it_is(number: str, title: str, blocks: int) -> None:
    text = lessons.find(number).part("README.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.split(title)[1], flags=re.MULTILINE)[0]
    quotes = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(quotes) == blocks
    with open(plain_tcp.__file__, encoding="utf-8") as file:
        code = file.read()
    for quote in quotes:
        indents = [textwrap.indent(quote, " " * depth) for depth in range(0, 20, 4)]
        assert any(indented in code for indented in indents), quote
