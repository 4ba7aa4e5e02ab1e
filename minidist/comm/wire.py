"""What every connection of a job speaks: a handshake that lets nobody else in, small frames, and values as bytes.

    connecting side (greet)                                accepting side (admit)
                                     <---                  MAGIC, nonce A
    nonce B, proof("connecting", A, B, hello), hello  --->
                                     <---                  proof("accepting", B, A, hello), or zeros: refused

A proof is HMAC-SHA256 under the job's token (RFC 2104). Both nonces are fresh, so an old conversation cannot be
replayed; the role is part of the proof, so nobody's own words can be sent back to him; the accepting side shows its
proof only to who has shown one. The token itself never travels, and no message here prints it. What follows the
handshake is neither encrypted nor signed: loopback or a private network is assumed, as MPI and NCCL assume it.

Values travel as msgpack with a few extensions, never as pickle: reading a message runs no code of its sender.
Every read is limited in length and in time.
"""

import enum
import functools
import hmac
import math
import os
import re
import secrets
import select
import socket
import struct
import time
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from minidist.errors import CommError, DtypeError, HandshakeError, PeerLostError, TimeoutError

MAGIC = b"minidist"
PROOF_BYTES = NONCE_BYTES = 32
HELLO_BYTES = 4096          # a stranger can make us read no more than this
FRAME_BYTES = 16 << 20      # an admitted rank can make us read no more than this at once
NESTING = 32                # tuples and sets inside one another, packed or read
REFUSED = bytes(PROOF_BYTES)
TOKEN_BYTES = 32

_HELLO_HEADER = struct.Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")
_FRAME_HEADER = struct.Struct(">I")


def new_token() -> bytes:
    """A job's secret: 64 hexadecimal digits drawn from the system's randomness (256 bits)."""
    return secrets.token_hex(TOKEN_BYTES).encode()


# --- the handshake ---------------------------------------------------------------------------------------------------

def greet(sock: socket.socket, token: bytes, hello: dict[str, Any], limit: float) -> None:
    """Prove to the accepting side that we belong to its job, and have it prove the same; `hello` says who we are.

    Cost:    one and a half round trips, 146 bytes and the packed hello (at most 4 KiB).
    Raises:  HandshakeError naming the address: another token, not minidist, or a connection closed in between;
             TimeoutError after `limit` seconds.
    """
    deadline, peer = _deadline(limit), address_of(sock)
    try:
        opening = _read(sock, len(MAGIC) + NONCE_BYTES, deadline, peer)
        if not opening.startswith(MAGIC):
            raise HandshakeError(f"{peer} is not a minidist job: it began with {opening[:8]!r}; check address and port")
        theirs, ours, packed = opening[len(MAGIC):], os.urandom(NONCE_BYTES), pack(hello)
        if len(packed) > HELLO_BYTES:
            raise HandshakeError(f"the hello to {peer} takes {len(packed)} bytes; {HELLO_BYTES} are allowed")
        proof = _proof(token, b"connecting", theirs, ours, packed)
        _write(sock, _HELLO_HEADER.pack(ours, proof, len(packed)) + packed, deadline, peer)
        answer = _read(sock, PROOF_BYTES, deadline, peer)
    except (PeerLostError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise HandshakeError(f"{peer} ended the handshake: {error}") from error
    if answer == REFUSED:
        raise HandshakeError(f"{peer} refused this process: its job token is another one (a different job on that "
                             "port, or a different MINIDIST_TOKEN)")
    if not hmac.compare_digest(answer, _proof(token, b"accepting", ours, theirs, packed)):
        raise HandshakeError(f"{peer} did not prove that it belongs to this job; nothing was sent to it")


def admit(sock: socket.socket, token: bytes, limit: float) -> dict[str, Any]:
    """Let the connecting side in only if it knows the job's token; returns its hello.

    Raises:  HandshakeError naming the address: a wrong token, random bytes, or a connection closed in between;
             TimeoutError after `limit` seconds, however slowly bytes dribble in. The caller closes the socket.
    """
    deadline, peer = _deadline(limit), address_of(sock)
    ours = os.urandom(NONCE_BYTES)
    try:
        _write(sock, MAGIC + ours, deadline, peer)
        theirs, proof, length = _HELLO_HEADER.unpack(_read(sock, _HELLO_HEADER.size, deadline, peer))
        if length > HELLO_BYTES:
            raise HandshakeError(f"{peer} was refused: it announced a hello of {length} bytes; {HELLO_BYTES} allowed")
        packed = _read(sock, length, deadline, peer)
        if not hmac.compare_digest(proof, _proof(token, b"connecting", ours, theirs, packed)):
            _write(sock, REFUSED, deadline, peer)
            raise HandshakeError(f"{peer} was refused: it does not know this job's token")
        hello = unpack(packed)
        if not isinstance(hello, dict):
            raise HandshakeError(f"{peer} was refused: its hello is a {type(hello).__name__}, not a dict")
        _write(sock, _proof(token, b"accepting", theirs, ours, packed), deadline, peer)
    except (PeerLostError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise HandshakeError(f"{peer} ended the handshake: {error}") from error
    return hello


def _proof(token: bytes, role: bytes, first: bytes, second: bytes, hello: bytes) -> bytes:
    """HMAC-SHA256 of who speaks, both nonces and the hello; all parts but the last have a fixed length."""
    return hmac.digest(token, role + first + second + hello, "sha256")


# --- frames ----------------------------------------------------------------------------------------------------------

def send_frame(sock: socket.socket, obj: Any, limit: float | None = 10.0) -> None:
    """Send one value as a frame: its length in 4 bytes, then its packed bytes. At most 16 MiB, within `limit` s."""
    packed = pack(obj)
    if len(packed) > FRAME_BYTES:
        raise CommError(f"a control frame of {len(packed)} bytes; {FRAME_BYTES} are allowed")
    _write(sock, _FRAME_HEADER.pack(len(packed)) + packed, _deadline(limit), address_of(sock))


def recv_frame(sock: socket.socket, limit: float | None = 10.0) -> Any:
    """Receive one value sent by send_frame; limit None waits for ever (for a listener thread whose socket is closed).

    Raises:  PeerLostError if the connection ended; TimeoutError after `limit` s; CommError if what came is no frame.
    """
    deadline, peer = _deadline(limit), address_of(sock)
    (length,) = _FRAME_HEADER.unpack(_read(sock, _FRAME_HEADER.size, deadline, peer))
    if length > FRAME_BYTES:
        raise CommError(f"{peer} announced a frame of {length} bytes; {FRAME_BYTES} are allowed")
    return unpack(_read(sock, length, deadline, peer))


def address_of(sock: socket.socket) -> str:
    """host:port of the other end, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a connection that is gone"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local socket"


def _deadline(limit: float | None) -> float | None:
    return None if limit is None else time.monotonic() + limit


def _read(sock: socket.socket, count: int, deadline: float | None, peer: str) -> bytes:
    """Exactly `count` bytes, whatever the pieces they come in."""
    data, filled = bytearray(count), 0
    view = memoryview(data)
    while filled < count:
        _wait(sock, select.POLLIN, deadline, f"{peer} sent {filled} of {count} bytes")
        try:
            got = sock.recv_into(view[filled:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except ConnectionError as error:
            raise PeerLostError(f"{peer} broke the connection ({error})") from error
        if got == 0:
            raise PeerLostError(f"{peer} closed the connection")
        filled += got
    return bytes(data)


def _write(sock: socket.socket, data: bytes, deadline: float | None, peer: str) -> None:
    """All of `data`. Polling and MSG_DONTWAIT leave the socket's own mode alone: another thread may be reading."""
    view = memoryview(data)
    while view:
        _wait(sock, select.POLLOUT, deadline, f"{peer} left {len(view)} of {len(data)} bytes unread")
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL):]
        except BlockingIOError:
            continue
        except ConnectionError as error:
            raise PeerLostError(f"{peer} broke the connection ({error})") from error


def _wait(sock: socket.socket, event: int, deadline: float | None, late: str) -> None:
    poll = select.poll()
    poll.register(sock, event)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000  # poll counts milliseconds
    if not poll.poll(left):
        raise TimeoutError(f"{late} before the limit was reached")


# --- values ----------------------------------------------------------------------------------------------------------

class Kind(enum.IntEnum):
    """msgpack extension codes of what msgpack does not know by itself."""

    ARRAY, SCALAR, TUPLE, SET, FROZENSET, COMPLEX, INTEGER = range(1, 8)


_PLAIN_DTYPE = re.compile(r"[<>|](?:[biufcSUV]\d{1,6}|[mM]8(?:\[\w+\])?)")    # NumPy's own, with byte order
_BASES: tuple[type[Any], ...] = (int, float, str, bytes, list, dict)         # subclasses travel as these


def pack(obj: Any) -> bytes:
    """A value as bytes: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, NumPy arrays and scalars
    of every dtype but object and structured ones, bfloat16 and its kin included; nested as one likes (tuples: 32 deep).

    Cost:    an array is copied twice.
    Raises:  DtypeError naming the type that cannot travel.
    """
    return _pack(obj, 0)


def unpack(data: bytes) -> Any:
    """The value that pack made into bytes; arrays are new and writable. Raises CommError if `data` is anything else."""
    return _unpack(data, 0)


def _pack(obj: Any, depth: int) -> bytes:
    if depth > NESTING:
        raise DtypeError(f"tuples and sets nested more than {NESTING} deep cannot travel between processes")
    try:
        packed = msgpack.packb(obj, default=functools.partial(_encode, depth=depth), strict_types=True)
    except (ValueError, UnicodeError) as error:  # nested lists too deep, a string that is not Unicode
        raise DtypeError(f"a {type(obj).__name__} cannot travel between processes: {error}") from error
    return bytes(packed)


def _encode(obj: Any, depth: int) -> Any:
    """What msgpack does not know, as an extension; a subclass of a type it knows, as that type."""
    match obj:
        case np.ndarray():
            parts = [_dtype_text(obj.dtype), list(obj.shape), obj.tobytes()]
            return msgpack.ExtType(Kind.ARRAY, _pack(parts, depth + 1))
        case np.generic():
            return msgpack.ExtType(Kind.SCALAR, _pack([_dtype_text(obj.dtype), obj.tobytes()], depth + 1))
        case tuple():
            return msgpack.ExtType(Kind.TUPLE, _pack(list(obj), depth + 1))
        case set() | frozenset():
            code = Kind.SET if isinstance(obj, set) else Kind.FROZENSET
            return msgpack.ExtType(code, _pack(list(obj), depth + 1))
        case complex():
            return msgpack.ExtType(Kind.COMPLEX, _pack([obj.real, obj.imag], depth + 1))
        case int() if type(obj) is int:  # more than 64 bits
            return msgpack.ExtType(Kind.INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
    for base in _BASES:
        if isinstance(obj, base):
            return base(obj)
    raise DtypeError(f"a {type(obj).__module__}.{type(obj).__qualname__} cannot travel between processes; "
                     "send numbers, strings, NumPy arrays, or lists, tuples, sets and dicts of them")


def _unpack(data: bytes, depth: int) -> Any:
    if depth > NESTING:
        raise CommError(f"malformed message: nested more than {NESTING} deep")
    try:
        return msgpack.unpackb(data, ext_hook=functools.partial(_decode, depth=depth), strict_map_key=False)
    except CommError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CommError(f"malformed message of {len(data)} bytes: {type(error).__name__} {error}") from error


def _decode(code: int, data: bytes, depth: int) -> Any:
    if code == Kind.INTEGER:
        return int.from_bytes(data, "little", signed=True)
    parts = _unpack(data, depth + 1)
    match code, parts:
        case Kind.ARRAY, [str(dtype), list(shape), bytes(raw)] if all(type(n) is int and n >= 0 for n in shape):
            return _array(_dtype_named(dtype), shape, raw)
        case Kind.SCALAR, [str(dtype), bytes(raw)]:
            return _array(_dtype_named(dtype), [], raw)[()]
        case Kind.TUPLE, list():
            return tuple(parts)
        case Kind.SET, list():
            return set(parts)
        case Kind.FROZENSET, list():
            return frozenset(parts)
        case Kind.COMPLEX, [float(real), float(imaginary)]:
            return complex(real, imaginary)
    raise CommError(f"malformed message: extension {code} holds a {type(parts).__name__}")


def _array(dtype: np.dtype[Any], shape: list[int], raw: bytes) -> np.ndarray:
    """An array of its own memory; the bytes that came must be exactly those the shape needs."""
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise CommError(f"malformed message: {len(raw)} bytes for {dtype} of shape {tuple(shape)}")
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def _dtype_text(dtype: np.dtype[Any]) -> str:
    """numpy's code with byte order ('<f4'), or the name of one of ml_dtypes' types ('bfloat16')."""
    if _is_extra(dtype.name):
        return dtype.name
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise DtypeError(f"an array of dtype {dtype} cannot travel between processes; send its fields one by one")
    return dtype.str


def _dtype_named(text: str) -> np.dtype[Any]:
    if _is_extra(text):
        return np.dtype(getattr(ml_dtypes, text))
    if not _PLAIN_DTYPE.fullmatch(text):
        raise CommError(f"malformed message: no dtype {text[:40]!r}")
    return np.dtype(text)


def _is_extra(name: str) -> bool:
    """Whether ml_dtypes adds a scalar type of this name to NumPy's."""
    kind = getattr(ml_dtypes, name, None)
    return isinstance(kind, type) and issubclass(kind, np.generic)
