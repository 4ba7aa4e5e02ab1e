"""What ranks with GPUs do: on a stand-in for CuPy in tests/comm/transports/gpu/test_nccl.py, on
real ones under -m gpu.

In a module of its own, so that ranks of other processes can import it. As a program, on ranks that
are processes:

    python tests/support/gpu_calls.py shm                               every algorithm, on ranks that it forks
    minidist launch -n 2 tests/support/gpu_calls.py nccl messages       some of CALLS, or all
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from collective_checker import PAIRS, REDUCING, ROOTED, Drawn, bring, call, expected, same

import minidist as md
from minidist.comm.group import Group
from minidist.comm.transports.gpu import nccl
from minidist.launch import detect

VERBS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
DTYPES = ("float32", "float64", "int64", "bfloat16", "float16", "uint8", "int32")


def cases(size: int) -> list[dict[str, Any]]:
    """Every verb: lengths around the group's size, several dtypes, ops and roots."""
    found = []
    for number, verb in enumerate(VERBS):
        for turn, length in enumerate((0, 1, size - 1, size, size + 1, 1009)):
            lengths: Any = [length] * size
            if verb == "all_to_all":
                lengths = [
                    [length + src + dst if turn else 0 for dst in range(size)]
                    for src in range(size)
                ]
            elif verb in ("gather", "all_gather") and turn % 2:
                lengths = [length + rank for rank in range(size)]
            found.append(
                {
                    "verb": verb,
                    "size": size,
                    "lengths": lengths,
                    "dtype": DTYPES[(number + turn) % 7],
                    "algorithm": ("auto", "native")[turn % 2],
                    "op": ("sum", "max", "prod", "min")[turn % 4] if verb in REDUCING else "sum",
                    "root": (turn + 1) % size if verb in ROOTED else 0,
                    "layout": ("plain", "strided")[turn % 2],
                    "how": ("new", "start", "out", "in place")[
                        turn % 4 if verb == "all_reduce" else turn % 3
                    ],
                }
            )
    return found


def on_device(x: Any) -> Any:
    """The same array, or arrays, on the GPU."""
    import cupy  # noqa: PLC0415 - only where there is one, or its stand-in

    if isinstance(x, list):
        return [on_device(part) for part in x]
    return None if x is None else cupy.asarray(x)


def back(x: Any) -> Any:
    """The same on the host; it must have been on this rank's GPU."""
    import cupy  # noqa: PLC0415

    if isinstance(x, list):
        return [back(part) for part in x]
    assert not isinstance(x, np.ndarray), "the result left the GPU"
    assert x is None or x.device.id == cupy.cuda.Device().id, "the result is on another rank's GPU"
    return None if x is None else x.get()


def right(world: Group, fields: dict[str, Any], *, on_gpus: bool = True) -> None:
    """One case: the result, where it is, and that the argument is as it was. `on_gpus`: no byte
    goes over the host."""
    case = Drawn(**fields)
    x = on_device(bring(case, world.rank))
    want = expected(case)[world.rank]
    out = None
    if case.how == "out" and want is not None:
        out = on_device(
            [np.empty_like(one) for one in want] if isinstance(want, list) else np.empty_like(want)
        )
    elif case.how == "in place":
        out = x
    before = moved_by(world, case.verb)
    got = call(world, case, x, out)
    if out is not None and want is not None and not isinstance(out, list):
        assert got is out
    assert same(back(got), want), (
        f"rank {world.rank}, {fields}: got {back(got)!r}, expected {want!r}"
    )
    assert case.how == "in place" or same(back(x), bring(case, world.rank)), (
        f"{fields}: the argument was changed"
    )
    if on_gpus:
        now = moved_by(world, case.verb)
        assert "native" in now
        assert {**now, "native": 0} == {**before, "native": 0}, (
            f"{fields}: another algorithm moved bytes"
        )


def moved_by(world: Group, verb: str) -> dict[str, int]:
    """Messages of the verb until now, by algorithm."""
    rows = [row for row in world.ledger.rows() if row["verb"] == verb]
    return {
        row["algorithm"]: sum(
            one["messages"] for one in rows if one["algorithm"] == row["algorithm"]
        )
        for row in rows
    }


def all_cases(world: Group, size: int) -> None:
    """Every case; a mean; and that nothing was staged where nothing had to be."""
    for fields in cases(size):
        right(world, fields)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        mean = world.all_reduce(on_device(np.full(5, world.rank, dtype)), op="mean")
        assert mean.get().tolist() == [(size - 1) / 2] * 5


def every_algorithm(world: Group, size: int) -> None:
    """Each case by each algorithm of its verb: arrays of the GPU that are staged through the
    host."""
    for fields in cases(size):
        for algorithm in (algorithm for verb, algorithm in PAIRS if verb == fields["verb"]):
            right(world, {**fields, "algorithm": algorithm}, on_gpus=False)


class _Alone:
    """The one rank's place to meet the others."""

    world_rank = 0

    def meet(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        return [info]


def one_rank(world: Group) -> None:
    """NCCL itself, which a group of one rank never asks: each of its calls, dtypes and
    operations."""
    device: Any = nccl.connect(_Alone(), world.transport).device
    side = device.side(1 << 20)
    native = device.native(1 << 20, [world.world_rank])

    def right(work: Any, out: Any, want: np.ndarray) -> None:
        _, mark = side.carry_out(side.begin(), work, out)
        side.join(mark)
        assert same(back(out), want)

    for name in DTYPES:
        values = np.arange(1009).astype(Drawn("", "", 1, 0, dtype=name).kind())
        x = on_device(values)
        octets = values.view(np.uint8)
        for op in ("sum", "max", "min", "prod"):
            out = on_device(np.zeros_like(values))
            again = on_device(np.zeros_like(values))
            right(lambda op=op, x=x, out=out: native.all_reduce(x, out, op), out, values)
            right(
                lambda op=op, x=x, out=again: native.reduce_scatter(x, out, [1009], op),
                again,
                values,
            )
        out = on_device(np.zeros_like(octets))
        right(
            lambda out=out, x=x: native.all_gather(x.view(np.uint8), out, [out.size]), out, octets
        )
        right(lambda x=x: native.broadcast(x.view(np.uint8), 0), x, values)
        out = on_device(np.zeros_like(octets))
        right(
            lambda out=out, x=x: native.all_to_all(x.view(np.uint8), [out.size], out, [out.size]),
            out,
            octets,
        )


def mixed(world: Group) -> None:
    """Host arrays beside device arrays; results on the other side; groups of groups; several calls
    at once."""
    assert world.all_reduce(np.ones(3)).tolist() == [world.size] * 3
    told = world.broadcast(np.arange(4) if world.rank == 0 else None)
    assert isinstance(told, np.ndarray)
    assert told.tolist() == [0, 1, 2, 3]
    host = np.zeros(3)
    assert world.all_reduce(on_device(np.ones(3)), out=host) is host
    assert host.tolist() == [world.size] * 3
    staged = world.all_reduce(on_device(np.ones(3)), algorithm="ring")
    assert back(staged).tolist() == [world.size] * 3
    # NCCL has no int16: by way of the host
    unknown = world.all_reduce(on_device(np.ones(3, np.int16)))
    assert back(unknown).tolist() == [world.size] * 3
    half = world.split(world.rank % 2)
    again = world.split(0, key=-world.rank)
    assert half is not None
    assert again is not None
    started = [
        group.start_all_reduce(on_device(np.full(2000, world.rank + 1.0)))
        for group in (half, again, world)
    ]
    results = [back(pending.wait()) for pending in reversed(started)]
    total = world.size * (world.size + 1) / 2
    for result, want in zip(
        results,
        (total, total, sum(rank + 1 for rank in range(world.rank % 2, world.size, 2))),
        strict=True,
    ):
        assert (result == want).all()
    world.barrier()


def in_a_stream_of_its_own(world: Group) -> None:
    """The program does not use the default stream, nor so does what a worker does for it: by way of
    the host, alone."""
    import cupy  # noqa: PLC0415

    alone = world.split(world.rank)
    total = world.size * (world.size + 1) / 2
    assert alone is not None
    with cupy.cuda.Stream(non_blocking=True):
        for group, algorithm, want in (
            (world, "ring", total),
            (alone, "auto", world.rank + 1),
            (alone, "ring", world.rank + 1),
        ):
            x = on_device(np.full(2000, world.rank + 1.0))
            out = on_device(np.zeros(2000))
            assert (back(group.start_all_reduce(x, algorithm=algorithm).wait()) == want).all()
            assert group.start_all_reduce(x, out=out, algorithm=algorithm).wait() is out
            assert (back(out) == want).all()
        for verb in ("reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter"):
            assert (back(getattr(alone, f"start_{verb}")(x).wait()) == world.rank + 1).all()
        assert (back(alone.start_all_to_all([x]).wait()[0]) == world.rank + 1).all()


def in_order(world: Group, rounds: int) -> None:
    """The program writes an array, reduces it, reads the result and writes again, never waiting for
    the GPU itself."""
    import cupy  # noqa: PLC0415

    x = cupy.empty(5000, np.float64)
    kept = []
    for turn in range(rounds):
        x[...] = float(turn * 10 + world.rank)
        pending = world.start_all_reduce(x) if turn % 2 else None
        total = pending.wait() if pending else world.all_reduce(x)
        kept.append(total.copy())
    want = sum(range(world.size))
    for turn, total in enumerate(kept):
        assert (back(total) == turn * 10 * world.size + want).all(), turn


def messages(world: Group, rounds: int) -> None:
    """Both send first; many under way, waited for in any order; to the host, from the host, to
    oneself, nothing."""
    after = (world.rank + 1) % world.size
    before = (world.rank - 1) % world.size
    for turn in range(rounds):
        n = (0, 1, 30_000)[turn % 3]
        got = world.exchange(on_device(np.full(n, turn + 10.0 * world.rank)), dst=after, src=before)
        assert (back(got) == np.full(n, turn + 10.0 * before)).all()
    arrays = [on_device(np.full((3, i + 1), 100 * world.rank + i, np.float32)) for i in range(8)]
    sent = [world.start_send(x, dst=after) for x in arrays]
    arriving = [world.start_recv(src=before) for _ in arrays]
    for i in (5, 0, 7, 3, 1, 2, 4, 6):
        got = back(arriving[i].wait())
        assert got.shape == (3, i + 1)
        assert (got == 100 * before + i).all()
    for pending in sent:
        pending.wait()
    x = on_device(np.arange(5) + world.rank)
    host = np.zeros(5, np.int64)
    device = on_device(np.zeros(5, np.int64))
    leaving = [
        world.start_send(x, dst=after),
        world.start_send(np.arange(5) + world.rank, dst=after),
    ]
    assert world.recv(src=before, out=host) is host
    assert world.recv(src=before, out=device) is device
    assert host.tolist() == back(device).tolist() == (np.arange(5) + before).tolist()
    for pending in leaving:
        pending.wait()
    world.send(x, dst=world.rank)
    assert back(world.recv(src=world.rank)).tolist() == back(x).tolist()
    moved = world.ledger.rows()
    assert (
        sum(row["nbytes"] for row in moved if row["verb"] == "send")
        == sum(3 * (i + 1) * 4 for i in range(8)) + 80
    )


def staged(world: Group) -> list[Any]:
    """An algorithm of ours on an array of the GPU; which GPU this rank has."""
    total = back(world.all_reduce(on_device(np.array([1.0, 2.0])), algorithm="ring"))
    device: Any = world.transport.device
    return [world.transport.name, device.gpu.device.id, total.tolist()]


CALLS: dict[str, Callable[[Group], None]] = {
    "every_algorithm": lambda world: every_algorithm(world, world.size),
    "in_order": lambda world: in_order(world, 50),
    "all_cases": lambda world: all_cases(world, world.size),
    "in_a_stream_of_its_own": in_a_stream_of_its_own,
    "messages": lambda world: messages(world, 30),
    "mixed": mixed,
}


def main(transport: str, *names: str) -> None:
    """As a rank of a launcher, these CALLS (all); alone, every algorithm on 2 and 3 ranks that are
    forked here."""
    if not detect().alone:
        world = md.init(transport=transport)
        for name in names or CALLS:
            told(world.size, transport, name, lambda name=name: CALLS[name](world), world.rank == 0)
        return
    for size in (2, 3):  # the parent must not use the GPU, because it forks
        told(
            size,
            transport,
            "every_algorithm",
            lambda size=size: md.run(
                every_algorithm, size, size=size, transport=transport, limit=120
            ),
            True,
        )


def told(size: int, transport: str, name: str, work: Callable[[], Any], shown: bool) -> None:
    """The work, and a line about it."""
    begun = time.monotonic()
    work()
    if shown:
        print(
            f"{transport}, {size} ranks: {name} right, {time.monotonic() - begun:.1f} s", flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
