"""Whose line called."""

import gc
import sys
import threading
import time
import timeit
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run

from minidist.comm import call_site
from minidist.comm.health.wait_state import Waits


def test_the_caller_is_the_line_outside():
    assert call_site.caller().split("/")[-1].startswith("test_call_site.py:")
    assert call_site.place("x" * 500, 3) == "x" * 200 + ":3"


def test_looking_it_up_is_cheap():
    """Under 12 times as long as four calls inside an entry, as a collective is, that look nothing
    up: some 3 µs."""

    def deep(n, look):
        return deep(n - 1, look) if n else look()

    @call_site.entries
    class Verbs:
        def all_reduce(self):
            return deep(3, call_site.caller)

        def barrier(self):
            return deep(3, int)

    assert "test_call_site.py:" in Verbs().all_reduce()
    looked, plain = (
        min(timeit.repeat(verb, number=200, repeat=50, timer=time.thread_time))
        # the best of several, on a busy machine
        for verb in (Verbs().all_reduce, Verbs().barrier)
    )
    assert looked < 12 * plain


def test_a_guess_at_the_entrys_depth_changes_no_place():
    """The entry is as far out as the depth given to caller_at(), further, nearer, or there is
    none."""

    def between(frames, depth):
        return between(frames - 1, depth) if frames else call_site.caller_at(depth)

    @call_site.entries
    class Verbs:
        def all_reduce(self, frames, depth):
            return between(frames, depth)

        def split(self, frames, depth):
            return self.all_reduce(frames, depth)

    for verb in (Verbs().all_reduce, Verbs().split):
        for frames in range(4):
            line = sys._getframe().f_lineno
            assert [verb(frames, depth).split("/")[-1] for depth in (0, 1, 2, 3, 1000)] == [
                f"test_call_site.py:{line + 1}"
            ] * 5
    assert call_site.caller_at(1) == call_site.place(__file__, sys._getframe().f_lineno)


def test_moving_a_file_does_not_move_the_call_site():
    """Entries, not the names of files, decide which frames are skipped."""
    inside = {"caller": call_site.caller, "entries": call_site.entries}
    exec(
        compile(
            "@entries\n"
            "class Verbs:\n"
            "    def all_reduce(self):\n"
            "        return caller()\n"
            "    def split(self):\n"
            "        return self.all_reduce()\n",
            "elsewhere.py",
            "exec",
        ),
        inside,
    )
    verbs = inside["Verbs"]()
    line = sys._getframe().f_lineno
    assert [found.split("/")[-1] for found in (verbs.all_reduce(), verbs.split())] == [
        f"test_call_site.py:{line + 1}"
    ] * 2
    exec(
        compile("def program(verbs):\n    return verbs.split()\n", call_site.__file__, "exec"),
        inside,
    )
    assert inside["program"](verbs) == call_site.place(call_site.__file__, 2)


def test_where_an_error_was_raised():
    def ranks(world):
        world.all_reduce(object())

    try:
        run(ranks, size=1)
    except Exception as error:
        assert "test_call_site.py:" in call_site.raised_at(error)


def test_what_a_thread_is_doing():
    go = threading.Event()
    started = threading.Event()
    threads = []

    def ranks(world):
        threads.append(threading.current_thread())
        started.set()
        go.wait()
        world.barrier()

    runner = threading.Thread(target=lambda: run(ranks, size=1))
    runner.start()
    started.wait()
    assert call_site.doing(threads[0].ident) != "its last line"
    go.set()
    runner.join()
    assert call_site.doing(None) == "its last line"


@pytest.mark.parametrize("look", [lambda thread: Waits().state(), call_site.doing])
def test_who_looks_at_threads_keeps_nothing_of_theirs(look):
    """Their stacks hold arrays, which must be free once they return, without waiting for the
    garbage collector."""
    started = threading.Event()
    go = threading.Event()
    held = []

    def work():
        mine = np.zeros(3)
        held.append(weakref.ref(mine))
        started.set()
        go.wait()

    thread = threading.Thread(target=work)
    gc.collect()
    gc.disable()
    try:
        thread.start()
        started.wait()
        look(thread.ident)
        go.set()
        thread.join()
        assert held[0]() is None
    finally:
        gc.enable()


def test_who_looks_at_itself_keeps_nothing_either():
    def look():
        mine = np.zeros(3)
        call_site.doing(threading.get_ident())
        return weakref.ref(mine)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_rests_while_all_threads_are_looked_at(monkeypatch, collects):
    """With it, sys._current_frames() can stop every thread for good: see frames()."""
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    (gc.enable if collects else gc.disable)()
    try:
        assert call_site.frames() == {}
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert seen == [False]


@pytest.mark.parametrize(
    ("module", "spec", "found"),
    [
        ("__main__", None, True),
        ("train.loop", None, True),
        ("minidist.lessons.ring.lesson", None, True),
        ("__main__", "minidist.__main__", False),
        ("minidist.comm.group", None, False),
        ("threading", None, False),
        ("importlib._bootstrap", None, False),
        ("minidistance", None, True),
    ],
)
def test_the_program_is_told_by_modules_not_by_files(module, spec, found):
    """A program that lies in Python's folder or in this package's is the program all the same."""
    names = {"__name__": module, "__spec__": spec and SimpleNamespace(name=spec), "sys": sys}
    for file in (threading.__file__, call_site.__file__, "/home/a/train.py", "<string>"):
        exec(compile("frame = sys._getframe()", file, "exec"), names)
        assert call_site.in_program(names["frame"]) == found
