"""Every strategy with the jobs in which it must equal one process (tests/parallel/test_parity.py).

Ranks may be processes of a new mpirun: they import this module, which does not import pytest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import experts
import numpy as np
import plans
import split
import zero
from pipelines import STAGED, train_stages
from training import difference, train_tiny

import minidist as md
from minidist.device import account

BOUND = 1e-10


@dataclass(frozen=True)
class Job:
    """What ranks train, and what one process trains instead.

    Args:    train: train(world, *arguments) returns a rank's whole weights and its losses, and
             further numbers that are compared if it returns them (COMPARED).
             arguments: of the ranks.
             alone: of one process; None: the same.
    """

    train: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    alone: tuple[Any, ...] | None = None


COMPARED = ("weights", "losses", "loads")
Jobs = tuple[Job, ...]
"""The jobs that one start of ranks trains, one after the other."""

# --------------------------------------------------------------------------------- kinds of jobs


def data(zero: int, changes: dict[str, Any], *, accumulate: int = 1, **options: Any) -> Job:
    """Return a job of a Trainer with a data axis only; one process takes one pass per step."""
    plan = {"zero": zero, "accumulate": accumulate}
    return Job(train_tiny, (changes, {**options, **plan}), alone=(changes, options))


def zero_stage(
    stage: int,
    changes: dict[str, Any],
    *,
    step: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> Job:
    """Return a job of a ZeRO stage's class. step, strategy: options of its step and of the class."""
    ranks = {**options, **(strategy or {}), "step_options": step}
    return Job(zero.train_as_told, (stage, changes, ranks), alone=(0, changes, options))


def divided(train: Any, *changes: dict[str, Any], **options: Any) -> Jobs:
    """Return jobs of ranks that divide the model, one job for each of `changes`."""
    return tuple(Job(train, (change, options)) for change in changes)


def staged(name: str, changes: dict[str, Any], **options: Any) -> Job:
    """Return a job of the schedule `name`, or of "model parallel"."""
    return Job(stages_as_told, (name, changes, options), alone=("single", changes, options))


def stages_as_told(
    world: Any, name: str, changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return what `train_stages` returns; these arguments can travel to ranks of a new mpirun."""
    return train_stages(world, name, changes, **options)


def planned(changes: dict[str, Any], plan: dict[str, Any], **options: Any) -> Job:
    """Return a job of any plan; one process has the plan of one rank."""
    return Job(plans.train, (changes, {**options, "plan": plan}), alone=(changes, options))


def text_of(plan: dict[str, Any]) -> str:
    """Return the name of a plan's job: its fields and their values."""
    return ",".join(f"{key}={value}" for key, value in plan.items())


# --------------------------------------------------------------------------------------- the jobs

LONG_GPT = {"context": 16, "width": 16, "layers": 3}
TWENTY = {"steps": 20, "sequences": 9}
MODEL_PARALLEL = {**STAGED, "layers": 5}
UNEVEN = {**plans.MOST, "heads": 3, "width": 12, "vocabulary": 13}
PLANS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "zero": 3},
    {"dp": 3, "tp": 2, "zero": 2, "accumulate": 2},
    {"pp": 3, "tp": 2},
    {
        "dp": 2,
        "pp": 2,
        "tp": 2,
        "zero": 1,
        "schedule": "zb-h1",
        "microbatches": 3,
        "checkpoint_blocks": "0,2",
    },
    {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"},
    {"dp": 4, "pp": 2, "zero": 2, "shard": 2, "schedule": "interleaved", "accumulate": 2},
    {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-v", "microbatches": 3},
    {"dp": 2, "pp": 2, "zero": 3, "schedule": "dualpipe-v", "microbatches": 5},
    {"pp": 2, "schedule": "interleaved", "stages_per_rank": 1},
    {"dp": 2, "cp": 2, "zero": 2, "checkpoint_blocks": "all"},
    {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "zero": 1},
    {"cp": 2, "tp": 2, "attention": "all-to-all", "checkpoint_blocks": "scores"},
]
PIPELINE_TENSOR: dict[str, Any] = {"pp": 2, "tp": 2, "microbatches": 2}
CONTEXT_SEQUENCE: dict[str, Any] = {"cp": 2, "tp": 2, "sequence_parallel": True, "zero": 2}
THREE_REPLICAS: dict[str, Any] = {"dp": 3, "pp": 2, "zero": 1}
UNEVEN_PLANS: list[dict[str, Any]] = [{"dp": 3, "tp": 2, "zero": stage} for stage in (0, 1)]
"""Three data ranks, whose sums depend on their order; heads that do not divide."""
EIGHT_RANKS: dict[str, Any] = {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "microbatches": 4}
EIGHT_RANKS_OF_EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "tp": 2, "zero": 1}

SHORT: dict[str, Jobs] = {
    "DDP": (data(0, {}),),
    "DDP, 3 passes": (data(0, {"dropout": 0.2}, accumulate=3),),
    "DDP, 2 passes": (data(0, {"dropout": 0.2}, accumulate=2),),
    "ZeRO-1": (zero_stage(1, {}),),
    "ZeRO-1, 4 passes": (data(1, {"dropout": 0.2}, accumulate=4),),
    "ZeRO-2": (zero_stage(2, {}),),
    "ZeRO-2, 2 passes": (data(2, {"dropout": 0.2}, accumulate=2),),
    "ZeRO-3": (zero_stage(3, {}),),
    "ZeRO-3, 3 passes": (data(3, {"dropout": 0.2}, accumulate=3),),
    "tensor": divided(split.tensor, {}),
    "tensor, key heads shared": divided(split.tensor, split.GROUPED),
    "sequence, key heads shared": divided(split.sequence, split.GROUPED),
    "ring, key heads shared": divided(split.context, split.GROUPED),
    "experts": (Job(experts.in_processes, ({}, {}, {"steps": 2})),),
    "interleaved": (staged("interleaved", STAGED),),
    "model parallel": (staged("model parallel", MODEL_PARALLEL),),
    **{
        text_of(plan): (planned(plans.MOST, plan),)
        for plan in (*PLANS, PIPELINE_TENSOR, CONTEXT_SEQUENCE, THREE_REPLICAS)
    },
    **{f"{text_of(plan)}, uneven": (planned(UNEVEN, plan),) for plan in UNEVEN_PLANS},
}
"""Jobs of two steps."""

ALL_OPTIONS: dict[str, Any] = {
    "steps": 20,
    "sequences": 7,
    "clip": 0.1,
    "frozen": ("positions.weight", "blocks.1.mlp.up.bias"),
}
LONG: dict[str, Jobs] = {
    "DDP": (data(0, LONG_GPT, **TWENTY),),
    **{f"ZeRO-{stage}": (zero_stage(stage, LONG_GPT, **TWENTY),) for stage in (1, 2, 3)},
    "DDP and ZeRO, 3 passes": tuple(
        data(stage, LONG_GPT, accumulate=3, steps=20, sequences=11) for stage in range(4)
    ),
    **{
        f"ZeRO-{stage}, copies": (zero_stage(stage, LONG_GPT, strategy={"shard": 2}, **TWENTY),)
        for stage in (1, 2, 3)
    },
    # a tied weight, frozen ones, uneven parts and shards, clipping, accumulation, copies
    **{
        f"ZeRO-{stage}, all options": (
            zero_stage(
                stage,
                {"tied": True, "width": 12},
                step={"accumulate": 3},
                strategy={"shard": 2},
                **ALL_OPTIONS,
            ),
        )
        for stage in (1, 2, 3)
    },
    **{
        f"ZeRO-3, units {kept}": (
            zero_stage(
                3,
                {"tied": True},
                step={"accumulate": 2},
                strategy={"free_after_forward": kept == "freed", "ahead": 2},
                **ALL_OPTIONS,
            ),
        )
        for kept in ("freed", "kept")
    },
    "tensor": divided(split.tensor, {"context": 16}, split.GROUPED, steps=20),
    "sequence": divided(split.sequence, {"context": 16}, split.GROUPED, steps=20),
    "ring": divided(split.context, {"context": 17}, split.GROUPED, steps=20),
    "all-to-all": divided(split.swapped, {"context": 17}, split.GROUPED, steps=20),
    "experts": tuple(
        Job(experts.in_processes, (moe, {"context": 16}, {"steps": 20}))
        for moe in experts.KINDS.values()
    ),
    **{
        name: (staged(name, {**STAGED, "width": 16, "layers": 8}, **TWENTY),)
        for name in plans.SCHEDULES
    },
    "model parallel": (staged("model parallel", MODEL_PARALLEL, steps=20),),
    text_of(EIGHT_RANKS): (planned(plans.MOST, EIGHT_RANKS, steps=20),),
    text_of(EIGHT_RANKS_OF_EXPERTS): (
        planned(
            {**plans.MOST, "layers": 2, "mixture": plans.BIAS}, EIGHT_RANKS_OF_EXPERTS, steps=20
        ),
    ),
}
"""Jobs of twenty steps."""

# ----------------------------------------------------------------------------------------- the check


def train(world: Any, strategy: str, long: bool, alone: bool) -> list[dict[str, Any]]:
    """Return what a rank holds after each job of a strategy, or one process after its jobs."""
    found = []
    for job in (LONG if long else SHORT)[strategy]:
        arguments = job.alone if alone and job.alone is not None else job.arguments
        with account.use(account.MemoryAccount()):
            world.ledger.clear()
            rank = job.train(world, *arguments)
        found.append({name: rank[name] for name in COMPARED if name in rank})
    return found


@cache
def one_process(strategy: str, long: bool) -> list[dict[str, Any]]:
    """Return what one process holds after each job."""
    return md.run(train, strategy, long, True, size=1)[0]


@cache
def over_threads(strategy: str, size: int, long: bool) -> list[dict[str, Any]]:
    """Return what rank 0 holds after each job, where ranks are threads."""
    return md.run(train, strategy, long, False, size=size)[0]


def check_parity(strategy: str, size: int, transport: str, *, long: bool = False) -> None:
    """Ranks equal one process within BOUND, and to the bit each other and another run, which is
    over threads."""
    ranks = md.run(train, strategy, long, False, size=size, transport=transport)
    another = over_threads(strategy, size, long)
    for alone, *of_ranks in zip(one_process(strategy, long), another, *ranks, strict=True):
        for rank in of_ranks:
            assert split.same_bits(rank, of_ranks[0])
            assert rank["losses"] == of_ranks[0]["losses"]
            np.testing.assert_array_equal(rank.get("loads"), alone.get("loads"))
        assert difference(of_ranks[0]["weights"], alone["weights"]) < BOUND
        np.testing.assert_allclose(of_ranks[0]["losses"], alone["losses"], rtol=1e-12)
