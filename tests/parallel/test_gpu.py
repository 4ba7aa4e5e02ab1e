"""Strategies on a GPU: the same weights as on the CPU, gradients and weights travelling over host
transports."""

from typing import Any

import numpy as np
import pytest
from training import difference, global_batch, tiny, train

import minidist as md
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activations import pass_bytes
from minidist.parallel.step import late_loss

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    """These tests need CuPy and a GPU."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.2, "tied": True}, {"positions": "rotary", "norm": "rms"}], ids=str
)
def test_equals_one_process_on_the_cpu(size: int, changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    serial = md.run(lambda world: train(world, config=config), size=1)[0]
    ranks = md.run(lambda world: train(world, config=config, device="cuda"), size=size)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize(
    "plan",
    [{"offload": "optimizer"}, {"offload": "optimizer", "zero": 2}, {"offload": "all", "zero": 3}],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2])
def test_offloaded_equals_one_process_on_the_cpu(plan: dict[str, Any], size: int) -> None:
    """Through pinned memory, on streams of the copying threads' own."""
    if size > 1 and "zero" not in plan:
        return
    serial = md.run(lambda world: train(world), size=1)[0]
    ranks = md.run(lambda world: train(world, device="cuda", **plan), size=size)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10


@pytest.mark.parametrize(
    "plan",
    [
        {"zero": 1},
        {"zero": 2, "accumulate": 2},
        {"zero": 3},
        {"zero": 3, "shard": 1},
        {"zero": 3, "accumulate": 2, "checkpoint_blocks": "all"},
        {"strategy": "parameter-server"},
    ],
    ids=str,
)
def test_divided_state_equals_one_process_on_the_cpu(plan: dict[str, Any]) -> None:
    serial = md.run(lambda world: train(world), size=1)[0]
    ranks = md.run(lambda world: train(world, device="cuda", **plan), size=3)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"zero": 1},
        {"zero": 2, "accumulate": 2},
        {"zero": 3},
        {"zero": 2, "offload": "optimizer"},
        {"zero": 3, "offload": "all"},
    ],
    ids=str,
)
def test_mixed_precision_stays_close_to_the_cpus(precision: str, plan: dict[str, Any]) -> None:
    """Bounds as on the CPU (test_mixed_precision.py); ranks have the same bits, and a second run
    too."""
    config = tiny(dtype="float32", layers=1)
    serial = md.run(lambda world: train(world, config=config, precision=precision), size=1)[0]
    first, second = (
        md.run(
            lambda world: train(world, config=config, precision=precision, device="cuda", **plan),
            size=2,
        )
        for _ in range(2)
    )
    assert len({rank["digest"] for rank in (*first, *second)}) == 1
    assert (
        difference(first[0]["weights"], serial["weights"]) < {"bf16": 0.05, "fp16": 0.01}[precision]
    )
    assert {array.dtype.name for array in first[0]["weights"].values()} == {"float32"}


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_overflow_is_skipped(zero: int) -> None:
    """Infinities on the device are found in the norm: no update, half the scale."""

    def run(world: Any) -> tuple[bool, float, int]:
        config = tiny(dtype="float32", layers=1)
        trainer = Trainer(
            Plan(dp=world.size, zero=zero, precision="fp16"), config, world, device="cuda"
        )
        before, scale = trainer.weights_sha256(), trainer.precision.loss_scale  # type: ignore[attr-defined]
        scale.value = 2.0**60
        trainer.step(global_batch(0, 4, config))
        result = trainer.weights_sha256() == before, scale.value, trainer.updates_done
        trainer.close()
        return result

    assert md.run(run, size=2) == [(True, 2.0**59, 0)] * 2


# it warns that it may be removed
@pytest.mark.filterwarnings("ignore:cupyx.allow_synchronize:UserWarning")
@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.2}, {"positions": "rotary", "activation": "silu"}], ids=str
)
def test_a_step_of_bf16_waits_for_nothing(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy says so itself: within a step a wait is an error."""
    cupyx = pytest.importorskip("cupyx", reason="needs CuPy")
    copied = late_loss._copied

    def allowed(number: Any) -> Any:
        # CuPy takes each `get` for a wait, also one that does not block
        with cupyx.allow_synchronize(True):
            return copied(number)

    def run(world: Any) -> list[float]:
        config = tiny(dtype="float32", width=64, **changes)
        trainer = Trainer(Plan(precision="bf16"), config, world, device="cuda")
        losses = [trainer.step(global_batch(0, 4, config))]  # kernels are compiled
        with cupyx.allow_synchronize(False):
            on_their_way = [trainer.start_step(global_batch(step, 4, config)) for step in (1, 2)]
        losses += [late.wait() for late in on_their_way]
        trainer.close()
        return losses

    monkeypatch.setattr(late_loss, "_copied", allowed)
    losses = md.run(run, size=1)[0]
    assert losses == pytest.approx(
        md.run(
            lambda world: train(
                world,
                config=tiny(dtype="float32", width=64, **changes),
                precision="bf16",
                steps=3,
                sequences=4,
                clip=1.0,
                lr=1e-3,
                seed=0,
            ),
            size=1,
        )[0]["losses"],
        rel=0.02,
    )


def test_fp8_is_the_cpu_s_run() -> None:
    """Rounded by kernels, multiplied in bf16; the histories that scales follow are alike."""

    def run(world: Any, device: str) -> tuple[list[float], np.ndarray]:
        config = tiny(dtype="float32")
        trainer = Trainer(Plan(precision="fp8"), config, world, device=device)
        losses = [trainer.step(global_batch(step, 4, config)) for step in range(4)]
        return losses, trainer.precision.float8.state()  # type: ignore[attr-defined]

    (losses, seen), (wanted, histories) = (
        md.run(run, device, size=1)[0] for device in ("cuda", "cpu")
    )
    assert losses == pytest.approx(wanted, rel=0.02)
    np.testing.assert_allclose(seen, histories, rtol=0.2)


def test_a_limit_of_device_memory_holds() -> None:
    """What `require_room` finds by small models on the device is what a pass takes there."""
    config = tiny(dtype="float32", layers=4, context=32)
    peak = md.run(lambda world: train(world, config=config, device="cuda"), size=1)[0]["memory"][
        "activations"
    ]["peak"]
    found = pass_bytes(config, 5, device="cuda")
    assert 0.95 * peak <= found <= peak


def test_float32_stays_close_and_repeats() -> None:
    config = tiny(dtype="float32")
    serial = md.run(lambda world: train(world, config=config), size=1)[0]
    first, second = (
        md.run(lambda world: train(world, config=config, device="cuda"), size=2)[0]
        for _ in range(2)
    )
    assert first["digest"] == second["digest"]
    assert difference(first["weights"], serial["weights"]) < 1e-2
    assert first["memory"]["gradients"]["now"] == sum(
        array.nbytes for array in first["weights"].values()
    )
