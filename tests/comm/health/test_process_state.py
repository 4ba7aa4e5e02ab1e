"""Test what the kernel says of processes: who is frozen, how one ended, which are seen from
here."""

import ctypes
import errno
import os
import signal
import subprocess
import time

import pytest
from helpers import SOON

from minidist.comm.health import process_state


@pytest.fixture
def looks(monkeypatch):
    """look(after, letter, pid=7): what is frozen at a look `after` seconds later, if the kernel
    says that letter."""
    now = [0.0]
    state = ["T"]
    looks = process_state.ProcessLooks()
    monkeypatch.setattr(process_state.time, "monotonic", lambda: now[0])

    def look(after, letter, pid=7):
        now[0] = now[0] + after
        state[0] = letter
        with monkeypatch.context() as patch:
            if pid == 7:
                patch.setattr(process_state, "stop_of", lambda pid: state[0].strip("S"))
            return looks.frozen({pid})

    look.patience = lambda seconds: setattr(looks, "patience", seconds)
    look.wait = lambda: looks.next() - now[0]
    return look


def test_frozen_if_stopped_for_the_patience_unless_we_did_not_run_either(looks):
    assert [looks(0.4, letter) for letter in "TTTTSTTTTTUUUUUTTTTT"] == [set()] * 20, (
        "other letters are other stops"
    )
    assert looks(0.4, "T") == {7}, "1.7 s hold five looks"
    assert looks(5.0, "T") == set(), "Ctrl-Z and fg: the whole job slept"
    assert [looks(0.4, letter) for letter in "TTTTTTS"] == [set()] * 4 + [{7}] * 2 + [set()]
    looks.patience(0.1)
    assert [looks(0.4, letter) for letter in "TT"] == [set(), {7}], "two looks at least"


def test_the_next_look_comes_when_the_patience_with_a_stop_ends(looks):
    """And not up to LOOK seconds later: the others wait for that rank."""
    looks.patience(1.0)
    told = []
    for letter in "STTTTS":
        told.append((looks(looks.wait(), letter), round(looks.wait(), 3)))
    assert told == [
        (set(), 0.4),
        (set(), 0.4),
        (set(), 0.4),
        (set(), 0.2),
        ({7}, 0.4),
        (set(), 0.4),
    ]


def test_who_has_little_patience_looks_more_often(looks):
    """But not without a pause."""
    waits = []
    for patience in (1.7, 0.2, 0.001):
        looks.patience(patience)
        looks(0.1, "S")
        waits.append(round(looks.wait(), 3))
    assert waits == [0.4, 0.2, 0.1]


def test_what_a_debugger_holds_is_not_frozen(looks):
    """It is stopped (t), and may stop a second time by SIGSTOP."""
    libc = ctypes.CDLL(None)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert libc.ptrace(16, sleeper.pid, None, None) == 0  # PTRACE_ATTACH
        while process_state.state_of(sleeper.pid) != "t":
            time.sleep(0.001)
        assert [looks(0.4, "t", sleeper.pid) for _ in range(9)] == [set()] * 9
        process_state.kill_stopped(sleeper.pid)
        assert process_state.state_of(sleeper.pid) == "t"
        # PTRACE_DETACH, and a signal
        assert libc.ptrace(17, sleeper.pid, None, signal.SIGSTOP) == 0
        while process_state.state_of(sleeper.pid) != "T":
            time.sleep(0.001)
        assert [looks(0.4, "T", sleeper.pid) for _ in range(6)] == [set()] * 5 + [{sleeper.pid}]
        sleeper.kill()


@pytest.mark.parametrize("last", ["look", "close"])
def test_what_is_frozen_is_killed_by_the_next_look_or_at_the_end(last):
    looks = process_state.ProcessLooks(patience=0.0)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        while process_state.state_of(sleeper.pid) != "T":
            time.sleep(0.001)
        assert [looks.frozen({sleeper.pid}) for _ in range(2)] == [set(), {sleeper.pid}]
        assert sleeper.poll() is None, "the others hear of it first"
        if last == "look":
            looks.frozen({sleeper.pid})
        else:
            looks.close()
        assert sleeper.wait(SOON) == -signal.SIGKILL


def ended(command):
    """A process that has run this, and that nobody has cleared away."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], {})
    while not process_state.has_ended(pid):
        time.sleep(0.001)
    return pid


def test_a_process_may_end_a_moment_after_its_connection(monkeypatch):
    monkeypatch.setattr(process_state, "REAP_LIMIT", SOON)
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "sleep 0.2; exit 3"], {})
    assert process_state.exit_of(pid) == "exited with status 3 without goodbye"
    os.waitpid(pid, 0)


def test_ended_at_two_looks_running(monkeypatch):
    """Between them, the goodbye of one that ended well is read, and nobody looks for it any
    more."""
    looks = process_state.ProcessLooks()
    pid = ended("exit 3")
    assert looks.ended({pid, os.getpid()}) == {}
    assert looks.ended({os.getpid()}) == {}
    assert looks.ended({pid}) == {}
    assert looks.ended({pid, os.getpid()}) == {pid: "exited with status 3 without goodbye"}
    os.waitpid(pid, 0)
    assert "killed" in looks.ended({pid})[pid], "gone altogether"
    monkeypatch.setattr(process_state, "state_of", lambda pid: "")
    assert looks.ended({pid}) == {}, "a system without /proc"


def test_how_a_process_ended_that_is_nobody_of_ours(monkeypatch):
    monkeypatch.setattr(process_state, "REAP_LIMIT", 0.0)  # at the first look
    assert process_state.exit_of(os.getpid()) is None
    assert "killed" in process_state.exit_of(2**22 + 1)
    pid = ended("kill -9 $$")
    assert process_state.exit_of(pid) == "was killed by SIGKILL"
    os.waitpid(pid, 0)


def test_a_system_is_told_from_its_namesakes():
    assert process_state.this_system().split()[0] == os.uname().nodename
    assert len(process_state.this_system().split()) == 3


def test_nobody_has_ended_because_our_files_have_run_out(monkeypatch):
    def too_many(path, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(process_state, "REAP_LIMIT", 0.0)
    monkeypatch.setattr(process_state.Path, "read_text", too_many)
    assert not process_state.has_ended(os.getpid())
    assert process_state.exit_of(os.getpid()) is None
