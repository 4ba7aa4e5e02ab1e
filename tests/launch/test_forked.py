"""run over processes of this machine: results in order, failures with their rank, nothing left
over."""

import errno
import os
import signal
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SOON
from leftovers import nothing_left

import minidist as md
from minidist.errors import DtypeError, LaunchError, PeerLostError, ShapeError, TimeoutError
from minidist.launch import forked

TRANSPORTS = ("tcp", "shm")


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


def wait_for_the_others(world):
    world.all_reduce(np.ones(3))


@pytest.mark.sampled
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(transport, size):
    captured = {"anything": np.arange(size)}  # a closure: nothing is imported or pickled

    def work(world, factor):
        total = world.all_reduce(np.full(2, float(world.rank)))
        return {
            "rank": world.rank,
            "mine": captured["anything"] * factor,
            "total": total,
            "pair": (world.size, None),
        }

    results = md.run(work, 10, size=size, transport=transport, limit=20)
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        np.testing.assert_array_equal(result["mine"], np.arange(size) * 10)
        np.testing.assert_array_equal(result["total"], np.full(2, sum(range(size))))
        assert result["pair"] == (size, None)


def test_large_results_come_back():
    results = md.run(lambda world: np.full(1 << 20, world.rank), size=2, transport="tcp", limit=20)
    assert [int(result.sum()) >> 20 for result in results] == [0, 1]


class Own(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise OSError("no words")


class Base(BaseException):
    pass


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("boom"), ValueError, "rank 1: boom"),
        (ShapeError("(2,) and (3,)"), ShapeError, r"rank 1: \(2,\) and"),
        (ShapeError("world rank 1 of 2: no"), ShapeError, "^world rank 1 of 2: no$"),
        (KeyError("name"), KeyError, "name"),
        (OSError(2, "No such file"), FileNotFoundError, "No such file"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, "bad"),
        (Own("mine"), RuntimeError, r"rank 1: .*Own: mine"),
        (Base("mine"), RuntimeError, r"rank 1: .*Base: mine"),
        (Mute("mine"), RuntimeError, r"rank 1: .*Mute: <its str\(\) raised OSError>"),
        (ValueError("\ud800"), ValueError, r"rank 1: \\ud800"),
    ],
)
def test_the_first_failure_keeps_its_type_and_names_its_rank(error, kind, says):
    def work(world):
        if world.rank == 1:
            raise error
        wait_for_the_others(world)

    with pytest.raises(kind, match=says) as caught:
        md.run(work, size=2, transport="tcp", limit=20)
    assert type(caught.value) is kind
    assert "the traceback of rank 1" in str(caught.value.__cause__)
    assert "raise error" in str(caught.value.__cause__)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: sys.exit(3), "exited with status 3"),
        (lambda: sys.exit(256), "exited with status 256"),
        (lambda: os._exit(0), "exited with status 0 without goodbye"),
    ],
    ids=["kill", "exit", "exit 256", "_exit"],
)
def test_a_rank_that_dies_is_named_with_how_it_went(transport, end, how):
    def work(world):
        wait_for_the_others(world)
        if world.rank == 2:
            end()
        wait_for_the_others(world)

    started = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"^rank 2 \(process \d+ on .*\) {how}") as caught:
        md.run(work, size=4, transport=transport, limit=20)
    assert caught.value.world_rank == 2
    assert time.monotonic() - started < SOON


def test_every_survivor_learns_who_died():
    """Rank 3 waits for rank 2, which waits for rank 1, which dies: rank 3 hears of rank 1."""

    def work(world, folder):
        try:
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            world.recv(src=world.rank - 1 if world.rank > 1 else 1)
        except PeerLostError as error:
            with open(f"{folder}/{world.rank}", "w") as file:
                file.write(str(error))
            raise

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(PeerLostError):
            md.run(work, folder, size=4, transport="shm", limit=20)
        assert sorted(os.listdir(folder)) == ["0", "2", "3"]
        for rank in (0, 2, 3):
            with open(f"{folder}/{rank}") as file:
                assert "was killed by SIGKILL" in (said := file.read()), said


@pytest.mark.soak
def test_a_rank_that_ignores_the_end_is_ended():
    def work(world):
        if world.rank == 0:
            raise ValueError("over")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 0: over"):
        md.run(work, size=2, transport="tcp", limit=20)
    assert time.monotonic() - started < SOON


def test_the_limit_names_who_had_not_ended(monkeypatch):
    """The parent's clock goes on to the limit when two of four results have come, however long that
    took."""

    def work(world):
        if world.rank in (1, 3):
            time.sleep(60)
        return world.rank

    came = []
    note = forked.ForkedJob._note
    monkeypatch.setattr(
        forked.ForkedJob, "_note", lambda job, *result: (note(job, *result), came.append(result))
    )
    monkeypatch.setattr(
        forked, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 20 * (len(came) > 1))
    )
    with pytest.raises(TimeoutError, match=r"2 of 4 ranks had not ended after 20 s: rank 1, 3"):
        md.run(work, size=4, transport="tcp", limit=20)


def test_a_result_that_cannot_travel_is_the_ranks_failure():
    with pytest.raises(DtypeError, match="rank 0: a builtins.object cannot travel"):
        md.run(lambda world: object(), size=1, transport="tcp", limit=20)


def test_forking_hides_no_other_warning():
    def work(world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("seen", DeprecationWarning, stacklevel=1)
        return len(caught)

    filters = list(warnings.filters)
    assert md.run(work, size=2, transport="tcp", limit=20) == [1, 1]
    assert warnings.filters == filters


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("tpc", "did you mean 'tcp'"),
        ("carrier pigeon", "choose from threads"),
        ("sim", "no transport 'sim'"),
    ],
)  # a simulated job is md.simulate, and no transport
def test_a_transport_that_is_not_there(transport, says):
    with pytest.raises(LaunchError, match=says):
        md.run(wait_for_the_others, size=2, transport=transport)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_256_ranks_join_add_up_and_leave(transport):
    """Within 120 s on two cores; more than that are not tried."""
    start = time.monotonic()
    with nothing_left():
        results = forked.run_forked(
            lambda world: float(world.all_reduce(float(world.rank))),
            (),
            size=256,
            transport=transport,
            limit=120,
        )
    assert set(results) == {256 * 255 / 2}
    assert time.monotonic() - start < 120


def test_a_system_that_forks_no_more_is_one_line(monkeypatch):
    fork = os.fork
    forked = []

    def refuse():
        forked.append(1)
        if len(forked) == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    with nothing_left(), pytest.raises(LaunchError, match="rank 2 of 4: .*Resource temporarily"):
        md.run(lambda world: None, size=4, transport="tcp")


def test_a_system_without_files_for_all_ranks_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("minidist.launch.forked.tempfile.TemporaryFile", refuse)
    with (
        nothing_left(),
        pytest.raises(LaunchError, match="cannot start 4 ranks: Too many open files; let `ulimit"),
    ):
        md.run(lambda world: None, size=4, transport="tcp")
