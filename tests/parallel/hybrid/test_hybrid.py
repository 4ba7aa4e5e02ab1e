"""Plan, Mesh, Trainer."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import global_batch, tiny

import minidist as md
from minidist import parallel
from minidist.errors import ConfigError, PlanError
from minidist.parallel.hybrid.hybrid import AXES, Mesh, Plan, Trainer

# ------------------------------------------------------------------------------------------- layers


def test_each_chapter_keeps_to_itself() -> None:
    """Chapters import of each other's modules only the cutting of passes and the lists of a
    pipeline; hybrid composes."""
    shared = {"accumulation", "schedules"}
    composing = ("hybrid", "plan", "mesh")
    for file in Path(parallel.__path__[0]).glob("*.py"):
        text = file.read_text(encoding="utf-8")
        imported = {
            *re.findall(r"^ *from minidist\.parallel\.(\w+)", text, re.MULTILINE),
            *re.findall(r"^ *from minidist\.parallel import (\w+)", text, re.MULTILINE),
        }
        others = imported - shared - {"common", file.stem.removesuffix("_costs")}
        assert not others or file.stem.startswith(composing), f"{file.name} imports {others}"


# --------------------------------------------------------------------------------------------- plan


def test_plan_parses_what_it_prints() -> None:
    assert (
        Plan.parse("dp=4") == Plan(dp=4)
        and Plan.parse(" dp=2 , tp=1 ") == Plan(dp=2)
        and Plan.parse("") == Plan()
    )
    assert Plan(dp=4).axes == {"dp": 4, "pp": 1, "ep": 1, "cp": 1, "tp": 1} and Plan(dp=4).size == 4
    assert Plan(dp=3).as_dict()["dp"] == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=0", "whole number from 1"),
        ("dp=-1", "not a number of ranks"),
        ("dp=two", "not a number of ranks"),
        ("dp", "AXIS=SIZE"),
        ("zp=2", "dp, pp, ep, cp, tp"),
        ("dp=2,dp=2", "twice"),
        ("dp=1,,pp=1", "'' is not AXIS=SIZE"),
        ("dp=2,", "'' is not AXIS=SIZE"),
        ("dp=²", "not a number of ranks"),
    ],
)
def test_plan_refuses_in_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"dp": 6, "zero": 3, "shard": 4},
            "cannot be divided into copies of 4 ranks; choose one of 1, 2, 3, 6",
        ),
        ({"dp": 1, "zero": 1, "shard": 2}, "the 1 rank of dp cannot be divided"),
        ({"dp": 4, "zero": 3, "shard": 0}, "choose one of 1, 2, 4"),
        ({"dp": 4, "shard": 2}, "nothing is divided among"),
        ({"dp": 2, "zero": 2, "keep_gathered": True}, "only ZeRO-3 gathers units"),
    ],
)
def test_plan_refuses_what_zero_cannot(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(**options)


# --------------------------------------------------------------------------------------------- mesh


@given(
    sizes=st.lists(st.integers(1, 3), min_size=5, max_size=5).filter(
        lambda sizes: np.prod(sizes) <= 8
    ),
    names=st.sets(st.sampled_from(AXES), min_size=1),
)
def test_mesh_groups(sizes: list[int], names: set[str]) -> None:
    """Members agree on every other coordinate and stand in the order of the layout, dp, pp, ep, cp,
    tp."""
    shape = dict(zip(AXES, sizes, strict=True))

    def job(world: Any) -> tuple[dict[str, int], tuple[int, ...], int, str]:
        mesh = Mesh(world, **shape)
        group = mesh[tuple(names)]
        assert mesh[tuple(names)] is group
        summed = int(group.all_reduce(np.array([world.rank]))[0])
        found = (mesh.coordinates, group.world_ranks, summed, group.axis)
        mesh.close()
        return found

    results = md.run(job, size=int(np.prod(sizes)))
    for rank, (coordinates, members, summed, axis) in enumerate(results):
        assert rank == np.ravel_multi_index(list(coordinates.values()), sizes)
        expected = [
            other
            for other, (theirs, *_) in enumerate(results)
            if all(theirs[axis] == coordinates[axis] for axis in AXES if axis not in names)
        ]
        assert list(members) == expected and summed == sum(expected)
        assert axis == ",".join(axis for axis in AXES if axis in names)


def test_mesh_refuses() -> None:
    def job(world: Any) -> None:
        with pytest.raises(PlanError, match="dp=3 × tp=2 has 6 places, the job has 2 ranks"):
            Mesh(world, dp=3, tp=2)
        with pytest.raises(PlanError, match="dp, pp, ep, cp, tp"):
            Mesh(world, dp=2)["rows"]

    md.run(job, size=2)


# ------------------------------------------------------------------------------------------ trainer


@pytest.mark.sampled
@pytest.mark.parametrize("size", [3, 1])
def test_loss_falls_and_evaluate_agrees_with_step(size: int) -> None:
    config = tiny()
    batch = global_batch(0, 5, config)

    def job(world: Any) -> tuple[list[float], float, float]:
        trainer = Trainer(Plan(dp=world.size), config, world, lr=0.02)
        before = trainer.evaluate([batch])
        losses = [trainer.step(batch) for _ in range(20)]
        after = trainer.evaluate([batch, batch])
        trainer.close()
        return losses, before, after

    results = md.run(job, size=size)
    assert all(result == results[0] for result in results)
    losses, before, after = results[0]
    assert before == pytest.approx(losses[0], rel=1e-12) and after < losses[-1] < 0.7 * losses[0]


def test_evaluate_weights_batches_by_their_tokens() -> None:
    config = tiny()
    small = global_batch(0, 1, config)
    large = global_batch(1, 4, config)

    def job(world: Any) -> tuple[float, float, float]:
        trainer = Trainer(Plan(dp=world.size), config, world)
        losses = (
            trainer.evaluate([small]),
            trainer.evaluate([large]),
            trainer.evaluate([small, large]),
        )
        trainer.close()
        return losses

    for one, four, both in md.run(job, size=2):
        assert both == pytest.approx((one + 4 * four) / 5, rel=1e-12)


def test_dropout_does_not_depend_on_the_split() -> None:
    from training import difference, train

    options: dict[str, Any] = {"config": tiny(dropout=0.3), "sequences": 5}
    serial = md.run(lambda world: train(world, **options), size=1)[0]
    ranks = md.run(lambda world: train(world, **options), size=3)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    plain = md.run(lambda world: train(world, config=tiny(), sequences=5), size=1)[0]
    assert not difference(plain["weights"], serial["weights"]) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_through_the_trainer(stage: int) -> None:
    """Parity, with dropout; and evaluation where a rank has no row."""
    from training import difference, train

    options: dict[str, Any] = {"config": tiny(dropout=0.3, tied=True), "sequences": 2}
    serial = md.run(lambda world: train(world, **options), size=1)[0]
    ranks = md.run(lambda world: train(world, zero=stage, **options), size=3)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1

    def job(world: Any) -> tuple[float, float]:
        trainer = Trainer(Plan(dp=world.size, zero=stage), tiny(), world)
        batch = global_batch(0, 2, tiny())
        before = trainer.evaluate([batch, batch])
        loss = trainer.step(batch)
        trainer.close()
        return before, loss

    for before, loss in md.run(job, size=3):
        assert before == pytest.approx(loss, rel=1e-12)
    with pytest.raises(PlanError, match="zero=4: choose one of 0, 1, 2, 3"):
        Plan(zero=4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {"strategy": "data-parallel", "replicas": 3}),
        (4, {"strategy": "parameter-server", "servers": 2}),
    ],
)
def test_one_place_for_all_through_the_trainer(size: int, options: dict[str, Any]) -> None:
    """Parity with dropout, a tied table, checkpointed blocks, accumulation; evaluation; whole
    weights on every rank."""
    config = tiny(dropout=0.3, tied=True)
    batch = global_batch(0, 5, tiny())

    def job(world: Any, **options: Any) -> tuple[dict[str, np.ndarray], list[float], float, str]:
        plan = Plan(dp=world.size, accumulate=2, checkpoint_blocks="all", **options)
        trainer = Trainer(plan, config, world, seed=3)
        losses = [trainer.step(batch) for _ in range(4)]
        trainer.check_replicas()
        found = (
            trainer.state_dict(),
            losses,
            trainer.evaluate([batch, batch]),
            trainer.weights_sha256(),
        )
        trainer.close()
        return found

    from training import difference

    ((serial, losses, value, _),) = md.run(job, size=1)
    ranks = md.run(lambda world: job(world, **options), size=size)
    assert difference(ranks[0][0], serial) < 1e-10
    for weights, ours, measured, digest in ranks:
        assert digest == ranks[0][3] and weights.keys() == serial.keys()
        assert ours == pytest.approx(losses, rel=1e-10) and measured == pytest.approx(
            value, rel=1e-10
        )


def test_schedule() -> None:
    def job(world: Any) -> list[float]:
        trainer = Trainer(Plan(), tiny(), world, lr=1.0, lr_schedule="cosine", warmup=4, steps=10)
        return [trainer.learning_rate(step) for step in range(10)]

    rates = md.run(job, size=1)[0]
    assert rates[3] == pytest.approx(1.0) and rates == sorted(rates[:4]) + sorted(
        rates[4:], reverse=True
    )
    assert 0 < rates[0] < rates[1] and rates[-1] >= 0.1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plan": Plan(dp=3)}, "for 3 ranks, the job has 2"),
        ({"optimizer": "adamx"}, "adamw, adam, rmsprop, sgd"),
        ({"lr_schedule": "sine"}, "choose one of constant, cosine, linear"),
        ({"lr_schedule": "cosine"}, "steps="),
        (
            {"lr_schedule": "wsd", "steps": 9, "lr_options": {"decay": 10}},
            "a decay of 10 steps does not fit a run of 9",
        ),
    ],
)
def test_trainer_refuses(options: dict[str, Any], says: str) -> None:
    def job(world: Any) -> None:
        with pytest.raises(ConfigError, match=says):
            Trainer(**{"plan": Plan(dp=2), "config": tiny(), "world": world, **options})

    md.run(job, size=2)
