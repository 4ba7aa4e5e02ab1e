"""Ranks as processes over sockets and shared memory: what a killed rank leaves behind, and what the
others learn."""

import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import MIXED, SOON, run
from leftovers import nothing_left
from linked import into, tag

from minidist.errors import CommError, PeerLostError

on_processes = pytest.mark.parametrize("transport", [MIXED, "tcp", "shm"])
on_one_kind_of_link = pytest.mark.parametrize("transport", ["tcp", "shm"])


def files() -> list[str]:
    return sorted(
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    )


def one_is_killed(world, folder, when):
    """Rank 1 kills itself; when it did, and when and what the others' waits then raise, goes to
    files."""
    x = np.ones(400_000, np.float32)
    try:
        world.barrier()  # rank 1 may be out of it, and gone, before the others are
        if world.rank == 1:
            if when == "inside":  # more than fits: cut off in the middle
                world.transport.start_send(2, tag(1), np.ones(50_000_000, np.uint8))
            Path(folder, "1").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "inside" and world.rank == 2:
            world.transport.start_recv(1, tag(1), into(np.empty(50_000_000, np.uint8))).wait()
        while True:
            world.all_reduce(x, algorithm="ring")
    except PeerLostError as error:
        Path(folder, str(world.rank)).write_text(f"{error.world_rank} {time.monotonic()} {error}")
        raise


@pytest.mark.sampled(every=3)
@on_processes
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_killed_rank_is_named_everywhere_at_once(transport, when, tmp_path):
    with nothing_left():
        with pytest.raises(CommError, match="rank 1.*SIGKILL"):
            run(one_is_killed, str(tmp_path), when, size=4, transport=transport)
        killed = float((tmp_path / "1").read_text())
        for survivor in (0, 2, 3):
            world_rank, learnt, message = (tmp_path / str(survivor)).read_text().split(" ", 2)
            assert world_rank == "1"
            assert float(learnt) - killed < SOON
            assert "SIGKILL" in message


def open_files(world):
    """Open files before and after some traffic, and after the transport was closed."""
    gc.freeze()  # what the test process has made is looked at there, once
    before = files()
    world.barrier()
    for algorithm in ("ring", "direct"):
        world.all_reduce(np.ones(100_000), algorithm=algorithm)
    during = files()
    world.barrier()
    world.transport.close()
    gc.collect()
    return before, during, files()


@pytest.mark.sampled(every=3)
@on_processes
def test_no_file_stays_open_and_memory_has_no_name(transport):
    gc.collect()  # what only garbage holds is not this test's
    with nothing_left():
        for before, during, after in run(open_files, size=3, transport=transport):
            assert before == during
            assert not [name for name in before if name.startswith("/dev/shm")]
            assert not [name for name in after if "memfd" in name]
            kept = [name for name in after if name.startswith("socket:")]
            assert len(kept) == len([name for name in before if name.startswith("socket:")]) - 4, (
                "2 links, 1 bell of 2"
            )


def a_wait_that_nobody_ends(world, over):
    world.barrier()
    if world.rank == 0:
        start = time.monotonic()
        with pytest.raises(CommError, match="rank 0 waited 0.2 s"):
            world.transport.limit = 0.2
            world.transport.start_recv(1, tag(1), into(np.empty(1))).wait()
        assert 0.2 <= time.monotonic() - start < SOON
        world.transport.limit = 20
        over.touch()
    # in the barrier already, it would be seen that both wait for each other
    while not over.exists():
        time.sleep(0.01)
    world.barrier()


@pytest.mark.sampled
@on_one_kind_of_link
def test_a_limit_ends_a_wait_and_the_job_goes_on(transport, tmp_path):
    run(a_wait_that_nobody_ends, tmp_path / "over", size=2, transport=transport)


def all_at_once(world):
    """Everyone starts to send 8 MB to everyone, and waits for the sends before it posts a single
    receive for some."""
    n = 1_000_000
    peers = [peer for peer in range(world.size) if peer != world.rank]
    sent = [
        world.transport.start_send(peer, tag(world.rank), np.full(n, float(world.rank)))
        for peer in peers
    ]
    got = {peer: np.empty(n) for peer in peers}
    arriving = [
        world.transport.start_recv(peer, tag(peer), into(got[peer])) for peer in reversed(peers)
    ]
    for handle in sent + arriving:
        handle.wait()
    for peer in peers:
        assert (got[peer] == peer).all()
    world.barrier()


@pytest.mark.soak  # tests/comm/test_conformance.py demands it, of six megabytes
@on_one_kind_of_link
def test_everyone_sends_much_to_everyone(transport):
    run(all_at_once, size=4, transport=transport)


def random_traffic(world, rounds, seed):
    """Messages of random sizes under random tags, received in another order, some reduced, from two
    threads' tags."""
    random = np.random.default_rng(seed)  # the same on every rank
    for _ in range(rounds):
        lengths = random.choice([0, 1, 100, 5000, 70_000, 400_000], 20)
        table = [
            (src, dst, int(n), t)
            for (src, dst, t), n in zip(
                random.integers(0, (world.size, world.size, 5), (20, 3)).tolist(),
                lengths,
                strict=True,
            )
            if src != dst
        ]
        order = random.permutation(len(table))
        sent = [
            world.transport.start_send(dst, tag(t), np.full(n, index, np.int32))
            for index, (src, dst, n, t) in enumerate(table)
            if src == world.rank
        ]
        arriving = {}
        for src in range(world.size):  # within a tag, receives keep the order of the sends
            for t in range(5):
                mine = (src, world.rank, t)
                for index in [
                    index for index, (a, b, _, c) in enumerate(table) if (a, b, c) == mine
                ]:
                    got = np.full(table[index][2], -1, np.int32)
                    arriving[index] = (world.transport.start_recv(src, tag(t), into(got)), got)
        for index in order:
            if index in arriving:
                handle, got = arriving[index]
                handle.wait()
                assert (got == index).all()
        for handle in sent:
            handle.wait()


@pytest.mark.sampled(every=3)
@on_processes
def test_random_traffic(transport):
    run(random_traffic, 10, 3, size=4, transport=transport)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@on_processes
def test_random_traffic_at_length(transport):
    run(random_traffic, 3000, 4, size=4, transport=transport, limit=1000)
