"""On a real GPU: every version of every kernel against its reference in float64, at odd sizes, over
poisoned memory."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_checks import KINDS, close

from minidist.device.backend import random_bits, stream_key, to_device, to_host
from minidist.errors import KernelError
from minidist.kernels import activation, cross_entropy, dropout, softmax

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (3, 33), (7, 1000), (129, 257), (64, 4096), (5, 50_257)]


@pytest.fixture(autouse=True)
def gpu() -> None:
    """These tests need CuPy and a GPU. NaN lies in the pool first, so that what nobody writes
    shows."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU that CuPy can use")
    for size in (64, 4096, 2**20, 2**24):
        rubbish = [cupy.full(size, np.nan, np.float32) for _ in range(4)]
        rubbish.clear()


def softmax_case(x: Any, dy: Any, version: int, wide: Any) -> list[Any]:
    y = softmax.softmax(x, version=version)
    exact = to_host(y).astype(np.float64)
    return [
        (y, softmax.softmax_reference(wide(x))),
        (
            softmax.softmax_gradient(y, dy, version=version),
            softmax.softmax_gradient_reference(exact, wide(dy)),
        ),
    ]


def gelu_case(x: Any, dy: Any, version: int, wide: Any) -> list[Any]:
    bias = dy[0].copy()
    dx, _ = activation.bias_gelu_gradient(x, bias, dy, version=version)
    return [
        (
            activation.bias_gelu(x, bias, version=version),
            activation.bias_gelu_reference(wide(x), wide(bias)),
        ),
        (dx, activation.bias_gelu_gradient_reference(wide(x), wide(bias), wide(dy))[0]),
    ]


def swiglu_case(x: Any, dy: Any, version: int, wide: Any) -> list[Any]:
    got = activation.swiglu_gradient(x, dy, x, version=version)
    want = activation.swiglu_gradient_reference(wide(x), wide(dy), wide(x))
    return [
        (activation.swiglu(x, dy, version=version), activation.swiglu_reference(wide(x), wide(dy))),
        *zip(got, want, strict=True),
    ]


def cross_entropy_case(x: Any, dy: Any, version: int, wide: Any) -> list[Any]:
    targets = np.random.default_rng(1).integers(0, x.shape[1], x.shape[0])
    got = cross_entropy.cross_entropy(x, to_device(targets, "cuda"), scale=1.0, version=version)
    return list(zip(got, cross_entropy.cross_entropy_reference(wide(x), targets, 1.0), strict=True))


def dropout_case(x: Any, dy: Any, version: int, wide: Any) -> list[Any]:
    y = dropout.residual_dropout(x, dy, rate=0.3, key=int(stream_key("layer", 1)), version=version)
    bits = random_bits("layer", 1, np.arange(x.size).reshape(x.shape))
    return [(y, dropout.residual_dropout_reference(wide(x), wide(dy), bits, 0.3))]


CASES = {
    "softmax": (softmax_case, softmax.VERSIONS),
    "gelu": (gelu_case, activation.VERSIONS),
    "swiglu": (swiglu_case, activation.VERSIONS),
    "dropout": (dropout_case, dropout.VERSIONS),
    "cross_entropy": (cross_entropy_case, cross_entropy.VERSIONS),
}
ADDING = ("softmax", "cross_entropy")  # what divides by the sum of a row


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_each_version_is_the_reference(name: str, kind: str, shape: tuple[int, int]) -> None:
    case, versions = CASES[name]
    dtype, bound = KINDS[kind]
    rng = np.random.default_rng()
    x, dy = (to_device((rng.normal(size=shape) * 3).astype(dtype), "cuda") for _ in range(2))
    done = 0
    for version in versions:
        try:
            results = case(x, dy, version, lambda array: to_host(array).astype(np.float64))
        except KernelError as error:
            assert "take version" in str(error)  # rows that are not whole packs
            continue
        done += 1
        for got, want in results:
            largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
            # below it fewer digits are left
            scale = max(largest, float(ml_dtypes.finfo(got.dtype).smallest_normal))
            # __expf is off by more than exp. Version 1 adds a row up one by one: n roundings of
            # 2^-24 at most.
            added = shape[1] * 2.0**-24 if version == 1 and name in ADDING else 0.0
            close(to_host(got), want, bound * 4 + added, scale)
    assert done
