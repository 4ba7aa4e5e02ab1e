"""The checker of collectives: runs one drawn case on ranks and holds results, arguments, bits and
ledger to account.

`examine(case)` raises AssertionError (or what a rank raised) if the algorithm is wrong in any way
that can be seen from outside. tests/comm/collectives/test_mutants.py shows that it does, on
algorithms that are wrong on purpose.

Values are whole numbers so small that every order of additions gives the same sum in the dtype, so
results are compared bit for bit with NumPy; "rough" values are not, and are compared within
rounding, but with the same bits on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from helpers import run

from minidist.comm.calls.reduction import UFUNCS
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.comm.group import Group

REDUCING = ("reduce", "all_reduce", "reduce_scatter")
ROOTED = ("broadcast", "scatter", "reduce", "gather")
ONLY_ON = {"native": ("mpi",), "shared": ("shm",)}
"""Algorithms that not every transport has."""

ALL_PAIRS = [
    (verb, algorithm) for verb, algorithms in ALGORITHMS.items() for algorithm in algorithms
]
PAIRS = [pair for pair in ALL_PAIRS if pair[1] not in ONLY_ON]
LAYOUTS = ("plain", "strided", "read-only", "transposed")
WIDE = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.float32),
}


@dataclass(frozen=True)
class Drawn:
    """One call on all ranks.

    Attributes: lengths  elements (rows, for a gather) that each rank brings; for all_to_all,
                         lengths[src][dst]
                layout   how the argument lies in memory
                how      "new" result, "out" given, "in place" (out is the argument), or "start" and
                         wait
                nodes    the machine each rank is on; empty: one machine
                rough    values whose sums depend on the order of additions
    """

    verb: str
    algorithm: str
    size: int
    lengths: Any
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    layout: str = "plain"
    how: str = "new"
    rough: bool = False
    nodes: Sequence[int] = ()
    transport: str = "threads"
    limit: float = 20.0

    def kind(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


def values(case: Drawn, rank: int, length: int, salt: int = 0) -> np.ndarray:
    """What a rank brings: another value for each rank and index, as far as the dtype can tell them
    apart."""
    kind = case.kind()
    index = np.arange(length) + 7 * rank + 13 * salt
    if case.rough:
        real, imaginary = np.random.default_rng([rank, salt]).standard_normal((2, length))
        return (real + 1j * imaginary if kind.kind == "c" else real).astype(kind)
    if kind.kind == "b":
        return index % 3 == 0
    if case.op == "prod" and case.verb in REDUCING:
        numbers = np.where(index % 5 < 3, 1, 2)
        return (numbers if kind.kind == "u" else numbers * np.where(index % 2, 1, -1)).astype(kind)
    numbers = (index * 11 + rank * rank) % 27
    if kind.kind == "c":
        return (numbers + 1j * (numbers[::-1] + rank)).astype(kind)
    return numbers.astype(kind)


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values, lying otherwise in memory."""
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "transposed":
        return np.ascontiguousarray(array.T).T
    copy = array.copy()
    copy.flags.writeable = layout != "read-only"
    return copy


def bring(case: Drawn, rank: int) -> Any:
    """The argument of one rank: an array, a list of arrays for all_to_all, or None where the verb
    takes none."""
    if case.verb == "barrier" or (case.verb in ("broadcast", "scatter") and rank != case.root):
        return None
    if case.verb == "all_to_all":
        return [
            laid_out(values(case, rank, length, salt=dst), case.layout)
            for dst, length in enumerate(case.lengths[rank])
        ]
    length = case.lengths[rank]
    if case.verb in ("scatter", "gather", "all_gather"):
        return laid_out(values(case, rank, 2 * length).reshape(length, 2), case.layout)
    return laid_out(
        values(case, rank, length).reshape((2, -1) if length % 2 == 0 else (-1,)), case.layout
    )


def reduced(case: Drawn) -> np.ndarray:
    """All ranks' arrays combined by NumPy: in rank order, low precision in float32."""
    kind = case.kind()
    ufunc = UFUNCS[case.op]
    arrays = [bring(case, rank).astype(WIDE.get(kind, kind)) for rank in range(case.size)]
    total = arrays[0]
    for array in arrays[1:]:
        total = ufunc(total, array)
    return (total / total.dtype.type(case.size) if case.op == "mean" else total).astype(kind)


def expected(case: Drawn) -> list[Any]:
    """What each rank must get."""
    ranks = range(case.size)
    verb = case.verb
    if verb == "barrier":
        return [None for _ in ranks]
    if verb == "all_to_all":
        return [[bring(case, src)[dst] for src in ranks] for dst in ranks]
    if verb in ("gather", "all_gather"):
        whole = np.concatenate([bring(case, rank) for rank in ranks], dtype=case.kind())
        return [whole if verb == "all_gather" or rank == case.root else None for rank in ranks]
    if verb in REDUCING:
        total = reduced(case)
        if verb == "reduce_scatter":
            return np.array_split(total.reshape(-1), case.size)
        return [total if verb == "all_reduce" or rank == case.root else None for rank in ranks]
    full = bring(case, case.root)
    return np.array_split(full, case.size) if verb == "scatter" else [full for _ in ranks]


def call(group: Group, case: Drawn, x: Any, out: Any) -> Any:
    """Make the call on one rank."""
    arguments: dict[str, Any] = {"algorithm": case.algorithm}
    if case.verb != "barrier":
        arguments |= {"x": x, "out": out}
    if case.verb in ROOTED:
        arguments["root"] = case.root
    if case.verb in REDUCING:
        arguments["op"] = case.op
    if case.how == "start":
        return getattr(group, f"start_{case.verb}")(**arguments).wait()
    return getattr(group, case.verb)(**arguments)


def on_rank(world: Group, case: Drawn) -> tuple[Any, bool, dict[str, Any]]:
    """One rank's part: (result, whether the argument is as it was, what the ledger counted)."""
    x = bring(case, world.rank)
    want = expected(case)[world.rank]
    out: Any = None
    if case.how == "out" and want is not None:
        out = (
            [np.empty_like(one) for one in want] if isinstance(want, list) else np.empty_like(want)
        )
    elif case.how == "in place":
        out = x
    world.nodes = tuple(case.nodes or (0,) * case.size)
    result = call(world, case, x, out)
    if out is not None and want is not None:
        assert (
            all(a is b for a, b in zip(result, out, strict=True))
            if isinstance(out, list)
            else result is out
        ), "the result is not the array given as out="
    again = bring(case, world.rank)
    untouched = case.how == "in place" or same(x, again)
    return (
        result,
        untouched,
        {"rows": world.ledger.rows(), "lends": world.board is not None and world.board.lends},
    )


def same(a: Any, b: Any) -> bool:
    """Equal in dtype, shape and every bit (but -0 equals 0)."""
    if a is None or b is None:
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))


def bits(array: np.ndarray) -> bytes:
    """The bytes of an array, without those that a longdouble's 80 bits leave unused."""
    if array.dtype != np.longdouble or array.dtype.itemsize != 16:
        return array.tobytes()
    return np.frombuffer(array.tobytes(), np.uint8).reshape(-1, 16)[:, :10].tobytes()


def cost_case(case: Drawn) -> Case:
    """The call as the formulas see it."""
    itemsize = case.kind().itemsize
    lengths = case.lengths
    seen = Case(case.size, root=case.root, nodes=case.nodes)
    if case.verb == "all_to_all":
        return replace(seen, parts=[[n * itemsize for n in row] for row in lengths])
    if case.verb == "barrier":
        return seen
    if case.verb in ("gather", "all_gather"):
        return replace(seen, blocks=[2 * n * itemsize for n in lengths])
    if case.verb == "scatter":
        return replace(seen, blocks=chunk_bytes(lengths[case.root], 2 * itemsize, case.size))
    length = lengths[case.root if case.verb == "broadcast" else 0]
    return replace(
        seen,
        nbytes=length * itemsize,
        itemsize=itemsize,
        blocks=chunk_bytes(length, itemsize, case.size),
    )


def examine(case: Drawn, run: Callable[..., list[Any]] = run) -> list[Any]:
    """Run the case and hold it to account; returns each rank's result."""
    outcomes = run(on_rank, case, size=case.size, transport=case.transport, limit=case.limit)
    results = [result for result, _, _ in outcomes]
    for rank, (want, (result, untouched, _)) in enumerate(
        zip(expected(case), outcomes, strict=True)
    ):
        assert untouched, f"rank {rank}: the argument was changed"
        if case.rough and case.verb in REDUCING and want is not None:
            assert result.dtype == want.dtype, (
                f"rank {rank}: dtype {result.dtype}, expected {want.dtype}"
            )
            np.testing.assert_allclose(
                result.astype(np.complex128),
                want.astype(np.complex128),
                err_msg=f"rank {rank}",
                **tolerance(case),
            )
        else:
            assert same(result, want), f"rank {rank}: got {result!r}, expected {want!r}"
    if case.verb == "all_reduce":
        assert all(bits(result) == bits(results[0]) for result in results), (
            "ranks hold different bits"
        )
    rows = [row for _, _, counted in outcomes for row in counted["rows"]]
    assert all(
        (row["verb"], row["algorithm"], row["axis"]) == (case.verb, case.algorithm, "world")
        for row in rows
    )
    formula = FORMULAS[case.verb, case.algorithm]
    messages = sum(row["messages"] for row in rows)
    nbytes = sum(row["nbytes"] for row in rows)
    seen = replace(cost_case(case), lends=outcomes[0][2]["lends"])
    assert messages == formula.messages_of(seen), (
        f"{messages} messages, {formula.messages} expected"
    )
    assert nbytes == formula.bytes_of(seen), f"{nbytes} bytes, {formula.nbytes} expected"
    return results


def tolerance(case: Drawn) -> dict[str, float]:
    """Rounding: each of at most P additions may be off by half a unit of a value of at most 4P."""
    unit = float(ml_dtypes.finfo(case.kind()).eps)
    return {"rtol": case.size * unit, "atol": 4 * case.size * unit}


def mutated(case: Drawn, **changes: Any) -> Drawn:
    """The case with some fields changed."""
    return replace(case, **changes)
