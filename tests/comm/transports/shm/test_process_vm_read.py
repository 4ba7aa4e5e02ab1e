"""Reading another process's memory: what is allowed, who must agree, what happens when the other is
gone."""

import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import SOON, run
from linked import nobody_tells, shm_transports

from minidist.comm.collectives import shared_memory
from minidist.comm.transports.shm import process_vm_read
from minidist.comm.transports.shm.process_vm_read import Exhibit, process_of, read
from minidist.comm.transports.shm.transport import hand_over
from minidist.errors import CommError, PeerLostError

HERE = os.getpid()


def address(array):
    return array.__array_interface__["data"][0]


def octets(count):
    return np.zeros(count, np.uint8)


def test_bytes_come_from_where_they_lie():
    x = np.arange(100, dtype=np.uint8)
    x.flags.writeable = False
    target = octets(20)
    read(HERE, address(x) + 7, target[3:13])
    assert target.tolist() == [0] * 3 + list(range(7, 17)) + [0] * 7
    read(HERE, 0, octets(0))  # nothing is nowhere


def test_what_comes_in_parts_comes_whole(monkeypatch):
    whole = process_vm_read._readv

    def of_seven_bytes(process, vectors, count, remote, *rest):
        vectors[1] = vectors[3] = min(7, vectors[1])
        return whole(process, vectors, count, remote, *rest)

    monkeypatch.setattr(process_vm_read, "_readv", of_seven_bytes)
    target = octets(100)
    read(HERE, address(x := np.arange(100, dtype=np.uint8)), target)
    assert np.array_equal(target, x)


def test_what_cannot_be_read_is_an_error_of_the_system(monkeypatch):
    with pytest.raises(OSError) as caught:
        read(HERE, 8, octets(4))
    assert caught.value.errno == errno.EFAULT
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ProcessLookupError):
        read(child, address(octets(4)), octets(4))
    monkeypatch.setattr(process_vm_read, "_readv", None)
    with pytest.raises(OSError) as caught:
        read(HERE, 0, octets(4))
    assert caught.value.errno == errno.ENOSYS


def test_a_process_is_known_by_the_bytes_that_it_told():
    exhibit = Exhibit()
    assert process_of(exhibit.told) == HERE
    wrong = bytearray(exhibit.told)
    wrong[-1] ^= 1
    assert process_of(bytes(wrong)) is None, "another process may have that number where we are"
    assert process_of(Exhibit().told[:8] + bytes(8) + exhibit.told[16:]) is None


@pytest.mark.parametrize(("scope", "asked"), [("1\n", 1), ("0\n", 0), ("2\n", 0), (None, 0)])
def test_where_yama_asks_for_it_a_rank_lets_its_user_in(scope, asked, monkeypatch, tmp_path):
    class Libc:
        calls: list[tuple[int, int]] = []

        def prctl(self, what, who, *_):
            Libc.calls.append((what, who.value))

    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(process_vm_read, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(process_vm_read, "_libc", Libc())
    Libc.calls.clear()
    Exhibit()
    # PR_SET_PTRACER, PR_SET_PTRACER_ANY of linux/prctl.h
    assert Libc.calls == [(0x59616D61, 2**64 - 1)] * asked


def handed_over(size):
    """Rings, arenas and processes that each of `size` ranks has after hand_over, a thread each."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            connections[low][high], connections[high][low] = socket.socketpair()
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(
                pool.map(
                    lambda rank: hand_over(rank, connections[rank], 4096, 8192, 5.0), range(size)
                )
            )
    finally:
        for sockets in connections:
            for sock in sockets.values():
                sock.close()


def test_rings_and_arenas_are_shared():
    for rank, (rings, arenas, processes) in enumerate(handed_over(3)):
        assert processes == dict.fromkeys(range(3), HERE)
        assert sorted(rings) == [other for other in range(3) if other != rank]
        assert sorted(arenas) == [0, 1, 2]
    (rings, arenas, _), (others_rings, others_arenas, _) = handed_over(2)
    rings[1][5] = arenas[1][6] = others_arenas[1][7] = 9
    assert (others_rings[0][5], others_arenas[1][6], arenas[1][7]) == (9, 9, 9)


def test_if_one_rank_may_not_read_no_rank_does(monkeypatch):
    blind: list[int] = []
    real = process_vm_read.process_of

    def of_one_thread(told):
        blind.append(threading.get_ident())
        return None if threading.get_ident() == blind[0] else real(told)

    monkeypatch.setattr(process_vm_read, "process_of", of_one_thread)
    assert [processes for _, _, processes in handed_over(3)] == [None] * 3


def test_a_rank_that_ends_while_starting_is_named():
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises((CommError, BrokenPipeError)):
        hand_over(0, {1: near}, 4096, 8192, 5.0)


def test_reading_ends_with_what_ended_the_job(monkeypatch):
    monkeypatch.setattr("minidist.comm.transports.shm.transport.STRETCH_BYTES", 40)
    nobody_tells(monkeypatch)
    zero, one = transports = shm_transports(2)
    x = np.arange(100, dtype=np.uint8)
    target = octets(100)
    zero.read(1, address(x), target)
    assert np.array_equal(target, x)
    with pytest.raises(
        PeerLostError, match="rank 0 lost rank 1: its memory cannot be read any more .*Bad address"
    ):
        zero.read(1, 8, target)
    zero.abort(CommError("enough"))
    with pytest.raises(CommError, match="enough"):
        zero.read(1, address(x), target)
    for transport in transports:
        transport.close()


def test_leave_that_is_taken_away_is_no_death(monkeypatch):
    zero, one = transports = shm_transports(2)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(process_vm_read, "read", refuse)
    with pytest.raises(
        CommError, match="rank 0 can no longer read 8 bytes in the memory of rank 1"
    ) as caught:
        zero.read(1, 0, octets(8))
    assert not isinstance(caught.value, PeerLostError)
    for transport in transports:
        transport.close()


def killed_while_it_is_read(world, folder):
    """Rank 1 lends its block and is killed before anybody has read it."""
    assert world.board.lends
    world.barrier()
    if world.rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        world.board.read = lambda *_: time.sleep(10)
    else:
        lend = world.board.read
        world.board.read = lambda *arguments: (time.sleep(0.3), lend(*arguments))
    start = time.monotonic()
    try:
        world.all_gather(np.ones(1000))
    except PeerLostError as error:
        (folder / str(world.rank)).write_text(
            f"{error.world_rank} {time.monotonic() - start:.3f} {error}"
        )
        raise


def test_a_rank_that_dies_while_it_is_read_is_lost_as_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHOWN_BYTES", 512)
    with pytest.raises(PeerLostError, match="rank 1.*SIGKILL"):
        run(killed_while_it_is_read, tmp_path, size=3, transport="shm")
    for survivor in (0, 2):
        lost, seconds, text = (tmp_path / str(survivor)).read_text().split(" ", 2)
        assert lost == "1" and float(seconds) < SOON
        assert "SIGKILL" in text and "all_gather(" in text
