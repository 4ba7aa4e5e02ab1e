"""Arrays without data have the shapes, strides, bases and copies of NumPy's arrays."""

import random
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.device import account
from minidist.device.backend import array_module, device_of, is_array, on_host
from minidist.simulate import recording, strides
from minidist.simulate.recording import Recording
from minidist.simulate.shape_array import ShapeArray
from minidist.simulate.shape_module import module
from minidist.simulate.trace import Kernel


@pytest.fixture
def recorded() -> Iterator[Recording]:
    """What a GPU would run."""
    with recording.begun(Recording()) as begun:
        yield begun


def kernels(recorded: Recording) -> dict[Kernel, int]:
    """Return what ran since the last look."""
    seen = len(recorded.events)
    recorded.flush()
    found: list[Any] = [event.work for event in recorded.events[seen:]]  # type: ignore[union-attr]
    return {kernel: times for work in found for kernel, times in recorded.segments[work]}


def views(draw: random.Random, arrays: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same view of a real array and of one without data."""
    real, shape = arrays
    kind = draw.randrange(5)
    if kind == 0 and real.ndim:
        order = list(range(real.ndim))
        draw.shuffle(order)
        return real.transpose(order), shape.transpose(order)
    if kind == 1 and real.ndim:
        index = tuple(
            draw.choice(
                [slice(None), slice(draw.randint(-n, n), None, draw.choice([1, 2, -1])), None, ...]
            )
            if draw.random() < 0.8
            else slice(0, 1)
            for n in real.shape[:1]
        )
        return real[index], shape[index]
    if kind == 2:
        return real.reshape(-1), shape.reshape(-1)
    if kind == 3 and real.ndim:
        n = real.shape[0]
        part = slice(*(draw.choice([None, draw.randint(-n - 1, n + 1)]) for _ in range(2)))
        return real[part], shape[part]
    cut = [d for d in (2, 3, 4) if real.size and real.size % d == 0]
    if cut:
        wanted = (draw.choice(cut), -1)
        return real.reshape(wanted), shape.reshape(wanted)
    return real, shape


@given(st.integers(0, 10_000), st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
@settings(max_examples=200)
def test_views_and_copies_are_numpys(seed: int, sizes: list[int]) -> None:
    draw = random.Random(seed)
    real = np.empty(sizes, np.float32)
    found = module("cpu").empty(tuple(sizes), np.float32)
    for _ in range(4):
        before = real, found
        real, found = views(draw, (real, found))
        assert (found.shape, found.dtype, found.nbytes) == (real.shape, real.dtype, real.nbytes)
        assert found.flags.c_contiguous == real.flags.c_contiguous
        if real.size > 1:
            moved = [(n, step) for n, step in zip(real.shape, real.strides, strict=True) if n > 1]
            assert [
                (n, step) for n, step in zip(found.shape, found.strides, strict=True) if n > 1
            ] == moved
            assert np.may_share_memory(real, before[0]) == found.module.may_share_memory(
                found, before[1]
            )
            if np.may_share_memory(real, before[0]):  # else a reshape has copied
                starts = [array.__array_interface__["data"][0] for array in (real, before[0])]
                assert found.address - before[1].address == starts[0] - starts[1]


@given(st.integers(0, 10_000))
@settings(max_examples=100)
def test_indices_with_arrays_have_numpys_shape(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(3))
    index = tuple(
        draw.choice([slice(None), 0, np.zeros((2, 1), int), np.zeros(3, int)]) for _ in range(3)
    )
    real = np.empty(shape)[index]
    found = module("cuda").empty(shape)[index]
    assert found.shape == np.shape(real)
    mask = np.random.default_rng(seed).random(shape[0]) < 0.5
    assert module("cuda").empty(shape)[mask].shape == np.empty(shape)[mask].shape


def test_reshaped_refuses_what_numpy_copies() -> None:
    assert strides.reshaped((2, 3), (4, 8), (6,)) is None
    assert strides.reshaped((2, 3), (12, 4), (3, 2)) == (8, 4)
    assert strides.completed((-1, 3), 6) == (2, 3)
    with pytest.raises(ValueError, match="cannot reshape 6 elements"):
        strides.completed((4, -1), 6)


@given(st.integers(0, 10_000), st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
@settings(max_examples=200)
def test_a_pass_has_as_many_inner_loops_as_numpys(seed: int, sizes: list[int]) -> None:
    """NumPy's own iterator gives one piece for each start of its innermost loop."""
    draw = random.Random(seed)
    turned = draw.sample(range(len(sizes)), len(sizes))
    wide = np.empty([n + draw.choice([0, 0, 1]) for n in np.take(sizes, turned)], np.float32)
    view = wide[tuple(slice(n) for n in np.take(sizes, turned))].transpose(np.argsort(turned))
    other = np.broadcast_to(np.empty([draw.choice([n, n, 1]) for n in sizes], np.float32), sizes)
    pieces = sum(1 for _ in np.nditer([view, other], flags=["external_loop"]))
    assert strides.inner_loops(tuple(sizes), (view.strides, other.strides)) == pieces


def test_passes_of_a_host_tell_their_inner_loops() -> None:
    xp = module("cpu")
    with recording.begun(Recording("cpu")) as recorded:
        x = xp.empty((6, 8), np.float32)
        bias = xp.empty((8,), np.float32)
        _ = x * 2.0, x[:3] + x[3:], x.reshape(-1).sum()
        assert {kernel.size for kernel in kernels(recorded)} == {()}
        _ = x + bias, x.sum(axis=0), x.sum(axis=-1), x.max(axis=0, keepdims=True)
        assert {kernel.size for kernel in kernels(recorded)} == {(6,)}
        _ = x[:, :4] * 2.0, x[:, 4:].copy()
        x[:, 4:] = x[:, :4]
        assert {kernel.size for kernel in kernels(recorded)} == {(6,)}
        _ = x.T.copy()
        assert {kernel.size for kernel in kernels(recorded)} == {(8,)}


def test_the_account_counts_a_buffer_once() -> None:
    memory = account.MemoryAccount()
    x = module("cuda").empty((4, 6), np.float32)
    memory.hold(x[1:], "activations")
    memory.hold(x.T, "gradients")
    assert memory.now == {**dict.fromkeys(account.CATEGORIES, 0), "activations": 96, "total": 96}
    del x
    assert memory.now["total"] == 0


def test_modules_and_devices() -> None:
    for device in ("cpu", "cuda"):
        x = module(device).empty(3, "float16")
        assert is_array(x)
        assert array_module(np.zeros(1), x) is module(device)
        assert (device_of(x), on_host(x)) == (device, device == "cpu")
    with pytest.raises(TypeError, match="must be declared"):
        np.asarray(x)
    with pytest.raises(TypeError, match="know no sort"):
        _ = module("cpu").sort
    with pytest.raises(TypeError, match="its caller must declare it"):
        _ = x[x > 0]


@pytest.mark.parametrize(
    "kinds",
    [
        ("float32", "float32"),
        ("float16", "float32"),
        ("int64", "float32"),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.true_divide, np.greater, np.maximum])
def test_results_have_numpys_dtype(ufunc: np.ufunc, kinds: tuple[Any, Any]) -> None:
    a, b = (np.ones(2, kind) for kind in kinds)
    xp = module("cpu")
    assert ufunc(xp.empty(2, a.dtype), b).dtype == ufunc(a, b).dtype
    assert (xp.empty(2, a.dtype) * 2).dtype == (a * 2).dtype
    assert xp.empty((2, 2), a.dtype).sum(axis=0).dtype == np.ones((2, 2), a.dtype).sum(axis=0).dtype


def test_an_operation_is_a_kernel_with_its_bytes(recorded: Recording) -> None:
    xp = module("cuda")
    a = xp.empty((8, 16), np.float32)
    b = xp.empty((16, 4), np.float32)
    product = a @ b
    assert kernels(recorded) == {
        Kernel("matmul", "float32", 2.0 * 8 * 16 * 4, 4.0 * (128 + 64 + 32), (1, 8, 16, 4)): 1
    }
    np.multiply(product, 2.0, out=product)
    product *= 2.0
    assert kernels(recorded) == {Kernel("memory", "float32", 0, 4.0 * 2 * 32): 2}
    total = product.T[1:].sum(axis=1)
    assert kernels(recorded) == {Kernel("memory", "float32", 0, 4.0 * (24 + 3)): 1}
    total[0:2] += product[0, :2]
    # and no copy of the view to itself
    assert kernels(recorded) == {Kernel("memory", "float32", 0, 4.0 * 6): 1}
    assert total.reshape(3, 1).base is total
    assert kernels(recorded) == {}
    with recording.pause():
        assert isinstance(a + 1, ShapeArray)
    assert kernels(recorded) == {}
    module("cpu").empty(2).copy()
    assert [kernel.kind for kernel in kernels(recorded)] == ["host"]


def test_kernels_of_the_project_run_as_one(recorded: Recording) -> None:
    from minidist.autograd import ops
    from minidist.autograd.tensor import Tensor

    x, k, v = (
        Tensor(module("cuda").empty((2, 4, 32, 64), "bfloat16"), requires_grad=True)
        for _ in range(3)
    )
    y = ops.causal_attention(x, k, v)
    pairs = 2 * 4 * 32 * 32 / 2
    found = [kernel for kernel in kernels(recorded) if kernel.kind == "attention"]
    assert [kernel.flops for kernel in found] == [2 * 2 * pairs * 64]
    assert found[0].nbytes == 4 * 2 * 4 * 32 * 64 * 2 + 2 * 4 * 32 * 4
    y.backward(module("cuda").empty(y.shape, "bfloat16"))
    assert (
        sum(kernel.flops for kernel in kernels(recorded) if kernel.kind == "attention")
        == 2 * 7 * pairs * 64
    )
    assert x.grad is not None and x.grad.shape == x.shape
