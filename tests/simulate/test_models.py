"""Models by name have as many parameters as their papers say."""

import pytest

from minidist.errors import ConfigError
from minidist.nn import GPT, GPTConfig
from minidist.simulate.models import MODELS, model

PUBLISHED = {
    "gpt2": 124.4e6,
    "gpt2-xl": 1.557e9,
    "gpt3-175b": 174.6e9,
    "llama2-7b": 6.738e9,
    "llama2-70b": 68.98e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.9e9,
    "mixtral-8x7b": 46.70e9,
}


ROUNDED = {
    "megatron-1.7b": 1.7e9,
    "megatron-3.6b": 3.6e9,
    "megatron-7.5b": 7.5e9,
    "megatron-18b": 18.4e9,
    "megatron-39b": 39.1e9,
    "megatron-76b": 76.1e9,
    "megatron-145b": 145.6e9,
    "megatron-310b": 310.1e9,
    "megatron-530b": 529.6e9,
    "megatron-1t": 1008.0e9,
}
"""As the table says, to a tenth of a billion or less."""


@pytest.mark.parametrize("name", ROUNDED)
def test_sizes_are_those_of_the_table(name: str) -> None:
    assert model(name).numbers == pytest.approx(ROUNDED[name], rel=0.002, abs=5e7)


def test_every_model_is_tested() -> None:
    assert set(MODELS) == set(PUBLISHED) | set(ROUNDED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    assert model(name).numbers == pytest.approx(PUBLISHED[name], rel=0.002)


def test_numbers_are_those_of_the_weights() -> None:
    config = GPTConfig(
        vocabulary=48, context=16, layers=2, width=16, heads=4, mlp_width=24, activation="silu"
    )
    assert config.hidden == 24
    assert sum(p.size for p in GPT(config).parameters() if len(p.shape) > 1) == config.numbers


def test_another_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="the nearest name is llama3-70b"):
        model("Llama3-70B")
    with pytest.raises(ConfigError, match="unknown model 'elephant'; the names are gpt2, gpt2-xl"):
        model("elephant")
    assert model("gpt2", context=512).context == 512
