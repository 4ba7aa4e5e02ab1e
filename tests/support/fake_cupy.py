"""A CuPy without a GPU: what minidist's device code uses of it, true to its streams, events and
addresses.

Every stream is a thread that works off a queue, so what is not ordered by an event goes wrong here
as on a GPU; memory begins and ends as rubbish; NCCL's and IPC's calls work on raw addresses. Each
thread has a current device, the first until it takes another, and on each a default stream of its
own. NCCL's kernels wait for each other in the streams, take their time, and end when their
communicator is aborted.
"""

import ctypes
import itertools
import queue
import sys
import threading
import time
import weakref
from functools import partial
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

PATIENCE = 20.0  # seconds that a stream waits for anything
_numbers = itertools.count(1000)
_local = threading.local()
_streams = {}
_events = {}
_begins = {}  # address -> the arrays that begin there, weakly, for kernels' tables
# host arrays that the GPU reads, by address
_pinned = weakref.WeakValueDictionary()
_pinned_lock = threading.Lock()


# --- streams
# ---------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, null=False, non_blocking=False):
        self.ptr = next(_numbers)
        self._queue = queue.SimpleQueue()
        self._puts = itertools.count()
        self.device_id = _device()
        _streams[self.ptr] = self

    def put(self, work):
        """From any thread, also as an array dies in the middle of another put."""
        self._queue.put(work)
        if next(self._puts) == 0:
            threading.Thread(target=self._run, daemon=True, name="fake stream").start()

    def _run(self):
        while True:
            self._queue.get()()

    def wait_event(self, event):
        recorded = event.recorded
        if recorded is not None:
            self.put(lambda: recorded.wait(PATIENCE))

    def synchronize(self):
        reached = threading.Event()
        self.put(reached.set)
        assert reached.wait(PATIENCE), "a stream is stuck"

    def __enter__(self):
        if self.device_id != _device():
            raise RuntimeError(
                f"a stream of device {self.device_id}, but the current one is {_device()}"
            )
        _stack().append(self)
        return self

    def __exit__(self, *exception):
        _stack().pop()


def default_stream():
    """A thread's stream of its current device, until it takes another."""
    return Stream()


def _stack():
    stacks = vars(_local).setdefault("stacks", {})
    if _device() not in stacks:
        stacks[_device()] = [default_stream()]
    return stacks[_device()]


def get_current_stream():
    return _stack()[-1]


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = next(_numbers)
        self.recorded = None
        _events[self.ptr] = self

    def record(self, stream=None):
        self.recorded = recorded = threading.Event()
        (stream or get_current_stream()).put(recorded.set)

    @property
    def done(self):
        return self.recorded is None or self.recorded.is_set()

    def synchronize(self):
        assert self.recorded is None or self.recorded.wait(PATIENCE), "an event never comes"


class Device:
    compute_capability = "90"  # the CPU build holds every kernel

    def __init__(self, id=None):
        self.id = _device() if id is None else id

    def use(self):
        _local.devices = [self.id]

    def __enter__(self):
        _local.devices = [*getattr(_local, "devices", [0]), self.id]
        return self

    def __exit__(self, *exception):
        _local.devices.pop()


def _device():
    return getattr(_local, "devices", [0])[-1]


# --- arrays
# ----------------------------------------------------------------------------------------------------------


def at(address, nbytes):
    """The bytes at an address."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


class ndarray:
    def __init__(self, shape, dtype=float, memptr=None, *, host=None, base=None):
        if host is None and memptr is not None:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            host = at(memptr.ptr, nbytes).view(dtype).reshape(shape)
        elif host is None:
            host = np.empty(shape, dtype)
            self.stream = get_current_stream()
            _spoil(host, 0xA5)
            weakref.finalize(self, self.stream.put, partial(_spoil, host, 0x5A)).atexit = False
        self.host = host
        self.base = base
        self.shape = host.shape
        self.dtype = host.dtype
        self.strides = host.strides
        self.size = host.size
        self.ndim = host.ndim
        self.nbytes = host.nbytes
        self.device = Device()
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0] if host.size else 0)
        alive = [ref for ref in _begins.get(self.data.ptr, ()) if ref() is not None]
        _begins[self.data.ptr] = [*alive, weakref.ref(self)] if self.flags.c_contiguous else alive

    def _viewed(self, host):
        return ndarray(None, host=host, base=self if self.base is None else self.base)

    def __len__(self):
        return len(self.host)

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, index):
        return self._viewed(self.host[index])

    def __setitem__(self, index, value):
        target = self.host[index]
        source = _host(value)
        assert isinstance(value, ndarray | int | float), (
            "a NumPy array cannot be assigned to CuPy's"
        )
        get_current_stream().put(lambda: np.copyto(target, source, casting="unsafe"))

    def reshape(self, *shape):
        assert self.flags.c_contiguous, "reshape would copy"
        return self._viewed(self.host.reshape(*shape))

    def view(self, dtype):
        return self._viewed(self.host.view(dtype))

    def copy(self):
        return _computed(self.shape, self.dtype, lambda out: np.copyto(out, self.host))

    def astype(self, dtype, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return _computed(
            self.shape, np.dtype(dtype), lambda out: np.copyto(out, self.host, casting="unsafe")
        )

    def sum(self):
        return _computed((), self.dtype, lambda out: np.sum(self.host, out=out))

    def __truediv__(self, number):
        return _computed(self.shape, self.dtype, lambda out: np.divide(self.host, number, out=out))

    def get(self, stream=None, order="C", out=None, blocking=True):
        stream = stream or get_current_stream()
        out = np.empty_like(self.host) if out is None else out
        assert out.dtype == self.dtype and out.shape == self.shape and out.flags.c_contiguous
        stream.put(lambda: np.copyto(out, self.host))
        if blocking:
            stream.synchronize()
        return out

    def set(self, values, stream=None):
        """Returns at once; what is not pinned has been copied aside then."""
        assert (
            isinstance(values, np.ndarray)
            and values.dtype == self.dtype
            and values.shape == self.shape
        )
        source = values if _is_pinned(values.__array_interface__["data"][0]) else values.copy()
        (stream or get_current_stream()).put(lambda: np.copyto(self.host, source))


def _spoil(host, rubbish):
    """Memory is anybody's: when it is new, and, to the stream that it was allocated for, once
    nothing refers to it."""
    host.reshape(-1).view(np.uint8)[:] = rubbish


def empty_pinned(shape, dtype=float):
    array = np.empty(shape, dtype)
    with _pinned_lock:
        _pinned[array.__array_interface__["data"][0]] = array
    return array


def _is_pinned(address):
    with _pinned_lock:
        return any(start <= address < start + array.nbytes for start, array in _pinned.items())


def _host(value):
    return value.host if isinstance(value, ndarray) else value


def _computed(shape, dtype, fill):
    result = ndarray(shape, dtype)
    get_current_stream().put(lambda: fill(result.host))
    return result


def _ufunc(ufunc):
    def call(a, b):
        return _computed(a.shape, a.dtype, lambda out: ufunc(a.host, b.host, out=out))

    return call


def concatenate(arrays):
    length = sum(map(len, arrays))
    return _computed(
        (length,), arrays[0].dtype, lambda out: np.concatenate([_host(x) for x in arrays], out=out)
    )


def asarray(values):
    """A device array of these values."""
    result = ndarray(np.shape(values), np.asarray(values).dtype)
    result.set(np.asarray(values))
    return result


def _contiguous(x):
    return x if x.flags.c_contiguous else x.copy()


class Memory:
    """cudaMalloc's. It ends with the last reference, or with the process: here, the thread that
    made it."""

    def __init__(self, size):
        self._bytes = np.full(size, 0xA5, np.uint8)
        self.ptr = self._bytes.__array_interface__["data"][0]
        self.size = size
        end = weakref.finalize(self, _free, self._bytes, self.ptr)
        end.atexit = False
        vars(_local).setdefault("memory", []).append(end)


def end_process():
    """What the driver does as a process ends: here, the calling thread."""
    for ptr in vars(_local).pop("opened", []):
        Runtime.exported[ptr] -= 1
    for end in vars(_local).pop("memory", []):
        end()


def _free(host, ptr):
    if Runtime.exported.get(ptr):
        Runtime.freed_under_others.append(ptr)
    _spoil(host, 0x5A)


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr = ptr
        self.size = size
        self.owner = owner


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """cupy.cuda.runtime. `exported` counts for each address who has it open, `freed_under_others`
    has those that were freed meanwhile, which leaves CUDA undefined; `refuses` turns IPC off."""

    CUDARuntimeError = CUDARuntimeError
    exported = {}
    freed_under_others = []

    def __init__(self):
        self.refuses = False
        self._lock = threading.Lock()
        self.exported.clear()
        self.freed_under_others.clear()

    @property
    def opened(self):
        return sum(self.exported.values())

    def getDevice(self):
        return _device()

    def getDeviceCount(self):
        return 2

    def deviceGetPCIBusId(self, device):
        return f"0000:0{device}:00.0"

    def pointerGetAttributes(self, ptr):
        return SimpleNamespace(type=1 if _is_pinned(ptr) else 0)

    def ipcGetMemHandle(self, ptr):
        if self.refuses:
            raise CUDARuntimeError("not supported")
        return ptr.to_bytes(64, "little")

    ipcGetEventHandle = ipcGetMemHandle

    def ipcOpenMemHandle(self, handle):
        assert len(handle) == 64
        ptr = int.from_bytes(handle, "little")
        with self._lock:
            self.exported[ptr] = self.exported.get(ptr, 0) + 1
            vars(_local).setdefault("opened", []).append(ptr)
        return ptr

    def ipcCloseMemHandle(self, ptr):
        with self._lock:
            self.exported[ptr] -= 1
        if ptr in vars(_local).get("opened", []):  # another thread of the rank may have opened it
            _local.opened.remove(ptr)

    def ipcOpenEventHandle(self, handle):
        return int.from_bytes(handle, "little")

    def eventDestroy(self, event):
        assert event in _events

    def streamWaitEvent(self, stream, event):
        _streams[stream].wait_event(_events[event])


# --- NCCL
# ------------------------------------------------------------------------------------------------------------


class NcclError(RuntimeError):
    pass


class _Hub:
    """What the communicators of one id share: what each rank has brought to each step."""

    def __init__(self):
        self.changed = threading.Condition()
        self.table = {}

    def put(self, key, rank, value):
        with self.changed:
            self.table.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def wait(self, key, ranks, comm):
        """Return what these ranks bring, when all have; None once the communicator is aborted."""
        with self.changed:
            self.changed.wait_for(
                lambda: comm.aborted or set(ranks) <= self.table.get(key, {}).keys(), PATIENCE
            )
            return None if comm.aborted else dict(self.table[key])


class NcclCommunicator:
    hubs = {}
    kernel_seconds = 0.002
    all = []

    def __init__(self, ndev, commId, rank):
        assert len(commId) == 128
        self.size = ndev
        self.rank = rank
        self.aborted = False
        self.steps = 0
        self.hub = self.hubs.setdefault(commId, _Hub())
        self.sent = {}
        self.failed = None
        self.all.append(self)
        self.hub.put("init", rank, True)
        self.hub.wait("init", range(ndev), self)

    def abort(self):
        with self.hub.changed:
            self.aborted = True
            self.hub.changed.notify_all()

    def check_async_error(self):
        if self.failed:
            raise NcclError(self.failed)

    def allReduce(self, send, recv, count, kind, op, stream):
        self._add(
            stream,
            "allReduce",
            (count, kind, op),
            send,
            recv,
            lambda all: (0, _reduced(all, count, kind, op)),
        )

    def reduce(self, send, recv, count, kind, op, root, stream):
        self._add(
            stream,
            "reduce",
            (count, kind, op, root),
            send,
            recv,
            lambda all: (0, _reduced(all, count, kind, op)) if self.rank == root else None,
        )

    def reduceScatter(self, send, recv, count, kind, op, stream):
        nbytes = count * _DTYPES[kind].itemsize
        self._add(
            stream,
            "reduceScatter",
            (count, kind, op),
            send,
            recv,
            lambda all: (
                0,
                _reduced(
                    {rank: address + self.rank * nbytes for rank, address in all.items()},
                    count,
                    kind,
                    op,
                ),
            ),
        )

    def broadcast(self, send, recv, count, kind, root, stream):
        nbytes = count * _DTYPES[kind].itemsize
        self._add(
            stream,
            "broadcast",
            (count, kind, root),
            send,
            recv,
            lambda all: (0, at(all[root], nbytes).copy()),
        )

    def allGather(self, send, recv, count, kind, stream):
        nbytes = count * _DTYPES[kind].itemsize
        self._add(
            stream,
            "allGather",
            (count, kind),
            send,
            recv,
            lambda all: (0, np.concatenate([at(all[rank], nbytes) for rank in range(self.size)])),
        )

    def send(self, ptr, count, kind, peer, stream):
        _group().append((self, stream, ("send", peer, ptr, count * _DTYPES[kind].itemsize)))

    def recv(self, ptr, count, kind, peer, stream):
        _group().append((self, stream, ("recv", peer, ptr, count * _DTYPES[kind].itemsize)))

    def _add(self, stream, verb, what, send, recv, outcome):
        _group().append((self, stream, (verb, what, send, recv, outcome)))

    def run(self, works):
        """The kernel of one group of calls."""
        time.sleep(self.kernel_seconds)
        passing = [work for work in works if work[0] in ("send", "recv")]
        for verb, what, send, recv, outcome in (
            work for work in works if work[0] not in ("send", "recv")
        ):
            self.steps += 1
            self.hub.put((self.steps, "begin"), self.rank, ((verb, what), send))
            begun = self.hub.wait((self.steps, "begin"), range(self.size), self)
            if begun is None:
                return
            assert len({told for told, _ in begun.values()}) == 1, f"NCCL would hang: {begun}"
            result = outcome({rank: address for rank, (_, address) in begun.items()})
            self.hub.put((self.steps, "end"), self.rank, True)
            if self.hub.wait((self.steps, "end"), range(self.size), self) is None:
                return
            if result is not None:
                at(recv, result[1].nbytes)[...] = result[1].view(np.uint8)
        self._pass(passing)

    def _pass(self, works):
        numbers = []
        for way, peer, ptr, nbytes in works:
            pair = (self.rank, peer) if way == "send" else (peer, self.rank)
            # of what goes to itself, too
            number = self.sent[way, pair] = self.sent.get((way, pair), 0) + 1
            numbers.append((pair, number))
            if way == "send":
                self.hub.put((pair, number, "there"), self.rank, at(ptr, nbytes))
        for (way, peer, ptr, nbytes), (pair, number) in zip(works, numbers, strict=True):
            if way == "recv":
                there = self.hub.wait((pair, number, "there"), [peer], self)
                if there is None:
                    return
                at(ptr, nbytes)[...] = there[peer]
                self.hub.put((pair, number, "taken"), self.rank, True)
        for (way, peer, _, _), (pair, number) in zip(works, numbers, strict=True):
            if way == "send" and self.hub.wait((pair, number, "taken"), [peer], self) is None:
                return


def _group():
    assert getattr(_local, "group", None) is not None, "outside groupStart and groupEnd"
    return _local.group


def _reduced(addresses, count, kind, op):
    total = None
    for rank in sorted(addresses):
        values = at(addresses[rank], count * _DTYPES[kind].itemsize).view(_DTYPES[kind])
        total = values.copy() if total is None else _UFUNCS[op](total, values)
    return total


_DTYPES = {
    0: np.dtype("i1"),
    1: np.dtype("u1"),
    2: np.dtype("i4"),
    3: np.dtype("u4"),
    4: np.dtype("i8"),
    5: np.dtype("u8"),
    6: np.dtype("f2"),
    7: np.dtype("f4"),
    8: np.dtype("f8"),
    9: np.dtype(ml_dtypes.bfloat16),
}
_UFUNCS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}
_NAMES = (
    "INT8",
    "UINT8",
    "INT32",
    "UINT32",
    "INT64",
    "UINT64",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "BFLOAT16",
)


def _group_start():
    _local.group = []


def _group_end():
    works = _local.group
    _local.group = None
    for comm, stream in {(comm, stream): None for comm, stream, _ in works}:
        if comm.aborted:
            raise NcclError("invalid argument")
        mine = [work for its, where, work in works if (its, where) == (comm, stream)]
        _streams[stream].put(lambda comm=comm, mine=mine: comm.run(mine))


# --- kernels
# ---------------------------------------------------------------------------------------------------------


class CompileException(Exception):
    pass


class RawModule:
    """CUDA source whose kernels run on the CPU build, after what was put in the current stream
    before."""

    def __init__(self, code, options=(), name_expressions=()):
        from minidist.kernels.loader import Source  # noqa: PLC0415 - the transports' tests need no kernels

        # #line 1 "softmax.cu"
        self._source = Source(code.split('"')[1], name_expressions)
        self._functions = {}
        vars(self._source)["text"] = code

    def get_function(self, name):
        """Built now, as CuPy compiles, and not in the stream, which nobody waits for as long as g++
        may take."""
        from minidist.kernels import on_cpu  # noqa: PLC0415

        on_cpu.build(self._source)
        return self._functions.setdefault(name, self.Kernel(self._source, name))


class RawKernel:
    """A kernel's table of pointers is an array of addresses, at which arrays that are alive
    begin."""

    def __init__(self, source, name):
        self._source = source
        self._name = name
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid, block, args, shared_mem=0):
        from minidist.kernels import on_cpu  # noqa: PLC0415

        assert shared_mem <= self.max_dynamic_shared_size_bytes, "CUDA_ERROR_INVALID_VALUE"
        parameters = self._source.parameters(self._name)
        for parameter, arg in zip(parameters, args, strict=True):
            assert isinstance(arg, ndarray) or arg.dtype == (
                np.uint64 if parameter.pointer else parameter.kind
            )
        values = [
            (parameter, self._value(parameter, arg))
            for parameter, arg in zip(parameters, args, strict=True)
        ]
        self.put(lambda: on_cpu.run(self._source, self._name, grid, block, values, shared_mem))

    def put(self, work):
        get_current_stream().put(work)

    def _value(self, parameter, arg):
        from minidist.kernels.loader import Table  # noqa: PLC0415

        if not isinstance(arg, ndarray):
            return None if parameter.pointer else arg
        if not parameter.table:
            return arg.host
        return Table(
            [_longest(address).reshape(-1).view(parameter.kind) for address in arg.host.tolist()]
        )


def _longest(address):
    """The longest array that begins there; kernels may write into any of them."""
    return max(
        (array.host for array in (ref() for ref in _begins[address]) if array is not None),
        key=lambda host: host.nbytes,
    )


RawModule.Kernel = RawKernel


def modules():
    """The modules to stand in sys.modules: cupy, cupy.cuda, cupy.cuda.compiler, cupy.cuda.nccl,
    cupyx."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.compiler", "cupy.cuda.nccl", "cupyx")
    cupy, cuda, compiler, nccl, extra = (ModuleType(name) for name in names)
    compiler.CompileException = CompileException
    vars(cupy).update(
        ndarray=ndarray,
        empty=ndarray,
        asarray=asarray,
        concatenate=concatenate,
        cuda=cuda,
        RawModule=RawModule,
        is_available=lambda: True,
        ascontiguousarray=_contiguous,
        add=_ufunc(np.add),
        multiply=_ufunc(np.multiply),
        maximum=_ufunc(np.maximum),
        minimum=_ufunc(np.minimum),
        may_share_memory=lambda a, b: np.may_share_memory(a.host, b.host),
    )
    vars(cuda).update(
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_current_stream=get_current_stream,
        nccl=nccl,
        compiler=compiler,
        Memory=Memory,
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        runtime=Runtime(),
    )
    vars(nccl).update(
        {f"NCCL_{name}": number for number, name in enumerate(_NAMES)},
        NCCL_SUM=0,
        NCCL_PROD=1,
        NCCL_MAX=2,
        NCCL_MIN=3,
        available=True,
        NcclError=NcclError,
        NcclCommunicator=NcclCommunicator,
        get_version=lambda: 22707,
        groupStart=_group_start,
        groupEnd=_group_end,
        get_unique_id=lambda: next(_numbers).to_bytes(128, "little"),
    )
    extra.empty_pinned = empty_pinned
    return dict(zip(names, (cupy, cuda, compiler, nccl, extra), strict=True))


def stand_in(monkeypatch, modules):
    """Put these in sys.modules until the test ends. Kernels forget what an earlier stand-in
    compiled."""
    from minidist.kernels.compile import sources  # noqa: PLC0415 - who takes modules() alone needs no kernels

    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for source in sources():
        monkeypatch.setattr(
            source,
            "__dict__",
            {key: value for key, value in vars(source).items() if key != "module"},
        )
