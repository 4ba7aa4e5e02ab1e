"""Messages whose header the receiver knows: recognised by their bytes, or received as any other,
with the same result, order and error."""

import socket
import struct

import numpy as np
import pytest
from helpers import run
from linked import KINDS, into, linked, nobody_tells, tag
from planted import Bug, check_caught

from minidist.comm.transports.progress import frames
from minidist.comm.transports.progress.message import Peer
from minidist.comm.transports.progress.stream import StreamTransport
from minidist.comm.transports.tcp import TcpLink
from minidist.errors import PeerLostError, ShapeError, TimeoutError

on_every_link = pytest.mark.parametrize("kind", KINDS)
SIZES = (0, 1, 63, 64, 200, 1000)  # bytes: with and without padding to shared memory's lines


@pytest.fixture
def recognised(monkeypatch):
    """Whether each message at the front of a link was recognised."""
    outcomes = []
    plain = StreamTransport._take_whole

    def noted(*args):
        outcomes.append(plain(*args))
        return outcomes[-1]

    monkeypatch.setattr(StreamTransport, "_take_whole", noted)
    return outcomes


def post(transport, got, *, meta=b"call 7", nbytes=None, sequence=7, accept=None, known=True):
    """Begin to receive into `got` from the other rank; `meta`, `nbytes`: what is likely."""
    nbytes = got.nbytes if nbytes is None else nbytes
    return transport.start_recv(
        1 - transport.world_rank,
        tag(sequence),
        accept or into(got),
        None,
        (meta, nbytes, got if known and accept is None else None),
    )


@on_every_link
@pytest.mark.parametrize("known", [True, False], ids=["array known", "array asked for"])
def test_a_message_as_expected_is_recognised(kind, known, recognised):
    with linked(kind) as (zero, one):
        for size in SIZES:
            sent = np.arange(size, dtype=np.uint8)
            got = np.zeros(size, np.uint8)
            arriving = post(one, got, known=known)
            zero.start_send(1, tag(7), sent, b"call 7").wait()
            arriving.wait()
            np.testing.assert_array_equal(got, sent)
        assert recognised == [True] * len(SIZES)
        assert one.counts() == ({}, {0: len(SIZES)})
        assert not one.unfinished and not one._peers[0].reading


@on_every_link
def test_it_is_reduced_as_any_other(kind, recognised):
    with linked(kind) as (zero, one):
        total = np.arange(100.0)

        def add(target, start, piece):
            target[start : start + len(piece)] += piece

        zero.start_send(1, tag(7), np.ones(100), b"call 7").wait()
        one.start_recv(0, tag(7), into(total), add, (b"call 7", 800, total)).wait()
        np.testing.assert_array_equal(total, np.arange(100.0) + 1)
        assert recognised == [True]


@on_every_link
@pytest.mark.parametrize("other", ["meta", "length", "tag", "half"])
def test_another_message_is_received_as_ever(kind, other, recognised):
    with linked(kind) as (zero, one):
        sent = np.arange(2000, dtype=np.uint8)
        got = np.zeros(2000, np.uint8)
        link = zero._peers[1].link
        header = frames.pack_header(frames.MESSAGE, tag(7), b"call 7", 2000, link.align)
        if other == "tag":
            zero.start_send(1, tag(8), sent, b"call 7").wait()
        if other == "half":
            link.write(header, sent[:1024])
        else:
            zero.start_send(1, tag(7), sent, b"call 8" if other == "meta" else b"call 7").wait()
        arriving = post(one, got, nbytes=1999 if other == "length" else 2000)
        one._pass()
        if other == "half":
            link.write(b"", sent[1024:])
        arriving.wait()
        np.testing.assert_array_equal(got, sent)
        assert not any(recognised)


@on_every_link
def test_the_error_of_accept_is_the_handles(kind, recognised):
    with linked(kind) as (zero, one):

        def refuses(*_):
            raise ShapeError("out= has another shape")

        got = np.zeros(10, np.uint8)
        zero.start_send(1, tag(7), np.ones(10, np.uint8), b"call 7").wait()
        with pytest.raises(ShapeError, match="another shape"):
            post(one, got, accept=refuses).wait()
        zero.start_send(1, tag(7), np.ones(10, np.uint8), b"call 7").wait()
        post(one, got).wait()
        assert got.all()
        assert recognised == [True, True]


@on_every_link
def test_a_long_message_is_not_looked_for(kind, recognised):
    with linked(kind) as (zero, one):
        got = np.zeros(one._peers[0].link.short + 1, np.uint8)
        arriving = post(one, got)
        sending = zero.start_send(1, tag(7), np.ones(len(got), np.uint8), b"call 7")
        arriving.wait()
        sending.wait()
        assert got.all()
        assert not any(recognised)


@on_every_link
def test_a_peer_that_ends_is_told(kind, monkeypatch):
    nobody_tells(monkeypatch)
    with linked(kind) as (zero, one):
        # as the kernel does it when a process dies
        zero._peers[1].link._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(
            PeerLostError, match="rank 1 lost rank 0: its connection ended without a goodbye"
        ):
            post(one, np.zeros(10, np.uint8)).wait()


def test_a_broken_connection_is_told_as_such(monkeypatch):
    nobody_tells(monkeypatch)
    with linked("tcp") as (zero, one):
        sock = zero._peers[1].link._sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        with pytest.raises(PeerLostError, match="rank 1 lost rank 0: its connection broke"):
            post(one, np.zeros(10, np.uint8)).wait()


def parts_of_many_shapes(world):
    """Return how often a message was recognised in 40 all-to-alls, of which a fifth have parts that
    differ between ranks, and a fifth long ones."""
    outcomes = []
    plain = StreamTransport._take_whole
    world.transport._take_whole = lambda *args: (
        outcomes.append(plain(world.transport, *args)) or outcomes[-1]
    )
    for step in range(40):
        length = (3, 3, 3, 5 + world.rank, 30_000)[step % 5]
        parts = [np.full(length, 100 * step + 10 * world.rank + dst) for dst in range(world.size)]
        for src, part in enumerate(world.all_to_all(parts, algorithm="pairwise")):
            assert part.shape == ((5 + src,) if step % 5 == 3 else (length,))
            assert (part == 100 * step + 10 * src + world.rank).all()
    return world.ledger.messages()["world"]["all_to_all"], sum(outcomes)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_all_to_all_recognises_parts_like_its_own(transport):
    for messages, recognised in run(parts_of_many_shapes, size=3, transport=transport):
        assert messages == 80
        assert 0 < recognised <= 24 * 2, "of 24 calls with parts alike, those from both others"


def test_subscribers_are_told_of_every_message():
    def job(world):
        events = []
        world.ledger.subscribe(events.append, receives=True)
        for _ in range(5):
            world.all_to_all([np.ones(3)] * world.size, algorithm="pairwise")
            world.all_reduce(np.ones(3), algorithm="direct")
        return [
            sum(event.kind == kind and event.details["nbytes"] == 24 for event in events)
            for kind in ("message", "receive")
        ]

    assert run(job, size=3, transport="tcp") == [[20, 20]] * 3


def check_order(kind="tcp", meta=b"call 7"):
    """Three messages of one tag go to three receives in the order of both."""
    with linked(kind, limit=0.5) as (zero, one):
        got = [np.zeros(10, np.uint8) for _ in range(3)]
        arriving = [post(one, array) for array in got]
        for value in range(3):
            zero.start_send(1, tag(7), np.full(10, value, np.uint8), meta).wait()
        for handle in reversed(arriving):
            handle.wait()
        assert [array[0] for array in got] == [0, 1, 2]


@on_every_link
@pytest.mark.parametrize("meta", [b"call 7", b"call 8"])
def test_messages_of_one_tag_stay_in_order(kind, meta):
    check_order(kind, meta)


BUGS = [
    Bug(
        "a later receive is queued before the first",
        Peer,
        "queue_next",
        lambda right, peer: None,
        options={"meta": b"call 8"},
        raises=(AssertionError, TimeoutError),
    ),
    Bug(
        "the first stays in front for ever",
        Peer,
        "post",
        lambda right, peer, receive: (right(peer, receive), setattr(peer, "next", receive)),
        raises=(AssertionError, TimeoutError),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    check_caught(bug, check_order, monkeypatch)


@on_every_link
def test_a_receive_that_is_posted_meanwhile_is_second(kind):
    """Another thread posts it while the leader looks for the first one's message."""
    with linked(kind) as (zero, one):
        got = [np.zeros(10, np.uint8) for _ in range(2)]
        arriving = []
        link = one._peers[0].link
        plain = link.whole

        def whole(header, nbytes):
            if len(arriving) == 1:
                arriving.append(post(one, got[1]))
            return plain(header, nbytes)

        link.whole = whole
        for value in (1, 2):
            zero.start_send(1, tag(7), np.full(10, value, np.uint8), b"call 7").wait()
        arriving.append(post(one, got[0]))
        arriving[0].wait()
        arriving[1].wait()
        assert [array[0] for array in got] == [1, 2]
        assert not one._peers[0].posted and not one._peers[0].reading


@on_every_link
def test_a_buffered_message_ends_no_other_receive(kind):
    """It has come before its receive, and a receive of another thread is the first that waits."""
    with linked(kind, limit=0.5) as (zero, one):
        sent = {number: np.full(10, number, np.uint8) for number in (5, 7, 9)}
        got = {number: np.zeros(10, np.uint8) for number in sent}
        for number in (5, 9):
            zero.start_send(1, tag(number), sent[number], b"call 7").wait()
        post(one, got[9], sequence=9).wait()  # that of 5 is buffered
        first = post(one, got[7])
        post(one, got[5], sequence=5).wait()
        zero.start_send(1, tag(7), sent[7], b"call 7").wait()
        first.wait()
        assert {number: array[0] for number, array in got.items()} == {5: 5, 7: 7, 9: 9}


@on_every_link
def test_a_shorter_message_is_the_last_of_a_peer(kind):
    """The bytes of the likely message would never come: what has come is taken all the same."""
    with linked(kind, limit=0.5) as (zero, one):
        sent = np.arange(10, dtype=np.uint8)
        got = np.zeros(10, np.uint8)
        zero.start_send(1, tag(7), sent, b"call 7").wait()
        zero.close()
        one._peers[0].link.ended = True  # shm: noticed while this rank waited for something else
        post(one, got, nbytes=1000).wait()
        np.testing.assert_array_equal(got, sent)


def test_a_header_is_compared_to_its_end(monkeypatch):
    """A link that looks only at the length would take a message of another call."""

    def check():
        with linked("tcp") as (zero, one):
            got = np.zeros(10, np.uint8)
            zero.start_send(1, tag(7), np.ones(10, np.uint8), b"call 8").wait()

            def accept(meta, nbytes):
                assert meta == b"call 8"
                return got

            one.start_recv(0, tag(7), accept, None, (b"call 7", 10, None)).wait()

    def whole(right, link, header, nbytes):
        return right(link, link.peek(len(header)), nbytes)

    check_caught(Bug("only the length counts", TcpLink, "whole", whole), check, monkeypatch)
