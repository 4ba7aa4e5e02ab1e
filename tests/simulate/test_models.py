"""Models by name have as many parameters as their papers say."""

import pytest

from minidist.errors import ConfigError
from minidist.simulate.models import MODELS, model

BILLIONS = {"gpt2": 0.124, "gpt2-xl": 1.56, "gpt3-6.7b": 6.7, "gpt3-13b": 13.0, "gpt3-175b": 175.0, "megatron-1.7b": 1.7,
            "megatron-3.6b": 3.6, "megatron-7.5b": 7.5, "megatron-18b": 18.4, "megatron-39b": 39.1,
            "megatron-76b": 76.1, "megatron-145b": 145.6, "megatron-310b": 310.1, "megatron-530b": 529.6,
            "megatron-1t": 1008.0, "llama2-7b": 6.74, "llama2-13b": 13.0, "llama2-70b": 69.0, "llama3-8b": 8.03,
            "llama3-70b": 70.6, "llama3-405b": 405.9, "mixtral-8x7b": 46.7}
"""As the papers and the model cards say."""


@pytest.mark.parametrize("name", BILLIONS)
def test_the_parameters_are_those_of_the_paper(name: str) -> None:
    assert model(name).numbers / 1e9 == pytest.approx(BILLIONS[name], rel=0.03)


def test_every_name_is_a_model_with_a_source() -> None:
    from minidist.simulate import models
    assert set(BILLIONS) <= set(MODELS)
    assert all(model(name).heads and models._TABLE[name]["source"] for name in MODELS)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no model 'llama3-70c'; did you mean llama3-70b?"):
        model("llama3-70c")
