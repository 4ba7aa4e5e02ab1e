"""Context compression: what it shares with attention over the whole context, and what it loses."""

from typing import Any

import numpy as np
import pytest
from gradcheck import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.ops.compressed_attention import compressed_attention
from minidist.autograd.tensor import tensor
from minidist.errors import ConfigError, ShapeError


def drawn(seed: int, length: int, heads: int = 2) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).normal(size=(3, 2, heads, length, 4))]


def run(arrays: list[np.ndarray], **options: Any) -> np.ndarray:
    return compressed_attention(*map(tensor, arrays), **options).data


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, ratio: int, window: int) -> np.ndarray:
    """One query after the other, from the definition; of one head."""
    y = np.zeros_like(q)
    for t, query in enumerate(q):
        keys = []
        values = []
        more = []
        start = 0
        while start + ratio - 1 <= t - window:
            group = slice(start, start + ratio)
            keys.append(k[group].mean(axis=0))
            values.append(v[group].mean(axis=0))
            more.append(np.log(ratio))
            start += ratio
        scores = np.array([*keys, *k[start : t + 1]]) @ query / 2.0 + np.array(
            [*more, *[0.0] * (t + 1 - start)]
        )
        weights = np.exp(scores - scores.max())
        y[t] = weights @ np.array([*values, *v[start : t + 1]]) / weights.sum()
    return y


@given(
    length=st.integers(1, 14),
    ratio=st.integers(1, 5),
    window=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_the_definition(length: int, ratio: int, window: int, seed: int) -> None:
    arrays = drawn(seed, length)
    y = run(arrays, ratio=ratio, window=window)
    for b, h in np.ndindex(2, 2):
        np.testing.assert_allclose(
            y[b, h], by_hand(*(a[b, h] for a in arrays), ratio, window), atol=1e-12
        )


@pytest.mark.parametrize("options", [{"ratio": 1, "window": 1}, {"ratio": 4, "window": 12}])
def test_nothing_is_old_or_groups_are_tokens(options: dict[str, int]) -> None:
    arrays = drawn(0, 12)
    np.testing.assert_allclose(
        run(arrays, **options), ops.causal_attention(*map(tensor, arrays)).data, atol=1e-12
    )


def test_equal_keys_lose_nothing() -> None:
    q, k, v = drawn(1, 12)
    k = np.repeat(k[:, :, :3], 4, axis=2)
    np.testing.assert_allclose(
        run([q, k, v], ratio=4, window=1),
        ops.causal_attention(*map(tensor, (q, k, v))).data,
        atol=1e-12,
    )


def test_what_sets_tokens_of_a_group_apart_is_gone() -> None:
    """The keys of two old tokens change places: attention sees it, and compressed attention does
    not."""
    q, k, v = drawn(2, 12)
    other = [0, 2, 1, *range(3, 12)]
    swapped = [q, k[:, :, other], v]
    whole = [
        ops.causal_attention(*map(tensor, arrays)).data[:, :, -1] for arrays in ([q, k, v], swapped)
    ]
    means = [run(arrays, ratio=4, window=2)[:, :, -1] for arrays in ([q, k, v], swapped)]
    assert np.abs(whole[0] - whole[1]).max() > 0.05
    np.testing.assert_allclose(*means, atol=1e-12)


def test_gradients() -> None:
    check_gradients(
        lambda *args: compressed_attention(*args, ratio=3, window=2), drawn(3, 8, heads=1)
    )


def test_wrong_arguments() -> None:
    q, k, v = drawn(4, 6)
    with pytest.raises(ConfigError, match="both must be at least 1"):
        run([q, k, v], ratio=0, window=1)
    with pytest.raises(ShapeError, match="number of key heads must"):
        run([q, k[:, :1], v[:, :1]], ratio=2, window=1)
