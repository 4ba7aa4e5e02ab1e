"""The sizes and choices of a GPT, and of a mixture of experts in it."""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from minidist.autograd.ops.rotary import RopeScaling, is_positive
from minidist.comm.chunks import bounds
from minidist.device import backend
from minidist.errors import ConfigError
from minidist.nn.attention_pattern import check_pattern
from minidist.reading import converted

STD = 0.02
"""The standard deviation of initial weights (gpt.py)."""

_CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "silu"),
}
BALANCES = ("loss", "bias", "none")

# Bounds of a config that comes from a file: `GPTConfig.of` refuses others before anything is as
# large.
Size = Annotated[int, Meta(ge=1, le=2**40)]
Few = Annotated[int, Meta(ge=1, le=2**20)]


@dataclass(frozen=True)
class MixtureConfig:
    """The routing of tokens to experts. Raises: as GPTConfig."""

    experts: Few
    top_k: int = 2  # experts per token
    # places of an expert, a multiple of the even share of a sequence; None: no limit
    capacity: float | None = None
    noise: float = 0.0  # standard deviation of the noise on the gate's scores in training
    balance: str = "loss"  # the method that keeps expert loads even: "loss", "bias" or "none"
    balance_weight: float = 0.01  # of the balance loss
    bias_rate: float = 0.001  # change of a bias in a step
    shared: Annotated[int, Meta(le=2**20)] = 0  # additional experts that get every token
    hidden: Size | None = None  # width inside an expert; None: that of the MLP it replaces
    # most nodes on which the experts of a token lie; None: any number
    node_limit: int | None = None
    # number of nodes that divide the experts equally, or the number of experts on each node; None:
    # the nodes of the ranks that divide them (one node if they are not divided)
    nodes: Few | tuple[Few, ...] | None = None
    # of each layer, the experts in the order in which they lie on ranks and nodes; None: by number
    placement: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int | None):
            object.__setattr__(self, "nodes", tuple(self.nodes))
        if self.placement is not None:
            object.__setattr__(self, "placement", tuple(tuple(layer) for layer in self.placement))
        if self.experts < 1 or not 1 <= self.top_k <= self.experts or self.shared < 0:
            raise ConfigError(
                f"mixture: {self.experts} experts, top_k={self.top_k}, {self.shared} shared; "
                "choose 1 expert or more, top_k from 1 to the number of experts, shared 0 or more"
            )
        if self.capacity is not None and not self.capacity > 0.0:
            raise ConfigError(
                f"mixture: capacity is {self.capacity!r}; it must be above 0, or None to drop no "
                "token"
            )
        if self.balance not in BALANCES:
            raise ConfigError(
                f"mixture: balance is {self.balance!r}; choose one of {', '.join(BALANCES)}"
            )
        if (
            min(self.noise, self.balance_weight, self.bias_rate) < 0.0
            or self.hidden is not None
            and self.hidden < 1
        ):
            raise ConfigError(
                f"mixture: noise {self.noise!r}, balance_weight {self.balance_weight!r} and "
                f"bias_rate {self.bias_rate!r} must be 0 or more; hidden {self.hidden!r} must be 1 "
                "or more, or None"
            )
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Raise ConfigError unless nodes, limit and placement fit the experts."""
        if isinstance(self.nodes, tuple) and (
            min(self.nodes, default=0) < 1 or sum(self.nodes) != self.experts
        ):
            raise ConfigError(
                f"mixture: nodes is {self.nodes}; give the number of experts on each node, each 1 "
                f"or more, {self.experts} in all, or only the number of nodes"
            )
        if isinstance(self.nodes, int) and not 1 <= self.nodes <= self.experts:
            raise ConfigError(
                f"mixture: {self.experts} experts on {self.nodes} nodes; choose from 1 to "
                f"{self.experts}"
            )
        if self.node_limit is not None and self.node_limit < 1:
            raise ConfigError(f"mixture: node_limit is {self.node_limit}; it must be 1 or more")
        few = sum(sorted(self.node_counts)[: self.node_limit])
        if self.node_limit is not None and few < self.top_k:
            raise ConfigError(
                f"mixture: node_limit={self.node_limit} with {self.node_counts} experts on the "
                f"nodes limits a token to {few}, but top_k is {self.top_k}; choose a larger "
                "node_limit or a smaller top_k"
            )
        for layer in self.placement or ():
            if sorted(layer) != list(range(self.experts)):
                raise ConfigError(
                    f"mixture: the placement of a layer is {layer}; it must list each of the "
                    f"{self.experts} experts exactly once, by number from 0"
                )

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Return the number of experts on each node."""
        if isinstance(self.nodes, tuple):
            return self.nodes
        edges = bounds(self.experts, self.nodes or 1)
        return tuple(stop - start for start, stop in pairwise(edges))

    def order(self, layer: int) -> np.ndarray:
        """Return the experts of a layer in the order in which they lie on ranks: (experts,)
        integers."""
        chosen = range(self.experts) if self.placement is None else self.placement[layer]
        return np.array(chosen, np.int64)

    def node_of(self, layer: int) -> np.ndarray:
        """Return the node of each expert of a layer: (experts,) integers."""
        found = np.empty(self.experts, np.int64)
        found[self.order(layer)] = np.repeat(np.arange(len(self.node_counts)), self.node_counts)
        return found

    def places(self, tokens: int) -> int:
        """Return the largest number of tokens that an expert takes of a sequence of `tokens`."""
        return (
            tokens
            if self.capacity is None
            else math.ceil(self.capacity * self.top_k * tokens / self.experts)
        )


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT, checked when made. `GPTConfig(**config.as_dict())` makes an equal
    one.

    Raises:  ConfigError, one line: the value that does not work, and values that would.
    """

    vocabulary: Size  # number of token ids
    context: Size  # most tokens in a sequence
    layers: Few
    width: Size  # numbers per token on the residual stream
    heads: Few  # of queries
    # of keys and values; None: as many as heads. Fewer is grouped-query attention
    kv_heads: Few | None = None
    positions: str = "learned"  # or "rotary"
    tied: bool = False  # the output layer uses the token embedding's table
    norm: str = "layer"  # or "rms"
    activation: str = "gelu"  # or "silu", gated (SwiGLU)
    dropout: float = 0.0
    dtype: str = "float32"
    mixture: MixtureConfig | None = None  # experts in place of each block's MLP
    mlp_width: Size | None = None  # width inside an MLP; None: see `hidden`
    # which keys a query sees (attention_pattern.py); None: all up to itself
    attention_pattern: str | None = None
    norm_eps: float = 1e-5  # is added to the variance or mean square in a norm
    rope_theta: float = 10000.0  # base of the rotary angles
    rope_scaling: RopeScaling | None = None  # slower rotation of the slow pairs

    def __post_init__(self) -> None:
        if isinstance(self.mixture, dict):
            object.__setattr__(self, "mixture", MixtureConfig(**self.mixture))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for name in ("vocabulary", "context", "layers", "width", "heads", "kv_heads", "mlp_width"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1) and not (
                name in ("kv_heads", "mlp_width") and value is None
            ):
                raise ConfigError(
                    f"GPT: {name} is {value!r}; it must be a whole number, at least 1"
                )
        placement = self.mixture and self.mixture.placement
        if placement and len(placement) != self.layers:
            raise ConfigError(
                f"GPT: placement lists {len(placement)} layers, but the model has {self.layers}; "
                "give one order of the experts for each layer"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"GPT: {name} is {getattr(self, name)!r}; choose {' or '.join(choices)}"
                )
        if self.width % self.heads:
            raise ConfigError(
                f"GPT: width {self.width} is not divisible by {self.heads} heads; use width "
                f"{-(-self.width // self.heads) * self.heads} or heads in {divisors(self.width)}"
            )
        if self.heads % self.key_heads:
            raise ConfigError(
                f"GPT: {self.heads} heads cannot be divided equally among {self.key_heads} key and "
                f"value heads; use kv_heads in {divisors(self.heads)}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(
                "GPT: rotary positions rotate pairs of numbers, but the width of a head is "
                f"{self.head_width} (width {self.width} / {self.heads} heads); choose an even "
                "width of a head, or use learned positions"
            )
        for name in ("norm_eps", "rope_theta"):
            if not is_positive(getattr(self, name)):
                raise ConfigError(
                    f"GPT: {name} is {getattr(self, name)!r}; it must be a finite number above 0"
                )
        if self.rope_scaling is not None and self.positions != "rotary":
            raise ConfigError(
                f"GPT: rope_scaling is for rotary positions, and these are {self.positions}; "
                "leave it out"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"GPT: dropout is {self.dropout!r}; it must be in [0, 1)")
        if backend.dtype(self.dtype) not in backend.FLOATS:
            raise ConfigError(
                f"GPT: weights of dtype {self.dtype} cannot be trained; use float64, float32, "
                "bfloat16 or float16"
            )
        if self.attention_pattern is not None:
            check_pattern(self.attention_pattern, self.context)

    @classmethod
    def of(cls, value: Any) -> "GPTConfig":
        """Return the config of a JSON object, as as_dict gives it. Raises: ConfigError if a size or
        type is wrong."""
        config: GPTConfig = converted(value, cls)
        return config

    @property
    def head_width(self) -> int:
        """Return the number of elements per head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Return the width inside the MLP: 4 × width; gated, 8/3 × width (as many parameters),
        rounded up to a multiple of 8."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.activation == "gelu" else -(-self.width // 3) * 8

    @property
    def expert_numbers(self) -> int:
        """Return the number of weights of all experts except the shared ones."""
        mixture = self.mixture
        return 0 if mixture is None else self.layers * mixture.experts * self._mlp_numbers

    @property
    def numbers(self) -> int:
        """Return the number of weights of all matrices: all of the model except biases and
        norms."""
        attention = self.width * self.head_width * 2 * (self.heads + self.key_heads)
        mlps = 1 if self.mixture is None else self.mixture.shared
        gate = 0 if self.mixture is None else self.width * self.mixture.experts
        tables = self.vocabulary * (2 - self.tied) + self.context * (self.positions == "learned")
        return (
            self.width * tables
            + self.layers * (attention + mlps * self._mlp_numbers + gate)
            + self.expert_numbers
        )

    @property
    def _mlp_numbers(self) -> int:
        hidden = self.hidden if self.mixture is None else self.mixture.hidden or self.hidden
        return self.width * hidden * (2 if self.activation == "gelu" else 3)

    def as_dict(self) -> dict[str, object]:
        """Return all fields, for the JSON of a run; mixture and rope_scaling as dicts."""
        return asdict(self)


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})
