"""Linear, Embedding, norms, dropout, MLP, attention: against plain NumPy."""

import numpy as np
import pytest

from minidist.autograd.tensor import tensor
from minidist.device import account
from minidist.errors import ConfigError
from minidist.nn import (
    MLP,
    CausalSelfAttention,
    Dropout,
    DropoutKey,
    Embedding,
    GPTConfig,
    LayerNorm,
    Linear,
    RMSNorm,
)


def test_what_is_not_drawn_yet_fills_no_memory() -> None:
    with account.use(account.MemoryAccount()) as memory:
        layer = Linear(3, 5)
        assert memory.peak["parameters"] == 0 and layer.weight.shape == (3, 5)
        layer.initialize(0)
        assert (
            memory.peak["parameters"]
            == memory.now["parameters"]
            == sum(p.data.nbytes for p in layer.parameters())
        )


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def test_linear() -> None:
    layer = Linear(4, 3, dtype="float64")
    layer.initialize(0)
    layer.bias.data[...] = normal(3)  # type: ignore[union-attr]
    x = normal(2, 5, 4)
    np.testing.assert_allclose(layer(tensor(x)).data, x @ layer.weight.data + normal(3), rtol=1e-13)
    assert layer.weight.shape == (4, 3) and Linear(4, 3, bias=False).bias is None


def test_embedding() -> None:
    table = Embedding(7, 3, dtype="float64")
    table.initialize(0)
    ids = np.array([[6, 0], [2, 2]])
    assert np.array_equal(table(ids).data, table.weight.data[ids])


def test_norms() -> None:
    x = normal(4, 6)
    w = normal(6)
    b = normal(6) + 1
    layer = LayerNorm(6, eps=0.1, dtype="float64")
    rms = RMSNorm(6, eps=0.1, dtype="float64")
    layer.load_state_dict({"weight": w, "bias": b})
    rms.load_state_dict({"weight": w})
    centred = x - x.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 0.1) * w + b
    np.testing.assert_allclose(layer(tensor(x)).data, expected, rtol=1e-12)
    np.testing.assert_allclose(
        rms(tensor(x)).data, x / np.sqrt((x**2).mean(1, keepdims=True) + 0.1) * w, rtol=1e-12
    )


def test_mlp() -> None:
    x = normal(2, 4)
    plain, gated = (
        MLP(4, 8, activation=activation, std=0.5, dtype="float64")
        for activation in ("gelu", "silu")
    )
    plain.initialize(0)
    gated.initialize(0)
    assert plain.up.bias is not None
    plain.up.bias.data[...] = normal(8)
    u = x @ plain.up.weight.data + plain.up.bias.data
    gelu = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
    np.testing.assert_allclose(plain(tensor(x)).data, gelu @ plain.down.weight.data, rtol=1e-12)
    gate = x @ gated.gate.weight.data  # type: ignore[union-attr]
    inner = gate / (1 + np.exp(-gate)) * (x @ gated.up.weight.data)
    np.testing.assert_allclose(gated(tensor(x)).data, inner @ gated.down.weight.data, rtol=1e-12)
    with pytest.raises(ConfigError, match="gelu or silu"):
        MLP(4, 8, activation="tanh")


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """(T, D) with pairs (i, i + D/2) turned as complex numbers."""
    half = x.shape[1] // 2
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    )
    return np.concatenate([pairs.real, pairs.imag], axis=1)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_attention_is_softmax_over_earlier_tokens(positions: str, kv_heads: int | None) -> None:
    config = GPTConfig(
        vocabulary=2,
        context=5,
        layers=1,
        width=16,
        heads=4,
        kv_heads=kv_heads,
        positions=positions,
        dtype="float64",
    )
    layer = CausalSelfAttention(config, out_std=0.3)
    layer.initialize(0)
    layer.qkv.weight.data[...] *= 40  # scores of some size
    # a shard of a sequence begins at position 3
    x = normal(2, 5, 16)
    where = np.arange(5) + 3
    qkv = x @ layer.qkv.weight.data
    shared = 4 // config.key_heads
    expected = np.empty((2, 5, 16))
    for b in range(2):
        for head in range(4):
            q = qkv[b, :, 4 * head : 4 * head + 4]
            k, v = (
                qkv[b, :, 16 + 4 * (part * config.key_heads + head // shared) :][:, :4]
                for part in (0, 1)
            )
            if positions == "rotary":
                q = rotated(q, where)
                k = rotated(k, where)
            scores = np.where(np.tri(5, dtype=bool), q @ k.T / 2, -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True))
            expected[b, :, 4 * head : 4 * head + 4] = p / p.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(
        layer(tensor(x), where).data, expected @ layer.out.weight.data, rtol=1e-10, atol=1e-12
    )


def test_dropout_of_a_split_is_the_split_of_the_dropout() -> None:
    layer = Dropout(0.4)
    layer.path = "blocks.3.dropout_mlp"
    x = np.ones((4, 5, 8))
    whole = layer(tensor(x), DropoutKey.of_sequences(1, 2, first=0, count=4, length=5)).data
    parts = [
        layer(tensor(x[first : first + 2]), DropoutKey.of_sequences(1, 2, first, 2, 5)).data
        for first in (0, 2)
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    np.testing.assert_allclose(np.unique(whole), [0, 1 / 0.6])
    assert 0.2 < (whole == 0).mean() < 0.6
    other = layer(tensor(x), DropoutKey.of_sequences(1, 3, first=0, count=4, length=5)).data
    assert not np.array_equal(whole, other)


def test_dropout_rests_in_eval_and_asks_for_a_key_in_training() -> None:
    layer = Dropout(0.4)
    x = tensor(np.ones((1, 2, 3)))
    with pytest.raises(ConfigError, match="got no key"):
        layer(x)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert (Dropout(0.0)(x, residual=x).data == 2).all() and (layer(x, residual=x).data == 2).all()
    with pytest.raises(ConfigError, match=r"rate 1.0 is not in \[0, 1\)"):
        Dropout(1.0)
