"""Cross-entropy: values, huge logits, divisors that make shards add up, errors."""

import fake_gpu
import numpy as np
import pytest
from kernel_checks import needs_compiler

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.device.backend import to_host
from minidist.errors import DtypeError, ShapeError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 5, 7))
TARGETS = RNG.integers(0, 7, size=(2, 5))


def test_values_and_divisor():
    log_p = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    each = -np.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
    assert ops.cross_entropy(LOGITS, TARGETS).item() == pytest.approx(each.mean(), rel=1e-14)
    assert ops.cross_entropy(LOGITS, TARGETS, divisor=40).item() == pytest.approx(
        each.sum() / 40, rel=1e-14
    )


@pytest.mark.parametrize("size", [1e5, 1e9, 1e30])
def test_large_logits_do_not_swallow_the_logarithm(size: float) -> None:
    """32 equal ones: log 32, however large, and a gradient of 1/32."""
    x = tensor(np.full((1, 32), size, np.float32), requires_grad=True)
    loss = ops.cross_entropy(x, np.zeros(1, int))
    assert loss.item() == pytest.approx(np.log(32), rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(x.grad[0, 1:], 1 / 32, rtol=1e-6)


def test_shards_with_the_global_divisor_add_up():
    whole = tensor(LOGITS, requires_grad=True)
    loss = ops.cross_entropy(whole, TARGETS)
    loss.backward()
    total = 0.0
    for row in range(2):
        part = tensor(LOGITS[row], requires_grad=True)
        shard = ops.cross_entropy(part, TARGETS[row], divisor=10)
        shard.backward()
        total += shard.item()
        np.testing.assert_allclose(part.grad, whole.grad[row], rtol=1e-14)
    assert total == pytest.approx(loss.item(), rel=1e-14)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_huge_logits(kind):
    x = tensor(
        np.array([[1e30, 0.0, -1e30], [-1e30, -1e30, 0.0], [-np.inf, 0.0, 0.0]], kind),
        requires_grad=True,
    )
    loss = ops.cross_entropy(x, np.array([0, 2, 1]), divisor=1)
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2.0), rel=1e-6)
    np.testing.assert_allclose(x.grad, [[0, 0, 0], [0, 0, 0], [0, -0.5, 0.5]], atol=1e-7)


def test_no_tokens():
    assert ops.cross_entropy(np.ones((0, 3)), np.ones(0, int), divisor=8).item() == 0.0


def test_errors():
    with pytest.raises(DtypeError, match="token ids .integers., not float64"):
        ops.cross_entropy(LOGITS, TARGETS * 1.0)
    with pytest.raises(
        ShapeError, match=r"targets \(5,\) do not fit logits \(2, 5, 7\); they need shape \(2, 5\)"
    ):
        ops.cross_entropy(LOGITS, TARGETS[0])
    for wrong in (-1, 7):
        with pytest.raises(
            ShapeError, match=r"outside the vocabulary, which has 0\.\.6; logits \(2, 5, 7\)"
        ):
            ops.cross_entropy(LOGITS, np.full((2, 5), wrong))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_targets_on_the_host_of_logits_on_a_gpu(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernel and without: the numbers of a CPU, nobody waits, and a wrong target is an error at
    once."""
    cupy = fake_gpu.install(monkeypatch)
    results = []
    for put in (np.array, cupy.asarray):
        x = tensor(put(LOGITS.astype(dtype)), requires_grad=True)
        loss = ops.cross_entropy(x, TARGETS)
        loss.backward()
        results.append((loss.data, x.grad))
    assert not fake_gpu.waits
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(to_host(got), want, rtol=1e-5)
    with pytest.raises(ShapeError, match="outside the vocabulary"):
        ops.cross_entropy(x, TARGETS + 1)
