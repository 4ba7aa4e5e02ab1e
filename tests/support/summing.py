"""Provide what the tests of compression share: some ranks that sum gradients by a scheme, step
after step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.comm.chunks import bounds
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.step.scheme import GradientRun, Scheme

SHAPES = ((12, 10), (7,), (10, 13))  # 257 numbers: no number of ranks divides them


class Sums(NamedTuple):
    """What came of it, for each rank of `size`, in step order."""

    results: list[np.ndarray]  # (steps, n), or (steps, chunk) of a reduce-scatter
    errors: list[dict[tuple[str, int], np.ndarray]]
    private: list[dict[str, np.ndarray]]
    sent: list[dict[str, dict[str, int]]]  # the ledger's bytes

    def bytes_on(self, axis: str = "world") -> int:
        """Of all ranks together."""
        return sum(sum(rank.get(axis, {}).values()) for rank in self.sent)


def gradients(rank: int, steps: int, size: int, kind: str = "float64") -> np.ndarray:
    """(steps, size) of a rank: numbers of very different sizes around a direction that stays."""
    random = np.random.default_rng(rank + 1)
    steady = np.random.default_rng(0).normal(size=size)
    return np.asarray(
        (random.normal(size=(steps, size)) + steady) * 10.0 ** random.uniform(-2, 1, size), kind
    )


def sum_by(
    text: str,
    size: int,
    *,
    verb: str = "all_reduce",
    steps: int = 3,
    kind: str = "float64",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    given: Callable[[int], np.ndarray] | None = None,
    prepare: Callable[[Scheme], Any] = lambda scheme: None,
) -> Sums:
    """`size` threads sum `given(rank)` (steps, n), one bucket a step. `prepare` gets each rank's
    scheme first."""
    count = sum(int(np.prod(shape)) for shape in shapes)
    make = given or (lambda rank: gradients(rank, steps, count, kind))

    def job(world: Any) -> tuple[Any, ...]:
        parameters = [Parameter(np.zeros(shape, kind)) for shape in shapes]
        for number, parameter in enumerate(parameters):
            parameter.name = f"p{number}"
        scheme = scheme_of(text)
        results = []
        prepare(scheme)
        scheme.attach([GradientRun.whole(parameters, world, verb)])
        start, stop = bounds(count, size)[world.rank : world.rank + 2]
        with world.ledger.during("sums"):
            for gradient in make(world.rank):
                bucket = gradient.astype(kind)
                scheme.begin_step()
                if verb == "all_reduce":
                    scheme.start_all_reduce(0, bucket).wait()
                    results.append(bucket)
                else:
                    out = np.empty(stop - start, kind)
                    scheme.start_reduce_scatter(0, bucket, out).wait()
                    results.append(out)
        return np.array(results), scheme.errors, scheme.private, world.ledger.sent_bytes("sums")

    return Sums(*(list(column) for column in zip(*md.run(job, size=size), strict=True)))


def not_applied(sums: Sums, verb: str, given: Callable[[int], np.ndarray]) -> float:
    """The largest |Σ applied + Σ kept - Σ gradients| over the largest |Σ gradients|: conservation
    has it near 0."""
    ranks = len(sums.results)
    applied = sums.results[0] if verb == "all_reduce" else np.concatenate(sums.results, axis=1)
    kept = sum(errors.get(("worker", 0), np.zeros(1)) for errors in sums.errors)
    if ("server", 0) in sums.errors[0]:
        kept = kept + np.concatenate([errors["server", 0] for errors in sums.errors])
    total = sum(given(rank).sum(axis=0) for rank in range(ranks))
    return float(np.abs(applied.sum(axis=0) + kept - total).max() / np.abs(total).max())


def expected_bytes(
    text: str,
    size: int,
    verb: str,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    kind: str = "float64",
) -> int | None:
    """Return what the scheme says of one sum."""

    def job(world: Any) -> int | None:
        parameters = [Parameter(np.zeros(shape, kind)) for shape in shapes]
        return scheme_of(text).sent_bytes(GradientRun.whole(parameters, world, verb))

    result: int | None = md.run(job, size=size)[0]
    return result
