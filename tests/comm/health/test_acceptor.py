"""The acceptor: nothing hangs up on a rank that has proven itself, however many strangers call."""

import contextlib
import errno
import os
import socket
import threading
import time

import pytest
from helpers import LIMIT, SOON

from minidist.comm import wire
from minidist.comm.health import acceptor
from minidist.comm.health.acceptor import Acceptor, call, listen
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.tcp import dial
from minidist.comm.transports.tcp import listen as listen_tcp

TOKEN = wire.new_token()
JOBS = 200


def run(target, *args):
    threading.Thread(target=target, args=args, daemon=True).start()


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@contextlib.contextmanager
def accepting(enter, monkeypatch, room=4):
    """An acceptor of one rank with so little room, whose caller accepts; and its address."""
    monkeypatch.setattr(acceptor, "PENDING", room)
    with listen("127.0.0.1", 0) as listener:
        acceptor_ = Acceptor(listener, TOKEN, enter, 1, run, "test")
        yield acceptor_, listener.getsockname()
        acceptor_.close()


def greet(address, greeted):
    """Call as a rank does, until it is in."""
    greeted.append(
        call(lambda: socket.create_connection(address, SOON), TOKEN, {}, time.monotonic() + LIMIT)
    )


def crowd(acceptor_, address, stack, count=8):
    """So many strangers come, more than there is room for, and say nothing."""
    for _ in range(count):
        stack.enter_context(socket.create_connection(address, SOON))
        acceptor_.accept()


def test_a_crowd_hangs_up_on_no_rank_that_has_proven_itself(monkeypatch):
    """The crowd comes while the rank is being seated."""
    seating = threading.Event()
    crowded = threading.Event()
    greeted = []
    seats = []

    def enter(sock, hello):
        seats.append(sock)
        seating.set()
        assert crowded.wait(SOON)
        sock.sendall(b"welcome")

    with accepting(enter, monkeypatch) as (acceptor_, address), contextlib.ExitStack() as stack:
        threading.Thread(target=greet, args=(address, greeted), daemon=True).start()
        acceptor_.accept()
        assert seating.wait(SOON)
        crowd(acceptor_, address, stack)
        crowded.set()
        wait_for(lambda: greeted)
        with greeted[0] as sock, seats[0]:
            sock.settimeout(SOON)
            assert sock.recv(7) == b"welcome"


# --- a system that has no more
# ---------------------------------------------------------------------------------------


class Deaf:
    """A listener of a process that has no file left."""

    def __init__(self, listener, number):
        self.listener = listener
        self.number = number

    def accept(self):
        raise OSError(self.number, os.strerror(self.number))

    def shutdown(self, how):
        self.listener.shutdown(how)


@pytest.mark.parametrize("number", acceptor.EXHAUSTED)
def test_a_caller_for_whom_the_system_has_nothing_left_is_told_of(number, monkeypatch):
    failed = []
    with (
        accepting(lambda sock, hello: None, monkeypatch) as (acceptor_, address),
        contextlib.ExitStack() as stack,
    ):
        acceptor_._fail = failed.append
        crowd(acceptor_, address, stack, count=2)
        acceptor_.listener = Deaf(acceptor_.listener, number)
        wait_for(lambda: (acceptor_.accept(), failed)[1])
        assert failed[0].errno == number
        assert not acceptor_.strangers, "they were sent away first"


def test_a_caller_for_whom_there_is_no_thread_is_told_of(monkeypatch):
    failed = []

    def refuse(target, *args):
        raise RuntimeError("can't start new thread")

    with (
        accepting(lambda sock, hello: None, monkeypatch) as (acceptor_, address),
        contextlib.ExitStack() as stack,
    ):
        acceptor_._run = refuse
        acceptor_._fail = failed.append
        crowd(acceptor_, address, stack, count=1)
    assert "can't start new thread" in str(failed[0])


def test_a_monitor_without_a_file_for_the_next_rank_ends_the_job():
    monitor = Monitor(2, TOKEN)
    monitor.start()
    link = MonitorClient(monitor.address, TOKEN, 0, 2, limit=LIMIT, grace=60.0)
    monitor._acceptor.listener = Deaf(monitor.listener, errno.EMFILE)
    with socket.create_connection(monitor.address):
        loss = link.wait_for_loss(SOON)
    link.close()
    monitor.close()
    assert str(loss).startswith("the job's monitor (process")
    assert "Too many open files; let `ulimit -n` be 16" in str(loss)


def test_a_rank_without_a_file_for_the_next_says_so(monkeypatch):
    listener = listen_tcp("127.0.0.1")
    monkeypatch.setattr(
        full_mesh,
        "Acceptor",
        lambda sock, *args, **options: Acceptor(Deaf(sock, errno.EMFILE), *args, **options),
    )
    with full_mesh.listening(listener), pytest.raises(OSError, match="Too many open files"):
        full_mesh.connect(0, range(2), listener, lambda _: None, TOKEN, LIMIT)


# --- the same, many times
# --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flood(address):
    """Strangers call all the time, as fast as a thread can, and stay as long as they may."""
    over = threading.Event()

    def strangers():
        kept = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection(address, 1.0))
            for sock in kept[:-100]:
                sock.close()
            del kept[:-100]
        for sock in kept:
            sock.close()

    thread = threading.Thread(target=strangers, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.soak
def test_a_flood_ends_no_job_at_its_monitor(caplog):
    for number in range(JOBS):
        monitor = Monitor(4, TOKEN)
        monitor.start()
        links = []
        with flood(monitor.address):
            for rank in range(4):
                links.append(MonitorClient(monitor.address, TOKEN, rank, 4, limit=60.0, grace=60.0))
            threads = [threading.Thread(target=link.meet, args=({},)) for link in links]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert monitor.loss is None, (number, monitor.loss)
        for link in links:
            link.goodbye()
        monitor.close()


@pytest.mark.soak
def test_a_flood_ends_no_job_at_its_ranks(caplog):
    for _ in range(JOBS):
        listener = listen_tcp("127.0.0.1")
        told = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        with full_mesh.listening(listener), flood(listener.getsockname()):
            found = {}

            def join(rank, found=found, listener=listener, told=told):
                found[rank] = full_mesh.connect(
                    rank, range(3), listener, lambda _: dial(told, LIMIT), TOKEN, 60.0
                )

            admits = threading.Thread(target=join, args=(0,))
            admits.start()
            dials = [
                threading.Thread(
                    target=lambda rank=rank, found=found, told=told: found.setdefault(
                        rank,
                        call(
                            lambda: dial(told, LIMIT),
                            TOKEN,
                            {"world_rank": rank},
                            time.monotonic() + 60.0,
                        ),
                    )
                )
                for rank in (1, 2)
            ]
            for thread in dials:
                thread.start()
            for thread in (admits, *dials):
                thread.join()
            for rank in (1, 2):
                found[rank].sendall(bytes([rank]))
                assert found[0][rank].recv(1) == bytes([rank])
        for sock in (found[1], found[2], *found[0].values()):
            sock.close()
