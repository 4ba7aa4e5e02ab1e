"""A tokenizer.json of a published model: text to ids and back, by the library `tokenizers`.

tokenizer = Tokenizer("tokenizer.json")
tokenizer.decode(tokenizer.encode("The "))
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from minidist.errors import ConfigError, DataError
from minidist.files import read_regular

_MOST_BYTES = 1 << 28  # of a file; the largest published ones have 20 MB


class Tokenizer:
    """The ids of a text's tokens.

    Attributes: path; size: the number of ids.
    Raises:  ConfigError if the library is not installed; DataError if the file is no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            import tokenizers  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                "a tokenizer.json needs the library tokenizers, which is not installed: "
                'pip install "minidist[tokenizer]"; or give ids'
            ) from error
        try:
            content = read_regular(self.path, most=_MOST_BYTES).decode()
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        except Exception as error:  # the library raises nothing narrower
            reason = str(error).partition("\n")[0]
            raise DataError(f"{self.path}: is not a tokenizer.json: {reason}") from error
        self.size = int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text's tokens: int32, without the marks that a model's chat format
        adds."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))
