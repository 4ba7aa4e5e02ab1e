"""Where the flight recorder of a rank is kept, and what SIGUSR2 does to a rank's process.

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
    """The file of a rank's ring."""
    return Path(folder) / f"{world_rank:05d}.ring"


def begin_flight(world: Group) -> None:
    """Once a rank has joined its job: SIGUSR2 dumps its recorder, and its folder is the launcher's
    --flight.

    Raises: ConfigError if the ring cannot be made there.
    """
    hear_dump_signal()
    if folder := os.environ.get(FLIGHT):
        world.ledger.flight.keep_in(
            ring_file(folder, world.world_rank), size=world.size, link=world.transport.inside
        )
