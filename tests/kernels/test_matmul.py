"""The matrix product: every version against the product in float64, bytes as stated, planted
mistakes caught."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import needs_compiler, on_each_device, planted, there, wide

from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import matmul as family
from minidist.kernels import on_cpu
from minidist.kernels.matmul import (
    SIDES,
    SOURCE,
    VERSIONS,
    fastest,
    matmul,
    matmul_reference,
    read_bytes,
)

KINDS = {
    "float32": (np.float32, 2e-7),
    "float16": (np.float16, 5e-4),
    "bfloat16": (ml_dtypes.bfloat16, 4e-3),
}
EACH = [
    (version, kind) for version in VERSIONS for kind in KINDS if (version, kind) != (5, "float32")
]
# A tile and more, in every dim; less than a pack; not whole packs.
SIZES = [(1, 1, 1), (3, 5, 2), (33, 17, 19), (40, 136, 24), (129, 9, 37)]


def check(device, kind, sizes, seed, version=None, transpose_a=False, transpose_b=False):
    (dtype, bound) = KINDS[kind]
    (m, n, k) = sizes
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(k, m) if transpose_a else (m, k)).astype(dtype)
    b = rng.normal(size=(n, k) if transpose_b else (k, n)).astype(dtype)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    with on_cpu.watch(seed=seed):
        c = matmul(*there(device, a, b), version=version, **options)
    assert c.dtype == dtype
    want = matmul_reference(wide(a), wide(b), **options)
    sizes_of_terms = matmul_reference(abs(wide(a)), abs(wide(b)), **options)
    # the latter near 0
    rounding = np.maximum(bound * abs(want), float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2)
    np.testing.assert_array_less(abs(wide(c) - want), rounding + 1e-6 * sizes_of_terms)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize(("version", "kind"), EACH)
@given(sizes=st.sampled_from(SIZES), seed=st.integers(0, 99))
@settings(max_examples=2)
def test_each_version_is_the_product(device, version, kind, sizes, seed):
    check(device, kind, sizes, seed, version)


@pytest.mark.soak
@on_each_device
@pytest.mark.parametrize(("version", "kind"), EACH)
@given(
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 140), st.integers(1, 70)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_each_version_at_any_size(device, version, kind, sizes, seed):
    check(device, kind, sizes, seed, version)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [(False, True), (True, False), (True, True)])
def test_transposed_as_they_lie(device, kind, transposed):
    for sizes in ((24, 40, 48), (9, 21, 35)):
        check(device, kind, sizes, 0, None, *transposed)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_and_infinity_reach_their_row_and_column_only(device, version):
    a = np.ones((5, 16), np.float16)
    b = np.ones((16, 6), np.float16)
    a[2, 3] = np.nan
    b[15, 4] = np.inf
    c = wide(matmul(*there(device, a, b), version=version))
    want = np.full((5, 6), 16.0)
    want[:, 4] = np.inf
    want[2] = np.nan
    np.testing.assert_array_equal(c, want)


@needs_compiler
def test_empty():
    assert matmul(np.ones((0, 3), np.float32), np.ones((3, 4), np.float32)).shape == (0, 4)
    np.testing.assert_array_equal(
        matmul(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32)), np.zeros((2, 3))
    )


@pytest.mark.sampled(every=5)
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sizes", [(128, 128, 32), (128, 96, 32)])
def test_bytes_read(version, sizes):
    """Count how often a and b are read, as the header of matmul.cu says of each rung."""
    m, n, k = sizes
    a = np.ones((m, k), np.float16)
    b = np.ones((k, n), np.float16)
    with on_cpu.watch(count=True) as seen:
        matmul(a, b, version=version)
    assert seen[0].loads.bytes == read_bytes(version, m, n, k, 2)
    assert seen[0].stores.bytes == m * n * 2
    if sizes == (128, 128, 32):
        assert read_bytes(version, m, n, k, 2) == 2 * m * n * k * 2 // SIDES[version]


@needs_compiler
def test_vector_loads_ask_less_often():
    a = np.ones((128, 32), np.float32)
    b = np.ones((32, 128), np.float32)
    requests = {}
    for version in (3, 4):
        with on_cpu.watch(count=True) as seen:
            matmul(a, b, version=version)
        requests[version] = seen[0].loads.requests
    assert requests[3] == 4 * requests[4]


def test_errors():
    a = np.ones((4, 6), np.float32)
    with pytest.raises(ShapeError, match=r"a \(4, 6\) times b \(4, 6\); it needs"):
        matmul(a, a)
    with pytest.raises(ShapeError, match=r"a \(4, 6\) transposed times b \(6, 4\)"):
        matmul(a, a.T, transpose_a=True)
    with pytest.raises(DtypeError, match="a of float32, b of float16"):
        matmul(a, np.ones((6, 4), np.float16))
    with pytest.raises(
        KernelError, match="multiplies float16 and bfloat16, not float32; take version 4"
    ):
        matmul(a, np.ones((6, 4), np.float32), version=5)
    with pytest.raises(KernelError, match="version 4 takes no transposed matrix"):
        matmul(a, np.ones((5, 6), np.float32), transpose_b=True)
    assert (fastest(a), fastest(a.astype(np.float16))) == (4, 5)


READ_FIRST = (
    "        __syncthreads();                                         // before "
    "others' numbers are read\n"
)
OVERWRITE = (
    "        __syncthreads();                                         // before "
    "they are overwritten\n"
)
MISTAKES = {
    "no barrier before the tile is read": (2, (READ_FIRST, "", 1), "race on|nobody wrote"),
    "no barrier before the tile is overwritten": (2, (OVERWRITE, "", 1), "race on"),
    "the edge of k is not watched": (
        2,
        ("start + y < k && column < n", "column < n", 1),
        r"out of bounds.* reads b\[",
    ),
    "the edge of m is not watched": (
        1,
        ("if (row >= m || column >= n) return;", "if (column >= n) return;", 1),
        r"out of bounds: .* (reads a|writes c)\[",
    ),
    "a tile too short": (
        3,
        ("float a_tile[depth][side + 1]", "float a_tile[depth - 1][side + 1]", 1),
        "out of bounds",
    ),
    "vector loads of crooked rows": (
        4,
        ("k - (start + column) : 0, whole", "k - (start + column) : 0, true", 1),
        "misaligned",
    ),
    "fragments of the wrong rows": (
        5,
        ("warp_top + 16 * i, d, lane", "warp_top + 8 * i, d, lane", 1),
        None,
    ),
    "b as if it lay transposed": (
        5,
        ("b_tile.load_b(from_b + j", "b_tile.load_b_flipped(from_b + j", 1),
        None,
    ),
}


@pytest.mark.sampled(every=5)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    version, change, says = MISTAKES[mistake]
    kernel = next(name for name in SOURCE.kernels if name.startswith(f"matmul_v{version}<__half"))
    monkeypatch.setattr(family, "SOURCE", planted(tmp_path, SOURCE, [kernel], change))
    with pytest.raises(
        KernelError if says else AssertionError, match=says or "Arrays are not strictly ordered"
    ):
        check("cpu", "float16", (37, 45, 75), 0, version)
