"""What the kernel says of processes: who is frozen, how one ended, which are seen from here."""

import os
import time

from minidist.comm import frozen


def test_frozen_at_two_looks_running_unless_we_did_not_run_either(monkeypatch):
    now, state = [0.0], ["T"]
    monkeypatch.setattr(frozen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(frozen, "state_of", lambda pid: state[0])
    looks = frozen.Looks()

    def look(after, letter):
        now[0], state[0] = now[0] + after, letter
        return looks.frozen({7})

    assert [look(0.4, letter) for letter in "TRTST"] == [set()] * 5
    assert look(0.4, "T") == {7}
    assert look(5.0, "T") == set(), "Ctrl-Z and fg: the whole job slept"
    assert look(0.4, "R") == set()


def test_ended_at_two_looks_running(monkeypatch):
    """Between them, the goodbye of one that ended well is read, and nobody looks for it any more."""
    looks, pid = frozen.Looks(), os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
    while not frozen.has_ended(pid):
        time.sleep(0.001)
    assert looks.ended({pid, os.getpid()}) == {}
    assert looks.ended({os.getpid()}) == {}
    assert looks.ended({pid}) == {}
    assert looks.ended({pid, os.getpid()}) == {pid: "exited with status 3 without goodbye"}
    os.waitpid(pid, 0)
    assert "killed" in looks.ended({pid})[pid], "gone altogether"
    monkeypatch.setattr(frozen, "state_of", lambda pid: "")
    assert looks.ended({pid}) == {}, "a system without /proc"


def test_how_a_process_ended_that_is_nobody_of_ours():
    assert frozen.exit_of(os.getpid()) is None
    assert "killed" in frozen.exit_of(2**22 + 1)
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -9 $$"], {})
    assert frozen.exit_of(pid) == "was killed by SIGKILL"
    os.waitpid(pid, 0)


def test_a_system_is_told_from_its_namesakes():
    assert frozen.this_system().split()[0] == os.uname().nodename
    assert len(frozen.this_system().split()) == 3
