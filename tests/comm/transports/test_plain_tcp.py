"""The transport to read: how its jobs end. What it promises while all goes well is
tests/comm/test_conformance.py's."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from helpers import LIMIT, SOON
from leftovers import nothing_left
from linked import into, tag, tcp_pair

import minidist as md
from minidist.comm import wire
from minidist.comm.transports.plain_tcp import (
    HANDSHAKE_LIMIT,
    HEADER,
    PlainTcp,
    connect,
    receive,
    send_all,
)
from minidist.errors import CommError, DeadlockError, PeerLostError, TimeoutError

FULL = np.zeros(64 << 20, np.uint8)  # more than a connection holds


def run(fn, size=2):
    return md.run(fn, size=size, transport="plain-tcp", limit=LIMIT)


def test_a_killed_rank_ends_the_job_with_its_name():
    def work(world):
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    start = time.monotonic()
    with nothing_left(), pytest.raises(PeerLostError, match="rank 1 .* was killed by SIGKILL"):
        run(work, size=3)
    assert time.monotonic() - start < SOON


def test_a_deadlock_is_told():
    def work(world):
        world.recv(src=1 - world.rank)

    start = time.monotonic()
    with nothing_left(), pytest.raises(DeadlockError):
        run(work)
    assert time.monotonic() - start < SOON


def test_a_message_of_a_rank_that_has_left_is_still_there():
    def work(world):
        if world.rank == 0:
            time.sleep(0.3)
            return world.recv(src=1).tolist()
        world.send(np.arange(3), dst=0)
        return []

    assert run(work) == [[0, 1, 2], []]


def test_ranks_that_never_connect_are_named():
    class Link:
        world_rank = 0
        world_size = 3

        def meet(self, info):
            return [info] * 3

    with (
        nothing_left(),
        pytest.raises(TimeoutError, match=r"rank 0 waited 0\.1 s for ranks \[1, 2\] to connect"),
    ):
        connect(Link(), b"token", 0.1, host="127.0.0.1")


@pytest.mark.parametrize("strangers", [1, pytest.param(200, marks=pytest.mark.soak)])
def test_silent_strangers_neither_delay_a_rank_nor_end_it(strangers):
    callers = []
    greeting = []

    class Link:
        world_rank = 0
        world_size = 2

        def meet(self, info):
            for _ in range(strangers + 1):
                callers.append(socket.create_connection(info["address"]))  # the last is the rank
            greeting.append(
                threading.Thread(
                    target=wire.greet, args=(callers[-1], b"token", {"world_rank": 1}, LIMIT)
                )
            )
            greeting[0].start()
            return [info] * 2

    start = time.monotonic()
    with nothing_left():
        transport = connect(Link(), b"token", LIMIT, host="127.0.0.1")
        assert time.monotonic() - start < HANDSHAKE_LIMIT / 2
        assert transport._connections[1].getpeername() == callers[-1].getsockname()
        greeting[0].join(LIMIT)  # it reads the answer, and may be later than this end
        transport.close()
        for caller in callers:
            caller.close()


def one_end(limit=LIMIT):
    """A transport of rank 0, and the other end of its connection, which a test plays."""
    mine, theirs = tcp_pair()
    return PlainTcp(0, limit, {1: mine}), theirs


def test_abort_ends_a_send_that_blocks():
    transport, theirs = one_end()
    with nothing_left(), theirs:
        timer = threading.Timer(0.1, transport.abort, (CommError("enough"),))
        timer.start()
        with pytest.raises(CommError, match="enough"):
            transport.start_send(1, tag(1), FULL)
        timer.join()
        transport.close()


def test_the_limit_ends_a_send_that_blocks():
    transport, theirs = one_end(limit=0.2)
    with (
        theirs,
        pytest.raises(TimeoutError, match=r"rank 0 waited 0.2 s for rank 1 to take a message"),
    ):
        transport.start_send(1, tag(1), FULL)
    transport.close()


def test_a_connection_that_ends_is_told_where_no_monitor_tells_more(monkeypatch):
    monkeypatch.setattr("minidist.comm.transports.plain_tcp.REASON_LIMIT", 0.0)
    transport, theirs = one_end()
    theirs.close()
    with pytest.raises(PeerLostError, match="rank 0 lost rank 1: its connection ended"):
        transport.start_recv(1, tag(1), into(np.zeros(1))).wait()
    transport.close()


def test_what_travels_is_a_header_of_28_bytes_and_the_message():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        send_all(mine, HEADER.pack(7, 1, 2, 8) + b"me", np.ones(1))
        assert HEADER.size == 28
        assert HEADER.unpack(receive(theirs, HEADER.size).tobytes()) == (7, 1, 2, 8)
        assert receive(theirs, 2).tobytes() == b"me"
        assert receive(theirs, 8).view(np.float64) == [1.0]
        mine.close()
        with pytest.raises(EOFError):
            receive(theirs, 1)
