"""The least memory of training: never more than it takes, and not far below."""

from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.device import account
from minidist.nn import GPT, GPTConfig, MixtureConfig
from minidist.observe.room import BLOCK_BYTES, TOKEN_BYTES, training_bytes

CONFIGS = [
    GPTConfig(vocabulary=300, context=16, layers=2, width=32, heads=4),
    GPTConfig(
        vocabulary=50,
        context=16,
        layers=3,
        width=32,
        heads=4,
        kv_heads=2,
        positions="rotary",
        tied=True,
        activation="silu",
        norm="rms",
        dtype="float64",
    ),
    GPTConfig(
        vocabulary=300,
        context=16,
        layers=2,
        width=32,
        heads=4,
        mixture=MixtureConfig(experts=4, shared=1, hidden=40),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_numbers_of_a_model(config: GPTConfig) -> None:
    count = sum(parameter.size for parameter in GPT(config).parameters())
    assert 0.9 * count < config.numbers < count


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "plan"),
    [
        *(
            (CONFIGS[0], plan)
            for plan in (
                "dp=2 accumulate=2",
                "dp=2 zero=3 precision=bf16",
                "pp=2",
                "cp=2",
                "dp=2 strategy=parameter-server",
                "strategy=data-parallel replicas=2",
                "zero=3 offload=all",
            )
        ),
        (CONFIGS[1], "tp=2"),
        (CONFIGS[2], "dp=2 zero=1"),
    ],
)
def test_no_training_takes_less(config: GPTConfig, plan: str) -> None:
    axes = {}
    options = {}
    for pair in plan.split():
        name, value = pair.split("=")
        (axes if name in ("dp", "pp", "tp", "cp") else options)[name] = (
            int(value) if value.isdigit() else value
        )
    chosen = md.Plan(**axes, **options)

    def peak(world: Any) -> int:
        with account.use(account.MemoryAccount()) as memory:
            trainer = md.Trainer(chosen, config, world)
            ids = np.zeros((8, 16), np.int32)
            trainer.step((ids, ids))
            trainer.state_dict()
            trainer.close()
            return memory.peak["total"]

    taken = sum(md.run(peak, size=chosen.size))
    least = training_bytes(config, chosen, 8)
    objects = config.layers * BLOCK_BYTES + chosen.size * 8 * 16 * TOKEN_BYTES
    assert least - objects <= taken, (least, taken)
    if chosen.offload == "none":
        assert taken < 6 * least
