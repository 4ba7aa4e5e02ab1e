"""Bytes that nobody of this job would send: refused, logged with the address, without a crash and
without a trace.

5,000 of them in the default run, a million in the soak; and a monitor under siege, which goes on to
serve its ranks.
"""

import contextlib
import ctypes
import gc
import hmac
import logging
import os
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from leftovers import open_files

from minidist.comm import wire
from minidist.comm.health.acceptor import TOLD
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.wait_state import State
from minidist.comm.transport import Tag
from minidist.comm.transports.progress import frames
from minidist.errors import CommError

TOKEN = wire.new_token()
OTHER = wire.new_token()
# what the accepting side draws in fuzz(): the stranger's answer is written beforehand
NONCE = bytes(32)
GROWTH = 10 << 20  # bytes that all of it may leave behind


def damaged(draw, data):
    """`data` cut short, lengthened, with a bit turned, a piece doubled, or two pieces exchanged."""
    at, other = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    match draw.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + draw.randbytes(draw.randrange(1, 40)) + data[at:]
        case 2:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 3:
            return data[:other] + data[at:other] + data[other:]
    return data[other:] + data[at:other] + data[:at]


def hello_for(nonce, token, hello):
    """Return what a process that knows `token` answers to `nonce`."""
    ours = os.urandom(32)
    packed = wire.pack(hello)
    proof = hmac.digest(token, b"connecting" + nonce + ours + packed, "sha256")
    return struct.pack(">32s32sH", ours, proof, len(packed)) + packed


def stranger(draw, nonce):
    """Return what somebody without the token answers to the monitor's opening."""
    hello = {"world_rank": draw.randrange(-1, 4), "world_size": 2, "pid": 1, "host": "here"}
    match draw.randrange(6):
        case 0:
            return draw.randbytes(draw.randrange(300))
        case 1:
            return draw.choice(
                (
                    b"",
                    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"\x16\x03\x01\x02\x00\x01\x00",
                    b"SSH-2.0-x\r\n",
                )
            )
        case 2:
            return hello_for(nonce, OTHER, hello)
        case 3:
            return hello_for(draw.randbytes(32), TOKEN, hello)  # an old conversation, said again
        case 4:
            return struct.pack(">32s32sH", bytes(32), bytes(32), 65535) + bytes(draw.randrange(200))
    good = hello_for(nonce, TOKEN, hello)
    # who says it rightly may say what he likes afterwards
    while (data := damaged(draw, good)).startswith(good):
        pass
    return data


def handshake(draw, pair):
    """One stranger at the door: never in."""
    ours, theirs = pair
    theirs.sendall(stranger(draw, NONCE))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(CommError):
        wire.admit(ours, TOKEN, 1.0)


def control_frame(draw, pair):
    """A frame of the control connection, damaged: an error of ours, or a value."""
    ours, theirs = pair
    state = State(sent={1: 3}, taken={2: 5}, doing="x.py:3").packed()
    packed = wire.pack({"kind": "waits", "round": draw.randrange(9), "state": state})
    theirs.sendall(damaged(draw, struct.pack(">I", len(packed)) + packed))
    theirs.shutdown(socket.SHUT_WR)
    with contextlib.suppress(CommError):
        while True:
            value = wire.recv_frame(ours, 1.0)
            with contextlib.suppress(TypeError, ValueError, KeyError):
                State.unpacked(value["state"])


def message_header(draw, pair):
    """The header of a message between ranks, damaged: an error of ours, or the header itself behind
    other bytes."""
    good = frames.pack_header(
        frames.MESSAGE,
        Tag(draw.getrandbits(64), draw.getrandbits(64)),
        draw.randbytes(draw.randrange(60)),
        draw.getrandbits(40),
        64,
    )
    data = damaged(draw, good) if draw.random() < 0.8 else draw.randbytes(128)
    with contextlib.suppress(CommError):
        if len(data) >= frames.HEADER_BYTES:
            length = frames.header_length(data[: frames.HEADER_BYTES], 64)
            if len(data) >= length:
                assert frames.parse_header(data[:length]) == frames.parse_header(good)


def resident():
    """Bytes of memory that this process has in use, without what is free and not yet given back."""
    gc.collect()
    # of glibc; else the heap may stay as large as it once was
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def fuzz(count, seed):
    """`count` of all kinds; afterwards no file is open, and little memory is taken, that was not
    before."""
    draw = random.Random(seed)
    for number in range(count):
        if number == count // 10:  # caches are warm
            files = open_files()
            memory = resident()
        kind = draw.choice((handshake, control_frame, message_header))
        if kind is message_header:
            kind(draw, None)
            continue
        pair = socket.socketpair()
        with pair[0], pair[1]:
            kind(draw, pair)
    assert not open_files() - files
    growth = resident() - memory
    assert growth < GROWTH
    return growth


@pytest.fixture
def _same_nonce(monkeypatch):
    monkeypatch.setattr("minidist.comm.wire.os.urandom", lambda count: NONCE)


@pytest.mark.usefixtures("_same_nonce")
def test_five_thousand_frames_and_handshakes():
    fuzz(5_000, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_same_nonce")
def test_a_million_frames_and_handshakes():
    print(f"memory up by {fuzz(1_000_000, seed=2) / (1 << 20):.1f} MiB")


def siege(count, seed, caplog):
    """A monitor with one of two ranks, strangers that come all the time, then the other rank."""
    caplog.set_level(logging.WARNING)
    draw = random.Random(seed)
    monitor = Monitor(2, TOKEN)
    monitor.start()
    links = [MonitorClient(monitor.address, TOKEN, 0, 2, limit=20)]
    slow = []
    told = []
    try:
        for number in range(count):
            sock = socket.create_connection(monitor.address)
            if draw.random() < 0.1:
                slow.append(sock)  # says nothing, and stays
                continue
            with sock, contextlib.suppress(OSError):
                opening = sock.recv(40, socket.MSG_WAITALL)
                sock.sendall(stranger(draw, opening[8:]))
                if draw.random() < 0.1:  # knows the token, is no rank that is missing
                    sock.sendall(
                        hello_for(
                            opening[8:],
                            TOKEN,
                            {"world_rank": 0, "world_size": 2, "pid": 1, "host": ""},
                        )
                    )
            if number % 50 == 49:
                told += caplog.messages
                caplog.clear()
        links.append(MonitorClient(monitor.address, TOKEN, 1, 2, limit=20))
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda link: link.meet({}), links)) == [[{}, {}]] * 2
        assert monitor.loss is None
        told += caplog.messages
        assert 0 < len(told) <= TOLD
        assert all("127.0.0.1:" in line and TOKEN.decode() not in line for line in told)
    finally:
        for each in (*links, *slow, monitor):
            each.close()


def test_a_monitor_under_siege_serves_its_ranks(caplog):
    siege(230, 3, caplog)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_monitor_under_siege_for_long(caplog):
    siege(30_030, 4, caplog)
