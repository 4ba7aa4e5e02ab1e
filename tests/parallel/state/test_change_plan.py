"""A trainer that changes its plan between two steps goes on as one process does, and back with the
same bits."""

from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.errors import CheckpointError, PlanError
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.state import state_exchange
from minidist.parallel.state.state_map import state_places

SIZES: dict[str, Any] = {"layers": 3, "heads": 4, "tied": True, "dropout": 0.2}
PLANS: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 4, "zero": 1, "shard": 2},
    {"dp": 2, "tp": 2, "zero": 2},
    {"dp": 4, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 1},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 2, "tp": 2},
    {"dp": 4, "zero": 3, "offload": "all"},
    {"dp": 4, "zero": 2, "offload": "optimizer"},
    {"cp": 4, "zero": 3},
    {"pp": 2, "tp": 2, "offload": "optimizer"},
    {"dp": 2, "tp": 2, "zero": 3, "shard": 1, "offload": "all"},
]


def trained(
    world: Any, plans: list[dict[str, Any]], steps: int, changes: dict[str, Any]
) -> tuple[list[float], list[str]]:
    """The losses of `steps` steps under each plan in turn, and the digest of the weights after each
    change."""
    config = tiny(**SIZES, **changes)
    trainer = Trainer(Plan(**plans[0]), config, world, seed=3, lr=1e-2, clip=0.5)
    losses = []
    digests = []
    for number, plan in enumerate(plans):
        if number:
            before = trainer.weights_sha256()
            trainer.change_plan(Plan(**plan))
            assert trainer.weights_sha256() == before
        losses += [
            trainer.step(global_batch(len(losses) + step, 5, config)) for step in range(steps)
        ]
        digests.append(trainer.weights_sha256())
    trainer.close()
    return losses, digests


@pytest.mark.sampled(every=68)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (0, 3),
        (2, 11),
        (5, 1),
        *(
            pytest.param(first, second, marks=pytest.mark.soak)
            for first in range(len(PLANS))
            for second in range(len(PLANS))
            if first != second
        ),
    ],
)
def test_goes_on_as_one_process(first: int, second: int) -> None:
    serial = md.run(trained, [{}], 6, {}, size=1)[0]
    ranks = md.run(trained, [PLANS[first], PLANS[second], PLANS[first]], 2, {}, size=4)
    assert np.max(np.abs(np.subtract(ranks[0][0], serial[0]))) < 1e-10
    assert len({(*losses, *digests) for losses, digests in ranks}) == 1


@pytest.mark.soak
def test_there_and_back_changes_no_bit() -> None:
    """Moments and counts come back as they were: the run equals one that never changed."""
    stayed = md.run(trained, [PLANS[0]], 4, {"dtype": "float32"}, size=4)[0]
    returned = md.run(there_and_back, size=4)[0]
    assert returned == (stayed[0], stayed[1][0])


def there_and_back(world: Any) -> tuple[list[float], str]:
    config = tiny(**SIZES, dtype="float32")
    trainer = Trainer(Plan(dp=4), config, world, seed=3, lr=1e-2, clip=0.5)
    losses = [trainer.step(global_batch(step, 5, config)) for step in range(2)]
    trainer.change_plan(Plan(**PLANS[2]))
    trainer.change_plan(Plan(dp=4))
    losses += [trainer.step(global_batch(step, 5, config)) for step in range(2, 4)]
    digest = trainer.weights_sha256()
    trainer.close()
    return losses, digest


def test_a_plan_that_cannot_be_leaves_the_old_one() -> None:
    def changed(world: Any) -> float:
        trainer = Trainer(Plan(dp=2), tiny(), world)
        with pytest.raises(PlanError, match="4 ranks"):
            trainer.change_plan(Plan(dp=4))
        loss = trainer.step(global_batch(0, 4, tiny()))
        trainer.close()
        return loss

    assert len(set(md.run(changed, size=2))) == 1


def test_what_no_rank_offers_is_named_on_every_rank() -> None:
    def restored(world: Any) -> str:
        trainer = Trainer(Plan(dp=2, zero=1), tiny(), world)
        snapshot = state_exchange.take_snapshot(trainer.strategy, trainer.optimizer)
        with pytest.raises(CheckpointError) as error:
            state_exchange.restore(
                [snapshot] if world.rank else [], trainer.strategy, trainer.optimizer, world
            )
        trainer.close()
        return str(error.value)

    (told,) = set(md.run(restored, size=2))
    assert (
        told.startswith("rank 0 needs ") and "no rank has them; continue from a checkpoint" in told
    )


def test_a_rank_receives_only_what_it_lacks() -> None:
    """From ZeRO-1 to ZeRO-3 on two ranks: what both layouts give a rank does not travel."""

    def counted(world: Any) -> tuple[int, int]:
        trainer = Trainer(Plan(dp=2, zero=1, bucket_bytes=1 << 20), tiny(), world)
        own = {
            (place.key, int(at))
            for place in state_places(trainer.strategy, trainer.optimizer)
            for start, stop in place.runs
            for at in range(start, stop)
        }
        trainer.change_plan(Plan(dp=2, zero=3))
        sent = [
            sum(verbs.values())
            for axis, verbs in world.ledger.sent_bytes("state").items()
            if axis != "control"
        ]
        wanted = {
            (place.key, int(at))
            for place in state_places(trainer.strategy, trainer.optimizer)
            for start, stop in place.runs
            for at in range(start, stop)
        }
        trainer.close()
        return sum(sent), 8 * len(wanted - own)

    (sent_0, lacks_0), (sent_1, lacks_1) = md.run(counted, size=2)
    assert (sent_0, sent_1) == (lacks_1, lacks_0) and lacks_0 > 0
