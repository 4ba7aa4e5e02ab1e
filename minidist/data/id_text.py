"""Data as ids of tokens: a text through a tokenizer.json, or a file of ids.

data = load_tokens("book.txt", "tokenizer.json")
data = load_tokens("ids.npy")                  # integers, one dim
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from minidist.data import text
from minidist.data.tokenizer import Tokenizer
from minidist.errors import DataError
from minidist.files import open_regular


@dataclass(frozen=True)
class TokenIds(text.Text):
    """Ids of tokens, in place of a text's symbols; `symbols` is empty."""

    unit: ClassVar[str] = "tokens"
    tokenizer: Tokenizer | None = None

    @property
    def different(self) -> int:
        """Return the number of different ids."""
        return len(np.unique(np.concatenate([self.train, self.validation])))

    def encode(self, string: str) -> np.ndarray:
        """Return the ids of a text's tokens: int32. Raises: DataError without a tokenizer."""
        if self.tokenizer is None:
            raise DataError(
                f"{self.source}: holds token ids, not a text; to encode a text, give a tokenizer.json"
            )
        return self.tokenizer.encode(string)

    def decode(self, ids: Any) -> str:
        """Return the text of ids; without a tokenizer the ids themselves, with spaces between."""
        whole = [int(i) for i in np.asarray(ids).tolist()]
        return shown_ids(whole) if self.tokenizer is None else self.tokenizer.decode(whole)

    def check(self, *, context: int, vocabulary: int | None = None) -> None:
        """Raise DataError unless both parts hold a sequence and its next token, and all ids are
        below `vocabulary`."""
        super().check(context=context)
        most = int(max(self.train.max(), self.validation.max()))
        if vocabulary is not None and most >= vocabulary:
            raise DataError(
                f"{self.source}: has id {most:,}, but the model's vocabulary is {vocabulary:,}; "
                "use the tokenizer of this model"
            )


def shown_ids(ids: Iterable[int]) -> str:
    """Return ids with spaces between."""
    return " ".join(map(str, ids))


def load_tokens(source: str, tokenizer: str | None = None) -> TokenIds:
    """Read data as ids, nine tenths for training.

    Args:    source: with a tokenizer a text, as text.load takes it; without one a file of NumPy
             (.npy) with integers in one dim.
             tokenizer: the path of a tokenizer.json.
    Raises:  DataError if there are no such data; ConfigError without the library `tokenizers`.
    """
    if tokenizer is None:
        return _split(source, _read_ids(source))
    reader = Tokenizer(tokenizer)
    letters = text.load(source)
    string = letters.decode(np.concatenate([letters.train, letters.validation]))
    return _split(source, reader.encode(string), tokenizer=reader, left_out=letters.left_out)


def _split(source: str, ids: np.ndarray, **options: Any) -> TokenIds:
    cut = len(ids) * 9 // 10
    return TokenIds(source, "", ids[:cut], ids[cut:], **options)


def _read_ids(source: str) -> np.ndarray:
    path = Path(source)
    if source in text.NAMED or path.suffix != ".npy":
        raise DataError(
            f"data {source[:200]}: is a text, but a published model needs token ids; give its "
            "tokenizer with --tokenizer tokenizer.json, or a .npy file of ids"
        )
    try:
        with open(open_regular(path), "rb") as stream:
            ids = np.load(stream, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: is not a .npy file: {str(error).splitlines()[0]}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path}: must have integers in one dim; it has {getattr(ids, 'dtype', '')} "
            f"{getattr(ids, 'shape', '')}"
        )
    if len(ids) and not (ids.min() >= 0 and ids.max() < 2**31):
        raise DataError(
            f"{path}: ids must be from 0 to {2**31 - 1:,}; it has ids from {ids.min()} to "
            f"{ids.max()}"
        )
    return ids.astype(np.int32)
