"""Both kinds of links in one transport: who shares memory with whom, and waits that end by either
kind."""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import nobodys_port
from imports import imports, modules
from leftovers import nothing_left
from linked import into, nobody_tells, shm_links, tag, tcp_links

import minidist as md
from minidist.comm.transports import auto
from minidist.comm.transports.shm.transport import ARENA_BYTES, BOARDS, ShmTransport
from minidist.errors import ConfigError, PeerLostError
from minidist.launch.forked import run_forked

NODES = [0, 0, 1, 1]


def on_two_nodes(fn, *args):
    return run_forked(fn, args, size=4, transport="auto", limit=20, nodes=NODES)


def kinds(world):
    return [type(peer.link).__name__ for peer in world.transport._peers.values()]


# --- who shares memory
# -----------------------------------------------------------------------------------------------


def groups(world):
    """Return what links and boards there are; and that calls over them are right."""
    inside = world.split(world.rank // 2)
    across = world.split(world.rank % 2)
    pair = inside.split(0)
    for group, members in (
        (world, range(4)),
        (inside, inside.world_ranks),
        (across, across.world_ranks),
    ):
        for algorithm in ("auto", "ring"):
            x = np.full(100_000, 10.0**world.rank)
            assert (
                group.all_reduce(x, algorithm=algorithm) == sum(10.0**rank for rank in members)
            ).all()
    with pytest.raises(ConfigError, match="shared needs ranks that share memory"):
        world.barrier(algorithm="shared")
    return [
        kinds(world),
        [group.board is not None for group in (world, inside, across, pair)],
        world.nodes,
        world.transport.name,
    ]


def test_memory_inside_a_node_and_connections_between():
    with nothing_left():
        found = on_two_nodes(groups)
    assert [sorted(kinds) for kinds, *_ in found] == [["ShmLink", "TcpLink", "TcpLink"]] * 4
    assert [rest for _, *rest in found] == [
        [[False, True, False, True], (0, 0, 1, 1), "shm+tcp"]
    ] * 4


def places(world):
    """Groups that cannot have a board take no place for one."""
    for number in range(BOARDS + 5):
        world.split(number if world.rank % 2 else -number - 1)
    return world.split(world.rank // 2).board is not None


def test_groups_across_nodes_use_no_place_up():
    assert on_two_nodes(places) == [True] * 4


def what_a_job_has(world):
    seen = []
    world.ledger.subscribe(
        lambda event: seen.append(event.details["algorithm"]) if event.kind == "call" else None
    )
    world.all_reduce(np.ones(10))
    return [kinds(world)[0], world.transport.inside, world.transport.name, *seen]


def test_a_job_on_auto_shares_memory_and_one_on_tcp_does_not():
    assert (
        md.run(what_a_job_has, size=2, transport="auto")
        == [["ShmLink", "shm", "shm", "shared"]] * 2
    )
    assert (
        md.run(what_a_job_has, size=2, transport="tcp") == [["TcpLink", "tcp", "tcp", "direct"]] * 2
    )


def test_the_name_of_before_is_tcp_and_says_so_once():
    with pytest.warns(FutureWarning, match="'sockets' is called 'tcp' now") as said:
        found = md.run(what_a_job_has, size=2, transport="sockets")
    assert found == [["TcpLink", "tcp", "tcp", "direct"]] * 2
    assert len(said) == 1


def test_ranks_that_could_not_hand_memory_over_do_not_try(monkeypatch):
    own = auto.shared_by(0)
    assert own == auto.shared_by(0) != auto.shared_by(1)
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert own != auto.shared_by(0)


def one_without(world):
    world.barrier()
    return [*kinds(world), world.transport.name]


def test_a_job_of_ranks_that_are_alone_on_their_nodes():
    found = run_forked(one_without, (), size=3, transport="auto", limit=20, nodes=[5, 6, 7])
    assert found == [["TcpLink", "TcpLink", "tcp"]] * 3


def test_imports_run_from_auto_to_its_kinds_of_links_and_from_these_to_progress():
    # none imports one to its left, and shm and tcp not each other
    order = ["auto", "shm", "tcp", "progress"]
    packages = {f"minidist.comm.transports.{name}": number for number, name in enumerate(order)}

    def place(module):
        return next(
            (
                packages[name]
                for name in packages
                if module == name or module.startswith(f"{name}.")
            ),
            None,
        )

    found = [
        arrow for module in modules() if place(module) is not None for arrow in imports(module)
    ]
    arrows = {
        (place(arrow.importer), place(arrow.imported))
        for arrow in found
        if place(arrow.imported) is not None
    }
    assert {(0, 1), (0, 2), (1, 3), (2, 3)} <= arrows
    assert {(left, right) for left, right in arrows if left != right} <= {
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 3),
        (2, 3),
    }


# --- waiting
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def three() -> Iterator[list[ShmTransport]]:
    """Ranks 0 and 1 share memory, 2 is elsewhere; nobody spins, so that every wait sleeps."""
    (zero_one, one_zero) = shm_links()
    (zero_two, two_zero) = tcp_links()
    (one_two, two_one) = tcp_links()
    arenas = [memoryview(mmap.mmap(-1, ARENA_BYTES)) for _ in range(3)]
    transports = [
        ShmTransport(0, 10.0, {1: zero_one}, {0: arenas[0], 1: arenas[1]}, {2: zero_two}),
        ShmTransport(1, 10.0, {0: one_zero}, {0: arenas[0], 1: arenas[1]}, {2: one_two}),
        ShmTransport(2, 10.0, {}, {2: arenas[2]}, {0: two_zero, 1: two_one}),
    ]
    for transport in transports:
        transport.spins = 0
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


def received(transport: ShmTransport, peer: int) -> tuple[threading.Thread, list[object]]:
    """A thread that waits for a message; the list then holds its number and when it came, or the
    error."""
    outcome: list[object] = []

    def body() -> None:
        got = np.zeros(1)
        try:
            transport.start_recv(peer, tag(1), into(got)).wait()
            outcome.extend([got[0], time.monotonic()])
        except PeerLostError as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_sleeper_is_woken_by_either_kind_of_link(order):
    with nothing_left(), three() as transports:
        waits = {peer: received(transports[0], peer) for peer in (2, 1)}
        time.sleep(0.05)
        for peer in order:
            sent = time.monotonic()
            transports[peer].start_send(0, tag(1), np.full(1, float(peer))).wait()
            thread, outcome = waits[peer]
            thread.join(20)
            assert outcome[0] == peer
            assert outcome[1] - sent < 5
            time.sleep(0.02)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_peer_that_goes_is_lost_on_either_kind_of_link(lost, monkeypatch):
    nobody_tells(monkeypatch)
    with three() as transports:
        waits = {peer: received(transports[0], peer) for peer in (1, 2)}
        time.sleep(0.05)
        transports[lost].close()
        thread, outcome = waits[lost]
        thread.join(20)
        assert isinstance(outcome[0], PeerLostError)
        assert outcome[0].world_rank == lost
        other = 3 - lost
        transports[other].start_send(0, tag(1), np.full(1, 7.0)).wait()
        waits[other][0].join(20)
        assert waits[other][1][0] == 7


def test_who_waits_before_a_board_moves_messages_of_connections_on():
    with three() as transports:
        zero, one, two = transports
        boards = [
            transport.open_board([0, 1], [0, 0])
            for transport in (zero, one)
            if transport.reserve_board() == 0
        ]
        assert zero.open_board([0, 1, 2], [zero.reserve_board(), 0, 0]) is None
        sent = zero.start_send(2, tag(1), np.ones(2_000_000))  # more than the connection holds
        shown: list[object] = []
        thread = threading.Thread(target=lambda: shown.extend(boards[0].show(b"", [np.arange(3)])))
        thread.start()
        got = np.zeros(2_000_000)
        two.start_recv(0, tag(1), into(got)).wait()
        assert got.all()
        assert not shown
        sent.wait()
        assert [
            octets.view(np.int64).tolist() for _, octets in boards[1].show(b"", [np.arange(2)])
        ] == [[0, 1, 2], [0, 1]]
        thread.join(20)
        assert len(shown) == 2


def test_a_network_that_is_not_reached_is_one_line():
    """Who is told an address where nobody listens says which rank it wanted."""

    class Meeting:
        world_rank = 1

        def meet(self, info):
            return [{**info, "memory": "elsewhere", "port": port}, info]

    says = "rank 1 cannot connect to rank 0: .*refused"
    with (
        nothing_left(),
        nobodys_port() as (_, port),
        pytest.raises(md.errors.CommError, match=says),
    ):
        auto.connect(Meeting(), b"a token for tests", 2.0, host="127.0.0.1", node=0)
