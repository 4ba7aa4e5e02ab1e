"""Flight recorders of a training, RUN/flight/00003.ring: kept for `minidist diagnose RUN`."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from minidist.comm.flight.slots import newest_time, read_ring
from minidist.comm.group import Group
from minidist.comm.health.failure import say_line
from minidist.errors import ConfigError
from minidist.files import DISK_FAILED
from minidist.launch.flight import ring_file
from minidist.observe.rank_steps import FOLDER as STEPS

FOLDER = "flight"
GOING = 5.0  # seconds: a job with a newer record was making progress when it got the signal
# exit statuses
BAD_INPUT = 2
STOPPED = (130, 143)


def keep_ring(run: Path, world: Group) -> None:
    """Keep this rank's ring in the run folder.

    If that fails, print one line, and the training continues.

    A full disk is not reported here, because the writers of the run's other files report it.
    """
    if (run / FOLDER).is_symlink():
        say_line(
            f"minidist train: rank {world.world_rank} keeps no flight recorder: {run / FOLDER} "
            "is a link, which is not followed; remove it"
        )
        return
    try:
        world.ledger.flight.keep_in(
            ring_file(run / FOLDER, world.world_rank), size=world.size, link=world.transport.inside
        )
    except ConfigError as error:
        with suppress(OSError):
            (run / FOLDER).rmdir()
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in DISK_FAILED:
            say_line(f"minidist train: {error}")


def drop_rings(run: Path, status: int) -> None:
    """Remove the rings and records of steps of a job that ended with `status`, if they show nothing
    of use.

    That is after bad input, or if the job made progress until it was stopped. The files of a job
    that failed are kept, and those of a job that hung until it was stopped.
    """
    if status == BAD_INPUT or (status in STOPPED and _was_going(run / FOLDER)):
        for folder in (FOLDER, STEPS):
            shutil.rmtree(run / folder, ignore_errors=True)


def _was_going(folder: Path) -> bool:
    for path in folder.glob("*.ring"):
        try:
            header, entries = read_ring(path, member=True)
        except ConfigError:
            continue
        if time.time() - newest_time(header, entries) < GOING:
            return True
    return False
