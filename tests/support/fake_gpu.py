"""A CuPy without a GPU that computes at once, for whole training steps: NumPy's functions, on
arrays of CuPy's class.

fake_cupy.py is true to streams and has a few functions; this has most of NumPy's, and no streams.
It is true to which side an array is on: an operation of a device array and a NumPy array is an
error, as in CuPy. And it is true to who
waits: `waits` holds, for each time that the host would wait for the GPU, what did it and on which
line of minidist: reading a number or an array; a copy by `set`; a result whose size depends on
values (nonzero, a mask as an index); bincount, which looks at its numbers; sorts, which CuPy leaves
to Thrust, and that returns when it is done.

While a stream is captured nothing is computed: each operation is written down, with the arrays that
it reads and the one that it writes, which holds rubbish until the graph is launched. Arrays that
the capture made stay where they are, as in a graph's pool. Whatever would wait, and any copy from
the host, ends the capture with CUDA's error.
"""

import os
import traceback
import weakref
from contextlib import nullcontext
from types import ModuleType

import fake_cupy
import ml_dtypes
import numpy as np

import minidist
from minidist.device import cublas

# not any folder of this name: a checkout's may have it, too
HOME = os.path.dirname(minidist.__file__) + os.sep
PRODUCTS = {"matmul", "dot", "tensordot", "einsum", "inner", "vdot"}  # by CuPy's cuBLAS
WAITING = {
    "nonzero",
    "flatnonzero",
    "argwhere",
    "unique",
    "bincount",
    "sort",
    "argsort",
    "compress",
    "extract",
}
waits = []
# id of a host array that owns its memory -> the device array of it
_owners = weakref.WeakValueDictionary()


def wait(what):
    """Note that the host waits."""
    outside(what)
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(HOME)]
    where = (
        f"{frames[-1].filename.removeprefix(HOME)}:{frames[-1].lineno}" if frames else "the test"
    )
    waits.append(f"{what} at {where}")


# --- graphs
# ----------------------------------------------------------------------------------------------------------


class Graph:
    """What was written down, in order, and the arrays that were made meanwhile."""

    captured = None  # the one that is being written

    def __init__(self):
        self.works = []
        self.arrays = []

    def launch(self, stream=None):
        for work in self.works:
            work()


def outside(what):
    """What no captured stream may do."""
    if Graph.captured is not None:
        raise RuntimeError(
            f"cudaErrorStreamCaptureUnsupported: not permitted when stream is capturing: {what}"
        )


def do(work):
    """Now; while a stream is captured, at each launch."""
    if Graph.captured is None:
        work()
    else:
        Graph.captured.works.append(work)


def made(run):
    """The result of run() on the device: a view of an array there, or another array, computed at
    each launch."""
    result = run()
    result = np.asarray(result) if isinstance(result, np.generic) else result
    if (
        Graph.captured is not None
        and isinstance(result, np.ndarray)
        and id(_owner(result)) not in _owners
    ):
        result.reshape(-1).view(np.uint8)[:] = 0xFF
        Graph.captured.works.append(lambda: np.copyto(result, run()))
    return on_device(result)


def _owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


# --- arrays
# ----------------------------------------------------------------------------------------------------------


def on_host(value, *, index=False):
    """Arguments as NumPy takes them."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray) and not index:
        raise TypeError(f"Unsupported type {type(value)}: a NumPy array beside CuPy's")
    if isinstance(value, (tuple, list)):
        return type(value)(on_host(each, index=index) for each in value)
    return value


def on_device(result):
    """A result as CuPy gives it: arrays on the device, also of no dims."""
    if isinstance(result, (tuple, list)):
        return type(result)(map(on_device, result))
    if isinstance(result, np.generic):
        result = np.asarray(result)
    if not isinstance(result, np.ndarray):
        return result
    owner = _owner(result)
    first = _owners.get(id(owner))
    if first is None:
        _owners[id(owner)] = first = ndarray(owner)
        return first if owner is result else ndarray(result, first)
    return ndarray(result, first)


def computed(function, args, options):
    """function(*args), on the device; low precision multiplies matrices in float32 and rounds
    once."""
    if function.__name__ in WAITING:
        wait(function.__name__)
    if function.__name__ in PRODUCTS:
        outside("CuPy's cuBLAS")
    if function is np.take:
        options = {**options, "mode": "wrap"}  # CuPy looks at no index
    out = options.pop("out", None)
    hosts = on_host(args)
    options = {name: on_host(value) for name, value in options.items()}

    def run():
        with np.errstate(all="ignore"):
            if function is np.matmul and hosts[0].dtype.itemsize == 2:
                return np.matmul(*(host.astype(np.float32) for host in hosts)).astype(
                    hosts[0].dtype
                )
            return function(*hosts, **options)

    if out is None:
        return made(run)
    if function is np.matmul:
        do(lambda: np.copyto(out.host, run()))
    else:
        options["out"] = on_host(out)
        do(run)
    return out


class ndarray(fake_cupy.ndarray):  # noqa: N801 - CuPy's name
    """An array on the device; `host` is where its numbers are."""

    __array_ufunc__ = None  # a NumPy number times this asks __rmul__ below

    def __init__(self, host, base=None):
        super().__init__(None, host=host, base=base)
        if Graph.captured is not None:
            Graph.captured.arrays.append(self)
        self.itemsize = host.itemsize

    @property
    def T(self):  # noqa: N802 - NumPy's name
        return on_device(self.host.T)

    def __getattr__(self, name):
        if name.startswith("__") or name == "host" or not hasattr(self.host, name):
            raise AttributeError(name)

        def method(*args, **options):
            return computed(getattr(np.ndarray, name), (self, *args), options)

        return method

    def __getitem__(self, index):
        self._masks(index)
        return made(lambda: self.host[on_host(index, index=True)])

    def __setitem__(self, index, value):
        if isinstance(value, ndarray):
            self._masks(index)
        places = on_host(index, index=True)
        source = on_host(value)
        do(lambda: self.host.__setitem__(places, source))

    def _masks(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, ndarray) and part.dtype == bool for part in parts):
            wait("a mask as an index")

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape, **options):
        return computed(np.ndarray.reshape, (self, *shape), options)

    def view(self, dtype):
        return on_device(self.host.view(dtype))

    def copy(self):
        return made(self.host.copy)

    def astype(self, dtype, copy=True):
        def run():
            with np.errstate(all="ignore"):
                return self.host.astype(dtype, copy=copy)

        return made(run)

    def sum(self, *args, **options):
        return computed(np.ndarray.sum, (self, *args), options)

    def set(self, values, stream=None):
        assert (
            isinstance(values, np.ndarray)
            and values.dtype == self.dtype
            and values.shape == self.shape
        )
        outside("set")
        if stream is None:
            wait("set")
        self.host[...] = values

    def get(self, stream=None, order="C", out=None, blocking=True):
        outside("get")
        if blocking:
            wait("get")
        out = np.empty_like(self.host) if out is None else out
        out[...] = self.host
        return out

    def item(self):
        wait("item")
        return self.host.item()

    def tolist(self):
        wait("tolist")
        return self.host.tolist()


def _operators():
    compared = ("eq", "ne", "lt", "le", "gt", "ge")
    names = {
        "add": "add",
        "sub": "subtract",
        "mul": "multiply",
        "truediv": "divide",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "pow": "power",
        "matmul": "matmul",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "lshift": "left_shift",
        "rshift": "right_shift",
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
    }
    for name, numpy_name in names.items():
        ufunc = getattr(np, numpy_name)
        setattr(ndarray, f"__{name}__", lambda a, b, ufunc=ufunc: computed(ufunc, (a, b), {}))
        if name not in compared:
            setattr(ndarray, f"__r{name}__", lambda a, b, ufunc=ufunc: computed(ufunc, (b, a), {}))
            setattr(
                ndarray,
                f"__i{name}__",
                lambda a, b, ufunc=ufunc: computed(ufunc, (a, b), {"out": a}),
            )
    for name, ufunc in (("neg", np.negative), ("abs", np.absolute), ("invert", np.invert)):
        setattr(ndarray, f"__{name}__", lambda a, ufunc=ufunc: computed(ufunc, (a,), {}))
    for name, kind in (("float", float), ("int", int), ("bool", bool), ("index", int)):

        def read(array, kind=kind, name=name):
            wait(name)
            return kind(array.host)

        setattr(ndarray, f"__{name}__", read)


_operators()


class _Function:
    """A function of NumPy's on device arrays, and a ufunc's `at`."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args, **options):
        return computed(self._function, args, options)

    def at(self, target, index, values):
        index = on_host(index, index=True)
        values = on_host(values)
        do(lambda: self._function.at(target.host, index, values))


class _CuPy(ModuleType):
    def __getattr__(self, name):
        found = getattr(np, name)
        return _Function(found) if callable(found) and not isinstance(found, type) else found


class RawModule(fake_cupy.RawModule):
    """Kernels that run at once."""

    class Kernel(fake_cupy.RawKernel):
        def put(self, work):
            do(work)


def empty(shape, dtype=float):
    """Rubbish."""
    result = np.empty(shape, dtype)
    result.reshape(-1).view(np.uint8)[:] = 0xFF
    return on_device(result)


def asarray(values, dtype=None):
    """A device array itself; a copy of anything else, which nobody waits for."""
    if isinstance(values, ndarray):
        return values if dtype is None or values.dtype == dtype else values.astype(dtype)
    outside("a copy from the host")
    return on_device(np.array(values, dtype))


def array(values, dtype=None, order="K"):
    """A copy; nobody waits for it."""
    if not isinstance(values, ndarray):
        outside("a copy from the host")
    return made(lambda: np.array(on_host(values, index=True), dtype, order=order))


class Stream(nullcontext):
    """The only one."""

    ptr = 0

    def __init__(self, null=False, non_blocking=False):
        super().__init__()

    def synchronize(self):
        wait("a stream")

    def wait_event(self, event):
        """All is done at once."""

    def begin_capture(self):
        assert Graph.captured is None
        Graph.captured = Graph()

    def end_capture(self):
        graph = Graph.captured
        Graph.captured = None
        return graph


class MemoryPool:
    """Takes nothing of what the stand-in holds."""

    malloc = None

    def total_bytes(self):
        return 0


class Cublas:
    """The library, as cublas.py calls it: on addresses, counting down columns."""

    DTYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}

    def __init__(self):
        self.calls = []
        self.workspace = None
        self.has_stream = False

    def cublasCreate_v2(self, handle):
        handle._obj.value = 7
        return 0

    def cublasSetStream_v2(self, handle, stream):
        self.workspace = None
        self.has_stream = True
        return 0

    def cublasSetWorkspace_v2(self, handle, address, size):
        self.workspace = address.value
        return 0

    def cublasDestroy_v2(self, handle):
        self.calls.append("destroy")
        return 0

    def cublasGemmEx(
        self,
        handle,
        turn_x,
        turn_y,
        m,
        n,
        k,
        alpha,
        x,
        x_kind,
        x_step,
        y,
        y_kind,
        y_step,
        beta,
        z,
        z_kind,
        z_step,
        compute,
        algorithm,
    ):
        """z (m, n) = alpha x y + beta z, of matrices whose columns lie one after the other, turned
        or not."""
        assert (
            handle.value == 7
            and self.has_stream
            and self.workspace
            and (compute, algorithm) == (68, -1)
        )
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        if x_step < (k if turn_x else m) or y_step < (n if turn_y else k) or z_step < m:
            return 7  # CUBLAS_STATUS_INVALID_VALUE
        one = _matrix(x, x_kind, (m, k), turn_x, x_step)
        two = _matrix(y, y_kind, (k, n), turn_y, y_step)
        result = _matrix(z, z_kind, (m, n), 0, z_step)
        self.calls.append((turn_x, turn_y, m, n, k))
        self.has_stream = False  # the next product may be in another

        def run():
            # as `computed` does
            wide = np.matmul(two.T.astype(np.float32), one.T.astype(np.float32))
            np.copyto(result.T, wide.astype(result.dtype))

        do(run)
        return 0


def _matrix(address, kind, shape, turned, step):
    """A matrix of the given shape: element (i, j) lies at i + j step, or turned at j + i step."""
    size = np.dtype(Cublas.DTYPES[kind]).itemsize
    strides = (step * size, size) if turned else (size, step * size)
    nbytes = (
        sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + size
    )
    return np.ndarray(
        shape, Cublas.DTYPES[kind], fake_cupy.at(address.value, nbytes), strides=strides
    )


class Event(fake_cupy.Event):
    def record(self, stream=None):
        """All is done at once."""

    def synchronize(self):
        wait("an event")


def install(monkeypatch):
    """Stand in for CuPy until the test ends: its module. No launch is in `waits` yet."""
    found = modules()
    fake_cupy.stand_in(monkeypatch, found)
    monkeypatch.setattr(cublas, "load", Cublas)
    monkeypatch.setattr(cublas._current, "own", {})  # of an earlier stand-in
    monkeypatch.setattr(Graph, "captured", None)
    waits.clear()
    return found["cupy"]


def modules():
    """The modules to stand in sys.modules."""
    found = fake_cupy.modules()
    cupy = _CuPy("cupy")
    cuda = found["cupy.cuda"]
    pinned = found["cupyx"]
    vars(cuda).update(
        Event=Event,
        Stream=Stream,
        get_current_stream=Stream,
        MemoryPool=MemoryPool,
        using_allocator=lambda malloc: nullcontext(),
    )
    pinned.empty_pinned = np.empty
    vars(cupy).update(
        ndarray=ndarray,
        cuda=cuda,
        RawModule=RawModule,
        is_available=lambda: True,
        empty=empty,
        asarray=asarray,
        array=array,
    )
    return {**found, "cupy": cupy}
