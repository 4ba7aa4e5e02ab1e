"""Each scheme in training: several buckets under way at once, all axes alike, and the loss
falls."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from training import SMALL_BUCKETS, difference, global_batch, tiny

import minidist as md
from minidist.errors import ConfigError
from minidist.parallel.hybrid.hybrid import Plan, Trainer

TEXTS = [
    "top-k:density=0.1",
    "top-k:density=0.1,momentum=0.5",
    "threshold:value=0.01",
    "random-k:density=0.1",
    "sign",
    "sign:majority=yes",
    "powersgd:rank=2",
    "predict",
    "adaptive:period=4",
]


@cache
def trained(
    text: str,
    steps: int,
    zero: int = 0,
    precision: str = "fp32",
    optimizer: str = "adamw",
    shard: int | None = None,
) -> list[dict[str, Any]]:
    """Three ranks (or two copies of two) that learn one batch of noise by heart."""

    def job(world: Any) -> dict[str, Any]:
        plan = Plan(
            dp=world.size,
            zero=zero,
            shard=shard,
            bucket_bytes=SMALL_BUCKETS,
            precision=precision,
            compress=text,
        )
        config = tiny() if precision == "fp32" else tiny(dtype="float32")
        trainer = Trainer(plan, config, world, optimizer=optimizer, lr=1e-2, seed=3)
        batch = global_batch(0, 6, tiny())
        losses = [trainer.step(batch) for _ in range(steps)]
        weights = {name: array.copy() for name, array in trainer.state_dict().items()}
        result = {"losses": losses, "weights": weights, "digest": trainer.weights_sha256()}
        trainer.close()
        return result

    return md.run(job, size=4 if shard else 3)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("text", TEXTS)
def test_ranks_stay_equal_and_learn(text: str, zero: int) -> None:
    ranks = trained(text, 12, zero)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    assert min(ranks[0]["losses"][-5:]) < 0.97 * ranks[0]["losses"][0]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("text", [*TEXTS, "1-bit:warmup=3"])
def test_low_precision(text: str, precision: str) -> None:
    """Gradients of two bytes are added in float32; float16's loss scale overflows at first and
    every rank sees it."""
    ranks = trained(text, 6, precision=precision)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert np.isfinite(ranks[0]["losses"]).all()
    assert all(np.isfinite(array).all() for array in ranks[0]["weights"].values())


def test_one_bit_adam_learns_and_names_its_optimizer() -> None:
    ranks = trained("1-bit:warmup=4", 12)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert min(ranks[0]["losses"][-5:]) < 0.97 * ranks[0]["losses"][3]
    with pytest.raises(ConfigError, match="choose adam or adamw"):
        trained("1-bit", 1, optimizer="sgd")
    with pytest.raises(ConfigError, match="use DDP"):
        trained("1-bit", 1, zero=1)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("text", [*TEXTS, "1-bit:warmup=3"])
def test_between_copies(text: str) -> None:
    """Two copies of two ranks (ZeRO-1): shards, which are parts of parameters, are summed over the
    copies."""
    ranks = trained(text, 6, zero=1, shard=2)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert np.isfinite(ranks[0]["losses"]).all()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "text", ["top-k:density=0.1", "threshold:value=0.01", "powersgd:rank=2", "random-k:density=0.1"]
)
def test_zero_sums_as_ddp_does(text: str) -> None:
    """What is chosen does not depend on who keeps it."""
    ddp = trained(text, 4)[0]["weights"]
    for zero in (1, 2):
        assert difference(trained(text, 4, zero)[0]["weights"], ddp) < 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text", ["top-k:density=1", "random-k:density=1", "powersgd:rank=100", "adaptive:start=1"]
)
def test_everything_sent_is_plain_training(text: str) -> None:
    assert difference(trained(text, 4)[0]["weights"], trained("none", 4)[0]["weights"]) < 1e-10


def test_a_residual_lost_on_the_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what waits is forgotten after each step. The weights are others then."""
    right = trained("top-k:density=0.1", 4)[0]["weights"]
    start = Trainer.step

    def forgetful(self: Trainer, *args: Any, **options: Any) -> float:
        loss = start(self, *args, **options)
        for error in self.strategy.data_axis.scheme.errors.values():  # type: ignore[union-attr]
            error[...] = 0
        return loss

    monkeypatch.setattr(Trainer, "step", forgetful)
    trained.cache_clear()
    assert difference(trained("top-k:density=0.1", 4)[0]["weights"], right) > 1e-4
    trained.cache_clear()
