"""The device side of transport nccl (NCCL, CUDA IPC) on a stand-in for CuPy; with real GPUs under
-m gpu."""

import shutil
import sys
import threading
import time
from types import SimpleNamespace

import fake_cupy
import gpu_calls
import numpy as np
import pytest
from helpers import run
from kernel_checks import needs_compiler
from linked import linked

import minidist as md
from minidist.comm.transports.gpu import cuda_ipc, nccl
from minidist.comm.transports.gpu.staging import Gpu, GpuSide
from minidist.device import backend, dispatch
from minidist.errors import (
    CommError,
    ConfigError,
    DeviceError,
    LaunchError,
    MismatchError,
    PeerLostError,
    TimeoutError,
)
from minidist.kernels import on_cpu


@pytest.fixture
def cupy(monkeypatch):
    modules = fake_cupy.modules()
    fake_cupy.stand_in(monkeypatch, modules)
    if on_cpu.compiler() is None:  # nothing to run a kernel with: the plain path
        monkeypatch.setattr(cuda_ipc, "kernel", lambda *_: None)
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "all", [])
    monkeypatch.setattr(cuda_ipc, "TURN_BYTES", 16 << 10)
    monkeypatch.setattr(cuda_ipc, "MOMENT", 0.01)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return modules["cupy"]


@pytest.fixture
def late(cupy, monkeypatch):
    """What a thread's default stream is given is done late."""

    def default_stream():
        stream = fake_cupy.Stream()
        stream.put(lambda: time.sleep(0.03))
        return stream

    monkeypatch.setattr(fake_cupy, "default_stream", default_stream)


def equipped(world, one_gpu=False):
    """Give a rank of threads its GPU, as connect() does."""
    cupy = sys.modules["cupy"]
    places = ["gpu" if one_gpu else f"gpu {rank}" for rank in range(world.size)]
    gpu = Gpu(world.transport, cupy, 0 if one_gpu else world.rank)
    gpu.device.use()
    world.transport.device = nccl.GpuDevice(gpu, places, ipc=True)


def run_on_gpus(fn, *args, size, one_gpu=False, limit=20.0):
    def ranks(world):
        equipped(world, one_gpu)
        return fn(world, *args)

    return run(ranks, size=size, limit=limit)


def soon(condition):
    """Return whether it comes true within five seconds."""
    deadline = time.monotonic() + 15
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


on_both = pytest.mark.parametrize("one_gpu", [False, True], ids=["nccl", "cuda-ipc"])


@pytest.mark.sampled
@on_both
@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.soak)])
def test_every_verb(cupy, monkeypatch, one_gpu, size):
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "kernel_seconds", 0.0)
    monkeypatch.setattr(cuda_ipc, "TURN_BYTES", 1024)  # several rounds
    run_on_gpus(gpu_calls.all_cases, size, size=size, one_gpu=one_gpu)


@needs_compiler
def test_ranks_that_share_a_gpu_add_low_precision_by_a_kernel(cupy, monkeypatch):
    """The same bits as the plain path, which widens, adds, rounds; NaN, infinities and an odd
    beginning included."""
    monkeypatch.setattr(cuda_ipc, "TURN_BYTES", 1024)
    ran = []
    kind = backend.dtype("bfloat16")

    def asked(name, *arrays):
        ran.append((name, len(arrays)))
        return dispatch.kernel(name, *arrays)

    def sums(world):
        x = np.random.default_rng(world.rank).normal(size=1009).astype(np.float32)
        x[::97] = (np.nan, np.inf, 1e38)[world.rank]
        values = cupy.asarray(x.astype(kind))
        return [
            gpu_calls.back(world.all_reduce(values)),
            gpu_calls.back(world.reduce_scatter(values)),
        ]

    def by(chosen):
        monkeypatch.setattr(cuda_ipc, "kernel", chosen)
        return run_on_gpus(sums, size=3, one_gpu=True)

    for fast, plain in zip(by(asked), by(lambda *_: None), strict=True):
        for got, want in zip(fast, plain, strict=True):
            assert got.dtype == kind
            np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    assert set(ran) == {("ring_add", 4)}


@on_both
def test_beside_the_host(cupy, one_gpu):
    run_on_gpus(gpu_calls.mixed, size=4, one_gpu=one_gpu)


@pytest.mark.usefixtures("late")
@on_both
def test_what_workers_do_is_ordered_in_the_program_s_stream(one_gpu):
    # where a half of the world is a rank alone
    run_on_gpus(gpu_calls.mixed, size=2, one_gpu=one_gpu)
    run_on_gpus(gpu_calls.in_a_stream_of_its_own, size=2, one_gpu=one_gpu)


@on_both
def test_results_are_memory_of_the_program_s_stream(cupy, one_gpu):
    """Its pool may hand a freed one out again at once, to whoever comes next in that stream."""

    def ranks(world):
        for fields in gpu_calls.cases(2):
            case = gpu_calls.Drawn(**fields)
            got = gpu_calls.call(
                world, case, gpu_calls.on_device(gpu_calls.bring(case, world.rank)), None
            )
            for array in got if isinstance(got, list) else [got]:
                assert (
                    array is None or (array.base or array).stream is fake_cupy.get_current_stream()
                ), fields

    run_on_gpus(ranks, size=2, one_gpu=one_gpu)


@on_both
def test_who_waits_in_another_stream_frees_nothing_early(cupy, one_gpu):
    """What only the program's stream may have again is still read by the side then."""

    def ranks(world):
        world.all_reduce(cupy.asarray(np.ones(2000)))  # NCCL's ranks have met
        world.transport.device.side(world.id).stream.put(lambda: time.sleep(0.05))
        pending = world.start_all_reduce(cupy.asarray(np.full(2000, world.rank + 1.0)))
        with cupy.cuda.Stream():
            total = pending.wait()
            del pending
            assert (gpu_calls.back(total) == 3).all()

    run_on_gpus(ranks, size=2, one_gpu=one_gpu)


def test_a_stream_that_is_another_one_in_each_thread_is_refused(cupy):
    def ranks(world):
        with cupy.cuda.Stream() as per_thread:
            per_thread.ptr = 2
            for call in (world.all_reduce, world.split(world.rank).start_all_reduce):
                with pytest.raises(DeviceError, match="unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"):
                    call(cupy.asarray(np.ones(2)))

    run_on_gpus(ranks, size=2)


@on_both
def test_streams_keep_the_order(cupy, one_gpu):
    run_on_gpus(gpu_calls.in_order, 12, size=2, one_gpu=one_gpu)


@on_both
def test_messages(cupy, one_gpu):
    run_on_gpus(gpu_calls.messages, 6, size=3, one_gpu=one_gpu)


def test_messages_of_two_ranks_may_all_stand_behind_each_other(cupy):
    """Each sends twice and then receives twice, on lanes whose NCCL calls wait for the other
    side."""

    def ranks(world):
        other = 1 - world.rank
        x = cupy.asarray(np.full(9, world.rank + 1.0))
        for pending in [world.start_send(x, dst=other) for _ in range(2)]:
            assert not isinstance(
                world.transport.device.lane(world.id, world.rank, other), type(None)
            )
            pending.handles[0].wait()
        return [gpu_calls.back(world.recv(src=other)).tolist() for _ in range(2)]

    assert run_on_gpus(ranks, size=2) == [[[2.0] * 9] * 2, [[1.0] * 9] * 2]


def test_a_message_that_nobody_takes_ends_with_the_limit(cupy):
    def ranks(world):
        if world.rank == 0:
            world.transport.limit = 0.3
            with pytest.raises(TimeoutError, match="waited 0.3 s for lane 0 -> 1 on the GPU"):
                world.send(cupy.asarray(np.ones(3)), dst=1)
            raise LookupError("seen")

    with pytest.raises(LookupError, match="seen"):
        run_on_gpus(ranks, size=2)


def test_alone_arrays_stay_where_they_are(cupy):
    def ranks(world):
        x = cupy.asarray(np.arange(6.0))
        for verb in (
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "all_gather",
            "gather",
            "broadcast",
            "scatter",
        ):
            got = getattr(world, verb)(x)
            assert got is not x
            assert gpu_calls.back(got).tolist() == list(range(6))
        assert gpu_calls.back(world.all_to_all([x]))[0].tolist() == list(range(6))

    run(ranks, size=1)


def test_who_disagrees_is_named_before_nccl_is_called(cupy):
    def ranks(world):
        op = "max" if world.rank == 1 else "sum"
        world.all_reduce(cupy.asarray(np.ones(4)), op=op)

    with pytest.raises(MismatchError, match="ranks disagree in op"):
        run_on_gpus(ranks, size=3)
    assert not fake_cupy.NcclCommunicator.all


def test_a_host_array_among_them_is_a_disagreement(cupy):
    def ranks(world):
        x = np.ones(4)
        world.all_reduce(x if world.rank == 1 else cupy.asarray(x))

    with pytest.raises(MismatchError, match="ranks disagree in algorithm"):
        run_on_gpus(ranks, size=2)


def test_what_nccl_does_not_know_is_refused(cupy):
    def ranks(world):
        for x, op in (
            (np.ones(2, np.int16), "sum"),
            (np.ones(2, np.complex64), "sum"),
            (np.ones(2, bool), "max"),
        ):
            with pytest.raises(
                ConfigError, match=f"algorithm native: NCCL has no {op} of {x.dtype}; choose auto"
            ):
                world.all_reduce(cupy.asarray(x), op=op, algorithm="native")
        with pytest.raises(
            ConfigError, match="no collectives of its own.*nccl with arrays on the GPU"
        ):
            world.all_reduce(np.ones(2), algorithm="native")

    run_on_gpus(ranks, size=2)


def test_two_of_three_share_a_gpu(cupy):
    """Neither NCCL nor IPC can: auto stages, native is refused."""

    def ranks(world):
        equipped(world)
        world.transport.device._places[1] = "gpu 0"
        x = cupy.asarray(np.ones(2))
        assert gpu_calls.back(world.all_reduce(x)).tolist() == [3, 3]
        assert gpu_calls.back(world.broadcast(x if world.rank == 0 else None)).tolist() == [1, 1]
        with pytest.raises(ConfigError, match="NCCL takes one rank a GPU"):
            world.all_reduce(x, algorithm="native")

    run(ranks, size=3)


def enqueue_in_vain(world):
    """Rank 0 alone is in an all-reduce, on the GPU; its host goes on."""
    device = world.transport.device
    world.all_reduce(gpu_calls.on_device(np.ones(4)))
    if world.rank == 0:
        x = gpu_calls.on_device(np.ones(4))
        side = device.side(world.id)
        device.native(world.id, world.world_ranks)
        side.carry_out(side.begin(), lambda: device.native(0, (0, 1)).all_reduce(x, x, "sum"), x)
    return device


def test_the_limit_holds_on_the_gpu(cupy):
    def ranks(world):
        device = enqueue_in_vain(world)
        world.transport.limit = 0.2
        if world.rank == 0:
            began = time.monotonic()
            with pytest.raises(
                TimeoutError, match="rank 0 waited 0.2 s for the GPU in NCCL's all_reduce"
            ):
                device.finish()
            assert time.monotonic() - began < 9
            with pytest.raises(TimeoutError):  # and so does every later call
                world.all_reduce(gpu_calls.on_device(np.ones(4)))

    # again, as the world is closed
    with pytest.raises(TimeoutError, match="rank 0.*0.2 s for the GPU"):
        run_on_gpus(ranks, size=2)
    assert soon(
        lambda: all(comm.aborted for comm in fake_cupy.NcclCommunicator.all if comm.rank == 0)
    )


def test_a_lost_peer_ends_what_the_gpu_waits_for(cupy):
    def ranks(world):
        device = enqueue_in_vain(world)
        if world.rank == 0:
            threading.Timer(
                0.05, world.transport.abort, [PeerLostError("rank 1 was killed", 1)]
            ).start()
            with pytest.raises(PeerLostError, match="rank 1 was killed"):
                device.finish()
            device.side(world.id).stream.synchronize()  # its kernel has ended
            raise LookupError("seen")

    with pytest.raises(LookupError, match="seen"):
        run_on_gpus(ranks, size=2)


def test_what_nccl_notices_by_itself_ends_the_job(cupy):
    def ranks(world):
        device = enqueue_in_vain(world)
        if world.rank == 0:
            device.native(world.id, world.world_ranks)._comm._comm.failed = "remote process exited"
            with pytest.raises(
                CommError, match="rank 0: NCCL failed on the GPU: remote process exited"
            ):
                device.finish()
            raise LookupError("seen")

    with pytest.raises(LookupError, match="seen"):
        run_on_gpus(ranks, size=2)


def test_a_communicator_that_nobody_else_makes_ends_with_the_limit(cupy, monkeypatch):
    init = fake_cupy.NcclCommunicator.__init__
    monkeypatch.setattr(
        fake_cupy.NcclCommunicator,
        "__init__",
        lambda self, n, id, rank: time.sleep(1) if rank else init(self, n, id, rank),
    )
    within = Gpu.within_limit

    def within_little(gpu, work, what):
        # not before: the ranks tell each other NCCL's id without such a haste
        gpu.transport.limit = 0.2
        return within(gpu, work, what)

    monkeypatch.setattr(Gpu, "within_limit", within_little)

    def ranks(world):
        world.all_reduce(cupy.asarray(np.ones(4)))

    with pytest.raises(TimeoutError, match="waited 0.2 s for NCCL's ranks to join"):
        run_on_gpus(ranks, size=2)


def test_a_communicator_that_is_never_made_holds_up_nobody_when_a_rank_is_lost(cupy, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "__init__", lambda *_: over.wait())

    def ranks(world):
        threading.Timer(
            0.05, world.transport.abort, [PeerLostError("rank 2 was killed", 2)]
        ).start()
        world.all_reduce(cupy.asarray(np.ones(4)))

    try:
        with pytest.raises(PeerLostError, match="rank 2 was killed"):
            run_on_gpus(ranks, size=2)
    finally:
        over.set()


def test_a_call_from_which_nccl_does_not_return_ends_with_the_limit(cupy, monkeypatch):
    """Its abort ends the call, as NCCL's does."""
    end = cupy.cuda.nccl.groupEnd
    stuck = threading.local()

    def never(comm):
        assert soon(lambda: comm.aborted)
        raise fake_cupy.NcclError("remote process exited or there was a network error")

    monkeypatch.setattr(
        cupy.cuda.nccl, "groupEnd", lambda: never(stuck.comm) if hasattr(stuck, "comm") else end()
    )
    monkeypatch.setattr("minidist.comm.transports.gpu.nccl_lane._STUCK", 0.05)

    def ranks(world):
        device = world.transport.device
        world.all_reduce(gpu_calls.on_device(np.ones(4)))
        world.barrier()
        world.transport.limit = 0.2
        stuck.comm = device.native(world.id, world.world_ranks)._comm._comm
        world.all_reduce(gpu_calls.on_device(np.ones(4)))

    with pytest.raises(TimeoutError, match=r"rank . waited 0.2 s for the GPU in NCCL's all_reduce"):
        run_on_gpus(ranks, size=2)


def test_arrays_live_as_long_as_the_gpu_needs_them_and_no_longer(cupy):
    def ranks(world):
        device = world.transport.device
        world.start_all_reduce(cupy.asarray(np.full(1000, 1.0)))  # nobody waits for it
        world.barrier()
        device.finish()
        x = cupy.asarray(np.ones(1000))
        world.all_reduce(x, out=x)
        assert all(flight.keep == [] for flight in device.gpu.watch._flights)

    run_on_gpus(ranks, size=2)


def test_what_the_program_keeps_is_allocated_for_its_stream_and_ordered_behind_it(cupy):
    """The pool may hand out again what the program read a moment ago, after the call had begun. In
    any thread: the one that waits next receives for all."""

    def ranks(world):
        cupy.cuda.Device(1).use()
        side = GpuSide(Gpu(world.transport, cupy, 1))
        program = fake_cupy.get_current_stream()
        seen = []
        begun = side.begin()
        program.put(lambda: (time.sleep(0.05), seen.append("read by the program")))

        def make():
            assert fake_cupy.get_current_stream() is program
            return cupy.empty(3)

        def work():
            receiving = threading.Thread(target=side.allocate, args=[make])
            receiving.start()
            receiving.join()
            side.stream.put(lambda: seen.append("written by the side"))

        side.join(side.carry_out(begun, work, None)[1])
        program.synchronize()
        assert seen == ["read by the program", "written by the side"]

    run(ranks, size=1)


class Slow:
    """An all-reduce in which rank 1's GPU is held up as it is about to look at what rank 0 shows:
    until right()."""

    def __init__(self, world):
        self.go = threading.Event()
        world.all_reduce(gpu_calls.on_device(np.ones(2000)))  # all have opened each other's memory
        device = world.transport.device
        native = device.native(world.id, world.world_ranks)
        stream = device.side(world.id).stream
        tell = native._tell

        def told(mine):
            heard = tell(mine)
            stream.put(lambda: self.go.wait(fake_cupy.PATIENCE))
            return heard

        if world.rank == 1:
            native._tell = told
        self.total = world.all_reduce(gpu_calls.on_device(np.full(2000, world.rank + 1.0)))
        native._tell = tell

    def right(self):
        """Let it look; whether the sum is right."""
        self.go.set()
        return (gpu_calls.back(self.total) == 3).all()


@pytest.mark.parametrize("how", ["at once", "started", "split"])
def test_a_rank_that_ends_frees_nothing_under_a_reader(cupy, how):
    """Rank 0 ends while rank 1's GPU has yet to look at its memory."""
    ended = threading.Event()

    def ranks(world):
        group = world.split(0) if how == "split" else world
        slow = Slow(group)
        if how == "started":
            group.start_all_reduce(gpu_calls.on_device(np.ones(3)))  # nobody waits for it
        if world.rank == 0:
            world.close()
            fake_cupy.end_process()
            ended.set()
        else:
            assert not ended.wait(0.1)  # long enough for who does not wait
            assert slow.right()

    run_on_gpus(ranks, size=2, one_gpu=True)
    assert cupy.cuda.runtime.opened == 0
    assert not cupy.cuda.runtime.freed_under_others


def test_a_rank_lets_go_of_nothing_that_it_still_reads(cupy):
    """Once the transport is aborted, too."""

    def ranks(world):
        slow = Slow(world)
        if world.rank == 1:
            world.transport.device.gpu.abort(CommError("closed"))
            world.transport.device.close()
            assert cupy.cuda.runtime.opened > 0
            slow.right()
            raise LookupError("seen")
        with pytest.raises(PeerLostError):
            world.recv(src=1)

    with pytest.raises(LookupError, match="seen"):
        run_on_gpus(ranks, size=2, one_gpu=True)


def test_who_is_lost_holds_up_nobody_and_the_others_wait_for_each_other(cupy):
    ended = threading.Event()
    gone = []

    def ranks(world):
        world.all_reduce(cupy.asarray(np.ones(4)))
        if world.rank == 1:
            world.expendable()
            device = world.transport.device
            gone.append(device.native(world.id, world.world_ranks)._memory.ptr)
            device.finish()
            device._natives.clear()  # it cannot say anything any more
            fake_cupy.end_process()
            raise LookupError("a hand-made failure")
        with pytest.raises(PeerLostError):
            world.recv(src=1)
        world.transport.limit = 3600
        if world.rank == 0:
            world.close()
            fake_cupy.end_process()
            ended.set()
        else:
            assert not ended.wait(0.1)

    run_on_gpus(ranks, size=3, one_gpu=True)
    assert cupy.cuda.runtime.freed_under_others == gone


def test_a_failed_job_ends_without_those_who_say_nothing_but_not_at_once(cupy, monkeypatch):
    """Its memory stays until the process ends; before that the others get a moment to look."""
    slow = {}
    looked = threading.Event()
    slept = []  # (thread, seconds): rank 1 sleeps too, when it closes

    def sleep(moment):
        slept.append((threading.get_ident(), moment))
        slow[1].go.set()
        looked.wait(20)

    monkeypatch.setattr(cuda_ipc, "sleep", sleep)

    def ranks(world):
        slow[world.rank] = Slow(world)
        world.barrier()
        world.transport.limit = 3600
        if world.rank == 0:
            world.transport.device.finish()
            threading.Timer(
                0.05, world.transport.abort, [PeerLostError("rank 7 was killed", 7)]
            ).start()
            world.close()
            assert [moment for thread, moment in slept if thread == threading.get_ident()] == [
                cuda_ipc.MOMENT
            ]
            fake_cupy.end_process()
        else:
            assert slow[1].go.wait(fake_cupy.PATIENCE)
            assert slow[1].right()
            looked.set()
            world.transport.device.finish()
            world.transport.abort(PeerLostError("rank 7 was killed", 7))  # it has heard it, too

    run_on_gpus(ranks, size=2, one_gpu=True)


def test_a_transport_that_is_closed_gives_its_gpu_a_chance_to_part():
    """A failed rank closes no group."""
    closed = []
    with linked("tcp") as (zero, _):
        zero.device = SimpleNamespace(close=lambda: closed.append(zero.waits.error))
    assert len(closed) == 1
    assert closed[0] is not None  # aborted before


def test_who_computes_on_is_not_waited_for_longer_than_the_limit(cupy):
    ended = threading.Event()

    def ranks(world):
        world.all_reduce(cupy.asarray(np.ones(4)))
        if world.rank == 1:
            assert ended.wait(fake_cupy.PATIENCE)
            world.transport.device.finish()
            world.transport.abort(PeerLostError("rank 0 has left", 0))
            return
        world.transport.device.finish()
        world.transport.limit = 0.2
        world.close()
        world.close()  # again: there is nothing left to do
        ended.set()
        assert cupy.cuda.runtime.opened == 1  # rank 1 has it open: it was not freed
        assert not cupy.cuda.runtime.freed_under_others

    run_on_gpus(ranks, size=2, one_gpu=True)


@pytest.mark.usefixtures("cupy")
def test_nccl_of_one_rank():
    run(gpu_calls.one_rank, size=1)


@pytest.mark.parametrize("refuses", [False, True])
def test_connecting_chooses_gpus_and_tries_ipc(cupy, refuses):
    """Three ranks of one host with two GPUs: 0 and 2 share the first."""
    cupy.cuda.runtime.refuses = refuses
    table = [dict() for _ in range(9)]
    met = threading.Barrier(3)

    class Link:
        def __init__(self, rank):
            self.world_rank = rank
            self._round = 0

        def meet(self, info):
            mine = table[self._round]
            self._round += 1
            mine[self.world_rank] = info
            met.wait(10)
            return [mine[rank] for rank in range(3)]

    def ranks(world):
        transport = nccl.connect(Link(world.rank), world.transport)
        assert transport.name == "nccl"
        device = transport.device
        return [
            device.gpu.device.id,
            *(device.refusal(who, None, None) is None for who in ((0, 1), (0, 2), (0, 1, 2))),
        ]

    results = run(ranks, size=3)
    assert results == [[gpu, True, not refuses, False] for gpu in (0, 1, 0)]
    assert cupy.cuda.runtime.opened == 0


def test_ranks_are_processes_that_meet_and_part(tmp_path, monkeypatch):
    """From md.run on; between processes the stand-in has no NCCL, so arrays are staged."""
    (tmp_path / "cupy.py").write_text(
        "import sys, fake_cupy\nmodules = fake_cupy.modules()\n"
        "__path__ = []\nsys.modules.update(modules)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run(gpu_calls.staged, size=2, transport="nccl") == [
        ["nccl", rank, [2.0, 4.0]] for rank in range(2)
    ]


def test_without_cupy_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        LaunchError, match=r"transport 'nccl' cannot work here: .*CuPy.*use auto"
    ) as caught:
        nccl.find()
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------- on a GPU


def gpus() -> int:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    return cupy.cuda.runtime.getDeviceCount()


@pytest.mark.gpu
def test_nccl_of_one_rank_on_a_gpu():
    gpus()
    run(gpu_calls.one_rank, size=1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_verb_on_gpus(size):
    """NCCL where each rank has a GPU of its own; CUDA IPC where there is one for all."""
    count = gpus()
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun, which starts the ranks; see CALLS of gpu_calls.py")
    if 1 < count < size:
        pytest.skip(f"needs one GPU, or {size}")
    md.run(gpu_calls.all_cases, size, size=size, transport="nccl")
    md.run(gpu_calls.in_order, 50, size=size, transport="nccl")
    md.run(gpu_calls.in_a_stream_of_its_own, size=size, transport="nccl")
    md.run(gpu_calls.messages, 30, size=size, transport="nccl")
    if count == 1 or size == 4:
        md.run(gpu_calls.mixed, size=size, transport="nccl")
