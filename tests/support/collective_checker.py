"""The checker of collectives: runs one drawn case on ranks and holds results, arguments, bits and
ledger to account.

`examine(case)` raises AssertionError (or what a rank raised) if the algorithm is wrong in any way
that can be seen from outside. tests/comm/collectives/test_mutants.py shows that it does, on
algorithms that are wrong on purpose.

What the ranks bring and what NumPy makes of it is in minidist/testing/reference.py: whole numbers
are compared bit for bit, "rough" ones within rounding, but with the same bits on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers import run

from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.comm.group import Group
from minidist.testing import reference
from minidist.testing.reference import ONLY_ON, REDUCING, ROOTED, Example, bits, same

ALL_PAIRS = [
    (verb, algorithm) for verb, algorithms in ALGORITHMS.items() for algorithm in algorithms
]
PAIRS = [pair for pair in ALL_PAIRS if pair[1] not in ONLY_ON]


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

    @property
    def example(self) -> Example:
        """Return what NumPy has to know of the call."""
        lengths = self.lengths
        return Example(
            self.verb,
            self.size,
            tuple(map(tuple, lengths)) if self.verb == "all_to_all" else tuple(lengths),
            self.dtype,
            self.op,
            self.root,
            self.layout,
            "rough" if self.rough else "whole",
        )

    def kind(self) -> np.dtype:
        return reference.dtype_of(self.dtype)


def bring(case: Drawn, rank: int) -> Any:
    """The argument of one rank: an array, a list of arrays for all_to_all, or None where the verb
    takes none."""
    return reference.argument(case.example, rank)


def expected(case: Drawn) -> list[Any]:
    """Return what each rank must get."""
    return reference.expected(case.example)


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
                **reference.tolerance(case.example),
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


def mutated(case: Drawn, **changes: Any) -> Drawn:
    """The case with some fields changed."""
    return replace(case, **changes)
