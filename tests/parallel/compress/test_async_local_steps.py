"""Asynchronous local steps: equal to a replay of the servers' record, without a barrier, at the
cost of chapter 06."""

import threading
from typing import Any

import numpy as np
import pytest
from local_steps import new_model, reference, vector_of
from training import difference, global_batch, tiny

import minidist as md
from minidist.errors import ConfigError
from minidist.optim import AdamW
from minidist.parallel.compress.async_local_steps import AsyncLocalSteps, replay_rounds
from minidist.parallel.compress.outer import OUTERS
from minidist.parallel.hybrid.hybrid import Plan, Trainer


def run(size: int, *, steps: int = 6, every: int = 2, **options: Any) -> list[dict[str, Any]]:
    """A run under a Trainer, with a learning rate that changes."""

    def rank(world: Any) -> dict[str, Any]:
        plan = Plan(
            dp=size, strategy="parameter-server", asynchronous=True, local_steps=every, **options
        )
        trainer = Trainer(
            plan,
            tiny(),
            world,
            seed=3,
            lr=1e-2,
            lr_schedule="cosine",
            warmup=2,
            steps=steps,
            clip=0.5,
        )
        losses = [trainer.step(global_batch(step, 5, tiny())) for step in range(steps)]
        weights = trainer.state_dict()
        strategy = trainer.strategy
        assert isinstance(strategy, AsyncLocalSteps)
        held = sum(array.size for slot in trainer.optimizer.slots for array in slot.state.values())
        return {
            "weights": weights,
            "losses": losses,
            "record": list(strategy.record),
            "rate": trainer.learning_rate,
            "sent": world.ledger.sent_bytes("step"),
            "digest": trainer.weights_sha256(),
            "moments": held,
            "loss": trainer.evaluate([global_batch(99, 4, tiny())]),
        }

    return md.run(rank, size=size)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("size", "every", "staleness"), [(2, 3, 2), (3, 2, 0), (4, 2, 1), (4, 1, None)]
)
def test_equals_a_replay_of_the_record(size: int, every: int, staleness: int | None) -> None:
    ranks = run(size, every=every, staleness=staleness)
    record = ranks[-1]["record"]
    model = new_model()
    assert len(record) == (size - 1) * (6 // every)
    replay_rounds(
        model,
        record,
        lambda step: global_batch(step, 5, tiny()),
        lambda weights: AdamW(weights, 1e-2),
        workers=size - 1,
        every=every,
        outer=OUTERS["nesterov"],
        rate=ranks[0]["rate"],
        clip=0.5,
    )
    assert difference(model.state_dict(), ranks[-1]["weights"]) == 0
    assert len({rank["digest"] for rank in ranks}) == len({rank["loss"] for rank in ranks}) == 1


def test_one_worker_is_one_rank_of_diloco() -> None:
    def rank(world: Any) -> np.ndarray:
        plan = Plan(dp=2, strategy="parameter-server", asynchronous=True, local_steps=3)
        trainer = Trainer(plan, tiny(), world, seed=3, lr=1e-2, clip=0.5)
        for step in range(6):
            trainer.step(global_batch(step, 5, tiny()))
        trainer.survivors()
        return vector_of(trainer.model)

    np.testing.assert_allclose(
        md.run(rank, size=2)[0], reference(1, steps=6, every=3)["common"], rtol=0, atol=1e-10
    )


def test_several_servers_divide_the_weights() -> None:
    ranks = run(4, servers=2, staleness=0)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert [len(rank["record"]) for rank in ranks] == [0, 0, 6, 6]


def test_bytes_and_moments_are_the_formula() -> None:
    """Two workers, one server, three rounds of two steps; the weights once more at the end. No
    moments on a server."""
    ranks = run(3)
    nbytes = vector_of(new_model()).nbytes
    sent = [sum(rank["sent"]["dp"].values()) for rank in ranks]
    assert sent[:2] == [3 * nbytes] * 2
    assert [rank["moments"] for rank in ranks] == [2 * nbytes // 8, 2 * nbytes // 8, 0]


def test_a_worker_goes_on_while_another_sleeps() -> None:
    """Worker 0 makes two rounds before worker 1 has made a step: it may be two ahead."""
    ahead = threading.Event()

    def rank(world: Any) -> None:
        trainer = Trainer(
            Plan(dp=3, strategy="parameter-server", asynchronous=True, local_steps=2), tiny(), world
        )
        assert world.rank != 1 or ahead.wait(20)
        for step in range(4):
            trainer.step(global_batch(step, 4, tiny()))
        ahead.set()
        trainer.survivors()

    md.run(rank, size=3)


def test_no_step_after_the_last() -> None:
    def rank(world: Any) -> None:
        trainer = Trainer(
            Plan(dp=2, strategy="parameter-server", asynchronous=True, local_steps=1), tiny(), world
        )
        trainer.step(global_batch(0, 4, tiny()))
        trainer.survivors()
        if world.rank == 0:
            with pytest.raises(
                ConfigError, match="worker 0 of 1 has finished and makes no more steps"
            ):
                trainer.step(global_batch(1, 4, tiny()))

    md.run(rank, size=2)
