"""The mailbox: what sets the two kinds of link apart (what they share is test_conformance.py)."""

import threading
import time
import weakref

import numpy as np
import pytest

from minidist.comm.transport import Tag
from minidist.comm.transports.progress.mailbox import connect, loopback
from minidist.errors import TimeoutError

TAG = Tag(1, 2)


def test_a_buffered_send_is_complete_at_once_and_a_copy():
    a, b = connect(2, limit=1.0, unbuffered=False)
    x = np.arange(3)
    sent = a.start_send(1, TAG, x)
    assert sent.done()
    sent.wait()
    x += 10
    got = np.empty(3, int)
    b.start_recv(0, TAG, lambda meta, nbytes: got).wait()
    assert got.tolist() == [0, 1, 2]


def test_an_unbuffered_send_is_complete_when_it_was_taken():
    a, b = connect(2, limit=0.2, unbuffered=True)
    sent = a.start_send(1, TAG, np.arange(3))
    assert not sent.done()
    with pytest.raises(TimeoutError, match="rank 0 waited 0.2 s for rank 1 to take 24 bytes"):
        sent.wait()
    b.start_recv(0, TAG, lambda meta, nbytes: np.empty(3, int)).wait()
    assert sent.done()
    sent.wait()


def test_a_reduction_reads_the_senders_own_memory():
    a, b = connect(2, limit=1.0, unbuffered=True)
    x = np.ones(4)
    total = np.ones(4)
    pieces = []

    def add(target, start, piece):
        pieces.append(np.shares_memory(piece, x))
        target[start : start + len(piece)] += piece

    a.start_send(1, TAG, x)
    b.start_recv(0, TAG, lambda meta, nbytes: total, add).wait()
    assert pieces == [True]
    assert total.tolist() == [2.0] * 4


def test_loopback_is_a_link_to_oneself():
    link = loopback(5, limit=1.0)
    link.start_send(5, TAG, np.ones(2)).wait()
    got = np.zeros(2)
    link.start_recv(5, TAG, lambda meta, nbytes: got).wait()
    assert got.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("unbuffered", [False, True])
def test_who_carries_a_message_out_for_another_thread_keeps_nothing_of_it(unbuffered):
    """A group's worker carries it out, and then continues to wait for its own."""
    a, b = connect(2, limit=20.0, unbuffered=unbuffered)
    mine = np.zeros(1)
    x = np.ones(4)
    got = np.zeros(4)
    seen = [weakref.ref(x), weakref.ref(got)]
    waits = b.start_recv(0, TAG, lambda meta, nbytes: mine)
    waiter = threading.Thread(target=waits.wait)
    waiter.start()
    received = b.start_recv(0, Tag(1, 3), lambda meta, nbytes, got=got: got)
    sent = a.start_send(1, Tag(1, 3), x)
    until = time.monotonic() + 10
    while not (received.done() and sent.done()) and time.monotonic() < until:
        time.sleep(0.001)
    del x, got
    assert [ref() for ref in seen] == [None, None]
    a.start_send(1, TAG, np.ones(1))
    waiter.join(20)
    assert mine.tolist() == [1.0]
