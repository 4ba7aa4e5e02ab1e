"""PipeDream in a plan: equal to one process that uses weights as late as its definition says, also
with replicas."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipelines import replay_updates
from plans import sent_by_axis
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.cli.train import metrics
from minidist.errors import MismatchError, PlanError
from minidist.nn import GPT
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid import pipedream_step
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.step import micro_parts, part_of

BOUND = 1e-10
STEPS = 2
CONFIG = {"layers": 4, "heads": 4}


def train(
    world: Any, options: dict[str, Any], sequences: int, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a rank holds and recorded after some steps."""
    config = tiny(**{**CONFIG, **(changes or {})})
    # Adam's step has the same size whatever rounding makes of it
    optimizer = "sgd" if changes else "adamw"
    trainer = Trainer(
        Plan(schedule="pipedream", **options),
        config,
        world,
        optimizer=optimizer,
        lr=1e-2,
        clip=None,
        seed=3,
    )
    strategy: Any = trainer.strategy
    losses = []
    updates = []
    for step in range(STEPS):
        losses.append(trainer.step(global_batch(step, sequences, config)))
        updates.append([list(update) for update in strategy.updates])
    trainer.check_replicas()
    found = {
        "weights": trainer.state_dict(),
        "losses": losses,
        "updates": updates,
        "digest": trainer.weights_sha256(),
        "names": sorted(strategy.model.state_dict()),
        "stage": strategy.mesh["pp"].rank,
        "formula": metrics.gradient_formula(trainer, global_batch(0, sequences, config))["axes"],
        "sent": world.ledger.sent_bytes("step"),
        "own": sum(p.data.nbytes for p in strategy.model.parameters()),
    }
    trainer.close()
    return found


def replay(options: dict[str, Any], ranks: list[dict[str, Any]], sequences: int) -> dict[str, Any]:
    """One process: microbatch b is the rows b of every replica, and each stage is late by the
    stages behind it."""
    config = tiny(**CONFIG)
    plan = Plan(schedule="pipedream", **options)
    stages = [next(rank for rank in ranks if rank["stage"] == stage) for stage in range(plan.pp)]
    steps = []
    for step in range(STEPS):
        batch = global_batch(step, sequences, config)
        parts = [
            micro_parts(part_of(batch, size=plan.dp, rank=rank), plan.pieces)
            for rank in range(plan.dp)
        ]
        steps.append(
            [
                tuple(
                    np.concatenate([getattr(part, ids) for part in row])
                    for ids in ("inputs", "targets")
                )
                for row in zip(*parts, strict=True)
            ]
        )
    return replay_updates(config, stages, steps)


def check(options: dict[str, Any], sequences: int) -> list[dict[str, Any]]:
    """Every rank equals the replay, and all replicas each other."""
    ranks = md.run(train, options, sequences, size=Plan(schedule="pipedream", **options).size)
    again = replay(options, ranks, sequences)
    assert difference(ranks[0]["weights"], again["weights"]) < BOUND
    np.testing.assert_allclose(ranks[-1]["losses"], again["losses"], rtol=1e-11)
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    return ranks


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({"pp": 3, "microbatches": 5}, 7),
        ({"dp": 2, "pp": 2, "microbatches": 3}, 7),
        (
            {"dp": 3, "pp": 2, "microbatches": 2},
            4,
        ),  # replicas without a row of the second microbatch
        ({"dp": 2, "pp": 3, "microbatches": 7, "checkpoint_blocks": "all"}, 9),
        pytest.param({"dp": 2, "pp": 2, "microbatches": 3, "cp": 2}, 7, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_equals_the_replay(options: dict[str, Any], sequences: int) -> None:
    check(options, sequences)


def test_each_stage_is_as_late_as_its_place() -> None:
    for rank in check({"pp": 3, "microbatches": 5}, 5):
        assert rank["updates"][1] == [[b, max(0, b - (2 - rank["stage"]))] for b in range(5)]


def test_bytes_are_the_formula() -> None:
    """Along dp an all-reduce of the stage's gradients for each microbatch that has a row."""
    few = check({"dp": 2, "pp": 2, "microbatches": 3}, 3)
    assert sent_by_axis(few) == few[0]["formula"]
    ranks = check({"dp": 2, "pp": 2, "microbatches": 3}, 7)
    config = tiny(**CONFIG)
    sent = sent_by_axis(ranks)
    assert sent == ranks[0]["formula"]
    assert (
        sent["dp"]
        == STEPS * 3 * 2 * sum(rank["own"] for rank in ranks if rank["stage"] in (0, 1)) // 2
    )
    assert sent["pp"] == STEPS * 2 * 7 * config.context * config.width * 8


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "tp": 2, "microbatches": 3},
        {"pp": 2, "tp": 2, "microbatches": 3, "sequence_parallel": True},
    ],
    ids=str,
)
def test_tensor_parallel_stages_are_as_late(options: dict[str, Any]) -> None:
    """The same training as without tp, whose ranks divide layers and no time."""
    alone = md.run(train, {"pp": 2, "microbatches": 3}, 5, size=2)
    ranks = md.run(train, options, 5, size=4)
    assert difference(ranks[0]["weights"], alone[0]["weights"]) < BOUND
    assert sent_by_axis(ranks) == ranks[0]["formula"]


@pytest.mark.soak  # tests/parallel/pipeline/test_pipeline.py has half precision
def test_low_precision() -> None:
    """bfloat16: nearer to the replay in float64 than a tenth of the way that training went; masters
    are float32."""
    options = {"dp": 2, "pp": 2, "microbatches": 3}
    exact = md.run(train, options, 7, {"dropout": 0.0}, size=4)
    ranks = md.run(train, {**options, "precision": "bf16"}, 7, {"dtype": "float32"}, size=4)
    start = GPT(tiny(**CONFIG))
    start.initialize(3)
    ours = ranks[0]["weights"]
    theirs = exact[0]["weights"]
    first = start.state_dict()
    apart, way = (
        float(np.sqrt(sum(np.sum((a[name] - b[name]) ** 2.0) for name in a)))
        for a, b in ((ours, theirs), (theirs, first))
    )
    assert all(array.dtype == np.float32 for array in ours.values()) and apart < 0.1 * way
    assert len({rank["digest"] for rank in ranks}) == 1


def own_mean(right: Any, self: Any, batch: Any) -> tuple[list[Any], list[int]]:
    """Each replica divides by its own tokens."""
    parts, _ = right(self, batch)
    return parts, [part.targets.size for part in parts]


BUGS = [
    Bug(
        "gradients not summed",
        DDP,
        "finish_step",
        lambda right, self: None,
        raises=MismatchError,
    ),
    Bug("own mean", pipedream_step.HybridPipeDream, "_microbatches", own_mean),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_the_replay(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check, {"dp": 2, "pp": 2, "microbatches": 3}, 8), monkeypatch)


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    """From PipeDream to 1F1B of other ranks and back; the numbers of updates come along."""

    def first(world: Any) -> dict[str, np.ndarray]:
        trainer = Trainer(
            Plan(dp=2, pp=2, schedule="pipedream", microbatches=3), tiny(**CONFIG), world, clip=None
        )
        trainer.step(global_batch(0, 6, tiny(**CONFIG)))
        trainer.save(tmp_path / "saved")
        weights = trainer.state_dict()
        trainer.close()
        return weights

    def second(world: Any, plan: Plan) -> tuple[dict[str, np.ndarray], int]:
        trainer = Trainer(plan, tiny(**CONFIG), world, clip=None)
        trainer.load(tmp_path / "saved")
        weights = trainer.state_dict()
        steps = trainer.optimizer.slots[0].steps
        trainer.close()
        return weights, steps

    saved = md.run(first, size=4)[0]
    for plan in (
        Plan(pp=3),
        Plan(dp=2, zero=3),
        Plan(pp=2, schedule="zb-v"),
        Plan(pp=4, schedule="pipedream"),
    ):
        weights, steps = md.run(lambda world, plan=plan: second(world, plan), size=plan.size)[0]
        assert steps == 3 and all(
            np.array_equal(weights[name], array) for name, array in saved.items()
        )


@pytest.mark.soak  # tests/parallel/hybrid/test_change_plan.py changes plans
def test_to_pipedream_and_back_between_two_steps() -> None:
    """From memory to memory; a trainer that clips cannot."""

    def job(world: Any) -> list[bool]:
        config = tiny(**CONFIG)
        trainer = Trainer(Plan(pp=2, schedule="zb-v"), config, world, clip=None)
        equal = []
        for step, plan in enumerate((Plan(pp=2, schedule="pipedream", microbatches=3), Plan(dp=2))):
            trainer.step(global_batch(step, 6, config))
            before = trainer.state_dict()
            trainer.change_plan(plan)
            equal.append(
                all(
                    np.array_equal(before[name], array)
                    for name, array in trainer.state_dict().items()
                )
            )
        trainer.clip = 1.0
        with pytest.raises(PlanError, match="--clip 0"):
            trainer.change_plan(Plan(pp=2, schedule="pipedream"))
        trainer.close()
        return equal

    assert md.run(job, size=2) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("options", "changes", "clip", "says"),
    [
        ({"dp": 2}, {}, None, "there is|no stage updates before another; use pp=2"),
        ({"pp": 2, "zero": 1}, {}, None, "with zero=1.*use zero=0"),
        ({"pp": 2, "ep": 2}, {}, None, "with ep=2"),
        ({"pp": 2, "precision": "fp16"}, {}, None, "with precision=fp16.*use bf16"),
        ({"pp": 2, "accumulate": 2}, {}, None, "with accumulate=2"),
        ({"dp": 2, "pp": 2, "compress": "8bit"}, {}, None, "with compress=8bit"),
        ({"pp": 2}, {"tied": True}, None, "with a tied output.*tied=False"),
        ({"pp": 2}, {}, 1.0, r"--clip 0\)"),
    ],
)
def test_what_does_not_go_together(
    options: dict[str, Any], changes: dict[str, Any], clip: float | None, says: str
) -> None:
    def job(world: Any) -> None:
        Trainer(
            Plan(schedule="pipedream", **options), tiny(**{**CONFIG, **changes}), world, clip=clip
        )

    with pytest.raises(PlanError, match=says) as caught:
        md.run(job, size=2)
    assert "\n" not in str(caught.value).split(": ", 1)[1].strip()
