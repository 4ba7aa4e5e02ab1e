"""fp8 products: bytes rounded as ml_dtypes rounds them, scales that lag behind and are the same on
every rank."""

from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from kernel_checks import needs_compiler
from training import SMALL_BUCKETS, difference, global_batch, tiny

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import no_grad, tensor
from minidist.device import account, cublas, dispatch
from minidist.device.backend import to_host
from minidist.errors import ConfigError
from minidist.nn import GPT
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.precision import float8
from minidist.parallel.precision.float8 import (
    FORMATS,
    LARGEST,
    Float8,
    Scales,
    to_float8,
    to_float32,
)
from minidist.parallel.precision.mixed_precision import MixedPrecision

CONFIG = tiny(dtype="float32", layers=1)


@pytest.mark.parametrize("kind", sorted(set(FORMATS.values()), key=str))
def test_rounding(kind: np.dtype) -> None:
    """Every byte survives; numbers between are ml_dtypes' rounding; what is too large is cut off,
    NaN is not."""
    every = np.arange(256, dtype=np.uint8).view(kind)
    numbers = every[np.isfinite(every.astype(np.float32))]
    np.testing.assert_array_equal(to_float8(to_float32(numbers, 8.0), kind, 8.0), numbers)
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(to_float8(x, kind, 4.0), (x * 4).astype(kind))
    ends = to_float8(np.float32([1e30, -1e30, np.inf, np.nan]), kind, 1.0).astype(np.float32)
    np.testing.assert_array_equal(ends, [LARGEST[kind], -LARGEST[kind], LARGEST[kind], np.nan])


def test_the_scale_follows_the_history() -> None:
    scales = Scales()
    assert (
        scales.scale("x") is None and scales.store("x", np.ones(2, np.float32)).dtype == np.float32
    )
    for value, expected in ((1.0, 256.0), (3.0, 128.0), (0.5, 128.0), (500.0, 0.5)):
        scales.history["x"].append(value)
        assert scales.scale("x") == expected and expected * max(scales.history["x"]) <= 448
    for _ in range(float8.HISTORY):
        scales.history["x"].append(0.5)
    assert scales.scale("x") == 512.0  # what was large is forgotten


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    rng = np.random.default_rng(1)
    scales = Scales()
    for name in FORMATS:
        scales.history[name].append(1.0)
    x, w, b, dy = (
        rng.uniform(-1, 1, size).astype(ml_dtypes.bfloat16)
        for size in ((5, 4), (4, 3), (3,), (5, 3))
    )

    def at(name: str, array: np.ndarray) -> np.ndarray:
        scale = np.float32(scales.scale(name))
        return (array.astype(np.float32) * scale).astype(FORMATS[name]).astype(np.float32) / scale

    leaves = [tensor(array, requires_grad=True) for array in (x, w, b)]
    y = float8.linear_fp8(*leaves, scales=scales)
    np.testing.assert_array_equal(
        y.data, (at("x", x) @ at("w", w) + b.astype(np.float32)).astype(x.dtype)
    )
    y.backward(dy)
    np.testing.assert_array_equal(leaves[0].grad, (at("dy", dy) @ at("w", w).T).astype(x.dtype))
    np.testing.assert_array_equal(leaves[1].grad, (at("x", x).T @ at("dy", dy)).astype(x.dtype))
    assert scales.seen == {
        name: float(np.abs(array).max()) for name, array in (("x", x), ("w", w), ("dy", dy))
    }


def test_without_a_history_it_is_the_plain_product_and_evaluation_leaves_no_trace() -> None:
    rng = np.random.default_rng(2)
    scales = Scales()
    x, w = (
        tensor(rng.normal(size=(6, 6)).astype(ml_dtypes.bfloat16), requires_grad=True)
        for _ in range(2)
    )
    with no_grad():
        result = float8.linear_fp8(x, w, scales=scales)
    np.testing.assert_array_equal(result.data, ops.linear(x, w).data)
    assert not any(scales.seen.values())


def test_what_backward_keeps_is_one_byte() -> None:
    x = tensor(np.ones((64, 32), ml_dtypes.bfloat16), requires_grad=True)
    w = tensor(np.ones((32, 8), ml_dtypes.bfloat16), requires_grad=True)
    scales = Scales()
    scales.history["x"].append(1.0)
    with account.use(account.MemoryAccount()) as memory:
        y = float8.linear_fp8(x, w, scales=scales)
        assert memory.now["activations"] == y.data.nbytes + x.size + w.data.nbytes


@needs_compiler
@pytest.mark.parametrize("largest", [0.0, 1.0], ids=["no history", "bytes"])
def test_a_product_on_a_gpu_is_the_host_s(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, by kernels that round and restore, and cut off what is too large; nothing waits
    for the GPU."""
    cupy = fake_gpu.install(monkeypatch)
    rng = np.random.default_rng(1)
    x, w, dy = (
        rng.uniform(-3, 3, size).astype(ml_dtypes.bfloat16) for size in ((5, 8), (8, 3), (5, 3))
    )
    results = []
    multiplied = set()
    real = cublas.Products.multiply
    monkeypatch.setattr(
        cublas.Products,
        "multiply",
        lambda self, a, b, out=None: multiplied.update([a.dtype, b.dtype]) or real(self, a, b, out),
    )
    for there in (np.asarray, cupy.asarray):
        scales = Scales()
        for name in FORMATS:
            scales.history[name].append(largest)
        leaves = [tensor(there(array), requires_grad=True) for array in (x, w)]
        y = float8.linear_fp8(*leaves, scales=scales)
        assert y.node is not None and y.node.stored.dtype.itemsize == (1 if largest else 2)
        y.backward(there(dy))
        scales.store("x", there(np.array([-9, np.nan, 9], x.dtype)))  # these do not count
        scales.store("dy", there(np.array([[0.5], [np.inf]], x.dtype)))
        assert fake_gpu.waits == []
        seen = [
            np.ravel(to_host(np.asarray(v) if isinstance(v, float) else v))
            for v in scales.seen.values()
        ]
        results.append(
            [to_host(array) for array in (y.data, leaves[0].grad, leaves[1].grad)] + seen
        )
        fake_gpu.waits.clear()
    assert multiplied == {x.dtype}
    for host, device in zip(*results, strict=True):
        np.testing.assert_array_equal(host.astype(np.float32), device.astype(np.float32))
    assert [seen.item() for seen in results[1][3:]] == [
        float(np.abs(array).max()) for array in (x, w, dy)
    ]


@pytest.mark.soak  # test_late_loss.py counts the waits of other steps
@needs_compiler
def test_a_step_on_a_gpu_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To agree on scales; and it is the CPU's step."""
    fake_gpu.install(monkeypatch)
    # other ops without kernels, whose CPU build takes its time
    monkeypatch.setattr(dispatch, "DTYPES", ())

    def job(world: Any, device: str) -> tuple[list[float], Any, np.ndarray, list[str]]:
        trainer = Trainer(
            Plan(precision="fp8", accumulate=2),
            CONFIG,
            world,
            device=device,
            optimizer="sgd",
            lr=0.1,
        )
        fake_gpu.waits.clear()
        late = [trainer.start_step(global_batch(step, 4, CONFIG)) for step in range(3)]
        waits = list(fake_gpu.waits)
        return (
            [loss.wait() for loss in late],
            trainer.state_dict(),
            trainer.precision.float8.state(),
            waits,
        )  # type: ignore

    losses, weights, histories, _ = md.run(job, "cpu", size=1)[0]
    found, masters, seen, waits = md.run(job, "cuda", size=1)[0]
    assert [wait.partition(":")[0] for wait in waits] == ["get at device/backend.py"] * 3
    assert found == pytest.approx(losses, rel=2e-3)
    assert difference(masters, weights) < 5e-3
    np.testing.assert_allclose(seen, histories, rtol=0.1)
    assert (seen[..., -3:] > 0).all()


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_use_one_process_s_scales(zero: int) -> None:
    def job(world: Any, zero: int) -> tuple[np.ndarray, str, list[float], int]:
        trainer = Trainer(
            Plan(dp=world.size, zero=zero, precision="fp8", bucket_bytes=SMALL_BUCKETS),
            CONFIG,
            world,
            seed=3,
            lr=1e-2,
        )
        losses = [trainer.step(global_batch(step, 2, CONFIG)) for step in range(3)]
        state, control = (
            trainer.precision.float8.state(),
            world.ledger.sent_bytes("step").get("control", {}),
        )  # type: ignore
        digest = trainer.weights_sha256()
        trainer.close()
        return state, digest, losses, sum(control.values())

    serial = md.run(lambda world: job(world, 0), size=1)[0]
    ranks = md.run(lambda world: job(world, zero), size=3)  # rank 2 has no row
    assert len({digest for _, digest, _, _ in ranks}) == 1
    for state, _, losses, _ in ranks:
        np.testing.assert_array_equal(state, ranks[0][0])
        np.testing.assert_allclose(state, serial[0], rtol=0.05)
        # before rounding parts them: the same
        np.testing.assert_array_equal(state[..., -3], serial[0][..., -3])
        np.testing.assert_allclose(losses, serial[2], rtol=1e-2)
    assert (serial[0][..., -3:] > 0).all() and (serial[0][..., :-3] == 0).all()


def test_state_goes_into_another_run() -> None:
    first = Float8(GPT(CONFIG), None)
    second = Float8(GPT(CONFIG), None)
    for number, scales in enumerate(first.scales.values()):
        scales.seen = dict.fromkeys(FORMATS, 1.0 + number)
    first.agree()
    second.load(first.state())
    np.testing.assert_array_equal(second.state(), first.state())
    assert len(first.scales) == 4 and first.state().shape == (4, 3, float8.HISTORY)


def test_it_learns() -> None:
    """The loss falls as in bf16."""

    def learn(world: Any, precision: str) -> float:
        trainer = Trainer(Plan(precision=precision), CONFIG, world, lr=0.02)
        return [trainer.step(global_batch(0, 5, CONFIG)) for _ in range(20)][-1]

    eighth, sixteenth = (md.run(learn, name, size=1)[0] for name in ("fp8", "bf16"))
    assert eighth == pytest.approx(sixteenth, rel=0.1) and eighth < 1.7


def test_refuses() -> None:
    model = GPT(tiny(dtype="bfloat16"))
    model.initialize(0)
    with pytest.raises(ConfigError, match="call attach"):
        MixedPrecision("fp8").masters(model.parameters())
