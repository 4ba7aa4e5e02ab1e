"""Test what a launch checks; arrays of a GPU (a stand-in for CuPy's) reach CuPy's RawModule in
their stream's order."""

import sys

import fake_cupy
import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.device import dispatch
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.loader import Source, Table, c_type, launch
from minidist.kernels.softmax import (
    SOURCE,
    softmax,
    softmax_gradient,
    softmax_gradient_reference,
    softmax_reference,
)

needs_compiler = pytest.mark.skipif(
    on_cpu.compiler() is None, reason="no C++ compiler (g++) on this machine"
)
KERNEL = "softmax_v1<float>"
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def cupy(monkeypatch):
    """CuPy's stand-in: its RawModule runs the CPU build, in the order of the current stream."""
    modules = fake_cupy.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        SOURCE,
        "__dict__",
        {
            **{key: value for key, value in vars(SOURCE).items() if key != "module"},
            "_functions": {},
        },
    )
    return modules["cupy"]


# ---------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((X, X.copy(), 3), ShapeError, r"takes 4 arguments \(x, y, rows, columns\), not 3"),
        ((X, X.astype(np.float64), 3, 4), DtypeError, "y is an array of float32, not float64"),
        (
            (X, X.T, 3, 4),
            ShapeError,
            r"y, of shape \(4, 3\), is not contiguous; pass xp.ascontiguousarray\(y\)",
        ),
        ((X, 5, 3, 4), DtypeError, "y is an array, not int"),
        ((X, X.copy(), 3, 4.5), DtypeError, "columns = 4.5 does not fit int32"),
        ((X, X.copy(), 2**31, 4), DtypeError, "rows = 2147483648 does not fit int32"),
        ((X, X.copy(), X, 4), DtypeError, "rows is a number, not an array"),
    ],
)
def test_an_argument_that_does_not_fit(args, error, words):
    with pytest.raises(error, match=words):
        launch(SOURCE, KERNEL, grid=1, block=32, args=args)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": 0, "block": 32}, "an empty array needs no launch"),
        ({"grid": (1, 65536), "block": 32}, "65535 along"),
        ({"grid": 1, "block": 1025}, r"from 1 to 1024"),
        ({"grid": 1, "block": (1, 1, 65)}, "64 along z"),
        ({"grid": 1, "block": 0}, "from 1 to 1024"),
        ({"grid": 1, "block": 32, "shared": 300_000}, "300000 bytes of shared memory"),
    ],
)
def test_a_launch_beyond_the_limits(options, words):
    with pytest.raises(KernelError, match=words):
        launch(SOURCE, KERNEL, args=(X, X.copy(), 3, 4), **options)


def test_an_unknown_kernel_and_file_and_type(tmp_path):
    with pytest.raises(
        KernelError, match="has no kernel softmax_v9<float>; it has softmax_v1<float>"
    ):
        launch(SOURCE, "softmax_v9<float>", grid=1, block=32, args=())
    with pytest.raises(KernelError, match="none.cu: cannot be read: No such file"):
        launch(Source("none.cu", ["f"]), "f", grid=1, block=32, args=())
    path = tmp_path / "odd.cu"
    path.write_text("__global__ void odd(const float4* x) {}")
    with pytest.raises(
        KernelError, match=r"parameter 'const float4\* x' has a type that the loader does not know"
    ):
        launch(Source(path, ["odd"]), "odd", grid=1, block=32, args=(X,))
    with pytest.raises(DtypeError, match="no kernel takes dtype complex64"):
        c_type(np.zeros(1, np.complex64))


def test_parameters_are_read_from_the_text(tmp_path):
    path = tmp_path / "many.cu"
    path.write_text(
        '#include "common.cuh"\n/* __global__ void old(int gone) {} */\n'
        "template <typename T, int N>\n__global__ void __launch_bounds__(128) many(\n"
        "    const T* __restrict__ x, T *y,   // what comes, what goes\n"
        "    unsigned long long seed, float rate) {}\n"
    )
    source = Source(path, ["many<__half, 4>"])
    found = [(p.name, p.kind, p.pointer, p.const) for p in source.parameters("many<__half, 4>")]
    half = np.dtype(np.float16)
    assert found == [
        ("x", half, True, True),
        ("y", half, True, False),
        ("seed", np.dtype(np.uint64), False, False),
        ("rate", np.dtype(np.float32), False, False),
    ]
    lines = source.text.splitlines()
    assert lines[lines.index('#line 2 "many.cu"') + 1].startswith("/* __global__")
    assert '#line 1 "common.cuh"' in lines


@needs_compiler
def test_a_table_of_arrays(tmp_path):
    """Reached through pointers, each array is checked as an argument is: read only, bounds,
    dtype."""
    path = tmp_path / "table.cu"
    path.write_text(
        "__global__ void table(const float* const* from, float* const* to, int i) {\n"
        "    to[blockIdx.x][i] = 2.0f * from[blockIdx.x][i];\n}\n"
        "__global__ void wrong(const float* const* from) {\n"
        "    const_cast<float*>(from[0])[0] = 1.0f;\n}\n"
    )
    source = Source(path, ["table", "wrong"])
    kinds = np.arange(6, dtype=np.float32)
    inputs = Table([kinds[:2], kinds[2:]])
    outputs = Table([np.zeros(2, np.float32), np.zeros(4, np.float32)])
    launch(source, "table", grid=2, block=1, args=(inputs, outputs, 1))
    assert [array.tolist() for array in outputs.arrays] == [[0, 2], [0, 6, 0, 0]]
    with pytest.raises(KernelError, match=r"reads from\[0\]\[2\] of 2"):
        launch(source, "table", grid=1, block=1, args=(inputs, outputs, 2))
    with pytest.raises(KernelError, match=r"from\[0\]\[0\]"):
        launch(source, "wrong", grid=1, block=1, args=(inputs,))
    with pytest.raises(DtypeError, match="from is a Table of arrays, not ndarray"):
        launch(source, "wrong", grid=1, block=1, args=(kinds,))
    with pytest.raises(DtypeError, match="an array of float32, not float64"):
        launch(source, "wrong", grid=1, block=1, args=(Table([np.zeros(3)]),))


# ----------------------------------------------------------------------------------- a GPU's arrays


@needs_compiler
def test_arrays_of_a_gpu(cupy):
    """A chain of launches, none waited for, in a stream of its own: written over before, read
    after."""
    rng = np.random.default_rng(0)
    with cupy.cuda.Stream(non_blocking=True):
        for version in (1, 2, 3):
            x = cupy.asarray(np.zeros((5, 8), np.float32))
            host = rng.normal(size=(5, 8)).astype(np.float32)
            x[...] = cupy.asarray(host)
            y = softmax(x, version=version)
            dx = softmax_gradient(y, x, version=version)
            x[...] = 7.0
            np.testing.assert_allclose(y.get(), softmax_reference(host), rtol=1e-6)
            np.testing.assert_allclose(
                dx.get(), softmax_gradient_reference(softmax_reference(host), host), atol=1e-6
            )


@needs_compiler
def test_shared_memory_beyond_the_default_is_asked_for(cupy, tmp_path):
    path = tmp_path / "large.cu"
    path.write_text(
        "__global__ void large(float* x) {\n    extern __shared__ float all[];\n"
        "    all[20000] = 3.0f;\n    x[0] = all[20000];\n}\n"
    )
    source = Source(path, ["large"])
    x = cupy.asarray(np.zeros(1, np.float32))
    launch(source, "large", grid=1, block=1, args=(x,), shared=90_000)
    assert x.get() == 3
    assert source.module.get_function("large").max_dynamic_shared_size_bytes == 90_000


def test_a_compile_error_of_cupy_is_one_line(cupy, monkeypatch):
    def get_function(self, name):
        raise cupy.cuda.compiler.CompileException(
            'common.cuh(3): warning #177-D: unused\n\nsoftmax.cu(41): error: identifier "y" is undefined\n  y = 3;\n'
            "1 error detected\n"
        )

    monkeypatch.setattr(cupy.RawModule, "get_function", get_function)
    with pytest.raises(
        KernelError, match=r'^softmax.cu:41: identifier "y" is undefined \(NVRTC\)$'
    ):
        softmax(cupy.asarray(X))


def test_arrays_here_and_there_are_refused(cupy):
    with pytest.raises(KernelError, match="several devices"):
        launch(SOURCE, KERNEL, grid=1, block=32, args=(X, cupy.asarray(X), 3, 4))


def test_arrays_of_a_table_here_and_there_are_refused(cupy, tmp_path):
    path = tmp_path / "table.cu"
    path.write_text("__global__ void of_all(const float* const* arrays) {}\n")
    with pytest.raises(KernelError, match="several devices"):
        launch(
            Source(path, ["of_all"]), "of_all", grid=1, block=1, args=(Table([X, cupy.asarray(X)]),)
        )


OPS = {
    "softmax": (ops.softmax, ["softmax", "softmax_gradient"]),
    "gelu": (ops.gelu, ["gelu", "gelu_gradient"]),
    "bias and gelu": (lambda x: ops.gelu(x, _row(x)), ["gelu", "gelu_gradient"]),
    "swiglu": (lambda x: ops.swiglu(x, _beside(x, X[::-1].copy())), ["swiglu", "swiglu_gradient"]),
    "dropout": (
        lambda x: ops.dropout(x, rate=0.5, name="layer", seed=1, step=2),
        ["dropout", "dropout", "dropout"],
    ),
    "residual and dropout": (
        lambda x: ops.dropout(
            x, _beside(x, X[::-1].copy()), rate=0.5, name="layer", seed=1, step=2
        ),
        ["dropout", "dropout", "dropout"],
    ),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, _targets(x), divisor=7),
        ["cross_entropy", "cross_entropy"],
    ),
    "layer_norm": (
        lambda x: ops.layer_norm(x, _row(x), _row(x)),
        ["layer_norm", "layer_norm_gradient"],
    ),
    "rms_norm": (lambda x: ops.rms_norm(x, _row(x)), ["rms_norm", "rms_norm_gradient"]),
}


def _beside(x, array):
    """`array` on the device of x."""
    return array if isinstance(x.data, np.ndarray) else sys.modules["cupy"].asarray(array)


def _row(x):
    """A weight for each column of x."""
    return _beside(x, np.arange(1, 1 + x.shape[-1], dtype=np.float32))


def _targets(x):
    """Token ids beside x."""
    return _beside(x, np.array([1, 0, 3], np.int32))


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("name", OPS)
def test_ops_take_the_kernel_on_a_gpu_alone(name, cupy, monkeypatch):
    """On NumPy an op never asks for a kernel; on a GPU's array it takes its kernels, forward and
    gradient."""
    op, kernels = OPS[name]
    called = []
    launcher = dispatch.launcher
    monkeypatch.setattr(dispatch, "launcher", lambda which: called.append(which) or launcher(which))
    for module in ("activation", "norm", "random"):
        monkeypatch.setattr(f"minidist.autograd.ops.{module}.launcher", dispatch.launcher)
    want = tensor(X, requires_grad=True)
    y = op(want)
    dy = np.asarray(np.arange(1, 1 + y.size, dtype=np.float32).reshape(y.shape))
    y.backward(dy)
    assert not called
    x = tensor(cupy.asarray(X), requires_grad=True)
    got = op(x)
    got.backward(cupy.asarray(dy))
    assert called == kernels
    np.testing.assert_allclose(got.data.get(), y.data, rtol=1e-6)
    np.testing.assert_allclose(x.grad.get(), want.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", dispatch.TABLE)
def test_the_table_names_launchers(name):
    assert callable(dispatch.launcher(name))


def test_float64_takes_the_plain_path(cupy):
    assert dispatch.kernel("softmax", cupy.asarray(X.astype(np.float64))) is None
    assert dispatch.kernel("softmax", X) is None
    assert dispatch.kernel("softmax", cupy.asarray(X)) is not None
