"""Adam over all tensors in one launch, on a GPU's stand-in: the numbers of NumPy's passes, and
nobody waits."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from kernel_checks import needs_compiler

from minidist import optim
from minidist.device.backend import to_host
from minidist.optim import fused_adam

SHAPES = [(5, 7), (9,), (0,), (64, 3)]
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_gpu.install(monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the launchers that were asked for."""
    names: list[str] = []
    find = fused_adam.kernel
    monkeypatch.setattr(
        fused_adam,
        "kernel",
        lambda name, *arrays: find(name, *arrays) and (names.append(name) or find(name, *arrays)),
    )
    return names


def tensors(put: Any, *, gradient: Any = BF16, master: Any = np.float32) -> list[Any]:
    """Masters with gradients, on the side that `put` brings them to."""
    rng = np.random.default_rng(2)
    found = []
    for number, shape in enumerate(SHAPES):
        data = rng.normal(size=shape).astype(master)
        slope = rng.normal(size=shape).astype(gradient)
        found.append(SimpleNamespace(data=put(data), grad=put(slope), name=f"w{number}"))
    return found


def roundings(weights: list[Any], put: Any) -> list[tuple[Any, Any]]:
    return [(w.data, put(np.zeros(w.data.shape, BF16))) for w in weights]


@needs_compiler
@pytest.mark.parametrize("rule", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("gradient", [BF16, np.dtype("float32")], ids=str)
def test_the_kernel_moves_as_numpy_does(
    rule: Any, gradient: Any, cupy: Any, asked: list[str]
) -> None:
    """Weight decay on matrices alone, a scale that is a number and then one on the device, other
    rates."""
    here = tensors(np.array, gradient=gradient)
    there = tensors(cupy.asarray, gradient=gradient)
    rounded = roundings(here, np.array)
    copies = roundings(there, cupy.asarray)
    of_host, of_device = (rule(side, 0.1, weight_decay=0.3) for side in (here, there))
    for lr, scale, on_device in ((0.1, 0.5, 0.5), (0.02, 0.25, cupy.asarray(np.array(0.25)))):
        of_host.step(lr, scale, roundings=rounded)
        of_device.step(lr, on_device, roundings=copies)
    assert asked == ["adam", "adam"]
    assert not fake_gpu.waits
    for mine, theirs in zip(of_host.slots, of_device.slots, strict=True):
        np.testing.assert_allclose(
            to_host(theirs.weights.data), mine.weights.data, rtol=1e-5, atol=1e-6
        )
        for name in ("m", "v"):
            np.testing.assert_allclose(
                to_host(theirs.state[name]), mine.state[name], rtol=1e-5, atol=1e-7
            )
        assert theirs.steps == 2
    for master, copy in copies:
        np.testing.assert_array_equal(to_host(copy), to_host(master).astype(BF16))


@needs_compiler
def test_a_state_that_was_loaded_goes_on(cupy: Any, asked: list[str]) -> None:
    """The device counts updates itself; after a load it is told anew."""
    sides = [tensors(np.array), tensors(cupy.asarray), tensors(cupy.asarray)]
    host, device, later = (optim.AdamW(side, 0.1) for side in sides)
    for _ in range(3):
        host.step()
        device.step()
    later.step()
    later.load_state_dict(device.state_dict())
    for mine, theirs in zip(sides[1], sides[2], strict=True):
        theirs.data[...] = mine.data
    for optimizer in (host, device, later):
        optimizer.step()
    for one, two, three in zip(*sides, strict=True):
        np.testing.assert_allclose(to_host(two.data), one.data, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(to_host(three.data), to_host(two.data))
    assert asked == ["adam"] * 6


@needs_compiler
def test_gradients_are_not_kept(cupy: Any) -> None:
    """The tables point to them during a step alone; those of another step lie elsewhere."""
    weights = tensors(cupy.asarray)
    optimizer = optim.Adam(weights, 0.1)
    optimizer.step()
    gone = [weakref.ref(w.grad) for w in weights]
    for w, fresh in zip(weights, tensors(cupy.asarray), strict=True):
        w.grad = fresh.grad
    gc.collect()
    assert not any(ref() for ref in gone)
    before = [to_host(w.data).copy() for w in weights]
    optimizer.step()
    assert all((to_host(w.data) != old).all() for w, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("why", ["no gradient", "float64", "other counts", "two dtypes"])
def test_what_is_not_alike_takes_the_passes(why: str, cupy: Any, asked: list[str]) -> None:
    """And the numbers are NumPy's all the same."""
    sides = [
        tensors(
            put,
            gradient=np.float64 if why == "float64" else np.float32,
            master=np.float64 if why == "float64" else np.float32,
        )
        for put in (np.array, cupy.asarray)
    ]
    for side, put in zip(sides, (np.array, cupy.asarray), strict=True):
        if why == "no gradient":
            side[1].grad = None
        elif why == "two dtypes":
            side[1].grad = put(np.ones(9, BF16))
        optimizer = optim.AdamW(side, 0.1)
        optimizer.slots[0].steps = 4 if why == "other counts" else 0
        optimizer.step(scale=0.5 if put is np.array else put(np.array(0.5)))
    for mine, theirs in zip(*sides, strict=True):
        np.testing.assert_allclose(to_host(theirs.data), mine.data, rtol=1e-5, atol=1e-6)
    assert not asked


@needs_compiler
def test_pieces_of_one_buffer_begin_anywhere(cupy: Any, asked: list[str]) -> None:
    """ZeRO's pieces do so: then no kernel loads 16 bytes at a time, of the norm neither."""
    sides = []
    for put in (np.array, cupy.asarray):
        data, slopes = (
            put(np.random.default_rng(seed).normal(size=50).astype(kind))
            for seed, kind in ((0, np.float32), (1, BF16))
        )
        sides.append(
            [
                SimpleNamespace(data=data[a:b], grad=slopes[a:b], name=f"{a}")
                for a, b in ((1, 9), (9, 50))
            ]
        )
        scale = optim.clip_scale(optim.norm_of(optim.squares_of(w.grad for w in sides[-1])), 1.0)
        optim.AdamW(sides[-1], 0.1).step(scale=scale)
    for mine, theirs in zip(*sides, strict=True):
        np.testing.assert_allclose(to_host(theirs.data), mine.data, rtol=1e-5, atol=1e-6)
    assert asked == ["adam"]
