"""Waits before a board: asleep, in vain, ended from outside; places given back."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from leftovers import nothing_left
from linked import nobody_tells, shm_transports

import minidist as md
from minidist.comm.group import Group
from minidist.comm.limits import SHOWN_BYTES
from minidist.comm.transport import Board
from minidist.comm.transports.shm.exchange_board import (
    _ASLEEP,
    _POSTED,
    PART_BYTES,
    TURNS,
    BoardPart,
    SharedBoard,
)
from minidist.comm.transports.shm.ring_buffer import RING_BYTES
from minidist.comm.transports.shm.transport import BOARDS, ShmTransport
from minidist.errors import CommError, PeerLostError, TimeoutError


def opened(transports: list[ShmTransport]) -> list[Board]:
    places = [transport.reserve_board() for transport in transports]
    boards = [transport.open_board(range(len(transports)), places) for transport in transports]
    return [board for board in boards if board is not None]


def show(board: Board, number: int) -> list[int]:
    return [int(octets.view(np.int64)[0]) for _, octets in board.show(b"", [np.array([number])])]


def in_thread(act: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Runs `act`; what it raised is in the list when the thread has ended."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except Exception as error:  # the test looks at it
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, raised


def close(transports: list[ShmTransport]) -> None:
    for transport in transports:
        transport.close()


def test_what_is_shared_is_known():
    """A ring to each other rank, and a place a board; a place given back counts no more."""
    transports = shm_transports(3)
    assert [transport.shared_bytes for transport in transports] == [2 * RING_BYTES] * 3
    boards = opened(transports)
    assert [transport.shared_bytes for transport in transports] == [2 * RING_BYTES + PART_BYTES] * 3
    for board in boards:
        board.close()
    assert transports[0].shared_bytes == 2 * RING_BYTES
    close(transports)


@pytest.mark.parametrize(
    "lengths",
    [[0], [1, 0, 63], [4096, 4097], [3, 2 * 65536 + 5, 0, 4099, 64], [SHOWN_BYTES - 1, 1]],
)
def test_the_bytes_are_those_of_the_sources_and_those_shown_before_stay(lengths: list[int]):
    rng = np.random.default_rng(0)
    part = BoardPart(memoryview(bytearray(PART_BYTES)))
    before = np.empty(0, np.uint8)
    last = np.empty(0, np.uint8)
    for number in range(4):
        arrays = [rng.integers(0, 255, length, np.uint8) for length in lengths]
        part.write(number % TURNS, b"meta", arrays)
        meta, shown = part.read(number % TURNS)
        assert meta == b"meta"
        np.testing.assert_array_equal(shown, np.concatenate(arrays))
        np.testing.assert_array_equal(last, before)
        before = np.concatenate(arrays)
        last = shown


def test_other_dtypes_are_shown_byte_for_byte():
    values = np.array([np.nan, -0.0, 1e300] * 65536)[: SHOWN_BYTES // 8]
    part = BoardPart(memoryview(bytearray(PART_BYTES)))
    part.write(1, b"", [values[:5], values[5:]])
    assert part.read(1)[1].tobytes() == values.tobytes()


def test_ranks_that_come_late_wake_those_who_sleep():
    with nothing_left():
        transports = shm_transports(3)
        boards = opened(transports)
        seen: list[list[int]] = []

        def rank(own: int) -> None:
            transports[own].spins = 0
            for turn in range(30):
                if turn % 3 == own:
                    time.sleep(0.003)
                seen.append(show(boards[own], 10 * turn + own))

        began = time.monotonic()
        threads = [in_thread(lambda own=own: rank(own)) for own in range(3)]
        for thread, raised in threads:
            thread.join()
            assert not raised
        assert time.monotonic() - began < 9, "nobody slept until the limit"
        assert sorted(seen) == sorted(
            [[10 * turn, 10 * turn + 1, 10 * turn + 2] for turn in range(30)] * 3
        )
        close(transports)


def test_fences_stand_where_a_processor_could_change_the_order(monkeypatch):
    """Bytes, fence, posted, fence, a look at asleep; asleep, fence, a look at posted."""
    transports = shm_transports(2)
    boards = opened(transports)
    own = boards[0]._own.words
    seen = []
    monkeypatch.setattr(boards[0], "_fence", lambda: seen.append((own[_POSTED], own[_ASLEEP])))
    boards[0].sleeps(True)
    assert seen == [(0, 1)]
    boards[0].sleeps(False)
    thread, _ = in_thread(lambda: show(boards[1], 1))
    show(boards[0], 0)
    thread.join()
    assert seen[2:4] == [(0, 0), (1, 0)]
    close(transports)


def test_a_wait_in_vain_names_who_is_missing():
    transports = shm_transports(3, limit=0.5)
    boards = opened(transports)
    thread, raised = in_thread(lambda: show(boards[1], 1))
    while not boards[1]._own.words[_POSTED]:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.5 s for ranks \[2\]"):
        show(boards[0], 0)
    thread.join()
    assert isinstance(raised[0], TimeoutError)
    close(transports)


def test_abort_ends_the_wait():
    transports = shm_transports(2)
    boards = opened(transports)
    thread, raised = in_thread(lambda: show(boards[0], 0))
    time.sleep(0.05)
    transports[0].abort(CommError("enough"))
    thread.join(20)
    assert [str(error) for error in raised] == ["enough"]
    close(transports)


def test_a_rank_that_goes_is_lost_but_what_it_showed_is_seen(monkeypatch):
    nobody_tells(monkeypatch)
    transports = shm_transports(2)
    boards = opened(transports)
    first, _ = in_thread(lambda: show(boards[1], 7))
    assert show(boards[0], 1) == [1, 7]
    first.join()
    thread, raised = in_thread(lambda: show(boards[0], 2))
    time.sleep(0.05)
    transports[1].close()
    thread.join(20)
    assert isinstance(raised[0], PeerLostError) and raised[0].world_rank == 1
    close(transports)


def test_places_are_given_back_and_begin_anew():
    transports = shm_transports(2)
    for number in range(2 * BOARDS):
        boards = opened(transports)
        thread, _ = in_thread(lambda boards=boards, number=number: show(boards[1], number))
        assert show(boards[0], number) == [number, number]
        thread.join()
        for board in boards:
            board.close()
            board.close()
    kept = [opened(transports) for _ in range(BOARDS)]
    assert all(len(boards) == 2 for boards in kept)
    assert opened(transports) == [], "no place is left: the group does without"
    close(transports)


def test_a_place_serves_another_board_only_after_all_have_closed_the_first():
    """Rank 0 has not looked yet at what rank 1 showed last, when that closes the board and reserves
    the next."""
    transports = shm_transports(2)
    boards = opened(transports)
    boards[0]._wait = lambda: late.wait(20)
    late = threading.Event()
    seen: list[list[int]] = []
    thread, _ = in_thread(lambda: seen.append(show(boards[0], 3)))
    assert show(boards[1], 4) == [3, 4]
    boards[1].close()
    other = transports[1].reserve_board()
    assert boards[0].missing() == []
    late.set()
    thread.join(20)
    assert seen == [[3, 4]]
    boards[0].close()
    assert other % BOARDS != transports[1].reserve_board() % BOARDS == 0
    close(transports)


def test_a_group_closed_early_keeps_nobody_waiting():
    """Rank 1 leaves a group and splits anew while rank 0 has not woken from the group's last
    call."""

    def job(world: Group) -> list[int]:
        group = world.split(0)
        assert group is not None and isinstance(group.board, SharedBoard)
        if world.rank == 0:
            look = group.board.missing
            group.board.missing = lambda: time.sleep(0.05) or look()
        got = group.all_gather(np.array([world.rank]))
        group.close()
        next_group = world.split(0)
        assert next_group is not None
        return [*got, *next_group.all_gather(np.array([10 + world.rank]))]

    assert md.run(job, size=2, transport="shm", limit=20) == [[0, 1, 10, 11]] * 2
