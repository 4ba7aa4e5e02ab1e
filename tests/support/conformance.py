"""What every transport must do, as functions of (world) that run on its ranks; run by
tests/comm/test_conformance.py.

They stand in a module of their own so that ranks started by mpirun can import them. PEACEFUL checks
leave the job as it was and run one after the other in one job; each of the others ends its job.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from collective_checker import ALL_PAIRS, ONLY_ON, REDUCING, ROOTED, Drawn, expected, on_rank, same

from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.group import Group
from minidist.comm.handle import Handle
from minidist.comm.limits import META_LIMIT
from minidist.comm.transport import Tag, Transport
from minidist.errors import CommError, MismatchError, PeerLostError, TimeoutError

GROUP = 0xC0FFEE  # the id in the tags of these messages: no group of the job has it


def into(array: np.ndarray) -> Any:
    """An Accept that receives into `array`, whatever the header says."""
    return lambda meta, nbytes: array


def send(world: Group, peer: int, sequence: int, array: np.ndarray, meta: bytes = b"") -> Handle:
    return world.transport.start_send(peer, Tag(GROUP, sequence), array, meta)


def recv(world: Group, peer: int, sequence: int, array: np.ndarray, reduce: Any = None) -> Handle:
    return world.transport.start_recv(peer, Tag(GROUP, sequence), into(array), reduce)


def meeting(world: Group) -> Callable[[], None]:
    """Return what every rank calls once: the last rank's call returns when all others have called
    it.

    It waits for files, and in no call of the group: for whoever judges waits, that rank computes.
    """
    last = world.size - 1
    made = np.frombuffer(os.fsencode(tempfile.mkdtemp()), np.uint8) if world.rank == last else None
    folder = os.fsdecode(world.broadcast(made, root=last).tobytes())
    limit = world.transport.limit

    def meet() -> None:
        if world.rank != last:
            return Path(folder, str(world.rank)).touch()
        deadline = time.monotonic() + limit
        while len(os.listdir(folder)) < last:
            assert time.monotonic() < deadline, (
                f"after {limit:g} s only ranks {os.listdir(folder)} have come"
            )
            time.sleep(0.01)
        return shutil.rmtree(folder)

    return meet


def neighbours(world: Group) -> tuple[int, int]:
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def attributes(world: Group) -> None:
    transport = world.transport
    assert isinstance(transport, Transport)
    assert (transport.world_rank, transport.world_size) == (world.rank, world.size)
    assert transport.name
    assert transport.limit > 0


def order_within_a_tag_and_none_between_tags(world: Group) -> None:
    after, before = neighbours(world)
    sent = [send(world, after, tag, np.array([100 * tag + i])) for i in range(20) for tag in (1, 2)]
    for tag in (2, 1):
        for i in range(20):
            got = np.zeros(1, np.int64)
            recv(world, before, tag, got).wait()
            assert got[0] == 100 * tag + i, f"tag {tag}, message {i}: got {got[0]}"
    for handle in sent:
        handle.wait()


def header_arrives_whole(world: Group) -> None:
    after, before = neighbours(world)
    for length in (0, 1, 100, META_LIMIT):
        seen: list[tuple[bytes, int]] = []

        def accept(meta: bytes, nbytes: int, seen: list[tuple[bytes, int]] = seen) -> np.ndarray:
            seen.append((bytes(meta), nbytes))
            return np.empty(nbytes, np.uint8)

        arriving = world.transport.start_recv(before, Tag(GROUP, 3), accept)
        send(world, after, 3, np.zeros(length, np.int16), bytes([world.rank]) * length).wait()
        arriving.wait()
        assert seen == [(bytes([before]) * length, 2 * length)]


def everyone_sends_much_at_once(world: Group) -> None:
    """Payloads larger than any buffer, in both directions; whichever handle is waited for first."""
    n = 1_500_001
    for first in ("send", "recv"):
        peers = [peer for peer in range(world.size) if peer != world.rank]
        got = {peer: np.empty(n, np.float32) for peer in peers}
        sent = [send(world, peer, 4, np.full(n, world.rank + 1, np.float32)) for peer in peers]
        arriving = [recv(world, peer, 4, got[peer]) for peer in peers]
        for handle in sent + arriving if first == "send" else arriving + sent:
            handle.wait()
        for peer in peers:
            assert (got[peer] == peer + 1).all(), f"from {peer}"


def pieces_cover_the_target_once(world: Group) -> None:
    after, before = neighbours(world)
    for kind in (np.float64, ml_dtypes.bfloat16, np.complex128):
        for n in (0, 1, 1000, 777_777):
            edges = [0]

            def add(
                target: np.ndarray, start: int, piece: np.ndarray, edges: list[int] = edges
            ) -> None:
                assert start == edges[-1], "pieces come in order"
                assert piece.dtype == target.dtype
                assert piece.ndim == 1
                edges.append(start + len(piece))
                target[start : start + len(piece)] += piece

            total = np.ones(n, kind)
            arriving = recv(world, before, 5, total, add)
            send(world, after, 5, (np.arange(n) % 50 + before).astype(kind)).wait()
            arriving.wait()
            assert edges[-1] == n
            own = (np.arange(n) % 50 + (before - 1) % world.size).astype(kind)
            assert (total == own + kind(1)).all()


def any_dtype_and_no_bytes(world: Group) -> None:
    after, before = neighbours(world)
    pair = np.dtype([("key", "i4"), ("weight", "f2")])
    for array in (
        np.array([True, False]),
        np.array([1.5, -2.5], ml_dtypes.bfloat16),
        np.array([(1, 2.0)], pair),
        np.array([1 + 2j]),
        np.array([b"ab", b"c"]),
        np.array([], np.float32),
        np.zeros(3, "M8[s]"),
    ):
        array.flags.writeable = False
        got = np.empty_like(array)
        arriving = recv(world, before, 6, got)
        send(world, after, 6, array).wait()
        arriving.wait()
        assert (got == array).all(), f"{array.dtype}"


def many_in_flight(world: Group) -> None:
    """All pairs at once, waited for in the opposite order."""
    peers = [peer for peer in range(world.size) if peer != world.rank]
    got = {(peer, i): np.zeros(i + 1, np.int64) for peer in peers for i in range(30)}
    handles = [recv(world, peer, 100 + i, array) for (peer, i), array in got.items()]
    handles += [
        send(world, peer, 100 + i, np.full(i + 1, 1000 * world.rank + i))
        for peer in peers
        for i in range(30)
    ]
    for handle in reversed(handles):
        handle.wait()
        assert handle.done()
    for (peer, i), array in got.items():
        assert (array == 1000 * peer + i).all()


def several_threads(world: Group) -> None:
    """Each of four threads of every rank has a conversation of its own round the ring."""
    after, before = neighbours(world)
    problems: list[Exception] = []

    def talk(tag: int) -> None:
        try:
            for i in range(25):
                got = np.zeros(500, np.int64)
                arriving = recv(world, before, tag, got)
                send(world, after, tag, np.full(500, 1000 * tag + i)).wait()
                arriving.wait()
                assert (got == 1000 * tag + i).all()
        except Exception as error:  # told by the rank's own thread
            problems.append(error)

    threads = [threading.Thread(target=talk, args=(200 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def waiting_moves_the_other_handles_on(world: Group) -> None:
    """Rank 1 sends the second message only when the large first one is gone; rank 0 waits for the
    second alone."""
    n = 2_000_000
    if world.rank == 1:
        send(world, 0, 7, np.ones(n)).wait()
        send(world, 0, 8, np.ones(1)).wait()
    if world.rank == 0:
        large = np.ones(n)
        small = np.zeros(1)

        def add(target: np.ndarray, start: int, piece: np.ndarray) -> None:
            target[start : start + len(piece)] += piece

        first = recv(world, 1, 7, large, add)
        recv(world, 1, 8, small).wait()
        assert small[0] == 1
        first.wait()
        assert (large == 2).all()


def refused_message_leaves_the_link_whole(world: Group) -> None:
    after, before = neighbours(world)
    for n in (1, 500_000):

        def refuse(meta: bytes, nbytes: int) -> np.ndarray:
            raise MismatchError(f"not what I want: {meta.decode()}")

        arriving = world.transport.start_recv(before, Tag(GROUP, 9), refuse)
        sent = send(world, after, 9, np.ones(n), b"apples")
        try:
            arriving.wait()
        except MismatchError as error:
            assert "apples" in str(error)
        else:
            raise AssertionError("the refusal was not raised")
        sent.wait()
        got = np.zeros(3)
        arriving = recv(world, before, 9, got)
        send(world, after, 9, np.arange(3.0)).wait()
        arriving.wait()
        assert (got == np.arange(3)).all()


def limit_ends_a_wait(world: Group) -> None:
    peer = (world.rank + 1) % world.size
    limit = world.transport.limit
    meet = meeting(world)
    handle = recv(world, peer, 10, np.zeros(1))
    assert not handle.done()
    if world.rank != world.size - 1:  # if all waited, that were a deadlock
        world.transport.limit = 0.3
        start = time.monotonic()
        try:
            handle.wait()
        except TimeoutError as error:
            assert f"rank {world.rank}" in str(error)
            assert f"rank {peer}" in str(error)
        else:
            raise AssertionError("the wait did not end")
        finally:
            world.transport.limit = limit
        assert 0.2 < time.monotonic() - start < limit / 2
    meet()
    world.barrier()
    send(world, (world.rank - 1) % world.size, 10, np.zeros(1)).wait()
    handle.wait()


def waiting_burns_no_core(world: Group) -> None:
    if world.rank == 1:
        time.sleep(0.4)
        send(world, 0, 11, np.ones(1)).wait()
    if world.rank == 0:
        start = time.monotonic()
        burnt = time.thread_time()
        recv(world, 1, 11, np.zeros(1)).wait()
        waited = time.monotonic() - start
        burnt = time.thread_time() - burnt
        assert burnt < 0.25 * max(waited, 0.4), (
            f"{burnt:.2f} s of processor time to wait {waited:.2f} s"
        )


PEACEFUL = (
    attributes,
    order_within_a_tag_and_none_between_tags,
    header_arrives_whole,
    everyone_sends_much_at_once,
    pieces_cover_the_target_once,
    any_dtype_and_no_bytes,
    many_in_flight,
    several_threads,
    waiting_moves_the_other_handles_on,
    refused_message_leaves_the_link_whole,
    limit_ends_a_wait,
    waiting_burns_no_core,
)


BLOCKING = PEACEFUL
"""The checks that hold a transport whose sends block, plain_tcp.py: no peaceful one needs a send
that returns early."""


def all_peaceful(world: Group) -> None:
    """Every peaceful check, one after the other; the first that fails says which it was."""
    for check in BLOCKING if world.transport.name == "plain-tcp" else PEACEFUL:
        try:
            check(world)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
        world.barrier()


def verbs(world: Group, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Calls by Drawn's fields, each result checked here. Returns what the ledger counted:
    [messages, bytes] of each."""
    counted = []
    for fields in cases:
        case = Drawn(**fields)
        world.ledger.clear()
        result, untouched, _ = on_rank(world, case)
        want = expected(case)[world.rank]
        assert untouched, f"{case}: the argument was changed"
        assert same(result, want), f"{case}: rank {world.rank} got {result!r}, expected {want!r}"
        rows = world.ledger.rows()
        counted.append([sum(row["messages"] for row in rows), sum(row["nbytes"] for row in rows)])
    return counted


DTYPES = ("float32", "bfloat16", "int64", ">f8", "float16", "complex64", ">u2")
MPI_DTYPES = ("float32", "uint8", "int64", "float64", "int16", "uint32")


def fixed_cases(size: int, transport: str, *, every: bool = False) -> Iterator[dict[str, Any]]:
    """Every verb by every algorithm of the transport: lengths around the group's size, several
    dtypes and roots.

    On three ranks two of the six lengths each, others with the next algorithm, unless `every` is
    asked for.
    """
    for number, (verb, algorithm) in enumerate(ALL_PAIRS):
        if algorithm in ONLY_ON and transport not in ONLY_ON[algorithm]:
            continue
        dtypes = MPI_DTYPES if algorithm == "native" and verb in REDUCING else DTYPES
        for turn, length in enumerate((0, 1, size - 1, size, size + 1, 1009)):
            if size == 3 and not every and (turn - number) % 6 not in (0, 2):
                continue
            lengths: list[Any] = [length] * size
            if verb == "all_to_all":
                lengths = [[length + src + dst for dst in range(size)] for src in range(size)]
            elif verb in ("gather", "all_gather") and turn % 2:
                lengths = [length + rank for rank in range(size)]
            yield {
                "verb": verb,
                "algorithm": algorithm,
                "size": size,
                "lengths": lengths,
                "dtype": dtypes[(number + turn) % len(dtypes)],
                "op": ("sum", "max", "prod", "min")[turn % 4] if verb in REDUCING else "sum",
                "root": (turn + 1) % size if verb in ROOTED else 0,
                "layout": ("plain", "strided", "read-only")[turn % 3],
                "how": ("new", "start", "out")[turn % 3] if verb != "barrier" else "new",
                "nodes": [7, 3, 3, 7][:size] if algorithm == "hierarchical" else [],
            }


BESIDE_MPI = ("float32", "int64", "float64", "uint8")


def as_mpi_has_it(world: Group) -> int:
    """Every verb by every algorithm beside what mpi4py's own collectives give; returns how many
    were compared.

    On three ranks, in the default run, in two of the dtypes.
    """
    from mpi4py import MPI

    mpi = MPI.COMM_WORLD
    compared = 0
    ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
    counts = [len(part) for part in np.array_split(np.empty(7), world.size)]
    for dtype in BESIDE_MPI[:2] if world.size == 3 else BESIDE_MPI:
        x = ((np.arange(7) * 5 + 3 * world.rank) % 4 + 1).astype(dtype)
        whole = np.empty(7 * world.size, dtype)
        chunk = np.empty(counts[world.rank], dtype)
        mpi.Allgather(x, whole)
        parts = mpi.alltoall(list(np.array_split(x, world.size)))
        for op, root in zip(ops, range(world.size), strict=False):
            full = x.copy()
            total = np.empty_like(x)
            summed = np.empty_like(x)
            mpi.Bcast(full, root)
            mpi.Reduce(x, total, ops[op], root)
            mpi.Allreduce(x, summed, ops[op])
            mpi.Reduce_scatter(x, chunk, counts, ops[op])
            wanted: dict[str, tuple[Any, dict[str, Any]]] = {
                "reduce": (total if world.rank == root else None, {"op": op, "root": root}),
                "broadcast": (full, {"root": root}),
                "all_reduce": (summed, {"op": op}),
                "reduce_scatter": (chunk, {"op": op}),
                "all_gather": (whole, {}),
                "gather": (whole if world.rank == root else None, {"root": root}),
                "scatter": (np.array_split(full, world.size)[world.rank], {"root": root}),
                "all_to_all": (parts, {}),
            }
            for verb, (want, more) in wanted.items():
                own = list(np.array_split(x, world.size)) if verb == "all_to_all" else x
                for algorithm in filter(lambda name: name != "shared", ALGORITHMS[verb]):
                    got = getattr(world, verb)(own, algorithm=algorithm, **more)
                    assert same(got, want), (
                        f"{verb} {algorithm} {op} {dtype}: got {got}, MPI {want}"
                    )
                    compared += 1
    return compared


BITS = (
    "ring",
    "tree",
    "direct",
    "naive",
    "doubling",
    "halving-doubling",
    "hierarchical",
    "torus",
    "torus-both",
)


def bits(world: Group) -> list[bytes]:
    """All-reduces of numbers whose sum depends on the order of additions, and hierarchical's on who
    shares a node."""
    world.nodes = tuple(rank % 2 for rank in range(world.size))
    x = np.random.default_rng(world.rank).standard_normal(100_003).astype(np.float32)
    return [world.all_reduce(x, algorithm=algorithm).tobytes() for algorithm in BITS]


def calls_in_one_job(
    world: Group, cases: list[dict[str, Any]]
) -> tuple[list[list[Any]], list[bytes], int]:
    """`verbs`, with what one size is enough for in the same job: on four ranks all demands, on
    three the bits.

    Over mpi also `as_mpi_has_it`.
    """
    if world.size == 4:
        all_peaceful(world)
    counted = verbs(world, cases)
    compared = as_mpi_has_it(world) if world.transport.name == "mpi" else 0
    return counted, bits(world) if world.size == 3 else [], compared


def aborted(world: Group) -> bool:
    """A wait of rank 0 that another thread aborts while rank 1 does not wait; and every wait of
    both after it."""
    caught = []
    meet = meeting(world)
    timer = threading.Timer(0.05, world.transport.abort, (CommError("enough"),))
    timer.start()
    if world.rank == 1:
        timer.join()
        meet()  # its end, as a wait for the other, would make that one's a deadlock
    for _ in range(2):
        try:
            recv(world, (world.rank + 1) % world.size, 12, np.zeros(1)).wait()
        except CommError as error:
            caught.append(str(error))
    timer.join()
    if world.rank == 0:
        meet()
    return all("enough" in text for text in caught) and len(caught) == 2


def one_rank_fails(world: Group, folder: str, failing: int) -> None:
    """Rank `failing` raises; what each other rank then gets from a wait goes to a file of the
    folder."""
    start = time.monotonic()
    try:
        world.barrier()
        if world.rank == failing:
            raise LookupError("boom on purpose")
        while True:
            world.barrier()
    except PeerLostError as error:
        text = f"{error.world_rank}|{time.monotonic() - start:.3f}|{error}"
        (Path(folder) / str(world.rank)).write_text(text)
        raise
