"""The launcher's processes: starting one and ending all keep nothing waiting."""

import sys
import threading
import time

import pytest
from leftovers import nothing_left

from minidist.comm import wire
from minidist.errors import LaunchError
from minidist.launch.limits import Limits
from minidist.launch.workers import Workforce


class SlowTemplate:
    """Forks nothing, and says so when `answer` is set."""

    def __init__(self):
        self.answer = threading.Event()

    def fork(self, number, variables):
        assert self.answer.wait(10.0)

    def close(self):
        """Nothing to close."""


def workforce(command):
    """Of processes that run this command; its template is slow."""
    made = Workforce(command, wire.new_token(), Limits())
    made.starter._template = SlowTemplate()
    return made


def test_a_process_starts_beside_the_launcher_and_ends_without_delay():
    """It is counted at once. A process that has not connected has nothing to leave: it gets no
    grace."""
    with nothing_left():
        made = workforce([sys.executable, "-c", "import time; time.sleep(60)"])
        made.start_beside()
        assert (made.count(), made.coming, made.workers) == (1, 1, {})
        made.starter._template.answer.set()
        deadline = time.monotonic() + 10
        while made.coming and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (made.count(), made.coming, [*made.workers]) == (1, 0, [0])
        start = time.monotonic()
        made.end(8.0, lambda: False)
        assert time.monotonic() - start < 4.0


def test_what_hinders_a_start_beside_the_launcher_is_told_to_it():
    made = workforce(["no-such-command"])
    made.start_beside()
    made.starter._template.answer.set()
    with pytest.raises(LaunchError, match="cannot start 'no-such-command': No such file"):
        made.next_event(10.0)
    made.end(1.0, lambda: False)


def test_nothing_starts_after_the_end():
    made = workforce([sys.executable, "-c", "import time; time.sleep(60)"])
    made.start_beside()
    threading.Timer(0.05, made.starter._template.answer.set).start()
    made.end(1.0, lambda: False)
    assert (made.workers, made.coming) == ({}, 1)
