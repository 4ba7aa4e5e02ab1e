"""The product of fp8 bytes: against the product in float64, bytes as stated, planted mistakes
caught."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import needs_compiler, on_each_device, planted, there, wide

from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import matmul_float8 as family
from minidist.kernels import on_cpu
from minidist.kernels.casts import cast
from minidist.kernels.matmul_float8 import (
    E4M3,
    E5M2,
    PAIRS,
    SIDE,
    SOURCE,
    matmul_float8,
    matmul_float8_reference,
)

# the last: whole words, 3 tiles deep
SIZES = [(1, 1, 1), (3, 5, 2), (40, 136, 24), (129, 9, 37), (16, 32, 144)]
LAID = [(a, b) for a in (False, True) for b in (False, True)]
HALF_UNIT = 2.0**-8  # of bfloat16: 8 digits, so neighbours lie at most 2^-7 apart
# what a tensor core's sums of bytes may lose, of the terms' sizes; here, 2^-20
TENSOR_CORE = 2.0**-11


def check(device, formats, sizes, seed, transpose_a=False, transpose_b=False):
    m, n, k = sizes
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(k, m) if transpose_a else (m, k)).astype(formats[0]).view(np.uint8)
    b = rng.normal(size=(n, k) if transpose_b else (k, n)).astype(formats[1]).view(np.uint8)
    scales = (2.0, 0.25)
    options = {"formats": formats, "transpose_a": transpose_a, "transpose_b": transpose_b}
    with on_cpu.watch(seed=seed):
        placed = there(device, a, b, *(np.array([scale], np.float32) for scale in scales))
        c = matmul_float8(*placed[:2], placed[2:], **options)
    assert c.dtype == ml_dtypes.bfloat16
    want = matmul_float8_reference(a, b, scales, **options)
    # without signs: the terms' sizes
    positive = matmul_float8_reference(a & 0x7F, b & 0x7F, scales, **options)
    lost = TENSOR_CORE if device == "cuda" else 2.0**-20
    np.testing.assert_array_less(
        abs(wide(c) - want), HALF_UNIT * abs(want) + lost * positive + 1e-30
    )


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("laid", LAID)
@given(sizes=st.sampled_from(SIZES), seed=st.integers(0, 99))
@settings(max_examples=2)
def test_it_is_the_product(device, formats, laid, sizes, seed):
    check(device, formats, sizes, seed, *laid)


@pytest.mark.soak
@on_each_device
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("laid", LAID)
@given(
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 140), st.integers(1, 140)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_it_is_the_product_at_any_size(device, formats, laid, sizes, seed):
    check(device, formats, sizes, seed, *laid)


@on_each_device
@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_every_code_is_its_number(device, name):
    """A row of all 256 codes times the unit matrix; the other format brings the ones."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    other = E5M2 if name == E4M3 else E4M3
    numbers = codes.view(name).astype(np.float64)
    codes[~np.isfinite(numbers)] = 0
    unit = np.eye(16).astype(other).view(np.uint8)
    one = np.ones(1, np.float32)
    a, b, scale = there(device, codes, unit, one)
    numbers[~np.isfinite(numbers)] = 0
    np.testing.assert_array_equal(
        wide(matmul_float8(a, b, (scale, scale), formats=(name, other))), numbers
    )
    np.testing.assert_array_equal(
        wide(matmul_float8(b, a, (scale, scale), formats=(other, name))), numbers
    )


@on_each_device
def test_nan_reaches_its_row_only(device):
    a = np.ones((5, 40)).astype(E4M3)
    b = np.ones((40, 6)).astype(E4M3)
    a[2, 37] = np.nan
    one = np.ones(1, np.float32)
    placed = there(device, a.view(np.uint8), b.view(np.uint8), one)
    c = wide(matmul_float8(*placed[:2], (placed[2], placed[2])))
    want = np.full((5, 6), 40.0)
    want[2] = np.nan
    np.testing.assert_array_equal(c, want)


@on_each_device
def test_the_three_products_of_a_linear(device):
    """y, dx and dw of x w, from bytes as they lie, near those of the numbers before they were
    rounded."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=size).astype(np.float32) for size in ((48, 32), (32, 64), (48, 64)))
    scales = [np.array([scale], np.float32) for scale in (64.0, 32.0, 4096.0)]
    placed = there(device, x, w, dy)
    factors = there(device, *scales)
    x8, w8, dy8 = (
        cast(array, name, factor)[0]
        for array, name, factor in zip(placed, (E4M3, E4M3, E5M2), factors, strict=True)
    )
    of_x, of_w, of_dy = factors
    products = {
        "y": (matmul_float8(x8, w8, (of_x, of_w)), x @ w),
        "dx": (
            matmul_float8(dy8, w8, (of_dy, of_w), formats=(E5M2, E4M3), transpose_b=True),
            dy @ w.T,
        ),
        "dw": (
            matmul_float8(x8, dy8, (of_x, of_dy), formats=(E4M3, E5M2), transpose_a=True),
            x.T @ dy,
        ),
    }
    for name, (got, want) in products.items():
        error = np.linalg.norm(wide(got) - want) / np.linalg.norm(want)
        assert 1e-3 < error < 0.08, name  # e4m3 has 4 digits, e5m2 three


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("sizes", [(128, 128, 64), (128, 96, 64)])
def test_bytes_read(laid, sizes):
    """Each tile of results reads its rows and columns once, however they lie; nothing is widened in
    memory."""
    m, n, k = sizes
    a = np.zeros((k, m) if laid[0] else (m, k), np.uint8)
    b = np.zeros((n, k) if laid[1] else (k, n), np.uint8)
    one = np.ones(1, np.float32)
    with on_cpu.watch(count=True) as seen:
        matmul_float8(a, b, (one, one), transpose_a=laid[0], transpose_b=laid[1])
    scales = 2 * 4 * 256  # each thread reads both
    assert seen[0].loads.bytes - scales == -(-n // SIDE) * m * k + -(-m // SIDE) * n * k
    assert seen[0].stores.bytes == 2 * m * n
    if laid == (False, True):  # as tensor cores want them: 16 bytes a lane, 512 a warp
        assert seen[0].loads.requests - 2 * 8 == (m * k + n * k) // 512


@needs_compiler
def test_empty_and_errors():
    a = np.zeros((4, 6), np.uint8)
    one = np.ones(1, np.float32)
    assert matmul_float8(a[:0], a.T.copy(), (one, one)).shape == (0, 4)
    np.testing.assert_array_equal(
        wide(matmul_float8(a[:, :0].copy(), a[:0], (one, one))), np.zeros((4, 6))
    )
    with pytest.raises(
        ShapeError, match=r"a \(4, 6\) times b \(4, 6\); it needs \(m, k\) times \(k, n\)"
    ):
        matmul_float8(a, a, (one, one))
    with pytest.raises(
        DtypeError, match="float32 as float8_e4m3fn times uint8 as float8_e4m3fn; it takes uint8"
    ):
        matmul_float8(a.astype(np.float32), a, (one, one), transpose_b=True)
    with pytest.raises(
        DtypeError, match="uint8 as float8_e5m2 times uint8 as float8_e5m2; it takes"
    ):
        matmul_float8(a, a, (one, one), formats=(E5M2, E5M2), transpose_b=True)
    with pytest.raises(ShapeError, match=r"the scale of b has shape \(2,\)"):
        matmul_float8(a, a, (one, np.ones(2, np.float32)), transpose_b=True)


READ_FIRST = (
    "        __syncthreads();                                    // before others' bytes are read\n"
)
OVERWRITE = (
    "        __syncthreads();                                    // before they are overwritten\n"
)
MISTAKES = {
    "no barrier before the tile is read": ((READ_FIRST, "", 1), "race on|nobody wrote"),
    "no barrier before the tile is overwritten": ((OVERWRITE, "", 1), "race on"),
    "the edge of k is not watched": (
        ("row < k ? width - (column + 4 * word) : 0", "width - (column + 4 * word)", 1),
        r"out of bounds.* reads b\[",
    ),
    "words of crooked rows": (
        ("column + 4 * word, count, whole)", "column + 4 * word, count, true)", 1),
        "misaligned",
    ),
    "words that are not turned": (("        turn(words);\n", "", 1), None),
    "a scale left out": (("product(a_scale[0], b_scale[0])", "a_scale[0]", 1), None),
    "fragments of the wrong rows": (
        ("(warp_top + 16 * i + lane % 16)", "(warp_top + 8 * i + lane % 16)", 1),
        None,
    ),
    "half of what lies along k": (
        ("+ d + lane / 16 * 16)", "+ d + lane / 16 * 8)", 1),
        "misaligned",
    ),
    "a as if it were e5m2": (
        ("mma_16x8x32<a_exponent, b_exponent>", "mma_16x8x32<5, b_exponent>", 1),
        None,
    ),
}


@pytest.mark.sampled(every=5)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    change, says = MISTAKES[mistake]
    monkeypatch.setattr(
        family, "SOURCE", planted(tmp_path, SOURCE, ["matmul_float8<4, 4, false, false>"], change)
    )
    with pytest.raises(
        KernelError if says else AssertionError, match=says or "Arrays are not strictly ordered"
    ):
        check("cpu", (E4M3, E4M3), (37, 45, 75), 0)


def test_an_older_gpu_is_refused(monkeypatch):
    """CuPy's stand-in has a device of sm_80."""
    cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(compute_capability="80"),
        compiler=None,
        runtime=SimpleNamespace(getDevice=lambda: 1),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(
        KernelError, match=r"matmul_float8\.cu: needs a GPU of sm_89 or newer; device 1 is sm_80"
    ):
        SOURCE.function(SOURCE.kernels[0])
