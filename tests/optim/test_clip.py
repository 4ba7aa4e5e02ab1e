"""The global norm and clipping."""

import itertools
from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from kernel_checks import needs_compiler

import minidist as md
from minidist import optim
from minidist.device.backend import to_host
from minidist.optim import clip


def gradients(dtype: Any = "float32") -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [
        random.standard_normal(shape).astype(dtype)
        for shape in ((300, 70), (1,), (0, 4), (17,), (9000,))
    ]


def test_norm_is_the_square_root_of_the_float64_sum_of_squares() -> None:
    for dtype, tolerance in (
        ("float32", 1e-14),
        ("float64", 1e-14),
        ("float16", 1e-14),
        (ml_dtypes.bfloat16, 1e-14),
    ):
        arrays = gradients(dtype)
        exact = np.sqrt(sum(np.sum(array.astype("float64") ** 2) for array in arrays))
        assert optim.global_norm([arrays[0], None, *arrays[1:]]) == pytest.approx(
            exact, rel=tolerance
        )
    assert optim.global_norm([]) == 0.0


def test_float32_squares_are_summed_in_float64() -> None:
    """In float32 the sum would stay at 2^24, and squares of 1e25 would overflow."""
    assert optim.global_norm([np.ones(1 << 25, np.float32)]) == np.sqrt(1 << 25)
    assert optim.global_norm([np.full(4, 1e25, np.float32)]) == pytest.approx(2e25, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_bits_in_any_order_and_at_any_place_in_memory(dtype: str) -> None:
    arrays = gradients(dtype)
    norm = optim.global_norm(arrays)
    for order in itertools.permutations(arrays):
        assert optim.global_norm(order) == norm
    for shift in (1, 3, 8):  # views into one bucket, at odd addresses
        bucket = np.zeros(shift + sum(array.size for array in arrays), dtype)
        place = shift
        views = []
        for array in arrays:
            views.append(bucket[place : place + array.size].reshape(array.shape))
            views[-1][...] = array
            place += array.size
        assert optim.global_norm(views) == norm
    assert optim.global_norm([np.asfortranarray(array) for array in arrays]) == norm


def test_infinite_and_nan_gradients_give_such_a_norm() -> None:
    assert optim.global_norm([np.array([1.0, np.inf])]) == np.inf
    assert np.isnan(optim.global_norm([np.array([1.0, np.nan])]))
    assert np.isnan(optim.clip_scale(np.inf, 1.0)) and np.isnan(optim.clip_scale(np.nan, 1.0))


def test_clipping_scales_in_place_down_to_the_limit_and_never_up() -> None:
    arrays = gradients("float64")
    copies = [array.copy() for array in arrays]
    norm = optim.clip_by_global_norm([*arrays, None], 1e6)
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))
    assert optim.clip_by_global_norm(arrays, 2.5) == norm
    # the formula adds 1e-6 to the norm
    assert optim.global_norm(arrays) == pytest.approx(2.5, rel=1e-7)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_allclose(array, copy * (2.5 / (norm + 1e-6)), rtol=1e-15)


def test_scale_on_the_optimizers_way_equals_clipping_first() -> None:
    from minidist.autograd.tensor import Parameter

    results = []
    for clip_first in (True, False):
        parameters = [Parameter(np.linspace(0, 1, 40).reshape(8, 5), name="w")]
        parameters[0].grad = np.linspace(-3, 3, 40).reshape(8, 5)
        optimizer = optim.AdamW(parameters, 0.1)
        if clip_first:
            optim.clip_by_global_norm([parameters[0].grad], 1.0)
            optimizer.step()
        else:
            optimizer.step(scale=optim.clip_scale(optim.global_norm([parameters[0].grad]), 1.0))
        results.append(parameters[0].data)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_that_hold_pieces_find_the_norm_of_the_whole(size: int) -> None:
    whole = np.concatenate([array.reshape(-1) for array in gradients("float64")])

    def job(world: Any) -> tuple[float, np.ndarray, dict[str, Any]]:
        mine = np.array_split(whole, world.size)[world.rank].copy()
        with world.ledger.during("step"):
            norm = optim.clip_by_global_norm([mine], 1.0, group=world)
        return norm, mine, world.ledger.sent_bytes("step")

    results = md.run(job, size=size)
    assert len({norm for norm, _, _ in results}) == 1
    assert results[0][0] == pytest.approx(optim.global_norm([whole]), rel=1e-14)
    assert np.linalg.norm(np.concatenate([mine for _, mine, _ in results])) == pytest.approx(
        1.0, rel=1e-7
    )
    assert all(set(sent) <= {"control"} for _, _, sent in results)


def test_scratch_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks change nothing but the order of additions within a tensor."""
    arrays = gradients()
    norm = optim.global_norm(arrays)
    monkeypatch.setattr(clip, "_BLOCK", 100)
    assert optim.global_norm(arrays) == pytest.approx(norm, rel=1e-14)


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8192 * 16, 8192 * 37 + 5])
def test_blocks_computed_together_have_the_bits_of_each_alone(size: int) -> None:
    gradient = np.random.default_rng(0).standard_normal(size).astype("float32")
    alone = []
    for start in range(0, size, 8192):
        wide = gradient[start : start + 8192].astype("float64")
        alone.append(np.dot(wide, wide))
    assert [*clip.block_sums(gradient)] == alone


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64", ml_dtypes.bfloat16])
def test_on_a_gpu_norm_and_factor_stay_there(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel in the dtypes that it takes; nobody waits before somebody asks for a number."""
    cupy = fake_gpu.install(monkeypatch)
    arrays = gradients(dtype)
    want = optim.global_norm(arrays)
    squares = optim.squares_of([cupy.asarray(array) for array in arrays])
    norm = optim.norm_of(squares)
    factors = [optim.clip_scale(norm, limit) for limit in (2.5, 1e6)]
    lost = [optim.clip_scale(cupy.asarray(np.array(value)), 1.0) for value in (np.inf, np.nan)]
    assert not fake_gpu.waits
    assert (squares.dtype, squares.shape) == (np.float64, ())
    assert float(norm) == pytest.approx(want, rel=1e-6)
    assert [float(factor) for factor in factors] == pytest.approx(
        [optim.clip_scale(want, 2.5), 1.0], rel=1e-6
    )
    assert np.isnan([to_host(factor) for factor in lost]).all()
    assert optim.sum_of_squares([cupy.asarray(array) for array in arrays]) == pytest.approx(
        want**2, rel=1e-6
    )
    assert optim.sum_of_squares([cupy.asarray(arrays[1]), None]) == pytest.approx(
        float(arrays[1][0]) ** 2, rel=1e-6
    )
