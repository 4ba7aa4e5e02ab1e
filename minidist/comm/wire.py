"""The protocol of every connection of a job: a handshake that keeps strangers out, small frames,
and values as bytes.

    connecting side (greet)                                accepting side (admit)
                                     <---                  MAGIC, nonce A
    nonce B, proof("connecting", A, B, hello), hello  --->
                                     <---                  proof("accepting", B, A, hello), or
                                                           zeros: refused

A proof is HMAC-SHA256 under the job's token (RFC 2104). Both nonces are fresh, so an old
conversation cannot be replayed; the role is part of the proof, so a proof cannot be sent back to
its sender; the accepting side shows its proof only after it has checked the other proof. The token
itself is never sent, and no message here prints it. After the handshake, data is neither encrypted
nor signed: loopback or a private network is assumed, as in MPI and NCCL.

Values are packed by serialization.py: never as pickle. Every read is limited in length and time.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from minidist.comm.serialization import pack, unpack
from minidist.errors import CommError, HandshakeError, PeerLostError, TimeoutError

__all__ = [
    "address_of",
    "admit",
    "greet",
    "new_token",
    "pack",
    "recv_frame",
    "send_frame",
    "unpack",
]

MAGIC = b"minidist"
PROOF_BYTES = NONCE_BYTES = 32
HELLO_BYTES = 4096  # maximum bytes that a stranger can make us read
FRAME_BYTES = 16 << 20  # maximum bytes that an admitted rank can make us read at once
REFUSED = bytes(PROOF_BYTES)

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # macOS has none; Python ignores SIGPIPE
_HELLO_HEADER = struct.Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")
_FRAME_HEADER = struct.Struct(">I")


def new_token() -> bytes:
    """Return a job's secret: 64 hexadecimal digits of the system's randomness (256 bits)."""
    return secrets.token_hex(32).encode()


# --- the handshake
# ---------------------------------------------------------------------------------------------------


def greet(sock: socket.socket, token: bytes, hello: dict[str, Any], limit: float) -> None:
    """Prove to the accepting side that this process belongs to its job, and check its proof of the
    same; `hello` describes this process.

    Cost:    one and a half round trips, 138 bytes and the packed hello (at most 4 KiB).
    Raises:  HandshakeError naming the address: another token, not minidist, or a connection closed
             in between; TimeoutError after `limit` seconds.
    """
    deadline = _deadline(limit)
    peer = address_of(sock)
    try:
        opening = _read(sock, len(MAGIC) + NONCE_BYTES, deadline, peer)
        if not opening.startswith(MAGIC):
            raise HandshakeError(
                f"{peer} is not a minidist job: it began with {opening[:8]!r}; check address and "
                "port"
            )
        theirs = opening[len(MAGIC) :]
        ours = os.urandom(NONCE_BYTES)
        packed = pack(hello)
        if len(packed) > HELLO_BYTES:
            raise HandshakeError(
                f"the hello to {peer} takes {len(packed)} bytes; {HELLO_BYTES} are allowed"
            )
        proof = _proof(token, b"connecting", theirs, ours, packed)
        _write(sock, _HELLO_HEADER.pack(ours, proof, len(packed)) + packed, deadline, peer)
        answer = _read(sock, PROOF_BYTES, deadline, peer)
    except (PeerLostError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise HandshakeError(f"{peer} ended the handshake: {error}") from error
    if answer == REFUSED:
        raise HandshakeError(
            f"{peer} refused this process: its job token differs (a different job on that "
            "port, or a different MINIDIST_TOKEN)"
        )
    if not hmac.compare_digest(answer, _proof(token, b"accepting", ours, theirs, packed)):
        raise HandshakeError(
            f"{peer} did not prove that it belongs to this job; it has seen this process's hello, "
            "but neither token nor data"
        )


def admit(
    sock: socket.socket, token: bytes, limit: float, *, proven: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Admit the connecting side only if it knows the job's token; return its hello.

    Args:    proven: called after the other side's proof is checked and before ours is sent. An
             error that it raises refuses the other side.
    Raises:  HandshakeError naming the address: a wrong token, random bytes, or a connection closed
             in between; TimeoutError after `limit` seconds, however slowly bytes arrive. The caller
             closes the socket.
    """
    deadline = _deadline(limit)
    peer = address_of(sock)
    ours = os.urandom(NONCE_BYTES)
    try:
        _write(sock, MAGIC + ours, deadline, peer)
        theirs, proof, length = _HELLO_HEADER.unpack(
            _read(sock, _HELLO_HEADER.size, deadline, peer)
        )
        if length > HELLO_BYTES:
            raise HandshakeError(
                f"{peer} was refused: it announced a hello of {length} bytes; {HELLO_BYTES} allowed"
            )
        packed = _read(sock, length, deadline, peer)
        if not hmac.compare_digest(proof, _proof(token, b"connecting", ours, theirs, packed)):
            _write(sock, REFUSED, deadline, peer)
            raise HandshakeError(f"{peer} was refused: it does not know this job's token")
        hello = unpack(packed)
        if not isinstance(hello, dict):
            raise HandshakeError(
                f"{peer} was refused: its hello is a {type(hello).__name__}, not a dict"
            )
        proven()
        _write(sock, _proof(token, b"accepting", theirs, ours, packed), deadline, peer)
    except (PeerLostError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise HandshakeError(f"{peer} ended the handshake: {error}") from error
    return hello


def _proof(token: bytes, role: bytes, first: bytes, second: bytes, hello: bytes) -> bytes:
    """Return HMAC-SHA256 of the role, both nonces and the hello; all parts except the last have a
    fixed length."""
    return hmac.digest(token, role + first + second + hello, "sha256")


# --- frames
# ----------------------------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, obj: Any, limit: float | None = 10.0) -> None:
    """Send one value as a frame: its length in 4 bytes, then its packed bytes. At most 16 MiB,
    within `limit` s."""
    packed = pack(obj)
    if len(packed) > FRAME_BYTES:
        raise CommError(f"a control frame of {len(packed)} bytes; {FRAME_BYTES} are allowed")
    _write(sock, _FRAME_HEADER.pack(len(packed)) + packed, _deadline(limit), address_of(sock))


def recv_frame(sock: socket.socket, limit: float | None = 10.0) -> Any:
    """Receive one value sent by send_frame; limit None waits forever (for a listener thread whose
    socket is closed).

    Raises:  PeerLostError if the connection ended; TimeoutError after `limit` s; CommError if the
             bytes are not a frame.
    """
    deadline = _deadline(limit)
    peer = address_of(sock)
    (length,) = _FRAME_HEADER.unpack(_read(sock, _FRAME_HEADER.size, deadline, peer))
    if length > FRAME_BYTES:
        raise CommError(f"{peer} announced a frame of {length} bytes; {FRAME_BYTES} are allowed")
    return unpack(_read(sock, length, deadline, peer))


def address_of(sock: socket.socket) -> str:
    """Return host:port of the other end, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a connection that is gone"
    return written(name) if isinstance(name, tuple) else "a local socket"


def written(address: tuple[Any, ...]) -> str:
    """Return a host's address and a port in the usual form: 10.0.0.1:29500, [fd00::1]:29500."""
    host = str(address[0]).removeprefix("::ffff:")  # IPv4, as a listener for both sees it
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _deadline(limit: float | None) -> float | None:
    return None if limit is None else time.monotonic() + limit


def _read(sock: socket.socket, count: int, deadline: float | None, peer: str) -> bytes:
    """Return exactly `count` bytes, received in any number of pieces."""
    data = bytearray(count)
    filled = 0
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
    """Send all of `data`. Polling and MSG_DONTWAIT do not change the socket's own mode: another
    thread may be reading."""
    view = memoryview(data)
    while view:
        _wait(
            sock, select.POLLOUT, deadline, f"{peer} left {len(view)} of {len(data)} bytes unread"
        )
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | _NO_SIGNAL) :]
        except BlockingIOError:
            continue
        except ConnectionError as error:
            raise PeerLostError(f"{peer} broke the connection ({error})") from error


def _wait(sock: socket.socket, event: int, deadline: float | None, late: str) -> None:
    poll = select.poll()
    poll.register(sock, event)
    # poll counts milliseconds
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(left):
        raise TimeoutError(f"{late} before the limit was reached")
