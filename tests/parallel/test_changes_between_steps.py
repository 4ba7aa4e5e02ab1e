"""What a user changes between two steps counts from the next step on, on every plan, as in a plain
loop."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run
from training import difference, global_batch, tiny

from minidist.autograd.tensor import Parameter
from minidist.errors import ConfigError, PeerLostError
from minidist.nn import GPT, Dropout, DropoutKey, GPTConfig
from minidist.optim import LearningRate, clip_scale, global_norm
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid.hybrid import OPTIMIZERS, Plan, Trainer
from minidist.parallel.step.single import Single

PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {"dp": 2},
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-2, two passes": {"dp": 2, "zero": 2, "accumulate": 2},
    "ZeRO-3": {"dp": 3, "zero": 3},
    "ZeRO-3, recomputed": {"dp": 2, "zero": 3, "checkpoint_blocks": "all"},
    "parameter server": {"dp": 3, "strategy": "parameter-server"},
    "replicas in one process": {"strategy": "data-parallel", "replicas": 2},
    "optimizer on the host": {"dp": 2, "zero": 2, "offload": "optimizer"},
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "context": {"cp": 2},
    "pipeline": {"pp": 2, "microbatches": 2},
    "zero bubble": {"pp": 2, "schedule": "zb-h1", "microbatches": 2},
    "pipeline × ZeRO-3": {"dp": 2, "pp": 2, "zero": 3},
    "on disk": {"dp": 2, "zero": 3, "offload": "all"},
}
Change = Callable[[GPT, Any, Any], None]
"""`change(model, optimizer, trainer)`; of the plain loop the last has `lr` and `clip`, as a
Trainer."""


def freeze(*names: str) -> Change:
    """The weights with one of these words in their names learn no more; all others do."""

    def change(model: GPT, optimizer: Any, trainer: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not any(each in name for each in names)

    return change


def options(**values: Any) -> Change:
    """Options of the optimizer."""

    def change(model: GPT, optimizer: Any, trainer: Any) -> None:
        for name, value in values.items():
            setattr(optimizer, name, value)

    return change


def of_trainer(**values: Any) -> Change:
    """Attributes of the trainer."""

    def change(model: GPT, optimizer: Any, trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer, name, value)

    return change


def one_block_to_eval(model: GPT, optimizer: Any, trainer: Any) -> None:
    """Dropout off in block 1, which one stage of a pipeline has."""
    for module in model.modules():
        if module.path.startswith("blocks.1"):
            module.training = False


def other_dropout(model: GPT, optimizer: Any, trainer: Any) -> None:
    """Another rate of dropout, everywhere."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = 0.1


def new_norms(model: GPT, optimizer: Any, trainer: Any) -> None:
    """Other numbers for some weights, assigned and in place."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm_mlp.weight"):
            parameter.data = np.full(parameter.shape, 0.5)
        if name.endswith("norm_attention.weight"):
            parameter.data[...] = 2.0


Case = tuple[str, dict[str, Any], list[Change]]
CASES: dict[str, Case] = {
    "a weight off, and on again": ("adamw", {}, [freeze("blocks.1.mlp.up.weight"), freeze()]),
    "the first layers off": ("adamw", {}, [freeze("tokens", "positions", "blocks.0"), freeze()]),
    "all but the head off": ("sgd", {"momentum": 0.9}, [freeze("s.", "norm."), freeze()]),
    "the head off": ("adam", {"weight_decay": 0.1}, [freeze("head", "blocks.1"), freeze("bias")]),
    "betas": ("adamw", {}, [options(betas=(0.5, 0.9)), options(eps=1e-3, weight_decay=0.7)]),
    "decay from 0": ("adam", {}, [options(weight_decay=0.7), options(weight_decay=0.0)]),
    "momentum": (
        "sgd",
        {"momentum": 0.9},
        [options(momentum=0.0), options(momentum=0.3, nesterov=True)],
    ),
    "alpha": ("rmsprop", {}, [options(alpha=0.5, eps=1e-2), options(weight_decay=0.3)]),
    "the optimizer's lr": ("adamw", {}, [options(lr=0.05), options(lr=0.02)]),
    "the trainer's lr, clip": ("sgd", {}, [of_trainer(lr=0.05, clip=0.01), of_trainer(clip=None)]),
    "mode": ("adamw", {}, [lambda model, *_: model.eval(), lambda model, *_: model.train()]),
    "mode of a block": ("adamw", {}, [one_block_to_eval, freeze()]),
    "dropout's rate, a mode": ("adamw", {}, [other_dropout, freeze()]),
}
EVERY_PLAN = ("the first layers off", "mode of a block")
SEED = 3
CLIP = 0.01  # below each norm: what is counted twice shows


def config_of(case: str) -> GPTConfig:
    return tiny(layers=2, dropout=0.3 if "mode" in case else 0.0)


class Loop:
    """What the plain loop keeps beside model and optimizer, by a Trainer's names."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.clip: float | None = CLIP

    @property
    def lr(self) -> float:
        return float(self.optimizer.lr)

    @lr.setter
    def lr(self, lr: float) -> None:
        self.optimizer.lr = lr


def made_anew(kind: str, optimizer: Any, model: GPT) -> Any:
    """Return an optimizer whose constructor is given the options as they are, with its state."""
    options = optimizer.options_now()
    if options.get("momentum") == 0.0:  # an optimizer that is made so can have no other
        return optimizer
    fresh = OPTIMIZERS[kind](model.parameters(), **options)
    for new, old in zip(fresh.slots, optimizer.slots, strict=True):
        new.steps = old.steps
        new.state.update(old.state)
    return fresh


def plain(case: str, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and weights of a loop over model, loss and optimizer, without a strategy.

    After a change it makes another optimizer, which cannot have kept what the first was made with.
    """
    kind, given, changes = CASES[case]
    config = config_of(case)
    model = GPT(config)
    model.initialize(SEED)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2, **given)
    loop = Loop(optimizer)
    losses = []
    for step in range(steps):
        if 0 < step <= len(changes):
            changes[step - 1](model, optimizer, loop)
            optimizer = made_anew(kind, optimizer, model)
            loop.optimizer = optimizer
        model.zero_grad()
        inputs, targets = global_batch(step, 6, config)
        key = DropoutKey.of_sequences(SEED, step, 0, *inputs.shape) if config.dropout else None
        loss = model.loss(inputs, targets, targets.size, key=key)
        loss.backward()
        losses.append(loss.item())
        norm = global_norm(parameter.grad for parameter in model.parameters())
        optimizer.step(scale=1.0 if loop.clip is None else clip_scale(norm, loop.clip))
    return losses, model.state_dict()


def train(world: Any, plan: dict[str, Any], case: str, steps: int) -> Any:
    """The same by a Trainer, which evaluates before each change."""
    kind, given, changes = CASES[case]
    config = config_of(case)
    trainer = Trainer(
        Plan(**plan),
        config,
        world,
        seed=SEED,
        optimizer=kind,
        lr=1e-2,
        optimizer_options=given,
        clip=CLIP,
    )
    losses = []
    for step in range(steps):
        if 0 < step <= len(changes):
            changes[step - 1](trainer.model, trainer.optimizer, trainer)
        trainer.evaluate([global_batch(99, 6, config)])
        losses.append(trainer.step(global_batch(step, 6, config)))
    weights = trainer.state_dict()
    trainer.close()
    return losses, weights


def check(plan: dict[str, Any], case: str) -> None:
    steps = len(CASES[case][2]) + 2
    losses, weights = plain(case, steps)
    for ours in run(train, plan, case, steps, size=Plan(**plan).size):
        np.testing.assert_allclose(ours[0], losses, atol=1e-10)
        assert difference(ours[1], weights) < 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize("case", EVERY_PLAN)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan(plan: dict[str, Any], case: str) -> None:
    check(plan, case)


def test_replicas_learn_a_new_rate_of_dropout() -> None:
    check(PLANS["replicas in one process"], "dropout's rate, a mode")


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", [{}, {"dp": 2, "zero": 2}, {"pp": 2}], ids=["one", "ZeRO-2", "pp"])
def test_every_change(plan: dict[str, Any], case: str) -> None:
    check(plan, case)


def test_momentum_waits_while_its_share_is_0() -> None:
    """PyTorch does the same: u stays as it is."""
    weight = Parameter(np.ones(3))
    optimizer = OPTIMIZERS["sgd"]([weight], lr=0.1, momentum=0.9)
    expected = np.ones(3)
    u = np.zeros(3)
    for momentum in (0.9, 0.0, 0.0, 0.5):
        optimizer.momentum = momentum  # type: ignore[attr-defined]
        weight.grad = 2.0 * weight.data
        if momentum:
            u = momentum * u + 2.0 * expected
        expected = expected - 0.1 * (u if momentum else 2.0 * expected)
        optimizer.step()
    np.testing.assert_allclose(weight.data, expected, rtol=1e-12)


# ------------------------------------------------------------------------------ numbers of a weight


def put_new_norms(world: Any, plan: dict[str, Any]) -> Any:
    trainer = Trainer(Plan(**plan), tiny(), world, seed=SEED, lr=1e-2)
    trainer.step(global_batch(0, 6, tiny()))
    new_norms(trainer.model, None, None)
    trainer.step(global_batch(1, 6, tiny()))
    weights = trainer.state_dict()
    trainer.close()
    return weights


IN_PLACE = ("DDP", "ZeRO-1", "parameter server", "replicas in one process", "tensor", "pipeline")


@pytest.mark.parametrize("name", IN_PLACE)
def test_new_numbers_of_a_weight_take_effect(name: str) -> None:
    serial, *_ = run(put_new_norms, {}, size=1)
    ours, *_ = run(put_new_norms, PLANS[name], size=Plan(**PLANS[name]).size)
    assert difference(ours, serial) < 1e-10


BF16: dict[str, dict[str, Any]] = {
    "bf16": {"dp": 2, "zero": 2, "precision": "bf16"},
    "bf16 in one process": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", ["ZeRO-3", "optimizer on the host", *BF16])
def test_new_numbers_are_refused_where_others_would_replace_them(name: str) -> None:
    plan = BF16.get(name) or PLANS[name]
    config = tiny(dtype="float32") if name in BF16 else tiny()

    def job(world: Any) -> None:
        trainer = Trainer(Plan(**plan), config, world)
        parameter = next(trainer.model.parameters())
        with pytest.raises(
            ConfigError, match=r"'tokens.weight': its values are kept by .*Trainer.load"
        ):
            parameter.data = np.zeros(parameter.shape, parameter.dtype)
        with pytest.raises(ConfigError, match="kept by"):
            trainer.model.load_state_dict(trainer.state_dict())
        with pytest.raises(ValueError, match="read-only"):
            parameter.data[...] = 0
        trainer.step(global_batch(0, 6, config))
        trainer.close()

    run(job, size=Plan(**plan).size)


# ---------------------------------------------------------------------------------- what is refused


def test_local_steps_and_asynchronous_servers_refuse_what_does_not_reach_all() -> None:
    def job(world: Any, plan: dict[str, Any], change: Change) -> None:
        trainer = Trainer(Plan(**plan), tiny(), world, optimizer="sgd", clip=None)
        if world.rank < world.size - 1 or "asynchronous" not in plan:
            trainer.step(global_batch(0, 6, tiny()))
            change(trainer.model, trainer.optimizer, trainer)
        trainer.step(global_batch(1, 6, tiny()))

    servers = {"dp": 2, "strategy": "parameter-server", "asynchronous": True}
    with pytest.raises(ConfigError, match="local steps: requires_grad of 'head.weight'"):
        run(job, {"dp": 2, "local_steps": 2}, freeze("head"), size=2)
    told = (ConfigError, PeerLostError)  # a server says that it has lost all its workers
    with pytest.raises(told, match="asynchronous servers: requires_grad of 'head.weight'"):
        run(job, servers, freeze("head"), size=2)
    with pytest.raises(told, match="asynchronous servers: the optimizer's weight_decay"):
        run(job, servers, options(weight_decay=0.5), size=2)


@pytest.mark.parametrize("make", [Single, lambda model: None], ids=["one process", "DDP"])
def test_a_weight_that_was_left_out_is_refused_when_it_begins_to_learn(make: Any) -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(SEED)
        model.head.weight.requires_grad = False  # type: ignore[union-attr]
        strategy = make(model) or DDP(model, world)
        optimizer = OPTIMIZERS["sgd"](strategy.parameters, lr=0.1)
        strategy.step(global_batch(0, 4, tiny()), optimizer)
        model.head.weight.requires_grad = True  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="requires_grad of 'head.weight' was switched on"):
            strategy.step(global_batch(1, 4, tiny()), optimizer)
        again = Single(model)
        again.step(global_batch(1, 4, tiny()), OPTIMIZERS["sgd"](again.parameters, lr=0.1))

    run(job, size=1)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("adamw", "lr", -1.0),
        ("adamw", "betas", (0.9, 1.0)),
        ("adam", "eps", float("nan")),
        ("sgd", "momentum", 0.9),
        ("rmsprop", "alpha", 1.5),
        ("sgd", "weight_decay", float("inf")),
    ],
)
def test_a_value_that_an_optimizer_cannot_take_is_refused(kind: str, name: str, value: Any) -> None:
    model = GPT(tiny())
    model.initialize(SEED)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.1)
    before = optimizer.options_now()
    with pytest.raises(ConfigError, match=name):
        setattr(optimizer, name, value)
    if (kind, name) != ("sgd", "momentum"):
        assert optimizer.options_now() == before


# ------------------------------------------------------------------------------ another plan, later


DIVIDED = ["one process", "ZeRO-2, two passes", "ZeRO-3", "pipeline", "on disk"]


@pytest.mark.parametrize("name", DIVIDED)
def test_a_checkpoint_has_a_weight_once_that_was_frozen_later(name: str, tmp_path: Path) -> None:
    def job(world: Any) -> None:
        trainer = Trainer(Plan(**PLANS[name]), tiny(layers=2), world, seed=SEED)
        trainer.step(global_batch(0, 6, tiny()))
        freeze("blocks.0", "norm.")(trainer.model, None, None)
        trainer.save(tmp_path / "saved")
        kept = trainer.state_dict()
        shards = json.loads((tmp_path / "saved" / "manifest.json").read_text())["shards"]
        arrays = [array for shard in shards for array in shard["arrays"]]
        written = Counter[str]()
        for array in arrays:
            written[array["key"]] += array["nbytes"]
        sizes = {f"weight/{name}": value.nbytes for name, value in kept.items()}
        assert sizes.items() <= written.items()
        trainer.step(global_batch(1, 6, tiny()))
        trainer.load(tmp_path / "saved")
        assert difference(trainer.state_dict(), kept) == 0.0
        trainer.close()

    run(job, size=Plan(**PLANS[name]).size)


def test_a_change_of_plan_takes_the_options_along() -> None:
    def job(world: Any) -> Any:
        trainer = Trainer(
            Plan(dp=2), tiny(), world, lr=1e-2, lr_schedule="cosine", warmup=1, steps=9
        )
        trainer.lr = 0.5
        trainer.optimizer.betas = 0.3, 0.4  # type: ignore[attr-defined]
        trainer.model.eval()
        trainer.change_plan(Plan(tp=2))
        found = trainer.lr, trainer.learning_rate, trainer.optimizer.options_now()
        trained = trainer.model.training
        next(trainer.model.parameters()).requires_grad = world.rank == 0
        with pytest.raises(ConfigError, match="requires_grad of 'tokens.weight' is off on rank 1"):
            trainer.change_plan(Plan(dp=2))
        trainer.close()
        return *found, trained

    lr, rate, kept, training = run(job, size=2)[0]
    assert (lr, kept["betas"], training) == (0.5, (0.3, 0.4), False)
    assert rate == LearningRate(name="cosine", peak=0.5, warmup=1, total=9)
