"""A checkpoint of any plan goes on under any other: the same bits of state, the same losses to
rounding."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import resumed, same_state, saved
from training import tiny

import minidist as md
from minidist.errors import PlanError
from minidist.nn.config import divisors
from minidist.parallel.pipeline.schedules import ORDERS, UPDATING, stages_a_rank


def any_model(choose: random.Random) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(changes of the tiny GPT, the Trainer's options, precision)."""
    precision = choose.choice(["fp32"] * 6 + ["bf16", "fp16", "fp8"])
    heads = choose.choice([2, 4, 4])
    changes = {
        "layers": choose.randint(2, 4),
        "heads": heads,
        "width": heads * choose.choice([2, 4]),
        "kv_heads": choose.choice([heads, heads, heads // 2]),
        "vocabulary": choose.randint(9, 13),
        "context": choose.randint(4, 8),
        "tied": choose.random() < 0.5,
        "dropout": choose.choice([0.0, 0.2]),
        "positions": choose.choice(["learned", "rotary"]),
        "norm": choose.choice(["layer", "rms"]),
        "activation": choose.choice(["gelu", "silu"]),
        "dtype": "float64" if precision == "fp32" else "float32",
    }
    if precision != "fp8" and choose.random() < 0.25:
        changes["mixture"] = {
            "experts": 4,
            "balance": choose.choice(["bias", "loss"]),
            "noise": choose.choice([0.0, 0.05]),
            "shared": choose.randint(0, 1),
        }
    options: dict[str, Any] = {
        "optimizer": choose.choice(["adamw", "adamw", "adam", "rmsprop", "sgd"]),
        "clip": choose.choice([0.5, None]),
    }
    if precision == "fp16":
        options["loss_scale"] = (2.0**21, 2)  # so large that a step is skipped
    return changes, options, precision


def any_plan(
    choose: random.Random, changes: dict[str, Any], precision: str, most: int
) -> dict[str, Any]:
    """A plan of up to `most` ranks for this model."""
    if precision == "fp32" and "mixture" not in changes and choose.random() < 0.1:
        return choose.choice(
            [
                {"strategy": "parameter-server", "dp": choose.randint(3, most), "servers": 2},
                {"strategy": "data-parallel", "replicas": choose.randint(1, 3)},
            ]
        )
    while True:
        axes = {axis: choose.choice([1, 1, 2, 3, 4]) for axis in ("pp", "cp", "tp")}
        axes["dp"] = choose.choice([1, 2, 3, 4, 5, 7, 8])
        axes["ep"] = choose.choice([1, 2, 4])
        axes["ep"] = axes["ep"] if "mixture" in changes else 1
        plan: dict[str, Any] = {
            **axes,
            "zero": choose.randint(0, 3),
            "precision": precision,
            "bucket_bytes": choose.choice([500, 1 << 20]),
            "accumulate": choose.randint(1, 2),
            "checkpoint_blocks": choose.choice(["none", "all"]),
        }
        plan["schedule"] = choose.choice([name for name in ORDERS if name not in UPDATING])
        plan["keep_gathered"] = plan["zero"] == 3 and choose.random() < 0.3
        plan["sequence_parallel"] = axes["tp"] > 1 and choose.random() < 0.5
        plan["attention"] = choose.choice(["ring", "all-to-all"]) if axes["cp"] > 1 else "ring"
        plan["microbatches"] = choose.randint(1, 3) if axes["pp"] > 1 else None
        if axes["pp"] > 1 and choose.random() < 0.3:
            stages = axes["pp"] * stages_a_rank(plan["schedule"])
            cuts = sorted(choose.choices(range(changes["layers"] + 1), k=stages - 1))
            plan["stage_layers"] = ",".join(
                str(b - a) for a, b in pairwise([0, *cuts, changes["layers"]])
            )
        if plan["zero"] and choose.random() < 0.5:
            plan["shard"] = choose.choice(divisors(axes["dp"] * axes["ep"] * axes["cp"]))
        if choose.random() < 0.2:
            plan["offload"] = choose.choice(["optimizer", "all"])
        try:
            made = md.Plan(**plan)
            made.require_model(tiny(**changes))
        except PlanError:
            continue
        if made.size <= most:
            return plan


def check_pair(number: int, most: int, folder: Path) -> None:
    """Plan 1 saves; plan 2 loads, saves at once, and goes on, as plan 1 does."""
    choose = random.Random(f"pair of plans {number}")
    changes, options, precision = any_model(choose)
    first, second = (any_plan(choose, changes, precision, most) for _ in range(2))
    print(f"pair {number}: {changes} {options}\n{first}\n{second}")
    one = str(folder / f"{number}" / "one")
    two = str(folder / f"{number}" / "two")
    md.run(saved, one, first, changes, options, 2, size=md.Plan(**first).size)
    other = md.run(resumed, one, second, changes, options, 3, two, size=md.Plan(**second).size)
    assert same_state(Path(one), Path(two))
    if precision == "fp32":
        same = md.run(resumed, two, first, changes, options, 3, size=md.Plan(**first).size)
        assert np.max(np.abs(np.subtract(same[0]["losses"], other[0]["losses"]))) < 1e-10
    assert len({rank["digest"] for rank in other}) == 1


@pytest.mark.parametrize(
    ("numbers", "most"),
    [
        ([416], 3),
        *(
            pytest.param(range(first, first + 30), 8, marks=pytest.mark.soak)
            for first in range(0, 300, 30)
        ),
    ],
    ids=str,
)
def test_any_plan_loads_any_plan(numbers: Sequence[int], most: int, tmp_path: Path) -> None:
    for number in numbers:
        check_pair(number, most, tmp_path)
