"""Connections between all ranks: made also while strangers call; nobody else is let in; nothing is
left open."""

import logging
import socket
import threading
import time
from typing import Any

import pytest
from helpers import LIMIT, SOON, nobodys_port
from leftovers import open_files

from minidist.comm import wire
from minidist.comm.health import acceptor
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.tcp import dial, listen
from minidist.errors import CommError, HandshakeError, LinkLostError, PeerLostError, TimeoutError

TOKEN = b"a token for tests"


class Meeting:
    """A meeting of ranks that are threads."""

    def __init__(
        self,
        world_rank: int,
        size: int,
        table: dict[int, dict[str, Any]],
        barrier: threading.Barrier,
    ) -> None:
        self.world_rank = world_rank
        self.size = size
        self.table = table
        self.barrier = barrier

    def meet(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        self.table[self.world_rank] = info
        self.barrier.wait(10)
        return [self.table[rank] for rank in range(self.size)]


def meetings(size: int) -> list[Meeting]:
    table: dict[int, dict[str, Any]] = {}
    barrier = threading.Barrier(size)
    return [Meeting(rank, size, table, barrier) for rank in range(size)]


def alone(world_rank: int, infos: list[dict[str, Any]]) -> Meeting:
    """The meeting of one rank whose peers are played by the test."""
    return Meeting(world_rank, len(infos), dict(enumerate(infos)), threading.Barrier(1))


def join(
    link: Meeting, info: dict[str, Any], listener: socket.socket, dial, token: bytes, limit: float
) -> dict[int, socket.socket]:
    """Meet, and connect to every other rank."""
    with full_mesh.listening(listener):
        infos = link.meet(info)
        return full_mesh.connect(
            link.world_rank,
            range(len(infos)),
            listener,
            lambda rank: dial(infos[rank]),
            token,
            limit,
        )


def join_all(
    size: int,
    listeners: list[socket.socket],
    dial,
    tokens: dict[int, bytes] | None = None,
    limit: float = 5.0,
) -> list[dict[int, socket.socket] | CommError]:
    """join() on threads; what each rank got, or raised."""
    results: list[dict[int, socket.socket] | CommError] = [CommError("not ended")] * size

    def one(link: Meeting) -> None:
        rank = link.world_rank
        token = (tokens or {}).get(rank, TOKEN)
        try:
            address = listeners[rank].getsockname()
            results[rank] = join(link, {"address": address}, listeners[rank], dial, token, limit)
        except CommError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(link,)) for link in meetings(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def tcp(info: dict[str, Any]) -> socket.socket:
    return dial(dict(zip(("host", "port"), info["address"], strict=True)), 5.0)


def unix(info: dict[str, Any]) -> socket.socket:
    return full_mesh.dial(socket.socket(socket.AF_UNIX), info["address"], 5.0)


def call(listener: socket.socket) -> socket.socket:
    """A connection of somebody who is no rank."""
    return tcp({"address": listener.getsockname()})


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("listen", "dial"),
    [(lambda: listen("127.0.0.1"), tcp), (full_mesh.listen_unix, unix)],
    ids=["tcp", "unix"],
)
def test_every_two_ranks_are_connected(listen, dial):
    before = open_files()
    size = 5
    links = join_all(size, [listen() for _ in range(size)], dial)
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high].sendall(bytes([low, high]))
            assert links[high][low].recv(2) == bytes([low, high])
    assert all(sock.gettimeout() is None for rank in links for sock in rank.values())
    for sock in [sock for rank in links for sock in rank.values()]:
        sock.close()
    deadline = time.monotonic() + SOON
    while open_files() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not open_files() - before


def test_strangers_keep_nobody_waiting_and_are_logged(caplog):
    listeners = [listen("127.0.0.1") for _ in range(3)]
    silent = [call(listeners[rank]) for rank in (0, 0, 1) for _ in range(5)]
    noisy = [call(listeners[0]) for _ in range(5)]
    for number, sock in enumerate(noisy):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * (number + 1) * 10)
    impostor = call(listeners[0])
    guess = threading.Thread(
        target=lambda: pytest.raises(
            HandshakeError, wire.greet, impostor, b"guess", {"world_rank": 1}, 5
        ),
        daemon=True,
    )
    guess.start()

    def after_the_guess(info: dict[str, Any]) -> socket.socket:
        guess.join(5)
        return tcp(info)

    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "minidist.comm"):
        links = join_all(3, listeners, after_the_guess)
        assert time.monotonic() - start < 4.5, "no silent stranger's limit of 5 s was waited for"
        assert [set(rank) for rank in links] == [{1, 2}, {0, 2}, {0, 1}]
        for sock in [
            *silent,
            *noisy,
            impostor,
            *(sock for rank in links for sock in rank.values()),
        ]:
            sock.close()
        deadline = time.monotonic() + 5
        while (
            len(caplog.records) < 6 or "token" not in caplog.text
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "127.0.0.1" in caplog.text
    assert "token" in caplog.text
    assert "a token for tests" not in caplog.text


@pytest.mark.parametrize(
    ("listen", "dial"),
    [(lambda: listen("127.0.0.1"), tcp), (full_mesh.listen_unix, unix)],
    ids=["tcp", "unix"],
)
def test_a_crowd_of_silent_strangers_keeps_no_rank_out(listen, dial, caplog):
    """They came first, and more of them than any room here holds; those that are sent away leave
    few lines."""
    listeners = [listen() for _ in range(3)]
    crowd = [
        dial({"address": listener.getsockname()}) for listener in listeners[:2] for _ in range(120)
    ]
    start = time.monotonic()
    links = join_all(3, listeners, dial, limit=SOON)
    assert time.monotonic() - start < SOON
    assert [set(rank) for rank in links] == [{1, 2}, {0, 2}, {0, 1}]
    for sock in [*crowd, *(sock for rank in links for sock in rank.values())]:
        sock.close()
    assert len(caplog.records) < 2 * acceptor.TOLD + 20, (
        "of an earlier test perhaps; else more than a hundred"
    )


def test_a_rank_that_is_sent_away_by_a_crowd_calls_again(monkeypatch):
    """The listener hangs up before it has answered, as it does when its room is full."""
    admit = wire.admit
    heard = []

    def admit_the_second(
        sock: socket.socket, token: bytes, limit: float, **options: Any
    ) -> dict[str, Any]:
        heard.append(sock)
        if len(heard) == 1:
            sock.close()
            raise PeerLostError("sent away")
        return admit(sock, token, limit, **options)

    monkeypatch.setattr(wire, "admit", admit_the_second)
    zero, one = join_all(2, [listen("127.0.0.1") for _ in range(2)], tcp)
    assert (set(zero), set(one)) == ({1}, {0})
    for sock in (*zero.values(), *one.values()):
        sock.close()


def test_a_rank_with_another_token_is_refused_and_those_who_wait_for_it_say_so():
    listeners = [listen("127.0.0.1") for _ in range(2)]
    zero, one = join_all(2, listeners, tcp, {1: b"another"}, limit=1.0)
    assert isinstance(one, HandshakeError)
    assert str(one).startswith("rank 1 cannot connect to rank 0: ")
    assert isinstance(zero, TimeoutError)
    assert "rank 0 waited 1 s for ranks [1] to connect" in str(zero)


def test_a_rank_that_is_not_expected_is_refused(caplog):
    listener = listen("127.0.0.1")
    callers = [call(listener) for _ in range(3)]

    def greet(sock: socket.socket, rank: object) -> None:
        wire.greet(sock, TOKEN, {"world_rank": rank}, 5)

    def come_last() -> None:
        deadline = time.monotonic() + 10
        while caplog.text.count("says that it is rank") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        greet(callers[2], 1)

    threads = [
        threading.Thread(target=greet, args=pair) for pair in zip(callers, (7, "1"), strict=False)
    ]
    with caplog.at_level(logging.WARNING, "minidist.comm"):
        for thread in threads:
            thread.start()
        late = threading.Thread(target=come_last)
        late.start()
        links = join(alone(0, [{}, {}]), {}, listener, tcp, TOKEN, 20.0)
        for thread in (*threads, late):
            thread.join()
    assert set(links) == {1}
    assert "says that it is rank 7" in caplog.text
    assert "says that it is rank '1'" in caplog.text
    for sock in [*callers, *links.values()]:
        sock.close()


def test_nobody_listens():
    listener = listen("127.0.0.1")
    with (
        nobodys_port() as address,
        pytest.raises(PeerLostError, match="rank 1 cannot connect to rank 0: .*refused") as caught,
    ):
        join(alone(1, [{"address": address}, {}]), {}, listener, tcp, TOKEN, 2.0)
    assert caught.value.world_rank == 0


def test_a_host_that_answers_no_call_is_a_lost_link(monkeypatch):
    """Its firewall drops what comes; here the listener's queue is full, and the kernel drops it."""
    monkeypatch.setattr(full_mesh, "DIAL_LIMIT", 0.3)
    listener = listen("127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as deaf,
        socket.create_connection(deaf.getsockname()),
    ):
        host, port = deaf.getsockname()
        start = time.monotonic()
        with pytest.raises(
            LinkLostError,
            match=r"rank 1 cannot connect to rank 0: 127.0.0.1:\d+ did not answer for "
            r"0.3 s: .* firewall",
        ) as caught:
            join(
                alone(1, [{"host": host, "port": port}, {}]),
                {},
                listener,
                lambda info: dial(info, LIMIT),
                TOKEN,
                LIMIT,
            )
    assert time.monotonic() - start < SOON
    assert caught.value.world_rank == 0
