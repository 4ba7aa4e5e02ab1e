"""Short messages swapped without handles: what is taken at once, and what is left to start_recv,
whole and in order."""

import socket
import struct
import threading
import time

import numpy as np
import pytest
from helpers import run
from linked import KINDS, into, linked, nobody_tells, tag

from minidist.comm.transport import ShortReceive
from minidist.comm.transports.progress import engine, frames
from minidist.comm.transports.progress.stream import StreamTransport
from minidist.errors import PeerLostError, ShapeError

on_every_link = pytest.mark.parametrize("kind", KINDS)
SIZES = (0, 1, 63, 64, 200, 1000)  # bytes: with and without padding to shared memory's lines


def swap(transport, sent, got, *, meta=b"call 7", expected=None):
    """With rank 1, or 0; `expected`: the header that is looked for, if another."""
    peer = 1 - transport.world_rank
    return transport.swap(
        tag(7),
        [(peer, sent, meta)],
        [ShortReceive(peer, expected or meta, got.nbytes, lambda: got)],
    )


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def received(transport, length):
    got = np.zeros(length, np.uint8)
    transport.start_recv(1 - transport.world_rank, tag(7), into(got)).wait()
    return got


@on_every_link
def test_what_is_there_is_taken(kind):
    with linked(kind) as (zero, one):
        for size in SIZES:
            first = np.full(size, 3, np.uint8)
            second = np.arange(size, dtype=np.uint8)
            there = np.zeros(size, np.uint8)
            here = np.zeros(size, np.uint8)
            handles, came = swap(zero, first, here)
            assert came == [False], "rank 1 has sent nothing yet"
            handles[0].wait()
            assert swap(one, second, there)[1] == [True]
            np.testing.assert_array_equal(there, first)
            np.testing.assert_array_equal(received(zero, size), second)
        assert zero.counts() == ({1: len(SIZES)}, {1: len(SIZES)})
        assert one.counts() == ({0: len(SIZES)}, {0: len(SIZES)})
        assert not zero.unfinished and not one.unfinished and not zero._leading


@on_every_link
def test_what_stands_behind_another_message_is_taken_when_that_is_gone(kind):
    """They come together, so the second is in the link's buffer behind the first."""
    with linked(kind) as (zero, one):
        first = np.full(100, 3, np.uint8)
        second = np.arange(200, dtype=np.uint8)
        zero.start_send(1, tag(8), first, b"call 6").wait()
        zero.start_send(1, tag(7), second, b"call 7").wait()
        got = np.zeros(100, np.uint8)
        one.start_recv(0, tag(8), into(got)).wait()
        np.testing.assert_array_equal(got, first)
        there = np.zeros(200, np.uint8)
        assert swap(one, np.zeros(0, np.uint8), there)[1] == [True]
        np.testing.assert_array_equal(there, second)


@on_every_link
@pytest.mark.parametrize("other", ["meta", "length", "tag"])
def test_another_message_is_left_for_start_recv(kind, other):
    with linked(kind) as (zero, one):
        sent = np.arange(100, dtype=np.uint8)
        if other == "tag":
            zero.start_send(1, tag(8), sent, b"call 7").wait()
        zero.start_send(1, tag(7), sent, b"call 8" if other == "meta" else b"call 7").wait()
        got = np.zeros(99 if other == "length" else 100, np.uint8)
        assert swap(one, sent, got)[1] == [False]
        assert not got.any()
        np.testing.assert_array_equal(received(one, 100), sent)


@on_every_link
def test_half_a_message_is_left_too(kind, monkeypatch):
    with linked(kind) as (zero, one):
        sent = np.arange(2000, dtype=np.uint8)
        link = zero._peers[1].link
        header = frames.pack_header(frames.MESSAGE, tag(7), b"call 7", 2000, link.align)
        begun = link.write(header, sent[:1024])
        assert begun == len(header) + 1024
        assert swap(one, sent, np.zeros(2000, np.uint8))[1] == [False]
        link.write(b"", sent[1024:])
        np.testing.assert_array_equal(received(one, 2000), sent)


@on_every_link
def test_a_place_that_refuses_leaves_the_message_and_its_error(kind):
    with linked(kind) as (zero, one):

        def refuses(*_):
            raise ShapeError("out= has another shape")

        zero.start_send(1, tag(7), np.ones(10, np.uint8), b"call 7").wait()
        receive = ShortReceive(0, b"call 7", 10, refuses)
        assert one.swap(tag(7), [], [receive]) == ([], [False])
        with pytest.raises(ShapeError, match="another shape"):
            one.start_recv(0, tag(7), refuses).wait()
        zero.start_send(1, tag(7), np.ones(10, np.uint8), b"call 7").wait()
        assert received(one, 10).all()


@on_every_link
def test_nothing_is_begun_where_a_link_is_busy_or_the_message_long(kind):
    with linked(kind) as (zero, one):
        got = np.zeros(10, np.uint8)
        assert swap(one, got, np.zeros(one._peers[0].link.short + 1, np.uint8)) is None
        waiting = one.start_recv(0, tag(9), into(np.zeros(3, np.uint8)))
        assert swap(one, got, got.copy()) is None
        zero.start_send(1, tag(9), np.ones(3, np.uint8)).wait()
        waiting.wait()
        assert one._step_up()
        assert swap(one, got, got.copy()) is None, "another thread reads the links"
        one._step_down()
        assert zero.counts()[1] == {} and one.counts()[0] == {}
        assert swap(one, got, got.copy()) is not None


@on_every_link
def test_a_peer_that_ends_is_left_to_start_recv(kind, monkeypatch):
    nobody_tells(monkeypatch)
    with linked(kind) as (zero, one):
        # as the kernel does it when a process dies
        zero._peers[1].link._sock.shutdown(socket.SHUT_RDWR)
        got = np.zeros(10, np.uint8)
        outcome = swap(one, got, got)
        assert outcome is not None and outcome[1] == [False]
        with pytest.raises(
            PeerLostError, match="rank 1 lost rank 0: its connection ended without a goodbye"
        ):
            one.start_recv(0, tag(7), into(got)).wait()


def test_a_broken_connection_is_told_as_such(monkeypatch):
    """The kernel tells of a reset once: the swap that meets it must not keep it to itself."""
    nobody_tells(monkeypatch)
    with linked("tcp") as (zero, one):
        sock = zero._peers[1].link._sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        got = np.zeros(10, np.uint8)
        assert one.swap(tag(7), [], [ShortReceive(0, b"call 7", 10, lambda: got)]) == ([], [False])
        with pytest.raises(PeerLostError, match="rank 1 lost rank 0: its connection broke"):
            one.start_recv(0, tag(7), into(got)).wait()


@on_every_link
def test_a_follower_leads_afterwards(kind, monkeypatch):
    """A thread that has begun to wait while a swap looked for its messages goes on when the swap is
    over."""
    for limit in ("_HEARS", "QUIET"):
        monkeypatch.setattr(engine, limit, 60.0)  # no sleep ends by itself,
    # and no helper takes over
    monkeypatch.setattr(engine.Engine, "_call_helper", lambda self: None)
    with linked(kind, spins=2000) as (zero, one):
        time.sleep(0.05)  # the helper has looked once, and waits to be called
        got = np.zeros(5, np.uint8)
        thread = None

        def other_waits():
            nonlocal thread
            thread = threading.Thread(target=lambda: received(one, 5), daemon=True)
            thread.start()
            until(lambda: one._followers)
            return got

        zero.start_send(1, tag(6), np.ones(5, np.uint8), b"call 6").wait()
        assert one.swap(tag(6), [], [ShortReceive(0, b"call 6", 5, other_waits)])[1] == [True]
        zero.start_send(1, tag(7), np.ones(5, np.uint8), b"call 7").wait()
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_to_all_takes_most_at_once_and_the_rest_as_ever(transport, monkeypatch):
    """Parts alike come by the swap; parts of other shapes, long ones and late ones do not: all are
    right."""
    taken = []
    plain = StreamTransport.swap

    def noted(*args):
        outcome = plain(*args)
        taken.extend([None] if outcome is None else outcome[1])
        return outcome

    monkeypatch.setattr(StreamTransport, "swap", noted)

    def job(world):
        for step in range(40):
            length = (3, 3, 3, 5 + world.rank, 30_000)[step % 5]
            parts = [
                np.full(length, 100 * step + 10 * world.rank + dst) for dst in range(world.size)
            ]
            for src, part in enumerate(world.all_to_all(parts, algorithm="pairwise")):
                assert part.shape == ((5 + src,) if step % 5 == 3 else (length,))
                assert (part == 100 * step + 10 * src + world.rank).all()
        return world.ledger.messages()["world"]["all_to_all"], taken

    for messages, outcomes in run(job, size=3, transport=transport):
        assert messages == 80
        assert outcomes.count(None) == 8, "parts of 240,000 bytes"
        assert 0 < outcomes.count(True) <= 24 * 2, (
            "of 24 calls with parts alike, those from both others"
        )


def test_subscribers_are_told_of_every_message():
    def job(world):
        events = []
        world.ledger.subscribe(
            lambda event: events.append(event) if event.kind == "message" else None
        )
        for _ in range(5):
            world.all_to_all([np.ones(3)] * world.size, algorithm="pairwise")
        return len(events)

    assert run(job, size=3, transport="tcp") == [10] * 3
