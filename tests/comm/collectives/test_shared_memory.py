"""Collectives over a board in shared memory: ranks as threads, each with a real end of it.

LENDING has what depends on whether ranks may read each other's memory: both ways are forced here,
with pieces so small that every drawn length is beyond one or not.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import conformance
import numpy as np
import pytest
from collective_checker import ALL_PAIRS, Drawn, cost_case, examine
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st
from linked import run_shm
from strategies import calls

from minidist.comm.calls.call import Call
from minidist.comm.collectives import shared_memory
from minidist.comm.cost import volume
from minidist.comm.cost.volume import FORMULAS
from minidist.comm.limits import SHOWN_BYTES
from minidist.device import account
from minidist.errors import ConfigError, MismatchError, ShapeError

SHARED = [verb for verb, algorithm in ALL_PAIRS if algorithm == "shared"]
LENDING = ("all_gather", "all_to_all")
PIECE = 8192
"""Bytes shown at a time, in place of SHOWN_BYTES, where no test needs megabytes."""

on_both_ways = pytest.mark.parametrize("lends", [True, False])


@contextmanager
def pieces_of(nbytes: int) -> Iterator[None]:
    """Inside, so many bytes are the most that is shown at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "SHOWN_BYTES", nbytes)
        patch.setattr(volume, "SHOWN_BYTES", nbytes)
        yield


@pytest.mark.parametrize("verb", SHARED)
@settings(max_examples=4)
@given(data=st.data())
def test_sample(verb, data):
    examine(data.draw(calls(verb, "shared", "shm")), run_shm)


@settings(max_examples=6)
@given(data=st.data())
def test_sample_of_short_arrays_in_chunks(data):
    """Arrays that every rank would add by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (shared_memory, volume):
            patch.setattr(module, "SHOWN_WHOLE_BYTES", -1)
        examine(data.draw(calls("all_reduce", "shared", "shm")), run_shm)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", SHARED)
@settings(max_examples=1000, derandomize=False)
@given(data=st.data())
def test_full_count(verb, data):
    examine(data.draw(calls(verb, "shared", "shm")), run_shm)


@on_both_ways
@pytest.mark.parametrize("verb", LENDING)
@settings(max_examples=3)
@given(data=st.data())
def test_sample_in_small_pieces(verb, lends, data):
    with pieces_of(data.draw(st.sampled_from((512, 1024)))):
        examine(data.draw(calls(verb, "shared", "shm")), partial(run_shm, lends=lends))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@on_both_ways
@pytest.mark.parametrize("verb", SHARED)
@settings(max_examples=1000, derandomize=False)
@given(data=st.data())
def test_full_count_in_small_pieces(verb, lends, data):
    with pieces_of(data.draw(st.sampled_from((512, 1024)))):
        examine(data.draw(calls(verb, "shared", "shm")), partial(run_shm, lends=lends))


@on_both_ways
@pytest.mark.parametrize("length", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
def test_pieces_of_a_few_kilobytes(length, lends):
    """Arrays of several pieces, cut anywhere."""
    with pieces_of(PIECE):
        check_pieces(2, length, lends)


@pytest.mark.soak
@on_both_ways
@pytest.mark.parametrize(
    ("size", "length"),
    [
        (2, SHOWN_BYTES + 1),
        *(
            (size, length)
            for size in (2, 3, 5)
            for length in (SHOWN_BYTES - 1, SHOWN_BYTES, 2 * SHOWN_BYTES + 7)
        ),
    ],
)
def test_pieces(size, length, lends):
    check_pieces(size, length, lends)


def check_pieces(size, length, lends):
    """Every verb on arrays of `length` bytes."""
    way = partial(run_shm, lends=lends)
    if not lends:  # else these are the same
        for verb in ("all_reduce", "reduce_scatter"):
            for how in ("new", "in place") if verb == "all_reduce" else ("new",):
                examine(Drawn(verb, "shared", size, [length] * size, "int8", how=how), way)
        examine(Drawn("broadcast", "shared", size, [length] * size, "int8", root=1), way)
    examine(
        Drawn(
            "all_gather", "shared", size, [length // 2 + 3 * rank for rank in range(size)], "int8"
        ),
        way,
    )
    table = [[length * (1 + src * dst) // size for dst in range(size)] for src in range(size)]
    examine(Drawn("all_to_all", "shared", size, table, "int8"), way)


def test_parts_have_as_many_dims_as_their_rank_likes():
    """Rank r brings parts of r dims, rank 0 numbers: their labels are of different lengths."""

    def ranks(world):
        got = world.all_to_all(
            [np.full((2,) * world.rank, 10.0 * world.rank + dst) for dst in range(world.size)]
        )
        return [(part.shape, float(part.sum()) / part.size) for part in got]

    assert run_shm(ranks, size=3) == [
        [((), dst), ((2,), 10.0 + dst), ((2, 2), 20.0 + dst)] for dst in range(3)
    ]


def changed_at_once(world, verb, changed, wait):
    """A call, after which this rank overwrites what it brought and what it got, and joins
    `changed`; rank 1 reads late: after wait()."""
    x = np.full((world.size, 300), world.rank + 1.0)
    if world.rank == 1:
        lend = world.board.read

        def late(*arguments):
            wait()
            lend(*arguments)

        world.board.read = late
    got = (
        world.all_to_all(list(x))
        if verb == "all_to_all"
        else np.split(world.all_gather(x[0]), world.size)
    )
    told = [float(part[0]) for part in got]
    for part in (x, *got):
        part[...] = -1.0
    changed.append(world.rank)
    return told


@pytest.mark.parametrize("verb", LENDING)
def test_what_is_lent_does_not_change_before_all_have_read_it(verb):
    with pieces_of(512):
        assert (
            run_shm(changed_at_once, verb, [], lambda: time.sleep(0.02), size=3)
            == [[1.0, 2.0, 3.0]] * 3
        )


def one_rank_is_not_read(read, call, src, address, into):
    if src == call.next_rank:
        into[...] = 0
    else:
        read(call, src, address, into)


def one_element_further(read, call, src, address, into):
    read(call, src, address + into.itemsize, into)


@pytest.mark.sampled
@pytest.mark.parametrize("verb", LENDING)
@pytest.mark.parametrize("mutant", [one_rank_is_not_read, one_element_further])
def test_mutant_is_caught(mutant, verb, monkeypatch):
    case = Drawn(verb, "shared", 3, [[300] * 3] * 3 if verb == "all_to_all" else [300] * 3)
    with pieces_of(512):
        examine(case, run_shm)
        monkeypatch.setattr(
            Call, "read", lambda *arguments, read=Call.read: mutant(read, *arguments)
        )
        with pytest.raises(AssertionError, match="expected"):
            examine(case, run_shm)


@pytest.mark.parametrize("verb", LENDING)
def test_mutant_that_does_not_wait_for_the_readers_is_caught(verb, monkeypatch):
    show = Call.show

    def hasty(call, *arrays, lent=()):
        return [] if arrays[0] is shared_memory._NOTHING else show(call, *arrays, lent=lent)

    changed = []

    def wait():
        deadline = time.monotonic() + 10
        while len(changed) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(Call, "show", hasty)
    with pieces_of(512):
        assert run_shm(changed_at_once, verb, changed, wait, size=3)[1] != [1.0, 2.0, 3.0]


def unreadable(count):
    """Bytes that this process can read, and the kernel does not let others read: here its clock,
    often a driver's."""
    begin = next(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("[vvar]")
    )
    return np.frombuffer((ctypes.c_char * count).from_address(begin), np.uint8)


def test_memory_that_others_cannot_read_is_copied_before_it_is_lent():
    def job(world):
        clock = unreadable(8)  # the first bytes stay as they are
        assert (
            world.board.lends
            and not world.board.lendable(clock)
            and world.board.lendable(np.empty(0))
        )
        monkeypatch.setattr(world.board, "lendable", lambda array: False)
        with account.use(account.MemoryAccount()) as told:
            result = world.all_gather(np.full(300, world.rank + 1.0))
            assert told.peak["communication"] == 2400
            parts = world.all_to_all(
                [np.full(300, 10.0 * world.rank + dst) for dst in range(world.size)]
            )
        return result[::300].tolist(), [part[-1] for part in parts]

    with pieces_of(512), pytest.MonkeyPatch.context() as monkeypatch:
        for rank, (gathered, parts) in enumerate(run_shm(job, size=3)):
            assert gathered == [1.0, 2.0, 3.0]
            assert parts == [10.0 * src + rank for src in range(3)]


def test_a_rank_that_fails_meanwhile_keeps_what_it_lent_until_all_have_read_it():
    def job(world):
        x = [np.full(300, 10.0 * world.rank + dst) for dst in range(3)]
        out = [np.empty(300 + (world.rank == 1 and src == 2)) for src in range(3)]
        if world.rank == 1:
            with pytest.raises(ShapeError):
                world.all_to_all(x, out=out)
            for part in x:
                part[...] = -1.0
        else:
            late = world.board.read
            world.board.read = lambda *arguments: (time.sleep(0.02), late(*arguments))
            world.all_to_all(x, out=out)
        return [part[0] for part in out], float(world.all_reduce(1.0))

    with pieces_of(512):
        told = run_shm(job, size=3)
    assert told[0][0] == [0.0, 10.0, 20.0] and told[2][0] == [2.0, 12.0, 22.0]
    assert [total for _, total in told] == [3.0] * 3, "the job continues"


@on_both_ways
def test_an_array_that_is_its_own_part_of_out(lends):
    def job(world):
        out = np.zeros((world.size, 500))
        out[world.rank] = world.rank + 1
        assert world.all_gather(out[world.rank : world.rank + 1], out=out) is out
        return out[:, -1].tolist()

    with pieces_of(512):
        assert run_shm(job, size=3, lends=lends) == [[1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize("lends", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_between_processes(lends, monkeypatch):
    """Run what conformance does for short arrays: several dtypes, layouts and ways to get the
    result."""
    if not lends:
        monkeypatch.setattr("minidist.comm.transports.shm.process_vm_read._readv", None)
    cases = [
        {
            "verb": verb,
            "algorithm": "shared",
            "size": 3,
            "dtype": dtype,
            "how": how,
            "layout": layout,
            "lengths": [[longest + src * dst for dst in range(3)] for src in range(3)]
            if verb == "all_to_all"
            else [longest, 0, longest + 7],
        }
        for verb in LENDING
        for longest, dtype, how, layout in (
            (0, "float32", "new", "plain"),
            (400, "bfloat16", "out", "strided"),
            (2003, "int64", "start", "plain"),
            (1000, "float16", "new", "read-only"),
            (129, "complex64", "out", "transposed"),
        )
    ]

    def job(world, cases):
        return world.board.lends, conformance.verbs(world, cases)

    with pieces_of(1024):
        told = run(job, cases, size=3, transport="shm")
        ways = {way for way, _ in told}
        assert len(ways) == 1 and (lends or ways == {False}), (
            "what the system allows, the same for all"
        )
        for number, fields in enumerate(cases):
            case = replace(cost_case(Drawn(**fields)), lends=ways == {True})
            formula = FORMULAS[fields["verb"], "shared"]
            counted = [sum(rank[number][unit] for _, rank in told) for unit in (0, 1)]
            assert counted == [formula.messages_of(case), formula.bytes_of(case)], fields


def many_calls(world):
    """Calls of all lengths one after the other, in two groups that overlap: a turn must not be
    overwritten too soon."""
    half = world.split(world.rank % 2)
    for number in range(60):
        x = np.full(1 + 977 * (number % 9), world.rank + number)
        assert (world.all_reduce(x) == sum(range(world.size)) + world.size * number).all()
        assert (
            half.all_reduce(x) == sum(range(world.rank % 2, world.size, 2)) + half.size * number
        ).all()
    return world.ledger.rows()


def test_many_calls():
    for rows in run_shm(many_calls, size=4):
        assert {row["algorithm"] for row in rows if row["verb"] == "all_reduce"} == {"shared"}, (
            "what auto means here"
        )


def odd_one(world):
    with pytest.raises(MismatchError, match=r"op.*\n.*max.*\n.*sum|op.*\n.*sum.*\n.*max"):
        world.all_reduce(np.ones(3), op="max" if world.rank == 1 else "sum", algorithm="shared")


def test_ranks_that_disagree_learn_it_from_the_board():
    run_shm(odd_one, size=3)


def test_ranks_that_share_no_memory_are_told():
    def job(world):
        with pytest.raises(ConfigError, match="shared needs ranks that share memory"):
            world.all_reduce(np.ones(3), algorithm="shared")

    run(job, size=2)
