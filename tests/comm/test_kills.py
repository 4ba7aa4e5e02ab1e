"""A rank dies at any moment of any verb: every survivor learns who, how, and in which call of its
own; nothing stays.

CI kills a few ranks, `-m soak` a hundred.
"""

import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import MIXED, THREADS, lateness, run
from leftovers import nothing_left

import minidist as md
from minidist.errors import CommError, PeerLostError
from minidist.launch.launchers import clean_environment
from minidist.launch.mpirun import find_mpirun

VERBS = {  # by name: the method, and its arguments
    **{
        verb: (verb, lambda w, x: {"x": x})
        for verb in (
            "all_reduce",
            "reduce",
            "broadcast",
            "gather",
            "all_gather",
            "scatter",
            "reduce_scatter",
        )
    },
    "ring": ("all_reduce", lambda w, x: {"x": x, "algorithm": "ring"}),
    "all_to_all": ("all_to_all", lambda w, x: {"x": [x] * w.size}),
    "barrier": ("barrier", lambda w, x: {}),
    "exchange": (
        "exchange",
        lambda w, x: {"x": x, "dst": (w.rank + 1) % w.size, "src": (w.rank - 1) % w.size},
    ),
}
ENDS = {
    "kill": "was killed",
    "exit": "exited with status 7|was killed, or ended without goodbye",
    "raise": "failed with ArithmeticError: on purpose",
}


WITHIN = 0.25  # seconds until the last survivor of eight knows
# news of a death goes to the monitor, to a rank's listener, to who leads its waits, to the program:
# threads
HOPS = 4


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


def check_that_all_ends(world, call, pending, error):
    """After a call ended in `error`: those started behind it do so, too, and one that is made
    now."""
    for later in (*(handle.wait for handle in pending), call):
        with pytest.raises(PeerLostError) as caught:
            later()
        assert caught.value.world_rank == error.world_rank, caught.value


def until_one_dies(world, folder, victim, how, verb, length, calls, delay, flight):
    """Call a verb for ever, `flight` calls at once; the victim makes `calls` rounds, then dies:
    among the calls that it has started, or `delay` s later."""
    x = np.ones(length, np.float32)
    (name, arguments) = VERBS[verb]
    call, start = (
        functools.partial(getattr(world, prefix + name), **arguments(world, x))
        for prefix in ("", "start_")
    )
    world.barrier()  # the victim may leave it before others do
    for number in itertools.count():
        dies = world.rank == victim and number == calls
        if dies and delay and how != "raise":
            threading.Timer(delay, die, (how, folder)).start()
        world.tell_step(number)
        pending = [start() for _ in range(flight)]
        if dies and (how == "raise" or not delay):
            die(how, folder)
        try:
            while pending:
                pending.pop(0).wait()
            call()
            if number % 8 == 7:
                # who only sends, in messages so short that MPI keeps them, never waits
                world.barrier()
        except PeerLostError as error:
            check_that_all_ends(world, call, pending, error)
            raise


def tell_how_it_ended(world, folder, *arguments):
    """until_one_dies(); what this rank learnt, and when, goes to a file."""
    told = f"{folder}/{world.rank}"
    try:
        until_one_dies(world, folder, *arguments)
    except CommError as error:
        with open(f"{told}.draft", "w") as file:
            lost = error.world_rank if isinstance(error, PeerLostError) else type(error).__name__
            file.write(f"{time.monotonic()} {lost} {error}")
        os.replace(f"{told}.draft", told)
        raise


def by_md_run(size, transport, how, *arguments):
    """Return what the job says that ended it."""
    with pytest.raises(ArithmeticError if how == "raise" else PeerLostError) as caught:
        run(tell_how_it_ended, *arguments, size=size, transport=transport)
    return str(caught.value)


def by_command(size, transport, how, *arguments):
    """The same under `minidist launch` or, on mpi, under mpirun: this file is the program."""
    command = (
        find_mpirun().command(size)
        if transport == "mpi"
        else [sys.executable, "-m", "minidist", "launch", "-n", str(size)]
    )
    program = [sys.executable] * (transport == "mpi") + [__file__, transport, json.dumps(arguments)]
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [*command, *program],
        env=clean_environment({**os.environ, "PYTHONPATH": str(support)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode
    return done.stderr


def check_one_kill(
    folder, *, transport, size, victim, how, verb, length, calls, delay, flight, start=by_md_run
):
    """Run it, and look at what everybody learnt. Returns the slowest survivor's seconds."""
    with nothing_left(), lateness() as late:
        said = start(
            size, transport, how, str(folder), victim, how, verb, length, calls, delay, flight
        )
    assert f"rank {victim}" in said
    died, pid = (folder / "death").read_text().split()
    slowest = 0.0
    for rank in set(range(size)) - {victim}:
        if transport == "mpi" and how != "raise" and not (folder / str(rank)).exists():
            continue  # mpirun was quicker, and has killed it: it may do so within milliseconds
        when, lost, text = (folder / str(rank)).read_text().split(" ", 2)
        assert int(lost) == victim, text
        process = "" if transport in THREADS else rf" \(process {pid} on \S+\)"
        assert re.match(rf"rank {victim}{process} ({ENDS[how]})", text), text
        assert re.search(
            rf"; rank {rank} was in (step \d+, )?\w+\(.*\), its call \d+, at \S*test_kills.py:\d+",
            text,
        )
        slowest = max(slowest, float(when) - float(died))
    assert slowest < WITHIN + HOPS * max(late), (
        f"the last learnt it after {slowest:.3f} s; late: {max(late):.3f} s"
    )
    return slowest


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("transport", "how", "verb", "delay", "flight"),
    [
        ("tcp", "kill", "ring", 0.0, 4),
        ("tcp", "exit", "all_to_all", 0.01, 0),
        ("shm", "kill", "all_reduce", 0.0, 4),
        ("shm", "raise", "all_reduce", 0.0, 1),
        ("threads", "raise", "ring", 0.0, 4),
    ],
)
def test_every_survivor_of_eight_learns_it_at_once(transport, how, verb, delay, flight, tmp_path):
    check_one_kill(
        tmp_path,
        transport=transport,
        size=8,
        victim=5,
        how=how,
        verb=verb,
        length=1000,
        calls=3,
        delay=delay,
        flight=flight,
    )


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_random_kills(tmp_path):
    draw = random.Random(3)
    seconds = []
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        case = {
            "transport": draw.choice(
                ("tcp", "shm", "tcp", "shm", "mpi", "plain-tcp", MIXED, *THREADS)
            ),
            "size": draw.choice((2, 3, 5, 8)),
            "how": draw.choice(tuple(ENDS)),
            "verb": draw.choice(tuple(VERBS)),
            "length": draw.choice((0, 1, 1000, 100_000, 2_000_000)),
            "calls": draw.choice((0, 1, 7)),
            "delay": draw.choice((0.0, 0.0, 0.005, 0.05)),
            "flight": draw.choice((0, 1, 4, 8)),
        }
        case["victim"] = draw.randrange(case["size"])
        if case["transport"] in THREADS:
            case["how"] = "raise"
        if case["length"] == 2_000_000:
            case["flight"] //= 4  # else the victim's rounds take longer than a run may
        start = (
            draw.choice((by_md_run, by_command))
            if case["transport"] in ("tcp", "shm", "mpi")
            else by_md_run
        )
        print(number, start.__name__, case, flush=True)
        seconds.append(check_one_kill(folder, **case, start=start))
    print(
        f"seconds until the last survivor knew: median {np.median(seconds):.3f}, most "
        f"{max(seconds):.3f}"
    )


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
            with pytest.raises(
                PeerLostError, match=r"rank 1 \(process \d+ on \S+\) was killed by SIGKILL"
            ):
                run(job, size=3, transport=transport)
        finally:
            (tmp_path / "over").touch()


if __name__ == "__main__":
    tell_how_it_ended(md.init(transport=sys.argv[1], limit=20), *json.loads(sys.argv[2]))
