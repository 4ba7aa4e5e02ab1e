"""Headers: what is packed comes back; whatever else comes is refused before a length in it is
believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.limits import META_LIMIT
from minidist.comm.transport import Tag
from minidist.comm.transports.progress import frames
from minidist.errors import CommError

WORDS = st.integers(0, 2**64 - 1)


def parse(data: bytes, align: int) -> frames.Header:
    """As a transport does it: the length first, then the whole."""
    length = frames.header_length(data[: frames.HEADER_BYTES], align)
    if length > len(data):
        raise CommError("more is announced than came")
    return frames.parse_header(data[:length])


@given(
    st.sampled_from([frames.MESSAGE, frames.GOODBYE]),
    WORDS,
    WORDS,
    st.binary(max_size=200),
    st.integers(0, frames.PAYLOAD_LIMIT),
    st.sampled_from([1, 64]),
)
def test_what_is_packed_comes_back(kind, group, sequence, meta, nbytes, align):
    packed = frames.pack_header(kind, Tag(group, sequence), meta, nbytes, align)
    assert len(packed) % align == 0
    assert parse(packed, align) == (kind, Tag(group, sequence), meta, nbytes)


def test_longest_meta():
    packed = frames.pack_header(frames.MESSAGE, Tag(1, 2), b"m" * META_LIMIT, 3, 1)
    assert parse(packed, 1).meta == b"m" * META_LIMIT
    with pytest.raises(CommError, match="4096 bytes, not 4097"):
        frames.pack_header(frames.MESSAGE, Tag(1, 2), b"m" * (META_LIMIT + 1), 3, 1)


def test_every_flipped_bit_is_noticed():
    packed = frames.pack_header(frames.MESSAGE, Tag(2**63, 77), b"signature", 1 << 20, 1)
    unused = 5  # the byte that no field uses is under the checksum too
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CommError):
            parse(bytes(damaged), 1)
    assert packed[unused] == 0


@given(st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES))
def test_random_bytes_are_refused(data):
    with pytest.raises(CommError):
        parse(data, 1)


@pytest.mark.parametrize(
    ("meta_length", "nbytes"),
    [(META_LIMIT + 1, 0), (65535, 0), (0, frames.PAYLOAD_LIMIT + 1), (0, 2**64 - 1)],
)
def test_lengths_beyond_the_limits_are_refused_before_the_checksum(meta_length, nbytes):
    start = frames._FIELDS.pack(frames.MAGIC, frames.MESSAGE, meta_length, 1, 1, nbytes) + bytes(4)
    with pytest.raises(CommError, match=f"{meta_length} bytes of meta and {nbytes} of payload"):
        frames.header_length(start, 1)
