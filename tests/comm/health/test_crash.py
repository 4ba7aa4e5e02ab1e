"""A crash after the goodbye: the monitor learns which rank it was, by which signal, and where."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from jobs import finish, start
from leftovers import nothing_left

from minidist.comm import wire
from minidist.comm.health.crash import crash_told
from minidist.comm.health.seats import Seat
from minidist.launch.mpirun import find_mpirun

CHILD = """
import signal, socket, sys
from minidist.comm.health.crash import tell_crash
sock = socket.socket(fileno=int(sys.argv[1]))
tell_crash(sock)
sock.close()
signal.raise_signal(int(sys.argv[2]))
"""
PROGRAM = """
import atexit, ctypes, os
import minidist as md
crash = lambda: world.rank == {victim} and ctypes.string_at(0)
atexit.register(crash)              # before md.init: it is called after the goodbye
world = md.init()
assert world.all_reduce(1.0) == 3
"""


def seat_and_peer():
    here, there = socket.socketpair()
    return Seat(1, 4711, "far", here, left=True), there


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGSEGV,
        signal.SIGABRT,
        pytest.param(signal.SIGBUS, marks=pytest.mark.soak),
        pytest.param(signal.SIGFPE, marks=pytest.mark.soak),
        pytest.param(signal.SIGILL, marks=pytest.mark.soak),
        signal.SIGTERM,
    ],
)
def test_a_process_that_dies_of_a_signal(number):
    seat, there = seat_and_peer()
    with seat.sock, there:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(there.fileno()), str(int(number))],
            pass_fds=[there.fileno()],
            timeout=60,
            capture_output=True,
            text=True,
        )
        there.close()
        assert (done.returncode, done.stderr) == (-number, "")
        loss = crash_told(seat)
        if number == signal.SIGTERM:  # no crash: the system ends a job so
            assert loss is None
            return
        assert (
            str(loss)
            == f"rank 1 (process 4711 on far) was killed by {number.name} after its goodbye"
        )
        assert re.fullmatch(
            'most recent call first:\n  File "<string>", line 7 in <module>', loss.traceback
        )


def test_what_else_may_come_stays_to_be_read():
    seat, there = seat_and_peer()
    with seat.sock:
        with there:
            wire.send_frame(there, {"kind": "waits"})
            assert crash_told(seat) is None
            assert wire.recv_frame(seat.sock) == {"kind": "waits"}
        assert crash_told(seat) is None  # it has hung up


# test_a_process_that_dies_of_a_signal, and tests/launch/test_membership.py kills under mpirun
@pytest.mark.soak
@pytest.mark.parametrize("victim", [1, 0])
def test_under_mpirun_the_rank_is_named(victim):
    with nothing_left() as environment:
        done = finish(
            start(
                [*find_mpirun().command(3), sys.executable, "-c", PROGRAM.format(victim=victim)],
                environment,
            )
        )
    assert done.returncode == signal.SIGSEGV
    (named,) = re.findall(r"^minidist: .*", done.stderr, re.M)
    assert re.fullmatch(
        rf"minidist: rank {victim} \(process \d+ on \S+\) was killed by SIGSEGV after its goodbye; "
        "most recent call first:",
        named,
    )
    assert re.search(r'^  File "<string>", line 4 in <lambda>', done.stderr, re.M)
