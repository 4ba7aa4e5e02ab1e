"""What a GPT is made of."""

from dataclasses import dataclass, fields

from minidist import backend
from minidist.errors import ConfigError

_CHOICES = {"positions": ("learned", "rotary"), "norm": ("layer", "rms"), "activation": ("gelu", "silu")}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT; checked when made.

    Raises:  ConfigError, one line: which value does not work and what would.
    """

    vocabulary: int              # different token ids
    context: int                 # most tokens of a sequence
    layers: int
    width: int                   # numbers a token, on the residual stream
    heads: int                   # of queries
    kv_heads: int | None = None  # of keys and values; None: as many as heads. Fewer is grouped-query attention
    positions: str = "learned"   # or "rotary"
    tied: bool = False           # the output layer uses the token embedding's table
    norm: str = "layer"          # or "rms"
    activation: str = "gelu"     # or "silu", gated (SwiGLU)
    dropout: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "width", "heads", "kv_heads"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and value >= 1) and not (name == "kv_heads" and value is None):
                raise ConfigError(f"GPT: {name} is {value!r}; it must be a whole number from 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"GPT: {name} is {getattr(self, name)!r}; choose {' or '.join(choices)}")
        if self.width % self.heads:
            raise ConfigError(f"GPT: width {self.width} is not divisible by {self.heads} heads; use width "
                              f"{-(-self.width // self.heads) * self.heads} or heads in {_divisors(self.width)}")
        if self.heads % self.key_heads:
            raise ConfigError(f"GPT: {self.heads} heads do not divide among {self.key_heads} key and value heads; "
                              f"use kv_heads in {_divisors(self.heads)}")
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(f"GPT: rotary positions turn pairs, but heads are {self.head_width} wide (width "
                              f"{self.width} / {self.heads} heads); make that even, or use learned positions")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"GPT: dropout is {self.dropout!r}; it must be in [0, 1)")
        if backend.dtype(self.dtype) not in backend.FLOATS:
            raise ConfigError(f"GPT: weights of dtype {self.dtype} cannot learn; "
                              f"use float64, float32, bfloat16 or float16")

    @property
    def head_width(self) -> int:
        """Numbers a head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Width inside the MLP: 4 × width; gated, 8/3 × width (as many parameters), up to the next multiple of 8."""
        return 4 * self.width if self.activation == "gelu" else -(-self.width // 3) * 8

    def as_dict(self) -> dict[str, object]:
        """All fields, for a run's JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
