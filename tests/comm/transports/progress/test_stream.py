"""Test what a stream transport does beyond the conformance suite: early messages, lost and lying
peers, nobody waiting."""

import gc
import os
import signal
import socket
import threading
import time
import weakref

import numpy as np
import pytest
from leftovers import open_files
from linked import KINDS, MAKERS, add, into, linked, nobody_tells, tag, tcp_links

from minidist.comm.health import acceptor
from minidist.comm.transports.progress import frames, stream
from minidist.comm.transports.progress.poll_loop import PolledTransport
from minidist.comm.transports.tcp import TcpLink
from minidist.errors import CommError, PeerLostError, TimeoutError

BIG = 3_000_000  # elements: more than any link holds

on_every_link = pytest.mark.parametrize("kind", KINDS)


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def pass_once(transport):
    if transport._step_up():
        transport._pass()
        transport._step_down()


# --- messages that come early
# ----------------------------------------------------------------------------------------


@on_every_link
def test_an_early_message_stays_in_the_link(kind):
    with linked(kind) as (zero, one):
        sent = zero.start_send(1, tag(1), np.arange(BIG, dtype=np.float32))
        time.sleep(0.05)
        assert not sent.done(), "nobody has asked for it: the sender is held back"
        assert one._peers[0].unexpected_bytes == 0
        got = np.empty(BIG, np.float32)
        receiving = in_thread(one.start_recv(0, tag(1), into(got)).wait)
        sent.wait()
        receiving.join()
        assert np.array_equal(got, np.arange(BIG, dtype=np.float32))


@on_every_link
def test_what_stands_before_a_message_asked_for_is_buffered(kind):
    with linked(kind) as (zero, one):
        sent = [zero.start_send(1, tag(k), np.full(50_000, k)) for k in range(6)]
        sending = in_thread(lambda: [handle.wait() for handle in sent])
        for k in (5, 0, 3, 4):
            got = np.ones(50_000, np.int64)
            one.start_recv(0, tag(k), into(got), add).wait()
            assert (got == k + 1).all()
        assert one._peers[0].unexpected_bytes == 2 * 400_000
        for k in (2, 1):
            got = np.empty(50_000, np.int64)
            one.start_recv(0, tag(k), into(got)).wait()
            assert (got == k).all()
        sending.join()
        assert one._peers[0].unexpected_bytes == 0
        assert not one._peers[0].unexpected
        assert not one._peers[0].posted


@on_every_link
def test_a_receive_may_claim_a_message_that_is_being_buffered(kind):
    with linked(kind) as (zero, one):
        last = np.empty(1)
        first = np.zeros(BIG, np.float32)
        sent = zero.start_send(1, tag(1), np.ones(BIG, np.float32))
        until(zero._step_up)  # from here on nobody moves what the link does not hold
        waiting = one.start_recv(0, tag(2), into(last))
        # its header was read, not all of it
        until(lambda: pass_once(one) or one._peers[0].frame is not None)
        claimed = one.start_recv(0, tag(1), into(first), add)
        assert not claimed.done()
        zero._step_down()
        receiving = in_thread(claimed.wait)
        sent.wait()
        receiving.join()
        assert (first == 1).all()
        zero.start_send(1, tag(2), np.full(1, 3.0)).wait()
        waiting.wait()
        assert last[0] == 3


@on_every_link
def test_too_much_unasked_for_is_an_error_that_says_what_to_do(kind, monkeypatch):
    monkeypatch.setattr(stream, "UNEXPECTED_LIMIT", 1_000_000)
    with linked(kind) as (zero, one):
        for k in range(3):
            zero.start_send(1, tag(k), np.zeros(50_000))
        zero.start_send(1, tag(9), np.zeros(1))
        nobody_tells(monkeypatch)
        asked_for = one.start_recv(0, tag(9), into(np.empty(1)))
        with pytest.raises(
            CommError, match="400000 bytes .*7/2.* no receive asks for.*800000 bytes are buffered"
        ):
            asked_for.wait()


# --- nobody waits
# ----------------------------------------------------------------------------------------------------


@on_every_link
def test_what_was_started_moves_while_nobody_waits(kind):
    with linked(kind) as (zero, one):
        got = np.ones(BIG, np.float32)
        sent = zero.start_send(1, tag(1), np.ones(BIG, np.float32))
        arriving = one.start_recv(0, tag(1), into(got), add)
        until(lambda: sent.done() and arriving.done())
        assert (got == 2).all()


@on_every_link
def test_the_helper_sleeps_when_there_is_nothing_to_move(kind):
    with linked(kind) as (zero, one):
        for _ in range(2):
            arriving = one.start_recv(0, tag(1), into(np.empty(1)))
            zero.start_send(1, tag(1), np.zeros(1)).wait()
            arriving.wait()
            until(lambda: not one._helper_awake and not zero._helper_awake)
        gc.collect()
        assert any(burnt(0.2) < 0.02 for _ in range(5)), "a helper that is awake is so each time"


def burnt(seconds):
    """Processor time of all threads while this one sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


# --- waking and ending
# -----------------------------------------------------------------------------------------------


@on_every_link
def test_abort_wakes_leader_and_follower_at_once(kind):
    with linked(kind) as (zero, _one):
        ended = []
        raised = []

        def wait(sequence):
            try:
                zero.start_recv(1, tag(sequence), into(np.empty(1))).wait()
            except CommError as error:
                raised.append(str(error))
                ended.append(time.monotonic())

        threads = [in_thread(lambda k=k: wait(k)) for k in range(3)]
        until(lambda: zero._asleep and zero._followers == 2)
        start = time.monotonic()
        zero.abort(CommError("rank 5 died"))
        for thread in threads:
            thread.join(20)
        assert raised == ["rank 5 died"] * 3
        assert max(ended) - start < 5
        with pytest.raises(CommError, match="rank 5 died"):
            zero.start_recv(1, tag(9), into(np.empty(1))).wait()


@on_every_link
def test_a_started_transfer_wakes_the_sleeping_leader(kind):
    """The leader sleeps on a message that does not come; another thread's receive must not have to
    wait for that."""
    with linked(kind) as (zero, one):
        got = np.empty(1)
        leader = in_thread(one.start_recv(0, tag(1), into(np.empty(1))).wait)
        until(lambda: one._asleep)
        zero.start_send(1, tag(2), np.full(1, 4.0)).wait()
        start = time.monotonic()
        one.start_recv(0, tag(2), into(got)).wait()
        assert got[0] == 4
        assert time.monotonic() - start < 5
        zero.start_send(1, tag(1), np.zeros(1)).wait()
        leader.join(20)
        assert not leader.is_alive()


@on_every_link
def test_a_receive_that_starts_just_before_the_leader_sleeps_is_seen(kind, monkeypatch):
    """Its message has been read ahead, so the kernel would not wake the leader for it."""
    with linked(kind) as (zero, one):
        for number in (1, 2):
            zero.start_send(1, tag(number), np.full(10, number, np.uint8)).wait()
        one.start_recv(0, tag(1), into(np.empty(10, np.uint8))).wait()
        full = one.start_send(0, tag(3), np.zeros(BIG))
        started = []
        seen = []
        move, sleep = one._pass, one._sleep

        def last_pass():
            moved = move()
            if not moved and not started:  # another thread does it then
                started.append(one.start_recv(0, tag(2), into(np.empty(10, np.uint8))))
            return moved

        def noted(seconds):
            seen.append(started[0].finished)
            sleep(seconds)

        monkeypatch.setattr(one, "_pass", last_pass)
        monkeypatch.setattr(one, "_sleep", noted)
        one._drive_until(full, time.monotonic() + 0.1)
        assert seen
        assert all(seen), "it slept beside the message"


@on_every_link
def test_limit_names_rank_peer_and_tag(kind):
    with linked(kind, limit=0.1) as (zero, _one):
        with pytest.raises(
            TimeoutError, match=r"rank 0 waited 0.1 s for a message from rank 1 \(tag 7/3\)"
        ):
            zero.start_recv(1, tag(3), into(np.empty(1))).wait()
        with pytest.raises(
            TimeoutError, match=r"rank 1 to take 24000000 bytes \(tag 7/4; \d+ have left\)"
        ):
            zero.start_send(1, tag(4), np.zeros(BIG)).wait()


@on_every_link
def test_signals_do_not_disturb_a_wait(kind):
    """Short reads, short writes and interrupted system calls."""
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with linked(kind) as (zero, one):
            for _ in range(3):
                got = np.ones(BIG)
                sending = in_thread(zero.start_send(1, tag(1), np.arange(float(BIG))).wait)
                one.start_recv(0, tag(1), into(got), add).wait()
                sending.join()
                assert np.array_equal(got, np.arange(1.0, BIG + 1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@on_every_link
def test_a_failing_reduce_is_raised_by_wait_and_the_link_stays_whole(kind):
    def fail(target, start, piece):
        raise ArithmeticError("no sum today")

    with linked(kind) as (zero, one):
        sending = in_thread(zero.start_send(1, tag(1), np.zeros(BIG)).wait)
        with pytest.raises(ArithmeticError, match="no sum today"):
            one.start_recv(0, tag(1), into(np.zeros(BIG)), fail).wait()
        got = np.empty(3)
        arriving = one.start_recv(0, tag(1), into(got))
        then = in_thread(zero.start_send(1, tag(1), np.arange(3.0)).wait)
        arriving.wait()
        assert (got == np.arange(3)).all()
        sending.join()
        then.join()


@on_every_link
def test_an_array_that_does_not_fit_is_refused(kind):
    with linked(kind) as (zero, one):
        zero.start_send(1, tag(1), np.zeros(10)).wait()
        with pytest.raises(CommError, match="has 80 bytes, but the array to fill has 72"):
            one.start_recv(0, tag(1), into(np.zeros(9))).wait()
        zero.start_send(1, tag(1), np.zeros(10)).wait()
        constant = np.zeros(10)
        constant.flags.writeable = False
        with pytest.raises(CommError, match="read-only"):
            one.start_recv(0, tag(1), into(constant)).wait()
        with pytest.raises(CommError, match="rank 0 of 2 has no link to rank 7"):
            zero.start_send(7, tag(1), np.zeros(1))


@on_every_link
def test_arrays_are_let_go_without_the_garbage_collector(kind):
    gc.collect()
    gc.disable()
    try:
        with linked(kind) as (zero, one):
            for reduce in (None, add):
                source = np.ones(BIG, np.float32)
                target = np.ones(BIG, np.float32)
                gone = [weakref.ref(source), weakref.ref(target)]
                sending = in_thread(zero.start_send(1, tag(1), source).wait)
                one.start_recv(0, tag(1), into(target), reduce).wait()
                sending.join()
                del source, target, sending
                until(lambda gone=gone: [ref() for ref in gone] == [None, None])
    finally:
        gc.enable()


@on_every_link
def test_nothing_is_left_when_closed(kind):
    threads = set(threading.enumerate())
    files = open_files()
    for _ in range(3):
        with linked(kind) as (zero, one):
            arriving = one.start_recv(0, tag(1), into(np.empty(1)))
            zero.start_send(1, tag(1), np.zeros(1)).wait()
            arriving.wait()
            waiter = in_thread(
                lambda: pytest.raises(CommError, zero.start_recv(1, tag(5), into(np.empty(1))).wait)
            )
            until(lambda: zero._leading)
        waiter.join(20)
        assert not waiter.is_alive()
    assert not set(threading.enumerate()) - threads
    assert not open_files() - files


# --- lost and lying peers
# --------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    nobody_tells(monkeypatch)


@on_every_link
def test_a_peer_that_leaves_is_told_from_one_that_dies(kind, impatient):
    for dies in (False, True):
        with linked(kind) as (zero, one):
            zero.start_send(1, tag(1), np.arange(4.0)).wait()
            if dies:
                zero._peers[1].link._sock.shutdown(socket.SHUT_RDWR)  # as the kernel does it
            else:
                zero.close()
            got = np.empty(4)
            one.start_recv(0, tag(1), into(got)).wait()
            assert (got == np.arange(4)).all(), "what was sent before arrives"
            with pytest.raises(
                PeerLostError, match="without a goodbye" if dies else "has left the job"
            ) as caught:
                one.start_recv(0, tag(2), into(got)).wait()
            assert caught.value.world_rank == 0
            with pytest.raises(PeerLostError, match="rank 1 lost rank 0"):
                one.start_send(0, tag(3), np.zeros(BIG)).wait()


@on_every_link
def test_a_buffered_message_is_delivered_though_its_sender_leaves_meanwhile(kind, impatient):
    with linked(kind) as (zero, one):
        for number in (1, 2):
            zero.start_send(1, tag(number), np.full(10, number, np.uint8)).wait()
        one.start_recv(0, tag(2), into(np.empty(10, np.uint8))).wait()  # that of 1 is buffered
        zero.close()
        awaited = one.start_recv(0, tag(3), into(np.empty(1)))
        got = np.zeros(10, np.uint8)

        def accept(meta, nbytes):
            until(lambda: pass_once(one) or awaited.finished)  # the leader reads the goodbye
            return got

        one.start_recv(0, tag(1), accept).wait()
        assert (got == 1).all()
        with pytest.raises(PeerLostError, match="has left"):
            awaited.wait()
        assert not one.unfinished


@on_every_link
def test_half_a_message_of_a_lost_peer_is_awaited_no_longer(kind, impatient, monkeypatch):
    """The peer is lost though its link is still open: its machine has failed."""
    monkeypatch.setattr(stream, "_LAST_WORDS", 0.01)
    with linked(kind, limit=1.0) as (zero, one):
        link = zero._peers[1].link
        start = frames.pack_header(frames.MESSAGE, tag(1), b"", 1024, link.align)
        link.write(start, np.ones(512, np.uint8))
        awaited = one.start_recv(0, tag(2), into(np.empty(1)))
        until(lambda: pass_once(one) or (one._peers[0].frame and one._peers[0].frame.filled == 512))
        one.lose(PeerLostError("rank 1 lost rank 0: no sign of life", 0))
        with pytest.raises(PeerLostError, match="no sign of life"):
            awaited.wait()
        with pytest.raises(PeerLostError, match="no sign of life"):
            one.start_recv(0, tag(1), into(np.empty(1024, np.uint8))).wait()


@on_every_link
def test_a_death_ends_waits_that_are_under_way(kind, impatient):
    with linked(kind) as (zero, one):
        errors = []

        def wait(handle):
            with pytest.raises(PeerLostError) as caught:
                handle.wait()
            errors.append(caught.value.world_rank)

        threads = [
            in_thread(lambda h=handle: wait(h))
            for handle in (
                one.start_recv(0, tag(1), into(np.empty(1))),
                one.start_send(0, tag(2), np.zeros(BIG)),
            )
        ]
        until(lambda: one._asleep)
        zero._peers[1].link._sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(20)
        assert errors == [0, 0]


def fed(data: bytes) -> PolledTransport:
    """A rank whose peer, rank 0, sends `data` and ends."""
    mine, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    return PolledTransport("tcp", 1, 5.0, {0: TcpLink(mine)}, 0)


def header(nbytes: int, meta: bytes = b"meta") -> bytes:
    return frames.pack_header(frames.MESSAGE, tag(1), meta, nbytes, 1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost:4711\r\n\r\n", "no frame begins with b'GET / HT'"),
        (b"", "ended without a goodbye"),
        (header(100)[:20], "ended without a goodbye"),
        (header(100, b"m" * 4000)[:2000], "ended without a goodbye"),
        (header(100) + b"x" * 99, "ended without a goodbye"),
        (b"mdf1\x01\0\xff\xff" + bytes(28), "65535 bytes of meta"),
        (b"mdf1\x01\0\0\0" + bytes(16) + b"\xff" * 8 + bytes(4), "18446744073709551615 of payload"),
        (header(100)[:-5] + b"?meta", "checksum is wrong"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:12],
)
def test_what_is_no_frame_ends_the_link(data, says, impatient):
    transport = fed(data)
    try:
        with pytest.raises(CommError, match=says):
            transport.start_recv(0, tag(1), into(np.empty(100, np.uint8))).wait()
    finally:
        transport.close()


def fuzz(count: int, seed: int) -> None:
    """Frames damaged in one way or another: an error or the right bytes, never anything else."""
    random = np.random.default_rng(seed)
    good = header(64) + bytes(range(64))
    for _ in range(count):
        data = bytearray(good * 3)
        match random.integers(5):
            case 0:
                data = bytearray(random.bytes(random.integers(1, 300)))
            case 1:
                data = data[: random.integers(len(data))]
            case 2:
                for place in random.integers(0, len(data), random.integers(1, 9)):
                    data[place] = random.integers(256)
            case 3:
                place = random.integers(len(data))
                data[place:place] = random.bytes(random.integers(1, 40))
            case 4:
                first, second = sorted(random.integers(0, len(data), 2))
                del data[first:second]
        transport = fed(bytes(data))
        try:
            for _ in range(3):
                seen = []
                got = np.zeros(64, np.uint8)
                accept = lambda meta, nbytes: seen.append((meta, nbytes)) or got  # noqa: E731, B023
                transport.start_recv(0, tag(1), accept).wait()
                assert seen == [(b"meta", 64)]
        except CommError:
            pass
        finally:
            transport.close()


def test_damaged_frames(impatient):
    fuzz(150, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_damaged_frames_at_length(impatient):
    fuzz(20_000, seed=2)


# --- many wake-ups
# ---------------------------------------------------------------------------------------------------


def ping_pong(kind: str, rounds: int, sizes: tuple[int, ...]) -> None:
    """Every message waits for the one before, and every wait sleeps: a lost wake-up shows as a
    TimeoutError."""

    def play(transport: PolledTransport, peer: int, starts: bool) -> None:
        for turn in range(rounds):
            n = sizes[turn % len(sizes)]
            got = np.empty(n, np.int64)
            arriving = transport.start_recv(peer, tag(1), into(got))
            if starts:
                transport.start_send(peer, tag(1), np.full(n, turn)).wait()
            arriving.wait()
            assert (got == turn).all()
            if not starts:
                transport.start_send(peer, tag(1), got).wait()

    first, second = MAKERS[kind]()
    child = os.fork()
    transport = PolledTransport(
        kind, int(child == 0), 20.0, {int(child != 0): second if child == 0 else first}, 0
    )
    if child == 0:
        try:
            play(transport, 0, False)
            os._exit(0)
        finally:
            os._exit(1)
    second._sock.close()
    try:
        play(transport, 1, True)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        transport.close()


@on_every_link
def test_no_wake_up_is_lost(kind):
    ping_pong(kind, 160, (1, 1000, 1, 200_000))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@on_every_link
def test_no_wake_up_is_lost_at_length(kind):
    ping_pong(kind, 300_000, (1, 1, 1, 100, 1, 30_000))


def test_close_twice_and_makers_cover_every_kind():
    assert set(MAKERS) == set(KINDS)
    with linked("shm") as (zero, _one):
        zero.close()
        zero.close()


@pytest.mark.soak
def test_a_peer_that_reads_nothing_is_no_link_that_loses_packets():
    """Its system acknowledges all that fits, and then says that there is no room: nothing is sent
    again."""
    mine, theirs = tcp_links()
    filling = np.zeros(1 << 20, np.uint8)
    while mine.write(b"", filling):
        pass
    time.sleep(acceptor.SILENCE + 3)
    assert not mine.resends() and not theirs.resends()
    assert not mine.silent() and not theirs.silent()
    assert theirs.read_into(np.zeros(1 << 20, np.uint8))
    assert not mine._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), (
        "nor has the kernel ended it"
    )
    theirs.close()
    mine.close()
    assert not mine.resends(), "nor is a closed one"
