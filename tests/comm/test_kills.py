"""A rank dies at any moment of any verb: every survivor learns who, how, and in which call of its own; nothing stays.

CI kills a few ranks, `-m soak` a hundred.
"""

import itertools
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from helpers import lateness, run
from leftovers import nothing_left

from minidist.errors import PeerLostError

VERBS = {
    "all_reduce": lambda w, x: w.all_reduce(x), "ring": lambda w, x: w.all_reduce(x, algorithm="ring"),
    "reduce": lambda w, x: w.reduce(x), "broadcast": lambda w, x: w.broadcast(x), "gather": lambda w, x: w.gather(x),
    "all_gather": lambda w, x: w.all_gather(x), "scatter": lambda w, x: w.scatter(x),
    "reduce_scatter": lambda w, x: w.reduce_scatter(x), "all_to_all": lambda w, x: w.all_to_all([x] * w.size),
    "barrier": lambda w, x: w.barrier(), "started": lambda w, x: w.start_all_reduce(x).wait(),
    "exchange": lambda w, x: w.exchange(x, dst=(w.rank + 1) % w.size, src=(w.rank - 1) % w.size),
}
ENDS = {"kill": "was killed", "exit": "exited with status 7|was killed, or ended without goodbye",
        "raise": "failed with ArithmeticError: on purpose"}


WITHIN = 0.25   # seconds until the last survivor of eight knows
HOPS = 4    # news of a death goes to the monitor, to a rank's listener, to who leads its waits, to the program: threads


def die(how, folder):
    """End this rank's part of the job, and leave behind when that was."""
    with open(f"{folder}/death", "w") as file:
        file.write(f"{time.monotonic()} {os.getpid()}")
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
    raise ArithmeticError("on purpose")


def until_one_dies(world, folder, victim, how, verb, length, calls, delay):
    """Call a verb for ever; the victim makes `calls` of them, then dies: at once, or (`delay` s) inside one."""
    x = np.ones(length, np.float32)
    try:
        world.barrier()                 # the victim may leave it before others do
        for number in itertools.count():
            if world.rank == victim and number == calls:
                if not delay or how == "raise":
                    die(how, folder)
                threading.Timer(delay, die, (how, folder)).start()
            world.tell_step(number)
            VERBS[verb](world, x)
            if number % 8 == 7:
                world.barrier()         # who only sends, in messages so short that MPI keeps them, never waits
    except PeerLostError as error:
        with open(f"{folder}/draft-{world.rank}", "w") as file:
            file.write(f"{time.monotonic()} {error.world_rank} {error}")
        os.replace(f"{folder}/draft-{world.rank}", f"{folder}/{world.rank}")
        raise


def check_one_kill(folder, *, transport, size, victim, how, verb, length, calls, delay):
    """Run it, and look at what everybody learnt. Returns the slowest survivor's seconds."""
    expected = ArithmeticError if how == "raise" else PeerLostError
    with nothing_left(), lateness() as late, pytest.raises(expected) as caught:
        run(until_one_dies, str(folder), victim, how, verb, length, calls, delay, size=size, transport=transport)
    assert f"rank {victim}" in str(caught.value)
    died, pid = (folder / "death").read_text().split()
    slowest = 0.0
    for rank in set(range(size)) - {victim}:
        if transport == "mpi" and how != "raise" and not (folder / str(rank)).exists():
            continue                    # mpirun was quicker, and has killed it: it may do so within milliseconds
        when, lost, text = (folder / str(rank)).read_text().split(" ", 2)
        assert int(lost) == victim, text
        assert re.match(rf"rank {victim} \(process {pid} on \S+\) ({ENDS[how]})", text), text
        assert re.search(rf"; rank {rank} was in (step \d+, )?\w+\(.*\), its call \d+, at \S*test_kills.py:\d+", text)
        slowest = max(slowest, float(when) - float(died))
    assert slowest < WITHIN + HOPS * max(late), f"the last learnt it after {slowest:.3f} s; late: {max(late):.3f} s"
    return slowest


@pytest.mark.parametrize(("transport", "how", "verb", "delay"), [
    ("tcp", "kill", "ring", 0.0), ("shm", "kill", "all_reduce", 0.0), ("tcp", "exit", "all_to_all", 0.01),
    ("shm", "raise", "started", 0.0)])
def test_every_survivor_of_eight_learns_it_at_once(transport, how, verb, delay, tmp_path):
    check_one_kill(tmp_path, transport=transport, size=8, victim=5, how=how, verb=verb, length=1000, calls=3,
                   delay=delay)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_random_kills(tmp_path):
    draw, seconds = random.Random(3), []
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = {"transport": draw.choice(("tcp", "shm", "tcp", "shm", "mpi")),
                "size": draw.choice((2, 3, 5, 8)), "how": draw.choice(tuple(ENDS)), "verb": draw.choice(tuple(VERBS)),
                "length": draw.choice((0, 1, 1000, 100_000, 2_000_000)), "calls": draw.choice((0, 1, 7)),
                "delay": draw.choice((0.0, 0.0, 0.005, 0.05))}
        case["victim"] = draw.randrange(case["size"])
        print(number, case, flush=True)
        seconds.append(check_one_kill(folder, **case))
    print(f"seconds until the last survivor knew: median {np.median(seconds):.3f}, most {max(seconds):.3f}")


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.soak)])
def test_a_rank_whose_child_holds_its_connections_is_missed_all_the_same(transport, tmp_path):
    """A data loader's worker, forked and left behind: nothing that the rank had open is closed."""
    def job(world):
        world.barrier()
        if world.rank == 1:
            if os.fork() == 0:
                while not (tmp_path / "over").exists():
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    with nothing_left():
        try:
            with pytest.raises(PeerLostError, match=r"rank 1 \(process \d+ on \S+\) was killed by SIGKILL"):
                run(job, size=3, transport=transport)
        finally:
            (tmp_path / "over").touch()
