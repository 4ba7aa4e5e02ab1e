"""The ring of bytes: what goes in comes out, whatever the sizes and turns, also between two
processes."""

import itertools
import mmap
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm.transports.shm.ring_buffer import (
    CAPACITY,
    LINE,
    PIECE_BYTES,
    RING_BYTES,
    RingReader,
    RingWriter,
    copy,
)

FRAMES = st.lists(
    st.tuples(
        st.integers(1, 66),
        st.one_of(
            st.integers(0, 300),
            st.integers(0, CAPACITY // 2),
            st.sampled_from([PIECE_BYTES, CAPACITY, CAPACITY + 1]),
        ),
    ),
    min_size=1,
    max_size=12,
)
TURNS = st.lists(st.booleans(), max_size=60)


def ends(memory: memoryview | None = None) -> tuple[RingWriter, RingReader]:
    memory = memory or memoryview(mmap.mmap(-1, RING_BYTES))
    return RingWriter(memory), RingReader(memory)


class Writing:
    """Writes frames one after the other, a step at a time."""

    def __init__(self, writer: RingWriter, frames: list[tuple[bytes, np.ndarray]]) -> None:
        self.writer = writer
        self.frames = list(frames)
        self.sent = 0

    def step(self) -> None:
        if self.frames:
            prefix, payload = self.frames[0]
            begun = self.sent - len(prefix)
            self.sent += self.writer.write(prefix if begun < 0 else b"", payload[max(begun, 0) :])
            if self.sent == len(prefix) + len(payload):
                del self.frames[0]
                self.sent = 0


class Reading:
    """Reads frames of known lengths, a step at a time, and compares."""

    def __init__(
        self, reader: RingReader, frames: list[tuple[bytes, np.ndarray]], most: int
    ) -> None:
        self.reader = reader
        self.frames = list(frames)
        self.most = most
        self.filled = -1

    def step(self) -> None:
        prefix, payload = self.frames[0]
        if self.filled < 0:
            if (data := self.reader.peek(len(prefix))) is not None:
                assert data == prefix
                self.reader.skip(len(prefix))
                self.filled = 0
        else:
            piece = self.reader.piece(min(self.most, len(payload) - self.filled))
            assert np.array_equal(piece, payload[self.filled : self.filled + len(piece)])
            self.filled += len(piece)
            self.reader.skip(len(piece))
        if self.filled == len(payload):
            self.reader.skip(-len(payload) % LINE)
            del self.frames[0]
            self.filled = -1


def transfer(sizes: list[tuple[int, int]], turns: list[bool], most: int) -> None:
    random = np.random.default_rng(len(sizes))
    frames = [
        (random.bytes(lines * LINE), random.integers(0, 256, nbytes, np.uint8))
        for lines, nbytes in sizes
    ]
    writer, reader = ends()
    writing = Writing(writer, frames)
    reading = Reading(reader, frames, most)
    for step, writes in enumerate(itertools.chain(turns, itertools.cycle((True, False)))):
        if not reading.frames:
            break
        (writing if writes else reading).step()
        assert 0 <= reader.unread() <= CAPACITY
        assert step < 100_000, "nothing moves any more"
    assert not writing.frames


@given(FRAMES, TURNS, st.sampled_from([200 * LINE, 3000 * LINE, CAPACITY]))
def test_what_goes_in_comes_out(sizes, turns, most):
    transfer(sizes, turns, most)


@pytest.mark.soak
@settings(max_examples=3000)
@given(FRAMES, TURNS, st.sampled_from([200 * LINE, 3000 * LINE, CAPACITY]))
def test_what_goes_in_comes_out_at_length(sizes, turns, most):
    transfer(sizes, turns, most)


def test_a_full_ring_takes_nothing_more():
    writer, reader = ends()
    payload = np.zeros(2 * CAPACITY, np.uint8)
    taken = 0
    while step := writer.write(b"", payload[taken:]):
        taken += step
    assert taken == CAPACITY
    reader.skip(reader.unread())
    reader.show()
    assert writer.write(b"p" * LINE, payload[:10]) == LINE + 10


def test_words_ask_for_a_wake_up_once():
    writer, reader = ends()
    reader.sleeps(True)
    writer.write(b"x" * LINE, np.empty(0, np.uint8))
    assert writer.reader_sleeps()
    assert not writer.reader_sleeps()
    payload = np.zeros(CAPACITY, np.uint8)
    while writer.write(b"", payload):
        pass
    writer.sleeps(True)
    assert not writer.roomy()
    assert not reader.skip(CAPACITY // 2 - LINE), "less than half is free"
    assert reader.skip(CAPACITY // 4)
    assert not reader.show()
    assert writer.roomy()


def test_a_little_that_was_read_is_shown_before_a_sleep():
    writer, reader = ends()
    while writer.write(b"", np.zeros(CAPACITY, np.uint8)):
        pass
    assert not reader.skip(LINE)
    assert writer.free() == 0
    reader.show()
    assert writer.free() == LINE


def pump(memory: memoryview, frames: list[tuple[bytes, np.ndarray]]) -> None:
    """The writing process."""
    writing = Writing(ends(memory)[0], frames)
    while writing.frames:
        writing.step()
        os.sched_yield()


def test_two_processes_see_each_other_in_order():
    """Between processes that run at once: bytes never behind `head`, room never ahead of `tail`."""
    random = np.random.default_rng(5)
    frames = [
        (random.bytes(LINE), random.integers(0, 256, n, np.uint8))
        for n in random.integers(0, 200_000, 300)
    ]
    memory = memoryview(mmap.mmap(-1, RING_BYTES))
    child = os.fork()
    if child == 0:
        pump(memory, frames)
        os._exit(0)
    reading = Reading(ends(memory)[1], frames, CAPACITY)
    deadline = time.monotonic() + 20
    while reading.frames:
        reading.step()
        os.sched_yield()
        assert time.monotonic() < deadline
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 100_000])
@pytest.mark.parametrize("behind", [-64, -8, 0, 1, 8, 15, 16, 4096])
def test_copy_wherever_the_two_lie(nbytes, behind):
    memory = np.frombuffer(mmap.mmap(-1, 1 << 18), np.uint8)
    source = memory[1024 : 1024 + nbytes]
    source[:] = np.arange(nbytes) % 251
    target = memory[(1 << 17) + 1024 + behind :][:nbytes]
    copy(target, source)
    assert np.array_equal(target, np.arange(nbytes) % 251)
    assert not memory[(1 << 17) + 1024 + behind + nbytes :].any()
