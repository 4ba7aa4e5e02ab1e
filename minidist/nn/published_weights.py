"""Weights under the names of published models: GPT-2's, read into a GPT and written again.

    model = load_published("model.safetensors")        # a GPT; config.json lies beside the file
    write_published("out/model.safetensors", "gpt2", model.config, model.state_dict())

GPT-2 is the GPT of this package with learned positions, LayerNorm, GELU in its tanh form and a tied
output. So every array keeps its values and its layout: GPT-2's "Conv1D" has its weight as (inputs,
outputs), as Linear has here, and its c_attn gives all queries, all keys, all values, as qkv does.
Only names change:

    published (with or without "transformer." in front)    here
    wte.weight, wpe.weight                                  tokens.weight, positions.weight
    h.N.ln_1, h.N.ln_2, ln_f                                blocks.N.norm_attention, .norm_mlp, norm
    h.N.attn.c_attn, h.N.attn.c_proj                        blocks.N.attention.qkv, .out
    h.N.mlp.c_fc, h.N.mlp.c_proj                            blocks.N.mlp.up, .down
    lm_head.weight (outputs, inputs)                        head.weight (inputs, outputs), if untied

The number of heads is in no shape: it comes from config.json beside the file, or from the caller.
Settings of config.json with another computation than this GPT's are refused.

Source:  Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.device.backend import FLOATS, dtype
from minidist.errors import ConfigError, DataError
from minidist.files import whole
from minidist.nn.config import GPTConfig
from minidist.nn.gpt import GPT
from minidist.nn.weights_file import WeightsFile
from minidist.reading import read_json

NAMES = ("gpt2",)
"""The published models whose names are known."""

CONFIG = "config.json"

_PREFIX = "transformer."
_TOP = {
    "wte.weight": "tokens.weight",
    "wpe.weight": "positions.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
_PARTS = {
    "ln_1": "norm_attention",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "norm_mlp",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_OF_BLOCK = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in _PARTS.items()
    for kind in ("weight", "bias")
}
_BLOCK = re.compile(r"h\.(0|[1-9][0-9]{0,5})\.(.+)")
_HEAD = "lm_head.weight"
_MASKS = re.compile(r"h\.[0-9]+\.attn\.(bias|masked_bias)")  # constants, in files of older programs

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""{a field of config.json: its values that mean this GPT's computation, the default first}."""


class Published:
    """A published model in a safetensors file: its config, and its weights by their names here.

    Weights of float16 and bfloat16 become float32, exactly; float64 stays.

    Args:       heads: the number of attention heads, if no config.json lies beside the file.
    Attributes: config; path.
    Raises:     DataError, one line, if the file is not such a model or does not fit its
                config.json; ConfigError if sizes cannot work, or the number of heads is not known.
    """

    def __init__(self, path: str | Path, *, heads: int | None = None) -> None:
        self._file = WeightsFile(path)
        self.path = self._file.path
        names = _names_here(self._file)
        about = _read_config(self.path)
        shapes = {ours: self._file.shapes[theirs] for theirs, ours in names.items()}
        self.config = _config(self._file, shapes, about, heads)
        self._theirs = {ours: theirs for theirs, ours in names.items()}
        if "head.weight" in self._theirs and np.array_equal(
            self.read("head.weight").T, self.read("tokens.weight")
        ):
            del self._theirs["head.weight"]
            self.config = replace(self.config, tied=True)
        tied = about.get("tie_word_embeddings", True) if about else self.config.tied
        if tied != self.config.tied:
            raise DataError(
                f"{self.path}: config.json says tie_word_embeddings={json.dumps(tied)}, but "
                + (
                    "lm_head.weight is missing"
                    if self.config.tied
                    else "lm_head.weight differs from wte.weight"
                )
            )

    def read(self, name: str) -> np.ndarray:
        """Return a weight by its name here, in its shape here and the config's dtype. Raises:
        DataError if it cannot be read."""
        array = self._file.read(self._theirs[name])
        turned = array.T if name == "head.weight" else array
        return np.array(turned, dtype(self.config.dtype), order="C")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all weights, as Module.load_state_dict takes them."""
        return {name: self.read(name) for name in self._theirs}


def load_published(path: str | Path, *, heads: int | None = None) -> GPT:
    """Return the GPT whose weights a file holds. Args, Raises: as Published."""
    published = Published(path, heads=heads)
    model = GPT(published.config)
    model.load_state_dict(published.state_dict())
    return model


def _names_here(file: WeightsFile) -> dict[str, str]:
    """Return {name in the file: name here}. Raises: DataError for a name of neither."""
    names = {}
    for theirs in file.shapes:
        plain = theirs.removeprefix(_PREFIX)
        block = _BLOCK.fullmatch(plain)
        if _MASKS.fullmatch(plain):
            continue
        if plain in _TOP:
            names[theirs] = _TOP[plain]
        elif theirs == _HEAD:
            names[theirs] = "head.weight"
        elif block and block[2] in _OF_BLOCK:
            names[theirs] = f"blocks.{block[1]}.{_OF_BLOCK[block[2]]}"
        else:
            raise DataError(
                f"{file.path}: {theirs[:200]!r} is no weight of a GPT-2 language model; the names that "
                "are known begin with wte, wpe, h.N, ln_f and lm_head, with or without "
                f"{_PREFIX!r} in front"
            )
        if file.dtype_of(theirs) not in FLOATS:
            raise DataError(
                f"{file.path}: {theirs} has dtype {file.dtype_of(theirs)}; weights are floats"
            )
    if len(set(names.values())) < len(names):
        raise DataError(f"{file.path}: holds a weight twice, with and without {_PREFIX!r} in front")
    return names


def _read_config(path: Path) -> dict[str, Any]:
    """Return the value of config.json beside the file; {} if there is none.

    Raises: DataError if it describes a model that computes otherwise.
    """
    place = path.parent / CONFIG
    try:
        about = read_json(place, dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ConfigError) as error:
        raise DataError(f"{place}: {error}") from error
    for field, values in _REQUIRED.items():
        if (value := about.get(field, values[0])) not in values:
            raise DataError(
                f"{place}: {field} is {json.dumps(value)[:200]}; a GPT here computes only with "
                f"{' or '.join(map(json.dumps, values))}"
            )
    result: dict[str, Any] = about
    return result


def _config(
    file: WeightsFile,
    shapes: Mapping[str, tuple[int, ...]],
    about: Mapping[str, Any],
    heads: int | None,
) -> GPTConfig:
    """Return the config that these shapes have. Raises: as Published."""
    for name in ("tokens.weight", "positions.weight", "blocks.0.mlp.up.weight"):
        if len(shapes.get(name, ())) != 2:
            raise DataError(
                f"{file.path}: {_published(name)} is missing or is no matrix; a GPT-2 language model "
                "has it"
            )
    vocabulary, width = shapes["tokens.weight"]
    told_heads = about.get("n_head")
    if None not in (heads, told_heads) and heads != told_heads:
        raise ConfigError(
            f"{file.path}: config.json says n_head={json.dumps(told_heads)}, not {heads}; leave the "
            "number of heads out"
        )
    heads = heads if told_heads is None else told_heads
    if heads is None:
        raise ConfigError(
            f"{file.path}: the number of heads is in no weight, and no {CONFIG} lies beside the "
            "file; give --heads (published GPT-2 models have heads of width 64, so here "
            f"{max(1, width // 64)})"
        )
    config = GPTConfig(
        vocabulary=vocabulary,
        context=shapes["positions.weight"][0],
        layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        width=width,
        heads=heads,
        tied="head.weight" not in shapes,
        mlp_width=shapes["blocks.0.mlp.up.weight"][1],
        dtype="float64" if file.has("float64") else "float32",
    )
    told = {
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_positions": config.context,
        "vocab_size": config.vocabulary,
        "n_inner": config.hidden,
    }
    for field, value in told.items():
        if about.get(field) not in (None, value):
            raise DataError(
                f"{file.path}: config.json says {field}={json.dumps(about[field])[:200]}, the weights "
                f"have {value}"
            )
    _check_shapes(file, config, shapes)
    if config.hidden == replace(config, mlp_width=None).hidden:
        config = replace(config, mlp_width=None)
    return config


def _check_shapes(
    file: WeightsFile, config: GPTConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise DataError unless the file has each weight of such a GPT, in its shape, and no other.

    It looks at the number of layers first: a file may name a layer that is far away.
    """
    layers = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    if len(layers) != config.layers:
        raise DataError(
            f"{file.path}: has weights of {len(layers)} blocks, and the last is h.{config.layers - 1}"
        )
    needed = {name: weight.shape for name, weight in GPT(config).named_parameters()}
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise DataError(f"{file.path}: {_published(missing[0])} is missing ({len(missing)} in all)")
    for name, shape in needed.items():
        found = shapes[name][::-1] if name == "head.weight" else shapes[name]
        if found != shape:
            raise DataError(
                f"{file.path}: {_published(name)} has shape {shapes[name]}, a GPT-2 of width "
                f"{config.width} has {shape[::-1] if name == 'head.weight' else shape}"
            )


# ------------------------------------------------------------------------------------------ writing


def published_weights(
    model: str, config: GPTConfig, weights: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return weights under a published model's names, and the value of its config.json.

    Args:    model: one of NAMES; weights: as state_dict gives them.
    Raises:  ConfigError, one line, if this GPT is not such a model.
    """
    if model not in NAMES:
        raise ConfigError(f"names of {model!r} are not known; choose {', '.join(NAMES)}")
    reasons = {
        "rotary positions": config.positions != "learned",
        f"norm {config.norm}": config.norm != "layer",
        f"activation {config.activation}": config.activation != "gelu",
        f"{config.key_heads} key heads for {config.heads} heads": config.key_heads != config.heads,
        "experts": config.mixture is not None,
        f"attention pattern {config.attention_pattern}": config.attention_pattern is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"this model has {reason}, and a GPT-2 has not; it has no such names")
    arrays = {
        _published(name): np.ascontiguousarray(array.T if name == "head.weight" else array)
        for name, array in weights.items()
    }
    about = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
    }
    return arrays, about


def write_published(
    path: str | Path, model: str, config: GPTConfig, weights: Mapping[str, np.ndarray]
) -> None:
    """Write weights under a published model's names, and config.json beside the file.

    Args, Raises: as published_weights; ConfigError too if another config.json is there; OSError if a
    file cannot be written.
    """
    from safetensors.numpy import save  # noqa: PLC0415 - only here

    arrays, about = published_weights(model, config, weights)
    beside = Path(path).parent / CONFIG
    text = json.dumps(about, indent=1) + "\n"
    if beside.exists() and beside.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(
            f"{beside}: exists, and describes another model; name a file in another folder"
        )
    with whole(path) as draft:
        draft.write_bytes(save(arrays, {"format": "pt"}))
    with whole(beside) as draft:
        draft.write_text(text, encoding="utf-8")


def _published(name: str) -> str:
    """Return the published name of a weight here, as the newest files have it."""
    if name == "head.weight":
        return _HEAD
    for theirs, ours in _TOP.items():
        if ours == name:
            return _PREFIX + theirs
    _, number, rest = name.split(".", 2)
    theirs = next(theirs for theirs, ours in _OF_BLOCK.items() if ours == rest)
    return f"{_PREFIX}h.{number}.{theirs}"
