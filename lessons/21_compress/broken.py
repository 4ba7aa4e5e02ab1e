"""Run the experiments of section 8: each makes one mistake and shows its result."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons.running import LIMIT, Break

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "21")
RANKS = 2


def on_threads(job: Any, *arguments: Any) -> Any:
    """Run a job on threads; return what rank 0 returns."""
    with threadpool_limits(1, user_api="blas"):
        return run(job, *arguments, size=RANKS, transport="threads", limit=LIMIT)[0]


def no_feedback() -> None:
    """Forget what top-k leaves out: small numbers that always have the same sign are never sent."""

    def job(group: Group) -> dict[str, dict[str, float]]:
        texts = ("top-k:density=0.001", "top-k:density=0.001,feedback=no")
        found: dict[str, dict[str, float]] = lab.kept(group, 25, texts)
        return found

    print("Expected: all that has not arrived is kept, in the residuals (0, but for rounding)")
    for name, found in on_threads(job).items():
        print(
            f"{name:32} of the sum of 25 gradients {100 * found['sum']:.1f} % has arrived; "
            f"neither applied nor kept: {found['lost']:.1e} of the largest"
        )


def no_masking() -> None:
    """Keep the momentum where a number was sent: momentum correction then sends the old direction
    again and again."""
    print("Expected: the loss falls")
    for name, options in (("masked", ""), ("not masked", ",masking=no")):
        way = {"compress": f"top-k:density=0.01,momentum=0.9{options}"}
        losses = on_threads(train_by_sgd, way)
        print(
            f"{name:10} loss of step 1 {losses[0]:.2f}, of step 30 {losses[-1]:.2f}, highest "
            f"{max(losses):.2f}"
        )


def train_by_sgd(group: Group, way: dict[str, Any]) -> list[float]:
    """Return the losses of 30 steps of SGD, without momentum in the optimizer."""
    with np.errstate(all="ignore"):
        losses: list[float] = lab.train(group, way, 30, optimizer="sgd", lr=0.7, clip=None)[
            "losses"
        ]
    return losses


def lost_residual() -> None:
    """Save a run and continue it, with its residuals and without."""
    print("Expected: the weights of a run without a restart, difference 0")
    for name, gap in gaps_after_restart("top-k:density=0.01").items():
        print(f"residuals {name:9} weights beside those of a run without a restart: {gap:.1e}")


def gaps_after_restart(scheme: str) -> dict[str, float]:
    """Return the largest difference between weights after 4 steps, a restart, and 4 more, and those
    of 8 steps without a restart."""
    whole = on_threads(go_on, scheme, None, None, 8, False)
    with TemporaryDirectory() as folder:
        on_threads(go_on, scheme, None, folder, 4, False)
        ends = {
            name: on_threads(go_on, scheme, folder, None, 4, name == "lost")
            for name in ("restored", "lost")
        }
    return {
        name: max(float(np.abs(weights[key] - whole[key]).max()) for key in whole)
        for name, weights in ends.items()
    }


def go_on(
    group: Group, scheme: str, start: str | None, end: str | None, steps: int, forget: bool
) -> dict[str, np.ndarray]:
    """Train from a saved state, or from the beginning; save at the end. forget: what was not
    sent."""
    trainer = lab.trainer_of(group, {"compress": scheme})
    if start:
        trainer.load(Path(start) / "saved")
    if forget:
        for error in trainer.strategy.data_axis.scheme.errors.values():
            error[...] = 0
    for _ in range(steps):
        trainer.step(lab.global_batch(trainer.steps_done))
    if end:
        trainer.save(Path(end) / "saved")
    weights: dict[str, np.ndarray] = trainer.state_dict()
    trainer.close()
    return weights


BREAKS = {
    "no-feedback": Break(no_feedback, says="of the sum of 25 gradients 76"),
    "no-masking": Break(no_masking, says="not masked loss of step 1 4.64, of step 30 3"),
    "lost-residual": Break(
        lost_residual,
        says="residuals lost      weights beside those of a run without a restart: 9",
    ),
}
