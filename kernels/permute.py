"""Tokens to their experts and back, as nn/moe.py sends them: references, then the launchers of permute.cu.

    plan = plan_rows(chosen, kept, experts=8)               # chosen (T, k) experts, kept (T, k) bool or None: all
    rows = to_experts(x, plan)                              # (T, width) -> (R, width), sorted by expert, then token
    y = from_experts(results, weights, plan)                # (R, width), (R,) float32 -> (T, width)

    dx = from_experts(drows, None, plan)                    # the gradients
    dresults, dweights = from_experts_gradient(dy, results, weights, plan)

Rows float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; sums float32, rounded once. Of a token's
results the first expert's is added first. Bytes moved: at the head of permute.cu.
"""

from dataclasses import dataclass

import numpy as np
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

from minidist.backend import Array, array_module
from minidist.errors import ShapeError

VERSIONS = (1, 2)
SOURCE = Source("permute.cu", [f"{name}<{kind}>" for kind in FLOATS
                               for name in ("gather_v1", "gather_v2", "combine_v1", "combine_v2", "row_dots")])
MOST_THREADS = 256      # a block


@dataclass(frozen=True)
class Plan:
    """Who goes where. Rows are sorted by expert, and an expert's by token.

    Attributes: tokens   (R,) int32: each row's token
                experts  (R,) integers: each row's expert
                slots    (T, k) int32: each token's rows, rising; -1 for one that is dropped
                counts   (experts,) integers: each expert's rows
    """

    tokens: Array
    experts: Array
    slots: Array
    counts: Array


def plan_rows(chosen: Array, kept: Array | None = None, *, experts: int) -> Plan:
    """Where each kept choice goes. Raises: ShapeError if the shapes do not fit."""
    if chosen.ndim != 2 or (kept is not None and kept.shape != chosen.shape):
        raise ShapeError(f"plan_rows: chosen {chosen.shape} and kept {None if kept is None else kept.shape}; "
                         f"they need one shape (tokens, choices)")
    xp, (count, ways) = array_module(chosen), chosen.shape
    where = xp.arange(count * ways) if kept is None else xp.flatnonzero(kept)
    where = where[xp.argsort(chosen.reshape(-1)[where], kind="stable")]
    ids, slots = chosen.reshape(-1)[where], xp.full(count * ways, -1, "int32")
    slots[where] = xp.arange(len(where), dtype="int32")
    return Plan((where // max(ways, 1)).astype("int32"), ids, xp.sort(slots.reshape(count, ways), axis=1),
                xp.bincount(ids, minlength=experts))


def to_experts_reference(x: np.ndarray, plan: Plan) -> np.ndarray:
    """Each row's token's row."""
    return x[plan.tokens]


def from_experts_reference(results: np.ndarray, weights: np.ndarray | None, plan: Plan) -> np.ndarray:
    """A token's rows, each times its weight, added up."""
    y = np.zeros((len(plan.slots), results.shape[1]), results.dtype)
    np.add.at(y, plan.tokens, results if weights is None else results * weights[:, None])
    return y


def from_experts_gradient_reference(dy: np.ndarray, results: np.ndarray, weights: np.ndarray,
                                    plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Of results: dy of the row's token times the weight; of a weight: the product of the row and that dy."""
    rows = dy[plan.tokens]
    return rows * weights[:, None], (rows * results).sum(axis=1)


def to_experts(x: Array, plan: Plan, *, version: int | None = None) -> Array:
    """(T, width) -> (R, width). Raises: ShapeError if x does not fit; KernelError if `version` does not."""
    _check("to_experts: x", x, len(plan.slots))
    return _gather(x, None, plan, version)


def from_experts(results: Array, weights: Array | None, plan: Plan, *, version: int | None = None) -> Array:
    """(R, width), float32 (R,) or None for ones -> (T, width). Raises: as to_experts."""
    _check("from_experts: results", results, len(plan.tokens))
    (count, ways), width = plan.slots.shape, results.shape[1]
    _check_weights(weights, plan)
    y = array_module(results).empty((count, width), results.dtype)
    version = version_for("combine", version, results, y)
    if y.size:
        launch(SOURCE, f"combine_v{version}<{c_type(results)}>", grid=count, block=_threads(results, version),
               args=(results, weights, plan.slots, y, ways, width))
    return y


def from_experts_gradient(dy: Array, results: Array, weights: Array, plan: Plan, *,
                          version: int | None = None) -> tuple[Array, Array]:
    """The gradients of results (R, width), and of weights (R,) float32. Raises: as to_experts."""
    _check("from_experts_gradient: dy", dy, len(plan.slots))
    _check("from_experts_gradient: results", results, len(plan.tokens))
    _check_weights(weights, plan)
    dresults, dweights = _gather(dy, weights, plan, version), array_module(dy).empty(len(plan.tokens), np.float32)
    if dweights.size:
        launch(SOURCE, f"row_dots<{c_type(dy)}>", grid=len(plan.tokens), block=_threads(dy, 1),
               args=(results, dy, plan.tokens, dweights, dy.shape[1]))
    return dresults, dweights


def _gather(x: Array, weights: Array | None, plan: Plan, version: int | None) -> Array:
    y = array_module(x).empty((len(plan.tokens), x.shape[1]), x.dtype)
    version = version_for("gather", version, x, y)
    if y.size:
        launch(SOURCE, f"gather_v{version}<{c_type(x)}>", grid=len(plan.tokens), block=_threads(x, version),
               args=(x, plan.tokens, weights, y, x.shape[1]))
    return y


def _threads(x: Array, version: int) -> int:
    """Threads a row: whole warps, no more than it has elements or packs."""
    wanted = x.shape[1] * x.dtype.itemsize // 16 if version == 2 else x.shape[1]
    return min(MOST_THREADS, max(1, -(-wanted // 32)) * 32)


def _check(what: str, rows: Array, count: int) -> None:
    if rows.ndim != 2 or len(rows) != count:
        raise ShapeError(f"{what} has shape {rows.shape}; the plan needs ({count}, width)")


def _check_weights(weights: Array | None, plan: Plan) -> None:
    if weights is not None and weights.shape != plan.tokens.shape:
        raise ShapeError(f"weights of shape {weights.shape} do not fit {len(plan.tokens)} rows; it needs one a row")
