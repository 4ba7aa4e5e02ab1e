"""Drawn scenarios: several threads of a rank send and receive at once, with right and wrong likely
headers, and the sender may leave or die.

Every message has a content of its own, so a lost, doubled or exchanged one is seen.
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from linked import KINDS, MAKERS, add, nobody_tells

from minidist.comm.transport import Tag
from minidist.comm.transports.progress.poll_loop import PolledTransport
from minidist.errors import PeerLostError, ShapeError

LIMIT = 5.0
SLOW = 2.0  # seconds that no wait may take
HUGE = 3_000_000  # bytes: more than a link holds


def content(thread, number, nbytes):
    """The payload of a thread's message: whole float64, so that it can be added, too."""
    return (np.arange(nbytes, dtype=np.uint32) * 7 + 31 * thread + number).astype(np.uint8)


def drawn_messages(draw, short):
    """(tag, bytes, meta, what is done with it, what its receiver thinks likely) of a thread's
    messages."""
    near = (short - 1, short, short + 1, short + 64, draw.randrange(short, 3 * short))
    messages = []
    for _ in range(draw.randrange(3, 25)):
        nbytes = draw.choice((0, 1, 8, 63, 64, 65, draw.randrange(5000), *near))
        if draw.random() < 0.02:
            nbytes = HUGE
        use = draw.choice(("copy", "copy", "add", "refuse"))
        likely = draw.choice(("right", "array", "none", "longer", "shorter", "meta"))
        messages.append(
            (
                draw.randrange(2),
                nbytes // 8 * 8 if use == "add" else nbytes,
                b"call %d" % draw.randrange(3),
                use,
                likely,
            )
        )
    return messages


def send(draw, transport, thread, messages, dies_at):
    """Send a thread's messages; at one of them the connection ends, unless `dies_at` is None."""
    peer = 1 - transport.world_rank
    started = []
    for number, (tag, nbytes, meta, use, _) in enumerate(messages):
        if number == dies_at:
            transport._peers[peer].link._sock.shutdown(2)
            return
        sent = content(thread, number, nbytes)
        if use == "add":
            sent = np.full(nbytes // 8, number + 1.0)
        started.append(transport.start_send(peer, Tag(thread, tag), sent, meta))
        if draw.random() < 0.3:
            started.pop(draw.randrange(len(started))).wait()
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.002)
    for handle in started:
        handle.wait()


def receive(draw, transport, thread, messages, dies):
    """Receive a thread's messages, posted early or late, in the order of each tag, and compare
    them."""
    pending = []
    order = list(enumerate(messages))
    if draw.random() < 0.4:
        order.sort(key=lambda entry: entry[1][0])  # one tag after the other
    for number, (tag, nbytes, meta, use, likely) in order:
        unaligned = draw.randrange(8)
        got = np.zeros(nbytes + 8, np.uint8)[unaligned : unaligned + nbytes]
        if use == "add":
            got = np.full(nbytes // 8, 100.0)

        def accept(meta, nbytes, got=got, use=use):
            if use == "refuse":
                raise ShapeError("refused")
            time.sleep(0)
            return got

        known = {
            "right": (meta, nbytes, None),
            "array": (meta, nbytes, None if use == "refuse" else got),
            "none": None,
            "longer": (meta, nbytes + draw.choice((1, 8, 64, 1000)), None),
            "shorter": (meta, nbytes - 8, None) if nbytes >= 8 else None,
            "meta": (b"call 9", nbytes, got),
        }[likely]
        handle = transport.start_recv(
            1 - transport.world_rank,
            Tag(thread, tag),
            accept,
            add if use == "add" else None,
            known,
        )
        pending.append((number, nbytes, use, got, handle))
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.002)
        while pending and draw.random() < 0.4:
            check(thread, *pending.pop(draw.randrange(len(pending))), dies)
    draw.shuffle(pending)
    for entry in pending:
        check(thread, *entry, dies)


def check(thread, number, nbytes, use, got, handle, dies):
    start = time.monotonic()
    try:
        handle.wait()
    except PeerLostError:
        assert dies
        return
    except ShapeError:
        assert use == "refuse"
        return
    finally:
        assert time.monotonic() - start < SLOW
    assert use != "refuse"
    if use == "add":
        assert (got == 101.0 + number).all()
    else:
        np.testing.assert_array_equal(got, content(thread, number, nbytes))


def scenario(seed):
    """Run the scenario of a seed: up to three threads a rank, to one rank or both ways."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    spins = draw.choice((0, 0, 20))
    sys.setswitchinterval(draw.choice((1e-5, 1e-4, 5e-3)))
    first, second = MAKERS[kind]()
    zero = PolledTransport(kind, 0, LIMIT, {1: first}, spins)
    one = PolledTransport(kind, 1, LIMIT, {0: second}, spins)
    plans = [drawn_messages(draw, first.short) for _ in range(draw.choice((1, 2, 3)))]
    dies_at = draw.randrange(3) if draw.random() < 0.3 else None
    both_ways = draw.random() < 0.5
    dies = dies_at is not None

    def sends(thread, transport, messages):
        try:
            send(
                random.Random(f"{seed} {thread} {transport.world_rank}"),
                transport,
                thread,
                messages,
                dies_at if thread == transport.world_rank == 0 else None,
            )
        except PeerLostError:
            assert dies

    def receives(thread, transport, messages):
        receive(
            random.Random(f"{thread} {transport.world_rank} {seed}"),
            transport,
            thread,
            messages,
            dies,
        )

    try:
        with ThreadPoolExecutor(4 * len(plans)) as pool:
            sending, receiving = [], []
            for thread, messages in enumerate(plans):
                sending.append(pool.submit(sends, thread, zero, messages))
                receiving.append(pool.submit(receives, thread, one, messages))
                if both_ways:
                    sending.append(pool.submit(sends, thread, one, messages[::-1]))
                    receiving.append(pool.submit(receives, thread, zero, messages[::-1]))
            for work in sending:
                work.result()
            if not both_ways:
                zero.close()  # what it has sent still arrives
            for work in receiving:
                work.result()
        if not dies:
            peer = one._peers[0]
            assert not (peer.receives or peer.posted or peer.unexpected or peer.unexpected_bytes)
            assert not one.unfinished
    finally:
        zero.close()
        one.close()


@pytest.fixture
def own_interval():
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def check_scenarios(monkeypatch, seeds):
    nobody_tells(monkeypatch)
    # a thread that sleeps beside its message is seen
    monkeypatch.setattr("minidist.comm.transports.progress.engine._HEARS", LIMIT)
    before = threading.active_count()
    for seed in seeds:
        try:
            scenario(seed)
        except BaseException as error:
            error.add_note(f"scenario({seed})")
            raise
    assert threading.active_count() <= before + 1


def test_threads_at_once(monkeypatch, own_interval):
    check_scenarios(monkeypatch, range(30))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_threads_at_once_at_length(monkeypatch, own_interval):
    check_scenarios(monkeypatch, range(1000, 6000))
