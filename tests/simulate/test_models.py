"""Models by name have as many parameters as their papers say."""

import pytest

from minidist.errors import ConfigError
from minidist.nn import GPT, GPTConfig
from minidist.simulate.models import MODELS, model

PUBLISHED = {"gpt2": 124.4e6, "gpt2-xl": 1.557e9, "gpt3-175b": 174.6e9, "llama2-7b": 6.738e9, "llama2-70b": 68.98e9,
             "llama3-8b": 8.030e9, "llama3-70b": 70.55e9, "llama3-405b": 405.9e9, "mixtral-8x7b": 46.70e9}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_published_ones(name: str) -> None:
    assert model(name).numbers == pytest.approx(PUBLISHED[name], rel=0.002)


def test_numbers_are_those_of_the_weights() -> None:
    config = GPTConfig(vocabulary=48, context=16, layers=2, width=16, heads=4, mlp_width=24, activation="silu")
    assert config.hidden == 24
    assert sum(p.size for p in GPT(config).parameters() if len(p.shape) > 1) == config.numbers


def test_another_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="the nearest name is llama3-70b"):
        model("Llama3-70B")
    assert model("gpt2", context=512).context == 512
