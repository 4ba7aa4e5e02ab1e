"""wire: values survive the journey, strangers do not get in, and nothing malformed does harm."""

import contextlib
import enum
import hmac
import os
import socket
import struct
import threading
import time
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minidist.comm import wire
from minidist.errors import CommError, DtypeError, HandshakeError, PeerLostError, TimeoutError

TOKEN = wire.new_token()


@contextlib.contextmanager
def tcp_pair():
    """Two ends of one loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        yield left, right


def meet(connecting_token, accepting_token, hello=None, limit=5.0):
    """Run both sides; returns (result or error of greet, result or error of admit)."""
    def outcome(function, *args):
        try:
            return function(*args)
        except CommError as error:
            return error

    with tcp_pair() as (left, right), ThreadPoolExecutor(2) as pool:
        greeting = pool.submit(outcome, wire.greet, left, connecting_token, hello or {"rank": 3}, limit)
        admission = pool.submit(outcome, wire.admit, right, accepting_token, limit)
        return greeting.result(), admission.result()


# --- values ----------------------------------------------------------------------------------------------------------

def same(a, b):
    """Equal in type, dtype, shape and bits, all the way down."""
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b or a != a


arrays = hnp.arrays(
    st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"),
              hnp.complex_number_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes(),
              hnp.datetime64_dtypes(), hnp.timedelta64_dtypes()),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4))
keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=3)))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(),
                  arrays, st.sets(st.integers()), st.frozensets(st.text(max_size=3)))
values = st.recursive(atoms, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=4)), max_leaves=12)


@given(values)
def test_every_value_comes_back_the_same(value):
    assert same(wire.unpack(wire.pack(value)), value)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_ml_dtypes_travel_by_name(name):
    array = np.arange(-3, 3).reshape(2, 3).astype(getattr(ml_dtypes, name))
    assert same(wire.unpack(wire.pack(array)), array)
    assert same(wire.unpack(wire.pack(array[1, 1])), array[1, 1])


def test_arrays_are_copies_and_writable_whatever_the_layout():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    result = wire.unpack(wire.pack(array))
    result += 1
    np.testing.assert_array_equal(result, array + 1)
    np.testing.assert_array_equal(wire.unpack(wire.pack(np.asfortranarray(array))), array)


def test_subclasses_travel_as_what_they_extend():
    point = namedtuple("point", "x y")
    colour = enum.IntEnum("colour", "red green")
    assert wire.unpack(wire.pack([point(1, 2), colour.green, OrderedDict(a=1)])) == [(1, 2), 2, {"a": 1}]


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.zeros(2, "i4,f8"), lambda: 0, "\ud800"],
                         ids=["object", "object array", "structured", "function", "surrogate"])
def test_what_cannot_travel_is_named(value):
    with pytest.raises(DtypeError, match="cannot travel"):
        wire.pack({"deep": [value]})


def test_nesting_is_limited_on_both_sides():
    value = ()
    for _ in range(wire.NESTING + 1):
        value = (value,)
    with pytest.raises(DtypeError, match="nested"):
        wire.pack(value)
    data = wire.pack([])
    for _ in range(1000):
        data = wire.msgpack.packb(wire.msgpack.ExtType(wire.Kind.TUPLE, wire.msgpack.packb([1]) and data))
    with pytest.raises(CommError, match="nested"):
        wire.unpack(data)


def forged(kind, *parts):
    return wire.msgpack.packb(wire.msgpack.ExtType(kind, wire.msgpack.packb(list(parts))))


@pytest.mark.parametrize("data", [
    b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", wire.pack(1) + b"x",
    forged(wire.Kind.ARRAY, "<f4", [1 << 40], b""), forged(wire.Kind.ARRAY, "<f4", [-1], b""),
    forged(wire.Kind.ARRAY, "<f4", [2], b"1234"), forged(wire.Kind.ARRAY, "|O", [1], b"12345678"),
    forged(wire.Kind.ARRAY, "finfo", [1], b"12345678"), forged(wire.Kind.ARRAY, "<U999999999", [0], b""),
    forged(wire.Kind.ARRAY, "<f4", [0, 1 << 63], b""), forged(wire.Kind.ARRAY, "<f4", [1] * 99, b"1234"),
    forged(wire.Kind.SCALAR, "<M8[zz]", b"12345678"), forged(wire.Kind.SET, [1]), forged(99),
], ids=range(16))
def test_malformed_values_are_an_error_of_ours(data):
    with pytest.raises(CommError, match="malformed"):
        wire.unpack(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_worse_than_an_error(data):
    with contextlib.suppress(CommError):
        wire.unpack(data)


# --- the handshake ---------------------------------------------------------------------------------------------------

def test_both_sides_agree_and_the_hello_arrives():
    greeting, admission = meet(TOKEN, TOKEN, {"world_rank": 2, "host": "näme"})
    assert greeting is None
    assert admission == {"world_rank": 2, "host": "näme"}


def test_a_wrong_token_is_refused_on_both_sides_with_the_address_and_without_the_token():
    other = wire.new_token()
    for error in meet(other, TOKEN):
        assert isinstance(error, HandshakeError)
        assert "127.0.0.1:" in str(error)
        assert "token" in str(error)
        assert TOKEN.decode() not in repr(error)
        assert other.decode() not in repr(error)


def test_an_oversized_hello_is_refused():
    greeting, admission = meet(TOKEN, TOKEN, {"name": "x" * wire.HELLO_BYTES}, limit=0.5)
    assert isinstance(greeting, HandshakeError)
    assert isinstance(admission, CommError)


def relay(source, sink, count, change=lambda data: data):
    data = b""
    while len(data) < count:
        data += source.recv(count - len(data))
    sink.sendall(change(data))
    return data


def test_a_changed_hello_is_refused():
    with tcp_pair() as (client, middle_client), tcp_pair() as (middle_server, server), ThreadPoolExecutor(2) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {"rank": 3}, 5.0)
        admission = pool.submit(wire.admit, server, TOKEN, 5.0)
        relay(middle_server, middle_client, len(wire.MAGIC) + wire.NONCE_BYTES)
        length = wire._HELLO_HEADER.size + len(wire.pack({"rank": 3}))
        relay(middle_client, middle_server, length, lambda data: data[:-1] + b"\x04")
        relay(middle_server, middle_client, wire.PROOF_BYTES)
        for future in (greeting, admission):
            assert isinstance(future.exception(), HandshakeError)


def test_an_echo_of_our_own_words_is_no_proof():
    """Reflection: an accepting side that knows no token sends the connecting side's proof back."""
    with tcp_pair() as (client, thief), ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {}, 5.0)
        thief.sendall(wire.MAGIC + bytes(32))
        header = thief.recv(wire._HELLO_HEADER.size, socket.MSG_WAITALL)
        thief.sendall(header[wire.NONCE_BYTES:][:wire.PROOF_BYTES])
        assert isinstance(greeting.exception(), HandshakeError)


def test_roles_are_bound_into_the_proof():
    """One who opens two connections to an accepting side cannot use what one of them says on the other."""
    proofs = {wire._proof(TOKEN, role, first, second, b"hello")
              for role in (b"connecting", b"accepting") for first in (b"a" * 32, b"b" * 32)
              for second in (b"a" * 32, b"b" * 32)}
    assert len(proofs) == 8


def test_a_replayed_conversation_is_refused():
    with tcp_pair() as (client, middle_client), tcp_pair() as (middle_server, server), ThreadPoolExecutor(2) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {"rank": 3}, 5.0)
        admission = pool.submit(wire.admit, server, TOKEN, 5.0)
        relay(middle_server, middle_client, len(wire.MAGIC) + wire.NONCE_BYTES)
        recorded = relay(middle_client, middle_server, wire._HELLO_HEADER.size + len(wire.pack({"rank": 3})))
        relay(middle_server, middle_client, wire.PROOF_BYTES)
        assert greeting.result() is None
        assert admission.result() == {"rank": 3}
    with tcp_pair() as (thief, server), ThreadPoolExecutor(1) as pool:
        admission = pool.submit(wire.admit, server, TOKEN, 5.0)
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
        assert time.monotonic() - started < 1.0


def test_something_else_on_the_port_is_named():
    with tcp_pair() as (client, web), ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(wire.greet, client, TOKEN, {}, 5.0)
        web.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something else entirely\r\n")
        assert "not a minidist job" in str(greeting.exception())


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_random_bytes_never_get_in(data):
    with tcp_pair() as (client, server), ThreadPoolExecutor(1) as pool:
        admission = pool.submit(wire.admit, server, TOKEN, 2.0)
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
            good = struct.pack(">32s32sH", os.urandom(32), hmac.digest(b"no", b"x", "sha256"), count)
            client.sendall((good if index % 2 else b"") + draw.bytes(count))
            client.shutdown(socket.SHUT_WR)
            with pytest.raises(HandshakeError):
                wire.admit(server, TOKEN, 2.0)
        if index % 1000 == 0:
            assert meet(TOKEN, TOKEN)[0] is None


# --- frames ----------------------------------------------------------------------------------------------------------

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
