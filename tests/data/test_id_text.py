"""Data as ids of tokens: a .npy file, and one line for what is none. A text through a tokenizer is in
tests/cli/train/test_from_published.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist.data.id_text import TokenIds, load_tokens
from minidist.errors import DataError


def test_nine_tenths_of_the_ids_are_for_training(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20, dtype=np.uint16))
    data = load_tokens(str(tmp_path / "ids.npy"))
    assert data.train.tolist() == [*range(18)]
    assert data.validation.tolist() == [18, 19]
    assert data.train.dtype == np.int32
    assert (data.symbols, data.unit, data.different) == ("", "tokens", 20)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 3), int), r"must have integers in one dim; it has int64 \(2, 3\)"),
        (np.ones(3), r"must have integers in one dim; it has float64 \(3,\)"),
        (np.array([1, -1]), "ids must be from 0 to 2,147,483,647; it has ids from -1 to 1"),
        (np.array([2**31]), "ids must be from 0"),
        (np.array([None]), "is not a .npy file: Object arrays"),
    ],
)
def test_a_file_without_ids_is_told(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DataError, match=message):
        load_tokens(str(tmp_path / "ids.npy"))


def test_ids_that_do_not_fit_are_told(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    for source, message in (
        (tmp_path / "text.npy", "is not a .npy file"),
        (tmp_path / "none.npy", "No such file"),
        ("python", "give its tokenizer with --tokenizer"),
        ("book.txt", "give its tokenizer with --tokenizer"),
    ):
        with pytest.raises(DataError, match=message):
            load_tokens(str(source))
    data = TokenIds("here", "", np.array([1, 2, 3]), np.array([1, 2, 9]))
    data.check(context=2, vocabulary=10)
    with pytest.raises(DataError, match="has id 9, but the model's vocabulary is 9"):
        data.check(context=2, vocabulary=9)
    with pytest.raises(DataError, match="too few for a context of 3"):
        data.check(context=3, vocabulary=10)
    with pytest.raises(DataError, match="holds token ids, .* give a tokenizer.json"):
        data.encode("a")
    assert data.decode([1, 2]) == "1 2"
