"""Test what ops do, and in which dtype they add up."""

import ml_dtypes
import numpy as np
import pytest
from helpers import run

from minidist.comm.calls import reduction as module
from minidist.comm.calls.reduction import Reduction, reduction
from minidist.errors import ConfigError, DtypeError


def big_and_small(rank):
    """One value that swallows each small one alone, when rounded after every addition: 2048 + 1 is
    2048 in float16."""
    return np.array([2048.0 if rank == 0 else 1.0, 1.0], np.float16)


def summed(algorithm):
    return run(
        lambda world: world.all_reduce(big_and_small(world.rank), algorithm=algorithm), size=9
    )[0].tolist()


@pytest.mark.parametrize("algorithm", ["direct", "naive"])
def test_one_rounding_where_one_rank_sees_every_value(algorithm):
    assert summed(algorithm) == [2056.0, 9.0]


@pytest.mark.parametrize("algorithm", ["direct", "naive"])
def test_the_test_above_sees_accumulation_in_low_precision(algorithm, monkeypatch):
    def narrow(op, dtype, size):
        return Reduction(op, dtype, dtype, None, size)

    monkeypatch.setattr("minidist.comm.verbs.reduction", narrow)
    assert summed(algorithm) == [2048.0, 9.0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    "algorithm", ["naive", "tree", "ring", "direct", "pairwise", "doubling", "halving-doubling"]
)
def test_overflow_is_inf_and_nobody_is_warned(algorithm, dtype):
    """Warnings are errors here, in all ranks' threads; errors, too, are what the ranks ask NumPy
    for."""

    def ranks(world):
        most = ml_dtypes.finfo(dtype).max
        infinite = np.inf if world.rank % 2 else -np.inf
        x = np.array([most, -most, infinite, 1], dtype)
        with np.errstate(all="raise"):
            mean = world.all_reduce(x, op="mean", algorithm=algorithm)[3]
            if algorithm in ("naive", "tree"):
                world.reduce(x, algorithm=algorithm)
            return world.all_reduce(x, algorithm=algorithm).tolist(), mean

    for total, mean in run(ranks, size=4):
        np.testing.assert_array_equal(total, [np.inf, -np.inf, np.nan, 4.0])
        assert mean == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_ring_rounds_once_a_hop(dtype):
    """Each hop: both operands to float32, one addition, one rounding."""
    x = [np.random.default_rng(rank).standard_normal(40).astype(dtype) for rank in range(4)]
    got = run(lambda world: world.all_reduce(x[world.rank], algorithm="ring"), size=4)[0]
    for chunk, part in enumerate(np.array_split(np.arange(40), 4)):
        partial = x[(chunk + 1) % 4][part]
        for hop in (2, 3, 4):
            own = x[(chunk + hop) % 4][part]
            partial = (own.astype(np.float32) + partial.astype(np.float32)).astype(dtype)
        assert got[part].tolist() == partial.tolist()


@pytest.mark.parametrize("algorithm", ["doubling", "halving-doubling"])
def test_halving_and_doubling_round_once_a_step(algorithm):
    """Five ranks: 1 is folded into 0; then partners 1 and 2 places on in the core, or first 2 and
    then 1."""
    x = [np.random.default_rng(rank).standard_normal(40).astype(np.float16) for rank in range(5)]
    got = run(lambda world: world.all_reduce(x[world.rank], algorithm=algorithm), size=5)[0]

    def add(a, b):
        return (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16)

    a = add(x[0], x[1])
    b = x[2]
    c = x[3]
    d = x[4]
    want = add(add(a, b), add(c, d)) if algorithm == "doubling" else add(add(a, c), add(b, d))
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_doubling_gives_the_same_bits_where_the_order_of_two_shows(size):
    """max of 0 and -0, and sums of NaNs that differ in their payload, take theirs from one of the
    two."""

    def ranks(world):
        zeros = np.array([-0.0 if world.rank % 2 else 0.0, 0.0 if world.rank % 2 else -0.0])
        nans = np.array([0x7FF8000000000000 + world.rank], np.uint64).view(np.float64)
        return (
            world.all_reduce(zeros, op="max", algorithm="doubling").tobytes()
            + world.all_reduce(nans, algorithm="doubling").tobytes()
        )

    assert len(set(run(ranks, size=size))) == 1


def test_mean_is_divided_once_in_float32():
    x = np.float16(1) / 3 * np.ones(5, np.float16)
    for algorithm in (
        "ring",
        "tree",
        "direct",
        "naive",
        "doubling",
        "halving-doubling",
        "hierarchical",
        "torus",
        "torus-both",
    ):
        got = run(
            lambda world, algorithm=algorithm: world.all_reduce(x, op="mean", algorithm=algorithm),
            size=2,
        )
        assert got[0].tolist() == x.tolist(), algorithm


@pytest.mark.parametrize(
    ("op", "dtype", "taken"),
    [
        ("sum", "int8", True),
        ("mean", "int8", False),
        ("mean", "bool", False),
        ("mean", "complex64", True),
        ("sum", ">f4", True),
        ("sum", "m8[s]", True),
        ("prod", "m8[s]", False),
        ("max", "M8[s]", True),
        ("sum", "M8[s]", False),
        ("sum", "U3", False),
        ("max", "U3", False),
        ("sum", "i4,f4", False),
        ("mean", "bfloat16", True),
        ("sum", "float8_e4m3fn", True),
        ("sum", "longdouble", True),
    ],
)
def test_which_op_takes_which_dtype(op, dtype, taken):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if not taken:
        with pytest.raises(DtypeError, match=f"op {op}"):
            reduction(op, kind, 3)
        return
    how = reduction(op, kind, 3)
    x = np.zeros(4, kind)
    how.into(x)(x, 0, x)
    how.finish(x, x)
    assert x.dtype == kind


def test_an_unknown_op_lists_the_known():
    with pytest.raises(ConfigError, match=", ".join(module.UFUNCS)):
        reduction("product", np.dtype("f4"), 2)


def test_nan_wins():
    def ranks(world):
        x = np.array([np.nan if world.rank == 1 else 1.0, 2.0])
        return [
            world.all_reduce(x, op=op, algorithm=algorithm)
            for op in ("sum", "max", "min")
            for algorithm in ("ring", "direct")
        ]

    for result in run(ranks, size=3)[0]:
        assert np.isnan(result[0])
        assert not np.isnan(result[1])
