"""Connections between all ranks: made also while strangers call; nobody else is let in; nothing is left open."""

import gc
import logging
import os
import socket
import threading
import time

import pytest

from minidist.comm import wire
from minidist.comm.transports import mesh
from minidist.errors import CommError, HandshakeError, TimeoutError

TOKEN = b"a token for tests"


def join_all(size: int, listeners: list[socket.socket], dial, tokens: dict[int, bytes] | None = None,
             limit: float = 5.0) -> list[dict[int, socket.socket] | CommError]:
    """mesh.join on threads; what each rank got, or raised."""
    results: list[dict[int, socket.socket] | CommError] = [CommError("not ended")] * size

    def one(rank: int) -> None:
        token = (tokens or {}).get(rank, TOKEN)
        try:
            results[rank] = mesh.join(rank, size, token, listeners[rank], lambda peer: dial(listeners[peer]), limit)
        except CommError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def tcp(listener: socket.socket) -> socket.socket:
    return mesh.dial_tcp(*listener.getsockname(), 1 << 16, 5.0)


def unix(listener: socket.socket) -> socket.socket:
    return mesh.dial_unix(listener.getsockname(), 5.0)


@pytest.mark.parametrize(("listen", "dial"), [(lambda: mesh.listen_tcp("127.0.0.1", 1 << 16), tcp),
                                              (mesh.listen_unix, unix)], ids=["tcp", "unix"])
def test_every_two_ranks_are_connected(listen, dial):
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    size = 5
    links = join_all(size, [listen() for _ in range(size)], dial)
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high].sendall(bytes([low, high]))
            assert links[high][low].recv(2) == bytes([low, high])
    assert all(sock.gettimeout() is None for rank in links for sock in rank.values())
    for sock in [sock for rank in links for sock in rank.values()]:
        sock.close()
    time.sleep(0.05)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_strangers_keep_nobody_waiting_and_are_logged(caplog):
    listeners = [mesh.listen_tcp("127.0.0.1", 1 << 16) for _ in range(3)]
    silent = [tcp(listeners[rank]) for rank in (0, 0, 1) for _ in range(5)]
    noisy = [tcp(listeners[0]) for _ in range(5)]
    for number, sock in enumerate(noisy):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * (number + 1) * 10)
    impostor = tcp(listeners[0])
    threading.Thread(target=lambda: pytest.raises(HandshakeError, wire.greet, impostor, b"guess", {"world_rank": 1}, 5),
                     daemon=True).start()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "minidist.comm"):
        links = join_all(3, listeners, tcp)
        assert time.monotonic() - start < 3
        assert [set(rank) for rank in links] == [{1, 2}, {0, 2}, {0, 1}]
        for sock in [*silent, *noisy, impostor, *(sock for rank in links for sock in rank.values())]:
            sock.close()
        deadline = time.monotonic() + 5
        while len(caplog.records) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "127.0.0.1" in caplog.text
    assert "token" in caplog.text
    assert "a token for tests" not in caplog.text


def test_a_rank_with_another_token_is_refused_and_those_who_wait_for_it_say_so():
    listeners = [mesh.listen_tcp("127.0.0.1", 1 << 16) for _ in range(2)]
    zero, one = join_all(2, listeners, tcp, {1: b"another"}, limit=0.5)
    assert isinstance(one, HandshakeError)
    assert isinstance(zero, TimeoutError)
    assert "rank 0 waited 0.5 s for a connection from ranks [1]" in str(zero)


def test_a_rank_that_was_admitted_already_is_refused(caplog):
    listener = mesh.listen_tcp("127.0.0.1", 1 << 16)
    callers = [tcp(listener) for _ in range(3)]

    def call(sock: socket.socket, rank: object) -> None:
        wire.greet(sock, TOKEN, {"world_rank": rank}, 5)

    threads = [threading.Thread(target=call, args=pair) for pair in zip(callers, (7, "1"), strict=False)]
    with caplog.at_level(logging.WARNING, "minidist.comm"):
        for thread in threads:
            thread.start()
        late = threading.Timer(0.2, call, (callers[2], 1))
        late.start()
        links = mesh.join(0, 2, TOKEN, listener, tcp, 5.0)
        late.join()
    assert set(links) == {1}
    assert "said it is rank 7" in caplog.text
    assert "said it is rank '1'" in caplog.text
    for sock in [*callers, *links.values()]:
        sock.close()


def test_nobody_listens():
    listeners = [mesh.listen_tcp("127.0.0.1", 1 << 16) for _ in range(2)]
    address = listeners[0].getsockname()
    listeners[0].close()
    with pytest.raises(CommError, match="rank 1 cannot connect to rank 0: .*refused"):
        mesh.join(1, 2, TOKEN, listeners[1], lambda rank: mesh.dial_tcp(*address, 1 << 16, 2.0), 2.0)
