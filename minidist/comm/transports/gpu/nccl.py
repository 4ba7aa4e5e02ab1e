"""Ranks with GPUs: arrays of CuPy go from GPU to GPU by NCCL, everything else over a host transport (auto.py).

    a call with CuPy arrays    the ranks agree, over the host     dissemination's barrier with the signature (native.py)
                               its NCCL call joins the queue      of the group's own stream; returns at once
                               the program's stream waits         for that stream, on the GPU
    send and recv of those     the header goes over the host      the array by a lane (nccl_lane.py)
    any other call             as on auto                         host arrays; `algorithm="ring"` on CuPy arrays, which
                                                                  are staged

A group's communicator is made by its first such call; its first rank draws the id, and tells it over the host.

    limit        a thread looks at events (staging.py); the call that outlasts the limit aborts the transport
    lost peer    the monitor aborts the transport, as everywhere
    abort        ncclCommAbort on all communicators ends their kernels, and the waits for them. Every later call, and
                 wait() of an earlier one, raises the error.
    threads      NCCL calls of a rank are made one at a time. Each communicator has its own stream, because two groups'
                 calls may reach the GPU in another order on another rank.

Ranks that share one GPU take CUDA IPC (cuda_ipc.py); NCCL before 2.30, or without NCCL_MULTI_RANK_GPU_ENABLE=1, refuses
them.

Source: NCCL user guide (stream semantics, group calls, communicator abort). Not yet measured on a GPU.
"""

import os
import platform
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.device_lane import DeviceTransport
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.native import Native
from minidist.comm.transport import Transport
from minidist.comm.transports.gpu import cuda_ipc
from minidist.comm.transports.gpu.nccl_lane import Communicator, NcclLane
from minidist.comm.transports.gpu.staging import Gpu, GpuNative, GpuSide, parts
from minidist.device.backend import Array, dtype_name, module_for
from minidist.errors import DeviceError, LaunchError

_KINDS = {"int8": "INT8", "uint8": "UINT8", "int32": "INT32", "uint32": "UINT32", "int64": "INT64", "uint64": "UINT64",
          "float16": "FLOAT16", "float32": "FLOAT32", "float64": "FLOAT64", "bfloat16": "BFLOAT16"}
_OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PROD"}


def connect(link: MonitorClient, transport: Transport) -> Transport:
    """Give a connected host transport this rank's GPU, the next on its host.

    Raises: LaunchError without CuPy, NCCL or a GPU.
    """
    cupy, library = find()
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")      # connect at once, not in the first call: see nccl_lane.py
    transport.name = "nccl"
    hosts = [info["gpu_host"] for info in link.meet({"gpu_host": platform.node()})]
    device_id = hosts[:link.world_rank].count(hosts[link.world_rank]) % cupy.cuda.runtime.getDeviceCount()
    gpu = Gpu(transport, cupy, device_id)
    gpu.device.use()
    bus = f"{platform.node()} {cupy.cuda.runtime.deviceGetPCIBusId(device_id)}"
    transport.device = GpuDevice(gpu, library, *cuda_ipc.places_and_reach(gpu, link, bus))
    return transport


def find() -> tuple[Any, Any]:
    """CuPy and its NCCL. Raises: LaunchError, one line, where one of them or a GPU is missing."""
    try:
        cupy = module_for("cuda")
        from cupy.cuda import nccl
    except (ImportError, DeviceError) as error:
        raise LaunchError(f"transport 'nccl' cannot work here: {error}; or take auto") from error
    if not nccl.available:
        raise LaunchError("transport 'nccl' cannot work here: CuPy finds no NCCL; pip install nvidia-nccl-cu13 (or "
                          "nvidia-nccl-cu12), or take auto")
    return cupy, nccl


class GpuDevice(DeviceTransport):
    """Collectives between the GPUs of the job.

    Args: places  the GPU of each world rank, by a name that no other has
          ipc     whether ranks that share one can open each other's memory
    """

    def __init__(self, gpu: Gpu, library: Any, places: Sequence[str], ipc: bool) -> None:
        self.gpu, self.library, self._places, self._ipc = gpu, library, list(places), ipc
        self.one_at_a_time = threading.Lock()
        self._shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and library.get_version() >= 23000
        self._natives: dict[int, Native] = {}
        self._sides: dict[int, GpuSide] = {}
        self._lanes: dict[tuple[int, int, int], NcclLane] = {}
        self._parted: list[cuda_ipc.IpcNative] = []

    def refusal(self, world_ranks: Sequence[int], op: str | None, dtype: np.dtype | None) -> str | None:
        gpus = {self._places[rank] for rank in world_ranks}
        if len(gpus) < len(world_ranks) and not self._shares:
            if len(gpus) > 1 or not self._ipc:
                return "NCCL takes one rank a GPU, and CUDA IPC ranks of a single one that may share memory"
            return None
        if op is not None and dtype is not None and (op not in _OPS or dtype_name(dtype) not in _KINDS):
            return f"NCCL has no {op} of {dtype}"
        return None

    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        if group not in self._natives:
            side, distinct = self.side(group), len({self._places[rank] for rank in world_ranks}) == len(world_ranks)
            self._natives[group] = NcclNative(self, side, group, world_ranks) if distinct or self._shares else \
                cuda_ipc.IpcNative(self.gpu, side, group, world_ranks)
        return self._natives[group]

    def lane(self, group: int, src: int, dst: int) -> NcclLane | None:
        if self._places[src] == self._places[dst] and not self._shares:
            return None
        if (group, src, dst) not in self._lanes:
            self._lanes[group, src, dst] = NcclLane(self.gpu, self.library, self.one_at_a_time, src, dst)
        return self._lanes[group, src, dst]

    def finish(self) -> None:
        for lane in list(self._lanes.values()):
            lane.finish()
        self.gpu.watch.finish()

    def close(self) -> None:
        boards = {group: native for group, native in self._natives.items() if isinstance(native, cuda_ipc.IpcNative)}
        for group in boards:
            del self._natives[group]
        self._parted += boards.values()                     # keeps memory that could not be freed
        cuda_ipc.part(self.gpu, list(boards.values()))

    def side(self, group: int) -> GpuSide:
        if group not in self._sides:
            self._sides[group] = GpuSide(self.gpu)
        return self._sides[group]


class NcclNative(GpuNative):
    """NCCL among the ranks of one group.

    Bytes travel as NCCL_UINT8. An array without elements makes no call: CuPy's has no address.
    """

    def __init__(self, device: GpuDevice, side: GpuSide, group: int, world_ranks: Sequence[int]) -> None:
        super().__init__(device.gpu, side, group, world_ranks)
        self._nccl = device.library
        id = self._tell(np.frombuffer(self._nccl.get_unique_id() if self._rank == 0 else b"", np.uint8))[0]
        self._comm = self._gpu.within_limit(lambda: Communicator(
            self._gpu, self._nccl, device.one_at_a_time, side, self._size, id.tobytes(), self._rank),
            "NCCL's ranks to meet")
        self._queue = self._comm.queue

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        if x.size:
            self._queue("all_reduce", lambda comm, stream: comm.allReduce(
                _at(x), _at(out), x.size, self._kind(x), self._op(op), stream))

    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        if x.size:
            self._queue("reduce", lambda comm, stream: comm.reduce(
                _at(x), _at(x if out is None else out), x.size, self._kind(x), self._op(op), root, stream))

    def reduce_scatter(self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str) -> None:
        if not x.size:
            return
        if len(set(counts)) == 1:
            self._queue("reduce_scatter", lambda comm, stream: comm.reduceScatter(
                _at(x), _at(out), counts[0], self._kind(x), self._op(op), stream))
            return

        def each(comm: Any, stream: int) -> None:           # NCCL knows equal parts only
            for root, part in enumerate(parts(x, counts)):
                if part.size:
                    comm.reduce(_at(part), _at(out if root == self._rank else part), part.size, self._kind(x),
                                self._op(op), root, stream)

        self._queue("reduce_scatter", each)

    def broadcast(self, octets: np.ndarray, root: int) -> None:
        if octets.size:
            self._queue("broadcast", lambda comm, stream: comm.broadcast(
                _at(octets), _at(octets), octets.size, self._nccl.NCCL_UINT8, root, stream))

    def _gather_on_gpu(self, octets: Array, out: Array, counts: Sequence[int]) -> None:
        if out.size and len(set(counts)) == 1:
            self._queue("all_gather", lambda comm, stream: comm.allGather(
                _at(octets), _at(out), counts[0], self._nccl.NCCL_UINT8, stream))
        elif out.size:
            def each(comm: Any, stream: int) -> None:
                for root, part in enumerate(parts(out, counts)):
                    if part.size:
                        comm.broadcast(_at(octets if root == self._rank else part), _at(part), part.size,
                                       self._nccl.NCCL_UINT8, root, stream)

            self._queue("all_gather", each)

    def gather(self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int) -> None:
        if out is None:
            self._pass_on({root: octets}, {}, "gather")
            return
        places = dict(enumerate(parts(out, counts)))
        places.pop(root)[...] = octets
        self._pass_on({}, places, "gather")

    def scatter(self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int) -> None:
        leaving = {} if octets is None else dict(enumerate(parts(octets, counts)))
        leaving.pop(root, None)
        self._pass_on(leaving, {} if out is None else {root: out}, "scatter")

    def all_to_all(self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]) -> None:
        self._pass_on(dict(enumerate(parts(octets, leaving))), dict(enumerate(parts(out, coming))), "all_to_all")

    def _pass_on(self, leaving: dict[int, np.ndarray], coming: dict[int, np.ndarray], what: str) -> None:
        """Sends and receives of one NCCL group, which may wait for each other in any order."""
        def each(comm: Any, stream: int) -> None:
            for rank, part in leaving.items():
                if part.size:
                    comm.send(_at(part), part.size, self._nccl.NCCL_UINT8, rank, stream)
            for rank, part in coming.items():
                if part.size:
                    comm.recv(_at(part), part.size, self._nccl.NCCL_UINT8, rank, stream)

        if any(part.size for part in [*leaving.values(), *coming.values()]):
            self._queue(what, each)

    def _kind(self, array: np.ndarray) -> int:
        return int(getattr(self._nccl, f"NCCL_{_KINDS[dtype_name(array.dtype)]}"))

    def _op(self, op: str) -> int:
        return int(getattr(self._nccl, f"NCCL_{_OPS[op]}"))


def _at(array: Any) -> int:
    """A CuPy array's address."""
    return int(array.data.ptr)
