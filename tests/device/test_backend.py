"""Array modules, dtypes, low-precision products, and random numbers that no split can change."""

import hashlib
import sys
import time

import fake_cupy
import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.device import backend
from minidist.errors import ConfigError, DeviceError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_numpy_is_the_module_of_host_arrays():
    assert backend.array_module(np.ones(1), 2.0) is np
    assert backend.module_for("cpu") is np
    assert backend.device_of(np.ones(1)) == "cpu"
    x = np.ones(3)
    assert backend.to_host(x) is x and backend.to_device(x, "cpu") is x
    assert backend.is_array(x) and not backend.is_array([1.0])


def test_unknown_or_absent_devices(monkeypatch):
    with pytest.raises(ConfigError, match="unknown device 'tpu'; choose cpu or cuda"):
        backend.module_for("tpu")
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if not installed
    with pytest.raises(DeviceError, match=r"pip install 'minidist\[cuda13\]'"):
        backend.module_for("cuda")


def test_dtypes_by_name():
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool"):
        assert backend.dtype_name(backend.dtype(name)) == name
    assert backend.dtype("bfloat16") == BFLOAT16 == backend.dtype(BFLOAT16)
    assert backend.dtype(np.float32) == np.float32
    assert (
        backend.dtype_name(">f4") == ">float32"
        and backend.dtype_name(BFLOAT16.newbyteorder()) == ">bfloat16"
    )
    for wrong in (
        "float8",
        ">float32",
        np.dtype(">f4"),
        "complex64",
        np.complex64,
        "",
        "no such thing",
        object(),
    ):
        with pytest.raises(ConfigError, match="unknown dtype .*; choose one of float64, float32"):
            backend.dtype(wrong)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_low_precision_products_are_rounded_once(kind):
    ones = np.ones((1, 4096)).astype(backend.dtype(kind))
    assert float(backend.matmul(ones, ones.T)[0, 0]) == 4096.0  # bfloat16 sums of ones stop at 256
    out = np.empty((1, 1), backend.dtype(kind))
    assert backend.matmul(ones, ones.T, out=out) is out and float(out[0, 0]) == 4096.0
    a = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(ones.dtype)
    wide = a.astype("float32") @ a.astype("float32").swapaxes(1, 2)
    np.testing.assert_array_equal(backend.matmul(a, a.swapaxes(1, 2)), wide.astype(ones.dtype))


# ----------------------------------------------------------------------------------- random numbers


def reference_bits(name, seed, position):
    """splitmix64(key ^ position) in Python's unbounded integers."""
    mask = (1 << 64) - 1
    z = (
        int.from_bytes(
            hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little"
        )
        ^ position
    )
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_bits_are_the_hash_that_the_docstring_names():
    positions = [0, 1, 2, 12345, 2**40]
    bits = backend.random_bits("blocks.0.fc.weight", 7, np.array(positions))
    assert bits.dtype == np.uint64
    assert bits.tolist() == [reference_bits("blocks.0.fc.weight", 7, p) for p in positions]
    normals = backend.random_normal("w", 3, np.array(positions), "float64")
    for position, value in zip(positions, normals, strict=True):
        z = reference_bits("w", 3, position)
        total = sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
        assert value == pytest.approx(
            (total - 2 * 65535) / np.sqrt(4 * (65536.0**2 - 1) / 12), rel=1e-15
        )


DRAWS = [backend.random_bits, backend.random_uniform, backend.random_normal]


@given(
    st.sampled_from(DRAWS),
    st.integers(0, 40000),
    st.integers(0, 300),
    st.integers(1, 50),
    st.integers(-5, 5),
)
def test_a_shard_draws_its_slice_of_the_whole(draw, start, length, step, seed):
    whole = draw("w", seed, range(start + length * step))
    np.testing.assert_array_equal(
        draw("w", seed, range(start, start + length * step, step)), whole[start::step]
    )
    index = (
        np.random.default_rng(0)
        .permutation(len(whole))[:12]
        .reshape(-1, 2 if len(whole) >= 12 else 1)
    )
    np.testing.assert_array_equal(draw("w", seed, index), whole[index])
    assert draw("w", seed, index.astype("int32")).shape == index.shape


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_uniform_and_normal_laws(kind):
    n = 1 << 17
    uniform = backend.random_uniform("u", 0, range(n), kind)
    assert uniform.dtype == backend.dtype(kind)
    wide = uniform.astype("float64")
    assert wide.min() >= 0.0 and wide.max() < 1.0
    assert wide.mean() == pytest.approx(0.5, abs=0.005) and wide.var() == pytest.approx(
        1 / 12, abs=0.001
    )
    normal = backend.random_normal("n", 0, range(n), kind).astype("float64")
    assert normal.mean() == pytest.approx(0.0, abs=0.01) and normal.std() == pytest.approx(
        1.0, abs=0.01
    )
    assert (np.abs(normal) < 1).mean() == pytest.approx(0.6827, abs=0.02)
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 0.01
    other = backend.random_normal("n", 1, range(n), kind).astype("float64")
    assert abs(np.corrcoef(normal, other)[0, 1]) < 0.01


def test_random_numbers_refuse_what_is_no_position_or_float():
    with pytest.raises(ConfigError, match="must be integers, not float64"):
        backend.random_bits("w", 0, np.ones(3))
    with pytest.raises(ConfigError, match="draws floats, not int64"):
        backend.random_normal("w", 0, range(3), "int64")
    with pytest.raises(ConfigError, match="draws floats, not int64"):
        backend.random_uniform("w", 0, range(3), "int64")


@pytest.mark.parametrize("empty", [np.empty, fake_cupy.empty_pinned])
def test_a_host_array_may_change_once_it_was_copied_to_a_gpu(monkeypatch, empty):
    """Pinned memory is read by the GPU itself, when its stream gets there."""
    for name, module in fake_cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    x = empty(1000, np.float64)
    x[...] = 1.0
    fake_cupy.get_current_stream().put(lambda: time.sleep(0.03))
    there = backend.to_device(x, "cuda")
    x[...] = 2.0
    assert (backend.to_host(there) == 1.0).all()


def test_a_gpu_gets_the_byte_order_of_the_host(monkeypatch):
    fake_gpu.install(monkeypatch)
    there = backend.to_device(np.arange(3.0).astype(">f8"), "cuda")
    assert there.dtype == np.float64 and backend.to_host(there).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.parametrize("draw", DRAWS)
def test_cupy_draws_the_same_bits(draw):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU that CuPy can use")
    index = np.arange(100_000).reshape(100, 1000)
    ours = draw("w", 5, cupy.asarray(index))
    assert backend.device_of(ours) == "cuda"
    np.testing.assert_array_equal(backend.to_host(ours), draw("w", 5, index))


@pytest.mark.gpu
def test_arrays_travel_through_pinned_memory():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU that CuPy can use")
    for kind in ("float32", "bfloat16", "int64"):
        x = np.arange(12).reshape(3, 4).astype(backend.dtype(kind))
        there = backend.to_device(x.T, "cuda")
        assert backend.array_module(there) is cupy and backend.device_of(there) == "cuda"
        np.testing.assert_array_equal(backend.to_host(there), x.T)


@pytest.mark.parametrize(
    "kinds", [(BFLOAT16, BFLOAT16), (BFLOAT16, "float32"), ("float16", "float16")], ids=str
)
def test_low_precision_is_added_on_a_gpu_as_on_the_host(kinds, monkeypatch):
    """In one operation where both are of one dtype; into the array itself."""
    cupy = fake_gpu.install(monkeypatch)
    rng = np.random.default_rng(0)
    total, array = (rng.normal(size=50).astype(kind) for kind in kinds)
    there = cupy.asarray(total)
    backend.add_into(there, cupy.asarray(array))
    backend.add_into(total, array)
    assert there.dtype == total.dtype
    np.testing.assert_array_equal(backend.to_host(there), total)


def test_beside_copies_without_a_wait(monkeypatch):
    """In C order, whatever the order here; what is there already stays itself."""
    cupy = fake_gpu.install(monkeypatch)
    x = np.arange(12).reshape(3, 4).T[:, ::2]
    there = backend.beside(x, cupy.asarray(np.zeros(1)))
    assert there.flags.c_contiguous and not fake_gpu.waits
    np.testing.assert_array_equal(backend.to_host(there), x)
    assert backend.beside(there, there) is there
    assert backend.beside(x, x) is x
    assert backend.beside(np.array(3), there).shape == ()
