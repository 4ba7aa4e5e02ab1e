"""The header before each payload, and its checks before use.

    bytes 0-3    4     5      6-7          8-15        16-23           24-31     32-35   36 ...
          magic  kind  (0)    meta length  group id    tag's number    payload   CRC-32  meta, zeros up to `align`
                                                                       bytes     of all but itself

All numbers are little-endian. Both ranks have proved that they belong to the job, so the checksum
protects against damage and errors, not against an attacker.
"""

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

from minidist.comm.limits import META_LIMIT
from minidist.comm.transport import Tag
from minidist.errors import CommError

MAGIC = b"mdf1"
MESSAGE = 1
GOODBYE = 2
PAYLOAD_LIMIT = 1 << 40  # bytes; more than any host holds

_FIELDS = struct.Struct("<4sBxHQQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_REMEMBERED = 64  # most messages of one call have the same header


class Header(NamedTuple):
    """A checked header: `kind` MESSAGE or GOODBYE, followed by `nbytes` of payload."""

    kind: int
    tag: Tag
    meta: bytes
    nbytes: int


@lru_cache(maxsize=_REMEMBERED)
def pack_header(kind: int, tag: Tag, meta: bytes, nbytes: int, align: int) -> bytes:
    """Return the bytes before a payload; their number is a multiple of `align`. Raises CommError if
    `meta` has more than 4 KiB."""
    if len(meta) > META_LIMIT:
        raise CommError(f"a message's header may carry {META_LIMIT} bytes, not {len(meta)}")
    fields = _FIELDS.pack(MAGIC, kind, len(meta), tag.group, tag.sequence, nbytes)
    checksum = _CHECKSUM.pack(zlib.crc32(meta, zlib.crc32(fields)))
    padding = bytes(-(HEADER_BYTES + len(meta)) % align)
    return b"".join((fields, checksum, meta, padding))


@lru_cache(maxsize=_REMEMBERED)
def header_length(start: bytes, align: int) -> int:
    """Return the length of the header that begins with these HEADER_BYTES. Raises CommError if they
    do not begin a header."""
    magic, kind, meta_length, _group, _sequence, nbytes = _FIELDS.unpack_from(start)
    if magic != MAGIC or kind not in (MESSAGE, GOODBYE):
        raise CommError(f"no frame begins with {start[:8]!r}")
    if meta_length > META_LIMIT or nbytes > PAYLOAD_LIMIT:
        raise CommError(
            f"a frame announces {meta_length} bytes of meta and {nbytes} of payload; "
            f"{META_LIMIT} and {PAYLOAD_LIMIT} are allowed"
        )
    length = HEADER_BYTES + int(meta_length)
    return length + -length % align


@lru_cache(maxsize=_REMEMBERED)
def parse_header(data: bytes) -> Header:
    """Return the header in `data`, whose length header_length gave. Raises CommError if it was
    damaged."""
    _magic, kind, meta_length, group, sequence, nbytes = _FIELDS.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    meta = data[HEADER_BYTES : HEADER_BYTES + meta_length]
    if zlib.crc32(meta, zlib.crc32(data[: _FIELDS.size])) != checksum:
        raise CommError(f"a frame's checksum is wrong: {data[:HEADER_BYTES].hex()}")
    return Header(kind, Tag(group, sequence), meta, nbytes)
