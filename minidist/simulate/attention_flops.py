"""Chapter 24 · FLOPs of an attention kernel: of its arguments only shapes are known, and which
blocks a mask shows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidist.autograd.ops.block_sparse import SIDE


def attention_flops(name: str, given: Mapping[str, Any]) -> float:
    """Return the FLOPs of an attention kernel: two products forward, three for dq, four for dk and dv.

    Of causal attention half the scores count; under a mask of blocks those of the blocks that it
    shows, of a query's own block half.
    """
    products = {"attention_v": 2, "attention_dq": 3, "attention_dkv": 4}
    found = next((count for begin, count in products.items() if name.startswith(begin)), 0)
    if not found or "queries" not in given:
        return 0.0
    queries = given["queries"]
    keys = given["keys"]
    causal = bool(given.get("causal"))
    pairs = queries * keys * (0.5 if causal else 1.0)
    if given.get("blocks") is not None:
        pairs = _pairs_shown(given["blocks"].owner.mask, queries, keys, causal)
    return float(2.0 * found * len(given["q"]) * given["heads"] * pairs * given["width"])


def scores_of(given: Mapping[str, Any]) -> tuple[int]:
    """Return the number of scores of an attention kernel that computes all of them."""
    return (len(given["q"]) * given["heads"] * given["queries"] * given["keys"],)


def _pairs_shown(mask: np.ndarray, queries: int, keys: int, causal: bool) -> float:
    """Return queries times keys in the blocks that a mask shows; of a query's own block half if
    causal."""
    sides = [
        np.diff(np.minimum(np.arange(count + 1) * SIDE, length))
        for count, length in zip(mask.shape, (queries, keys), strict=True)
    ]
    own = sides[0] @ (np.diagonal(mask) * sides[1]) / 2 if causal else 0.0
    return float(sides[0] @ mask @ sides[1] - own)
