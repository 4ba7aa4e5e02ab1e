"""MNIST, from the user's IDX files: 60,000 and 10,000 images of 28 × 28.

An IDX file is  0 0 type dims | sizes, 4 bytes each, big-endian | elements, big-endian.
Source:  LeCun, MNIST's page.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minidist.data.images import ImageData, Images
from minidist.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MOST_DIMS = 32


def load(folder: str | Path) -> ImageData:
    """Read the four files of MNIST (or of a set in its format) in `folder`, plain or .gz.

    Raises:  DataError if a file is missing or malformed, or images and labels do not belong
             together.
    """
    arrays = [read_idx(_find(Path(folder), name)) for name in _NAMES]
    for name, array, dims in zip(_NAMES, arrays, (3, 1, 3, 1), strict=True):
        if array.ndim != dims or array.dtype != np.uint8:
            raise DataError(
                f"{name} in {folder}: has {array.dtype} {array.shape}; this file of MNIST must "
                f"have uint8 in {dims} dims"
            )
    train, test = (
        Images(pixels, labels.astype(np.int64), white=255)
        for pixels, labels in (arrays[:2], arrays[2:])
    )
    top = max((int(part.labels.max()) for part in (train, test) if len(part)), default=-1)
    return ImageData(train=train, test=test, classes=top + 1)


def _find(folder: Path, name: str) -> Path:
    """Return the path of the file, under one of its usual names. Raises: DataError."""
    for candidate in (name, name.replace("-idx", ".idx")):
        for path in (folder / candidate, folder / f"{candidate}.gz"):
            if path.is_file():
                return path
    raise DataError(
        f"MNIST: no file {name} or {name}.gz in {folder}; put the four files there: "
        f"{', '.join(_NAMES)}"
    )


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array in an IDX file, plain or .gz, in this machine's byte order; read no more
    than its header announces.

    Raises:  DataError if the file cannot be read or does not agree with its header.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(path, file)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: damaged gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, file: BinaryIO) -> np.ndarray:
    """Return the array in an open IDX file. Raises: DataError, with the path."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] > _MOST_DIMS:
        raise DataError(
            f"{path}: is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}; expected "
            f"00 00, then a type ({', '.join(f'{code:02x}' for code in _TYPES)}), then the number "
            f"of dims, at most {_MOST_DIMS}"
        )
    header = file.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise DataError(f"{path}: ends inside its header, which states {magic[3]} dims")
    shape = struct.unpack(f">{magic[3]}I", header)
    dtype = np.dtype(_TYPES[magic[2]])
    expected = math.prod(shape) * dtype.itemsize
    content = _read_at_most(file, expected + 1)
    if len(content) != expected:
        came = f"has {len(content):,}" if len(content) < expected else "has more"
        raise DataError(
            f"{path}: {dtype.newbyteorder('=').name} {shape} needs {expected:,} bytes, but the "
            f"file {came}; download it again"
        )
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _read_at_most(file: BinaryIO, limit: int) -> bytes:
    """Return up to `limit` bytes, read in pieces, so that a wrong header costs no memory."""
    pieces = []
    left = limit
    while left and (piece := file.read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
