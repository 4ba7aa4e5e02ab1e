"""Ranks that share one GPU: each shows its bytes in memory that the others have opened.

    rank 0's memory   turn 0 | turn 1      only rank 0 writes here; all the others have it mapped
                                           (cudaIpcOpenMemHandle)
    rank 1's memory   turn 0 | turn 1

It is the board of exchange_board.py on the GPU. A `show`: copy into the turn, record the turn's
event, notify the others over the host that it is recorded, make the side's stream wait for their
events. Turns are used alternately: before a rank writes a turn again, it has waited for events that
the others recorded after they had read it. The host waits for ranks, never for the GPU, and a rank
that dies leaves no kernel that waits for it.

The exported memory is whole allocations of cudaMalloc: an array of CuPy's pool is part of a larger
allocation, which the pool may divide again while another process reads it. The price is one copy
inside the GPU. Handles are opened once, at a group's first call, and closed with the world: part().

Reductions add in rank order, low precision in float32 (kernels/ring_add.cu): the same bits on all
ranks.

Source: CUDA runtime API, device management (cudaIpc...). Run on one H200, 2 and 3 ranks.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import sleep

import numpy as np

from minidist.comm.calls.reduction import UFUNCS
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transport import Tag
from minidist.comm.transports.gpu.staging import NOTHING, WORDS, Gpu, GpuNative, GpuSide, parts
from minidist.device.backend import LOW_PRECISION, Array, array_module, widen
from minidist.device.dispatch import kernel
from minidist.errors import CommError, PeerLostError

TURN_BYTES = 32 << 20
"""Maximum bytes that a rank shows at a time."""

MOMENT = 0.5
"""Seconds that the others have to read, if the job has failed and they send no word."""

LET_GO = WORDS + 1
"""The sequence of the tag of the message that a rank has closed all memory that another exports."""

_HANDLE_BYTES = 64  # of memory handles and of event handles
_TURNS = 2


def places_and_reach(gpu: Gpu, link: MonitorClient, place: str) -> tuple[list[str], bool]:
    """Return the GPU of each rank, and whether every rank can open the memory of the ranks that
    share its GPU. `place`: this rank's GPU."""
    runtime = gpu.cupy.cuda.runtime
    memory = gpu.cupy.cuda.Memory(1)
    own = b""
    with suppress(runtime.CUDARuntimeError):  # a container without the right, or another system
        own = runtime.ipcGetMemHandle(memory.ptr)
    infos = link.meet({"gpu": place, "ipc": own})
    handles = [info["ipc"] for info in infos if info["gpu"] == place]
    reaches = all(handles)
    try:
        for handle in handles if reaches else ():
            if handle != own:
                runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle))
    except (runtime.CUDARuntimeError, ValueError):
        reaches = False
    return [info["gpu"] for info in infos], all(info["ipc"] for info in link.meet({"ipc": reaches}))


class IpcNative(GpuNative):
    """The collectives of ranks that share a GPU."""

    def __init__(self, gpu: Gpu, side: GpuSide, group: int, world_ranks: Sequence[int]) -> None:
        super().__init__(gpu, side, group, world_ranks)
        self._runtime = gpu.cupy.cuda.runtime
        self.others = set(world_ranks) - {gpu.transport.world_rank}
        self._memory = gpu.cupy.cuda.Memory(_TURNS * TURN_BYTES)
        self._recorded = [gpu.event(side.stream, interprocess=True) for _ in range(_TURNS)]
        handles = [
            self._runtime.ipcGetMemHandle(self._memory.ptr),
            *(self._runtime.ipcGetEventHandle(event.ptr) for event in self._recorded),
        ]
        told = self._tell(np.frombuffer(b"".join(handles), np.uint8))
        self._opened: list[int] = []  # addresses to close
        self._awaited: list[int] = []  # events to destroy
        self._boards = [self._board(rank, words.tobytes()) for rank, words in enumerate(told)]
        self._turn = 0

    def _board(self, rank: int, handles: bytes) -> tuple[Array, list[int]]:
        """Return a rank's turns, (_TURNS, TURN_BYTES) uint8, and their events."""
        address = self._memory.ptr
        events = [event.ptr for event in self._recorded]
        if rank != self._rank:
            memory, *theirs = (
                handles[start : start + _HANDLE_BYTES]
                for start in range(0, len(handles), _HANDLE_BYTES)
            )
            address = self._runtime.ipcOpenMemHandle(memory)
            events = [*map(self._runtime.ipcOpenEventHandle, theirs)]
            self._opened.append(address)
            self._awaited += events
        cupy = self._gpu.cupy
        memory = cupy.cuda.UnownedMemory(address, _TURNS * TURN_BYTES, self, self._gpu.device.id)
        return cupy.ndarray(
            (_TURNS, TURN_BYTES), np.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0)
        ), events

    def let_go(self) -> None:
        """Close the others' memory; the GPU has finished this rank's calls."""
        for event in self._awaited:
            self._runtime.eventDestroy(event)
        for address in self._opened:
            self._runtime.ipcCloseMemHandle(address)

    def free(self) -> None:
        """Free the memory that this rank has exported."""
        del self._memory, self._recorded

    def _show(self, octets: Array) -> list[Array]:
        """Show at most TURN_BYTES. Return each rank's turn, valid until the second next show."""
        turn = self._turn
        self._turn = 1 - self._turn
        if octets.size:
            self._boards[self._rank][0][turn][: octets.size] = octets
        self._recorded[turn].record(self._side.stream)
        self._tell(NOTHING)  # every rank has recorded its event
        for rank, (_, events) in enumerate(self._boards):
            if rank != self._rank:
                self._runtime.streamWaitEvent(self._side.stream.ptr, events[turn])
        return [turns[turn] for turns, _ in self._boards]

    def _look(
        self, mine: Array | None, longest: int, wanted: Mapping[int, tuple[int, Array]]
    ) -> None:
        """Show `mine` in rounds, enough for `longest` bytes; `wanted`: by rank, (start, array to
        fill)."""
        for begin in range(0, longest, TURN_BYTES):
            end = begin + TURN_BYTES
            shown = self._show(NOTHING if mine is None else mine[begin:end])
            for rank, (start, place) in wanted.items():
                first = max(begin, start)
                last = min(end, start + place.size)
                if first < last:
                    place[first - start : last - start] = shown[rank][first - begin : last - begin]

    def broadcast(self, octets: np.ndarray, root: int) -> None:
        at_root = self._rank == root
        self._look(octets if at_root else None, octets.size, {} if at_root else {root: (0, octets)})

    def gather(
        self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int
    ) -> None:
        places = [] if out is None else parts(out, counts)
        self._look(octets, max(counts), {rank: (0, place) for rank, place in enumerate(places)})

    def _gather_on_gpu(self, octets: Array, out: Array, counts: Sequence[int]) -> None:
        self.gather(octets, out, counts, self._rank)

    def scatter(
        self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int
    ) -> None:
        self._look(
            octets, sum(counts), {} if out is None else {root: (sum(counts[: self._rank]), out)}
        )

    def all_to_all(
        self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]
    ) -> None:
        table = [
            words.view(np.int64).tolist()
            for words in self._tell(np.array(leaving, np.int64).view(np.uint8))
        ]
        places = parts(out, coming)
        self._look(
            octets,
            max(map(sum, table)),
            {rank: (sum(row[: self._rank]), places[rank]) for rank, row in enumerate(table)},
        )

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        self._reduce(x, out, 0, op)

    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        self._reduce(x, x[:0] if out is None else out, 0, op)

    def reduce_scatter(
        self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str
    ) -> None:
        self._reduce(x, out, sum(counts[: self._rank]), op)

    def _reduce(self, x: Array, out: Array, start: int, op: str) -> None:
        """Combine all ranks' x in rank order; write the elements from `start` on to `out`."""
        step = TURN_BYTES // x.dtype.itemsize
        for begin in range(0, x.size, step):
            shown = self._show(x[begin : begin + step].view(np.uint8))
            first = max(begin, start)
            last = min(begin + step, start + out.size, x.size)
            if first < last:
                here = slice((first - begin) * x.dtype.itemsize, (last - begin) * x.dtype.itemsize)
                _combine(
                    [octets[here].view(x.dtype) for octets in shown],
                    out[first - start : last - start],
                    op,
                )


def _combine(values: Sequence[Array], out: Array, op: str) -> None:
    """Write to `out` the values of two ranks or more, combined in order; low precision in float32,
    rounded once."""
    add = (
        kernel("ring_add", *values, out)
        if op in ("sum", "mean") and out.dtype in LOW_PRECISION
        else None
    )
    total = widen(values[0])
    if add is not None:
        for value in values[1:-1]:
            add(value, total, total=total)
        add(values[-1], total, outgoing=out)
        return
    ufunc = getattr(array_module(out), UFUNCS[op].__name__)
    for value in values[1:]:
        total = ufunc(total, widen(value))
    out[...] = total


def part(gpu: Gpu, boards: Sequence[IpcNative]) -> None:
    """Close these boards; the GPU has finished this rank's calls.

        close the others' memory -> notify each of them over the host -> wait for the same message
        from each -> free the own memory

    So no rank frees memory that another has open, as CUDA requires. A lost rank has none open. If a
    rank does not answer within the limit, or the job has failed, the memory stays until this
    process ends, at least a MOMENT later.
    """
    if not boards:
        return
    if gpu.error is None:
        with gpu.device:
            for board in boards:
                board.let_go()
            if _all_let_go(gpu, sorted(set().union(*(board.others for board in boards)))):
                for board in boards:
                    board.free()
                return
    sleep(MOMENT)


def _all_let_go(gpu: Gpu, others: Sequence[int]) -> bool:
    """Notify the others that this rank has closed their memory; return whether each has done the
    same or is lost."""
    transport = gpu.transport
    tag = Tag(0, LET_GO)
    handles = [
        (rank, transport.start_recv(rank, tag, lambda *_: np.empty(0, np.uint8))) for rank in others
    ]
    handles += [(rank, transport.start_send(rank, tag, NOTHING)) for rank in others]
    for rank, handle in handles:
        try:
            handle.wait()
        except PeerLostError as error:
            if error.world_rank != rank:  # the death of another rank ends the job
                return False
        except CommError:
            return False
    return True
