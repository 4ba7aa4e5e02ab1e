"""Print what simulated and planned steps take, to the last bit, as another platform computes it.

    python simulated_bits.py                            # as this Python and NumPy compute
    python simulated_bits.py narrow-index exact-sum     # as another platform computes

narrow-index    NumPy's index type has 32 bits
exact-sum       sum() keeps what rounding loses, as CPython does from 3.12 on
"""

import builtins
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

INDICES = (
    *("arange", "argsort", "nonzero", "flatnonzero", "searchsorted", "bincount", "cumsum", "prod"),
    *("sum", "unique", "lexsort", "argmax", "argmin", "unravel_index", "indices"),
)
"""Functions whose results have NumPy's index type, unless a dtype is given."""
COPIES = {"array": 1, "asarray": 1, "full": 2}
"""Functions that keep the dtype of an array, and the place of the dtype among their arguments."""


def narrowed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results have 32 bits where NumPy chose its index type."""

    def narrow(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        given = options.get("dtype") is not None or len(args) > COPIES.get(name, len(args))
        kept = name in COPIES and hasattr(args[0], "dtype")
        if given or kept:
            return found
        return tuple(map(_narrow, found)) if isinstance(found, tuple) else _narrow(found)

    return narrow


def _narrow(found: Any) -> Any:
    is_index = isinstance(found, (np.ndarray, np.generic)) and found.dtype == np.int64
    return found.astype(np.int32) if is_index else found


def exact_sum(values: Iterable[Any], start: Any = 0) -> Any:
    """Return the sum; of floats the exact one, rounded once."""
    parts = [start, *values]
    kinds = set(map(type, parts))
    if float in kinds and kinds <= {int, float}:
        return math.fsum(parts)
    total = start
    for part in parts[1:]:
        total = total + part
    return total


def main(platform: Sequence[str]) -> None:
    """Print the times as JSON, floats in hexadecimal."""
    if "narrow-index" in platform:
        for name in (*INDICES, *COPIES):
            setattr(np, name, narrowed(name, getattr(np, name)))
        np.intp = np.int32  # type: ignore[misc, assignment]
    if "exact-sum" in platform:
        builtins.sum = exact_sum
    print(json.dumps(_exact(times()), default=str))


def times() -> dict[str, Any]:
    """Return what the jobs take; minidist is imported here, with the changed NumPy."""
    import minidist as md
    from minidist.nn import GPTConfig
    from minidist.nn.config import MixtureConfig
    from minidist.plan.ranking import plan_for

    sizes: dict[str, Any] = {"vocabulary": 512, "context": 64, "layers": 2, "width": 64}
    dense = GPTConfig(**sizes, heads=4)
    rotary = GPTConfig(**sizes, heads=4, positions="rotary", activation="silu", kv_heads=2)
    mixed = GPTConfig(**sizes, heads=4, mixture=MixtureConfig(experts=4, top_k=2, hidden=64))
    plan = md.Plan
    jobs = {
        "data": (plan(dp=2), dense, "h100:1x2"),
        "tensor": (plan(tp=2, sequence_parallel=True), dense, "h100:1x2"),
        "ring": (plan(cp=2, precision="bf16"), rotary, "h100:1x2"),
        "all to all": (plan(cp=2, attention="all-to-all"), rotary, "h100:1x2"),
        "pipeline": (plan(dp=2, pp=2, tp=2, microbatches=2), rotary, "a100-80g:2x4"),
        "experts": (plan(ep=2, tp=2), mixed, "h100:1x4"),
        "shards": (plan(dp=16, zero=3), dense, "v100:2x8"),
        "torus": (plan(dp=4, tp=2, precision="bf16"), dense, "tpu-v4:2x2x2"),
    }
    found: dict[str, Any] = {}
    for name, (each, config, cluster) in jobs.items():
        run = md.simulate(each, config, cluster, batch=32, stragglers={1: 1.5})
        found[name] = run.as_json()
    ranking = plan_for(replace(dense, layers=1), "h100:1x2", batch=2)
    found["plans"] = [choice.as_json() for choice in ranking.top(5)]
    return found


def _exact(value: Any) -> Any:
    """Return the value with its floats in hexadecimal."""
    if isinstance(value, float):
        return float(value).hex()
    if isinstance(value, dict):
        return {str(key): _exact(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(each) for each in value]
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
