"""Products by the library itself: layouts, flags and steps against a stand-in that reads addresses
as cuBLAS does."""

from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.device import backend, cublas
from minidist.device.cublas import Products
from minidist.errors import DeviceError, KernelError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T,
    "a slice of wider rows": lambda x: x[:, :-1],
    "a slice of longer columns": lambda x: x.T[:-1],
    "every other": lambda x: x[::2, ::2],
}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_gpu.install(monkeypatch)


def laid_out(rng: Any, shape: tuple[int, int], layout: str, kind: Any) -> Any:
    """A device array of that shape, laid out so."""
    m, n = shape
    like = {
        "rows": (m, n),
        "columns": (n, m),
        "a slice of wider rows": (m, n + 1),
        "a slice of longer columns": (n, m + 1),
        "every other": (2 * m, 2 * n),
    }[layout]
    whole = fake_gpu.asarray(rng.normal(size=like).astype(kind))
    found = LAYOUTS[layout](whole)
    found = found if found.shape == shape else found[:m, :n]
    assert found.shape == shape
    return found


@given(
    m=st.integers(1, 4),
    k=st.integers(1, 5),
    n=st.integers(1, 4),
    a=st.sampled_from(sorted(LAYOUTS)),
    b=st.sampled_from(sorted(LAYOUTS)),
    kind=st.sampled_from(["float32", "float16", BF16]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_any_layout_is_numpys_product(
    m: int, k: int, n: int, a: str, b: str, kind: Any, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu.install(patch)
        rng = np.random.default_rng(seed)
        products = Products()
        x = laid_out(rng, (m, k), a, kind)
        y = laid_out(rng, (k, n), b, kind)
        want = (x.host.astype(np.float32) @ y.host.astype(np.float32)).astype(kind)
        out = fake_gpu.empty((m, n), kind)
        for result in (products.multiply(x, y), products.multiply(x, y, out)):
            np.testing.assert_allclose(
                result.host.astype(np.float64), want.astype(np.float64), rtol=1e-2, atol=1e-5
            )
        assert result is out
        copied = [layout == "every other" for layout in (a, b)]
        if not any(copied) and min(m, k, n) > 1:
            turned = products._library.calls[0][:2]
            assert turned == tuple(int("columns" in layout) for layout in (b, a))


def test_in_a_block_it_takes_this_threads_products(cupy: Any) -> None:
    """It takes the products of the GPU's arrays; products of arrays on the host stay NumPy's."""
    products = Products()
    x = fake_gpu.asarray(np.eye(2, dtype=BF16))
    backend.matmul(x, x)
    assert products._library.calls == []
    with products.instead():
        assert (backend.matmul(x, x.T).host == np.eye(2)).all()
        assert backend.matmul(np.ones((1, 2)), np.ones((2, 1))).tolist() == [[2.0]]
        assert cublas.current() is products
    assert len(products._library.calls) == 1
    assert cublas.current() is None
    products.close()
    products.close()
    assert products._library.calls[1:] == ["destroy"]


def test_what_it_does_not_take(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products()
    x = fake_gpu.asarray(np.ones((2, 3), BF16))
    with pytest.raises(ShapeError, match=r"bfloat16 \(1, 2, 3\) @ .* two matrices"):
        products.multiply(x.reshape(1, 2, 3), x.T)
    with pytest.raises(
        ShapeError, match=r"into bfloat16 \(3, 2\): it needs a contiguous bfloat16 \(2, 2\)"
    ):
        products.multiply(x, x.T, fake_gpu.empty((3, 2), BF16))
    assert (products.multiply(x[:, :0], x.T[:0]).host == 0).all()
    monkeypatch.setattr(products._library, "cublasGemmEx", lambda *args: 14)
    with pytest.raises(KernelError, match="cublasGemmEx failed with cublasStatus 14"):
        products.multiply(x, x.T)


def test_the_library_is_asked_for_by_the_name_that_cupy_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = cublas.load
    cupy = fake_gpu.install(monkeypatch)
    asked = []
    monkeypatch.setattr(
        cupy.cuda, "device", type("device", (), {"get_cublas_handle": asked.append}), raising=False
    )
    cupy.cuda.device.get_cublas_handle = lambda: asked.append("handle")
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: 13010, raising=False)
    with pytest.raises(
        DeviceError, match=r"libcublas.so.13, .* cannot be loaded: .*; train without --graph"
    ):
        load()
    assert asked == ["handle"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "float16", BF16], ids=str)
def test_on_a_gpu(kind: Any) -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    rng = np.random.default_rng(0)
    products = Products()
    for m, k, n in ((1, 1, 1), (3, 5, 2), (128, 257, 64), (1, 999, 33)):
        a, b = (rng.normal(size=shape).astype(kind) for shape in ((m, k), (k, n)))
        want = a.astype(np.float64) @ b.astype(np.float64)
        for x in (cupy.array(a), cupy.array(a.T.copy()).T):
            for y in (cupy.array(b), cupy.array(b.T.copy()).T):
                got = products.multiply(x, y).get().astype(np.float64)
                np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2 * k**0.5)
    products.close()
