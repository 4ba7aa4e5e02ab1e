"""The differentiable pairs on ranks: values, gradients against finite differences, traffic, and
what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.tensor import tensor
from minidist.comm.chunks import bounds
from minidist.errors import ShapeError

STEP = 1e-6
ITEM = 8


def cut(x: np.ndarray, dim: int, size: int) -> list[np.ndarray]:
    return np.array_split(x, size, axis=dim)


# Each pair: (arguments of all ranks, results of all ranks) by plain NumPy, of a whole array;
# whether all ranks have the same argument, and whether all do the same with the result.
Pair = tuple[Callable[..., tuple[list[np.ndarray], list[np.ndarray]]], bool, bool]
PAIRS: dict[str, Pair] = {
    "copy_to": (
        lambda wholes, dim: ([wholes[0]] * len(wholes), [wholes[0]] * len(wholes)),
        True,
        False,
    ),
    "reduce_from": (lambda wholes, dim: (wholes, [sum(wholes)] * len(wholes)), False, True),
    "all_gather": (
        lambda wholes, dim: (cut(wholes[0], dim, len(wholes)), [wholes[0]] * len(wholes)),
        False,
        False,
    ),
    "reduce_scatter": (
        lambda wholes, dim: (wholes, cut(sum(wholes), dim, len(wholes))),
        False,
        False,
    ),
    "gather_copies": (
        lambda wholes, dim: (cut(wholes[0], dim, len(wholes)), [wholes[0]] * len(wholes)),
        False,
        True,
    ),
    "take_shard": (
        lambda wholes, dim: ([wholes[0]] * len(wholes), cut(wholes[0], dim, len(wholes))),
        True,
        False,
    ),
    "all_to_all": (
        lambda wholes, dim: (cut(wholes[0], 0, len(wholes)), cut(wholes[0], 1, len(wholes))),
        False,
        False,
    ),
}


def call(name: str, x: Any, dim: int, group: Any) -> Any:
    """The op on one rank."""
    if name == "all_to_all":
        return collectives.all_to_all(x, split=1, join=0, group=group)
    options = {} if name in ("copy_to", "reduce_from") else {"dim": dim}
    return getattr(collectives, name)(x, group=group, **options)


def wholes_of(size: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng(rank).normal(size=shape) for rank in range(size)]


def weights_of(name: str, y: np.ndarray, rank: int) -> np.ndarray:
    """Return what a rank does with its result: the same on all ranks, or something of its own."""
    return np.random.default_rng(0 if PAIRS[name][2] else rank + 1).uniform(0.5, 1.5, y.shape)


def check_rank(group: Any, name: str, shape: tuple[int, ...], dim: int) -> None:
    """Values, and each number of every rank's argument moved to both sides, all ranks together."""
    layout, same_in, same_out = PAIRS[name]
    given_, expected = layout(wholes_of(group.size, shape), dim)
    x = given_[group.rank].copy()
    leaf = tensor(x, requires_grad=True)
    y = call(name, leaf, dim, group)
    np.testing.assert_allclose(y.data, expected[group.rank], rtol=1e-12)
    ops.sum(y * weights_of(name, y.data, group.rank)).backward()

    def total() -> float:
        result = call(name, tensor(x), dim, group).data
        each = group.all_gather(np.array([(result * weights_of(name, result, group.rank)).sum()]))
        return float(each[0] if same_out else each.sum())

    for mover in range(1 if same_in else group.size):
        for place in np.ndindex(given_[mover].shape):
            moves = same_in or mover == group.rank
            kept = x[place] if x.size and mover == group.rank else 0.0
            values = []
            for step in (STEP, -STEP):
                if moves:
                    x[place] = (x[place] if same_in else kept) + step
                values.append(total())
                if moves:
                    x[place] = given_[group.rank][place]
            if moves:
                assert leaf.grad[place] == pytest.approx(
                    (values[0] - values[1]) / (2 * STEP), rel=1e-5, abs=1e-7
                )


@pytest.mark.parametrize(
    "size", [2, 4, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 3, 5))]
)
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_match_finite_differences(name: str, size: int) -> None:
    """Also where the dim does not divide, and where a rank has nothing."""
    md.run(lambda world: check_rank(world, name, (2, 3), 1), size=size)


@pytest.mark.soak
@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(PAIRS)),
    size=st.integers(1, 6),
    shape=st.tuples(*[st.integers(0, 5)] * 2),
    dim=st.integers(-2, 1),
)
def test_gradients_of_any_shape(name: str, size: int, shape: tuple[int, int], dim: int) -> None:
    md.run(lambda world: check_rank(world, name, shape, dim), size=size)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "dims"), [(1, (4, 6)), (2, (4, 6)), (3, (4, 6)), (4, (6, 7)), (5, (7, 3))]
)
def test_traffic_is_the_formula(size: int, dims: tuple[int, int]) -> None:
    """The table of the docstring, to the byte."""
    n = math.prod(dims)
    padded = math.prod(dims) // dims[1] * size * -(-dims[1] // size)
    rows = np.diff(bounds(dims[0], size))
    columns = np.diff(bounds(dims[1], size))
    swapped = n - int(rows @ columns)
    formula = {
        "copy_to": (0, 2 * (size - 1) * n),
        "reduce_from": (2 * (size - 1) * n, 0),
        "all_gather": ((size - 1) * n, (size - 1) * padded),
        "reduce_scatter": ((size - 1) * padded, (size - 1) * n),
        "gather_copies": ((size - 1) * n, 0),
        "take_shard": (0, (size - 1) * n),
        "all_to_all": (swapped, swapped),
    }
    assert formula.keys() == PAIRS.keys()

    def job(world: Any) -> dict[str, tuple[int, int]]:
        sent = {}
        for name, (layout, _, _) in PAIRS.items():
            x = tensor(layout(wholes_of(size, dims), 1)[0][world.rank], requires_grad=True)
            counts = [sum(row["nbytes"] for row in world.ledger.rows())]
            y = call(name, x, 1, world)
            counts.append(sum(row["nbytes"] for row in world.ledger.rows()))
            y.backward(np.ones(y.shape))
            counts.append(sum(row["nbytes"] for row in world.ledger.rows()))
            sent[name] = (counts[1] - counts[0], counts[2] - counts[1])
        return sent

    ranks = md.run(job, size=size)
    for name, (forward, backward) in formula.items():
        assert sum(rank[name][0] for rank in ranks) == ITEM * forward, name
        assert sum(rank[name][1] for rank in ranks) == ITEM * backward, name


def test_direct_adds_in_rank_order() -> None:
    def job(world: Any) -> np.ndarray:
        x = tensor(np.array([1e16, 1.0, -1e16])[world.rank : world.rank + 1].copy())
        return collectives.reduce_from(x, group=world, algorithm="direct").data

    for result in md.run(job, size=3):
        assert result[0] == (1e16 + 1.0) - 1e16


def test_an_exchange_of_counts() -> None:
    """Rows to whom they are for, and their gradients back: what experts do with tokens."""
    counts = [[2, 0, 1], [0, 0, 0], [1, 3, 0]]

    def job(world: Any) -> tuple[np.ndarray, np.ndarray]:
        mine = counts[world.rank]
        x = tensor(
            100.0 * world.rank + np.arange(2.0 * sum(mine)).reshape(-1, 2), requires_grad=True
        )
        y = collectives.all_to_all(x, split=0, join=0, counts=mine, group=world)
        y.backward(y.data * 2)
        assert np.array_equal(x.grad, 2 * x.data)
        return y.data

    results = md.run(job, size=3)
    assert results[0].tolist() == [[0, 1], [2, 3], [200, 201]] and results[2].tolist() == [[4, 5]]
    assert results[1].tolist() == [[202, 203], [204, 205], [206, 207]]


def test_counts_of_a_small_dtype_are_added_as_numbers() -> None:
    def job(world: Any) -> int:
        counts = np.array([100, 100], np.int8)
        x = tensor(np.zeros((200, 1)))
        return len(collectives.all_to_all(x, split=0, join=0, counts=counts, group=world))

    assert md.run(job, size=2) == [200, 200]


def test_what_does_not_fit_is_refused() -> None:
    def shards(world: Any) -> None:
        with pytest.raises(
            ShapeError, match=r"rank \d of 2: the shard has \d in dim 0, but of 4 in all it must"
        ):
            collectives.all_gather(np.ones((1 + 2 * world.rank, 2)), dim=0, group=world)

    md.run(shards, size=2)
    with pytest.raises(ShapeError, match=r"counts \[1\] for 1 ranks do not divide the 3 of dim 0"):
        md.run(
            lambda world: collectives.all_to_all(
                np.ones(3), split=0, join=0, counts=[1], group=world
            ),
            size=1,
        )
