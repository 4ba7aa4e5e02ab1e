"""Arrays of other libraries as arguments and results of the verbs: a class that only has DLPack's two
methods stands for any library, PyTorch runs where it is installed, and a stand-in for CuPy takes
arrays on a GPU."""

import gc
import sys
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers import THREADS, run
from numpy.lib import NumpyVersion

from minidist.comm.calls.dlpack import shared
from minidist.errors import DeviceError, DtypeError, ShapeError

VERSIONS = [(1, 0), None]
"""The newest version of DLPack that a library exports; None: the first, without its flags."""


class Foreign:
    """An array of another library. NumPy can read it only by DLPack."""

    def __init__(self, array, version=(1, 0), device=(1, 0)):
        self.array = np.array(array)
        self.version = version
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.version is None and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.array.__dlpack__(**options)

    def __array__(self, *args, **options):
        raise AssertionError("an array is shared by DLPack, not converted")


def foreign(shape, value, kind="float64", **options):
    return Foreign(np.full(shape, value, kind), **options)


# --------------------------------------------------------------------------------- memory and dtypes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "int64", "uint8", "bool"])
def test_the_array_lies_on_the_memory_of_the_value(version, kind):
    value = foreign((2, 3), 1, kind, version=version)
    array = shared("send", "x", value)
    assert type(array) is np.ndarray
    assert array.dtype == kind
    assert array.flags.writeable
    array[1, 2] = 0
    assert value.array[1, 2] == 0
    assert shared("send", "x", foreign((), 7.0, version=version)).shape == ()
    assert shared("send", "x", foreign((0, 4), 7.0, version=version)).shape == (0, 4)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_array_keeps_the_memory(version):
    value = foreign(3, 5.0, version=version)
    memory = weakref.ref(value.array)
    array = shared("send", "x", value)
    del value
    gc.collect()
    assert memory() is not None
    assert array.tolist() == [5.0] * 3
    del array
    gc.collect()
    assert memory() is None


# --------------------------------------------------------------------------------------- all verbs


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", THREADS)
def test_every_verb_takes_arrays_of_another_library(transport, version):
    def ranks(world):
        rank = world.rank
        other = 1 - rank

        def make(shape, value=-1.0):
            return foreign(shape, value, version=version)

        def check(result, given, expected):
            assert result is given
            assert given.array.tolist() == expected

        x = make(4, rank)
        total = world.all_reduce(x)
        assert type(total) is np.ndarray
        assert total.tolist() == [1.0] * 4
        out = make(4)
        check(world.all_reduce(x, out=out), out, [1.0] * 4)
        check(world.start_all_reduce(x, "max", out=out).wait(), out, [1.0] * 4)
        out = make(2)
        check(world.reduce_scatter(x, out=out), out, [1.0] * 2)
        out = make(8)
        check(world.all_gather(x, out=out), out, [0.0] * 4 + [1.0] * 4)
        assert world.gather(x, root=1) is None or rank == 1
        out = make(8)
        result = world.gather(x, root=1, out=out)
        assert result is (out if rank == 1 else None)
        assert out.array.tolist() == ([0.0] * 4 + [1.0] * 4 if rank == 1 else [-1.0] * 8)
        out = make(4)
        result = world.reduce(x, root=0, out=out)
        assert result is (out if rank == 0 else None)
        assert out.array.tolist() == ([1.0] * 4 if rank == 0 else [-1.0] * 4)
        out = make(4)
        check(world.broadcast(x if rank == 1 else None, root=1, out=out), out, [1.0] * 4)
        assert world.broadcast(x, root=1).tolist() == [1.0] * 4
        out = make(2)
        check(world.scatter(x if rank == 1 else None, root=1, out=out), out, [1.0] * 2)
        outs = [make(1), make(1)]
        parts = world.all_to_all([make(1, 10 * rank), make(1, 10 * rank + 1)], out=outs)
        assert [part.array.tolist() for part in parts] == [[rank], [10.0 + rank]]
        assert all(part is given for part, given in zip(parts, outs, strict=True))
        out = make(4)
        check(world.exchange(x, dst=other, src=other, out=out), out, [float(other)] * 4)
        pending = world.start_recv(src=other, out=out)
        world.send(x, dst=other)
        check(pending.wait(), out, [float(other)] * 4)
        assert x.array.tolist() == [float(rank)] * 4

    run(ranks, size=2, transport=transport)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", THREADS)
def test_the_result_may_replace_the_argument(transport, version):
    """Also where an algorithm sends the array while it receives the result."""

    def ranks(world):
        rank = world.rank
        for algorithm in ("naive", "tree", "ring", "direct"):
            whole = foreign(7, rank, version=version)
            assert world.all_reduce(whole, out=whole, algorithm=algorithm) is whole
            assert whole.array.tolist() == [3.0] * 7, algorithm
            # the two overlap, and have other elements
            memory = np.append(np.arange(6.0) + rank, -1.0)
            given = Foreign(0.0, version)
            taken = Foreign(0.0, version)
            given.array = memory[:-1]
            taken.array = memory[1:]
            world.all_reduce(given, out=taken, algorithm=algorithm)
            assert memory[1:].tolist() == (3 * np.arange(6.0) + 3).tolist(), algorithm
        whole = foreign(4, rank, version=version)
        world.exchange(whole, (rank + 1) % 3, (rank - 1) % 3, out=whole)
        assert whole.array.tolist() == [float((rank - 1) % 3)] * 4
        parts = [foreign(2, 10 * rank + dst, version=version) for dst in range(3)]
        world.all_to_all(parts, out=parts)
        assert [part.array[0] for part in parts] == [10 * src + rank for src in range(3)]
        for algorithm in ("naive", "ring", "pairwise"):
            # each rank's chunk arrives where its argument still lies
            memory = np.arange(6.0) + rank
            given = Foreign(0.0, version)
            taken = Foreign(0.0, version)
            given.array = memory
            taken.array = memory[1:3]
            world.reduce_scatter(given, out=taken, algorithm=algorithm)
            expected = np.array_split(3 * np.arange(6.0) + 3, 3)[rank]
            assert taken.array.tolist() == expected.tolist(), algorithm

    run(ranks, size=3, transport=transport)


def test_an_argument_that_is_not_contiguous_is_sent_in_order():
    def ranks(world):
        x = Foreign(0.0)
        x.array = np.arange(6.0).reshape(2, 3).T
        return world.all_reduce(x).tolist()

    assert run(ranks, size=2) == [(2 * np.arange(6.0).reshape(2, 3).T).tolist()] * 2


# ------------------------------------------------------------------------------------------ errors


def transposed():
    value = Foreign(0.0)
    value.array = np.zeros((2, 3)).T
    return value


def read_only():
    value = foreign(3, 0.0)
    value.array.flags.writeable = False
    return value


READ_ONLY = (
    (ShapeError, "out= is read-only; pass a writable")
    if NumpyVersion(np.__version__) >= "2.1.0"
    else (DtypeError, "cannot be shared by DLPack: Cannot export readonly array")
)
"""What a read-only out= is told: before NumPy 2.1 its own export refuses it."""


class Refusing(Foreign):
    """As a tensor that requires a gradient, or is sparse."""

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient\nmore lines")


class Half:
    """A class with one of the two methods."""

    def __dlpack__(self, **options):
        raise AssertionError("its device is not known")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"x": np.zeros((3, 2)), "out": transposed()},
            ShapeError,
            r"^all_reduce: out= is a Foreign that is not contiguous \(shape \(3, 2\), strides "
            r"\(8, 24\) in bytes\); pass a contiguous one, and copy it$",
        ),
        ({"x": np.zeros(3), "out": read_only()}, *READ_ONLY),
        ({"x": np.zeros(4), "out": foreign(3, 0.0)}, ShapeError, r"out= has shape \(3,\), the"),
        (
            {"x": np.zeros(3), "out": foreign(3, 0.0, "float32")},
            DtypeError,
            "out= has dtype float32, the result has float64",
        ),
        (
            {"x": Refusing(0.0)},
            DtypeError,
            "^all_reduce: x is a Refusing that cannot be shared by DLPack: Can't export tensors "
            "that require gradient$",
        ),
        (
            {"x": np.zeros(3), "out": Refusing(0.0)},
            DtypeError,
            "^all_reduce: out= is a Refusing that cannot be shared by DLPack: Can't export",
        ),
        ({"x": Half()}, DtypeError, "x is a Half that cannot be shared by DLPack: .*device"),
        (
            {"x": Foreign(0.0, device=(8, 0))},
            DeviceError,
            r"x is a Foreign on a device that minidist does not know \(DLPack's device type 8\)",
        ),
    ],
)
def test_what_cannot_be_shared_is_told_at_once(arguments, error, message):
    def ranks(world):
        if world.rank == 0:
            with pytest.raises(error, match=message):
                world.all_reduce(**arguments)

    run(ranks, size=2)


# -------------------------------------------------------------------------------------------- GPUs


def test_an_array_on_a_gpu_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"^send: x is a Foreign on a GPU: .* needs CuPy"):
        shared("send", "x", Foreign(0.0, device=(2, 0)))


class OnGpu:
    """What a group uses of a cupy.ndarray, on the memory of a NumPy array."""

    base = None
    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes

    def get(self, out):
        out[...] = self.array

    def set(self, values):
        self.array[...] = values

    def __setitem__(self, index, value):
        self.array[index] = value.array


def test_an_array_on_a_gpu_becomes_cupys(monkeypatch):
    """`cupy` is a stand-in of a few lines: the path from a verb to cupy.from_dlpack and back."""
    cupy = ModuleType("cupy")
    extra = ModuleType("cupyx")
    cupy.ndarray = OnGpu
    cupy.is_available = lambda: True
    cupy.from_dlpack = lambda value: OnGpu(value.array)
    cupy.empty = lambda shape, dtype: OnGpu(np.empty(shape, dtype))
    cupy.may_share_memory = lambda a, b: np.may_share_memory(a.array, b.array)
    stream = nullcontext()
    stream.ptr = 0
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(pointerGetAttributes=lambda address: SimpleNamespace(type=0)),
        Device=nullcontext,
        get_current_stream=lambda: stream,
    )
    extra.empty_pinned = np.empty
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", extra)

    def ranks(world):
        x = foreign(4, world.rank, device=(2, 0))
        out = foreign(4, -1.0, device=(2, 0))
        result = world.all_reduce(x)
        assert isinstance(result, OnGpu)
        assert result.array.tolist() == [1.0] * 4
        assert world.all_reduce(x, out=out) is out
        assert out.array.tolist() == [1.0] * 4
        other = 1 - world.rank
        assert world.exchange(x, dst=other, src=other, out=out) is out
        assert out.array.tolist() == [float(other)] * 4

    run(ranks, size=2)


# ----------------------------------------------------------------------------------------- PyTorch


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")

    def ranks(world):
        for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
            x = torch.arange(6).to(kind) + world.rank
            expected = (2 * torch.arange(6) + 1).to(kind)
            out = torch.zeros(6, dtype=kind)
            assert world.all_reduce(x, out=out) is out
            assert torch.equal(out, expected)
            assert world.all_reduce(x, out=x) is x
            assert torch.equal(x, expected)
            total = world.all_reduce(x)
            assert type(total) is np.ndarray
        assert world.broadcast(torch.ones(2, dtype=torch.bfloat16)).dtype == ml_dtypes.bfloat16
        rows = world.all_to_all(torch.full((2, 3), float(world.rank)))
        assert [row.tolist() for row in rows] == [[0.0] * 3, [1.0] * 3]
        if world.rank == 0:
            for bad, message in [
                (torch.ones(3, requires_grad=True), "require gradient, use tensor.detach"),
                (torch.ones(3, dtype=torch.bfloat16, requires_grad=True), "require gradient"),
                (torch.eye(3).to_sparse(), "layout other than torch.strided"),
                (torch.ones(3, device="meta"), "meta"),
                # PyTorch's own export gives the wrong sign
                (
                    torch.ones(2, dtype=torch.complex64).conj().imag,
                    "wrong sign; pass x.resolve_neg",
                ),
            ]:
                for arguments in ({"x": bad}, {"x": np.ones(3), "out": bad}):
                    with pytest.raises(DtypeError, match=rf"^all_reduce: .*{message}") as told:
                        world.all_reduce(**arguments)
                    assert "\n" not in str(told.value)
            with pytest.raises(ShapeError, match="is a Tensor that is not contiguous"):
                world.all_reduce(np.ones((3, 2)), out=torch.ones(2, 3).t())

    run(ranks, size=2)
