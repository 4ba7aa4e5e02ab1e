"""control: ranks meet, a death is known everywhere at once, strangers stay outside."""

import contextlib
import functools
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import SOON, lateness, nobodys_port

from minidist.comm import wire
from minidist.comm.health import acceptor
from minidist.comm.health.failure import Failure, how_it_ended
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.seats import Seat
from minidist.comm.health.wait_state import State, Waits
from minidist.comm.health.watchdog import Watchdog
from minidist.errors import (
    CommError,
    ConfigError,
    HandshakeError,
    LaunchError,
    LinkLostError,
    PeerLostError,
    TimeoutError,
)

TOKEN = wire.new_token()


@contextlib.contextmanager
def job(size, *, present=None, grace=60.0, how=None):
    """A monitor and the links of its ranks (all, or those `present`); afterwards no thread is
    left."""
    before = set(threading.enumerate())
    monitor = Monitor(size, TOKEN, how=how)
    links = []
    monitor.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            connect = functools.partial(
                MonitorClient, monitor.address, TOKEN, world_size=size, grace=grace
            )
            links += pool.map(
                lambda rank: connect(world_rank=rank), range(size) if present is None else present
            )
        yield monitor, links
    finally:
        for link in links:
            link.close()
        monitor.close()
    deadline = time.monotonic() + SOON
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def losses(links):
    """A list per link that fills with (error, when)."""
    noted = [[] for _ in links]
    for link, notes in zip(links, noted, strict=True):
        link.on_loss(lambda error, notes=notes: notes.append((error, time.monotonic())))
    return noted


def wait_for(condition, limit=SOON):
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def test_ranks_meet_in_world_rank_order_as_often_as_they_like():
    with job(5) as (_, links), ThreadPoolExecutor(5) as pool:
        for turn in range(3):
            infos = list(
                pool.map(
                    lambda link, turn=turn: link.meet({"port": 100 * turn + link.world_rank}), links
                )
            )
            assert infos == [[{"port": 100 * turn + rank} for rank in range(5)]] * 5


def test_who_did_not_come_is_named():
    with job(4, present=[0, 2]) as (_, links):
        # one has come when the other does
        for link, missing in zip(links, ("1, 2, 3", "1, 3"), strict=True):
            link.limit = 0.2
            with pytest.raises(TimeoutError, match=f"ranks {missing} did not join"):
                link.meet({})


def test_goodbye_of_all_is_a_good_end():
    with job(3) as (monitor, links):
        for link in links[:2]:
            link.goodbye()
        assert not monitor.wait(0.05)
        links[2].goodbye()
        assert monitor.wait(SOON)
        assert monitor.loss is None


def test_a_lost_connection_is_told_to_every_other_rank_within_milliseconds():
    with job(8, how=lambda seat: "was killed by SIGKILL") as (monitor, links):
        noted = losses(links)
        with lateness() as late:
            started = time.monotonic()
            links[5]._sock.shutdown(socket.SHUT_RDWR)  # what the kernel does when the process dies
            links[5]._closed = True
            wait_for(lambda: all(notes for rank, notes in enumerate(noted) if rank != 5))
        last = max(when for rank, notes in enumerate(noted) if rank != 5 for _, when in notes)
        assert last - started < 0.25 + 3 * max(late)
        for rank, notes in enumerate(noted):
            if rank != 5:
                [(error, _)] = notes
                assert error.world_rank == 5
                assert (
                    str(error)
                    == f"rank 5 (process {os.getpid()} on {platform.node()}) was killed by SIGKILL"
                )
        assert monitor.loss.world_rank == 5


def test_a_cut_link_between_a_living_rank_and_a_living_monitor_is_a_lost_link(caplog):
    with job(2) as (_, links):
        links[1].attach(Waits(), lambda error: None, lambda error: None)
        notes = losses(links)
        links[1]._sock.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: all(notes))
        told = [error for [(error, _)] in notes]
    assert [type(error) for error in told] == [LinkLostError, LinkLostError]
    assert "has lost its link to the monitor, its process runs" in str(told[0])
    assert "lost its connection to the job's monitor: it was cut, the monitor still runs" in str(
        told[1]
    )
    assert not caplog.text  # the monitor is not called to find that out


def test_before_the_ranks_have_met_no_rank_says_that_the_monitor_still_runs():
    """Rank 0 may listen in its place, to tell those that come late that it died."""
    with job(2) as (_, links):
        links[1]._sock.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: links[1].loss is not None)
        assert not links[1].loss.link
        assert "still runs" not in str(links[1].loss)


def test_the_first_of_two_deaths_is_the_jobs():
    """mpirun kills the others a moment after one has died; how each went takes a while to find
    out."""
    seen = threading.Event()  # the kernel may deliver two ends of connections in another order

    def how(seat):
        if seat.world_rank == 2:
            seen.set()
            time.sleep(0.05)
        return "was killed"

    for _ in range(10):
        seen.clear()
        with job(4, how=how) as (monitor, links):
            for rank in (2, 0, 1):
                links[rank]._closed = True
                links[rank]._sock.shutdown(socket.SHUT_RDWR)
                assert seen.wait(SOON)
            assert links[3].wait_for_loss(SOON).world_rank == 2


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_reported_exception_arrives_with_its_traceback():
    with job(3) as (_, links):
        noted = losses(links)
        assert links[1].report(raised(ZeroDivisionError("by nothing")))
        wait_for(lambda: noted[0] and noted[2])
        for rank in (0, 2):
            text = str(noted[rank][0][0])
            assert text.startswith(
                f"rank 1 (process {os.getpid()} on {platform.node()}) failed with "
                "ZeroDivisionError: by nothing\n"
            )
            assert "raise error" in text
        assert not noted[1]
        assert not links[0].report(ValueError("second")), "only the first failure is the job's"
        assert links[0].loss.status == 1


def test_who_cannot_report_any_more_first_hears_what_was_said():
    """Rank 0's listener is late: when its report fails, word that rank 1 was first waits in its
    socket."""
    with job(2) as (_, links):
        take = links[0]._take
        heard = threading.Event()
        links[0]._take = lambda frame: (heard.wait(5.0), take(frame))
        assert links[1].report(ConfigError("no such file"))
        links[0]._sock.shutdown(socket.SHUT_WR)
        threading.Timer(0.1, heard.set).start()
        assert not links[0].report(ConfigError("no such file"))
        assert links[0].loss.world_rank == 1


@pytest.mark.parametrize("cut", [False, True])
def test_without_a_monitor_rank_0_says_what_all_ranks_say(cut, monkeypatch):
    """The report cannot leave, or is not answered."""
    monkeypatch.setattr("minidist.comm.health.monitor_client.ANSWER_LIMIT", 0.1)
    with job(3) as (monitor, links):
        if cut:
            monitor.close()
            wait_for(lambda: all(link.loss for link in links))
        else:
            monitor._take = lambda seat, frame: None
        assert [link.report(ConfigError("no such file")) for link in links] == [True, False, False]
        assert [link.report(ValueError("mine alone")) for link in links] == [True] * 3


def test_who_sends_while_the_connection_ends_hears_of_a_lost_peer():
    """Not of a socket that the listener has closed meanwhile."""
    for _ in range(20):
        with job(1) as (monitor, [link]), ThreadPoolExecutor(1) as pool:
            ending = pool.submit(monitor.close)
            with pytest.raises(CommError):
                while True:
                    link._send({"kind": "missing", "round": 0})
            ending.result()


def test_a_monitor_that_hangs_up_on_who_has_failed_is_no_news():
    with job(2, present=[1]) as (monitor, links):
        [noted] = losses(links)
        links[0].report(TimeoutError("rank 0 did not join"))
        monitor.close()
        links[0].wait_until_released(2.0)
        assert not noted
        assert links[0].loss is None


def test_bad_input_asks_for_status_2():
    with job(2) as (monitor, links):
        links[0].report(ConfigError("no such file"))
        wait_for(lambda: links[1].loss)
        assert links[1].loss.status == monitor.loss.status == 2


def test_whoever_saw_a_peer_go_is_not_blamed_for_it(monkeypatch):
    """Rank 0's data connection to rank 1 breaks a moment before the monitor hears of rank 1's own
    failure."""
    monkeypatch.setattr("minidist.comm.health.monitor.BLAME_WAIT", SOON)
    with job(2) as (monitor, links), ThreadPoolExecutor(1) as pool:
        second = pool.submit(
            links[0].report, PeerLostError("rank 1 closed the connection", world_rank=1)
        )
        time.sleep(0.05)
        assert links[1].report(ValueError("the cause"))
        assert second.result() is False
        assert monitor.loss.world_rank == 1
        assert "the cause" in monitor.loss.how


def test_a_loss_before_the_callback_or_the_connection_is_told_too():
    with job(3, present=[0, 1]) as (monitor, links):
        monitor.lose(Failure(1, 4711, "elsewhere", "exited with status 3"))
        wait_for(lambda: links[0].loss)
        assert (
            str(losses(links[:1])[0][0][0])
            == "rank 1 (process 4711 on elsewhere) exited with status 3"
        )
        late = MonitorClient(monitor.address, TOKEN, 2, 3, grace=60)
        with pytest.raises(PeerLostError, match="4711"):
            late.meet({})
        late.close()


def test_a_loss_ends_a_meeting():
    with job(3) as (_, links), ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(link.meet, {}) for link in links[:2]]
        time.sleep(0.05)
        links[2].report(ValueError("not today"))
        for future in meeting:
            assert "not today" in str(future.exception(SOON))


def test_the_monitor_itself_may_die():
    with job(2) as (monitor, links):
        noted = losses(links)
        monitor.close()
        wait_for(lambda: all(noted))
        assert "monitor" in str(noted[0][0][0])


def test_the_state_that_is_told_last_is_the_later_one():
    """Two threads of a rank tell at once what it waits for; the first takes its time."""
    states = [State(doing="first"), State(doing="then")]
    heard = []
    begun = threading.Event()

    def state():
        own = states.pop(0)
        if states:
            begun.set()
            time.sleep(0.05)
        return own.packed()

    with job(1) as (monitor, [link]):
        monitor._watchdog.arbiter.heard = lambda rank, state, number: heard.append(state.doing)
        link._state = state
        first = threading.Thread(target=link.note)
        first.start()
        begun.wait()
        link.note()
        first.join()
        wait_for(lambda: len(heard) == 2)
    assert heard == ["first", "then"]


def test_who_does_not_end_is_ended(monkeypatch):
    ended = []
    monkeypatch.setattr("minidist.comm.health.monitor_client.end_process", ended.append)
    with job(3, grace=0.5) as (_, links):
        links[2].grace = 60.0
        links[1].report(ValueError("mine"))
        wait_for(lambda: links[2]._end_timer)
        links[2].goodbye()  # in time, and left alone
        assert links[2]._end_timer.finished.is_set()
        wait_for(lambda: len(ended) == 2)
        assert sorted(message.split(" s after ")[0] for message in ended) == [
            f"minidist: rank {rank} was still busy 0.5" for rank in (0, 1)
        ]
        assert "ValueError: mine" in max(ended, key=len)


@pytest.mark.parametrize(
    ("rank", "size", "why"), [(0, 2, "already there"), (2, 2, "no rank 2"), (1, 3, "has 2 ranks")]
)
def test_a_wrong_rank_is_refused_and_the_job_goes_on(rank, size, why, caplog):
    with job(2) as (_, links), ThreadPoolExecutor(2) as pool:
        with pytest.raises(HandshakeError, match=why):
            MonitorClient(links[0]._sock.getpeername(), TOKEN, rank, size, limit=SOON)
        assert list(pool.map(lambda link: link.meet({}), links)) == [[{}, {}]] * 2
        wait_for(lambda: why in caplog.text)
    assert "127.0.0.1:" in caplog.text


def test_a_wrong_token_is_refused_and_logged_with_the_address(caplog):
    with job(2) as (monitor, links), ThreadPoolExecutor(2) as pool:
        with pytest.raises(HandshakeError, match="token"):
            MonitorClient(monitor.address, wire.new_token(), 1, 2, limit=SOON)
        assert list(pool.map(lambda link: link.meet({}), links)) == [[{}, {}]] * 2
        wait_for(lambda: "127.0.0.1:" in caplog.text)
    assert TOKEN.decode() not in caplog.text


def test_a_crowd_of_silent_strangers_keeps_nobody_out(caplog, monkeypatch):
    """More connections than may be pending, none of which says a word; then the rightful ranks
    come."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(acceptor, "PENDING", 8)
    with job(2, present=[]) as (monitor, links), contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(monitor.address))
        links += [MonitorClient(monitor.address, TOKEN, rank, 2, limit=SOON) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda link: link.meet({}), links)) == [[{}, {}]] * 2
        assert len(monitor._acceptor.strangers) <= 8


def test_garbage_scanners_and_half_words_do_no_harm(caplog):
    caplog.set_level(logging.CRITICAL)
    with job(2) as (monitor, links), ThreadPoolExecutor(2) as pool:
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(300), bytes(66), b"\xff" * 5000):
            with socket.create_connection(monitor.address) as sock, contextlib.suppress(OSError):
                sock.sendall(data)
        assert list(pool.map(lambda link: link.meet({}), links)) == [[{}, {}]] * 2
        assert monitor.loss is None


@pytest.mark.parametrize(
    "frame",
    [
        {"kind": "dance"},
        [1, 2],
        {"no": "kind"},
        {"kind": "meet"},
        {"kind": "failed"},
        *(
            {"kind": "failed", "blames": None, "loss": forged}
            for forged in (
                {"world_rank": 1, "pid": 1, "host": "", "how": "ended well", "status": 0},
                {"world_rank": 0, "pid": 1, "host": "", "how": "was another"},
            )
        ),
    ],
)
def test_a_rank_that_speaks_nonsense_is_lost_not_the_monitor(frame):
    with job(2) as (monitor, links):
        wire.send_frame(links[1]._sock, frame)
        wait_for(lambda: links[0].loss)
        assert monitor.loss.world_rank == 1
        assert monitor.loss.status == 1


def test_a_taken_port_is_one_line():
    with (
        job(1) as (monitor, _),
        pytest.raises(LaunchError, match=r"cannot listen on 127.0.0.1:\d+") as caught,
    ):
        acceptor.listen(*monitor.address)
    assert "\n" not in str(caught.value)


def test_nobody_listens():
    with nobodys_port() as address, pytest.raises(TimeoutError, match="could not reach"):
        MonitorClient(address, TOKEN, 0, 1, limit=0.2)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (-9, "was killed by SIGKILL"),
        (-50, "was killed by signal 50"),
        (3, "exited with status 3"),
        (0, "exited with status 0 without goodbye"),
    ],
)
def test_how_a_process_ended(status, says):
    assert says in how_it_ended(status)


def test_a_line_is_one_write():
    """Where Python's own buffer is off, too: each packet that the socket gives is what one write
    brought."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        program = "from minidist.comm.health.failure import say_line; say_line('rank 1 is lost')"
        subprocess.run(
            [sys.executable, "-c", program],
            stderr=theirs,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            check=True,
        )
        assert ours.recv(100) == b"rank 1 is lost\n"


def test_a_process_that_has_ended_is_heard_to_the_end_first():
    """Its goodbye may wait behind others'; and its connection may stay open, where a child of it
    holds it."""
    here, there = socket.socketpair()
    with here, there:
        seat = Seat(1, 4711, "here", here)
        lost = []
        watchdog = Watchdog(2, lambda: {1: seat}, lambda: {1: seat}, lost.append, 1.0)
        wire.send_frame(there, {"kind": "goodbye"})
        watchdog._seen([seat], set(), {4711: "exited with status 0 without goodbye"})
        assert not lost
        wire.recv_frame(here)
        watchdog._seen([seat], set(), {4711: "exited with status 0 without goodbye"})
        assert [loss.world_rank for loss in lost] == [1]


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("localhost", "localhost"),
        ("a-name", ""),
    ],
)
def test_only_a_name_that_differs_between_machines_is_listened_for_at_all_addresses(host, place):
    assert acceptor.where_to_listen(host) == place


def test_a_process_that_starts_no_thread_any_more_has_a_signal_keep_its_time(monkeypatch):
    """Python 3.12 starts no thread at its own end: the failure is reported all the same."""

    def refuse(timer):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    alarms = []
    monkeypatch.setattr("minidist.comm.health.monitor_client.signal.alarm", alarms.append)
    with job(2, grace=2.5) as (_, links):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Timer, "start", refuse)
            assert links[1].report(ValueError("boom")) is True
        assert set(alarms) == {3}  # of rank 0, too, which hears of it in this process
        assert links[0].wait_for_loss(5.0).world_rank == 1
