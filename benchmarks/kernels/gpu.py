"""GPU timing of `minidist bench kernels`: events, caches emptied before each run, ceilings measured
first.

For a short kernel, the launch on the host takes longer than the kernel on the GPU; without other
work the GPU would wait between the events. So the GPU first reads a buffer for long enough that the
host can queue all work of a contender. The buffer is four times as large as the second-level cache,
so reading it also empties this cache.
"""

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from minidist.device.backend import Array, dtype, matmul, module_for
from minidist.errors import DeviceError

COPIED = 1 << 30  # bytes of the array that is copied to measure the bandwidth
SIDE = 8192  # side of the matrices that are multiplied to measure the rate
DTYPES = ("bfloat16", "float32")
READ_CACHES = 4  # bytes read before each run, in units of the second-level cache
WARM_UPS = 5  # runs before the first timed run
MOST_READINGS = 200  # largest number of readings of the buffer before one run
ROUNDS = 10  # a ceiling is the median of this number of runs

Work = Callable[[], Any]


class CudaGpu:
    """The current GPU, through CuPy (or its stand-in).

    Args:    cache: bytes of the buffer that is read before each run (default: READ_CACHES
             second-level caches).
    Raises:  DeviceError without CuPy or a GPU.
    """

    device = "cuda"  # as backend.to_device names it

    def __init__(self, *, cache: int | None = None) -> None:
        try:
            self.xp = module_for("cuda")
        except DeviceError as error:
            raise DeviceError(
                f"{_without_advice(error)}; without a GPU, --count counts what each rung moves"
            ) from error
        self.cuda = self.xp.cuda
        self.properties = self.cuda.runtime.getDeviceProperties(self.cuda.Device().id)
        nbytes = cache or READ_CACHES * self.properties["l2CacheSize"]
        self._buffer = self.xp.asarray(np.ones(nbytes // 4, np.float32))

    def timer(self, work: Work) -> Callable[[], float]:
        """Warm up and measure how long the host takes to queue the work.

        Returns: a function that returns the seconds of one run.
        """
        for _ in range(WARM_UPS):
            self._between_events(work)
        stream = self.cuda.get_current_stream()
        queueing = []
        for _ in range(WARM_UPS):
            stream.synchronize()
            start = time.perf_counter()
            work()
            queueing.append(time.perf_counter() - start)
        reading = min(self._between_events(self._buffer.sum) for _ in range(WARM_UPS))
        return partial(self._seconds, work, readings(max(queueing), reading))

    def _seconds(self, work: Work, times: int) -> float:
        """Return the seconds of one run after `times` readings of the buffer."""
        for _ in range(times):
            self._buffer.sum()
        return self._between_events(work)

    def _between_events(self, work: Work) -> float:
        start = self.cuda.Event()
        stop = self.cuda.Event()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return float(self.cuda.get_elapsed_time(start, stop)) * 1e-3

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Set all bits of new arrays in the block, so that an element without a write is found."""
        pool = self.xp.get_default_memory_pool()

        def allocate(nbytes: int) -> Any:
            pointer = pool.malloc(nbytes)
            if nbytes:
                pointer.memset_async(0xFF, nbytes)
            return pointer

        with self.cuda.using_allocator(allocate):
            yield

    def free(self) -> None:
        """Empty the memory pools, because the next kernel's arrays have other sizes."""
        self.xp.get_default_memory_pool().free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def ceilings(self, kinds: Sequence[str] = DTYPES) -> dict[str, Any]:
        """Return measured rates: "copy": bytes per second, read and written; "matrix": cuBLAS's
        operations per second by dtype."""
        from_, to = (self.xp.empty((COPIED // 4,), np.float32) for _ in range(2))
        from_[...] = 1.0
        copy = 2 * COPIED / self.median(lambda: to.data.copy_from_device_async(from_.data, COPIED))
        return {
            "copy": copy,
            "matrix": {kind: 2 * SIDE**3 / self.median(self._product(kind)) for kind in kinds},
        }

    def _product(self, kind: str) -> Work:
        rng = np.random.default_rng()
        a, b = (
            self.xp.asarray(rng.standard_normal((SIDE, SIDE), np.float32)).astype(dtype(kind))
            for _ in range(2)
        )
        return lambda: matmul(a, b)

    def median(self, work: Work) -> float:
        """Return the median seconds of a run."""
        timer = self.timer(work)
        return statistics.median(timer() for _ in range(ROUNDS))

    def about(self) -> dict[str, Any]:
        """Return name, driver and versions of the GPU and its libraries."""
        return {
            "name": self.properties["name"].decode(),
            "multiprocessors": self.properties["multiProcessorCount"],
            "cupy": self.xp.__version__,
            "cuda": self.cuda.runtime.runtimeGetVersion(),
            "driver": _driver(),
        }


def readings(queueing: float, reading: float) -> int:
    """Return how many times to read the buffer: at least once, and for twice the time that the host
    takes to queue the work, up to MOST_READINGS."""
    return min(MOST_READINGS, 1 + math.ceil(2 * queueing / reading)) if reading else MOST_READINGS


def _without_advice(error: DeviceError) -> str:
    """Return the message without its advice to choose another device."""
    return (
        str(error)
        .removesuffix("choose --device cpu")
        .rstrip()
        .removesuffix(", or")
        .removesuffix(";")
    )


def _driver() -> str:
    """Return the driver's version, or "" without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=30,
        check=False,
    )
    return (told.stdout.splitlines() or [""])[0].strip()


def as_torch(torch: Any, array: Array) -> Any:
    """Return PyTorch's tensor over the same memory; bfloat16 is passed as int16, because CuPy can
    pass this."""
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == np.uint32:
        return torch.from_dlpack(array.view(np.int32))
    if array.dtype == bool:
        return torch.from_dlpack(array.view(np.uint8)).bool()
    return torch.from_dlpack(array)
