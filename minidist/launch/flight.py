"""Keep a rank's flight recorder in a file, and dump it at SIGUSR2.

minidist launch -n 4 --flight DIR script.py         DIR/00000.ring to DIR/00003.ring
minidist train --out RUN                            RUN/flight/00000.ring and so on
world.ledger.flight.keep_in("DIR/00003.ring")       in a program under another launcher, and in a
                                                    function of md.run
"""

import os
from pathlib import Path

from minidist.comm.group import Group
from minidist.comm.health.flight_signals import hear_dump_signal
from minidist.launch.limits import FLIGHT


def ring_file(folder: str | Path, world_rank: int) -> Path:
    """Return the path of a rank's ring file."""
    return Path(folder) / f"{world_rank:05d}.ring"


def begin_flight(world: Group) -> None:
    """After a rank has joined its job: dump its recorder at SIGUSR2, and keep it in the folder of
    --flight, if given.

    Raises: ConfigError if the ring file cannot be made there.
    """
    hear_dump_signal()
    if folder := os.environ.get(FLIGHT):
        world.ledger.flight.keep_in(
            ring_file(folder, world.world_rank), size=world.size, link=world.transport.inside
        )
