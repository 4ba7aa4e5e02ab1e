"""Killed and resumed under the same plan: the same bits as undisturbed, in losses, weights and what
precision keeps."""

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ended, make, same_state, saved, steps
from helpers import LIMIT, becomes_unhurried

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.errors import CheckpointError
from minidist.nn import GPTConfig, Linear, Module
from minidist.optim import AdamW
from minidist.parallel.data.ddp import DDP
from minidist.parallel.memory.offload_disk import OnDisk
from minidist.parallel.state import checkpoint
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.step.single import Single
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

# parts and shards come out uneven
HARD = {"layers": 2, "width": 12, "heads": 3, "tied": True, "dropout": 0.2}
HALF = {"layers": 2, "dtype": "float32", "dropout": 0.1}
MOE = {"mixture": {"experts": 4, "noise": 0.05, "balance": "bias", "bias_rate": 0.01}}

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"dp": 3, "accumulate": 2}, HARD, {}),
    ({"zero": 3, "dp": 2, "precision": "fp16"}, HALF, {"loss_scale": (2.0**19, 2)}),
    ({"tp": 3, "zero": 1, "sequence_parallel": True}, HARD, {}),
    ({"ep": 2, "zero": 2}, {**HARD, **MOE}, {}),
    ({"dp": 2, "zero": 3, "offload": "all"}, {**HARD, "layers": 1}, {"clip": None}),
    ({"pp": 2, "precision": "fp8", "microbatches": 2}, HALF, {}),
    ({"dp": 3, "servers": 2, "strategy": "parameter-server"}, HARD, {}),
    ({"dp": 3, "compress": "4bit:block=16"}, HARD, {}),
    # the soak takes what follows, too
    (
        {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True, "compress": "8bit:book=dynamic"},
        HARD,
        {},
    ),
    ({"dp": 2, "pp": 2, "zero": 1, "compress": "8bit:rounding=stochastic"}, HARD, {}),
    (
        {"dp": 4, "zero": 1, "shard": 2, "compress": "4bit", "precision": "fp16"},
        HALF,
        {"loss_scale": (2.0**19, 2)},
    ),
    ({"dp": 3, "compress": "fp16:feedback=yes", "precision": "bf16"}, HALF, {}),
    ({}, HARD, {"optimizer": "adam", "optimizer_options": {"weight_decay": 0.1}}),
    ({}, {**HARD, "dtype": "float32"}, {"optimizer": "rmsprop"}),
    ({"precision": "fp16"}, HALF, {"loss_scale": (2.0**19, 2)}),
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
    ({"pp": 2, "zero": 3, "precision": "fp16"}, HALF, {"loss_scale": (2.0**19, 2)}),
    ({"pp": 3, "precision": "fp8", "microbatches": 2}, HALF, {}),
    ({"dp": 2, "zero": 2, "offload": "optimizer"}, HARD, {}),
    ({"offload": "optimizer"}, HARD, {"optimizer": "rmsprop"}),
    (
        {"zero": 3, "offload": "all", "precision": "fp16", "accumulate": 2},
        HALF,
        {"loss_scale": (2.0**19, 2)},
    ),
    (
        {"dp": 2, "zero": 2, "offload": "optimizer", "precision": "fp16", "accumulate": 2},
        HALF,
        {"loss_scale": (2.0**19, 2)},
    ),
    ({"cp": 3, "zero": 3}, {**HARD, "context": 7}, {}),
    ({"cp": 3, "attention": "all-to-all", "dp": 2, "zero": 2}, {**HARD, "context": 7}, {}),
    ({"pp": 2, "schedule": "interleaved", "dp": 2, "zero": 2}, HARD, {}),
    ({"pp": 2, "schedule": "zb-h1", "tp": 2, "stage_layers": "0,2"}, HARD, {}),
    ({"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 2, "microbatches": 3}, HARD, {}),
    ({"pp": 2, "schedule": "dualpipe-v", "dp": 2, "zero": 3}, {**HARD, "layers": 4}, {}),
    (
        {"pp": 2, "schedule": "interleaved", "stages_per_rank": 3, "zero": 1},
        {**HARD, "layers": 5},
        {},
    ),
    (
        {"pp": 2, "schedule": "pipedream", "dp": 2, "microbatches": 3},
        {**HARD, "tied": False},
        {"clip": None},
    ),
    ({"ep": 2, "dp": 2, "zero": 1}, {**HARD, **MOE}, {}),
    (
        {"ep": 2, "tp": 2, "cp": 2, "zero": 3, "precision": "fp16"},
        {**HALF, **MOE},
        {"loss_scale": (2.0**19, 2)},
    ),
    (
        {"tp": 4},
        {**HARD, "heads": 4, "kv_heads": 2},
        {"lr_schedule": "cosine", "warmup": 2, "steps": 6},
    ),
    ({"dp": 7, "zero": 2}, HARD, {}),
    ({"tp": 3, "dp": 2, "zero": 1, "sequence_parallel": True}, {**HARD, "layers": 3}, {}),
    ({"pp": 2, "ep": 2, "zero": 2}, {**HARD, **MOE}, {}),
    ({"dp": 3, "zero": 3, "offload": "all"}, {**HARD, "layers": 3}, {"clip": None}),
    ({"pp": 2, "tp": 2, "offload": "optimizer", "microbatches": 2}, HARD, {}),
    (
        {"dp": 2, "tp": 2, "zero": 3, "shard": 1, "offload": "all", "sequence_parallel": True},
        HARD,
        {},
    ),
    (
        {"dp": 2, "pp": 2, "zero": 3, "offload": "all", "precision": "fp16", "microbatches": 2},
        HALF,
        {"loss_scale": (2.0**19, 2)},
    ),
    ({"ep": 2, "dp": 2, "zero": 2, "shard": 2, "offload": "optimizer"}, {**HARD, **MOE}, {}),
    ({"dp": 2, "tp": 2, "precision": "fp8"}, HALF, {}),
    ({"dp": 4, "servers": 2, "strategy": "parameter-server"}, {**HARD, "layers": 3}, {}),
    (
        {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "checkpoint_blocks": "all", "accumulate": 2},
        {**HARD, "norm": "rms"},
        {},
    ),
]


def killed_and_resumed(
    world: Any, folder: str, plan: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(undisturbed, saved on the way, resumed) of four steps; the resumed one begins with other
    weights."""
    undisturbed = make(world, plan, changes, options)
    straight = ended(undisturbed, steps(undisturbed, 4))
    saving = make(world, plan, changes, options)
    losses = steps(saving, 2)
    saving.save(folder)
    passing = ended(saving, losses + steps(saving, 2))
    resuming = make(world, plan, changes, {**options, "seed": 99})
    resuming.load(folder)
    resuming.save(f"{folder}-again")
    again = ended(resuming, losses + steps(resuming, 2))
    return straight, passing, again


def name_of(value: Any) -> str:
    return (
        ",".join(f"{key}={what}" for key, what in value.items()) or "one"
        if isinstance(value, dict)
        else ""
    )


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize(
    ("plan", "changes", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.soak] if number >= 8 else [])
        for number, case in enumerate(CASES)
    ],
    ids=[name_of(plan) + "".join(f" {key}" for key in options) for plan, _, options in CASES],
)
def test_the_same_bits_as_undisturbed(
    plan: dict[str, Any], changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """A save changes nothing either, and what was loaded is saved again with the same bits."""
    ranks = md.run(
        killed_and_resumed,
        str(tmp_path / "step-000002"),
        plan,
        changes,
        options,
        size=md.Plan(**plan).size,
    )
    for straight, passing, resumed in ranks:
        assert straight == passing == resumed
    assert same_state(tmp_path / "step-000002", tmp_path / "step-000002-again")
    if "loss_scale" in options:  # some steps before the save and some after it were skipped
        assert 1 < ranks[0][0]["precision"]["skipped"] < 4, ranks[0][0]["precision"]


# ------------------------------------------------------- strategies that a user makes, and refusals


class Regression(Module):
    """A user's own module: two layers, one of them frozen, and a scale."""

    def __init__(self) -> None:
        self.up = Linear(5, 7, std=0.3, dtype="float64")
        self.down = Linear(7, 1, std=0.3, dtype="float64")
        self.scale = Parameter(np.ones(()))
        self.down.weight.requires_grad = False
        self.assign_names()

    def forward(self, x: Any) -> Any:
        return self.down(ops.gelu(self.up(x))) * self.scale

    def loss(self, inputs: Any, targets: Any, divisor: int) -> Any:
        gap = self(inputs) - targets
        return ops.sum(gap * gap) * (1.0 / divisor)


STRATEGIES: dict[str, Any] = {
    "single": lambda model, world: Single(model),
    "ddp": DDP,
    "zero-1": Zero1,
    "zero-2": Zero2,
    "zero-3": lambda model, world: Zero3(model, world, units=[model.up, model.down]),
    "on disk": lambda model, world: Zero3(model, world, store=OnDisk()),
}


def regression(world: Any, name: str, seed: int) -> tuple[Any, Any]:
    model = Regression()
    model.initialize(seed)
    strategy = STRATEGIES[name](model, world)
    return strategy, AdamW(
        [p for p in strategy.parameters if getattr(p, "requires_grad", True)], 0.1
    )


def fit(strategy: Any, optimizer: Any, first: int, count: int) -> list[float]:
    rows = np.random.default_rng(0).normal(size=(9, 6, 5))
    return [
        strategy.step((x, np.sin(x.sum(axis=1, keepdims=True))), optimizer)
        for x in rows[first : first + count]
    ]


def ended_by_user(strategy: Any, optimizer: Any) -> tuple[list[float], str]:
    losses = fit(strategy, optimizer, 3, 3)
    digest = weights_digest(strategy.state_dict())
    if hasattr(strategy, "store"):
        strategy.store.close()
    return losses, digest


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_the_folder_has_the_mode_of_other_new_folders(mask: int, tmp_path: Path) -> None:
    """It is written in a private folder, and follows the umask as its files do."""
    before = os.umask(mask)
    try:
        md.run(saved, str(tmp_path / "run" / "step-000001"), {}, {"layers": 1}, {}, 1, size=1)
    finally:
        os.umask(before)
    folder = tmp_path / "run" / "step-000001"
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o777 & ~mask}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
    assert [path.name for path in folder.parent.iterdir()] == ["step-000001"]


def user_saves(world: Any, name: str, folder: Path) -> tuple[list[float], str]:
    strategy, optimizer = regression(world, name, 0)
    fit(strategy, optimizer, 0, 3)
    checkpoint.save(folder, strategy, optimizer, world, {"note": [1, "two"]})
    return ended_by_user(strategy, optimizer)


def user_loads(world: Any, name: str, folder: Path) -> tuple[list[float], str]:
    strategy, optimizer = regression(world, name, 1)
    assert checkpoint.load(folder, strategy, optimizer, world)["note"] == [1, "two"]
    return ended_by_user(strategy, optimizer)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "ranks", "second", "others"),
    [
        ("single", 1, "zero-3", 3),
        ("ddp", 3, "zero-1", 2),
        ("zero-1", 3, "zero-2", 4),
        ("zero-2", 2, "ddp", 3),
        ("zero-3", 4, "single", 1),
        ("on disk", 2, "zero-3", 3),
    ],
)
def test_a_users_own_module(
    first: str, ranks: int, second: str, others: int, tmp_path: Path
) -> None:
    """Strategies used directly: the same one has the same bits, another one the same losses."""
    straight = md.run(user_saves, first, tmp_path / "a", size=ranks)
    assert md.run(user_loads, first, tmp_path / "a", size=ranks) == straight
    np.testing.assert_allclose(
        md.run(user_loads, second, tmp_path / "a", size=others)[0][0], straight[0][0], rtol=1e-12
    )


def refusal(
    world: Any,
    call: str,
    folder: str,
    plan: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
) -> str:
    """Return what a rank is told by save or load."""
    trainer = make(world, plan, changes, options)
    try:
        getattr(trainer, call)(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("plan", "changes", "options", "says"),
    [
        ({}, {"layers": 3}, {}, "lacks .* numbers of weight/blocks.2.*another model or optimizer"),
        (
            {"dp": 2},
            {"width": 10},
            {},
            "weight/tokens.weight is float64 \\(11, 8\\), this training has .*same model",
        ),
        ({}, {"layers": 1}, {}, "has m/blocks.1.* that this training has not"),
        ({"dp": 2, "zero": 3}, {"dtype": "float32"}, {}, "is float64 .*this training has float32"),
        (
            {"dp": 2, "zero": 1},
            {},
            {"optimizer": "sgd"},
            "was trained by AdamW, this training uses SGD",
        ),
        ({"tp": 2}, {}, {"optimizer": "adam"}, "was trained by AdamW, this training uses Adam"),
    ],
    ids=["more layers", "wider", "fewer layers", "another dtype", "sgd", "adam"],
)
def test_a_checkpoint_of_another_model_is_refused(
    plan: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
    says: str,
    tmp_path: Path,
) -> None:
    """In one line, the same on every rank."""
    md.run(saved, str(tmp_path / "a"), {"dp": 2, "zero": 1}, {}, {}, 1, size=2)
    told = set(
        md.run(
            refusal, "load", str(tmp_path / "a"), plan, changes, options, size=md.Plan(**plan).size
        )
    )
    assert len(told) == 1 and "\n" not in (text := told.pop()) and re.search(says, text), text


def test_asynchronous_workers_are_refused(tmp_path: Path) -> None:
    """Their ranks are at different steps; no rank waits for another, nothing is written."""
    plan = {"dp": 3, "strategy": "parameter-server", "asynchronous": True}
    for call in ("save", "load"):
        (told,) = set(md.run(refusal, call, str(tmp_path / "a"), plan, {}, {}, size=3))
        assert "synchronous updates" in told and "\n" not in told
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("slow", ["write_shard", "read_state"])
def test_a_rank_whose_disk_is_slow_is_waited_for(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's disk goes on only when rank 0 waits without a limit in effect."""
    usual = getattr(checkpoint, slow)
    waited = list[bool]()
    transports = dict[str, Any]()

    def patient(*args: Any) -> Any:
        if threading.current_thread().name == transports.get("slow"):
            waited.append(becomes_unhurried(transports["other"]))
        return usual(*args)

    def body(world: Group) -> float:
        if world.rank == 0:
            transports["other"] = world.transport
        else:
            transports["slow"] = threading.current_thread().name
        world.barrier()
        config = GPTConfig(vocabulary=5, context=4, layers=1, width=8, heads=1)
        trainer = md.Trainer(md.Plan(dp=2, zero=1), config, world)
        trainer.save(tmp_path / "step-000000")
        trainer.load(tmp_path / "step-000000")
        return float(world.transport.limit)

    monkeypatch.setattr(checkpoint, slow, patient)
    assert md.run(body, size=2, limit=LIMIT) == [LIMIT, LIMIT] and waited == [True]
