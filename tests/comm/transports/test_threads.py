"""Running ranks as threads: results, and how failures are told."""

import re
import threading
import time

import pytest
from helpers import LIMIT, limit_comes

from minidist.comm import call_site
from minidist.comm.transports.progress.mailbox import Mailbox
from minidist.comm.transports.threads import name_rank, run_threads
from minidist.device import account
from minidist.errors import CommError, PeerLostError, TimeoutError


def test_results_come_in_rank_order_and_arguments_arrive():
    assert run_threads(lambda world, a, b: (world.rank, world.size, a + b), (1, 2), size=4) == [
        (rank, 4, 3) for rank in range(4)
    ]


def test_each_rank_has_its_own_ledger_and_account():
    ledgers, accounts = zip(
        *run_threads(lambda world: (world.ledger, account.current()), size=3), strict=True
    )
    assert len(set(map(id, ledgers))) == len(set(map(id, accounts))) == 3
    assert account.current() not in accounts


class OddError(Exception):
    """An exception whose message is not its first argument."""

    def __init__(self, number):
        super().__init__(number)

    def __str__(self):
        return "odd"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "rank 1: bad"),
        (PeerLostError("rank 7 gone", world_rank=7), "rank 1: rank 7 gone"),
        (CommError("rank 1 waited"), "rank 1 waited"),
        (SystemExit("stop"), "rank 1: stop"),
        (CommError("world rank 1 of 3: no"), "world rank 1 of 3: no"),
        (CommError("rank 12 left"), "rank 1: rank 12 left"),
    ],
)
def test_the_failure_keeps_its_type_and_names_its_rank(error, message):
    def ranks(world):
        if world.rank == 1:
            raise error
        world.barrier()

    with pytest.raises(type(error)) as caught:
        run_threads(ranks, size=3)
    assert str(caught.value) == message
    assert caught.value is error
    assert caught.traceback[-1].name == "ranks"  # the traceback leads to the line that raised


@pytest.mark.parametrize(
    "error",
    [KeyError("name"), OSError(2, "no such file"), OddError(3), RuntimeError(), SystemExit(3)],
)
def test_a_message_that_has_no_room_gets_a_cause(error):
    before = str(error)
    try:
        try:
            raise error from TypeError("the first cause")
        except type(error) as raised:
            named = name_rank(raised, 2)
    except SystemExit:
        raise AssertionError("it escaped") from None
    assert named is error
    assert str(named) == before
    assert str(named.__cause__).startswith("rank 2 failed at ")
    assert "test_threads.py:" in str(named.__cause__)
    assert isinstance(named.__cause__.__cause__, TypeError)


def test_the_first_failure_is_the_one_told():
    def ranks(world):
        if world.rank == 2:
            raise ValueError("the root cause")
        try:
            world.barrier()
        finally:
            if world.rank == 0:
                raise RuntimeError("a consequence")

    with pytest.raises(ValueError, match="rank 2: the root cause"):
        run_threads(ranks, size=3)


def test_survivors_hear_of_the_failure_before_the_run_ends(monkeypatch):
    """Also where telling them takes its time, and the launcher wakes meanwhile because another rank
    has ended."""
    told = Mailbox.abort

    def abort(mailbox, error):
        if isinstance(error, PeerLostError):
            time.sleep(0.02)
        told(mailbox, error)

    monkeypatch.setattr(Mailbox, "abort", abort)
    heard = []

    def job(world):
        if world.rank == 0:
            raise ArithmeticError("on purpose")
        if world.rank == 2:
            time.sleep(0.01)
            return
        try:
            world.recv(0)
        except CommError as error:
            heard.append(error)
            raise

    with pytest.raises(ArithmeticError):
        run_threads(job, size=3)
    assert [type(error) for error in heard] == [PeerLostError]


@pytest.mark.parametrize("unbuffered", [False, True])
def test_who_hangs_and_where(unbuffered, monkeypatch):
    threads = {}
    over = []
    waits = []
    limit_comes(monkeypatch, lambda: any(each._lasting for each in waits))

    def ranks(world):
        threads[world.rank] = threading.current_thread()
        while world.rank == 1 and not over:
            time.sleep(0.01)
        if world.rank == 0:
            while len(threads) < 3:
                time.sleep(0.001)
            threads[2].join()
            waits.append(world.transport.waits)
            try:
                world.recv(src=1)
            finally:
                over.append(True)

    with pytest.raises(TimeoutError, match="2 of 3 ranks had not ended after 20 s") as caught:
        run_threads(ranks, size=3, limit=LIMIT, unbuffered=unbuffered)
    text = str(caught.value)
    assert re.search(
        r"rank 0 calls recv\(\), its call 1, at \S*test_threads.py:\d+, and has waited \d.\d s",
        text,
    )
    assert re.search(r"rank 1 waits for no rank, at \S*test_threads.py:\d+; late by \d.\d s", text)
    assert "rank 2 has ended" in text


def test_a_rank_that_waits_for_nobody_is_named_too(monkeypatch):
    monkeypatch.setattr("minidist.comm.transports.threads._GRACE", 0.1)
    over = threading.Event()
    threads = {}
    alone = []
    limit_comes(monkeypatch, lambda: bool(alone))

    def ranks(world):
        threads[world.rank] = threading.current_thread()
        if world.rank == 1:
            while len(threads) < 2:
                time.sleep(0.001)
            threads[0].join()
            alone.append(True)
            world.transport.waits.listener.note()
            over.wait(60)

    late = r"1 of 2 ranks had not ended after 20 s:\n  rank 0 has ended\n  rank 1 waits .*py:\d+"
    with pytest.raises(TimeoutError, match=late):
        run_threads(ranks, size=2, limit=LIMIT)
    over.set()
    threads[1].join()  # before the next test counts threads


def test_no_line_of_a_running_rank_is_read_while_nothing_is_told(monkeypatch):
    """CPython 3.11.7 has crashed reading a frame of another thread that just returned."""
    read = []
    monkeypatch.setattr(call_site, "doing", lambda thread: read.append(thread) or "")

    def late(world):
        for _ in range(3):
            time.sleep(0.4 * world.rank)
            world.barrier()

    run_threads(late, size=2)
    assert read == []
