"""GPT: sizes, gradients, training, generation, and configurations that cannot work."""

from typing import Any

import numpy as np
import pytest

from minidist import optim
from minidist.data import text
from minidist.errors import ConfigError, DtypeError, ShapeError
from minidist.nn import GPT, DropoutKey, GPTConfig, RopeScaling
from minidist.nn.gpt import pick

VARIANTS: list[dict[str, Any]] = [
    {"positions": "learned", "tied": False},
    {"positions": "rotary", "tied": True},
    {"kv_heads": 1, "norm": "rms"},
    {"positions": "rotary", "kv_heads": 2, "activation": "silu", "heads": 4, "width": 16},
    {"tied": True, "dropout": 0.3},
    {"positions": "rotary", "tied": True, "kv_heads": 1, "norm": "rms", "activation": "silu"},
]


def tiny(**changes: Any) -> GPTConfig:
    sizes: dict[str, Any] = {
        "vocabulary": 7,
        "context": 5,
        "layers": 2,
        "width": 8,
        "heads": 2,
        "dtype": "float64",
    }
    return GPTConfig(**{**sizes, **changes})


def ready(config: GPTConfig, seed: int = 0) -> GPT:
    model = GPT(config)
    model.initialize(seed)
    return model


def ids(config: GPTConfig, rows: int = 3, length: int | None = None) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocabulary, (rows, length or config.context))


@pytest.mark.parametrize("changes", VARIANTS)
def test_shapes(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    model = ready(config).eval()
    for length in (1, 3, 5):
        logits = model(ids(config, 2, length))
        assert logits.shape == (2, length, 7) and logits.dtype == np.float64
    parameters = dict(model.named_parameters())
    assert ("head.weight" in parameters) == (not config.tied)
    assert ("positions.weight" in parameters) == (config.positions == "learned")


def test_parameter_count_of_the_plain_model() -> None:
    """12 w² + 13 w a block, the tables, and the last norm."""
    config = GPTConfig(vocabulary=256, context=128, layers=4, width=256, heads=4)
    count = sum(parameter.size for parameter in GPT(config).parameters())
    assert count == 4 * (12 * 256**2 + 13 * 256) + (256 + 128 + 256) * 256 + 2 * 256 == 3323392


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("changes", VARIANTS)
def test_loss_gradient_against_finite_differences(changes: dict[str, Any]) -> None:
    """Every parameter, along two random directions, by a difference of four points: its error goes
    with step⁴."""
    config = tiny(**changes)
    model = ready(config)
    random = np.random.default_rng(2)
    for parameter in model.parameters():  # away from the start, where much is nearly linear
        parameter.data[...] += 0.3 * random.standard_normal(parameter.shape)
    x = ids(config)
    y = random.integers(0, 7, (3, 5))
    key = DropoutKey.of_sequences(0, 0, first=0, count=3, length=5)

    model.loss(x, y, divisor=4.0, key=key).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        for _ in range(2):
            direction = random.standard_normal(parameter.shape)
            start = parameter.data.copy()
            step = 2e-4
            slope = 0.0
            for places, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
                parameter.data[...] = start + places * step * direction
                slope += weight * model.loss(x, y, divisor=4.0, key=key).item() / (12 * step)
            parameter.data[...] = start
            assert np.sum(parameter.grad * direction) == pytest.approx(slope, rel=1e-7, abs=1e-8), (
                parameter.name
            )


def test_loss_is_the_mean_over_tokens_and_shards_add_up() -> None:
    config = tiny()
    model = ready(config)
    x = ids(config, 4)
    y = np.roll(x, -1, axis=1)
    logits = model(x).data
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, y[..., None], axis=-1).mean()
    assert model.loss(x, y).item() == pytest.approx(expected, rel=1e-12)
    shards = [
        model.loss(x[rows], y[rows], divisor=y.size).item() for rows in (slice(0, 1), slice(1, 4))
    ]
    assert sum(shards) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
def test_no_token_sees_a_later_one(changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    model = ready(config).eval()
    x = ids(config)
    changed = x.copy()
    changed[:, 3:] = (changed[:, 3:] + 1) % 7
    before = model(x).data
    after = model(changed).data
    assert np.array_equal(before[:, :3], after[:, :3]) and not np.allclose(
        before[:, 3:], after[:, 3:]
    )


def test_dropout_of_a_split_batch() -> None:
    config = tiny(dropout=0.4)
    model = ready(config)
    x = ids(config, 4)
    whole = model(x, key=DropoutKey.of_sequences(5, 6, 0, 4, 5)).data
    parts = [
        model(x[at : at + 2], key=DropoutKey.of_sequences(5, 6, at, 2, 5)).data for at in (0, 2)
    ]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-12)
    assert not np.allclose(whole, model(x, key=DropoutKey.of_sequences(5, 7, 0, 4, 5)).data)
    with pytest.raises(
        ConfigError, match="'dropout' of rate 0.4 is in training mode but got no key"
    ):
        model(x)


def test_a_shard_of_the_sequence_embeds_its_own_positions() -> None:
    model = ready(tiny())
    x = ids(model.config)
    whole = model.embed(x, np.arange(5)).data
    tables = model.state_dict()
    assert np.array_equal(whole, tables["tokens.weight"][x] + tables["positions.weight"])
    assert np.array_equal(model.embed(x[:, 2:], np.arange(2, 5)).data, whole[:, 2:])


def test_state_dict_carries_the_function() -> None:
    for changes in VARIANTS:
        ours = ready(tiny(**changes), seed=1).eval()
        theirs = GPT(tiny(**changes)).eval()
        theirs.load_state_dict(ours.state_dict())
        assert np.array_equal(ours(ids(tiny(**changes))).data, theirs(ids(tiny(**changes))).data)


@pytest.mark.soak
def test_thirty_steps_on_the_default_text_reduce_the_loss() -> None:
    python = text.load("python")
    model = ready(
        GPTConfig(vocabulary=len(python.symbols), context=32, layers=2, width=32, heads=2)
    )
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(30):
        model.zero_grad()
        loss = model.loss(*text.batch(python.train, step, batch=8, context=32, seed=0))
        loss.backward()
        norm = optim.global_norm(parameter.grad for parameter in model.parameters())
        optimizer.step(scale=optim.clip_scale(norm, 1.0))
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(len(python.symbols)), rel=0.02)
    assert np.mean(losses[-5:]) < 3.6  # from 4.6; 3.3 as measured


# --------------------------------------------------------------------------------------- generation


def test_generation_is_the_same_on_every_run_and_longer_ones_begin_alike() -> None:
    model = ready(tiny(dropout=0.2))
    first = model.generate([1, 2], 20, temperature=0.9, seed=4)
    assert first.shape == (22,) and first.dtype == np.int64 and list(first[:2]) == [1, 2]
    assert np.array_equal(
        first, ready(tiny(dropout=0.2)).generate(np.array([1, 2]), 20, temperature=0.9, seed=4)
    )
    assert np.array_equal(first[:12], model.generate([1, 2], 10, temperature=0.9, seed=4))
    assert not np.array_equal(first, model.generate([1, 2], 20, temperature=0.9, seed=5))
    assert model.training and list(model.generate([3], 0)) == [3]


def test_a_temperature_next_to_0_takes_the_likeliest() -> None:
    assert pick(np.array([1.0, 3.0, 2.0]), 1e-320, 0.5) == 1


@pytest.mark.soak
def test_generation_follows_the_distribution() -> None:
    model = ready(tiny(context=1), seed=3)
    model.tokens.weight.data[...] *= 40
    model.positions.weight.data[...] = 0  # type: ignore[union-attr]
    model.head.weight.data[...] *= 40  # type: ignore[union-attr]
    # one token of context: a Markov chain
    tokens = model.generate([2], 1500, temperature=2.0, seed=0)
    for current in np.unique(tokens[:-1]):
        following = tokens[1:][tokens[:-1] == current]
        logits = model(np.array([[current]])).data[0, 0] / 2.0
        p = np.exp(logits - logits.max())
        p /= p.sum()
        counts = np.bincount(following, minlength=7) / len(following)
        np.testing.assert_allclose(counts, p, atol=4 * 0.5 / np.sqrt(len(following)))
    greedy = model.generate([2], 6, temperature=0.0, seed=0)
    assert all(greedy[i + 1] == model(greedy[None, i : i + 1]).data.argmax() for i in range(6))


@pytest.mark.parametrize(("first", "temperature"), [([], 1.0), ([1], -0.5), ([1], float("nan"))])
def test_generation_refuses(first: list[int], temperature: float) -> None:
    with pytest.raises(
        ConfigError, match="at least one token to start from, and a temperature of 0 or more"
    ):
        ready(tiny()).generate(first, 3, temperature=temperature)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"width": 10, "heads": 4},
            r"width 10 is not divisible by 4 heads; use width 12 or heads in \[1, 2, 5, 10\]",
        ),
        (
            {"heads": 4, "width": 16, "kv_heads": 3},
            r"4 heads cannot be divided equally among 3 key and value heads; .* \[1, 2, 4\]",
        ),
        ({"width": 6, "heads": 2, "positions": "rotary"}, "the width of a head is 3"),
        ({"layers": 0}, "layers is 0; it must be a whole number, at least 1"),
        ({"vocabulary": 7.0}, "vocabulary is 7.0"),
        ({"context": True}, "context is True"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"positions": "absolute"}, "positions is 'absolute'; choose learned or rotary"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be a finite number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a finite number above 0"),
        (
            {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192), "positions": "learned"},
            "rope_scaling is for rotary positions, and these are learned; leave it out",
        ),
        ({"norm": "batch"}, "layer or rms"),
        ({"activation": "relu"}, "gelu or silu"),
        ({"dropout": 1.0}, r"dropout is 1.0"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
        ({"dtype": "int32"}, "int32 cannot be trained"),
    ],
)
def test_configurations_that_cannot_work(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value)


def test_ids_that_do_not_fit() -> None:
    model = ready(tiny())
    with pytest.raises(ShapeError, match="sequences of 6 tokens are longer than the context of 5"):
        model(ids(model.config, 1, 6))
    with pytest.raises(ShapeError, match=r"need shape \(sequences, tokens\)"):
        model(np.arange(3))
    with pytest.raises(ShapeError, match="7 rows"):
        model(np.array([[7]]))
    assert ready(tiny(positions="rotary"))(ids(model.config, 1, 9)).shape == (1, 9, 7)


@pytest.mark.parametrize(
    ("ids", "error"),
    [([7], ShapeError), ([-1], ShapeError), ([True], DtypeError), ([1.7], DtypeError)],
)
def test_first_tokens_are_ids_of_the_vocabulary(ids: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="generate: positions"):
        ready(tiny()).generate(ids, 2)
