"""HostProducts by a library with CBLAS's interface: NumPy's own BLAS stands in for MKL."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from minidist.device import backend, blas

SHAPES = [(256, 130, 140), (1, 2048, 2048), (2048, 2048, 1), (129, 257, 511)]


@pytest.fixture(scope="module")
def products() -> blas.HostProducts:
    found = [
        library["filepath"]
        for library in threadpoolctl.threadpool_info()
        if "openblas" in library["filepath"]
    ]
    if not found:
        pytest.skip("NumPy's BLAS here is not OpenBLAS")
    library = ctypes.CDLL(found[0])
    for suffix, integer in (("64_", ctypes.c_int64), ("", ctypes.c_int)):
        if hasattr(library, f"scipy_cblas_sgemm{suffix}"):
            return blas.HostProducts(
                SimpleNamespace(
                    cblas_sgemm=getattr(library, f"scipy_cblas_sgemm{suffix}"),
                    cblas_dgemm=getattr(library, f"scipy_cblas_dgemm{suffix}"),
                ),
                integer,
            )
    pytest.skip("NumPy's OpenBLAS has no CBLAS of SciPy's names")


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """The same numbers by rows, by columns, within wider rows, and with gaps in both dims."""
    height, width = x.shape
    wider = np.zeros((height, width + 7), x.dtype)
    gaps = np.zeros((2 * height, 3 * width), x.dtype)
    wider[:, 3:-4] = x
    gaps[::2, ::3] = x
    return [x, np.asfortranarray(x), wider[:, 3:-4], gaps[::2, ::3]]


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_layout_gives_the_product(
    products: blas.HostProducts, shape: tuple[int, int, int], kind: str
) -> None:
    (m, k, n) = shape
    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k)).astype(kind)
    b = rng.standard_normal((k, n)).astype(kind)
    expected = a.astype("float64") @ b.astype("float64")
    taken = 0
    for left in layouts(a):
        for right in layouts(b):
            out = np.full((m, n), np.nan, kind)
            for result in (products.multiply(left, right), products.multiply(left, right, out)):
                if result is None:
                    continue
                taken += 1
                np.testing.assert_allclose(
                    result, expected, rtol=0, atol=2e-3 if kind == "float32" else 1e-11
                )
                assert result.flags.c_contiguous and result.dtype == kind
    # three layouts of each have whole rows or columns; both with and without `out`
    assert taken >= 18


def test_what_is_left_to_numpy(products: blas.HostProducts) -> None:
    a = np.ones((512, 256), np.float32)
    b = np.ones((256, 64), np.float32)
    square = np.ones((256, 256), np.float32)
    assert products.multiply(a, b) is not None
    assert products.multiply(a[:8], b) is None, "small"
    assert products.multiply(a[None], b[None]) is None, "stacked"
    assert products.multiply(a.astype(np.int64), b.astype(np.int64)) is None
    assert products.multiply(a, b.astype(np.float64)) is None
    assert products.multiply(a, np.ones((255, 100), np.float32)) is None, (
        "NumPy says that they do not fit"
    )
    assert products.multiply(square, square, square) is None, (
        "its result would overwrite what it reads"
    )
    assert products.multiply(a, b, np.empty((512, 128), np.float32)[:, ::2]) is None
    assert products.multiply(a, b, np.empty((512, 64), np.float64)) is None
    assert products.multiply(np.broadcast_to(a[:1], (512, 256)), b) is None, (
        "rows that lie upon each other"
    )


def test_matmul_takes_it_and_low_precision_too(
    products: blas.HostProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def counted(a: Any, b: Any, out: Any = None) -> Any:
        asked.append((a.dtype.name, a.shape))
        return products.multiply(a, b, out)

    monkeypatch.setattr(blas, "_in_use", SimpleNamespace(multiply=counted))
    rng = np.random.default_rng(0)
    a = rng.standard_normal((256, 128)).astype("float32")
    b = rng.standard_normal((128, 256)).astype("float32")
    np.testing.assert_allclose(backend.matmul(a, b), a @ b, atol=1e-4)
    half = backend.matmul(a.astype("float16"), b.astype("float16"))
    assert half.dtype == np.float16 and [kind for kind, _ in asked] == [
        "float32",
        "float16",
        "float32",
    ]
    with pytest.raises(ValueError, match="mismatch"):
        backend.matmul(a, a)


def test_only_on_an_intel_processor_and_where_pip_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    for name, there in (("Intel(R) Xeon(R) Processor", True), ("AMD EPYC", False)):
        monkeypatch.setattr(blas, "processor", lambda name=name: name)
        (tmp_path / "lib" / "libmkl_rt.so.3").unlink(missing_ok=True)
        blas.find.cache_clear()
        assert blas.find(str(tmp_path)) is None
        (tmp_path / "lib" / "libmkl_rt.so.3").touch()
        blas.find.cache_clear()
        assert (blas.find(str(tmp_path)) is not None) is there
    blas.find.cache_clear()


def test_a_library_that_cannot_be_loaded_and_ranks_with_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libmkl_rt.so.3"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(blas, "_in_use", None)
    monkeypatch.setattr(blas, "find", lambda: broken)
    blas._loaded.cache_clear()
    blas.use(1)
    assert blas.in_use() is None, "NumPy goes on"
    stand_in = object()
    monkeypatch.setattr(blas, "_loaded", lambda library: stand_in)
    blas.use(1)
    assert blas.in_use() is stand_in
    blas.use(2)
    assert blas.in_use() is None, "MKL has no threads here: NumPy's BLAS takes both cores"
