"""A rank that said it is expendable dies, and the job goes on: who waits for it is told, and nobody
else."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import SOON, run
from leftovers import nothing_left

from minidist.errors import PeerLostError

ENDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def one_dies(world, how):
    """Rank 1 dies; rank 2 waits for it in vain, and then for rank 0, who hears nothing of it."""
    if world.rank == 1:
        world.expendable()
    world.barrier()
    if world.rank == 1:
        if how == "raise":
            raise ArithmeticError("on purpose")
        ENDS[how]()
    if world.rank == 0:
        time.sleep(0.2)
        world.send(np.arange(5.0), dst=2)
        answer = world.recv(src=2)
        check_those_that_are_left(world.without([1]))
        return answer
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        world.recv(src=1)
    assert caught.value.world_rank == 1 and time.monotonic() - began < SOON
    with pytest.raises(PeerLostError, match="rank 1"):  # later waits learn it at once
        world.recv(src=1)
    assert world.recv(src=0).sum() == 10.0
    world.send(np.ones(2), dst=0)
    check_those_that_are_left(world.without([1]))
    return str(caught.value)


def check_those_that_are_left(group):
    """They make a group, with collectives and groups of its own."""
    assert group.world_ranks == (0, 2) and group.rank == group.world_rank // 2
    assert group.all_gather(np.array([group.world_rank])).tolist() == [0, 2]
    assert group.split(0).all_reduce(np.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("transport", "how", "says"),
    [
        ("threads", "raise", "ArithmeticError: on purpose"),
        ("threads-unbuffered", "raise", "on purpose"),
        ("tcp", "kill", "was killed by SIGKILL"),
        ("shm", "kill", "was killed by SIGKILL"),
        ("shm", "exit", "exited with status 3"),
        ("tcp", "raise", "on purpose"),
        ("shm", "stop", "is frozen"),
    ],
)
def test_the_job_goes_on_without_it(transport, how, says):
    with nothing_left():
        first, lost, text = run(one_dies, how, size=3, transport=transport)
    assert lost is None and list(first) == [1.0, 1.0]
    assert "rank 1" in text and says in text and "rank 2 was in recv" in text, text


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["threads", "tcp", "shm"])
def test_what_it_had_sent_still_arrives(transport):
    def job(world):
        if world.rank == 1:
            world.expendable()
        world.barrier()
        if world.rank == 1:
            world.send(np.arange(3.0), dst=0)
            raise ArithmeticError("on purpose")
        time.sleep(0.7)  # by then it is known
        received = world.recv(src=1).tolist()
        with pytest.raises(PeerLostError, match="rank 1"):
            world.recv(src=1)
        return received

    assert run(job, size=2, transport=transport)[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_who_did_not_say_so_still_ends_the_job(transport):
    def job(world):
        if world.rank == 1:
            world.expendable()
        world.barrier()
        if world.rank == 2:
            raise ArithmeticError("on purpose")
        world.recv(src=2)

    with pytest.raises(ArithmeticError, match="rank 2"):
        run(job, size=3, transport=transport)


def test_under_our_launcher(tmp_path):
    program = tmp_path / "job.py"
    program.write_text(
        "import os, signal\nimport minidist as md\nworld = md.init()\nif world.rank == 1:\n"
        "    world.expendable()\nworld.barrier()\nif world.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\ntry:\n    world.recv(src=1)\n"
        "except md.errors.PeerLostError as error:\n    os.write(1, b'told %d\\n' % "
        "error.world_rank)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "minidist", "launch", "-n", "3", str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.split() == ["told", "1"] * 2, done.stderr
    assert "rank 1" in done.stderr and "the job continues without it" in done.stderr
