"""wire: strangers do not get in, whatever they say and however slowly; frames keep their borders
and limits."""

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import linked
import numpy as np
import pytest
from helpers import SOON
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidist.comm import wire
from minidist.errors import CommError, HandshakeError, PeerLostError, TimeoutError

TOKEN = wire.new_token()


@contextlib.contextmanager
def tcp_pair():
    """Two ends of one loopback connection."""
    left, right = linked.tcp_pair()
    with left, right:
        yield left, right


def meet(connecting_token, accepting_token, hello=None):
    """Run both sides; returns (result or error of greet, result or error of admit)."""

    def outcome(function, *args):
        try:
            return function(*args)
        except CommError as error:
            return error

    with tcp_pair() as (left, right), ThreadPoolExecutor(2) as pool:
        greeting = pool.submit(
            outcome, wire.greet, left, connecting_token, hello or {"rank": 3}, SOON
        )
        admission = pool.submit(outcome, wire.admit, right, accepting_token, SOON)
        return greeting.result(), admission.result()


# --- the handshake
# ---------------------------------------------------------------------------------------------------


def test_both_sides_agree_and_the_hello_arrives():
    greeting, admission = meet(TOKEN, TOKEN, {"world_rank": 2, "host": "näme"})
    assert greeting is None
    assert admission == {"world_rank": 2, "host": "näme"}


def test_a_handshake_costs_what_its_docstring_says(monkeypatch):
    sent = []
    write = wire._write

    def count(sock, data, *rest):
        sent.append(len(data))
        write(sock, data, *rest)

    monkeypatch.setattr(wire, "_write", count)
    hello = {"rank": 3}
    meet(TOKEN, TOKEN, hello)
    assert len(sent) == 3 and sum(sent) == 138 + len(wire.pack(hello))
    assert "138 bytes and the packed hello" in wire.greet.__doc__


def test_a_wrong_token_is_refused_on_both_sides_with_the_address_and_without_the_token():
    other = wire.new_token()
    for error in meet(other, TOKEN):
        assert isinstance(error, HandshakeError)
        assert "127.0.0.1:" in str(error)
        assert "token" in str(error)
        assert TOKEN.decode() not in repr(error)
        assert other.decode() not in repr(error)


def test_an_oversized_hello_is_refused():
    with tcp_pair() as (left, right), ThreadPoolExecutor(1) as pool:
        admission = pool.submit(wire.admit, right, TOKEN, SOON)
        with left, pytest.raises(HandshakeError, match="the hello to .* takes"):
            wire.greet(left, TOKEN, {"name": "x" * wire.HELLO_BYTES}, SOON)
        assert isinstance(admission.exception(), CommError)


def relay(source, sink, count, change=lambda data: data):
    data = b""
    while len(data) < count:
        data += source.recv(count - len(data))
    sink.sendall(change(data))
    return data


def test_a_changed_hello_is_refused():
    with (
        tcp_pair() as (client, middle_client),
        tcp_pair() as (middle_server, server),
        ThreadPoolExecutor(2) as pool,
    ):
        greeting = pool.submit(wire.greet, client, TOKEN, {"rank": 3}, SOON)
        admission = pool.submit(wire.admit, server, TOKEN, SOON)
        relay(middle_server, middle_client, len(wire.MAGIC) + wire.NONCE_BYTES)
        length = wire._HELLO_HEADER.size + len(wire.pack({"rank": 3}))
        relay(middle_client, middle_server, length, lambda data: data[:-1] + b"\x04")
        relay(middle_server, middle_client, wire.PROOF_BYTES)
        for future in (greeting, admission):
            assert isinstance(future.exception(), HandshakeError)


def test_an_echo_of_our_own_words_is_no_proof():
    """Reflection: an accepting side that knows no token sends the connecting side's proof back."""
    with tcp_pair() as (client, thief), ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {}, SOON)
        thief.sendall(wire.MAGIC + bytes(32))
        header = thief.recv(wire._HELLO_HEADER.size, socket.MSG_WAITALL)
        thief.sendall(header[wire.NONCE_BYTES :][: wire.PROOF_BYTES])
        assert isinstance(greeting.exception(), HandshakeError)


def test_roles_are_bound_into_the_proof():
    """One who opens two connections to an accepting side cannot use what one of them says on the
    other."""
    proofs = {
        wire._proof(TOKEN, role, first, second, b"hello")
        for role in (b"connecting", b"accepting")
        for first in (b"a" * 32, b"b" * 32)
        for second in (b"a" * 32, b"b" * 32)
    }
    assert len(proofs) == 8


def test_a_replayed_conversation_is_refused():
    with (
        tcp_pair() as (client, middle_client),
        tcp_pair() as (middle_server, server),
        ThreadPoolExecutor(2) as pool,
    ):
        greeting = pool.submit(wire.greet, client, TOKEN, {"rank": 3}, SOON)
        admission = pool.submit(wire.admit, server, TOKEN, SOON)
        relay(middle_server, middle_client, len(wire.MAGIC) + wire.NONCE_BYTES)
        recorded = relay(
            middle_client, middle_server, wire._HELLO_HEADER.size + len(wire.pack({"rank": 3}))
        )
        relay(middle_server, middle_client, wire.PROOF_BYTES)
        assert greeting.result() is None
        assert admission.result() == {"rank": 3}
    with tcp_pair() as (thief, server), ThreadPoolExecutor(1) as pool:
        admission = pool.submit(wire.admit, server, TOKEN, SOON)
        thief.sendall(recorded)
        assert isinstance(admission.exception(), HandshakeError)


def test_a_slow_client_is_dropped_at_the_limit_however_it_dribbles():
    with tcp_pair() as (client, server), ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        admission = pool.submit(wire.admit, server, TOKEN, 0.3)
        with contextlib.suppress(OSError):
            while not admission.done():
                client.send(b"x")
                time.sleep(0.02)
        assert isinstance(admission.exception(), TimeoutError)
        assert time.monotonic() - started < 4.0


def test_something_else_on_the_port_is_named():
    with tcp_pair() as (client, web), ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {}, SOON)
        web.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something else entirely\r\n")
        assert "not a minidist job" in str(greeting.exception())


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_random_bytes_never_get_in(data):
    with tcp_pair() as (client, server), ThreadPoolExecutor(1) as pool:
        admission = pool.submit(wire.admit, server, TOKEN, 20.0)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert isinstance(admission.exception(), HandshakeError)


@pytest.mark.soak
def test_a_hundred_thousand_fuzzed_handshakes():
    """Every one refused, by an error of ours; a rightful rank still gets in after each thousand."""
    draw = np.random.default_rng(0)
    for index in range(100_000):
        with tcp_pair() as (client, server):
            count = int(draw.integers(0, 400))
            good = struct.pack(
                ">32s32sH", os.urandom(32), hmac.digest(b"no", b"x", "sha256"), count
            )
            client.sendall((good if index % 2 else b"") + draw.bytes(count))
            client.shutdown(socket.SHUT_WR)
            with pytest.raises(HandshakeError):
                wire.admit(server, TOKEN, 2.0)
        if index % 1000 == 0:
            assert meet(TOKEN, TOKEN)[0] is None


# --- frames
# ----------------------------------------------------------------------------------------------------------


def test_frames_keep_their_borders():
    with tcp_pair() as (left, right):
        for value in ({"kind": "meet"}, [1, 2, 3], None, np.arange(5)):
            wire.send_frame(left, value)
        assert wire.recv_frame(right) == {"kind": "meet"}
        assert wire.recv_frame(right) == [1, 2, 3]
        assert wire.recv_frame(right) is None
        np.testing.assert_array_equal(wire.recv_frame(right), np.arange(5))


def test_large_frames_in_both_directions_at_once():
    """Reading in one thread does not disturb writing in another on the same socket."""
    value = np.random.default_rng(0).bytes(4 << 20)
    with tcp_pair() as (left, right), ThreadPoolExecutor(4) as pool:
        received = [pool.submit(wire.recv_frame, end, 10.0) for end in (left, right)]
        for end in (left, right):
            pool.submit(wire.send_frame, end, value)
        assert [future.result() == value for future in received] == [True, True]


def test_frames_are_limited_in_length_on_both_sides():
    with tcp_pair() as (left, right):
        with pytest.raises(CommError, match="allowed"):
            wire.send_frame(left, bytes(wire.FRAME_BYTES))
        left.sendall(struct.pack(">I", wire.FRAME_BYTES + 1))
        with pytest.raises(CommError, match="allowed"):
            wire.recv_frame(right)


def test_frames_are_limited_in_time():
    with tcp_pair() as (left, right):
        left.sendall(struct.pack(">I", 100) + b"half")
        with pytest.raises(TimeoutError, match=r"4 of 100 bytes"):
            wire.recv_frame(right, 0.1)
        with pytest.raises(TimeoutError, match="unread"):
            for _ in range(100):
                wire.send_frame(left, bytes(1 << 20), 0.1)


def test_a_closed_connection_is_a_lost_peer():
    with tcp_pair() as (left, right):
        waiting = threading.Timer(0.05, left.close)
        waiting.start()
        with pytest.raises(PeerLostError, match="closed the connection"):
            wire.recv_frame(right)
        waiting.join()
