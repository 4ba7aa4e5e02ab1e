"""Whose line called."""

import subprocess
import sys
import threading
import timeit

from helpers import run

from minidist.comm import source


def test_the_caller_is_the_line_outside():
    assert source.caller().split("/")[-1].startswith("test_source.py:")
    assert source.place("x" * 500, 3) == "x" * 200 + ":3"


def test_looking_it_up_is_cheap():
    """Under 3 µs from four calls deep in minidist/comm, as a collective is (the best of several, on a busy machine)."""
    inside = {"repeat": timeit.repeat, "caller": source.caller}
    exec(compile("def deep(n):\n"
                 "    return deep(n - 1) if n else (caller(), min(repeat(caller, number=2000, repeat=5)) / 2000)",
                 source.__file__, "exec"), inside)
    found, seconds = inside["deep"](3)
    assert "test_source.py:" in found
    assert seconds < 3e-6


def test_where_an_error_was_raised():
    def ranks(world):
        world.all_reduce(object())

    try:
        run(ranks, size=1)
    except Exception as error:
        assert "test_source.py:" in source.raised_at(error)


def test_what_a_thread_is_doing():
    go, started, threads = threading.Event(), threading.Event(), []

    def ranks(world):
        threads.append(threading.current_thread())
        started.set()
        go.wait()
        world.barrier()

    runner = threading.Thread(target=lambda: run(ranks, size=1))
    runner.start()
    started.wait()
    assert source.doing(threads[0].ident) != "its last line"
    go.set()
    runner.join()
    assert source.doing(None) == "its last line"


LOCK_UP = """
import gc, sys, threading, time
from minidist.comm import source

class Cyclic:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(0)

def come_and_go():
    while time.monotonic() < end:
        thread = threading.Thread(target=Cyclic)
        thread.start()
        thread.join()

gc.set_threshold(30)
end = time.monotonic() + 1
threads = [threading.Thread(target=come_and_go) for _ in range(6)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    Cyclic()
    source.frames()
"""


def test_looking_at_all_threads_does_not_lock_up_python():
    """Where threads come and go and the garbage collector runs; sys._current_frames() alone mostly does, up to 3.11."""
    subprocess.run([sys.executable, "-c", LOCK_UP], check=True, timeout=30)
