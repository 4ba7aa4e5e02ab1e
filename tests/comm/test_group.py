"""Groups: arguments and results of the verbs, point to point, started calls, split, and ranks that
fail.

That each algorithm computes what it should is tests/comm/collectives/; what transports owe is
test_conformance.py.
"""

import gc
import os
import re
import sys
import threading
import time
import tracemalloc
import warnings
import weakref

import gpu_calls
import numpy as np
import pytest
from helpers import SOON, THREADS, limit_comes, run
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import nothing_left
from numpy.lib.stride_tricks import as_strided

from minidist.comm.calls import async_call
from minidist.comm.calls.async_call import CallWorker, PendingCall
from minidist.comm.calls.members import GroupGuard
from minidist.comm.group import Group
from minidist.comm.transports.progress.mailbox import Mailbox
from minidist.device import account
from minidist.errors import (
    CommError,
    ConfigError,
    DeadlockError,
    DtypeError,
    MismatchError,
    PeerLostError,
    ShapeError,
    TimeoutError,
)

on_both = pytest.mark.parametrize("transport", THREADS)


# ---------------------------------------------------------------------------- arguments and results


def test_numbers_lists_and_arrays_without_dims():
    def ranks(world):
        one = world.all_reduce(1.5)
        assert isinstance(one, np.ndarray)
        assert (one.shape, one.dtype, float(one)) == ((), np.float64, 3 * 1.5)
        assert int(world.all_reduce(world.rank, op="max")) == 2
        assert world.all_reduce([[1, 2], [3, 4]]).tolist() == [[3, 6], [9, 12]]
        assert world.all_gather(world.rank).tolist() == [0, 1, 2]
        assert world.all_reduce(np.float32(2)).dtype == np.float32
        rows = world.gather(np.float64(world.rank), root=1)
        assert rows is None if world.rank != 1 else rows.tolist() == [0, 1, 2]
        assert world.broadcast("ready" if world.rank == 0 else None) == "ready"

    run(ranks, size=3)


def test_bool_follows_numpys_ufuncs():
    def ranks(world):
        x = np.array([world.rank == 0, True, False])
        assert (
            world.all_reduce(x, op="sum").tolist()
            == world.all_reduce(x, op="max").tolist()
            == [True, True, False]
        )
        assert (
            world.all_reduce(x, op="prod").tolist()
            == world.all_reduce(x, op="min").tolist()
            == [False, True, False]
        )

    run(ranks, size=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"verb": "all_reduce", "x": 1.0, "algorithm": "fast"},
            ConfigError,
            "no algorithm 'fast'; choose auto, naive, tree, ring, direct, pairwise",
        ),
        (
            {"verb": "all_to_all", "x": [1, 1], "algorithm": "ring"},
            ConfigError,
            "choose auto, naive, pairwise",
        ),
        (
            {"verb": "all_reduce", "x": 1.0, "op": "avg"},
            ConfigError,
            "unknown op 'avg'; choose one of sum, mean, max, min, prod",
        ),
        ({"verb": "all_reduce", "x": 1, "op": "mean"}, DtypeError, "mean of int64"),
        ({"verb": "all_reduce", "x": True, "op": "mean"}, DtypeError, "mean of bool"),
        (
            {"verb": "all_reduce", "x": np.array("2026-01-01", "M8[D]")},
            DtypeError,
            "sum is not defined",
        ),
        ({"verb": "all_gather", "x": np.array([{}])}, DtypeError, "values are references"),
        (
            {"verb": "broadcast", "x": 1, "root": 2},
            ConfigError,
            "root=2: the group world has ranks 0 to 1",
        ),
        ({"verb": "reduce", "x": 1, "root": -1}, ConfigError, "root=-1"),
        ({"verb": "gather", "x": 1, "root": "0"}, ConfigError, "root='0'"),
        ({"verb": "send", "x": 1, "dst": 2}, ConfigError, "dst=2"),
        ({"verb": "recv", "src": 2}, ConfigError, "src=2"),
        ({"verb": "exchange", "x": 1, "dst": 0, "src": 9}, ConfigError, "src=9"),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": np.ones(4)},
            ShapeError,
            r"out= has shape \(4,\), the result has \(3,\)",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": np.ones(3, np.float32)},
            DtypeError,
            "out= has dtype float32",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": np.broadcast_to(0.0, (3,))},
            ShapeError,
            "read-only",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": np.frombuffer(bytes(24))},
            ShapeError,
            "read-only",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": [0, 0, 0]},
            DtypeError,
            "must be an array, not list",
        ),
        (
            {"verb": "reduce_scatter", "x": np.ones(4), "out": np.ones(4)},
            ShapeError,
            r"the result has \(2,\)",
        ),
        (
            {"verb": "all_to_all", "x": [1]},
            ShapeError,
            "x has 1 arrays; pass one for each of 2 ranks",
        ),
        ({"verb": "all_to_all", "x": [1, 1.0]}, DtypeError, "dtypes float64, int64; cast"),
        (
            {"verb": "all_to_all", "x": 1.0},
            ShapeError,
            "all_to_all: x is a float; pass a list of 2 arrays",
        ),
        (
            {"verb": "all_to_all", "x": None},
            ShapeError,
            "all_to_all: x is a NoneType; pass a list of 2 arrays",
        ),
        (
            {"verb": "all_to_all", "x": [1, 2], "out": [np.ones((), int)] * 2},
            ShapeError,
            "out= has the same array several",
        ),
        (
            {"verb": "all_reduce", "x": 1.0, "op": ["sum"]},
            ConfigError,
            r"op=\['sum'\] must be a name: sum, mean",
        ),
        (
            {"verb": "all_reduce", "x": 1.0, "op": np.add},
            ConfigError,
            "op=<ufunc 'add'> must be a name",
        ),
        (
            {"verb": "all_reduce", "x": 1.0, "op": None},
            ConfigError,
            "op=None must be a name",
        ),
        (
            {"verb": "all_reduce", "x": 1.0, "algorithm": ["ring"]},
            ConfigError,
            r"no algorithm \['ring'\]; choose auto",
        ),
        (
            {"verb": "all_reduce", "x": "a"},
            DtypeError,
            "all_reduce: op sum is not defined for dtype <U1.*cast to numbers",
        ),
        (
            {"verb": "all_reduce", "x": "a", "op": "mean"},
            DtypeError,
            "op mean is not defined for dtype <U1",
        ),
        (
            {"verb": "reduce", "x": np.zeros(2, "m8[s]"), "op": "prod"},
            DtypeError,
            "reduce: .*use sum, max, min",
        ),
        (
            {"verb": "all_gather", "x": [[1], [2, 3]]},
            ShapeError,
            "all_gather: x is a list that cannot be converted to an array",
        ),
        (
            {"verb": "send", "x": None, "dst": 1},
            DtypeError,
            "send: x is a NoneType; arrays of dtype object cannot be sent",
        ),
        (
            {"verb": "all_reduce", "x": np.ma.masked_equal([1, 2], 2)},
            DtypeError,
            "masked array.*pass x.filled",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(2), "out": np.ma.zeros(2)},
            DtypeError,
            "must be an array, not MaskedArray",
        ),
        (
            {"verb": "all_reduce", "x": np.ones(3), "out": as_strided(np.ones(3), (3,), (0,))},
            ShapeError,
            "elements of it share memory and cannot all be written",
        ),
        (
            {"verb": "recv", "src": 1, "out": as_strided(np.ones(4), (3, 2), (8, 8))},
            ShapeError,
            "recv: .*share memory",
        ),
        ({"verb": "scatter", "x": 1.0, "root": 0}, ShapeError, "without dims"),
        (
            {"verb": "broadcast", "x": None, "root": 0},
            ShapeError,
            "rank 0 is the root and passes None",
        ),
    ],
    ids=lambda value: value["verb"] if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("prefix", ["", "start_"])
def test_wrong_arguments_are_told_at_once(arguments, error, message, prefix):
    """Before anything is sent: no other rank takes part."""
    arguments = dict(arguments)
    verb = prefix + arguments.pop("verb")

    def ranks(world):
        if world.rank == 0:
            with pytest.raises(error, match=message):
                getattr(world, verb)(**arguments)

    run(ranks, size=2)


def test_the_root_says_shape_and_dtype_and_a_template_must_fit():
    def ranks(world):
        x = np.arange(6, dtype=np.int16).reshape(2, 3) if world.rank == 1 else None
        got = world.broadcast(x, root=1)
        assert (got.dtype, got.shape) == (np.int16, (2, 3))
        got[0, 0] = 7  # the result is this rank's own
        assert x is None or x[0, 0] == 0
        part = world.scatter(np.arange(8.0).reshape(4, 2) if world.rank == 1 else None, root=1)
        assert part.tolist() == np.array_split(np.arange(8.0).reshape(4, 2), 3)[world.rank].tolist()
        template = np.zeros((2, 3), np.int16)
        assert world.broadcast(x if world.rank == 1 else template, root=1).sum() == 15
        assert world.broadcast(x, root=1, out=template) is template

    run(ranks, size=3)


def test_one_part_of_many_may_lie_where_another_is_received():
    """The first parts are views of one array, and the last is not."""

    def ranks(world):
        whole = np.full(2, 10.0 * world.rank)
        last = np.full(1, 10.0 * world.rank)
        got = world.all_to_all([whole[:1], whole[1:], last], out=[last, np.zeros(1), np.zeros(1)])
        return [float(part[0]) for part in got]

    assert run(ranks, size=3) == [[0.0, 10.0, 20.0]] * 3


@on_both
def test_out_may_be_what_is_being_sent(transport):
    def ranks(world):
        size = world.size
        rank = world.rank
        x = np.arange(10.0) + rank
        total = size * np.arange(10.0) + 3
        for algorithm in ("naive", "tree", "ring", "direct"):
            y = x.copy()
            assert world.all_reduce(y, out=y, algorithm=algorithm) is y
            assert (y == total).all(), algorithm
            y = np.append(x, -1.0)
            # overlapping, but not the same elements
            world.all_reduce(y[:-1], out=y[1:], algorithm=algorithm)
            assert (y[1:] == total).all(), algorithm
            y = x.copy()
            world.reduce(y, out=y, root=2, algorithm="naive")
            assert (y == (total if rank == 2 else x)).all()
        for algorithm in ("naive", "ring"):
            y = x.copy()
            chunk = np.array_split(y, size)[rank]
            world.reduce_scatter(y, out=chunk, algorithm=algorithm)
            assert (chunk == np.array_split(total, size)[rank]).all(), algorithm
            whole = np.full(4 * size, -1.0)
            own = whole[4 * rank : 4 * rank + 4]
            own[...] = rank
            world.all_gather(own, out=whole, algorithm=algorithm)
            assert (whole == np.repeat(np.arange(size), 4)).all(), algorithm
        y = x.copy()
        world.exchange(y, dst=(rank + 1) % size, src=(rank - 1) % size, out=y)
        assert (y == np.arange(10.0) + (rank - 1) % size).all()
        parts = [np.full(3, 10 * rank + dst) for dst in range(size)]
        world.all_to_all(parts, out=parts)
        assert [part[0] for part in parts] == [10 * src + rank for src in range(size)]

    run(ranks, size=3, transport=transport)


def test_out_that_is_not_contiguous_is_filled_all_the_same():
    def ranks(world):
        out = np.zeros((6, 2))[:, 0]
        world.all_gather(np.full(2 + world.rank, world.rank, float), out=np.zeros((5, 2))[:, 0])
        world.all_reduce(np.ones(6), out=out)
        assert out.tolist() == [2.0] * 6
        uneven = np.zeros(5)
        assert world.all_gather(np.full(2 + world.rank, world.rank, float), out=uneven) is uneven
        assert uneven.tolist() == [0, 0, 1, 1, 1]

    run(ranks, size=2)


def test_out_of_who_is_not_the_root_is_ignored():
    def ranks(world):
        nothing = np.broadcast_to(7.0, (2, 2))
        for verb in (world.reduce, world.gather):
            assert (verb(np.ones(3), root=1, out=None if world.rank else nothing) is None) == (
                world.rank == 0
            )

    run(ranks, size=2)


@pytest.mark.parametrize(
    ("call", "bytes_each"),
    [
        (lambda world, x: world.all_reduce(x, out=x, algorithm="ring"), 0),
        (lambda world, x: world.all_reduce(x, out=x, algorithm="tree"), 0),
        (
            lambda world, x: world.reduce_scatter(
                x, out=np.array_split(x, 4)[world.rank], algorithm="ring"
            ),
            2 * 125_000 * 8,
        ),
        (
            lambda world, x: world.all_gather(
                np.array_split(x, 4)[world.rank], out=x, algorithm="ring"
            ),
            0,
        ),
        (lambda world, x: world.broadcast(x, out=x, algorithm="tree"), 0),
        (lambda world, x: world.start_all_reduce(x, out=x, algorithm="ring").wait(), 0),
    ],
    ids=[
        "all_reduce-ring",
        "all_reduce-tree",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "start_all_reduce",
    ],
)
def test_no_copy_that_the_algorithm_does_not_need(call, bytes_each):
    """NumPy allocates in all four ranks, and the ranks tell their accounts, no more than the
    docstrings' workspace."""

    def ranks(world):
        x = np.ones(500_000)
        world.barrier()
        if world.rank == 0:
            tracemalloc.start()
        world.barrier()
        call(world, x)
        world.barrier()
        peak = tracemalloc.get_traced_memory()[1]
        world.barrier()
        return peak, account.current().peak["communication"]

    try:
        outcomes = run(ranks, size=4, transport="threads-unbuffered")
    finally:
        tracemalloc.stop()
    assert [told for _, told in outcomes] == [bytes_each] * 4
    # msgpack's buffers; one array of one rank is 4,000,000, a chunk of it 1,000,000 on each of 4
    slack = 1_200_000
    assert 4 * bytes_each <= max(peak for peak, _ in outcomes) < 4 * bytes_each + slack


# ----------------------------------------------------------------------------------- point to point


@on_both
def test_messages_bring_their_shape_and_come_in_order(transport):
    def ranks(world):
        if world.rank == 0:
            for i in range(5):
                world.send(np.full((i, 2), i, np.float32), dst=1)
            world.send(np.arange(10)[::2], dst=1)
            return
        for i in range(5):
            got = world.recv(src=0)
            assert (got.shape, got.dtype) == ((i, 2), np.float32)
            assert (got == i).all()
        out = np.empty(5, int)
        assert world.recv(src=0, out=out) is out
        assert out.tolist() == [0, 2, 4, 6, 8]

    run(ranks, size=2, transport=transport)


@on_both
def test_a_send_to_oneself_works(transport):
    def ranks(world):
        x = np.arange(3)
        world.send(x, dst=world.rank)
        x += 1
        assert world.recv(src=world.rank).tolist() == [0, 1, 2]  # a message is a copy
        pending = world.start_recv(src=world.rank)
        world.send(5, dst=world.rank)
        assert int(pending.wait()) == 5
        assert world.exchange(x, dst=world.rank, src=world.rank).tolist() == [1, 2, 3]
        assert world.ledger.sent_bytes() == {}  # nothing left the rank

    run(ranks, size=2, transport=transport)


@on_both
def test_a_started_receive_holds_nothing_up(transport):
    """Both wait for the other's message first: a queue of calls would deadlock here."""

    def ranks(world):
        other = 1 - world.rank
        first = world.start_recv(src=other)
        second = world.start_recv(src=other)
        total = world.all_reduce(1)
        sends = [world.start_send(np.full(1000, 10 * world.rank + i), dst=other) for i in range(2)]
        assert second.wait()[0] == 10 * other + 1
        assert first.wait()[0] == 10 * other
        assert first.wait()[0] == 10 * other  # waiting again is allowed
        for send in sends:
            send.wait()
            assert send.done()
        return int(total)

    assert run(ranks, size=2, transport=transport) == [2, 2]


@on_both
def test_exchange_meets_exchange_and_send_meets_receive(transport):
    def ranks(world):
        size = world.size
        rank = world.rank
        assert (
            int(world.exchange(rank, dst=(rank + 1) % size, src=(rank - 1) % size))
            == (rank - 1) % size
        )
        if rank == 0:
            return int(world.exchange("ping", dst=1, src=2) == "pong")
        if rank == 1:
            assert world.recv(src=0) == "ping"
            world.send(0, dst=2)
        if rank == 2:
            world.recv(src=1)
            world.send("pong", dst=0)
        return 1

    assert run(ranks, size=3, transport=transport) == [1, 1, 1]


# ------------------------------------------------------------------------------------ started calls


@on_both
def test_many_started_calls_in_flight_keep_their_order(transport):
    def ranks(world):
        arrays = [np.full(1 + i, float(world.rank + i)) for i in range(40)]
        pending = [
            world.start_all_reduce(x, out=x, algorithm=("ring", "tree", "direct", "naive")[i % 4])
            for i, x in enumerate(arrays)
        ]
        gathered = world.start_all_gather(np.full(world.rank, world.rank))
        last = world.all_reduce(100)  # queues behind those that were started
        assert all(call.done() for call in pending)
        assert gathered.done()
        for i, call in enumerate(pending):
            assert call.wait() is arrays[i]
            assert (arrays[i] == 3 + 3 * i).all()
        assert gathered.wait().tolist() == [1, 2, 2]
        world.start_barrier().wait()
        return int(last)

    assert run(ranks, size=3, transport=transport) == [300] * 3


def test_a_call_of_the_caller_comes_after_all_that_were_started(monkeypatch):
    """Also where the worker takes its time between the last of them and saying so."""

    class Slow(threading.Event):
        def set(self):
            time.sleep(0.05)
            super().set()

    start = PendingCall.__init__

    def slowly(pending, *args):
        start(pending, *args)
        pending.finished = Slow()

    monkeypatch.setattr(PendingCall, "__init__", slowly)

    def ranks(world):
        pending = world.start_all_reduce(1)
        while world._worker.unfinished and not pending.finished.is_set():
            time.sleep(0.001)
        world.barrier()
        return pending.done()

    assert run(ranks, size=2) == [True, True]


@on_both
def test_groups_that_overlap_are_in_flight_at_once(transport):
    """Rows and columns of a 2 x 3 mesh, and the world, all started before any is waited for."""

    def ranks(world):
        row = world.split(world.rank // 3, axis="row")
        column = world.split(world.rank % 3, axis="column")
        calls = []
        for i in range(10):
            calls += [
                (world.start_all_reduce(np.full(50, world.rank + i)), 15 + 6 * i),
                (
                    column.start_all_reduce(np.full(70, world.rank + i), algorithm="ring"),
                    2 * (world.rank % 3) + 3 + 2 * i,
                ),
                (
                    row.start_all_reduce(np.full(90, world.rank + i), algorithm="ring"),
                    9 * (world.rank // 3) + 3 + 3 * i,
                ),
            ]
        for call, want in reversed(calls):
            assert (call.wait() == want).all()
        return world.ledger.messages()

    counted = run(ranks, size=6, transport=transport)
    assert all({"world", "row", "column"} <= set(rank) for rank in counted)


def test_an_error_of_a_started_call_is_raised_by_wait():
    def ranks(world):
        pending = world.start_all_reduce(np.ones(2 + world.rank))
        with pytest.raises(CommError):
            pending.wait()
        with pytest.raises(CommError):
            world.barrier()  # the rank's later waits fail too
        return True

    assert run(ranks, size=2) == [True, True]


def test_an_error_that_nobody_waited_for_is_not_lost():
    def ranks(world):
        world.start_all_reduce(np.ones(2 + world.rank))

    with pytest.raises(CommError, match="rank . calls all_reduce|rank . failed"):
        run(ranks, size=2)


def test_a_job_leaves_no_thread_behind():
    before = set(threading.enumerate())

    def ranks(world):
        child = world.split(0).split(0)
        return int(child.start_all_reduce(1).wait()) + int(world.start_all_reduce(1).wait())

    assert run(ranks, size=4) == [8] * 4

    def fails(world):
        world.start_all_reduce(1).wait()
        if world.rank == 1:
            raise ValueError("on purpose")
        world.barrier()

    with pytest.raises(ValueError, match="rank 1: on purpose"):
        run(fails, size=4)
    deadline = time.monotonic() + SOON
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def test_a_worker_keeps_no_array_alive():
    def ranks(world):
        x = np.ones(10)
        world.start_all_reduce(x, out=x).wait()
        seen = weakref.ref(x)
        del x
        deadline = time.monotonic() + SOON
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the worker lets go a moment after wait() returns
        return seen() is None

    assert run(ranks, size=2) == [True, True]


def test_a_worker_uses_its_ranks_memory_account():
    def ranks(world):
        world.start_all_reduce(np.ones(1000), algorithm="direct").wait()
        return account.current().peak["communication"]

    assert run(ranks, size=3) == [2 * 8000] * 3


# -------------------------------------------------------------------------------------------- split


@pytest.mark.sampled
@on_both
@settings(max_examples=12)
@given(data=st.data())
def test_split_by_any_colors_and_keys(transport, data):
    size = data.draw(st.integers(1, 7))
    colors = data.draw(st.lists(st.sampled_from((None, -1, 4)), min_size=size, max_size=size))
    keys = data.draw(st.lists(st.none() | st.integers(-3, 3), min_size=size, max_size=size))

    def ranks(world):
        child = world.split(colors[world.rank], keys[world.rank], axis="part")
        if child is None:
            return None
        members = child.all_gather(world.rank).tolist()
        assert members == list(child.world_ranks)
        assert (child.world_rank, child.axis) == (world.rank, "part")
        return members, child.rank

    for rank, got in enumerate(run(ranks, size=size, transport=transport)):
        order = [other if keys[other] is None else keys[other] for other in range(size)]
        members = sorted(
            (other for other in range(size) if colors[other] == colors[rank]),
            key=lambda r: (order[r], r),
        )
        assert got is None if colors[rank] is None else got == (members, members.index(rank))


def test_keys_order_a_group():
    assert run(lambda world: world.split(0, key=-world.rank).world_ranks, size=3) == [(2, 1, 0)] * 3


@on_both
def test_splits_of_splits(transport):
    def ranks(world):
        half = world.split(world.rank // 4)
        quarter = half.split(half.rank // 2)
        again = world.split(world.rank // 4)
        total = [int(group.all_reduce(world.rank)) for group in (quarter, half, again, world)]
        return total, [group.id for group in (world, half, quarter, again)]

    first = run(ranks, size=8, transport=transport)
    second = run(ranks, size=8, transport=transport)
    assert first == second  # ids too: the same in every run
    for rank, (total, ids) in enumerate(first):
        assert total == [sum(range(rank // n * n, rank // n * n + n)) for n in (2, 4, 4, 8)]
        assert len(set(ids)) == 4
    assert len({ids[2] for _, ids in first}) == 4
    assert all(0 <= number < 1 << 64 for _, ids in first for number in ids)


def test_split_refuses_what_is_no_integer():
    def ranks(world):
        for arguments, message in (
            (("red",), "color='red'"),
            ((1 << 63,), f"color={1 << 63} must be an integer"),
            ((0, -1 << 65), f"key={-1 << 65} must be"),
            ((0, 0), "axis=5 must be a name"),
        ):
            with pytest.raises(ConfigError, match=message):
                world.split(*arguments, axis=5)
        with pytest.raises(ConfigError, match=r"the group world has ranks 0 to 1, not \[2\]"):
            world.without([2])

    run(ranks, size=2)


# ------------------------------------------------------------------------------ who may use a group


@pytest.mark.parametrize("transport", [*THREADS, "tcp"])
def test_a_closed_group_says_so(transport):
    """On all transports alike; close() may be said twice, and in any order."""

    def ranks(world):
        outer = world.split(0)
        inner = outer.split(0)
        assert float(inner.start_all_reduce(1.0).wait()) == 2
        world.barrier()
        outer.close()
        inner.close()
        outer.close()
        for group in (outer, inner):
            for verb, *args in (
                ("all_reduce", 1.0),
                ("start_barrier",),
                ("split", 0),
                ("send", 1.0, 0),
                ("recv", 0),
            ):
                with pytest.raises(
                    CommError,
                    match=f"the group {group.axis} was closed, and rank {world.rank} uses",
                ):
                    getattr(group, verb)(*args)
        return float(world.all_reduce(1.0))

    assert run(ranks, size=2, transport=transport) == [2, 2]


@on_both
def test_two_threads_in_one_group_are_refused(transport):
    """The second thread is told, whichever way it calls; the first goes on undisturbed."""

    def ranks(world):
        if world.rank == 0:
            first = threading.Thread(target=world.barrier)
            first.start()
            while not world.guard._busy.locked():
                time.sleep(0.001)
            for call in (world.barrier, world.start_barrier):
                with pytest.raises(
                    CommError,
                    match="two threads of rank 0 use the group world at the same time.*split",
                ):
                    call()
            world.send(1.0, dst=1)  # messages are for any thread
            first.join()
        else:
            world.recv(src=0)
            world.barrier()

    run(ranks, size=2, transport=transport)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_child_of_a_rank_may_not_use_its_group(transport):
    """A fork has the rank's connections: it would send in the rank's name, and say goodbye in it
    when it ends."""

    def ranks(world):
        told, tell = os.pipe()
        # of a fork beside threads: that is what this is about
        warnings.simplefilter("ignore", DeprecationWarning)
        for end in ("return", "exit", "raise"):
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                for call in (lambda: world.all_reduce(1.0), lambda: world.start_send(1.0, 0)):
                    try:
                        call()
                    except CommError as error:
                        os.write(tell, str(error).encode() + b"\n")
                if end == "exit":
                    sys.exit(0)
                if end == "raise":
                    raise ValueError("of the child")
                return None
            os.wait()
        assert float(world.all_reduce(1.0)) == 2
        return os.read(told, 4000).decode().splitlines()

    with nothing_left():
        for rank, lines in enumerate(run(ranks, size=2, transport=transport)):
            assert len(lines) == 6
            for line in lines:
                assert re.match(
                    rf"process \d+ uses the group world of rank {rank}, which is process \d+, ",
                    line,
                )


@pytest.mark.parametrize("status", [0, 256])
def test_a_rank_as_a_thread_that_exits_with_status_0_does_not_end_the_program_as_if_all_were_well(
    status,
):
    def ranks(world):
        if world.rank == 1:
            sys.exit(status)
        world.barrier()

    with pytest.raises(
        PeerLostError, match=rf"rank 1 \(process \d+ on \S+\) exited with status {status}"
    ):
        run(ranks, size=2)


def test_an_exchange_is_one_call():
    def ranks(world):
        other = 1 - world.rank
        for _ in range(2):
            world.exchange(1.0, other, other)
        if world.rank == 1:
            world.exchange(1.0, other, other)
            return
        with pytest.raises(
            MismatchError,
            match=r"(?s)rank 0 calls exchange.*, its call 3.*rank 1 calls.*, its call 3",
        ):
            world.exchange(1.0, other, other, out=np.zeros(2))

    run(ranks, size=2)


def test_a_group_must_hold_the_rank_that_makes_it():
    def ranks(world):
        if world.rank == 0:
            with pytest.raises(ConfigError, match="world rank 0 is not in the group"):
                Group(world.transport, world.ledger, (1,))

    run(ranks, size=2)


# ---------------------------------------------------------------------------------- ranks that fail


@on_both
@pytest.mark.parametrize("size", [2, 5])
def test_one_failure_ends_every_rank_with_its_name(transport, size):
    seen = {}

    def ranks(world):
        try:
            if world.rank == 1:
                raise ZeroDivisionError("division on purpose")
            while True:
                world.all_reduce(np.ones(3), algorithm="ring")
        except PeerLostError as error:
            seen[world.rank] = error
            raise

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="^rank 1: division on purpose$"):
        run(ranks, size=size, transport=transport)
    assert time.monotonic() - start < SOON
    assert set(seen) == set(range(size)) - {1}
    for error in seen.values():
        assert error.world_rank == 1
        assert "ZeroDivisionError: division on purpose" in str(error)
        assert "test_group.py:" in str(error)


@pytest.mark.parametrize(
    ("late", "error", "names"),
    [
        (False, DeadlockError, r"0 waits for 2 at \S*test_group.py:\d+, rank 2 has ended\n"),
        (
            True,
            TimeoutError,
            r"rank 2 waits for no rank, at \S*test_group.py:\d+; late by \d\.\d s",
        ),
    ],
)
def test_a_rank_that_never_calls_is_named(late, error, names, monkeypatch):
    """It ends, or the limit comes, when both others wait for long."""
    together = threading.Barrier(2)
    waits = []
    over = []

    def both_wait():
        return len(waits) == 2 and all([each._lasting for each in waits])

    if late:
        limit_comes(monkeypatch, both_wait)

    def ranks(world):
        while world.rank == 2 and not (over or (not late and both_wait())):
            time.sleep(0.01)
        if world.rank == 2:
            return
        waits.append(world.transport.waits)
        together.wait()
        try:
            world.all_reduce(np.ones(3), algorithm="ring")
        finally:
            over.append(True)

    with pytest.raises(error, match=names) as caught:
        run(ranks, size=3)
    assert re.search(
        r"rank 1 calls all_reduce\(.*\), its call 1, at \S*test_group.py:\d+", str(caught.value)
    )


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@on_both
def test_cupy_arrays_stay_on_their_device(transport):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")

    def ranks(world):
        x = cupy.arange(6, dtype=np.float32).reshape(2, 3) + world.rank
        total = 2 * cupy.arange(6).reshape(2, 3) + 1
        for got in (
            world.all_reduce(x),
            world.all_reduce(x.T.copy().T),
            world.all_reduce(x, out=cupy.empty_like(x)),
            world.start_all_reduce(x, algorithm="ring").wait(),
        ):
            assert isinstance(got, cupy.ndarray)
            assert (got == total).all()
        assert isinstance(world.broadcast(x if world.rank == 1 else None, root=1), cupy.ndarray)
        assert world.all_gather(x).shape == (4, 3)
        assert (
            world.exchange(x, dst=1 - world.rank, src=1 - world.rank)
            == x - world.rank + 1 - world.rank
        ).all()
        host = np.empty((2, 3), np.float32)
        assert world.all_reduce(x, out=host) is host
        assert (host == total.get()).all()

    run(ranks, size=2, transport=transport)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_algorithm_takes_cupy_arrays(size):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    run(gpu_calls.every_algorithm, size, size=size)


@pytest.mark.parametrize("transport", ["threads", pytest.param("tcp", marks=pytest.mark.soak)])
def test_messages_to_oneself_in_two_groups(transport):
    """Each group has a link of its own to itself; all of them end with the transport, however that
    ends."""

    def job(world):
        groups = [world.split(0), world.split(0)]
        for number, group in enumerate(groups):
            group.send(np.array([number]), dst=group.rank)
        assert [group.recv(src=group.rank).item() for group in groups] == [0, 1]
        world.barrier()
        if world.rank == 1 and fails:
            raise ArithmeticError("on purpose")
        if fails:
            groups[0].recv(src=1)
        return world.rank

    fails = False
    assert run(job, size=2, transport=transport) == [0, 1]
    fails = True
    with pytest.raises(ArithmeticError, match="rank 1: on purpose"):
        run(job, size=2, transport=transport)


@pytest.mark.sampled
@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_calls_alike_in_another_order_are_warned_of(algorithm):
    """Nothing but their places tells them apart; ranks that branch, each at its own place, are left
    alone."""

    def first(world):
        return float(world.all_reduce(np.ones(2) * world.rank, algorithm=algorithm)[0])

    def second(world):
        return float(world.all_reduce(np.ones(2) * 10, algorithm=algorithm)[0])

    def branch(world):
        return [first(world) if world.rank else second(world) for _ in range(3)][0]

    def swap(world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [call(world) for call in ((first, second) if world.rank else (second, first))]
        return [str(warning.message) for warning in caught], results

    transport = "shm" if algorithm == "shared" else "tcp"
    assert run(branch, size=2, transport=transport) == [11.0, 11.0]
    for texts, results in run(swap, size=2, transport=transport):
        assert results in ([11.0, 10.0], [10.0, 11.0], [11.0, 10.0])
        assert len(texts) == 1 and re.match(
            r"rank \d at .*test_group.py:\d+ is paired with rank \d at .*test_group.py:\d+ in "
            r"all_reduce, but an earlier call paired these places the other way round",
            texts[0],
        ), texts


@pytest.mark.parametrize("transport", [pytest.param("threads", marks=pytest.mark.soak), "tcp"])
def test_a_closed_group_leaves_nothing_and_an_open_one_no_thread(transport, monkeypatch):
    monkeypatch.setattr(async_call, "_IDLE", 0.02)

    def job(world):
        def rounds(count, close):
            for _ in range(count):
                group = world.split(0)
                group.send(np.ones(1), dst=group.rank)
                group.recv(src=group.rank)
                group.start_all_reduce(np.ones(2)).wait()
                if close:
                    group.close()
            world.barrier()
            gc.collect()
            return sum(
                isinstance(one, Group | GroupGuard | CallWorker | Mailbox)
                for one in gc.get_objects()
            )

        if transport == "tcp":
            gc.freeze()  # a process of its own: what the tests have made is not looked at again
        rounds(2, close=True)
        counts = rounds(1, close=True), rounds(10, close=True)
        world.barrier()
        rounds(10, close=False)
        deadline = time.monotonic() + SOON
        while any(
            thread.name.startswith(f"rank {world.rank} world.split")
            for thread in threading.enumerate()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return counts

    for before, after in run(job, size=2, transport=transport):
        # another thread rank may be at work
        assert after <= before + 4, f"{before} objects, then {after}"
