"""Tokens copied to the rows of their experts and summed again, as in ops/experts.py: references, then
the launchers of permute.cu.

    placement = place_rows(chosen, kept, experts=8)         # autograd/ops/experts.py
    rows = to_experts(x, placement)                 # (T, width) -> (R, width), by expert and token
    y = from_experts(results, weights, placement)           # (R, width), (R,) float32 -> (T, width)

    dx = from_experts(drows, None, placement)               # the gradients
    dresults, dweights = from_experts_gradient(dy, results, weights, placement)

Rows float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; sums float32, rounded
once. Of a token's results the first expert's is added first. Bytes moved: at the head of
permute.cu.
"""

from typing import Protocol

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import ShapeError
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2)
SOURCE = Source(
    "permute.cu",
    [
        f"{name}<{kind}>"
        for kind in FLOATS
        for name in ("gather_v1", "gather_v2", "combine_v1", "combine_v2", "row_dots")
    ],
)
MOST_THREADS = 256  # per block


class RowPlacement(Protocol):
    """The placement made by ops.experts.place_rows: rows are sorted by expert, the rows of an
    expert by token."""

    @property
    def tokens(self) -> Array:
        """(R,) int32: the token of each row."""

    @property
    def slots(self) -> Array:
        """(T, k) int32: the rows of each token, ascending, after a -1 for each dropped choice."""


def to_experts_reference(x: np.ndarray, placement: RowPlacement) -> np.ndarray:
    """Return the token of each row: (T, width) -> (R, width)."""
    return x[placement.tokens]


def from_experts_reference(
    results: np.ndarray, weights: np.ndarray | None, placement: RowPlacement
) -> np.ndarray:
    """Return the sum of each token's rows, each times its weight: (R, width) -> (T, width)."""
    y = np.zeros((len(placement.slots), results.shape[1]), results.dtype)
    np.add.at(y, placement.tokens, results if weights is None else results * weights[:, None])
    return y


def from_experts_gradient_reference(
    dy: np.ndarray, results: np.ndarray, weights: np.ndarray, placement: RowPlacement
) -> tuple[np.ndarray, np.ndarray]:
    """Return, with dy of the row's token: the gradients of results, weight · dy, and of weights,
    the dot product row · dy."""
    rows = dy[placement.tokens]
    return rows * weights[:, None], (rows * results).sum(axis=1)


def to_experts(x: Array, placement: RowPlacement, *, version: int | None = None) -> Array:
    """Copy the token of each row: (T, width) -> (R, width). Raises: ShapeError if x does not fit;
    KernelError if `version` does not."""
    _check("to_experts: x", x, len(placement.slots))
    return _gather(x, None, placement, version)


def from_experts(
    results: Array, weights: Array | None, placement: RowPlacement, *, version: int | None = None
) -> Array:
    """Sum the weighted rows of each token: (R, width), float32 (R,) or None for ones -> (T, width).
    Raises: as to_experts.
    """
    _check("from_experts: results", results, len(placement.tokens))
    (count, ways) = placement.slots.shape
    width = results.shape[1]
    _check_weights(weights, placement)
    y = array_module(results).empty((count, width), results.dtype)
    version = version_for("combine", version, results, y)
    if y.size:
        launch(
            SOURCE,
            f"combine_v{version}<{c_type(results)}>",
            grid=count,
            block=_threads(results, version),
            args=(results, weights, placement.slots, y, ways, width),
        )
    return y


def from_experts_gradient(
    dy: Array,
    results: Array,
    weights: Array,
    placement: RowPlacement,
    *,
    version: int | None = None,
) -> tuple[Array, Array]:
    """Return the gradients of results (R, width), and of weights (R,) float32. Raises: as
    to_experts."""
    _check("from_experts_gradient: dy", dy, len(placement.slots))
    _check("from_experts_gradient: results", results, len(placement.tokens))
    _check_weights(weights, placement)
    if dy.shape[1] != results.shape[1]:
        raise ShapeError(
            f"from_experts_gradient: dy {dy.shape} is not as wide as results {results.shape}"
        )
    dresults = _gather(dy, weights, placement, version)
    dweights = array_module(dy).empty(len(placement.tokens), np.float32)
    if dweights.size:
        launch(
            SOURCE,
            f"row_dots<{c_type(dy)}>",
            grid=len(placement.tokens),
            block=_threads(dy, 1),
            args=(results, dy, placement.tokens, dweights, dy.shape[1]),
        )
    return dresults, dweights


def _gather(x: Array, weights: Array | None, placement: RowPlacement, version: int | None) -> Array:
    y = array_module(x).empty((len(placement.tokens), x.shape[1]), x.dtype)
    version = version_for("gather", version, x, y)
    if y.size:
        launch(
            SOURCE,
            f"gather_v{version}<{c_type(x)}>",
            grid=len(placement.tokens),
            block=_threads(x, version),
            args=(x, placement.tokens, weights, y, x.shape[1]),
        )
    return y


def _threads(x: Array, version: int) -> int:
    """Return the threads per row: whole warps, no more than it has elements or packs."""
    wanted = x.shape[1] * x.dtype.itemsize // 16 if version == 2 else x.shape[1]
    return min(MOST_THREADS, max(1, -(-wanted // 32)) * 32)


def _check(what: str, rows: Array, count: int) -> None:
    if rows.ndim != 2 or len(rows) != count:
        raise ShapeError(f"{what} has shape {rows.shape}; the placement needs ({count}, width)")


def _check_weights(weights: Array | None, placement: RowPlacement) -> None:
    if weights is not None and weights.shape != placement.tokens.shape:
        raise ShapeError(
            f"weights of shape {weights.shape} do not fit {len(placement.tokens)} rows; "
            f"it needs one a row"
        )
