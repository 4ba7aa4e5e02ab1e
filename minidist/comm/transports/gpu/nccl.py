"""Ranks with GPUs: CuPy's arrays are sent from GPU to GPU by NCCL, everything else over a host
transport (auto.py).

    a call with CuPy arrays    the ranks agree, over the host     dissemination's barrier with the
                               signature (native.py)
                               its NCCL call joins the queue      of the group's own stream; returns
                                                                  at once
                               the program's stream waits         for that stream, on the GPU
    send and recv of those     the header goes over the host      the array by a lane (nccl_lane.py)
    any other call             as on auto                         host arrays; `algorithm="ring"` on
                                                                  CuPy arrays, which are staged

A group's first call with CuPy arrays makes its communicator; its first rank draws the id, and sends
it over the host. The communicator has its own stream, because two groups' calls may reach the GPU
in another order on another rank. When a call exceeds the limit (staging.py), or a peer is lost, the
transport is aborted; ncclCommAbort then ends the kernels, and the waits for them. Ranks that share
one GPU use CUDA IPC (cuda_ipc.py); NCCL before 2.30, or without NCCL_MULTI_RANK_GPU_ENABLE=1,
refuses them.

Source: NCCL user guide (stream semantics, group calls, communicator abort). Run on one H200: NCCL
of one rank, 2 and 3 ranks by CUDA IPC. Between several GPUs not yet.
"""

import os
import platform
from collections import defaultdict
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

_KINDS = {
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float16": "FLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
    "bfloat16": "BFLOAT16",
}
_OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PROD"}


def connect(link: MonitorClient, transport: Transport) -> Transport:
    """Assign this rank a GPU, the next on its host, and add it to the connected host transport.

    Raises: LaunchError without CuPy, NCCL or a GPU.
    """
    cupy = find()
    # connect at once, not in the first call: see nccl_lane.py
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    transport.name = "nccl"
    hosts = [info["gpu_host"] for info in link.meet({"gpu_host": platform.node()})]
    device_id = (
        hosts[: link.world_rank].count(hosts[link.world_rank]) % cupy.cuda.runtime.getDeviceCount()
    )
    gpu = Gpu(transport, cupy, device_id)
    gpu.device.use()
    bus = f"{platform.node()} {cupy.cuda.runtime.deviceGetPCIBusId(device_id)}"
    transport.device = GpuDevice(gpu, *cuda_ipc.places_and_reach(gpu, link, bus))
    return transport


def find() -> Any:
    """Return CuPy. Raises: LaunchError, one line, if CuPy, its NCCL or a GPU is missing."""
    try:
        cupy = module_for("cuda")
        from cupy.cuda import nccl
    except (ImportError, DeviceError) as error:
        raise LaunchError(f"transport 'nccl' cannot work here: {error}; use auto") from error
    if not nccl.available:
        raise LaunchError(
            "transport 'nccl' cannot work here: CuPy finds no NCCL; pip install "
            "nvidia-nccl-cu13 (or nvidia-nccl-cu12), or use auto"
        )
    return cupy


class GpuDevice(DeviceTransport):
    """Collectives between the GPUs of the job.

    Args: places  the GPU of each world rank, by a unique name
          ipc     whether ranks that share a GPU can open each other's memory
    """

    def __init__(self, gpu: Gpu, places: Sequence[str], ipc: bool) -> None:
        self.gpu = gpu
        self._places = list(places)
        self._ipc = ipc
        self._shares = (
            os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and gpu.nccl.get_version() >= 23000
        )
        self._natives: dict[int, Native] = {}
        self._sides: defaultdict[int, GpuSide] = defaultdict(lambda: GpuSide(gpu))
        self._lanes: dict[tuple[int, int, int], NcclLane] = {}
        self._parted: list[cuda_ipc.IpcNative] = []

    def refusal(
        self, world_ranks: Sequence[int], op: str | None, dtype: np.dtype | None
    ) -> str | None:
        gpus = {self._places[rank] for rank in world_ranks}
        if len(gpus) < len(world_ranks) and not self._shares:
            if len(gpus) > 1 or not self._ipc:
                return (
                    "NCCL takes one rank a GPU, and CUDA IPC ranks of a single one that "
                    "may share memory"
                )
            return None
        if (
            op is not None
            and dtype is not None
            and (op not in _OPS or dtype_name(dtype) not in _KINDS)
        ):
            return f"NCCL has no {op} of {dtype}"
        return None

    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        if group not in self._natives:
            distinct = len({self._places[rank] for rank in world_ranks}) == len(world_ranks)
            native = NcclNative if distinct or self._shares else cuda_ipc.IpcNative
            self._natives[group] = native(self.gpu, self.side(group), group, world_ranks)
        return self._natives[group]

    def lane(self, group: int, src: int, dst: int) -> NcclLane | None:
        if self._places[src] == self._places[dst] and not self._shares:
            return None
        if (group, src, dst) not in self._lanes:
            self._lanes[group, src, dst] = NcclLane(self.gpu, src, dst)
        return self._lanes[group, src, dst]

    def finish(self) -> None:
        for lane in list(self._lanes.values()):
            lane.finish()
        self.gpu.watch.finish()

    def close(self) -> None:
        boards = [
            native for native in self._natives.values() if isinstance(native, cuda_ipc.IpcNative)
        ]
        self._natives.clear()
        self._parted += boards  # keeps alive memory that could not be freed
        cuda_ipc.part(self.gpu, boards)

    def side(self, group: int) -> GpuSide:
        return self._sides[group]


class NcclNative(GpuNative):
    """NCCL for the ranks of one group. It makes no call for an empty array: CuPy's has no
    address."""

    def __init__(self, gpu: Gpu, side: GpuSide, group: int, world_ranks: Sequence[int]) -> None:
        super().__init__(gpu, side, group, world_ranks)
        drawn = gpu.within_limit(gpu.nccl.get_unique_id, "NCCL's id") if self._rank == 0 else b""
        id = self._tell(np.frombuffer(drawn, np.uint8))[0].tobytes()
        self._comm = gpu.within_limit(
            lambda: Communicator(gpu, side, self._size, id, self._rank), "NCCL's ranks to join"
        )
        self._queue = self._comm.queue
        self._bytes = gpu.nccl.NCCL_UINT8

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        if x.size:
            self._queue(
                "all_reduce",
                lambda comm, stream: comm.allReduce(
                    _at(x), _at(out), x.size, *self._kind_and(op, x), stream
                ),
            )

    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        if x.size:
            self._queue(
                "reduce",
                lambda comm, stream: comm.reduce(
                    _at(x),
                    _at(x if out is None else out),
                    x.size,
                    *self._kind_and(op, x),
                    root,
                    stream,
                ),
            )

    def reduce_scatter(
        self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str
    ) -> None:
        def uneven(comm: Any, stream: int) -> None:  # NCCL's reduceScatter takes only equal parts
            for root, part in enumerate(parts(x, counts)):
                if part.size:
                    comm.reduce(
                        _at(part),
                        _at(out if root == self._rank else part),
                        part.size,
                        *self._kind_and(op, x),
                        root,
                        stream,
                    )

        if x.size:
            self._queue(
                "reduce_scatter",
                uneven
                if len(set(counts)) > 1
                else lambda comm, stream: comm.reduceScatter(
                    _at(x), _at(out), counts[0], *self._kind_and(op, x), stream
                ),
            )

    def broadcast(self, octets: np.ndarray, root: int) -> None:
        if octets.size:
            self._queue(
                "broadcast",
                lambda comm, stream: comm.broadcast(
                    _at(octets), _at(octets), octets.size, self._bytes, root, stream
                ),
            )

    def _gather_on_gpu(self, octets: Array, out: Array, counts: Sequence[int]) -> None:
        def uneven(comm: Any, stream: int) -> None:
            for root, part in enumerate(parts(out, counts)):
                if part.size:
                    comm.broadcast(
                        _at(octets if root == self._rank else part),
                        _at(part),
                        part.size,
                        self._bytes,
                        root,
                        stream,
                    )

        if out.size:
            self._queue(
                "all_gather",
                uneven
                if len(set(counts)) > 1
                else lambda comm, stream: comm.allGather(
                    _at(octets), _at(out), counts[0], self._bytes, stream
                ),
            )

    def gather(
        self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int
    ) -> None:
        if out is None:
            self._pass_on({root: octets}, {}, "gather")
            return
        places = dict(enumerate(parts(out, counts)))
        places.pop(root)[...] = octets
        self._pass_on({}, places, "gather")

    def scatter(
        self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int
    ) -> None:
        leaving = {} if octets is None else dict(enumerate(parts(octets, counts)))
        leaving.pop(root, None)
        self._pass_on(leaving, {} if out is None else {root: out}, "scatter")

    def all_to_all(
        self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]
    ) -> None:
        self._pass_on(
            dict(enumerate(parts(octets, leaving))),
            dict(enumerate(parts(out, coming))),
            "all_to_all",
        )

    def _pass_on(
        self, leaving: dict[int, np.ndarray], coming: dict[int, np.ndarray], what: str
    ) -> None:
        """Queue sends and receives as one NCCL group, in which their order does not matter."""
        leaving, coming = (
            {rank: part for rank, part in way.items() if part.size} for way in (leaving, coming)
        )

        def each(comm: Any, stream: int) -> None:
            for rank, part in leaving.items():
                comm.send(_at(part), part.size, self._bytes, rank, stream)
            for rank, part in coming.items():
                comm.recv(_at(part), part.size, self._bytes, rank, stream)

        if leaving or coming:
            self._queue(what, each)

    def _kind_and(self, op: str, x: np.ndarray) -> tuple[int, int]:
        """Return NCCL's numbers for the dtype of x and for the op."""
        return tuple(
            getattr(self._gpu.nccl, f"NCCL_{name}")
            for name in (_KINDS[dtype_name(x.dtype)], _OPS[op])
        )


def _at(array: Any) -> int:
    return int(array.data.ptr)
