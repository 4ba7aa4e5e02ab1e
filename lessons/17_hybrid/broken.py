"""Run the experiments of section 9: each makes one mistake and shows its result."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import MismatchError
from minidist.grading import load_module
from minidist.lessons.lab import state_difference
from minidist.lessons.running import Break
from minidist.parallel.step.step import Counted, part_of

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "17")
LONG = 20


def tp_outermost() -> None:
    """Run the same job with its axes in the opposite order, on two machines of four ranks."""
    shape = lab.cube(8)
    for order, what in ((("dp", "pp", "tp"), "expected"), (("tp", "pp", "dp"), "tp outermost")):
        crossed = md.run(partial(lab.crossing, shape=shape, order=order, nodes=(4,)), size=8)[0][0]
        print(
            f"{what}, {' × '.join(order)}: between the machines {size_text(sum(crossed.values()))} a "
            "step, by axis "
            f"{', '.join(f'{axis} {size_text(nbytes)}' for axis, nbytes in crossed.items() if nbytes)}"
        )
    print(
        "equal weights, equal traffic altogether; but all-reduces that every layer waits for "
        "now take the slow links"
    )


def job(
    world: Group, plan: md.Plan, spoil: Any, steps: int = LONG, **options: Any
) -> tuple[list[float], Any]:
    """Return the losses and weights of a Trainer that `spoil` changed; the replicas' MismatchError
    instead of weights if they differ."""
    trainer = md.Trainer(plan, lab.CONFIG, world, **{"lr": 1e-2, "clip": lab.CLIP, **options})
    if spoil is not None:
        spoil(trainer, world)
    losses = [trainer.step(lab.global_batch(step)) for step in range(steps)]
    try:
        trainer.check_replicas()
    except MismatchError as error:
        return losses, str(error)
    weights = trainer.state_dict()
    trainer.close()
    return losses, weights


def compare(plan: md.Plan, spoil: Any, wrong: str, **options: Any) -> None:
    """Print loss and weights of the right and the spoilt job."""
    (right, target), (losses, weights) = (
        md.run(partial(job, **options), plan, each, size=plan.size)[0] for each in (None, spoil)
    )
    print(
        f"loss of step 1 and of step {len(right)}, {wrong}: {losses[0]:.4f}, {losses[-1]:.4f}; "
        f"expected {right[0]:.4f}, {right[-1]:.4f}"
    )
    print(
        f"weights off by {state_difference(weights, target):.1%} of the largest, expected 0.0%"
        if isinstance(weights, dict)
        else f"check_replicas: {weights}"
    )


def average_twice() -> None:
    """Average over the replicas as the notes do, although the loss was divided by all tokens."""

    def spoil(trainer: Any, world: Group) -> None:
        update = trainer.optimizer.step
        trainer.optimizer.step = lambda rate=None, scale=1.0: update(rate, scale / trainer.plan.dp)

    for optimizer, rate in (("sgd", 0.5), ("adamw", 0.01)):
        print(f"{optimizer}:")
        compare(
            lab.plan_of({"dp": 2, "pp": 2, "tp": 1}),
            spoil,
            "averaged twice",
            optimizer=optimizer,
            lr=rate,
            clip=None,
        )


def own_norm() -> None:
    """Clip on each tensor rank by the norm of its own part."""

    def spoil(trainer: Any, world: Group) -> None:
        own = Counted(trainer.strategy.data_axis.parameters)
        trainer.strategy.counted = own

    compare(lab.plan_of({"dp": 1, "pp": 1, "tp": 2}), spoil, "by own norms")


def norm_twice() -> None:
    """Add up every rank's squares: what several ranks hold whole counts several times."""

    def spoil(trainer: Any, world: Group) -> None:
        every = Counted(trainer.strategy.data_axis.parameters, world)
        trainer.strategy.counted = every

    compare(
        lab.plan_of({"dp": 2, "pp": 1, "tp": 2}),
        spoil,
        "counted several times",
        optimizer="sgd",
        lr=0.5,
    )


def rows_by_rank() -> None:
    """Read other rows on each rank of the job: by world ranks, not by dp coordinates."""

    def spoil(trainer: Any, world: Group) -> None:
        trainer.strategy.part_of = partial(part_of, size=world.size, rank=world.rank)

    compare(lab.plan_of({"dp": 1, "pp": 1, "tp": 2}), spoil, "rows by world rank")


def one_tp_group() -> None:
    """Run N2:282: one tensor group for all replicas."""
    lesson = load_module(Path(__file__).resolve().with_name("lesson.py"), "17")

    def step(world: Group, rows: int) -> float:
        mesh = md.Mesh(world, dp=2, tp=2)
        (up,), (down,) = lesson.hand_weights(1)
        own = np.array_split(np.arange(8), 2)[mesh["tp"].rank]
        mine = up[:, own].copy()
        other = down[own].copy()
        inputs, targets = np.random.default_rng(1).normal(size=(2, rows, 6))
        lesson.plain_hybrid(
            mesh["dp"], mesh["pp"], mesh["dp", "tp"], inputs, targets, mine, other, 0.02
        )
        lesson.hand_alone(inputs, targets, [up], [down], 0.02)
        return float(np.abs(mine - up[:, own]).max() / np.abs(up).max())

    print(
        f"12 rows: after one step weights are off by {md.run(step, 12, size=4)[0]:.2%} of the "
        "largest, expected 0, and no error"
    )
    print("11 rows: the replicas have 6 and 5")
    md.run(step, 11, size=4)


BREAKS = {
    "tp-outermost": Break(tp_outermost, says="between the machines 1.14 MiB a step"),
    "average-twice": Break(average_twice, says="weights off by 19.7%"),
    "own-norm": Break(own_norm, says="the weights of ranks [1] differ from rank 0's"),
    "norm-twice": Break(norm_twice, says="weights off by 2.4%"),
    "rows-by-rank": Break(rows_by_rank, says="weights off by 31"),
    "one-tp-group": Break(one_tp_group, says="ranks disagree in shape", error=MismatchError),
}
