"""The bytes of a flight recorder's ring, and functions to read them.

    header      HEADER_BYTES: MAGIC, length (4 bytes), then msgpack of a dict
    slots       record n is in slot n % SLOTS, written by one call of SLOT.pack_into. Its texts are
                msgpack of the fields FIELDS of its kind, shortened to fit; a call's are as in the
                header of its messages

A slot begins and ends with its record's number: if SIGKILL interrupted the write, the two differ. A
ring that is still written is read twice: a record that was overwritten meanwhile has another number
the second time.
"""

import struct
from pathlib import Path
from typing import Annotated, Any, Literal

import msgpack
import msgspec

from minidist.errors import ConfigError
from minidist.files import read_regular
from minidist.reading import Count, Finite, Rank, convert, converted

RING_BYTES = 1 << 20
HEADER_BYTES = 64 << 10
SLOT_BYTES = 248
TEXTS = 176  # bytes of a slot for its texts
SLOTS = (RING_BYTES - HEADER_BYTES) // SLOT_BYTES

CALL, MESSAGE, STEP, WAIT, END, STATE_OF_STEP = KINDS = (
    "call",
    "message",
    "step",
    "wait",
    "end",
    "state",
)
MADE, BEGUN, ENDED, FAILED = STATES = ("made", "begun", "ended", "failed")
FIELDS = {
    CALL: ("group", "verb", "algorithm", "op", "root", "dtype", "shape", "where"),
    MESSAGE: ("group", "verb", "dst", "src", "dtype", "shape", "where"),
    WAIT: ("what", "ranks", "group"),
    STEP: (),
    END: ("why", "where"),
    STATE_OF_STEP: ("memory", "peak", "limit", "joules", "source"),
}

MAGIC = b"mdflght3"
SLOT = struct.Struct(f"<QBBHidQddQIf{TEXTS}sQ")
"""number, state, kind, length of the texts, step, made (s), sequence, begun, ended (s), bytes,
messages, stood (s), texts, number"""
NUMBER = struct.Struct("<Q")
TIME = struct.Struct("<d")
STOOD = struct.Struct("<f")
BEGIN = struct.Struct("<Q24xd")  # number, ..., begun
OUTCOME = struct.Struct("<dQIf")  # ended, bytes, messages, stood
STATE_AT = 8
BEGUN_AT = 32
ENDED_AT = 40
STOOD_AT = 60
NO_STEP = -1
NO_FIELDS = msgpack.packb([])

Entry = dict[str, Any]
Groups = dict[int, tuple[str, list[Rank]]]


class FlightHeader(msgspec.Struct):
    """The header of a ring, and of a dump."""

    rank: Rank
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    host: str
    size: Rank
    kept: Finite
    clock: Finite
    groups: Groups
    link: str = ""
    dumped: Finite | None = None


class _CommonRecord(msgspec.Struct, tag_field="kind"):
    number: int
    state: Literal["made", "begun", "ended", "failed"]
    step: int | None
    made: Finite
    begun: Finite
    ended: Finite


class _TransferRecord(_CommonRecord):
    sequence: int
    nbytes: Count
    messages: Count
    stood: Finite
    group: int
    verb: str
    dtype: str
    shape: list[int | None] | None
    where: str


class _CallRecord(_TransferRecord, tag=CALL):
    algorithm: str
    op: str | None
    root: int | None


class _MessageRecord(_TransferRecord, tag=MESSAGE):
    dst: Rank | None
    src: Rank | None


class _WaitRecord(_CommonRecord, tag=WAIT):
    sequence: int
    what: str
    ranks: list[Rank]
    group: int


class _StepRecord(_CommonRecord, tag=STEP):
    """The start of a step of the program."""


class _EndRecord(_CommonRecord, tag=END):
    why: str
    where: str


class _StateRecord(_CommonRecord, tag=STATE_OF_STEP):
    memory: list[Count]
    peak: list[Count]
    limit: Count | None
    joules: Finite
    source: str


FlightRecord = _CallRecord | _MessageRecord | _WaitRecord | _StepRecord | _EndRecord | _StateRecord
"""A record of a ring, and of a dump."""


def place(number: int) -> int:
    """Return the offset of a record's slot."""
    return HEADER_BYTES + number % SLOTS * SLOT_BYTES


def read_ring(path: str | Path, *, member: bool = False) -> tuple[dict[str, Any], list[Entry]]:
    """Return the content of a rank's ring file: (header, entries), entries oldest first.

    header   rank, pid, host, size of the world (0: unknown), link (the link class inside a host;
             "": unknown), kept (the time of day when it moved into its file), clock (seconds to add
             to an entry's times for the time of day), groups {id: [axis, world ranks]}
    entry    number, kind, state, step (None outside a step), made, begun, ended (seconds; 0.0: not
             yet), and the FIELDS of its kind. A call, a message and a wait also have sequence; a
             call and a message also nbytes, messages and stood: the last seconds before its end in
             which the program only waited for this end. The sum over a step is that of
             health/wait_state.spent_in_calls, whose docstring explains why there are two
    Args:    member: as for files.open_regular: another user may have filled the folder.
    Raises:  ConfigError if there is no such file, or it is not a ring.
    """
    ring, later = _read_twice(Path(path), member=member)
    header = header_of(ring)
    if header is None or len(ring) != RING_BYTES:
        raise ConfigError(
            f"{path} is not a flight recorder's ring, which has {RING_BYTES} bytes; "
            f"give a file that FlightRecorder.keep_in has made"
        )
    entries = [
        entry
        for entry in entries_of(ring)
        if NUMBER.unpack_from(later, place(entry["number"]))[0] == entry["number"]
    ]
    return header, entries


def header_of(ring: bytes) -> dict[str, Any] | None:
    """Return the header at the start of a ring; None if it is not a ring, or is being written."""
    start = len(MAGIC) + 4
    length = int.from_bytes(ring[len(MAGIC) : start], "little")
    if ring[: len(MAGIC)] != MAGIC or length > HEADER_BYTES:
        return None
    try:
        header: dict[str, Any] = msgpack.unpackb(ring[start : start + length], strict_map_key=False)
        converted(header, FlightHeader)
    except ValueError:
        return None
    return header


def _read_twice(path: Path, *, member: bool) -> tuple[bytes, bytes]:
    """Return two readings of the file with the same header, which changes only when the rank uses a
    new group."""
    try:
        ring = read_regular(path, most=RING_BYTES, member=member)
        for _ in range(10):
            ring, before = read_regular(path, most=RING_BYTES, member=member), ring
            if ring[:HEADER_BYTES] == before[:HEADER_BYTES]:
                break
    except OSError as error:
        raise ConfigError(f"no flight recorder in {path}: {error.strerror}") from error
    return before, ring


def newest_time(header: dict[str, Any], entries: list[Entry]) -> float:
    """Return the time of day of a ring's newest entry, in seconds; 0.0 if it has none."""
    return max(
        (max(entry["made"], entry["begun"], entry["ended"]) + header["clock"] for entry in entries),
        default=0.0,
    )


def call_fields(texts: bytes) -> list[Any]:
    """Return a call's texts, in the order of FIELDS. Raises: ValueError if they are incomplete."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(texts)
    (group, verb, algorithm, op, root, dtype, shape), where = unpacker
    return [group, verb, algorithm or "", op, root, dtype or "", shape, where]


def entries_of(ring: bytes) -> list[Entry]:
    """Return the records of a ring, oldest first."""
    slots = range(HEADER_BYTES, HEADER_BYTES + SLOTS * SLOT_BYTES, SLOT_BYTES)
    return sorted(
        filter(None, (entry_at(ring, at) for at in slots)), key=lambda entry: entry["number"]
    )


def entry_at(ring: bytes | memoryview, at: int) -> Entry | None:
    """Return the record of the slot at offset `at`; None if it is empty or incomplete."""
    number, state, kind, length, step, made, sequence, begun, ended, *counted, texts, last = (
        SLOT.unpack_from(ring, at)
    )
    if not number or number != last or kind >= len(KINDS) or state >= len(STATES):
        return None
    entry = {
        "number": number,
        "kind": KINDS[kind],
        "state": STATES[state],
        "step": None if step == NO_STEP else step,
        "made": made,
        "begun": begun,
        "ended": ended,
    }
    try:
        fields = (
            call_fields(texts[:length])
            if KINDS[kind] == CALL
            else msgpack.unpackb(texts[:length] or NO_FIELDS)
        )
    except (ValueError, TypeError):  # overwritten during the reading
        return None
    if KINDS[kind] in (CALL, MESSAGE):
        entry |= dict(zip(("nbytes", "messages", "stood"), counted, strict=True))
    if KINDS[kind] in (CALL, MESSAGE, WAIT):
        entry["sequence"] = sequence
    if not isinstance(fields, list):
        return None
    entry |= dict(zip(FIELDS[KINDS[kind]], fields, strict=False))
    try:
        convert(entry, FlightRecord)
    except (msgspec.ValidationError, ValueError):
        return None
    return entry
