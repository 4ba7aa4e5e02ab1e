"""Rotary positions: the formula, that only distances count, and that a shard turns as the whole
does."""

import numpy as np
import pytest
from published import llama3_speeds

from minidist.autograd import ops
from minidist.autograd.ops.rotary import RopeScaling, speeds
from minidist.errors import ShapeError

RNG = np.random.default_rng(0)


def test_values():
    x = RNG.normal(size=(2, 3, 4))
    positions = np.array([0, 5, 700])
    y = ops.rotary(x, positions, base=100.0).data
    for t, p in enumerate(positions):
        for i, speed in enumerate((1.0, 100.0**-0.5)):
            c = np.cos(p * speed)
            s = np.sin(p * speed)
            np.testing.assert_allclose(y[:, t, i], x[:, t, i] * c - x[:, t, i + 2] * s, rtol=1e-12)
            np.testing.assert_allclose(
                y[:, t, i + 2], x[:, t, i + 2] * c + x[:, t, i] * s, rtol=1e-12
            )


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_speeds_of_llama_3_1_and_3_2(factor):
    """Some pairs keep their speed, some are slower by the factor, some lie in between."""
    numbers = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = speeds(np, 128, 500000.0, RopeScaling(**numbers))
    np.testing.assert_allclose(found, llama3_speeds(128, 500000.0, numbers), rtol=1e-13)
    slower = llama3_speeds(128, 500000.0) / found
    assert (slower == 1.0).sum() > 20
    assert np.isclose(slower, factor).sum() > 20
    assert ((slower > 1.01) & (slower < factor - 0.01)).sum() > 3


def test_only_distances_count():
    q = RNG.normal(size=(1, 8))
    k = RNG.normal(size=(1, 8))

    def score(i, j):
        return (ops.rotary(q, np.array([i])).data @ ops.rotary(k, np.array([j])).data.T).item()

    assert score(7, 3) == pytest.approx(score(1004, 1000), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(8, 3), rel=1e-3)


def test_a_shard_turns_as_the_whole():
    x = RNG.normal(size=(2, 6, 4))
    whole = ops.rotary(x, np.arange(6)).data
    np.testing.assert_array_equal(ops.rotary(x[:, 2:5], np.arange(2, 5)).data, whole[:, 2:5])


def test_errors():
    with pytest.raises(ShapeError, match=r"rotary: x \(2, 3\) with positions \(2,\)"):
        ops.rotary(np.ones((2, 3)), np.arange(2))
    with pytest.raises(ShapeError):
        ops.rotary(np.ones((2, 4)), np.arange(3))
