"""Records on disk, and the few buffers through which they are read and written behind computation.

A record is a raw file of regions, one behind the other, each an array of one dtype that begins on a
page:

    blocks.0    | weights | gradients | m | v |

No file is left behind, however the process ends: files have no names, so the system frees them with
their last descriptors. A disk does not run full in the middle of a run, because a region's blocks
are reserved when it is added. A write that fails in spite of it is reported by the next read, write
or wait of any kind.
"""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, bytes_view, is_simulated, to_host
from minidist.device.device_copies import host_bytes
from minidist.device.memory_traffic import MemoryTraffic
from minidist.errors import DiskError, TimeoutError
from minidist.files import reserve
from minidist.parallel.memory.transfer_lanes import LIMIT, Move, Pace, TransferLane
from minidist.parallel.step.recorder import Recorder

PAGE = 4096
"""Regions and buffers begin at multiples of it, in bytes."""


class Region(NamedTuple):
    """An array's place in a record, in bytes."""

    offset: int
    nbytes: int
    dtype: np.dtype


class Record:
    """A file of regions, zero until they are written; `label`: its name with rank and folder, for
    errors."""

    def __init__(self, name: str, label: str, fd: int) -> None:
        self.name = name
        self.label = label
        self.fd = fd
        self.nbytes = 0
        self.close = weakref.finalize(self, os.close, fd)
        self.regions: dict[str, Region] = {}
        self.writing: list[Move] = []  # a read waits for the writes that were begun before it

    def add(self, key: str, dtype: Any, count: int) -> None:
        """A region of `count` numbers, behind the others; its space is reserved. Raises DiskError
        for want of room."""
        dtype = np.dtype(dtype)
        region = self.regions[key] = Region(self.nbytes, count * dtype.itemsize, dtype)
        size = -(-region.nbytes // PAGE) * PAGE
        with naming_the_file(self.label, f"reserve {region.nbytes:,} bytes for {key}"):
            reserve(self.fd, region.offset, 0 if is_simulated() else size)
        self.nbytes += size

    def read(self, key: str, array: np.ndarray) -> None:
        """Fill an array with a region."""
        self._transfer("read", os.preadv, key, array)

    def write(self, key: str, array: Array) -> None:
        """Write a region."""
        self._transfer("write", os.pwritev, key, array)

    def _transfer(
        self, verb: str, call: Callable[[int, list[Any], int], int], key: str, array: Array
    ) -> None:
        """All of a region; a call may move less than it was asked for. Nothing of an array without
        data."""
        if is_simulated():
            return
        data = bytes_view(np.ascontiguousarray(to_host(array)))
        region = self.regions[key]
        done = 0
        with naming_the_file(self.label, f"{verb} {region.nbytes:,} bytes of {key}"):
            while done < region.nbytes:
                moved = call(self.fd, [data[done:].data], region.offset + done)
                if not moved:
                    raise OSError(errno.EIO, f"the file ends after {done:,} bytes")
                done += moved

    def total(self, keys: Sequence[str]) -> int:
        """Bytes of some regions."""
        return sum(self.regions[key].nbytes for key in keys)

    @property
    def master_key(self) -> str:
        """The key of the region that an optimizer updates."""
        return "master" if "master" in self.regions else "weights"

    @property
    def needed(self) -> list[str]:
        """The regions that an update reads: all, but weights that are a rounding of their
        masters."""
        return [key for key in self.regions if key != "weights" or self.master_key == "weights"]


@contextmanager
def naming_the_file(name: str, what: str) -> Iterator[None]:
    """Turn an OSError inside into a DiskError that names the file and the operation."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "make room, or name another folder with --offload-dir",
            errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
        }.get(error.errno or 0, "check the disk")
        raise DiskError(
            f"offload: {name}: cannot {what}: {error.strerror or error}; {advice}"
        ) from error


class Loan:
    """A buffer lent for one record. `arrays[key]` is a region's place in it, filled once wait() has
    returned."""

    def __init__(self, record: Record, pool: "Pool") -> None:
        self.record = record
        self.buffer = pool.take()
        self.pool = pool
        self.move: Move | None = None
        self.arrays = {
            key: self.buffer[region.offset : region.offset + region.nbytes].view(region.dtype)
            for key, region in record.regions.items()
        }

    def wait(self) -> "Loan":
        """Return when what was asked to be read is there."""
        if self.move is not None:
            self.move.wait()
        return self

    def end(self) -> None:
        """Give the buffer back; when it is being read into, once that has ended."""
        self.wait()
        self.arrays = {}
        self.pool.give(self.buffer)


class Pool:
    """A fixed number of buffers: it bounds what is in flight, and so the host memory that
    offloading takes."""

    def __init__(self, count: int, nbytes: int, device: str, memory: MemoryAccount) -> None:
        self.count = count
        self.nbytes = nbytes
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        self.give = self._free.put
        self.free = self._free.qsize
        for _ in range(count):
            self.give(memory.hold(host_bytes(nbytes, device), "workspace"))

    def take(self, *, limit: float = LIMIT) -> np.ndarray:
        """A buffer, once one is free. Raises TimeoutError after `limit` seconds."""
        try:
            return self._free.get(timeout=limit)
        except Empty as error:
            raise TimeoutError(
                f"offload: none of {self.count} buffers became free in {limit:g} s; is the disk "
                f"still there?"
            ) from error


class Disk:
    """One rank's records, a lane that reads, a lane that writes, and the buffers between them.

    Args:    folder: where files are made (None: where the system keeps temporary ones); who: the
             rank, for errors.
             buffers: how many are in flight at most, each as large as the largest record.
             device: "cuda" for buffers in pinned memory; memory: the host's account.
             paces: of reading and of writing.
    Raises:  DiskError if the folder is missing or cannot be written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        traffic: MemoryTraffic,
        *,
        buffers: int,
        recorder: Recorder,
        memory: MemoryAccount,
        device: str = "cpu",
        who: str = "rank 0",
        paces: tuple[Pace | None, Pace | None] = (None, None),
    ) -> None:
        self.folder = writable(folder)
        self.who = who
        self.buffers = buffers
        self.device = device
        self.memory = memory
        self.records: list[Record] = []
        self._pool: Pool | None = None
        self.reads = TransferLane("disk", "host", traffic, recorder=recorder, pace=paces[0])
        self.writes = TransferLane("host", "disk", traffic, recorder=recorder, pace=paces[1])

    def require(self, nbytes: int) -> None:
        """Raise DiskError unless so many bytes are free in the folder."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes and not is_simulated():
            raise DiskError(
                f"offload: {self.who} needs {nbytes:,} bytes in {self.folder}, and {free:,} are "
                "free; free some space, or name another folder with --offload-dir"
            )

    def new_record(self, name: str) -> Record:
        """Make a file without a region, and without a name in the folder; return its record."""
        label = f"{self.who}, {name} in {self.folder}"
        with naming_the_file(label, "make a file"), tempfile.TemporaryFile(dir=self.folder) as file:
            self.records.append(Record(name, label, os.dup(file.fileno())))
        return self.records[-1]

    # --------------------------------------------------------------------------- behind computation

    def has_spare(self) -> bool:
        """Whether a buffer may be taken for what is not needed yet: another stays free."""
        return self._pool_now().free() > 1

    def lend(self, record: Record) -> Loan:
        """A buffer for a record, nothing in it."""
        self.check()
        return Loan(record, self._pool_now())

    def start_read(self, record: Record, keys: Sequence[str]) -> Loan:
        """Begin to read regions into a buffer, behind the writes of the record that were begun
        before."""
        loan = self.lend(record)
        before = list(record.writing)

        def read() -> None:
            for move in before:
                move.wait()
            for key in keys:
                record.read(key, loan.arrays[key])

        loan.move = self.reads.start(f"read {record.name}", record.total(keys), read)
        return loan

    def start_write(self, loan: Loan, keys: Sequence[str], *, after: Move | None = None) -> None:
        """Begin to write regions from a buffer, `after` what fills it; then the buffer is given
        back."""
        record = loan.record

        def write() -> None:
            try:
                if after is not None:
                    after.wait()
                for key in keys:
                    record.write(key, loan.arrays[key])
            finally:
                loan.end()

        move = self.writes.start(f"write {record.name}", record.total(keys), write)
        record.writing = [*(earlier for earlier in record.writing if not earlier.done()), move]

    def check(self, *, wait: bool = False) -> None:
        """Raise what a write that has ended raised; `wait`: until all have."""
        for record in self.records:
            for move in record.writing:
                if wait or move.done():
                    move.wait()

    def _pool_now(self) -> Pool:
        """The buffers, made anew when records have grown."""
        nbytes = max(PAGE, *(record.nbytes for record in self.records))
        if self._pool is None or self._pool.nbytes < nbytes:
            if self._pool is not None:
                self.check(wait=True)
                assert self._pool.free() == self.buffers, (
                    "records grow only while nothing is in flight"
                )
            self._pool = None  # first let go of the old ones
            self._pool = Pool(self.buffers, nbytes, self.device, self.memory)
        return self._pool

    def close(self) -> None:
        """End the lanes and give the files' space back."""
        self.reads.close()
        self.writes.close()
        while self.records:
            self.records.pop().close()


def writable(folder: str | Path | None) -> Path:
    """The folder, or the system's for temporary files. Raises DiskError if no file can be made
    there."""
    chosen = Path(tempfile.gettempdir() if folder is None else folder)
    if not chosen.is_dir():
        raise DiskError(
            f"offload: {chosen} is {'not a folder' if chosen.exists() else 'not there'}; make "
            "it, or name another folder with --offload-dir"
        )
    try:
        with tempfile.TemporaryFile(dir=chosen):
            return chosen
    except OSError as error:
        raise DiskError(
            f"offload: cannot write in {chosen}: {error.strerror or error}; name another folder "
            "with --offload-dir"
        ) from error
