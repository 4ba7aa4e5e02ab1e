"""Killed and resumed under the same plan: the same bits as undisturbed, in losses, weights and what precision keeps."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import ended, make, same_state, steps

import minidist as md

HARD = {"layers": 3, "width": 12, "heads": 3, "tied": True, "dropout": 0.2}       # parts and shards come out uneven
HALF = {"dtype": "float32", "dropout": 0.1}
MOE = {"mixture": {"experts": 4, "noise": 0.05, "balance": "bias", "bias_rate": 0.01}}

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"dp": 3, "accumulate": 2}, HARD, {}),
    ({"dp": 2, "zero": 3, "precision": "fp16"}, HALF, {"loss_scale": (2.0 ** 22, 2)}),
    ({"tp": 3, "dp": 2, "zero": 1, "sequence_parallel": True}, HARD, {}),
    ({"pp": 2, "ep": 2, "zero": 2}, {**HARD, **MOE}, {}),
    ({"dp": 3, "zero": 3, "offload": "all"}, HARD, {"clip": None}),
    ({"dp": 2, "tp": 2, "precision": "fp8"}, HALF, {}),
    ({"dp": 4, "servers": 2, "strategy": "parameter-server"}, HARD, {}),
    # the soak takes what follows, too
    ({}, HARD, {"optimizer": "adam", "optimizer_options": {"weight_decay": 0.1}}),
    ({}, {**HARD, "dtype": "float32"}, {"optimizer": "rmsprop"}),
    ({"precision": "fp16"}, HALF, {"loss_scale": (2.0 ** 22, 2)}),
    ({"replicas": 3, "strategy": "data-parallel"}, HARD, {}),
    ({"dp": 3, "strategy": "parameter-server"}, {**HARD, "dtype": "float32"}, {"optimizer": "sgd"}),
    ({"dp": 3}, HARD, {"optimizer": "sgd", "clip": None}),
    ({"dp": 3, "zero": 1}, HARD, {"optimizer": "rmsprop"}),
    ({"dp": 3, "zero": 2, "accumulate": 3}, {**HARD, "dtype": "float32"}, {"optimizer": "adam"}),
    ({"dp": 4, "zero": 2, "shard": 2}, HARD, {}),
    ({"dp": 6, "zero": 3, "shard": 3, "keep_gathered": True}, HARD, {}),
    ({"dp": 2, "zero": 3, "precision": "bf16"}, HALF, {}),
    ({"dp": 3, "zero": 1, "precision": "bf16"}, HALF, {"optimizer": "sgd"}),
    ({"dp": 3, "precision": "fp8"}, HALF, {}),
    ({"pp": 2, "zero": 3, "precision": "fp16"}, HALF, {"loss_scale": (2.0 ** 22, 2)}),
    ({"pp": 3, "precision": "fp8", "microbatches": 2}, HALF, {}),
    ({"dp": 2, "zero": 2, "offload": "optimizer"}, HARD, {}),
    ({"offload": "optimizer"}, HARD, {"optimizer": "rmsprop"}),
    ({"zero": 3, "offload": "all", "precision": "fp16", "accumulate": 2}, HALF, {"loss_scale": (2.0 ** 22, 2)}),
    ({"dp": 2, "zero": 2, "offload": "optimizer", "precision": "fp16", "accumulate": 2}, HALF,
     {"loss_scale": (2.0 ** 22, 2)}),
    ({"cp": 3, "zero": 3}, {**HARD, "context": 7}, {}),
    ({"cp": 3, "attention": "all-to-all", "dp": 2, "zero": 2}, {**HARD, "context": 7}, {}),
    ({"pp": 2, "schedule": "interleaved", "dp": 2, "zero": 2}, HARD, {}),
    ({"pp": 2, "schedule": "zb-h1", "tp": 2, "stage_layers": "1,2"}, HARD, {}),
    ({"ep": 2, "dp": 2, "zero": 1}, {**HARD, **MOE}, {}),
    ({"ep": 2, "tp": 2, "cp": 2, "zero": 3, "precision": "fp16"},
     {**HALF, **MOE}, {"loss_scale": (2.0 ** 22, 2)}),
    ({"tp": 4}, {**HARD, "heads": 4, "kv_heads": 2}, {"lr_schedule": "cosine", "warmup": 2, "steps": 6}),
    ({"dp": 7, "zero": 2}, HARD, {}),
    ({"dp": 2, "pp": 2, "tp": 2, "zero": 1, "checkpoint_blocks": "all", "accumulate": 2}, {**HARD, "norm": "rms"}, {}),
]


def killed_and_resumed(world: Any, folder: str, plan: dict[str, Any], changes: dict[str, Any],
                       options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(undisturbed, saved on the way, resumed) of six steps; the resumed one begins with other weights."""
    undisturbed = make(world, plan, changes, options)
    straight = ended(undisturbed, steps(undisturbed, 6))
    saving = make(world, plan, changes, options)
    losses = steps(saving, 3)
    saving.save(folder)
    passing = ended(saving, losses + steps(saving, 3))
    resuming = make(world, plan, changes, {**options, "seed": 99})
    resuming.load(folder)
    resuming.save(f"{folder}-again")
    again = ended(resuming, losses + steps(resuming, 3))
    return straight, passing, again


def name_of(value: Any) -> str:
    return ",".join(f"{key}={what}" for key, what in value.items()) or "one" if isinstance(value, dict) else ""


@pytest.mark.parametrize(("plan", "changes", "options"), [
    pytest.param(*case, marks=[pytest.mark.soak] if number >= 7 else []) for number, case in enumerate(CASES)],
    ids=[name_of(plan) + "".join(f" {key}" for key in options) for plan, _, options in CASES])
def test_the_same_bits_as_undisturbed(plan: dict[str, Any], changes: dict[str, Any], options: dict[str, Any],
                                      tmp_path: Path) -> None:
    """A save changes nothing either, and what was loaded is saved again with the same bits."""
    ranks = md.run(killed_and_resumed, str(tmp_path / "step-000003"), plan, changes, options,
                   size=md.Plan(**plan).size)
    for straight, passing, resumed in ranks:
        assert straight == passing == resumed
    assert same_state(tmp_path / "step-000003", tmp_path / "step-000003-again")
    if "loss_scale" in options:                 # some steps before the save and some after it were skipped
        assert 2 < ranks[0][0]["precision"]["skipped"] < 6
