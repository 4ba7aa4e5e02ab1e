"""Weights under the names of published models (published_names.py), read into a GPT and written
again.

    model = load_published("model.safetensors")        # a GPT; config.json lies beside the file
    model = load_published("llama")                    # a folder; also with several files
    write_published("out/model.safetensors", "gpt2", model.config, model.state_dict())

A GPT here computes what these models compute, so their arrays keep their values; names and layout
change. The number of heads is in no shape: it comes from config.json, or from the caller. Settings
of config.json with another computation are refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd.ops.rotary import RopeScaling
from minidist.device.backend import FLOATS, dtype
from minidist.errors import ConfigError, DataError
from minidist.files import whole
from minidist.nn.config import GPTConfig
from minidist.nn.gpt import GPT
from minidist.nn.published_names import FAMILIES, Family
from minidist.nn.weights_file import Weights, open_weights
from minidist.reading import read_json

NAMES = tuple(FAMILIES)
"""The published models whose names are known."""

CONFIG = "config.json"

LLAMA3 = "llama3"
"""The published type of rope_scaling that a GPT here computes."""


class Published:
    """A published model in safetensors files: its config, and its weights by their names here.

    Weights of float16 and bfloat16 become float32, exactly; float64 stays.

    Args:       path: the file, the index of several files, or the folder with either.
                heads: the number of attention heads, if no config.json lies beside the file.
    Attributes: config; path; family.
    Raises:     DataError, one line, if the file is not such a model or does not fit its
                config.json; ConfigError if sizes cannot work, or the number of heads is not known.
    """

    def __init__(self, path: str | Path, *, heads: int | None = None) -> None:
        self._file = open_weights(path)
        self.path = self._file.path
        self.family = _family(self._file)
        self._theirs = _names_here(self._file, self.family)
        about = _read_config(self.path, self.family)
        self.config = _config(self._file, self.family, self._theirs, about, heads)
        self._shapes = {name: p.shape for name, p in GPT(self.config).named_parameters()}
        self._check_shapes(about)
        if not self.config.tied and np.array_equal(
            self.read("head.weight").T, self.read("tokens.weight")
        ):
            self.config = replace(self.config, tied=True)
            del self._shapes["head.weight"]
        tied = about.get("tie_word_embeddings", self.family.tied) if about else self.config.tied
        if tied and not self.config.tied:
            raise self._error(f"{CONFIG} says tie_word_embeddings=true, but lm_head.weight differs")
        if self.config.tied and not tied and "head.weight" not in self._theirs:
            raise self._error(
                f"{CONFIG} says tie_word_embeddings=false, but lm_head.weight is missing"
            )
        plain = replace(self.config, mlp_width=None)
        if plain.hidden == self.config.hidden:
            self.config = plain

    def read(self, name: str) -> np.ndarray:
        """Return a weight by its name here, in its shape here and the config's dtype. Raises:
        DataError if it cannot be read."""
        kind = dtype(self.config.dtype)
        if name not in self._theirs:
            return np.zeros(self._shapes[name], kind)
        turned = self.family.is_turned(name)
        arrays = [self._file.read(theirs) for theirs in self._theirs[name]]
        joined = np.concatenate([array.T if turned else array for array in arrays], -1)
        return np.array(joined, kind, order="C")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all weights, as Module.load_state_dict takes them."""
        return {name: self.read(name) for name in self._shapes}

    def _check_shapes(self, about: Mapping[str, Any]) -> None:
        """Raise DataError unless the file has each weight of such a GPT, in its shape."""
        missing = []
        for name, shape in self._shapes.items():
            published = self.family.published(name)
            found = self._theirs.get(name, ())
            if not found and self._may_be_missing(name, about):
                continue
            if len(found) < len(published):
                missing.append(next(one for at, one in enumerate(published) if at >= len(found)))
                continue
            for theirs, needed in zip(found, self._parts_of(name, shape), strict=True):
                turned = needed[::-1] if self.family.is_turned(name) else needed
                if self._file.shapes[theirs] != turned:
                    raise self._error(
                        f"{theirs} has shape {self._file.shapes[theirs]}, but a "
                        f"{self.family.title} of width {self.config.width} needs {turned}"
                    )
        if missing:
            raise self._error(f"{missing[0]} is missing ({len(missing)} in all)")

    def _may_be_missing(self, name: str, about: Mapping[str, Any]) -> bool:
        part = name.removesuffix(".bias").split(".", 2)[-1]
        setting = self.family.optional.get(part) if name.endswith(".bias") else None
        return setting is not None and not about.get(setting, False)

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes, here, of the published weights that are joined to one."""
        if len(self.family.published(name)) == 1:
            return [shape]
        keys = self.config.key_heads * self.config.head_width
        return [(*shape[:-1], count) for count in (shape[-1] - 2 * keys, keys, keys)]

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self.path}: {problem}")


def load_published(path: str | Path, *, heads: int | None = None) -> GPT:
    """Return the GPT whose weights a file holds. Args, Raises: as Published."""
    published = Published(path, heads=heads)
    model = GPT(published.config)
    model.load_state_dict(published.state_dict())
    return model


def _family(file: Weights) -> Family:
    """Return the family whose token table the file has. Raises: DataError."""
    for family in FAMILIES.values():
        if {family.table, family.table.removeprefix(family.prefix)} & file.shapes.keys():
            return family
    tables = " nor ".join(f"{family.table} ({family.title})" for family in FAMILIES.values())
    raise DataError(f"{file.path}: has neither {tables}, so it has the weights of neither model")


def _names_here(file: Weights, family: Family) -> dict[str, tuple[str, ...]]:
    """Return {name here: the published names that are joined to it, in order}.

    Raises: DataError for a name that the family does not know.
    """
    names: dict[str, dict[int, str]] = {}
    for theirs in file.shapes:
        if re.fullmatch(family.ignored, theirs):
            continue
        found = family.here(theirs)
        if found is None:
            raise DataError(
                f"{file.path}: {theirs[:200]!r} is not a weight of a {family.title} language model"
            )
        if file.dtype_of(theirs) not in FLOATS:
            raise DataError(
                f"{file.path}: {theirs} has dtype {file.dtype_of(theirs)}; weights must be floats"
            )
        ours, at = found
        if at in names.setdefault(ours, {}):
            raise DataError(
                f"{file.path}: has one weight twice: with and without {family.prefix!r} before its "
                "name"
            )
        names[ours][at] = theirs
    for ours, parts in names.items():
        needed = family.published(ours)
        if gone := [one for at, one in enumerate(needed) if at not in parts]:
            raise DataError(f"{file.path}: {gone[0]} is missing ({len(gone)} in all)")
    return {ours: tuple(parts[at] for at in sorted(parts)) for ours, parts in names.items()}


def _read_config(path: Path, family: Family) -> dict[str, Any]:
    """Return the value of config.json beside the file; {} if there is none.

    Raises: DataError if it describes a model that computes otherwise.
    """
    place = path.parent / CONFIG
    try:
        about: dict[str, Any] = read_json(place, dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ConfigError) as error:
        raise DataError(f"{place}: {error}") from error
    for setting, values in family.required.items():
        if (value := about.get(setting, values[0])) not in values:
            raise DataError(
                f"{place}: {setting} is {json.dumps(value)[:200]}; a GPT here computes only with "
                f"{' or '.join(map(json.dumps, values))}"
            )
    return about


def _numbers(path: Path, family: Family, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of GPTConfig that config.json gives beside sizes: ε of the norms; base and
    scaling of rotary positions.

    Raises: DataError for rotary positions that are not computed here, or are given twice.
    """
    place = path.parent / CONFIG
    found: dict[str, Any] = {}
    for setting, (field, default) in family.numbers.items():
        value = about.get(setting)
        found[field] = default if value is None else value
    if family.choices["positions"] != "rotary":
        return found
    scalings = {}
    for setting in ("rope_scaling", "rope_parameters"):
        told = about.get(setting)
        if told is None:
            continue
        scalings[setting] = _scaling(place, setting, told)
        found["rope_theta"] = told.get("rope_theta", found["rope_theta"])
        if about.get("rope_theta", found["rope_theta"]) != found["rope_theta"]:
            raise DataError(f"{place}: {setting} has another rope_theta than the model; keep one")
    if len(set(scalings.values())) > 1:
        raise DataError(f"{place}: rope_scaling and rope_parameters differ; keep one")
    found["rope_scaling"] = next(iter(scalings.values()), None)
    return found


def _scaling(place: Path, setting: str, told: Any) -> RopeScaling | None:
    """Return the scaling of rotary positions that config.json describes; None for the default type.

    Raises: DataError for another type or other numbers; ConfigError for numbers that do not fit.
    """
    numbers = dict(told) if isinstance(told, dict) else {"": told}
    kinds = [numbers.pop(name) for name in ("type", "rope_type") if name in numbers]
    numbers.pop("rope_theta", None)
    kind = kinds[-1] if kinds else "default"
    needed = {field.name for field in fields(RopeScaling)} if kind == LLAMA3 else set()
    if kind not in ("default", LLAMA3) or numbers.keys() != needed:
        raise DataError(
            f"{place}: {setting} is {json.dumps(told)[:200]}; a GPT here computes only with null, or "
            f'with rope_type "{LLAMA3}" and {", ".join(field.name for field in fields(RopeScaling))}'
        )
    return RopeScaling(**numbers) if needed else None


def _config(
    file: Weights,
    family: Family,
    names: Mapping[str, tuple[str, ...]],
    about: Mapping[str, Any],
    heads: int | None,
) -> GPTConfig:
    """Return the config of the file's shapes and of config.json. Raises: as Published."""

    def matrix(name: str) -> tuple[int, ...]:
        shape = file.shapes[names[name][0]] if name in names else ()
        if len(shape) != 2:
            missing = family.published(name)[0]
            raise DataError(f"{file.path}: {missing} is missing or is not a matrix")
        return shape[::-1] if family.is_turned(name) else shape

    settings = {size: about.get(setting) for setting, size in family.sizes.items()}
    vocabulary, width = matrix("tokens.weight")
    hidden = matrix("blocks.0.mlp.up.weight")[1]
    learned = family.choices["positions"] == "learned"
    context = matrix("positions.weight")[0] if learned else settings["context"]
    if context is None:
        raise ConfigError(
            f"{file.path}: needs {CONFIG} in the same folder, with max_position_embeddings and "
            "num_attention_heads"
        )
    if None not in (heads, settings["heads"]) and heads != settings["heads"]:
        name = next(setting for setting, size in family.sizes.items() if size == "heads")
        raise ConfigError(
            f"{file.path}: {CONFIG} says {name}={json.dumps(settings['heads'])}, not {heads}; omit "
            "the number of heads"
        )
    heads = heads if settings["heads"] is None else settings["heads"]
    if heads is None:
        raise ConfigError(
            f"{file.path}: no weight gives the number of heads, and there is no {CONFIG} in the "
            "same folder; give --heads (published GPT-2 models have heads of width 64, so here "
            f"{max(1, width // 64)})"
        )
    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    last = max(map(int, blocks))
    if len(blocks) != last + 1:  # before anything is as large as the number
        raise DataError(
            f"{file.path}: has weights of {len(blocks)} blocks, but the last is "
            f"{family.blocks}.{last}; some blocks are missing"
        )
    config = GPTConfig(
        vocabulary=vocabulary,
        context=context,
        layers=len(blocks),
        width=width,
        heads=heads,
        kv_heads=settings.get("key_heads"),
        tied="head.weight" not in names,
        mlp_width=hidden,
        dtype="float64" if file.has("float64") else "float32",
        **family.choices,
        **_numbers(file.path, family, about),
    )
    if config.kv_heads == config.heads:
        config = replace(config, kv_heads=None)
    for setting, size in family.sizes.items():
        value = getattr(config, size)
        if about.get(setting) not in (None, value):
            raise DataError(
                f"{file.path}: {CONFIG} says {setting}={json.dumps(about[setting])[:200]}, but the "
                f"weights have {value}"
            )
    return config


# ------------------------------------------------------------------------------------------ writing


def published_weights(
    names: str, config: GPTConfig, weights: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return weights under a published model's names, and the value of its config.json.

    Args:    names: one of NAMES; weights: as state_dict gives them.
    Raises:  ConfigError, one line, if this GPT is not such a model.
    """
    if names not in FAMILIES:
        raise ConfigError(f"names {names!r} are not known; choose {' or '.join(NAMES)}")
    family = FAMILIES[names]
    reasons = {
        f"{field} {getattr(config, field)}": getattr(config, field) != value
        for field, value in family.choices.items()
    }
    reasons |= {
        f"{config.key_heads} key heads for {config.heads} heads": (
            "key_heads" not in family.sizes.values() and config.key_heads != config.heads
        ),
        "experts": config.mixture is not None,
        f"attention pattern {config.attention_pattern}": config.attention_pattern is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"this model has {reason}, but a {family.title} does not")
    biased = {
        setting: any(
            array.any()
            for name, array in weights.items()
            if name.endswith(".bias")
            and family.optional.get(name.removesuffix(".bias").split(".", 2)[-1]) == setting
        )
        for setting in family.optional.values()
    }
    arrays: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        setting = family.optional.get(name.removesuffix(".bias").split(".", 2)[-1])
        if name.endswith(".bias") and setting is not None and not biased[setting]:
            continue
        theirs = family.published(name)
        keys = config.key_heads * config.head_width
        cuts = [config.width, config.width + keys] if len(theirs) == 3 else []
        for one, part in zip(theirs, np.split(array, cuts, -1), strict=True):
            arrays[one] = np.ascontiguousarray(part.T if family.is_turned(name) else part)
    required = {
        name: values[0] for name, values in family.required.items() if values[0] is not None
    }
    about = {
        **required,
        **{setting: getattr(config, field) for setting, (field, _) in family.numbers.items()},
        **{setting: getattr(config, size) for setting, size in family.sizes.items()},
        **biased,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        **family.words,
    }
    if config.rope_scaling is not None:
        about["rope_scaling"] = {"rope_type": LLAMA3, **asdict(config.rope_scaling)}
    return arrays, about


def write_published(
    path: str | Path, names: str, config: GPTConfig, weights: Mapping[str, np.ndarray]
) -> None:
    """Write weights under a published model's names, and config.json beside the file.

    Args, Raises: as published_weights; ConfigError too if another config.json is there; OSError if a
    file cannot be written.
    """
    from safetensors.numpy import save  # noqa: PLC0415 - only here

    arrays, about = published_weights(names, config, weights)
    beside = Path(path).parent / CONFIG
    text = json.dumps(about, indent=1) + "\n"
    if beside.exists() and not _holds(beside, json.loads(text)):
        raise ConfigError(f"{beside}: exists and describes another model; write to another folder")
    with whole(path) as draft:
        draft.write_bytes(save(arrays, {"format": "pt"}))
    with whole(beside) as draft:
        draft.write_text(text, encoding="utf-8")


def _holds(file: Path, value: Any) -> bool:
    """Return whether a file holds this value of JSON, in any order of keys."""
    try:
        return bool(read_json(file) == value)
    except (OSError, ConfigError):
        return False
