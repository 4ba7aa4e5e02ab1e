"""`import cupy` in processes of their own: the stand-in fake_gpu.py, and what the benches ask of a
GPU besides.

For `benchmarks/gpu.sh --rehearse`, which puts this folder and tests/support into PYTHONPATH.
Kernels run in the CPU build, thousands of times slower than on a GPU, so the benches find small
sizes here. Their times mean nothing.
"""

import sys
import time
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import fake_gpu
from fake_cupy import at

from minidist.bench.step.ranks import Model
from minidist.device import cublas

SMALL = {
    "minidist.bench.kernels.timing": {
        "STEP": Model(layers=1, width=32, heads=2, context=32, batch=1, vocab=64)
    },
    "minidist.bench.kernels.gpu": {"COPIED": 1 << 16, "SIDE": 64, "WARM_UPS": 1, "ROUNDS": 2},
}
note = fake_gpu.wait
allowed = [True]


class Event(fake_gpu.Event):
    """An event that knows the host's time of its record."""

    def record(self, stream=None):
        self.seconds = time.perf_counter()


class Pointer(SimpleNamespace):
    """The address of an array's memory."""

    def copy_from_device_async(self, source, size):
        at(self.ptr, size)[:] = at(source.ptr, size)

    def memset_async(self, value, size):
        """New memory is full of ones already."""


class ndarray(fake_gpu.ndarray):  # noqa: N801 - CuPy's name
    """An array whose address is a Pointer."""

    def __init__(self, host, base=None):
        super().__init__(host, base)
        self.data = Pointer(ptr=self.data.ptr)


def wait(what):
    """An error where allow_synchronize(False) holds."""
    if not allowed[-1]:
        raise RuntimeError(f"Device synchronization was detected while disallowed: {what}")
    note(what)


@contextmanager
def allow_synchronize(allow):
    """cupyx.allow_synchronize, with its warning."""
    warnings.warn("cupyx.allow_synchronize will be removed in future releases", stacklevel=3)
    allowed.append(allow)
    try:
        yield
    finally:
        allowed.pop()


fake_gpu.wait = wait
fake_gpu.ndarray = ndarray
cublas.load = fake_gpu.Cublas
found = fake_gpu.modules()
cupy = found["cupy"]
cuda = found["cupy.cuda"]
pool = SimpleNamespace(
    malloc=lambda nbytes: Pointer(ptr=0), total_bytes=lambda: 0, free_all_blocks=lambda: None
)
vars(cupy).update(
    get_default_memory_pool=lambda: pool,
    get_default_pinned_memory_pool=lambda: pool,
    __version__="a stand-in",
    __spec__=__spec__,
    __path__=[],
)
vars(cuda).update(
    Event=Event, get_elapsed_time=lambda start, stop: 1e3 * (stop.seconds - start.seconds) + 1e-6
)
vars(cuda.runtime).update(
    runtimeGetVersion=lambda: 13000,
    getDeviceCount=lambda: 1,
    getDeviceProperties=lambda id: {
        "name": b"a stand-in, no GPU",
        "l2CacheSize": 4096,
        "multiProcessorCount": 1,
        "major": 0,
        "minor": 0,
    },
)
found["cupyx"].allow_synchronize = allow_synchronize
for name in SMALL.keys() & sys.modules.keys():
    vars(sys.modules[name]).update(SMALL[name])
sys.modules.update(found)
