"""Records on disk, and the few buffers through which they are read and written behind computation.

A record is a raw file of regions, one behind the other, each an array of one dtype that begins on a page:

    blocks.0    | weights | gradients | m | v |

    disk = Disk(folder, who="rank 0", buffers=4, ...)
    record = disk.record("blocks.0")
    record.add("weights", np.float32, 1000)
    with disk.start_read(record, ["weights"]) as loan:  # begun; at once if a buffer is free, else when one is
        loan.arrays["weights"]                          # waits for the read
    disk.start_write(loan, ["weights"])                 # begun; gives the buffer back when it is written

No file is left behind, however the process ends: files have no names, so the system frees them with their last
descriptors. A disk does not run full in the middle of a run, because a region's blocks are reserved when it is added.
A write that fails in spite of it is reported by the next read, write or wait of any kind.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, bytes_view, to_host
from minidist.errors import DiskError
from minidist.parallel.memory.disk_file import PAGE, Loan, Pool, Record, told
from minidist.parallel.memory.transfer_lanes import Move, Pace, TransferLane
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.traffic import MemoryTraffic


class Disk:
    """One rank's records, a lane that reads, a lane that writes, and the buffers between them.

    Args:    folder: where files are made (None: where the system keeps temporary ones); who: the rank, for errors.
             buffers: how many are in flight at most, each as large as the largest record.
             device: "cuda" for buffers in pinned memory; memory: the host's account.
             paces: of reading and of writing.
    Raises:  DiskError if the folder is missing or cannot be written.
    """

    def __init__(self, folder: Path | None, traffic: MemoryTraffic, *, buffers: int, recorder: Recorder,
                 memory: MemoryAccount, device: str = "cpu", who: str = "rank 0",
                 paces: tuple[Pace | None, Pace | None] = (None, None)) -> None:
        self.folder, self.who, self.buffers, self.device, self.memory = writable(folder), who, buffers, device, memory
        self.records: list[Record] = []
        self._pool: Pool | None = None
        self.reads = TransferLane("disk", "host", traffic, recorder=recorder, pace=paces[0])
        self.writes = TransferLane("host", "disk", traffic, recorder=recorder, pace=paces[1])

    def require(self, nbytes: int) -> None:
        """Raise DiskError unless so many bytes are free in the folder."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise DiskError(f"offload: {self.who} needs {nbytes:,} bytes in {self.folder}, and {free:,} are free; make "
                            f"room, or name another folder with --offload-dir")

    def record(self, name: str) -> Record:
        """A new file without a region, and without a name in the folder."""
        label = f"{self.who}, {name} in {self.folder}"
        with told(label, "make a file"), tempfile.TemporaryFile(dir=self.folder) as file:
            self.records.append(Record(label, os.dup(file.fileno())))
        return self.records[-1]

    def put(self, record: Record, key: str, array: Array) -> None:
        """Write a region at once, without a buffer: before training."""
        data, region = bytes_view(np.ascontiguousarray(to_host(array))), record.regions[key]
        with told(record.name, f"write {data.nbytes:,} bytes of {key}"):
            _transfer(os.pwritev, record, region.offset, data)

    # ------------------------------------------------------------------------------------------ behind computation

    def lend(self, record: Record, *, spare: int = 0) -> Loan | None:
        """A buffer for a record, nothing in it; None if `spare` others must stay free, and do not."""
        self.check()
        pool = self._pool_now()
        buffer = pool.take(spare=spare)
        return None if buffer is None else Loan(record, buffer, pool.give)

    def start_read(self, record: Record, keys: Sequence[str], *, spare: int = 0) -> Loan | None:
        """Begin to read regions into a buffer, behind the writes of the record that were begun before."""
        loan = self.lend(record, spare=spare)
        if loan is not None:
            before, buffer = list(record.writing), loan.buffer
            loan.move = self.reads.start(f"read {short(record)}", _total(record, keys),
                                         lambda: self._read(record, keys, buffer, before))
        return loan

    def start_write(self, loan: Loan, keys: Sequence[str], *, after: Move | None = None) -> None:
        """Begin to write regions from a buffer, `after` what fills it; then the buffer is given back."""
        record = loan.record
        move = self.writes.start(f"write {short(record)}", _total(record, keys),
                                 lambda: self._write(loan, keys, after))
        record.writing = [*(earlier for earlier in record.writing if not earlier.done()), move]

    def _read(self, record: Record, keys: Iterable[str], buffer: np.ndarray, before: Sequence[Move]) -> None:
        for move in before:
            move.wait()
        for key in keys:
            region = record.regions[key]
            with told(record.name, f"read {region.nbytes:,} bytes of {key}"):
                _transfer(os.preadv, record, region.offset, buffer[region.offset:region.offset + region.nbytes])

    def _write(self, loan: Loan, keys: Iterable[str], after: Move | None) -> None:
        record, buffer = loan.record, loan.buffer
        try:
            if after is not None:
                after.wait()
            for key in keys:
                region = record.regions[key]
                with told(record.name, f"write {region.nbytes:,} bytes of {key}"):
                    _transfer(os.pwritev, record, region.offset, buffer[region.offset:region.offset + region.nbytes])
        finally:
            loan.end()

    def check(self) -> None:
        """Raise what a write that has ended raised."""
        for record in self.records:
            for move in record.writing:
                if move.done():
                    move.wait()

    def settle(self) -> None:
        """Return when all writes have ended; raises what one of them raised."""
        for record in self.records:
            for move in record.writing:
                move.wait()

    def _pool_now(self) -> Pool:
        """The buffers, made anew when records have grown."""
        nbytes = max(PAGE, *(record.nbytes for record in self.records))
        if self._pool is None or self._pool.nbytes < nbytes:
            if self._pool is not None:
                self.settle()
                assert self._pool.idle, "records grow only while nothing is in flight"
            self._pool = None                   # first let go of the old ones
            self._pool = Pool(self.buffers, nbytes, self.device, self.memory)
        return self._pool

    def close(self) -> None:
        """End the lanes and give the files' space back."""
        self.reads.close()
        self.writes.close()
        while self.records:
            self.records.pop().close()


def writable(folder: str | Path | None) -> Path:
    """The folder, or the system's for temporary files.

    Raises:  DiskError if it is not there, is none, or cannot be written.
    """
    chosen = Path(tempfile.gettempdir() if folder is None else folder)
    if not chosen.is_dir():
        raise DiskError(f"offload: {chosen} is {'not a folder' if chosen.exists() else 'not there'}; make it, or name "
                        f"another folder with --offload-dir")
    try:
        with tempfile.TemporaryFile(dir=chosen):
            pass
    except OSError as error:
        raise DiskError(f"offload: cannot write in {chosen}: {error.strerror or error}; name another folder with "
                        f"--offload-dir") from error
    return chosen


def short(record: Record) -> str:
    """The record's name for the timeline: without rank and folder."""
    return record.name.split(", ", 1)[-1].split(" in ", 1)[0]


def _total(record: Record, keys: Iterable[str]) -> int:
    return sum(record.regions[key].nbytes for key in keys)


def _transfer(call: Callable[[int, list[Any], int], int], record: Record, offset: int, data: np.ndarray) -> None:
    """os.preadv or os.pwritev, until all is done."""
    done = 0
    while done < data.nbytes:
        moved = call(record.fd, [data[done:].data], offset + done)
        if not moved:
            raise OSError(errno.EIO, f"the file ends after {done:,} bytes")
        done += moved
