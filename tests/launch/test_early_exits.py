"""Ends that Python tells no exit handler of: os._exit, and a thread that never ends; and the ranks
that are late."""

import re
import sys

import pytest
from jobs import finish, start
from leftovers import nothing_left

from minidist.comm.health.monitor_process import late
from minidist.launch.failures import encode, rebuild
from minidist.launch.mpirun import find_mpirun

PROGRAM = """
import atexit, os, sys, threading, time
at_goodbye = lambda: how == "late" and world.rank == 1 and os._exit(3)
atexit.register(at_goodbye)         # before md.init: it is called after the goodbye
import minidist as md
how = sys.argv[1]
world = md.init(limit=6 if how == "thread" else 60, transport=sys.argv[2])      # to join, too, on a busy machine
world.barrier()
if how in ("lost", "caught") and world.rank == 1:
    os._exit(0)
if how == "thread" and world.rank == 1:
    threading.Thread(target=time.sleep, args=(1000,), name="the one that stays").start()
elif how != "late":
    try:
        world.barrier() if how != "thread" else None
    except md.errors.PeerLostError:
        sys.exit(9 if how == "caught" else 1)
"""


def job(how, transport="shm", *, size=2, by=None):
    with nothing_left() as environment:
        return finish(
            start(
                [
                    *(by or find_mpirun().command(size)),
                    sys.executable,
                    "-c",
                    PROGRAM,
                    how,
                    transport,
                ],
                environment,
            )
        )


@pytest.mark.soak
@pytest.mark.parametrize("how", ["lost", "caught"])
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_a_job_whose_rank_ends_by_os_exit_0_does_not_end_with_0_under_mpirun(how, transport):
    for size in (2, 3):
        done = job(how, transport, size=size)
        assert done.returncode != 0
        assert re.search(
            r"^minidist: rank 1 \(process \d+ on \S+\) exited with status 0 without goodbye; the job ends",
            done.stderr,
            re.M,
        )


@pytest.mark.soak
def test_os_exit_after_the_goodbye_is_named_under_mpirun():
    done = job("late", size=3)
    assert done.returncode == 3
    (named,) = re.findall(r"^minidist: .*", done.stderr, re.M)
    assert re.fullmatch(
        r"minidist: rank 1 \(process \d+ on \S+\) exited with status 3 after its goodbye, before "
        "MPI_Finalize; most recent call first:",
        named,
    )
    assert '\n  File "<string>", line 3 in <lambda>\n' in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["mpirun", "launch"])
def test_a_thread_that_never_ends_is_named_and_ended(launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    begin = (
        find_mpirun().command(2)
        if launcher == "mpirun"
        else [sys.executable, "-m", "minidist", "launch", "-n", "2"]
    )
    with nothing_left() as environment:
        done = finish(
            start(
                [*begin, *[sys.executable] * (launcher == "mpirun"), str(program), "thread", "shm"],
                environment,
            ),
            limit=60,
        )
    assert done.returncode == 1
    assert re.search(
        r"rank 1 \(process \d+ on \S+\) has ended its program, but 6 s later its thread "
        r"'the one that stays' \(\S+:\d+\) still runs",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("slow", "busy", "says"),
    [
        (
            [0, 1, 2],
            [1],
            "rank 1 had not ended 30 s after the last goodbye (ranks 0, 2 waited for that in "
            "MPI_Finalize)",
        ),
        ([1], [], "rank 1 had not ended 30 s after the last goodbye (ranks 0, 2 had)"),
        ([0, 1, 2], [], "ranks 0, 1, 2 had not ended 30 s after the last goodbye"),
    ],
)
def test_only_ranks_that_hang_are_named(slow, busy, says):
    assert late(slow, 3, busy) == says


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "nope", "/x/y"),
        OSError(18, "apart", "/a", None, "/b"),
        OSError(5, "no file"),
        OSError("words alone"),
    ],
)
def test_the_files_of_an_os_error_travel(error):
    came = rebuild(encode(error), 1)
    assert type(came) is type(error)
    assert (came.filename, came.filename2, came.errno) == (
        error.filename,
        error.filename2,
        error.errno,
    )
