"""What the launch tests start: `python job.py MODE [TRANSPORT [RANK]]`. Rank 2, or RANK, does what
MODE says."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

import exiting
import numpy as np

import minidist as md
from minidist.comm.health.process_state import PATIENCE
from minidist.launch import launchers, membership

imported_exit = sys.exit


def misbehave(mode: str) -> None:
    """End this rank, or this wait, in the way `mode` names."""
    match mode:
        case "raise":
            raise ValueError("boom")
        case "config":
            raise md.errors.DataError("no such text; try another")
        case "exit":
            sys.exit(3)
        case "exit 256":
            sys.exit(os.system("exit 1"))
        case "raise exit":
            raise SystemExit(5)
        case "raise exit 256":
            raise SystemExit(256)
        case "imported exit":
            imported_exit(5)
        case "module exit":
            exiting.leave(5)
        case "_exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(60)
        case "cut":  # the link, by the test, while this rank is awaited
            time.sleep(60)
        case "hold":  # no other thread of this rank runs meanwhile
            ctypes.PyDLL(None).usleep(6_500_000)
        case "interrupt":
            raise KeyboardInterrupt


def say(text: str) -> None:
    """One write, so that lines of several ranks stay apart."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    mode = sys.argv[1]
    transport = sys.argv[2] if len(sys.argv) > 2 else None
    victim = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    if mode.startswith("killed "):
        from ends import die_at

        if launchers.detect().world_rank == victim:
            die_at(mode.removeprefix("killed "))
    if mode == "mixed":
        transport = ["tcp", "shm"][int(os.environ["RANK"]) % 2]
    if mode.startswith("after "):  # registered first, so done last: after the goodbye
        atexit.register(lambda: world.rank == victim and misbehave(mode.removeprefix("after ")))
        membership.ENDING = 5 if mode == "after stop" else 2  # a stop is found within 3 s
    world = md.init(
        transport=transport, limit=20, patience=0.4 if mode == "after stop" else PATIENCE
    )
    assert md.init() is world
    if mode in ("sleep", "stubborn", "cut"):
        membership.current().joined.link.grace = 0.5  # a test has no 5 seconds
    total = world.all_reduce(np.arange(3.0) + world.rank)
    np.testing.assert_array_equal(total, world.size * np.arange(3.0) + sum(range(world.size)))
    say(f"hello from {world.rank} of {world.size} over {world.transport.name}")
    if mode == "sleep" or (mode == "stubborn" and world.rank == 1):
        if mode == "stubborn":  # neither waits nor ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if mode == "busy" and world.rank == 1:  # computes, and will not hear of anything for a while
        time.sleep(60)
    if world.rank == victim or (mode == "stop all" and world.rank > 2):
        misbehave({"stop all": "stop", "stubborn": "kill", "busy": "raise"}.get(mode, mode))
    if mode == "forks":
        for misdeed in (lambda: None, lambda: sys.exit(0), lambda: misbehave("raise")):
            if os.fork() == 0:
                misdeed()
                return
            os.wait()
    if mode == "all config":
        misbehave("config")
    if mode == "unwaited":  # the ranks disagree, and the program never learns of it
        world.start_all_reduce(np.ones(3 + world.rank))
        return
    if mode == "ok":  # neither ends the rank
        with contextlib.suppress(SystemExit):
            sys.exit(3)
        alone = threading.Thread(target=sys.exit, args=(3,))
        alone.start()
        alone.join()
    world.all_reduce(total)
    say(f"goodbye from {world.rank}")


if __name__ == "__main__":
    main()
