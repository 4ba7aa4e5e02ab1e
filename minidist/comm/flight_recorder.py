"""The flight recorder: the last calls, steps and long waits of one rank, in a ring of one megabyte.

    ledger.flight.entries()                         # the newest 4,000 or so, oldest first
    ledger.flight.keep_in("run/flight/00003.ring")  # from now on the ring is a file, which a killed rank leaves behind
    rank, entries = read_ring("run/flight/00003.ring")      # also of a rank that still runs

It is always on. A record is written when a call is made, begun and ended, so the last record of a rank that hangs or
was killed says in which call it was. The ring is a memory map; one of a file needs no dump, because the system keeps
what a process has written there, however it ends.

    header      HEADER_BYTES: their length (4 bytes), then msgpack: rank, pid, host, clock, groups {id: [axis, ranks]}
    slots       record n is in slot n % SLOTS: _MOVING, then msgpack of what stays the same from call to call
                [group, verb, algorithm, op, root, dtype, shape, where], shortened to fit

A slot's number is cleared before the slot is written, and set last: a record that SIGKILL tore has none.
Cost: about 4 µs a call, and no memory but the ring.
"""

import itertools
import mmap
import os
import platform
import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack

from minidist.errors import ConfigError

RING_BYTES = 1 << 20
HEADER_BYTES = 64 << 10
SLOT_BYTES = 240
SLOTS = (RING_BYTES - HEADER_BYTES) // SLOT_BYTES

CALL, STEP, WAIT = KINDS = ("call", "step", "wait")
MADE, BEGUN, ENDED, FAILED = STATES = ("made", "begun", "ended", "failed")

_MAGIC = b"mdflight"
_MOVING = struct.Struct("<QBBHidddQQI")     # number, state, kind, length of the texts, step, made, begun, ended (s),
_TEXTS = SLOT_BYTES - _MOVING.size          # sequence, bytes, messages
_NUMBER, _STATE, _TIME = struct.Struct("<Q"), struct.Struct("<B"), struct.Struct("<d")
_END = struct.Struct("<dQQI")
_STATE_AT, _BEGUN_AT, _ENDED_AT = 8, 24, 32
_NO_STEP = -1


class FlightRecorder:
    """The ring of one rank, made at its first record. Safe to use from several threads.

    Attributes: step    the training step that the program is in, or None
    """

    def __init__(self, world_rank: int = 0) -> None:
        self.world_rank = world_rank
        self.step: int | None = None
        self._ring: mmap.mmap | None = None
        self._numbers = itertools.count(1)
        self._groups: dict[int, tuple[str, list[int]]] = {}

    # ------------------------------------------------------------------------------------------------------ writing

    def made(self, group: int, sequence: int, *rest: Any, axis: str, world_ranks: Sequence[int]) -> int:
        """A call is made. Returns: the record's number, for begun() and ended().

        Args:    group, sequence, rest: the fields of the call's signature; axis, world_ranks: of its group.
        """
        if group not in self._groups:
            self._groups[group] = axis, list(world_ranks)
            self._write_header()
        return self._write(CALL, _texts(group, *rest), sequence)

    def begun(self, number: int) -> None:
        """The call sets out: in its caller's thread, or in the group's worker when its turn has come."""
        self._change(number, BEGUN, _BEGUN_AT, _TIME.pack(time.perf_counter()))

    def ended(self, number: int, nbytes: int, messages: int, *, failed: bool = False) -> None:
        """The call is over, having sent so many bytes in so many messages."""
        ring, at = self._open(), _place(number)
        sequence = _NUMBER.unpack_from(ring, at + _ENDED_AT + 8)[0]
        self._change(number, FAILED if failed else ENDED, _ENDED_AT,
                     _END.pack(time.perf_counter(), sequence, nbytes, messages))

    def start_step(self, step: int | None) -> None:
        """The program begins a training step."""
        self.step = step
        self._write(STEP, b"", 0)

    def waited(self, what: str, world_ranks: Sequence[int], seconds: float) -> None:
        """A long wait of `seconds` for these ranks is over."""
        number = self._write(WAIT, msgpack.packb([what[:60], list(world_ranks)[:20]]), 0)
        self._change(number, ENDED, _BEGUN_AT, struct.pack("<dd", time.perf_counter() - seconds, time.perf_counter()))

    def _write(self, kind: str, texts: bytes, sequence: int) -> int:
        ring, number = self._open(), next(self._numbers)
        at = _place(number)
        step = _NO_STEP if self.step is None else self.step
        record = _MOVING.pack(0, 0, KINDS.index(kind), len(texts), step, time.perf_counter(), 0.0, 0.0, sequence, 0, 0)
        ring[at:at + len(record) + len(texts)] = record + texts
        _NUMBER.pack_into(ring, at, number)
        return number

    def _change(self, number: int, state: str, offset: int, fields: bytes) -> None:
        """Write fields of a record, unless the ring has gone round since."""
        ring, at = self._open(), _place(number)
        if _NUMBER.unpack_from(ring, at)[0] == number:
            ring[at + offset:at + offset + len(fields)] = fields
            _STATE.pack_into(ring, at + _STATE_AT, STATES.index(state))

    # -------------------------------------------------------------------------------------------------------- where

    def keep_in(self, path: str | Path) -> None:
        """Move the ring into a file, in whose folder it stays when this process is gone.

        Raises:  ConfigError if the file cannot be made.
        """
        before = self._open()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w+b") as file:
                file.truncate(RING_BYTES)
                ring = mmap.mmap(file.fileno(), RING_BYTES)
        except OSError as error:
            raise ConfigError(f"rank {self.world_rank} cannot keep its flight recorder in {path}: {error.strerror}; "
                              f"give a folder that can be written") from error
        ring[:] = before[:]
        self._ring = ring

    def entries(self) -> list[dict[str, Any]]:
        """The records, oldest first; the keys are those of `read_ring`."""
        return _entries(bytes(self._open()))

    def _open(self) -> mmap.mmap:
        if self._ring is None:
            self._ring = mmap.mmap(-1, RING_BYTES)
            self._write_header()
        return self._ring

    def _write_header(self) -> None:
        ring = self._open()
        header = {"rank": self.world_rank, "pid": os.getpid(), "host": platform.node(),
                  "clock": time.time() - time.perf_counter(), "groups": self._groups}
        packed = msgpack.packb(header)
        if len(packed) > HEADER_BYTES - len(_MAGIC) - 4:        # thousands of groups: their ranks are left out
            packed = msgpack.packb({**header, "groups": {}})
        ring[:len(_MAGIC) + 4 + len(packed)] = _MAGIC + len(packed).to_bytes(4, "little") + packed


@lru_cache(maxsize=1024)
def _texts(group: int, verb: str, algorithm: str | None, op: str | None, root: int | None, dtype: str | None,
           shape: Any, where: str) -> bytes:
    """What stays the same from call to call, packed to fit into a slot: the end of `where` says most."""
    fields = [group, verb[:24], (algorithm or "")[:24], op, root, (dtype or "")[:16], shape and list(shape)[:4]]
    room = _TEXTS - len(msgpack.packb(fields)) - 4
    shortened = where.encode()[-room:].decode(errors="ignore")
    return msgpack.packb([*fields, shortened])  # type: ignore[no-any-return]


def _place(number: int) -> int:
    return HEADER_BYTES + number % SLOTS * SLOT_BYTES


def read_ring(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a rank has left in a file: (header, entries), entries oldest first.

    header   rank, pid, host, clock (seconds to add to an entry's times for the time of day), groups {id: [axis, ranks]}
    entry    number, kind, state, step (None outside a step), made, begun, ended (seconds; 0.0: not yet), and of a call
             sequence, nbytes, messages, group, verb, algorithm, op, root, dtype, shape, where; of a wait what, ranks
    Raises:  ConfigError if there is no such file, or it is no ring.
    """
    try:
        ring = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"no flight recorder in {path}: {error.strerror}") from error
    length = int.from_bytes(ring[len(_MAGIC):len(_MAGIC) + 4], "little")
    if ring[:len(_MAGIC)] != _MAGIC or len(ring) != RING_BYTES or length > HEADER_BYTES:
        raise ConfigError(f"{path} is not a flight recorder's ring, which has {RING_BYTES} bytes; "
                          f"give a file that FlightRecorder.keep_in has made")
    start = len(_MAGIC) + 4
    return msgpack.unpackb(ring[start:start + length], strict_map_key=False), _entries(ring)


def _entries(ring: bytes) -> list[dict[str, Any]]:
    slots = range(HEADER_BYTES, HEADER_BYTES + SLOTS * SLOT_BYTES, SLOT_BYTES)
    return sorted(filter(None, (_entry(ring, at) for at in slots)), key=lambda entry: entry["number"])


def _entry(ring: bytes, at: int) -> dict[str, Any] | None:
    """The record of a slot; None for one that is empty, or torn."""
    number, state, kind, length, step, made, begun, ended, sequence, nbytes, messages = _MOVING.unpack_from(ring, at)
    if not number:
        return None
    entry = {"number": number, "kind": KINDS[kind], "state": STATES[state],
             "step": None if step == _NO_STEP else step, "made": made, "begun": begun, "ended": ended}
    texts = msgpack.unpackb(ring[at + _MOVING.size:at + _MOVING.size + length]) if length else []
    if entry["kind"] == CALL:
        names = ("group", "verb", "algorithm", "op", "root", "dtype", "shape", "where")
        return {**entry, "sequence": sequence, "nbytes": nbytes, "messages": messages,
                **dict(zip(names, texts, strict=True))}
    return {**entry, **dict(zip(("what", "ranks"), texts, strict=False))}
