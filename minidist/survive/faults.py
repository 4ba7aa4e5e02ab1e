"""Chapter 26 · Faults that a storm injects into an elastic job from outside, and how the job can
notice them.

    kill        kill -9 of a rank                                              its connections end, in milliseconds
    stop        SIGSTOP of a rank: it neither answers nor ends                 it is stopped at every look for a while
    cut         shuts down one of a rank's TCP connections                     the connection ends; its rank lives
    torn        cuts a shard of the newest checkpoint to half, then kills all ranks       the file is too short
    flip        flips one bit in a shard of the newest checkpoint, then kills all ranks   a checksum is wrong
    full        for a while every fsync of the job fails: no space is left     a save fails; the steps continue
    slow        for a while every fsync of the job takes long                  a save takes long; the steps continue
    launcher    kill -9 of the launcher, and its command again, with --resume  its ranks end; the checkpoint is complete

The storm chooses a rank at random among the processes of the present generation. A module that
Python loads at its start makes the disk faults inside the job's processes (`disk_module`): only a
storm starts them with it.
"""

import contextlib
import ctypes
import os
import random
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from minidist.files import open_regular
from minidist.parallel.state.manifest import checkpoints

FAULTS = ("kill", "stop", "cut", "torn", "flip", "full", "slow", "launcher")
WITHOUT_DISK = ("kill", "stop", "cut")  # faults that need no checkpoint

_PIDFD_GETFD = 438  # a system call of Linux 5.6, the same number on all its machines
_DISK = '''"""For a storm: fsync as a disk does it that is full, or slow, while a file of that name is here."""
import errno, os, time

_here, _fsync = os.path.dirname(os.path.abspath(__file__)), os.fsync

def fsync(file):
    if os.path.exists(os.path.join(_here, "full")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC) + " (planted by the storm)")
    if os.path.exists(os.path.join(_here, "slow")):
        time.sleep(0.5)
    return _fsync(file)

os.fsync = fsync
'''


def disk_module(folder: Path) -> dict[str, str]:
    """Write the module that can make a process's disk full or slow.

    Return the environment that loads it.
    """
    (folder / "sitecustomize.py").write_text(_DISK, encoding="utf-8")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def set_disk(folder: Path, kind: str, *, on: bool) -> None:
    """Switch a disk fault of these processes on or off; `kind`: "full" or "slow"."""
    (folder / kind).touch() if on else (folder / kind).unlink(missing_ok=True)


def kill_all(pids: Sequence[int]) -> None:
    """Send SIGKILL to each process; skip those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def damage(run: Path, kind: str, chance: random.Random) -> dict[str, str]:
    """Damage a shard of the newest checkpoint: "torn" or "flip".

    Returns: the names of checkpoint and shard.
    Raises: OSError if there are fewer than two checkpoints.
    """
    there = checkpoints(run)
    if len(there) < 2:
        raise OSError(f"{run} has no checkpoint to go back to")
    shards = sorted(file for file in there[-1].iterdir() if file.suffix == ".safetensors")
    shard = chance.choice([file for file in shards if file.stat().st_size > 1])
    size = shard.stat().st_size
    with open(open_regular(shard, member=True, flags=os.O_RDWR), "r+b") as stream:
        if kind == "torn":
            stream.truncate(size // 2)
        else:
            bit = chance.randrange(8 * size)
            stream.seek(bit // 8)
            byte = stream.read(1)[0]
            stream.seek(bit // 8)
            stream.write(bytes([byte ^ 1 << bit % 8]))
    return {"checkpoint": there[-1].name, "shard": shard.name}


def cut_connection(pid: int, chance: random.Random) -> None:
    """Shut down one of the TCP connections of another process of this user.

    Raises: OSError if it has none, or the system does not allow it (Linux 5.6 or newer, a child or
    grandchild of ours).
    """
    folder = Path(f"/proc/{pid}/fd")
    files = [int(file.name) for file in folder.iterdir() if os.readlink(file).startswith("socket:")]
    chance.shuffle(files)
    library = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for file in files:
            copy = library.syscall(_PIDFD_GETFD, process, file, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            with socket.socket(fileno=copy) as sock, contextlib.suppress(OSError):
                if sock.family == socket.AF_INET and sock.getpeername():
                    sock.shutdown(socket.SHUT_RDWR)
                    return
    finally:
        os.close(process)
    raise OSError(f"process {pid} has no TCP connection")
