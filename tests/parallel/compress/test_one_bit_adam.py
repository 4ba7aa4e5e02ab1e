"""1-bit Adam: warm-up is Adam, then the paper's second stage; what it refuses."""

from typing import Any

import numpy as np
import pytest
from training import difference, global_batch, tiny

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.comm.chunks import bounds
from minidist.errors import ConfigError
from minidist.nn import GPT
from minidist.optim import SGD, Adam, AdamW
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.scheme import GradientRun
from minidist.parallel.zero.zero1 import Zero1

N = 41
WARMUP = 4


def drawn_model(seed: int) -> GPT:
    model = GPT(tiny())
    model.initialize(seed)
    return model


def train(world: Any, text: str | None, steps: int, **options: Any) -> dict[str, np.ndarray]:
    """A tiny GPT after some steps of DDP."""
    config = tiny()
    model = drawn_model(3)
    scheme = scheme_of(text) if text else None
    strategy = DDP(model, world, bucket_bytes=2048, scheme=scheme)
    optimizer = AdamW(strategy.parameters, 1e-2)
    if scheme is not None:
        scheme.take_optimizer(optimizer)
    for step in range(steps):
        strategy.step(global_batch(step, 5, config), optimizer, **options)
    return {name: array.copy() for name, array in strategy.state_dict().items()}


def test_warm_up_is_adam_bit_for_bit() -> None:
    plain, scheme = (
        md.run(lambda world, text=text: train(world, text, 5, clip=0.5), size=3)
        for text in (None, "1-bit:warmup=5")
    )
    assert all(
        (scheme[rank][name] == plain[0][name]).all() for rank in range(3) for name in plain[0]
    )
    later = md.run(lambda world: train(world, "1-bit:warmup=4", 5, clip=0.5), size=3)
    assert difference(later[0], plain[0]) > 1e-6
    assert all(
        (later[rank][name] == later[0][name]).all() for rank in range(3) for name in later[0]
    )


def reference(given: np.ndarray, lr: float, b1: float, b2: float, eps: float) -> np.ndarray:
    """Algorithm 1 of the paper, with Adam's corrections for the start: weights from 0. given:
    (ranks, steps, n)."""
    size, steps, n = given.shape
    m, v, weights, worker, server = (np.zeros(shape) for shape in (n, n, n, (size, n), n))
    for step in range(1, steps + 1):
        if step <= WARMUP:
            gradient = given[:, step - 1].sum(axis=0)
            m = b1 * m + (1 - b1) * gradient
            v = b2 * v + (1 - b2) * gradient**2
        else:
            new = np.zeros(n)
            for chunk in map(slice, bounds(n, size), bounds(n, size)[1:]):
                for rank in range(size):
                    worker[rank, chunk] += (
                        b1 * m[chunk] / size + (1 - b1) * given[rank, step - 1, chunk]
                    )
                    sent = np.sign(worker[rank, chunk]) * np.float32(
                        np.abs(worker[rank, chunk]).mean()
                    )
                    worker[rank, chunk] -= sent
                    server[chunk] += sent
                new[chunk] = np.sign(server[chunk]) * np.float32(np.abs(server[chunk]).mean())
                server[chunk] -= new[chunk]
            m = new
        corrected = v / (1 - b2 ** min(step, WARMUP))
        weights = weights - lr * m / (1 - b1**step) / (np.sqrt(corrected) + eps)
    return weights


def sum_and_update(
    world: Any, given: np.ndarray, *, scales: tuple[float, ...] = ()
) -> tuple[np.ndarray, Any, Any]:
    """Weights of one bucket of two tensors after all steps, with errors and the ledger's bytes."""
    parameters = [Parameter(np.zeros((5, 7))), Parameter(np.zeros(6))]
    for number, parameter in enumerate(parameters):
        parameter.name = f"p{number}"
    scheme = scheme_of(f"1-bit:warmup={WARMUP},block=0")
    optimizer = Adam(parameters, 0.1)
    scheme.attach([GradientRun.whole(parameters, world, "all_reduce")])
    scheme.take_optimizer(optimizer)
    for step, gradient in enumerate(given[world.rank]):
        scale = scales[step] if scales else 1.0
        bucket = gradient * scale
        scheme.begin_step(scale)
        with world.ledger.during("warm-up" if step < WARMUP else "signs"):
            scheme.start_all_reduce(0, bucket).wait()
        parameters[0].grad = bucket[:35].reshape(5, 7)
        parameters[1].grad = bucket[35:]
        optimizer.step(scale=1 / scale)
    weights = np.concatenate([parameter.data.reshape(-1) for parameter in parameters])
    return (
        weights,
        scheme.errors,
        {phase: world.ledger.sent_bytes(phase) for phase in ("warm-up", "signs")},
    )


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_equals_the_paper_at_its_bytes(size: int) -> None:
    given = np.random.default_rng(7).normal(size=(size, 12, N)) + 0.5
    ranks = md.run(lambda world: sum_and_update(world, given), size=size)
    wanted = reference(given, 0.1, 0.9, 0.999, 1e-8)
    for weights, _, _ in ranks:
        np.testing.assert_allclose(weights, wanted, rtol=1e-6, atol=1e-9)
    sent = {
        phase: sum(
            sent[phase]["world"][verb] for _, _, sent in ranks for verb in sent[phase]["world"]
        )
        for phase in ("warm-up", "signs")
    }
    chunks = [
        stop - start for start, stop in zip(bounds(N, size), bounds(N, size)[1:], strict=False)
    ]
    assert sent == {
        "warm-up": WARMUP * 2 * (size - 1) * N * 8,
        "signs": (12 - WARMUP) * 2 * (size - 1) * sum(4 + -(-m // 8) for m in chunks),
    }


def test_the_loss_scale_changes_nothing() -> None:
    given = np.random.default_rng(8).normal(size=(2, 10, N))
    plain = md.run(lambda world: sum_and_update(world, given), size=2)[0][0]
    scaled = md.run(
        lambda world: sum_and_update(world, given, scales=(8.0,) * 3 + (64.0,) * 4 + (2.0,) * 3),
        size=2,
    )
    np.testing.assert_array_equal(scaled[0][0], plain)


def test_weights_without_variance_stay_still() -> None:
    """The second half of the numbers has no gradient in warm-up, and a sign must not move it."""
    given = np.random.default_rng(9).normal(size=(2, 10, N))
    given[:, :WARMUP, 20:] = 0
    weights = md.run(lambda world: sum_and_update(world, given), size=2)[0][0]
    assert np.abs(weights[:20]).min() > 0
    assert not weights[20:].any()


def test_the_variance_stays_after_its_steps() -> None:
    parameter = Parameter(np.zeros(3))
    optimizer = Adam([parameter], 0.1)
    optimizer.variance_steps = 2
    seen = []
    for step in range(4):
        parameter.grad = np.full(3, step + 1.0)
        optimizer.step()
        seen.append(optimizer.slots[0].state["v"].copy())
    assert (seen[1] > seen[0]).all()
    np.testing.assert_array_equal(seen[3], seen[1])


def test_what_it_refuses() -> None:
    scheme = scheme_of("1-bit")
    parameter = Parameter(np.zeros(3))
    with pytest.raises(ConfigError, match="optimizer is SGD; choose adam or adamw"):
        scheme.take_optimizer(SGD([parameter], 0.1))
    with pytest.raises(ConfigError, match="use DDP"):
        md.run(lambda world: Zero1(drawn_model(1), world, scheme=scheme_of("1-bit")), size=2)
    with pytest.raises(ConfigError, match="take_optimizer"):
        md.run(lambda world: train_without_optimizer(world), size=2)


def train_without_optimizer(world: Any) -> None:
    scheme = scheme_of("1-bit")
    scheme.attach([GradientRun.whole([Parameter(np.zeros(4))], world, "all_reduce")])
    scheme.begin_step()
    scheme.start_all_reduce(0, np.zeros(4))
