"""A short job of every strategy, for ranks on any transport; without pytest, which each rank of
mpirun would import."""

import hashlib
from collections.abc import Callable
from typing import Any

import experts
import plans
import split
from training import train_tiny

from minidist.device import account

JOBS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = {
    "DDP, three passes": (train_tiny, ({}, {"accumulate": 3, "steps": 2})),
    "ZeRO-3": (train_tiny, ({}, {"zero": 3, "steps": 2})),
    "ZeRO-2 in bf16": (
        train_tiny,
        ({"dtype": "float32"}, {"zero": 2, "precision": "bf16", "steps": 2}),
    ),
    "tensor": (split.tensor, (split.GROUPED, {"steps": 1})),
    "sequence": (split.sequence, (split.GROUPED, {"steps": 1})),
    "context, a ring": (split.context, (split.GROUPED, {"steps": 1})),
    "context, all-to-all": (split.swapped, (split.GROUPED, {"steps": 1})),
    "experts": (experts.in_processes, ({}, {}, {"steps": 1})),
    "context × tensor": (
        plans.train,
        (
            plans.MOST,
            {"plan": {"cp": 2, "tp": 2, "sequence_parallel": True, "zero": 2}, "steps": 1},
        ),
    ),
    "pipeline × tensor": (
        plans.train,
        (plans.MOST, {"plan": {"pp": 2, "tp": 2, "microbatches": 2}, "steps": 1}),
    ),
    "data (ZeRO-1) × pipeline": (
        plans.train,
        (
            {**plans.MOST, "layers": 4},
            {"plan": {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved"}, "steps": 1},
        ),
    ),
}


def every_job(world: Any, names: list[str]) -> dict[str, str]:
    """A digest of losses and weights, job by job."""
    found = {}
    for name in names:
        train, options = JOBS[name]
        with account.use(account.MemoryAccount()):
            world.ledger.clear()
            rank = train(world, *options)
        weights = [array.tobytes() for _, array in sorted(rank["weights"].items())]
        found[name] = hashlib.sha256(
            b"".join([repr(rank["losses"]).encode(), *weights])
        ).hexdigest()
    return found
