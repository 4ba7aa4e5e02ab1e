"""Safetensors files of another program: arrays by name, read from the disk when they are used.

    file = open_weights("model.safetensors")     # or its index, or the folder
    file.shapes["wte.weight"]        # of every array, from the head of the file
    file.read("wte.weight")          # a copy, in the dtype of the file

The format: 8 bytes with the length of a JSON object, the object with name, dtype, shape and place
of each array, then the arrays. The package safetensors reads no bfloat16 into NumPy.

Several files have an index, model.safetensors.index.json, beside them. Its "weight_map" is {name of
an array: name of its file}.
"""

import os
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from minidist.device.backend import dtype
from minidist.errors import ConfigError, DataError
from minidist.files import open_regular
from minidist.reading import Count, convert, decoded, read_json

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_MOST_HEAD = 100_000_000  # bytes, the limit of the format
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Entry(msgspec.Struct):
    """An array, as the head of a file describes it."""

    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Count, Count]


class WeightsFile:
    """The arrays of a safetensors file.

    Attributes: path; shapes: {name: shape}, in the order of the file.
    Raises:  DataError, one line, if the file cannot be read or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(open_regular(self.path), "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                size = os.fstat(stream.fileno()).st_size
                if not 2 <= length <= min(_MOST_HEAD, size - 8):
                    raise DataError(f"{self.path}: is not a safetensors file, or is incomplete")
                head = stream.read(length)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        self._start = 8 + length
        try:
            about = decoded(head)
            if not isinstance(about, dict):
                raise ValueError("its header is not a JSON object")
            about.pop("__metadata__", None)
            self._entries = {name: convert(entry, _Entry) for name, entry in about.items()}
        except (ConfigError, ValueError) as error:  # msgspec.ValidationError too
            raise DataError(f"{self.path}: is not a safetensors file: {error}") from error
        for name, entry in self._entries.items():
            self._check(name, entry, size - self._start)
        self.shapes = {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def _check(self, name: str, entry: _Entry, room: int) -> None:
        if entry.dtype not in _DTYPES:
            raise DataError(
                f"{self.path}: {name} has dtype {entry.dtype}; convert it to one of "
                f"{', '.join(_DTYPES)}"
            )
        begin, end = entry.data_offsets
        if end - begin != prod(entry.shape) * self.dtype_of(name).itemsize or end > room:
            raise DataError(
                f"{self.path}: {name} is incomplete; the file is damaged or its end is missing"
            )

    def dtype_of(self, name: str) -> np.dtype:
        """Return the dtype of an array."""
        return dtype(_DTYPES[self._entries[name].dtype])

    def has(self, kind: str) -> bool:
        """Return whether an array has this dtype."""
        return any(_DTYPES[entry.dtype] == kind for entry in self._entries.values())

    def read(self, name: str) -> np.ndarray:
        """Return a copy of an array. Raises: DataError if it cannot be read."""
        entry = self._entries[name]
        array = np.empty(self.shapes[name], self.dtype_of(name))
        try:
            with open(open_regular(self.path), "rb") as stream:
                stream.seek(self._start + entry.data_offsets[0])
                count = stream.readinto(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        if count != array.nbytes:
            raise DataError(
                f"{self.path}: {name} is incomplete; the file is damaged or its end is missing"
            )
        return array


class _Index(msgspec.Struct):
    """The index of several files."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class WeightsFiles:
    """The arrays of several safetensors files in one folder, which an index names.

    Attributes: path (of the index); shapes: {name: shape}, in the order of the index.
    Raises:  DataError, one line, if the index or a file cannot be read, is damaged or is missing,
             or if a file does not hold exactly the arrays that the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            places: dict[str, str] = read_json(self.path, _Index, most=_MOST_HEAD)["weight_map"]
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        except ConfigError as error:
            raise DataError(f"{self.path}: is no index of safetensors files: {error}") from error
        files = {name: self._open(name) for name in sorted(set(places.values()))}
        for name, place in places.items():
            if name not in files[place].shapes:
                raise DataError(f"{self.path}: says that {place} holds {name[:200]!r}; it does not")
        for place, file in files.items():
            for name in file.shapes:
                if places.get(name) != place:
                    raise DataError(
                        f"{self.path}: {place} holds {name[:200]!r}, and the index does not say so"
                    )
        self._files = {name: files[place] for name, place in places.items()}
        self.shapes = {name: file.shapes[name] for name, file in self._files.items()}

    def _open(self, name: str) -> WeightsFile:
        """Return the file `name` beside the index. Raises: DataError."""
        is_plain = name.isprintable() and not {"/", "\\"} & set(name)
        if not is_plain or not name.endswith(".safetensors"):
            raise DataError(
                f"{self.path}: names the file {name[:200]!r}; a file lies beside the index, and its "
                "name ends in .safetensors"
            )
        place = self.path.parent / name
        if not os.path.lexists(place):
            raise DataError(
                f"{self.path}: names {name[:200]}, which is not beside it; add that file"
            )
        return WeightsFile(place)

    def dtype_of(self, name: str) -> np.dtype:
        """Return the dtype of an array."""
        return self._files[name].dtype_of(name)

    def has(self, kind: str) -> bool:
        """Return whether an array has this dtype."""
        return any(file.has(kind) for file in self._files.values())

    def read(self, name: str) -> np.ndarray:
        """Return a copy of an array. Raises: DataError if it cannot be read."""
        return self._files[name].read(name)


Weights = WeightsFile | WeightsFiles


def open_weights(path: str | Path) -> Weights:
    """Return the arrays of a safetensors file, of the files that an index (.json) names, or of a
    folder with either: model.safetensors, else model.safetensors.index.json.

    Raises:  DataError, as WeightsFile and WeightsFiles; DataError too for a folder with neither.
    """
    place = Path(path)
    if place.is_dir():
        found = [name for name in (FILE, INDEX) if os.path.lexists(place / name)]
        if not found:
            raise DataError(f"{place}: holds neither {FILE} nor {INDEX}; name the file of weights")
        place = place / found[0]
    return WeightsFiles(place) if place.suffix == ".json" else WeightsFile(place)
