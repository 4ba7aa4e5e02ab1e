"""Mixed precision: float32 masters, low-precision weights, a loss scale; the same on every rank, in every stage."""

from typing import Any

import numpy as np
import pytest
from training import SMALL_BUCKETS, difference, global_batch, tiny

import minidist as md
from minidist.backend import dtype
from minidist.errors import ConfigError, PlanError
from minidist.parallel.hybrid import Plan, Trainer
from minidist.parallel.mixed_precision import DTYPES

CONFIG = tiny(dtype="float32", layers=1)


def job(world: Any, *, precision: str, zero: int = 0, steps: int = 3, optimizer: str = "adamw",
        **options: Any) -> dict[str, Any]:
    """What a rank holds after `steps` steps."""
    trainer = Trainer(Plan(dp=world.size, zero=zero, precision=precision, bucket_bytes=SMALL_BUCKETS), CONFIG, world,
                      seed=3, lr=1e-2, clip=0.5, optimizer=optimizer, **options)
    losses = [trainer.step(global_batch(step, 5, CONFIG)) for step in range(steps)]
    result = {"losses": losses, "masters": trainer.state_dict(), "digest": trainer.weights_sha256(),
              "validation": trainer.evaluate([global_batch(9, 4, CONFIG)]), "memory": trainer.account.snapshot(),
              "dtypes": {p.dtype for p in trainer.model.parameters()}, "skipped": trainer.precision.skipped}
    trainer.close()
    return result


# --------------------------------------------------------------------------------------------- parallel equals serial

BOUNDS = {"bf16": 0.05, "fp16": 0.01}
"""Gradients are rounded to 8 or 11 bits, and in another order on several ranks; Adam divides a gradient by its size, so
one that is mostly rounding moves a weight by up to the rate, 0.01 a step beside weights of about 1."""


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_equal_each_other_and_nearly_one_process(precision: str, zero: int) -> None:
    serial = md.run(lambda world: job(world, precision=precision), size=1)[0]
    ranks = md.run(lambda world: job(world, precision=precision, zero=zero), size=3)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert len({(*rank["losses"], rank["validation"]) for rank in ranks}) == 1
    assert difference(ranks[0]["masters"], serial["masters"]) < BOUNDS[precision]
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-3)
    assert ranks[0]["dtypes"] == {dtype(DTYPES[precision])}
    assert {array.dtype for array in ranks[0]["masters"].values()} == {np.dtype("float32")}
    assert ranks[0]["skipped"] == 0


# ----------------------------------------------------------------------------------------------------------- mistakes

def test_refuses() -> None:
    with pytest.raises(PlanError, match="precision='fp12': choose one of fp32, bf16, fp16"):
        Plan(precision="fp12")
    with pytest.raises(ConfigError, match="the model asks for float64; choose dtype float32, or precision fp32"):
        md.run(lambda world: Trainer(Plan(precision="bf16"), tiny(), world), size=1)
