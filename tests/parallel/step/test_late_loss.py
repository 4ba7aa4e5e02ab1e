"""A step on a GPU (its stand-in) waits for nothing; the loss is what `step` returns, read when
somebody asks."""

import sys
import threading
from typing import Any

import fake_cupy
import fake_gpu
import numpy as np
import pytest
from kernel_checks import needs_compiler
from training import difference, global_batch, tiny

import minidist as md
from minidist.autograd.tensor import tensor
from minidist.device import dispatch
from minidist.nn.config import MixtureConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.late_loss import LateLoss

CHANGES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "dropout": {"dropout": 0.2, "tied": True},
    "llama": {"positions": "rotary", "norm": "rms", "activation": "silu", "kv_heads": 1},
    "window": {"context": 130, "attention_pattern": "local:64+global:1", "positions": "rotary"},
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, and ops without kernels, whose CPU build takes its time."""
    monkeypatch.setattr(dispatch, "DTYPES", ())
    return fake_gpu.install(monkeypatch)


def run(
    world: Any,
    device: str,
    changes: dict[str, Any],
    plan: dict[str, Any],
    steps: int = 3,
    optimizer: str = "adamw",
) -> tuple[list[float], Any, list[str]]:
    """Losses, weights, and what was waited for in the steps."""
    config = tiny(**{"dtype": "float32", "layers": 1, **changes})
    trainer = Trainer(
        Plan(**{"precision": "bf16", **plan}),
        config,
        world,
        device=device,
        clip=0.5,
        lr=1e-2,
        optimizer=optimizer,
    )
    fake_gpu.waits.clear()
    on_their_way = [trainer.start_step(global_batch(step, 3, config)) for step in range(steps)]
    waits = list(fake_gpu.waits)
    result = [late.wait() for late in on_their_way], trainer.state_dict(), waits
    trainer.close()
    return result


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("optimizer", "accumulate", "bound"), [("adamw", 1, 0.05), ("sgd", 2, 1e-3)]
)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_a_step_of_bf16_waits_for_nothing(
    changes: dict[str, Any], optimizer: str, accumulate: int, bound: float, plain: Any
) -> None:
    """And it is the CPU's step: losses and weights, after clipping, with float32 master weights;
    but that a product is rounded before the bias is added to it, and Adam makes much of that where
    a gradient is nearly zero."""
    of_run = changes, {"accumulate": accumulate}, 3, optimizer
    losses, weights, _ = md.run(run, "cpu", *of_run, size=1)[0]
    found, masters, waits = md.run(run, "cuda", *of_run, size=1)[0]
    assert waits == []
    assert found == pytest.approx(losses, rel=1e-4)
    assert difference(masters, weights) < bound


@pytest.mark.soak  # tests/parallel/hybrid/test_cuda_graph.py counts waits with kernels, too
@needs_compiler
def test_nor_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the ops' and Adam's kernels."""
    fake_gpu.install(monkeypatch)
    losses, weights, _ = md.run(run, "cpu", {}, {}, 1, size=1)[0]
    found, masters, waits = md.run(run, "cuda", {}, {}, 1, size=1)[0]
    assert waits == []
    assert found == pytest.approx(losses, rel=1e-3)
    # half types round elsewhere in a kernel; Adam makes much of it
    assert difference(masters, weights) < 0.02


def test_a_plain_step_waits_for_its_loss_alone(plain: Any) -> None:
    def job(world: Any) -> list[str]:
        config = tiny(dtype="float32")
        trainer = Trainer(Plan(), config, world, device="cuda")
        fake_gpu.waits.clear()
        assert isinstance(trainer.step(global_batch(0, 2, config)), float)
        return list(fake_gpu.waits)

    waits = md.run(job, size=1)[0]
    assert [wait.partition(":")[0] for wait in waits] == ["an event at parallel/step/late_loss.py"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changes", "plan", "what"),
    [
        ({}, {"precision": "fp16"}, "float at parallel/precision/mixed_precision.py"),
        ({"mixture": MixtureConfig(experts=2, top_k=1)}, {}, "bincount at nn/moe.py"),
    ],
    ids=["fp16", "experts"],
)
def test_what_the_host_decides_is_seen(
    changes: dict[str, Any], plan: dict[str, Any], what: str, plain: Any
) -> None:
    """So the count of waits sees something, and these stand in the docstring of start_step."""
    _, _, waits = md.run(run, "cuda", changes, plan, size=1)[0]
    assert any(wait.startswith(what) for wait in waits)


def test_shares_are_added_in_order() -> None:
    late = LateLoss()
    assert late.wait() == 0.0
    for share in (0.1, 0.2, 0.3):
        late.add(tensor(np.asarray(share)))
    assert late.done()
    assert late.wait() == 0.1 + 0.2 + 0.3
    assert LateLoss(2.5).wait() == 2.5


def test_the_copy_is_behind_the_loss_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream that is held up, and goes on to write over the number."""
    over = threading.Event()
    for name, module in fake_cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    number = fake_cupy.asarray(np.zeros((), np.float32))
    late = LateLoss()
    stream = fake_cupy.get_current_stream()
    for value in (1.5, 2.0):
        stream.put(lambda: over.wait(20))
        number[...] = value
        late.add(tensor(number))
    number[...] = 9.0
    assert not late.done()
    over.set()
    assert late.wait() == 3.5
    assert late.done()


def test_a_loss_that_nobody_asks_for_is_kept_meanwhile(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory would be another's when the copy comes."""
    done = [False]
    monkeypatch.setattr(fake_gpu.Event, "done", property(lambda event: done[0]))

    def job(world: Any) -> list[int]:
        config = tiny(dtype="float32", layers=1)
        kept = []
        trainer = Trainer(Plan(), config, world, device="cuda")
        strategy: Any = trainer.strategy
        for step in range(3):
            done[0] = step == 2
            trainer.start_step(global_batch(step, 2, config))
            kept.append(len(strategy._late))
        return kept

    assert md.run(job, size=1)[0] == [1, 2, 1]
