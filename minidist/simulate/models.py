"""Chapter 24 · Models by name: sizes from their papers (models.toml).

    model("llama3-70b")             # a GPTConfig
"""

import sys
from pathlib import Path
from typing import Any

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.nn import GPTConfig, MixtureConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))

MODELS = tuple(_TABLE)
"""The names that there are."""


def model(name: str) -> GPTConfig:
    """The model of this name. Raises: ConfigError with the nearest name that there is."""
    if name not in _TABLE:
        raise ConfigError(f"no model {name!r}{meant(name, MODELS)}; choose from {', '.join(MODELS)}")
    sizes = {field: value for field, value in _TABLE[name].items() if field != "source"}
    mixture = sizes.pop("mixture", None)
    return GPTConfig(**sizes, mixture=mixture and MixtureConfig(**mixture))
