"""The flight recorder: the last calls, messages, steps and long waits of one rank, in a ring of one
megabyte.

    ledger.flight.entries()                         # the newest 4,000 or so, oldest first
    ledger.flight.keep_in("run/flight/00003.ring")  # from now on the ring is a file, which remains
                                                    # when the rank is killed
    rank, entries = read_ring("run/flight/00003.ring")      # also while the rank runs
    ledger.flight.dump("rank3.json")                # the same as JSON, with the keys of PyTorch's
                                                    # flight recorder

It is always on. A record is written when a call is queued or begins, and completed when it ends; so
the last record of a rank that hangs or was killed shows in which call it was. The ring is a memory
map; a ring in a file needs no dump, because the system keeps what a process has written there,
however the process ends. slots.py describes its bytes.

An existing file is replaced, not overwritten: a rank of an earlier generation, or of the run that
is resumed, may have it mapped. So a path holds the ring of the newest rank of that number.
Cost: about 4 µs per call, and no memory except the ring.
"""

import itertools
import mmap
import os
import platform
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack

from minidist.comm.flight.dumps import write_dump
from minidist.comm.flight.slots import (
    BEGIN,
    BEGUN_AT,
    ENDED_AT,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    NO_STEP,
    NUMBER,
    OUTCOME,
    RING_BYTES,
    SLOT,
    SLOT_BYTES,
    SLOTS,
    STATE_AT,
    STATES,
    STOOD,
    STOOD_AT,
    TEXTS,
    TIME,
    Entry,
    call_fields,
    entries_of,
    place,
)
from minidist.comm.observers import ObservedCall, Observer
from minidist.errors import ConfigError
from minidist.files import reserve

FOLDER_TRIES = 100

# the bytes for kinds and states in a slot
_CALL, _MESSAGE, _STEP, _WAIT, _END, _STATE_OF_STEP = range(len(KINDS))
_MADE, _BEGUN, _ENDED, _FAILED = range(len(STATES))

recorders: "weakref.WeakSet[FlightRecorder]" = weakref.WeakSet()
"""The recorders of this process that have a ring; SIGUSR2 dumps them (health/flight_signals.py)."""


class FlightRecorder(Observer):
    """The ring of one rank, created at its first record. Safe to use from several threads.

    Attributes: step    the current training step of the program, or None
                path    the file of the ring, or None
                pid     the process of the ring
    """

    def __init__(self, world_rank: int = 0) -> None:
        self.world_rank = world_rank
        self.step: int | None = None
        self.path: Path | None = None
        self.pid = os.getpid()
        self._size = 0
        self._link = ""
        self._kept = 0.0
        self._ring: mmap.mmap | None = None
        self._opening = threading.RLock()
        self._numbers = itertools.count(1)
        self._groups: dict[int, tuple[str, list[int]]] = {}

    # -------------------------------------------------------------------------------------- writing

    def on_made(self, call: ObservedCall, begun: bool) -> None:
        if call.record:
            if begun:
                self.begun(call.record)
            return
        signature = call.signature
        if signature.group not in self._groups:
            self._know(signature.group, call.group_axis, call.world_ranks)
        header = call.meta[8:]  # the sequence is a field of the record
        if len(header) > TEXTS:
            header = _shortened_header(header)
        state = _BEGUN if begun else _MADE
        call.record = self._write(_CALL, state, header, signature.sequence)

    def on_end(self, call: ObservedCall, failed: bool) -> None:
        self.ended(
            call.record, call.nbytes, call.messages, failed=failed, blocking=not call.started
        )

    def on_wait(self, call: ObservedCall, start: float) -> None:
        self.stood(call.record, time.perf_counter() - start)

    def message(
        self,
        group: int,
        sequence: int,
        verb: str,
        dtype: str | None,
        shape: Any,
        where: str,
        *,
        axis: str,
        world_ranks: Sequence[int],
        dst: int | None = None,
        src: int | None = None,
    ) -> int:
        """Record the start of a message to `dst`, or from `src`, ranks of the group. Returns: the
        number, for ended().

        Args:    sequence: its place among the messages from one rank to the other, from 1.
        """
        if group not in self._groups:
            self._know(group, axis, world_ranks)
        return self._write(
            _MESSAGE, _BEGUN, _message_texts(group, verb, dst, src, dtype, shape, where), sequence
        )

    def begun(self, number: int, seconds: float = 0.0) -> None:
        """Record that the call starts now in the group's worker; or that it did `seconds` ago."""
        ring = self._open()
        at = place(number)
        if NUMBER.unpack_from(ring, at)[0] == number:  # else the slot was overwritten since
            TIME.pack_into(ring, at + BEGUN_AT, time.perf_counter() - seconds)
            ring[at + STATE_AT] = _BEGUN

    def ended(
        self,
        number: int,
        nbytes: int = 0,
        messages: int = 0,
        *,
        failed: bool = False,
        blocking: bool = False,
        stood: float = 0.0,
    ) -> None:
        """Record the end of a call, message or wait, with the bytes and messages that this rank has
        sent.

        Args:    blocking: the program waited from its start on; else for the last `stood` seconds.
        """
        ring = self._ring or self._open()
        at = HEADER_BYTES + number % SLOTS * SLOT_BYTES
        now = time.perf_counter()
        found, begun = BEGIN.unpack_from(ring, at)
        if found == number:
            OUTCOME.pack_into(
                ring, at + ENDED_AT, now, nbytes, messages, now - begun if blocking else stood
            )
            ring[at + STATE_AT] = _FAILED if failed else _ENDED

    def stood(self, number: int, seconds: float) -> None:
        """Record the seconds that the program has waited for the end of a started call."""
        ring = self._open()
        at = place(number)
        if NUMBER.unpack_from(ring, at)[0] == number:
            STOOD.pack_into(ring, at + STOOD_AT, seconds)

    def start_step(self, step: int | None) -> None:
        """Record that the program begins a training step."""
        self.step = step
        self._write(_STEP, _ENDED, b"", 0)

    def state(
        self,
        memory: Sequence[int],
        peak: Sequence[int],
        limit: int | None,
        joules: float,
        source: str,
    ) -> None:
        """Record the rank's memory and energy after a step.

        Args:    memory: bytes of each of account.CATEGORIES; peak: the maximum so far, of each and
                 of the total; limit: of the total; joules: so far, by `source`.
        """
        self._write(
            _STATE_OF_STEP,
            _ENDED,
            msgpack.packb([list(memory), list(peak), limit, joules, source[:12]]),
            0,
        )

    def waiting(
        self,
        what: str,
        world_ranks: Sequence[int],
        seconds: float = 0.0,
        *,
        group: int = 0,
        sequence: int = 0,
    ) -> int:
        """Record that a wait for these ranks has lasted `seconds` and continues, in this call.
        Returns: its number, for ended()."""
        number = self._write(
            _WAIT, _BEGUN, msgpack.packb([what[:60], list(world_ranks)[:20], group]), sequence
        )
        self.begun(number, seconds)
        return number

    def end(self, why: str = "", where: str = "") -> None:
        """Record that the rank leaves the job: well, or because of an error ("ValueError: …"). The
        first such record counts.

        Args:    where: the line of the rank's own error; "" for an error of other ranks.
        """
        if self._ring is not None:
            where = _shortened(where, TEXTS // 2)
            why = _shortened(why, TEXTS - len(where.encode()) - 8, keep_end=False)
            self._write(_END, _FAILED if why else _ENDED, msgpack.packb([why, where]), 0)

    def _know(self, group: int, axis: str, world_ranks: Sequence[int]) -> None:
        self._groups[group] = axis, list(world_ranks)
        self._write_header()

    def _write(self, kind: int, state: int, texts: bytes, sequence: int) -> int:
        number = next(self._numbers)
        now = time.perf_counter()
        step = self.step
        # place(number)
        SLOT.pack_into(
            self._ring or self._open(),
            HEADER_BYTES + number % SLOTS * SLOT_BYTES,
            number,
            state,
            kind,
            len(texts),
            NO_STEP if step is None else step,
            now,
            sequence,
            0.0 if state == _MADE else now,
            0.0 if state < _ENDED else now,
            0,
            0,
            0.0,
            texts,
            number,
        )
        return number

    # ---------------------------------------------------------------------------------------- where

    def keep_in(self, path: str | Path, *, size: int = 0, link: str = "") -> None:
        """Move the ring into a file, which remains in its folder after the end of this process.

        Args:    size: ranks of the job; link: the link class between ranks of one host, e.g. "shm".

        Raises:  ConfigError if the file cannot be made, or its disk is full.
        """
        before = self._open()
        path = Path(path)
        draft: Path | None = None
        try:
            opened, draft = _new_file(path)
            with open(opened, "w+b") as file:
                # a write to a map beyond a full disk would kill the rank
                reserve(file.fileno(), 0, RING_BYTES)
                ring = mmap.mmap(file.fileno(), RING_BYTES)
            ring[:] = before[:]
            draft.replace(path)
        except OSError as error:
            if draft is not None:
                draft.unlink(missing_ok=True)
            raise ConfigError(
                f"rank {self.world_rank} cannot keep its flight recorder in {path}: "
                f"{error.strerror}; give a folder that can be written"
            ) from error
        self._ring = ring
        self.path = path
        self._size = size
        self._link = link
        self._kept = time.time()
        self._write_header()

    def entries(self) -> list[Entry]:
        """Return the records, oldest first; the keys are those of `read_ring`."""
        return entries_of(bytes(self._open()))

    def dump(self, path: str | Path, *, member: bool = False) -> None:
        """Write the ring as JSON; dumps.py describes its keys. Args: member: as for files.whole.
        Raises: OSError."""
        write_dump(path, {**self._header(), "dumped": time.time()}, self.entries(), member=member)

    def _open(self) -> mmap.mmap:
        if self._ring is None:
            with self._opening:  # two threads that record first would make two rings
                if self._ring is None:
                    self._ring = mmap.mmap(-1, RING_BYTES)
                    self.pid = os.getpid()
                    self._write_header()
                    recorders.add(self)
        return self._ring

    def _header(self) -> dict[str, Any]:
        return {
            "rank": self.world_rank,
            "pid": self.pid,
            "host": platform.node(),
            "size": self._size,
            "link": self._link,
            "kept": self._kept,
            "clock": time.time() - time.perf_counter(),
            "groups": self._groups,
        }

    def _write_header(self) -> None:
        ring = self._open()
        header = self._header()
        packed = msgpack.packb(header)
        # with thousands of groups, their ranks are left out
        if len(packed) > HEADER_BYTES - len(MAGIC) - 4:
            packed = msgpack.packb({**header, "groups": {}})
        ring[: len(MAGIC) + 4 + len(packed)] = MAGIC + len(packed).to_bytes(4, "little") + packed


def _new_file(path: Path) -> tuple[int, Path]:
    """Return a new private file next to `path`, with a name that nobody can predict.

    Another rank that cannot keep its ring may remove the folder meanwhile; then mkdir is repeated.
    """
    for _ in range(FOLDER_TRIES):
        with suppress(FileNotFoundError, FileExistsError):
            return _file_in_folder(path)
    return _file_in_folder(path)


def _file_in_folder(path: Path) -> tuple[int, Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    return opened, Path(name)


def _shortened(text: str, nbytes: int, *, keep_end: bool = True) -> str:
    packed = text.encode()
    return (packed[-nbytes:] if keep_end else packed[:nbytes]).decode(errors="ignore")


@lru_cache(maxsize=1024)
def _shortened_header(header: bytes) -> bytes:
    """Return a shorter form of a call's header that does not fit into a slot: long names, many dims
    and the beginning of `where` are left out."""
    group, verb, algorithm, op, root, dtype, shape, where = call_fields(header)
    fields = msgpack.packb(
        [group, verb[:24], algorithm[:24], op, root, dtype[:16], shape and shape[:4]]
    )
    return fields + msgpack.packb(_shortened(where, TEXTS - len(fields) - 2))  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _message_texts(
    group: int,
    verb: str,
    dst: int | None,
    src: int | None,
    dtype: str | None,
    shape: Any,
    where: str,
) -> bytes:
    fields = [group, verb[:24], dst, src, (dtype or "")[:16], shape and list(shape)[:4]]
    return msgpack.packb([*fields, _shortened(where, TEXTS - len(msgpack.packb(fields)) - 4)])  # type: ignore[no-any-return]
