"""Chapter 24 · A device: its peaks, its memory, and how much of them kernels reach."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from minidist.errors import ConfigError
from minidist.simulate.model_flops import PRODUCT_DTYPES

USUAL_REACH = 0.8
"""The share of a peak that a product reaches where no source states it."""
_SHORT = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float8_e4m3": "float8"}


@dataclass(frozen=True)
class Efficiency:
    """How much of its peaks a device reaches, and what every kernel costs."""

    # of what the device's best product reaches (Device.reach), by an endless product in training
    matmul_share: float = 0.88
    # k of a product at which a tile spends half of its time to begin and to end; of a device
    # without tiles, of all three sides
    half: float = 128.0
    # of what the best product reaches: FlashAttention-2 reaches 0.50 to 0.73 of an A100's peak
    # (Dao 2023)
    attention_share: float = 0.55
    # bytes that pass through memory for each score and each logit, a kernel of the attention or the
    # loss; 0: they stay on the chip, as here. Other frameworks compute them pass by pass
    scores: float = 0.0
    logits: float = 0.0
    # of the bandwidth: assumed; STREAM reaches about 0.9 of it (Deakin et al. 2018)
    memory_share: float = 0.8
    # seconds of the device between two kernels: assumed. With CUDA graphs 0.9e-6; a framework that
    # launches each kernel by itself has small ones that are not kernels here. shortest: of the
    # shortest kernel, on a V100 (both NVIDIA, Getting Started with CUDA Graphs, 2019)
    launch: float = 3e-6
    shortest: float = 2.9e-6
    # seconds in which the host launches one kernel; it runs ahead of the device. Assumed: an
    # operator of PyTorch takes 5 to 25e-6; fits to vTrain's steps of Megatron-DeepSpeed find 48e-6
    host: float = 20e-6
    # kernels of no more than cache_bytes find them in the cache, which is cache_factor times as
    # fast as the memory
    cache_bytes: float = 0.0
    cache_factor: float = 1.0
    # products of matrices of no more bytes together lose nothing by their size
    small_bytes: float = 0.0
    python: float = 0.0  # seconds of Python for one result of an op; a GPU's host runs ahead of it
    # seconds until NumPy's innermost loop has started; a view with gaps takes many
    loop: float = 0.0
    # seconds a byte that a step's products find outside the cache, beside the product
    cold: float = 0.0
    # seconds of each matrix of a stack, beside its product; a GPU runs them at once
    matrix: float = 0.0


DEFAULT = Efficiency()


@dataclass(frozen=True)
class Device:
    """One GPU, TPU or processor. What no source states is None."""

    name: str
    peaks: Mapping[str, float]  # FLOP/s of matrix products, dense, by dtype ("tf32" among them)
    memory_bytes: int
    memory_bandwidth: float  # bytes a second
    memory_kind: str = ""
    watts: float | None = None  # at full load
    idle_watts: float | None = None
    price_an_hour: float | None = None  # dollars
    kind: str = "gpu"  # or cpu
    host_bandwidth: float | None = None  # bytes a second of its share of the host's memory
    # share of the peak that the best product of a benchmark reaches, by dtype
    reach: Mapping[str, float] = field(default_factory=dict)
    units: int = 0  # that compute a tile each (an NVIDIA GPU's SMs); 0: products have no tiles
    efficiency: Efficiency = DEFAULT

    def peak(self, dtype: str) -> float:
        """Return FLOP/s of matrix products. Raises: ConfigError if the device has no rate for the
        dtype."""
        name = _SHORT.get(dtype, dtype)
        if name not in self.peaks:
            known = [word for word, dtype in PRODUCT_DTYPES.items() if dtype in self.peaks]
            raise ConfigError(
                f"{self.name} has no rate for {name}; use --precision {' or '.join(known)}"
            )
        return self.peaks[name]

    def best(self, dtype: str) -> float:
        """Return FLOP/s of the best product of a benchmark: of a processor its peak, which was
        measured. Raises: ConfigError as peak()."""
        if self.kind == "cpu":
            return self.peak(dtype)
        return self.peak(dtype) * self.reach.get(_SHORT.get(dtype, dtype), USUAL_REACH)


class Tier(NamedTuple):
    """Memory beyond the device: the host's, CXL, a disk."""

    name: str
    bandwidth: float  # bytes a second between it and one device, in one direction
    alpha: float  # seconds until a copy begins
    nbytes: int | None = None  # of a node; None: not stated
