"""Run lesson 22's counted kernels on the CPU build: what they move, formulas, and what a stated GPU
allows."""

import shutil
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops.block_sparse import SIDE
from minidist.autograd.tensor import tensor
from minidist.files import scratch
from minidist.kernels import on_cpu
from minidist.kernels.attention import SOURCE, attention
from minidist.kernels.loader import Source, launch
from minidist.kernels.matmul import matmul, read_bytes
from minidist.nn.attention_pattern import pattern_blocks

HERE = Path(__file__).resolve().parent
ACCESS = Source(HERE / "access.cu", ["one_each", "four_each"])
# lanes; bytes
WARP = 32
SECTOR = 32
FOREVER = 65536  # tokens
HEAD = 64  # columns of a head
SIDES = {1: 1, 2: 32, 3: 64}  # queries that share what is read, by attention's version
KINDS = {1: np.float32, 2: np.float32, 3: np.float16}
RUNGS = {1: "v1, naive", 2: "v2, tiles of 32", 3: "v3, tensor cores, float16"}
LADDER = {
    1: "naive",
    2: "shared tiles",
    3: "register tiles",
    4: "vector loads",
    5: "tensor cores, float16",
}


@dataclass(frozen=True)
class Machine:
    """A GPU as its data sheet states it; nothing here is measured."""

    name: str
    memory: float  # bytes per second from its memory
    rates: dict[str, float]  # operations a second, by what multiplies
    shared: float  # bytes per second from shared memory, all multiprocessors together

    def roof(self, intensity: float, rate: str) -> float:
        """Return the operations per second that `intensity` (operations per byte) allows."""
        return min(self.rates[rate], intensity * self.memory)


# 132 multiprocessors at 1.98 GHz. Per clock, each does 128 products and sums of float32 and moves
# 128 bytes of shared memory.
H100 = Machine("H100 SXM", 3.35e12, {"float32": 67e12, "tensor cores": 989e12}, 132 * 128 * 1.98e9)


@dataclass(frozen=True)
class Count:
    """One launch of a kernel.

    Operations are by formula; bytes, requests and sectors are counted; read and written are
    formulas.
    """

    name: str
    operations: int
    rate: str  # of Machine.rates
    seen: Any  # on_cpu.Seen
    read: int
    written: int

    @property
    def intensity(self) -> float:
        """Return the operations per byte of global memory that threads loaded or stored."""
        return self.operations / (self.seen.loads.bytes + self.seen.stores.bytes)


def one_warp(stride: int) -> Any:
    """Return the loads of one warp: lane i reads number stride i; stride 0: each lane reads 16
    adjacent bytes."""
    x = np.zeros(WARP * max(stride, 4), np.float32)
    y = np.empty(WARP * (1 if stride else 4), np.float32)
    with on_cpu.watch(count=True) as seen:
        launch(
            ACCESS,
            "one_each" if stride else "four_each",
            grid=1,
            block=WARP,
            args=(x, y, stride) if stride else (x, y),
        )
    return seen[0].loads


def sectors(stride: int) -> int:
    """Return how many sectors 32 lanes touch if they read one float every `stride`."""
    return min(WARP, WARP * 4 * stride // SECTOR)


def drawn(tokens: int, heads: int = 1, kind: Any = np.float32) -> list[np.ndarray]:
    """Return random q, k, v (1, heads, tokens, HEAD)."""
    rng = np.random.default_rng(22)
    return [rng.normal(size=(1, heads, tokens, HEAD)).astype(kind) for _ in range(3)]


def attention_bytes(version: int, tokens: int, tiles: int | None = None) -> tuple[int, int]:
    """Return the bytes (read, written) of one head of `tokens` tokens.

    `tiles`: how many tiles of keys are visited; None means all.
    """
    size = np.dtype(KINDS[version]).itemsize
    numbers = tokens * HEAD
    ends = numbers * size + 4 * tokens  # y, and log_total in float32
    if version == 1:
        scores = tokens * tokens
        return scores * (2 * HEAD * size + 4 + HEAD * (4 + size)), ends + 4 * scores
    side = SIDES[version]
    tiles = (tokens // side) ** 2 if tiles is None else tiles
    return (numbers + tiles * 2 * side * HEAD) * size, ends


def attention_count(
    version: int,
    tokens: int,
    *,
    causal: bool = False,
    blocks: np.ndarray | None = None,
    tiles: int | None = None,
) -> Count:
    """Count one head; its operations are those of all tiles, or of the `tiles` that are visited."""
    side = SIDES[version]
    with on_cpu.watch(count=True) as seen:
        attention(
            *drawn(tokens, kind=KINDS[version]), version=version, causal=causal, blocks=blocks
        )
    pairs = tokens * tokens if tiles is None else tiles * side * side
    return Count(
        RUNGS[version],
        4 * pairs * HEAD,
        "tensor cores" if version == 3 else "float32",
        seen[0],
        *attention_bytes(version, tokens, tiles),
    )


def long_intensity(version: int) -> float:
    """Return the operations per byte of a long sequence, by the formulas."""
    return 4 * FOREVER * FOREVER * HEAD / sum(attention_bytes(version, FOREVER))


def matmul_count(version: int, side: int = 128, depth: int = 32) -> Count:
    """Count the product of (side, depth) and (depth, side)."""
    kind = np.float16 if version == 5 else np.float32
    rng = np.random.default_rng(22)
    a = rng.normal(size=(side, depth)).astype(kind)
    b = rng.normal(size=(depth, side)).astype(kind)
    with on_cpu.watch(count=True) as seen:
        matmul(a, b, version=version)
    return Count(
        LADDER[version],
        2 * side * side * depth,
        "tensor cores" if version == 5 else "float32",
        seen[0],
        read_bytes(version, side, side, depth, a.itemsize),
        side * side * a.itemsize,
    )


# --------------------------------------------------------------------------------- planted mistakes

PLANTED = {
    "no-barrier": (
        "attention.cu",
        "        __syncthreads();                                         // before others' "
        "numbers are read\n",
        "\n",
    ),
    "no-rescale": ("attention.cu", "sum[r][i] *= shrink;", ";"),
    "mask-off-by-one": ("attention.cuh", "key <= query)", "key <= query + 1)"),
}


@contextmanager
def tiled(mistake: str | None) -> Iterator[Source]:
    """Yield version 2 of attention as it is, or with one of the PLANTED mistakes."""
    with scratch(prefix="minidist-lesson-") as folder:
        for name in ("attention.cu", "attention.cuh"):
            shutil.copy(SOURCE.path.with_name(name), folder)
        if mistake is not None:
            name, old, new = PLANTED[mistake]
            file = folder / name
            file.write_text(file.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
        yield Source(folder / "attention.cu", [f"attention_v2<float, {HEAD}>"])


def run_tiled(
    source: Source, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False
) -> np.ndarray:
    """Return y (1, 1, T, 64) of one head by version 2 of `source`."""
    y = np.full_like(q, np.nan)
    log_total = np.full(q.shape[:3], np.nan, np.float32)
    tokens = q.shape[2]
    launch(
        source,
        source.kernels[0],
        grid=-(-tokens // 32),
        block=128,
        shared=32 * (3 * HEAD + 1 + 32) * 4,
        args=(q, k, v, y, log_total, 1, 1, tokens, tokens, HEAD, HEAD**-0.5, causal, None, False),
    )
    return y


# ----------------------------------------------------------------------------------------- patterns

PATTERN = "local:256+global:1"  # four blocks of 64 and the first: five tiles a row
# tokens
SHORT = 1024
LONGER = 4096
TEN = 10240


def tiles(tokens: int, pattern: str = "") -> int:
    """Return the number of 64 × 64 tiles that a pattern shows, or that causal attention
    computes."""
    blocks = -(-tokens // SIDE)
    return int(pattern_blocks(pattern, tokens).sum()) if pattern else blocks * (blocks + 1) // 2


def by_the_book(q: Any, k: Any, v: Any) -> Any:
    """Return causal attention that keeps every score: sparse attention was compared with it in
    2020."""
    ahead = np.triu(np.ones((q.shape[2], q.shape[2]), bool), 1)
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * HEAD**-0.5
    return ops.matmul(ops.softmax(ops.where(ahead, -np.inf, scores)), v)


def under_pattern(q: Any, k: Any, v: Any) -> Any:
    """Return block-sparse attention under PATTERN."""
    return ops.sparse_attention(q, k, v, blocks=pattern_blocks(PATTERN, q.shape[2]))


WAYS: dict[str, Any] = {
    "every score kept": by_the_book,
    "tiled, dense": ops.causal_attention,
    PATTERN: under_pattern,
}


def forward_and_backward(way: str, tokens: int) -> tuple[float, int]:
    """Return the processor's seconds (the best of three) and the peak of bytes of one head, forward
    and backward."""

    def once() -> None:
        leaves = [tensor(array, requires_grad=True) for array in drawn(tokens)]
        WAYS[way](*leaves).backward(np.ones((1, 1, tokens, HEAD), np.float32))

    seconds = []
    for _ in range(3):
        start = time.process_time()
        once()
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    try:
        once()
        return min(seconds), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------- FlashAttention-3's ideas, 11.5

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MOST = float(ml_dtypes.finfo(E4M3).max)


def outliers(tokens: int) -> list[np.ndarray]:
    """Return q, k, v (tokens, HEAD), normal, in which one number of a thousand is about ten times
    as large."""
    rng = np.random.default_rng(22)
    return [
        rng.normal(size=(tokens, HEAD))
        + 10 * rng.normal(size=(tokens, HEAD)) * (rng.random((tokens, HEAD)) < 1e-3)
        for _ in range(3)
    ]


def through_a_byte(x: np.ndarray, side: int) -> np.ndarray:
    """Return x rounded to e4m3; each block of `side` rows has a scale of its own."""
    blocks = x.reshape(-1, side * x.shape[1])
    scale = MOST / np.abs(blocks).max(axis=1, keepdims=True)
    return ((blocks * scale).astype(E4M3).astype(np.float64) / scale).reshape(x.shape)


def rotated(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays (tokens, HEAD) times one random rotation: a Hadamard matrix with random signs.

    q kᵀ stays as it is, and an outlier is spread over its row.
    """
    hadamard = np.ones((1, 1))
    while len(hadamard) < HEAD:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(23).choice([-1.0, 1.0], HEAD)
    return [(x * signs) @ hadamard / HEAD**0.5 for x in arrays]


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return attention of one head in float64, without a mask."""
    scores = q @ k.T / HEAD**0.5
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True)


def byte_errors(tokens: int) -> dict[str, float]:
    """Return {how q, k and v are rounded to a byte: root mean square error of attention}."""
    q, k, v = outliers(tokens)
    right = softmax_attention(q, k, v)
    turned_q, turned_k = rotated(q, k)
    ways = {
        "one scale each": (q, k, tokens),
        "a scale for 64 rows": (q, k, SIDE),
        "and q and k rotated": (turned_q, turned_k, SIDE),
    }
    errors = {}
    for name, (one, other, side) in ways.items():
        found = softmax_attention(*(through_a_byte(x, side) for x in (one, other, v)))
        errors[name] = float(np.sqrt(np.mean((found - right) ** 2)))
    return errors
