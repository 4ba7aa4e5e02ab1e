"""Files through a schema: what does not fit is one short line, and texts of files are made
visible."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import ConfigError
from minidist.reading import (
    Count,
    consistent,
    parse_json,
    parse_line,
    read_json,
    read_text,
    visible,
)


class Point(msgspec.Struct):
    x: Count
    names: list[str] = []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "too deep"),
        (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", "more than 64 deep"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"x": 1e400}', "x: Expected `int`"),
        (b'{"x": -1}', "x: Expected `int` >= 0"),
        (b'{"x": true}', "x: Expected `int`, got `bool`"),
        (b'{"x": 1, "names": [2]}', r"names\[0\]: Expected `str`"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `x`"),
        (b'{"x": 100000000000000000000000}', "x: Expected `int` <="),
    ],
)
def test_what_does_not_fit_is_one_short_line(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        read_json(tmp_path / "file", Point)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
    assert parse_line(content, Point) is None or "deep" in told


def test_what_fits_comes_as_it_is() -> None:
    value = parse_json(b'{"x": 7, "names": ["a"], "more": NaN}', Point)
    assert value["x"] == 7 and math.isnan(value["more"]) and isinstance(value, dict)


def test_a_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa\r\nb\rc")
    assert read_text(tmp_path / "file") == "a\nb\nc"
    (tmp_path / "file").write_bytes(b"a\xff")
    with pytest.raises(ConfigError, match="byte 1 is 0xff"):
        read_text(tmp_path / "file")


@given(st.text())
def test_no_letter_of_a_visible_text_acts_on_a_terminal(text: str) -> None:
    shown = visible(text, keep="\n")
    assert shown.isprintable() or all(
        letter == "\n" or letter.isprintable() or ord(letter) >= 160 for letter in shown
    )
    assert not set(shown) & {*map(chr, range(10)), "\x1b", "\x7f", "\x9b", "\u202e", "\ud800"}
    shown.encode()


def test_a_visible_text_stays_as_it_is_where_nothing_acts() -> None:
    assert visible("Größe [red] 中文\tx", keep="\t") == "Größe [red] 中文\tx"
    assert visible("a\x1b[31m\nb\ud800\u202e") == r"a\x1b[31m\nb\ud800\u202e"


@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda: [][1], lambda: int("x"), lambda: 1 + "x"])
def test_numbers_that_contradict_each_other_are_one_line(wrong: Any) -> None:
    with (
        pytest.raises(ConfigError, match="the records contradict each other"),
        consistent("the records"),
    ):
        wrong()


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(AssertionError), consistent("the records"):
        raise AssertionError


def test_threads_may_need_a_new_schema_at_once() -> None:
    """Ranks that are threads read one manifest together; msgspec by itself crashes the process
    then."""
    program = """
import threading, msgspec
from minidist.reading import require
for turn in range(300):
    inner = msgspec.defstruct('Inner', [(f'a{k}', dict[str, int] | None) for k in range(9)])
    outer = msgspec.defstruct('Outer', [('rows', list[inner]), ('more', dict[str, inner])])
    value = {'rows': [{f'a{k}': None for k in range(9)}], 'more': {}}
    together = threading.Barrier(4)
    def read():
        together.wait()
        require(value, outer)
    threads = [threading.Thread(target=read) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.setswitchinterval(1e-6)\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
