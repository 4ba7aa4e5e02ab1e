"""Modules and optimizers on a GPU give what they give on the CPU."""

import numpy as np
import pytest

from minidist import optim
from minidist.autograd.tensor import Parameter
from minidist.device.backend import device_of, to_device, to_host
from minidist.nn import GPT, GPTConfig, RopeScaling

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    """These tests need CuPy and a GPU."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU that CuPy can use")


@pytest.mark.parametrize(
    ("positions", "context", "pattern"),
    [("learned", 5, None), ("rotary", 5, None), ("rotary", 150, "local:64+global:1")],
)
def test_gpt(positions: str, context: int, pattern: str | None) -> None:
    config = GPTConfig(
        vocabulary=7,
        context=context,
        layers=2,
        width=8,
        heads=2,
        positions=positions,
        dtype="float64",
        attention_pattern=pattern,
        norm_eps=0.01,
        rope_scaling=RopeScaling(8.0, 0.02, 0.5, 12) if positions == "rotary" else None,
    )
    ids = np.random.default_rng(0).integers(0, 7, (3, context))
    ours = GPT(config)
    theirs = GPT(config)
    ours.initialize(0, device="cuda")
    theirs.initialize(0)
    assert device_of(ours.tokens.weight.data) == "cuda"
    assert all(
        np.array_equal(array, theirs.state_dict()[name])
        for name, array in ours.state_dict().items()
    )
    calls: list[object] = []
    ours.register_backward_hook(calls.append)
    for model in (ours, theirs):
        model.loss(ids, ids).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad is not None
        np.testing.assert_allclose(to_host(mine.grad), other.grad, rtol=1e-9, atol=1e-12)
    assert (
        np.array_equal(ours.generate([1], 10, seed=3), theirs.generate([1], 10, seed=3)) and calls
    )


@pytest.mark.parametrize("kind", ["SGD", "RMSProp", "Adam", "AdamW"])
def test_optimizers(kind: str) -> None:
    random = np.random.default_rng(0)
    start, gradient = random.standard_normal((2, 50, 30))
    results = []
    for device in ("cuda", "cpu"):
        weight = Parameter(to_device(start.copy(), device), name="w")
        optimizer = getattr(optim, kind)([weight], 0.1, weight_decay=0.1)
        for _ in range(3):
            weight.grad = to_device(gradient.copy(), device)
            norm = optim.clip_by_global_norm([weight.grad], 1.0)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        results.append((norm, to_host(weight.data)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-13)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-11)
