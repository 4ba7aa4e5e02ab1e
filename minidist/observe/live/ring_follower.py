"""Follows the flight recorder of one rank while the rank writes it.

    follower = RingFollower(run / "flight" / "00003.ring")
    follower.poll()                         # repeatedly
    follower.header, follower.entries()     # as read_ring, but only the newest KEPT records

The ring is mapped, not read, and only records that are new or may have changed are decoded: one
poll costs less than a millisecond, read_ring about 40. It costs the rank nothing.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.flight.slots import (
    HEADER_BYTES,
    NUMBER,
    RING_BYTES,
    SLOT_BYTES,
    SLOTS,
    Entry,
    entry_at,
    header_of,
    place,
)
from minidist.files import open_regular

KEPT = 2000  # records: the newest, about half a ring
UNSETTLED = 2  # newest steps whose records may still change


class RingFollower:
    """A reader of the newest records of a ring.

    Attributes: header: as read_ring returns it; None while there is no ring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self._ring: mmap.mmap | None = None
        self._file = (0, 0)  # device and inode of the mapped file
        self._known: dict[int, Entry] = {}
        self._settled: set[int] = set()

    def poll(self) -> bool:
        """Read new records. Returns: whether there is a ring."""
        with suppress(OSError, ValueError):  # removed, or being made: try at the next poll
            self._map()
        if self._ring is None:
            return False
        self.header = header_of(self._ring[:HEADER_BYTES]) or self.header
        numbers = np.ndarray((SLOTS,), "<u8", self._ring, HEADER_BYTES, (SLOT_BYTES,)).copy()
        oldest = max(0, int(numbers.max()) - KEPT)
        for number in numbers[numbers > oldest].tolist():
            if number not in self._settled:
                self._decode(self._ring, number)
        self._known = {number: entry for number, entry in self._known.items() if number > oldest}
        self._settle()
        return self.header is not None

    def entries(self) -> list[Entry]:
        """Return the records, oldest first."""
        return [self._known[number] for number in sorted(self._known)]

    def _map(self) -> None:
        """Map the file; again if the name now belongs to another file, of a later run or of a rank
        that replaced this one."""
        found = os.lstat(self.path)
        if (found.st_dev, found.st_ino) == self._file or found.st_size != RING_BYTES:
            return
        with open(open_regular(self.path, member=True), "rb") as file:
            self._ring = mmap.mmap(file.fileno(), RING_BYTES, access=mmap.ACCESS_READ)
        self._file = (found.st_dev, found.st_ino)
        self.header = None
        self._known = {}
        self._settled = set()

    def _decode(self, ring: mmap.mmap, number: int) -> None:
        at = place(number)
        entry = entry_at(ring[at : at + SLOT_BYTES], 0)
        # not torn
        if entry is not None and entry["number"] == number == NUMBER.unpack_from(ring, at)[0]:
            self._known[number] = entry

    def _settle(self) -> None:
        """Note the records that will not change: calls that ended UNSETTLED or more steps ago."""
        newest = max(
            (entry["step"] for entry in self._known.values() if entry["step"] is not None),
            default=0,
        )
        self._settled = {
            number
            for number, entry in self._known.items()
            if entry["ended"]
            and entry["step"] is not None
            and entry["step"] < newest - UNSETTLED + 1
        }
