"""Test what optimizers share: blocks, flat shards, skipped tensors, decay, saving, errors."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minidist import optim
from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.errors import ConfigError, DataError, DtypeError, ShapeError
from minidist.optim import optimizer as shared

KINDS = {
    "sgd": lambda p, **o: optim.SGD(p, 0.1, weight_decay=0.1, **o),
    "momentum": lambda p, **o: optim.SGD(p, 0.1, momentum=0.9, **o),
    "rmsprop": lambda p, **o: optim.RMSProp(p, 0.01, weight_decay=0.1, **o),
    "adam": lambda p, **o: optim.Adam(p, 0.01, weight_decay=0.1, **o),
    "adamw": lambda p, **o: optim.AdamW(p, 0.01, weight_decay=0.1, **o),
}


def parameters(*shapes: tuple[int, ...], dtype: Any = "float64") -> list[Parameter]:
    random = np.random.default_rng(1)
    return [
        Parameter(random.standard_normal(shape).astype(dtype), name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]


def give_gradients(tensors: list[Any], step: int) -> None:
    random = np.random.default_rng(100 + step)
    for tensor in tensors:
        tensor.grad = random.standard_normal(tensor.data.shape).astype(tensor.data.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_any_block_size_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (1, 7, 1000):
        monkeypatch.setattr(shared, "BLOCK", block)
        tensors = parameters((5, 9), (0, 3), (4,))
        optimizer = KINDS[kind](tensors)
        for step in range(3):
            give_gradients(tensors, step)
            optimizer.step(scale=0.5)
        results.append(np.concatenate([tensor.data.reshape(-1) for tensor in tensors]))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("kind", KINDS)
def test_flat_shards_give_the_same_bits_as_whole_tensors(kind: str) -> None:
    """A shard is anything with .data and .grad; it is told whether to decay, since it has lost its
    dims."""
    whole = parameters((6, 5))
    flat = whole[0].data.copy().reshape(-1)
    shards = [
        SimpleNamespace(data=flat[start : start + 8], grad=None, name=f"s{start}")
        for start in range(0, 30, 8)
    ]
    ours = KINDS[kind](whole)
    theirs = KINDS[kind](shards, decay=lambda shard: True)
    for step in range(3):
        give_gradients(whole, step)
        for i, shard in enumerate(shards):
            shard.grad = np.reshape(whole[0].grad, -1)[8 * i : 8 * i + 8]  # type: ignore[arg-type]
        ours.step()
        theirs.step()
    assert np.array_equal(whole[0].data.reshape(-1), flat)
    theirs.zero_grad()
    assert all(shard.grad is None for shard in shards)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_only_read_and_weights_change_in_place(kind: str) -> None:
    tensors = parameters((3, 4), dtype="float32")
    optimizer = KINDS[kind](tensors)
    before = tensors[0].data
    give_gradients(tensors, 0)
    gradient = tensors[0].grad
    assert gradient is not None
    copy = gradient.copy()
    gradient.flags.writeable = False
    optimizer.step(scale=0.3)
    assert tensors[0].data is before and np.array_equal(gradient, copy)


def test_a_tensor_without_gradient_rests_and_counts_its_own_steps() -> None:
    both = parameters((2, 2), (2, 2))
    alone = parameters((2, 2), (2, 2))
    first = optim.Adam(both, 0.1)
    second = optim.Adam(alone[1:], 0.1)
    give_gradients(both, 0)
    both[1].grad = None
    rested = both[1].data.copy()
    first.step()
    assert np.array_equal(both[1].data, rested)
    give_gradients(both, 1)
    alone[1].grad = both[1].grad
    first.step()
    second.step()
    # its first step, so corrected as a first step
    assert np.array_equal(both[1].data, alone[1].data)


def test_only_tensors_of_two_dims_decay_unless_told_otherwise() -> None:
    tensors = parameters((3, 3), (3,))
    before = [tensor.data.copy() for tensor in tensors]
    optimizer = optim.AdamW(tensors, 0.5, weight_decay=0.1)
    for tensor in tensors:
        tensor.grad = np.zeros_like(tensor.data)
    optimizer.step()
    np.testing.assert_allclose(tensors[0].data, before[0] * 0.95, rtol=1e-15)
    assert np.array_equal(tensors[1].data, before[1])
    named = optim.AdamW(tensors, 0.5, weight_decay=0.1, decay=lambda weights: weights.name == "w1")  # type: ignore[attr-defined]
    assert [slot.decays for slot in named.slots] == [False, True]


def test_lr_of_a_step_replaces_the_usual_one() -> None:
    tensors = parameters((4,))
    before = tensors[0].data.copy()
    optimizer = optim.SGD(tensors, 1.0)
    tensors[0].grad = np.ones(4)
    optimizer.step(lr=0.25)
    np.testing.assert_allclose(tensors[0].data, before - 0.25, rtol=1e-15)
    optimizer.step()
    np.testing.assert_allclose(tensors[0].data, before - 1.25, rtol=1e-14)


def test_nesterov_looks_ahead() -> None:
    """p -= lr (g + momentum u) with u = momentum u + g."""
    tensors = parameters((3,))
    p = tensors[0].data.copy()
    u = np.zeros(3)
    optimizer = optim.SGD(tensors, 0.1, momentum=0.8, nesterov=True)
    for step in range(4):
        g = tensors[0].grad = np.cos(np.arange(3.0) + step)
        optimizer.step()
        u = 0.8 * u + g
        p = p - 0.1 * (g + 0.8 * u)
        np.testing.assert_allclose(tensors[0].data, p, rtol=1e-13)


@pytest.mark.parametrize("low", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_gradients_beside_float32_master_weights(low: Any) -> None:
    exact = parameters((40, 5), dtype="float32")
    rounded = parameters((40, 5), dtype="float32")
    give_gradients(exact, 0)
    gradient = exact[0].grad
    assert gradient is not None
    exact[0].grad = gradient.astype(low).astype(np.float32)
    shard = SimpleNamespace(data=rounded[0].data, grad=gradient.astype(low), name="master")
    optim.AdamW(exact, 0.1).step(scale=2.0**-10)
    optim.AdamW([shard], 0.1).step(scale=2.0**-10)
    assert np.array_equal(exact[0].data, shard.data)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "gradients"),
    [("f4", "f2"), ("f4", ml_dtypes.bfloat16), ("f4", "f4"), ("f4", "f8"), ("f8", "f8")],
    ids=str,
)
def test_the_other_byte_order_gives_the_same_values(
    weights: Any, gradients: Any, kind: str
) -> None:
    """The byte order is that of gradients, and of weights with their state; also for squares and
    clipping."""

    def run(weights: np.dtype[Any], gradients: np.dtype[Any]) -> tuple[np.ndarray, float]:
        random = np.random.default_rng(0)
        shard = SimpleNamespace(
            data=random.standard_normal((40, 5)).astype(weights), grad=None, name="master"
        )
        optimizer = KINDS[kind]([shard])
        for _ in range(3):
            shard.grad = (random.standard_normal((40, 5)) * 2.0**-12).astype(gradients)
            norm = optim.clip_by_global_norm([shard.grad], 0.002)
            optimizer.step(scale=2.0**-10)
        optimizer.load_state_dict(optimizer.state_dict())
        return shard.data, norm

    ours = np.dtype(weights)
    theirs = np.dtype(gradients)
    expected, length = run(ours, theirs)
    for pair in (
        (ours, theirs.newbyteorder()),
        (ours.newbyteorder(), theirs),
        (ours.newbyteorder(), theirs.newbyteorder()),
    ):
        found, norm = run(*pair)
        assert found.dtype == pair[0] and np.array_equal(found, expected) and norm == length


def test_huge_gradients_scaled_down_do_not_overflow() -> None:
    tensors = parameters((2,), dtype="float32")
    tensors[0].grad = np.full(2, 1e25, np.float32)  # its square is beyond float32
    optim.Adam(tensors, 0.1).step(scale=1e-25)
    assert np.isfinite(tensors[0].data).all()


def test_state_is_counted_as_optimizer_memory() -> None:
    with account.use(account.MemoryAccount()) as memory:
        tensors = parameters((100, 10), dtype="float32")
        optimizer = optim.AdamW(tensors, 0.1)
        assert memory.now["optimizer"] == 2 * memory.now["parameters"] == 8000
        assert set(optimizer.state_arrays()) == {"w0/m", "w0/v"}
        assert not optim.SGD(tensors, 0.1).state_arrays()


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_continues_to_the_bit(kind: str) -> None:
    ours = parameters((3, 4), (2,))
    theirs = parameters((3, 4), (2,))
    first = KINDS[kind](ours)
    second = KINDS[kind](theirs)
    for step in range(2):
        give_gradients(ours, step)
        first.step()
    saved = first.state_dict()
    for mine, other in zip(ours, theirs, strict=True):
        other.data[...] = mine.data
    second.load_state_dict(saved)
    for step in range(2, 4):
        for tensors, optimizer in ((ours, first), (theirs, second)):
            give_gradients(tensors, step)
            optimizer.step()
    assert all(
        np.array_equal(mine.data, other.data) for mine, other in zip(ours, theirs, strict=True)
    )
    # a copy, not a view
    assert int(saved["w0/steps"]) == 2 and int(first.state_dict()["w0/steps"]) == 4


def test_state_dict_is_checked() -> None:
    optimizer = optim.Adam(parameters((2, 2)), 0.1)
    saved = optimizer.state_dict()
    with pytest.raises(DataError, match="lacks 'w0/m'"):
        optimizer.load_state_dict({name: array for name, array in saved.items() if name != "w0/m"})
    with pytest.raises(DataError, match="unexpected 'w0/x'"):
        optimizer.load_state_dict({**saved, "w0/x": saved["w0/m"]})
    with pytest.raises(DataError, match=r"saved w0/v is float32 \(2, 2\), expected float64"):
        optimizer.load_state_dict({**saved, "w0/v": saved["w0/v"].astype("float32")})
    with pytest.raises(DataError, match=r"saved w0/v is >f8 \(2, 2\), expected float64"):
        optimizer.load_state_dict({**saved, "w0/v": saved["w0/v"].astype(">f8")})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: optim.Adam(p, -1.0), "lr is -1.0"),
        (lambda p: optim.Adam(p, float("nan")), "lr is nan"),
        (
            lambda p: optim.Adam(p, 0.1, betas=(0.9, 1.0)),
            r"betas\[1\] is 1.0; it must be at least 0 and below 1",
        ),
        (lambda p: optim.AdamW(p, 0.1, eps=-1e-8), "eps"),
        (lambda p: optim.SGD(p, 0.1, momentum=1.5), "momentum is 1.5"),
        (lambda p: optim.RMSProp(p, 0.1, alpha=-0.1), "alpha"),
        (lambda p: optim.SGD([], 0.1), "no parameters"),
        (lambda p: optim.SGD(p, 0.1, weight_decay=float("inf")), "weight_decay"),
        (
            lambda p: optim.SGD(p, 0.1, nesterov=True),
            "nesterov needs a momentum, but the momentum is 0",
        ),
        (lambda p: optim.SGD([*p, *p], 0.1), "two tensors have the name 'w0'"),
    ],
)
def test_bad_options_are_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(parameters((2,)))


def test_bad_tensors_are_named() -> None:
    with pytest.raises(DtypeError, match="w0 is bfloat16; optimize float32"):
        optim.Adam(parameters((2,), dtype=ml_dtypes.bfloat16), 0.1)
    half = SimpleNamespace(data=np.ones(4, ">f2"), grad=None, name="half")
    with pytest.raises(DtypeError, match="half is >float16; optimize float32"):
        optim.Adam([half], 0.1)
    shard = SimpleNamespace(data=np.ones((4, 4)), grad=np.ones(4), name="shard")
    with pytest.raises(ShapeError, match="shard is"):
        optim.Adam([shard], 0.1).step()
    shard = SimpleNamespace(data=np.ones((4, 4)).T[::2], grad=np.ones((2, 4)), name="shard")
    with pytest.raises(ConfigError, match="shard is not contiguous"):
        optim.Adam([shard], 0.1).step()
