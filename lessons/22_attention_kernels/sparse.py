"""Lesson 22, section 11.2: sparse attention on images, and sparse attention in four ways.

python lessons/22_attention_kernels/sparse.py                                  # minutes
python lessons/22_attention_kernels/sparse.py --steps 2 --tokens 512           # seconds
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops.block_sparse import SIDE
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.data import digits
from minidist.data.images import Images
from minidist.grading import load_module
from minidist.lessons.page import Page
from minidist.nn import GPTConfig
from minidist.nn.attention_pattern import pattern_blocks
from minidist.parallel.hybrid.hybrid import Plan, Trainer

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "22")

# ------------------------------------------------------------------------------------------- images

ROWS = 2  # of digits in a picture
COLUMNS = 4
LEVELS = 17  # of grey
PICTURES = 4  # a step
WINDOWS = (None, "local:256", "local:128", "local:64")


def pictures(images: Images, name: str, count: int) -> np.ndarray:
    """Return pictures (count, pixels) of 2 × 4 digits each, row by row; `name` chooses the
    digits."""
    seed = [ord(letter) for letter in name]
    chosen = np.random.default_rng(seed).integers(0, len(images), (count, ROWS, COLUMNS))
    # (count, digit row, row, digit column, column)
    placed = images.pixels[chosen].transpose(0, 1, 3, 2, 4)
    return placed.reshape(count, -1).astype(np.int64)


def batch_of(images: Images, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets): each pixel is predicted from the pixels before it; the first from
    black."""
    targets = pictures(images, name, count)
    return np.pad(targets[:, :-1], ((0, 0), (1, 0))), targets


def learned(world: Group, pattern: str | None, steps: int) -> tuple[float, float]:
    """Train a small GPT on pictures; return the loss on pictures of held-out digits, in nats a
    pixel, and the processor's seconds of a step."""
    data = digits.load()
    config = GPTConfig(
        vocabulary=LEVELS,
        context=ROWS * COLUMNS * 64,
        layers=2,
        width=32,
        heads=2,
        attention_pattern=pattern,
    )
    trainer = Trainer(Plan(), config, world, lr=5e-3)
    began = time.process_time()
    for step in range(steps):
        trainer.step(batch_of(data.train, f"step {step}", PICTURES))
    seconds = (time.process_time() - began) / steps
    return trainer.evaluate([batch_of(data.test, "test", 32)]), seconds


def on_images(page: Page, steps: int) -> None:
    """Show what each window costs and what it learns."""
    rows = []
    tokens = ROWS * COLUMNS * 64
    for pattern in WINDOWS:
        ((loss, seconds),) = md.run(learned, pattern, steps, size=1, limit=3600)
        width = COLUMNS * 8
        seen = f"{int(pattern.partition(':')[2]) // width} rows" if pattern else "all rows"
        rows.append(
            [
                pattern or "dense",
                seen,
                lab.tiles(tokens, pattern or ""),
                f"{loss:.3f}",
                f"{1e3 * seconds:.0f} ms",
            ]
        )
    page.table(
        f"Pictures of {ROWS} × {COLUMNS} digits, {tokens} pixels, {steps} steps",
        ["", "sees at most", "tiles", "loss, nats a pixel", "a step"],
        rows,
    )


# -------------------------------------------------------------------------------------------- peers


def ours(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: str | None) -> np.ndarray:
    """Return the library's attention: tiled, or block-sparse."""
    leaves = [tensor(array[None, None]) for array in (q, k, v)]
    if pattern is None:
        return ops.causal_attention(*leaves).data[0, 0]
    return ops.sparse_attention(*leaves, blocks=pattern_blocks(pattern, len(q))).data[0, 0]


def seen_of(tokens: int, pattern: str) -> np.ndarray:
    """Return the mask of the pattern, (tokens, tokens)."""
    blocks = pattern_blocks(pattern, tokens)
    return np.kron(blocks, np.ones((SIDE, SIDE), bool)) & np.tri(tokens, dtype=bool)


def by_scipy(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: str) -> Callable[[], np.ndarray]:
    """Return attention by scipy's sparse matrices, prepared: one entry for each score that is
    seen."""
    from scipy import sparse  # noqa: PLC0415 - no dependency of minidist

    mask = sparse.csr_matrix(seen_of(len(q), pattern).astype(np.float32))
    rows = np.repeat(np.arange(len(q)), np.diff(mask.indptr))

    def run() -> np.ndarray:
        scores = np.einsum("ed,ed->e", q[rows], k[mask.indices]) / np.float32(q.shape[1] ** 0.5)
        top = np.maximum.reduceat(scores, mask.indptr[:-1])
        p = np.exp(scores - top[rows])
        weighted = sparse.csr_matrix((p, mask.indices, mask.indptr), mask.shape)
        return np.asarray(weighted @ v) / np.add.reduceat(p, mask.indptr[:-1])[:, None]

    return run


def by_torch(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: str | None) -> Callable[[], Any]:
    """Return PyTorch's attention, prepared: causal, or under the pattern's mask."""
    import torch  # noqa: PLC0415 - no dependency of minidist

    torch.set_num_threads(1)
    attention = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.from_numpy(array[None, None]) for array in (q, k, v)]
    if pattern is None:
        return lambda: attention(*tensors, is_causal=True)[0, 0].numpy()
    mask = torch.from_numpy(seen_of(len(q), pattern))
    return lambda: attention(*tensors, attn_mask=mask)[0, 0].numpy()


def by_flex(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: str) -> Callable[[], Any]:
    """Return PyTorch's flex_attention under the pattern, compiled: it skips blocks, as ours does."""
    import torch  # noqa: PLC0415 - no dependency of minidist
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415
        create_block_mask,
        flex_attention,
    )

    blocks = torch.tensor(pattern_blocks(pattern, len(q)))

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & blocks[query // SIDE, key // SIDE]

    mask = create_block_mask(seen, 1, 1, len(q), len(q), device="cpu", BLOCK_SIZE=SIDE)
    compiled = torch.compile(flex_attention)
    tensors = [torch.from_numpy(array[None, None]) for array in (q, k, v)]

    def run() -> Any:
        with torch.no_grad():
            return compiled(*tensors, block_mask=mask)[0, 0].numpy()

    return run


def contenders(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return {name: its prepared call}; PyTorch's where it is installed."""
    found: dict[str, Callable[[], Any]] = {
        "minidist, dense": lambda: ours(q, k, v, None),
        "minidist, pattern": lambda: ours(q, k, v, lab.PATTERN),
    }
    if find_spec("scipy"):
        found["scipy.sparse, pattern"] = by_scipy(q, k, v, lab.PATTERN)
    if find_spec("torch"):
        found["PyTorch, dense"] = by_torch(q, k, v, None)
        found["PyTorch, pattern as a mask"] = by_torch(q, k, v, lab.PATTERN)
        found["PyTorch, flex_attention"] = by_flex(q, k, v, lab.PATTERN)
    return found


def peers(page: Page, tokens: int) -> None:
    """Show the processor time of forward of one head in each way, after a check of its result."""
    q, k, v = (array[0, 0] for array in lab.drawn(tokens))
    with threadpool_limits(1, user_api="blas"):
        found = contenders(q, k, v)
        right = {dense: ours(q, k, v, None if dense else lab.PATTERN) for dense in (True, False)}
        seconds = {}
        for name, call in found.items():
            np.testing.assert_allclose(call(), right["dense" in name], atol=1e-5)
            seconds[name] = min(timed(call) for _ in range(5))
    pattern = seconds["minidist, pattern"]
    page.table(
        f"Forward of one head, {tokens:,} tokens, {lab.PATTERN}, one core",
        ["", "processor time", "of minidist's pattern"],
        [
            [name, f"{1e3 * each:.1f} ms", f"{each / pattern:.1f} times"]
            for name, each in seconds.items()
        ],
    )


def timed(call: Callable[[], Any]) -> float:
    """Return the processor's seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the tables as JSON")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="of a training")
    parser.add_argument("--tokens", metavar="N", type=int, default=lab.LONGER)
    options = parser.parse_args()
    (page,) = md.run(Page, size=1)
    peers(page, options.tokens)
    on_images(page, options.steps)
    page.save(options.json)


if __name__ == "__main__":
    main()
