"""Test what all ZeRO stages must bear: float32, whose rounding shows, and a call of one rank
alone."""

import re
from typing import Any

import pytest
from helpers import run
from training import global_batch, tiny
from zero import check_equal

import minidist as md
from minidist.errors import MismatchError

FLOAT32 = 1e-4
"""After 20 steps of AdamW at a rate of 1e-2, of the model's largest weight: Adam divides each
gradient by its own size, so what is rounding in a small gradient becomes a part of a step."""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("stage", [3, 1, 2])
def test_float32_after_twenty_steps(stage: int) -> None:
    check_equal(stage, 3, {"dtype": "float32"}, steps=20, bound=FLOAT32)


@pytest.mark.parametrize("stage", [3, 1, 2])
def test_a_state_that_one_rank_alone_asks_for_is_a_mismatch(stage: int) -> None:
    """Its gathers look like those of the other rank's next step, and some are of equal length."""

    def ranks(world: Any) -> None:
        trainer = md.Trainer(md.Plan(dp=world.size, zero=stage), tiny(), world)
        trainer.step(global_batch(0, 4, tiny()))
        if world.rank == 0:
            trainer.state_dict()
        trainer.step(global_batch(1, 4, tiny()))

    with pytest.raises(MismatchError) as caught:
        run(ranks, size=2)
    call = r"rank (\d) calls (\w+)\(.*\), its call \d+, at \S*parallel/zero/(\w+)\.py:\d+"
    lines = re.findall(call, str(caught.value))
    others = ("all_gather", "fsdp_units") if stage == 3 else ("reduce_scatter", "shards")
    assert sorted(lines) == [("0", "barrier", "shards"), ("1", *others)]
