"""DiLoCo beside DDP at equal tokens, trained to the end: some minutes a training."""

from typing import Any

import pytest

import minidist as md
from minidist.bench.compress.command import FULL
from minidist.bench.step.ranks import Model
from minidist.data import text
from minidist.launch.membership import limit_blas_threads
from minidist.parallel.hybrid.hybrid import Trainer

RANKS, EVERY, PARTS = 4, 25, 4
STEPS, LR = 3000, 2e-3
LIMIT = 3600        # seconds of a training


def losses(model: Model, steps: int, lr: float, **plan: Any) -> dict[int, list[float]]:
    """Train on four threads. Returns: after some steps the losses of each quarter of the whole validation text."""
    source = text.load("python")
    inputs, targets = text.windows(source.validation, context=model.context)
    size = len(inputs) // PARTS // RANKS * RANKS
    quarters = [(inputs[at:at + size], targets[at:at + size]) for at in range(0, PARTS * size, size)]

    def job(world: Any) -> dict[int, list[float]]:
        trainer = Trainer(md.Plan(dp=RANKS, **plan), model.config(), world, seed=0, lr=lr, lr_schedule="cosine",
                          warmup=steps // 20, steps=steps)
        found = {}
        for step in range(steps):
            trainer.step(text.batch(source.train, step, batch=RANKS * model.batch, context=model.context, seed=0))
            if (step + 1) % (steps // 4) == 0:
                found[step + 1] = [trainer.evaluate([quarter]) for quarter in quarters]
                if world.rank == 0:
                    print(step + 1, plan, *(f"{loss:.4f}" for loss in found[step + 1]), flush=True)
        trainer.close()
        return found

    limit_blas_threads(1, local_size=1)
    result: dict[int, list[float]] = md.run(job, size=RANKS, limit=LIMIT)[0]
    return result


@pytest.mark.soak
@pytest.mark.timeout(2 * LIMIT)
def test_diloco_ends_near_ddp() -> None:
    """H = 25, as published (outer rate 0.7, Nesterov 0.9), 64 tokens a rank and step; `-s` prints the losses."""
    plain = losses(FULL, STEPS, LR)[STEPS]
    seldom = losses(FULL, STEPS, LR, local_steps=EVERY, outer="nesterov")[STEPS]
    gaps = [ours / theirs - 1 for ours, theirs in zip(seldom, plain, strict=True)]
    print("above DDP, by quarter of the text:", *(f"{gap:+.2%}" for gap in gaps))
    assert sum(seldom) / sum(plain) - 1 <= 0.015
