"""What the kernel says of processes: who is frozen, how one ended, which are seen from here."""

import os
import signal
import subprocess
import time

import pytest
from helpers import SOON

from minidist.comm.health import process_state


def test_frozen_at_two_looks_running_unless_we_did_not_run_either(monkeypatch):
    now, state = [0.0], ["T"]
    monkeypatch.setattr(process_state.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_state, "state_of", lambda pid: state[0])
    looks = process_state.ProcessLooks()

    def look(after, letter):
        now[0], state[0] = now[0] + after, letter
        return looks.frozen({7})

    assert [look(0.4, letter) for letter in "TRTST"] == [set()] * 5
    assert look(0.4, "T") == {7}
    assert look(5.0, "T") == set(), "Ctrl-Z and fg: the whole job slept"
    assert look(0.4, "R") == set()


@pytest.mark.parametrize("last", ["look", "close"])
def test_what_is_frozen_is_killed_by_the_next_look_or_at_the_end(last):
    looks = process_state.ProcessLooks()
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
    """Between them, the goodbye of one that ended well is read, and nobody looks for it any more."""
    looks, pid = process_state.ProcessLooks(), ended("exit 3")
    assert looks.ended({pid, os.getpid()}) == {}
    assert looks.ended({os.getpid()}) == {}
    assert looks.ended({pid}) == {}
    assert looks.ended({pid, os.getpid()}) == {pid: "exited with status 3 without goodbye"}
    os.waitpid(pid, 0)
    assert "killed" in looks.ended({pid})[pid], "gone altogether"
    monkeypatch.setattr(process_state, "state_of", lambda pid: "")
    assert looks.ended({pid}) == {}, "a system without /proc"


def test_how_a_process_ended_that_is_nobody_of_ours(monkeypatch):
    monkeypatch.setattr(process_state, "REAP_LIMIT", 0.0)      # at the first look
    assert process_state.exit_of(os.getpid()) is None
    assert "killed" in process_state.exit_of(2**22 + 1)
    pid = ended("kill -9 $$")
    assert process_state.exit_of(pid) == "was killed by SIGKILL"
    os.waitpid(pid, 0)


def test_a_system_is_told_from_its_namesakes():
    assert process_state.this_system().split()[0] == os.uname().nodename
    assert len(process_state.this_system().split()) == 3
