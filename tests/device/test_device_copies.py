"""Copies between device and host on a stream of the copying thread's, behind what the program's
stream still does.

The device is fake_cupy's, whose streams go wrong as a GPU's do where no event orders them.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest

from minidist.device.device_copies import bring, copy, host_bytes, mark


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy without a GPU."""
    modules = fake_cupy.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["cupy"]


@pytest.fixture
def held(cupy: Any) -> Iterator[threading.Event]:
    """Set, it lets the program's stream go on, where `put(lambda: held.wait(10))` holds it up."""
    event = threading.Event()
    yield event
    event.set()


def while_busy(held: threading.Event, work: Callable[[], object]) -> None:
    """Run `work` in a thread while the program's stream is held up; let go, and join."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it did not wait for the program's stream"
    held.set()
    thread.join(10)
    assert not thread.is_alive()


def test_down_comes_what_was_computed(cupy: Any, held: threading.Event) -> None:
    array = cupy.asarray(np.zeros(1000, np.float32))
    cupy.cuda.get_current_stream().put(lambda: held.wait(10))
    array[...] = 7.0
    ready = mark(array)
    came = []
    while_busy(held, lambda: came.append(bring(array, ready)))
    np.testing.assert_array_equal(came[0], np.full(1000, 7.0, np.float32))
    assert array.host.ctypes.data != came[0].ctypes.data


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_up_goes_when_the_old_values_have_been_used(
    cupy: Any, held: threading.Event, dtype: Any
) -> None:
    """And with one rounding, on the host."""
    array = cupy.asarray(np.ones(1000, dtype))
    new = np.linspace(0, 1, 1000, dtype=np.float32)
    cupy.cuda.get_current_stream().put(lambda: held.wait(10))
    used = array.copy()
    ready = mark(array)
    while_busy(held, lambda: copy(new, array, ready))
    np.testing.assert_array_equal(used.get(), np.ones(1000, dtype))
    np.testing.assert_array_equal(array.get(), new.astype(dtype))


def test_a_copy_has_a_stream_of_its_own(cupy: Any, held: threading.Event) -> None:
    """What holds up the stream that the thread computes on holds up no copy that needs none of
    it."""
    array = cupy.asarray(np.arange(10.0))
    room = np.zeros(10)
    cupy.cuda.get_current_stream().synchronize()  # it is there

    def work() -> None:
        cupy.cuda.get_current_stream().put(lambda: held.wait(10))
        copy(array, room)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    np.testing.assert_array_equal(room, np.arange(10.0))


def test_on_the_host_a_copy_is_one() -> None:
    source = np.arange(5.0)
    target = np.zeros(5, np.float32)
    assert mark(source) is None
    copy(source, target, mark(target))
    np.testing.assert_array_equal(target, source)
    assert bring(source) is source
    assert host_bytes(100, "cpu").ctypes.data % 4096 == 0 and len(host_bytes(0, "cpu")) == 0
