"""Chapter 24 · Models by name, with the sizes that their papers give.

A GPT of this project has biases in its linears, which the Llama and Mixtral models have not: 0.01
to 0.1 % more numbers. Positions of Mixtral reach 32,768 tokens; its name here has sequences of
4,096, which is what most runs take.
"""

from difflib import get_close_matches
from typing import Any

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.nn.config import MixtureConfig

LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "silu"}

_MEGATRON: dict[str, Any] = {"vocabulary": 51200, "context": 2048, "tied": True}

MODELS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2;
    # vocabulary: section 2.3
    "gpt2": {
        "vocabulary": 50257,
        "context": 1024,
        "layers": 12,
        "width": 768,
        "heads": 12,
        "tied": True,
    },
    "gpt2-xl": {
        "vocabulary": 50257,
        "context": 1024,
        "layers": 48,
        "width": 1600,
        "heads": 25,
        "tied": True,
    },
    # Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1
    "gpt3-175b": {
        "vocabulary": 50257,
        "context": 2048,
        "layers": 96,
        "width": 12288,
        "heads": 96,
        "tied": True,
    },
    # Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", table
    # 1
    "megatron-1.7b": {"layers": 24, "width": 2304, "heads": 24, **_MEGATRON},
    "megatron-3.6b": {"layers": 30, "width": 3072, "heads": 32, **_MEGATRON},
    "megatron-7.5b": {"layers": 36, "width": 4096, "heads": 32, **_MEGATRON},
    "megatron-18b": {"layers": 40, "width": 6144, "heads": 48, **_MEGATRON},
    "megatron-39b": {"layers": 48, "width": 8192, "heads": 64, **_MEGATRON},
    "megatron-76b": {"layers": 60, "width": 10240, "heads": 80, **_MEGATRON},
    "megatron-145b": {"layers": 80, "width": 12288, "heads": 96, **_MEGATRON},
    "megatron-310b": {"layers": 96, "width": 16384, "heads": 128, **_MEGATRON},
    "megatron-530b": {"layers": 105, "width": 20480, "heads": 128, **_MEGATRON},
    "megatron-1t": {"layers": 128, "width": 25600, "heads": 160, **_MEGATRON},
    # Touvron et al. 2023, "Llama 2", table 1 and appendix A.2.1; inner widths: the models'
    # published configurations
    "llama2-7b": {
        "vocabulary": 32000,
        "context": 4096,
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "mlp_width": 11008,
        **LLAMA,
    },
    "llama2-70b": {
        "vocabulary": 32000,
        "context": 4096,
        "layers": 80,
        "width": 8192,
        "heads": 64,
        "kv_heads": 8,
        "mlp_width": 28672,
        **LLAMA,
    },
    # Llama team 2024, "The Llama 3 Herd of Models", table 3; vocabulary: the models' published
    # configurations
    "llama3-8b": {
        "vocabulary": 128256,
        "context": 8192,
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "mlp_width": 14336,
        **LLAMA,
    },
    "llama3-70b": {
        "vocabulary": 128256,
        "context": 8192,
        "layers": 80,
        "width": 8192,
        "heads": 64,
        "kv_heads": 8,
        "mlp_width": 28672,
        **LLAMA,
    },
    "llama3-405b": {
        "vocabulary": 128256,
        "context": 8192,
        "layers": 126,
        "width": 16384,
        "heads": 128,
        "kv_heads": 8,
        "mlp_width": 53248,
        **LLAMA,
    },
    # Jiang et al. 2024, "Mixtral of Experts", table 1
    "mixtral-8x7b": {
        "vocabulary": 32000,
        "context": 4096,
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "mixture": MixtureConfig(experts=8, top_k=2, hidden=14336),
        **LLAMA,
    },
}


def model(name: str, **changes: Any) -> GPTConfig:
    """Return the configuration of a model. Args: changes: other values, as context=4096.

    Raises:  ConfigError for another name: a near one if there is any, and all.
    """
    if name not in MODELS:
        near = get_close_matches(name.lower(), MODELS, 1)
        told = f"the nearest name is {near[0]}, and all are" if near else "the names are"
        raise ConfigError(f"unknown model {name!r}; {told} {', '.join(MODELS)}")
    return GPTConfig(**(MODELS[name] | changes))
