"""Arrays on their way in and out of a call. A stand-in for CuPy shows the staging where there is no
GPU."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers import THREADS, run

from minidist.comm.calls.buffers import OutputArray, apart, argument, device_of
from minidist.errors import ShapeError


class DeviceArray:
    """What a group uses of a cupy.ndarray; NumPy can read it only through get()."""

    base = None

    def __init__(self, values):
        self._values = np.array(values)
        self.shape = self._values.shape
        self.dtype = self._values.dtype
        self.nbytes = self._values.nbytes

    def get(self, out=None):
        if out is None:
            return self._values.copy()
        out[...] = self._values
        return out

    def set(self, values):
        assert values.flags.c_contiguous
        self._values[...] = values

    def __setitem__(self, index, value):
        assert isinstance(value, DeviceArray)
        self._values[index] = value._values

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array is not allowed")


@pytest.fixture
def cupy(monkeypatch):
    """A cupy that is just large enough for backend.py."""
    module = ModuleType("cupy")
    extra = ModuleType("cupyx")
    module.ndarray = DeviceArray
    module.is_available = lambda: True
    module.empty = lambda shape, dtype: DeviceArray(np.empty(shape, dtype))
    pageable = SimpleNamespace(type=0)
    stream = nullcontext()
    stream.ptr = 0
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(pointerGetAttributes=lambda address: pageable),
        Device=nullcontext,
        get_current_stream=lambda: stream,
    )
    extra.empty_pinned = np.empty
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupyx", extra)
    return module


@pytest.mark.parametrize("transport", THREADS)
def test_device_arrays_come_back_to_their_device(cupy, transport):
    def ranks(world):
        other = 1 - world.rank
        x = DeviceArray(np.arange(6.0).reshape(2, 3) + world.rank)
        total = 2 * np.arange(6.0).reshape(2, 3) + 1
        given = DeviceArray(np.zeros((2, 3)))
        assert world.all_reduce(x, out=given) is given
        host = np.zeros((2, 3))
        assert world.all_reduce(x, out=host) is host
        assert (host == total).all()
        for got in (world.all_reduce(x), world.start_all_reduce(x, algorithm="ring").wait(), given):
            assert isinstance(got, DeviceArray)
            assert (got.get() == total).all()
        # who brought none learns the device
        from_root = world.broadcast(x if world.rank == 1 else None, root=1)
        assert isinstance(from_root, DeviceArray)
        assert (from_root.get() == np.arange(6.0).reshape(2, 3) + 1).all()
        assert world.all_gather(x).get().shape == (4, 3)
        assert (
            world.reduce_scatter(x).get().tolist()
            == np.array_split(total.reshape(-1), 2)[world.rank].tolist()
        )
        assert all(isinstance(part, DeviceArray) for part in world.all_to_all([x, x]))
        assert (
            world.exchange(x, dst=other, src=other).get() == np.arange(6.0).reshape(2, 3) + other
        ).all()
        world.send(x, dst=world.rank)
        assert isinstance(world.recv(src=world.rank), DeviceArray)
        into_host = np.zeros((2, 3))
        pending = world.start_recv(src=other, out=into_host)
        world.send(x, dst=other)
        assert pending.wait() is into_host
        reduced = world.reduce(x, root=1)
        assert reduced is None if world.rank == 0 else (reduced.get() == total).all()

    run(ranks, size=2, transport=transport)


def test_an_argument_is_copied_only_if_it_must_be():
    x = np.arange(6.0).reshape(2, 3)
    assert argument("send", x) is x
    assert argument("send", x.T).tolist() == x.T.tolist()
    assert argument("send", x.T).flags.c_contiguous
    assert argument("send", 3).shape == ()


def test_out_of_another_class_of_array_is_filled():
    for algorithm in ("ring", "tree", "naive", "direct"):

        def ranks(world, algorithm=algorithm):
            out = np.zeros((2, 3)).view(np.matrix)
            assert world.all_reduce(np.ones((2, 3)), out=out, algorithm=algorithm) is out
            return out

        assert [out.tolist() for out in run(ranks, size=3)] == [[[3.0] * 3] * 2] * 3


def test_every_view_that_slicing_makes_may_be_out():
    whole = np.zeros((4, 6, 5))
    for view in (
        whole,
        whole.T,
        whole[::-1],
        whole[:, ::2, 1:4],
        whole.transpose(1, 0, 2)[::3],
        whole[:0, ::2],
        whole[..., 0],
        np.zeros(()),
    ):
        assert OutputArray("recv", view).out is view


def test_apart():
    x = np.arange(6.0)
    assert apart(x, None) is x
    assert apart(x, np.empty(6)) is x
    assert apart(x, x) is x
    assert apart(x, x[2:4], x[2:4]) is x
    for out in (x[1:], x[::-1], x[2:4]):
        assert not np.may_share_memory(apart(x, out), x)


def test_device_of():
    assert device_of(None, None) is None
    assert device_of(None, 3) == device_of(np.ones(1)) == "cpu"


def test_a_result_of_the_wrong_shape_is_told_after_the_fact_too():
    result = OutputArray("all_gather", np.empty(3))
    with pytest.raises(
        ShapeError, match=r"all_gather: out= has shape \(3,\), the result has \(4,\)"
    ):
        result.array((4,), np.dtype(float))
