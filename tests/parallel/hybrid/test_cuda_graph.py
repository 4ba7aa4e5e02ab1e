"""A captured step over the stand-in: the eager step's numbers to the bit, whatever differs from
step to step."""

from typing import Any

import fake_gpu
import numpy as np
import pytest
from kernel_checks import needs_compiler
from training import global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.errors import ConfigError, KernelError, ShapeError
from minidist.nn import GPTConfig, RopeScaling
from minidist.nn.config import MixtureConfig
from minidist.parallel.hybrid.cuda_graph import WARM_UP, CapturedStep, Given
from minidist.parallel.hybrid.hybrid import Plan, Trainer

GPT = {"dropout": 0.2, "tied": True, "heads": 1}
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "silu", "kv_heads": 1}
LLAMA |= {"norm_eps": 0.01, "rope_theta": 500.0, "rope_scaling": RopeScaling(8.0, 0.02, 0.5, 12)}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_gpu.install(monkeypatch)


def small(**changes: Any) -> GPTConfig:
    """One layer; float32 masters."""
    return tiny(**{"dtype": "float32", "layers": 1, "context": 4, **changes})


def trainer_of(world: Any, config: GPTConfig, **options: Any) -> Trainer:
    """With a rate that changes at each step."""
    plan = {
        name: options.pop(name)
        for name in ("accumulate", "checkpoint_blocks", "precision")
        if name in options
    }
    return Trainer(
        Plan(**{"precision": "bf16", **plan}),
        config,
        world,
        **{
            "device": "cuda",
            "lr": 1e-2,
            "clip": 0.5,
            "lr_schedule": "cosine",
            "warmup": 3,
            "steps": 9,
            **options,
        },
    )


def run(
    world: Any, config: GPTConfig, captured: bool, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Losses, weights, the optimizer's state and what was waited for, of so many steps."""
    with account.use(account.MemoryAccount()):
        trainer = trainer_of(world, config, **options)
        step: Any = CapturedStep(trainer, warm_up=1) if captured else trainer
        rows = options.get("accumulate", 1)
        fake_gpu.waits.clear()
        losses = [step.start_step(global_batch(number, rows, config)) for number in range(steps)]
        waits = list(fake_gpu.waits)
        assert not captured or step.launches == steps - 1
        return {
            "losses": [late.wait() for late in losses],
            "waits": waits,
            "weights": trainer.state_dict(),
            "state": trainer.optimizer.state_dict(),
            "steps": trainer.steps_done,
        }


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (GPT, {}),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [
                (
                    LLAMA,
                    {"optimizer": "adam", "clip": None, "optimizer_options": {"weight_decay": 0.1}},
                ),
                ({"dropout": 0.1}, {"accumulate": 2, "checkpoint_blocks": "all"}),
            ]
        ),
    ],
    ids=["gpt", "llama", "passes"],
)
def test_a_captured_step_is_the_eager_step(
    changes: dict[str, Any], options: dict[str, Any], cupy: Any
) -> None:
    """Batch, rate and dropout's masks differ at each step, and the update is counted: no bit is
    apart, and no wait."""
    config = small(**changes)
    eager, captured = (md.run(run, config, how, 3, options, size=1)[0] for how in (False, True))
    assert captured["losses"] == eager["losses"]
    assert len(set(captured["losses"])) == 3
    same(captured["weights"], eager["weights"])
    same(captured["state"], eager["state"])
    assert captured["waits"] == []
    assert captured["steps"] == 3


@pytest.mark.soak
@needs_compiler
def test_eager_work_between_launches(cupy: Any) -> None:
    """An evaluation, and a state that is loaded: the next launch goes on from there."""
    config = small()

    def job(world: Any) -> list[Any]:
        first, again = (trainer_of(world, config) for _ in range(2))
        step = CapturedStep(first, warm_up=1)
        results = []
        for number in range(3):
            step.step(global_batch(number, 2, config))
        batch = [global_batch(0, 2, config)]
        results.append(first.evaluate(batch) == first.evaluate(batch))
        for name, parameter in again.model.named_parameters():
            parameter.data[...] = dict(first.model.named_parameters())[name].data
        for mine, master in zip(again.strategy.parameters, first.strategy.parameters, strict=True):
            mine.data[...] = master.data
        again.optimizer.load_state_dict(first.optimizer.state_dict())
        for trainer in (first, again):  # as after a pause of 5 updates
            trainer.optimizer.load_state_dict(
                {
                    name: np.asarray(9, np.int64) if name.endswith("/steps") else array
                    for name, array in trainer.optimizer.state_dict().items()
                }
            )
        again.steps_done = first.steps_done
        losses = [each.step(global_batch(3, 2, config)) for each in (step, again)]
        same(first.state_dict(), again.state_dict())
        return [*results, losses[0] == losses[1]]

    assert md.run(job, size=1)[0] == [True, True]


@needs_compiler
def test_a_host_read_ends_the_capture(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says so; and the stream can be used again."""
    config = small(context=2)
    planted = {
        "item": lambda x: x.item(),
        "a copy from the host": lambda x: fake_gpu.asarray(np.zeros(3)),
    }

    def job(world: Any) -> None:
        trainer = trainer_of(world, config)
        step = CapturedStep(trainer, warm_up=1)
        update = trainer.precision.update
        step.step(global_batch(0, 1, config))
        for what, reads in planted.items():

            def reading(optimizer: Any, counted: Any, reads: Any = reads, **options: Any) -> None:
                reads(counted.squares())
                update(optimizer, counted, **options)

            monkeypatch.setattr(trainer.precision, "update", reading)
            with pytest.raises(
                KernelError, match=f"cannot be captured: .*{what}; train without --graph"
            ):
                step.step(global_batch(1, 1, config))
            assert fake_gpu.Graph.captured is None

    md.run(job, size=1)


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, {"device": "cpu"}, "its arrays are on the cpu"),
        ({}, {"precision": "fp16"}, "precision fp16: fp16's loss scale is the host's"),
        ({}, {"precision": "fp32"}, "precision fp32"),
        ({}, {"optimizer": "sgd"}, "take adamw or adam"),
        ({"width": 258, "heads": 2}, {}, "heads of 129 columns"),
        (
            {"context": 128, "attention_pattern": "local:64"},
            {},
            "an attention pattern: its mask is copied",
        ),
        ({"mixture": MixtureConfig(experts=2, top_k=1)}, {}, "experts: the host reads"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_cannot_be_captured_is_refused(
    changes: dict[str, Any], options: dict[str, Any], why: str, cupy: Any
) -> None:
    def job(world: Any) -> None:
        trainer = trainer_of(world, small(**changes), **options)
        with pytest.raises(ConfigError, match=f"--graph: this step cannot be captured: .*{why}"):
            CapturedStep(trainer)

    md.run(job, size=1)


def test_several_ranks_are_refused(cupy: Any) -> None:
    def job(world: Any) -> None:
        trainer = Trainer(Plan(dp=2, precision="bf16"), small(), world, device="cuda")
        with pytest.raises(ConfigError, match="what ranks send each other"):
            CapturedStep(trainer)
        trainer.close()

    md.run(job, size=2)


def test_batches_that_do_not_fit(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape; an id that the vocabulary has not, which the graph would not look for."""
    config = small()
    monkeypatch.setattr(CapturedStep, "_run", lambda step: None)

    def job(world: Any) -> None:
        step = CapturedStep(trainer_of(world, config))
        step.step(global_batch(0, 2, config))
        with pytest.raises(ShapeError, match=r"inputs 0 is int64 \(3, 4\), but was int64 \(2, 4\)"):
            step.start_step(global_batch(1, 3, config))
        inputs, targets = global_batch(1, 2, config)
        with pytest.raises(ShapeError, match="captured step: targets: positions"):
            step.start_step((inputs, targets + config.vocabulary))

    md.run(job, size=1)


def test_what_is_given_is_copied_once_and_kept_until_it_is_read(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places in pinned memory take turns; one that the GPU still reads is waited for."""
    done = [True]
    monkeypatch.setattr(fake_gpu.Event, "done", property(lambda event: done[0]))
    like = {"a": np.arange(3, dtype=np.int32), "b": np.ones((2, 5))}
    given = Given(like)
    copies = []
    monkeypatch.setattr(
        fake_gpu.ndarray,
        "set",
        lambda array, host, stream: (copies.append(host), array.host.__setitem__(..., host)),
    )
    for turn in range(3):
        given.send({"a": like["a"] + turn, "b": like["b"] * turn})
        assert given.there["a"].host.tolist() == [turn, turn + 1, turn + 2]
        assert (given.there["b"].host == turn).all()
        assert given.there["b"].data.ptr % 8 == 0
    assert [copy is copies[0] for copy in copies] == [True, False, True]
    assert fake_gpu.waits == []
    done[0] = False
    given.send(like)
    assert [wait.partition(" at ")[0] for wait in fake_gpu.waits] == ["an event"]


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (GPT, {}),
        (LLAMA, {"optimizer": "adam", "clip": None}),
        ({"dropout": 0.1}, {"accumulate": 2}),
    ],
    ids=str,
)
def test_on_a_gpu_launches_are_the_steps_they_were_captured_from(
    changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """The same code, captured after two steps and never: no bit apart over ten steps. And the eager
    step's numbers, but for what another algorithm of a product rounds otherwise."""
    gpu = pytest.importorskip("cupy", reason="needs CuPy")
    if not gpu.is_available():
        pytest.skip("needs a GPU")
    config = tiny(
        **{
            "dtype": "float32",
            "layers": 3,
            "width": 64,
            "heads": 4,
            "context": 64,
            "vocabulary": 101,
            **changes,
        }
    )

    def job(world: Any) -> list[dict[str, Any]]:
        found = []
        for how in ("captured", "never", "eager"):
            trainer = trainer_of(world, config, **options)
            step: Any = (
                trainer
                if how == "eager"
                else CapturedStep(trainer, warm_up=99 if how == "never" else WARM_UP)
            )
            losses = [step.start_step(global_batch(number, 8, config)) for number in range(10)]
            found.append(
                {"losses": [late.wait() for late in losses], "weights": trainer.state_dict()}
            )
        return found

    captured, never, eager = md.run(job, size=1)[0]
    assert captured["losses"] == never["losses"]
    same(captured["weights"], never["weights"])
    assert captured["losses"] == pytest.approx(eager["losses"], rel=2e-3)
