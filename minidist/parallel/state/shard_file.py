"""One rank's file of a checkpoint: arrays in the format of safetensors, with a checksum for each
block of BLOCK bytes.

    8 bytes: length of the header | the header: JSON, {key: dtype, shape, place of its bytes} | the
    arrays' bytes

Any reader of safetensors can open it. Our reader reads only the blocks that it needs, and checks
each. A writer reads each block from memory once: it computes the checksum and copies the block into
a piece that is written to the disk.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.device.backend import dtype, dtype_name
from minidist.errors import CheckpointError
from minidist.files import create, open_regular

BLOCK = 1 << 18  # bytes; a multiple of every itemsize
PIECE = 1 << 22  # bytes that a DirectFile writes at once
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Entry(NamedTuple):
    """An array in a shard file.

    Attributes: key: kind and name of the whole tensor; shape: of the whole; stripes: the numbers
                that it has.
                offset: of its first byte in the file; checksums: CRC-32 of each block.
    """

    key: str
    dtype: str
    shape: list[int]
    stripes: list[list[int]]
    offset: int
    nbytes: int
    checksums: list[int]


class DirectFile:
    """A new file, written from begin to end without the system's cache, where the file system
    allows it (O_DIRECT).

    The cache would cost a copy, and at the end a wait until all its data is written; and it would
    displace the data that training reads. The disk takes whole pages from whole pages: bytes are
    collected in a piece of PIECE bytes. The last, incomplete page goes through the cache.

    Raises:  OSError, here and later, if the disk is full or fails.
    """

    def __init__(self, file: Path) -> None:
        self._file = create(file, mode=0o666, flags=os.O_WRONLY)
        self._piece = memoryview(mmap.mmap(-1, PIECE))
        self._filled = self._written = 0
        self._flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        self._set_direct(True)

    def write(self, data: Any) -> None:
        """Append the bytes; the caller may change them afterwards."""
        while len(data):
            count = min(len(data), PIECE - self._filled)
            self._piece[self._filled : self._filled + count] = data[:count]
            data = data[count:]
            self._filled = self._filled + count
            if self._filled == PIECE:
                self._flush(PIECE)

    def close(self) -> None:
        """Return when all is on the disk."""
        self._flush(self._filled // mmap.PAGESIZE * mmap.PAGESIZE)
        self._set_direct(False)
        self._flush(self._filled)
        os.fsync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Close a file that will not be used."""
        os.close(self._file)

    def _flush(self, count: int) -> None:
        """Write the first bytes of the piece."""
        data = self._piece[:count]
        while len(data):
            try:
                written = os.pwrite(self._file, data, self._written)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)  # its pages are larger
                continue
            data = data[written:]
            self._written = self._written + written
            if written % mmap.PAGESIZE:
                self._set_direct(False)  # cut short: what follows is no whole page
        self._piece[: self._filled - count] = self._piece[count : self._filled]
        self._filled -= count

    def _set_direct(self, direct: bool) -> None:
        self._direct = False
        with contextlib.suppress(OSError):  # a file system without it
            fcntl.fcntl(
                self._file, fcntl.F_SETFL, self._flags | getattr(os, "O_DIRECT", 0) * direct
            )
            self._direct = direct


class ShardLayout:
    """The places of arrays in a file; the same for every save of a rank.

    Args:       arrays: of each (key, dtype, shape of the whole tensor, its stripes, its count of
                numbers).
    Attributes: header: the bytes before the arrays; nbytes: of the file; entries: of the arrays,
                without checksums.
    """

    def __init__(
        self, arrays: Sequence[tuple[str, np.dtype, Sequence[int], list[list[int]], int]]
    ) -> None:
        tensors: dict[str, Any] = {}
        entries = list[Entry]()
        end = 0
        for key, kind, shape, stripes, size in arrays:
            whole = len(stripes) == 1 and size == int(np.prod(shape, dtype=np.int64))
            nbytes = size * kind.itemsize
            tensors[key if key not in tensors else f"{key}@{end}"] = {
                "dtype": DTYPES[dtype_name(kind)],
                "shape": [*shape] if whole else [size],
                "data_offsets": [end, end + nbytes],
            }
            entries.append(Entry(key, dtype_name(kind), [*shape], stripes, end, nbytes, []))
            end += nbytes
        self.header = header_bytes(tensors)
        self.nbytes = len(self.header) + end
        self.entries = [entry._replace(offset=entry.offset + len(self.header)) for entry in entries]


class ShardWriter:
    """The writer of one file, an array at a time. Raises: OSError if the disk is full or fails."""

    def __init__(self, file: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self.entries = [entry._replace(checksums=[]) for entry in layout.entries]
        self._file = DirectFile(file)
        try:
            self._file.write(layout.header)
        except BaseException:
            self.abandon()
            raise

    def write(self, index: int, array: np.ndarray) -> None:
        """Write the numbers of array `index`; indices are written in order. The array is flat, on
        the host."""
        data = np.ascontiguousarray(array).view(np.uint8).data
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            self.entries[index].checksums.append(zlib.crc32(block))
            self._file.write(block)

    def close(self) -> None:
        """Return when all is on the disk."""
        self._file.close()

    def abandon(self) -> None:
        """Close a file that will not be used."""
        self._file.abandon()

    def described(self) -> dict[str, Any]:
        """Return the file's part of the manifest."""
        header = self.layout.header
        return {
            "nbytes": self.layout.nbytes,
            "header": [len(header), zlib.crc32(header)],
            "arrays": [entry._asdict() for entry in self.entries],
        }


class ShardReader:
    """The reader of one file, as the manifest describes it.

    Raises:  CheckpointError naming the file, and the array if one is damaged.
    """

    def __init__(self, file: Path, described: dict[str, Any]) -> None:
        self.file = file
        self.entries = [Entry(**array) for array in described["arrays"]]
        try:
            self._file = open_regular(file, member=True)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}; take an older checkpoint") from error
        try:
            length, checksum = described["header"]
            require_size(file, os.fstat(self._file).st_size, described["nbytes"])
            for entry in self.entries:
                if len(entry.checksums) != -(-entry.nbytes // BLOCK):
                    self._refuse(
                        f"{entry.key} of {entry.nbytes:,} bytes has {len(entry.checksums)} "
                        f"checksums in the manifest, and needs one per {BLOCK:,} bytes"
                    )
            if zlib.crc32(self._read(0, length)) != checksum:
                self._refuse("has another header than the one that was written")
        except BaseException:
            self.close()
            raise

    def copy(self, entry: Entry, copies: np.ndarray, out: np.ndarray) -> None:
        """Copy numbers into the flat array `out`.

        Args:    copies: (n, 3): offset in the entry's array, offset in `out`, count; ascending by
                 the first.
        """
        kind = dtype(entry.dtype)
        for first, last, rows in _by_blocks(copies, kind.itemsize):
            begin = first * BLOCK
            end = min(last * BLOCK, entry.nbytes)
            numbers = np.frombuffer(self.checked(entry, begin, end), kind)
            for source, target, count in rows.tolist():
                source -= begin // kind.itemsize
                out[target : target + count] = numbers[source : source + count]

    def checked(self, entry: Entry, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of an array, whole blocks, after a check that they are the
        bytes that were written."""
        data = self._read(entry.offset + begin, end - begin)
        for at in range(0, len(data), BLOCK):
            if (
                zlib.crc32(memoryview(data)[at : at + BLOCK])
                != entry.checksums[(begin + at) // BLOCK]
            ):
                self._refuse(
                    f"{entry.key} is damaged in its bytes {begin + at:,} to "
                    f"{min(begin + at + BLOCK, entry.nbytes) - 1:,}"
                )
        return data

    def close(self) -> None:
        os.close(self._file)

    def _read(self, start: int, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = os.pread(self._file, count - len(data), start + len(data))
            if not piece:
                self._refuse(f"ends after {start + len(data):,} bytes")
            data += piece
        return bytes(data)

    def _refuse(self, why: str) -> None:
        raise CheckpointError(f"{self.file}: {why}; take an older checkpoint")


def require_size(file: Path, size: int, expected: int) -> None:
    """Raise CheckpointError unless a shard file is as long as the manifest says."""
    if size != expected:
        raise CheckpointError(
            f"{file}: has {size:,} bytes, the manifest says {expected:,}; take an older checkpoint"
        )


def header_bytes(tensors: dict[str, Any]) -> bytes:
    """Return the head of a safetensors file: its length and the places of the arrays, filled up to
    a multiple of 8 bytes."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _by_blocks(copies: np.ndarray, itemsize: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Group copies into runs of neighbouring blocks: (first block, block after the last, the
    copies)."""
    first = copies[:, 0] * itemsize // BLOCK
    last = ((copies[:, 0] + copies[:, 2]) * itemsize - 1) // BLOCK + 1
    apart = np.flatnonzero(first[1:] > last[:-1]) + 1
    for rows in np.split(np.arange(len(copies)), apart):
        yield int(first[rows[0]]), int(last[rows[-1]]), copies[rows]
