"""Flight recorders of a job that never ran: real rings in files, written at times that the test
chooses."""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from minidist.comm.flight import recorder
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.signature import Signature
from minidist.launch.flight import ring_file

GONE = 1 << 30  # the number of no process


def made(flight: FlightRecorder, *signature, axis: str, world_ranks, begun: bool = False) -> int:
    """Tell the recorder of a call with these fields of a signature. Return its record's number."""
    call = SimpleNamespace(
        signature=Signature(*signature), group_axis=axis, world_ranks=world_ranks, record=0
    )
    call.meta = b"".join(call.signature.pack())
    flight.on_made(call, begun)
    return call.record


class VirtualJob:
    """A job of `size` ranks whose rings lie in `folder`; `now` is its time in seconds, 0.0 the
    present.

    Args: alive: whether its ranks' processes run (all are this one). hosts: of the ranks (this
    one); skew: by which
          their clocks are ahead, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        alive: bool = False,
        hosts: dict[int, str] | None = None,
        skew: dict[int, float] | None = None,
    ) -> None:
        self.size = size
        self.now = 0.0
        self.sequences = {}
        self._start = time.time()
        self.skew = skew or {}
        self.flights = [FlightRecorder(rank) for rank in range(size)]
        for rank, flight in enumerate(self.flights):
            host = (hosts or {}).get(rank, os.uname().nodename)
            with (
                self.at(rank, -3600.0),
                patch.object(recorder.platform, "node", lambda host=host: host),
            ):
                flight.keep_in(ring_file(folder, rank), size=size)
                flight.pid = os.getpid() if alive else GONE
                flight._know(0, "world", range(self.size))

    @contextmanager
    def at(self, rank: int, now: float):
        """In the block it is this time for the rank."""
        self.now = now
        today = self._start + self.skew.get(rank, 0.0)
        clock = SimpleNamespace(perf_counter=lambda: 1e6 + now, time=lambda: today + now)
        with patch.object(recorder, "time", clock):
            yield

    def call(
        self,
        rank: int,
        begun: float,
        ended: float | None,
        *,
        verb: str = "all_reduce",
        shape=(4,),
        dtype: str = "<f4",
        op: str | None = "sum",
        where: str = "train.py:40",
        failed: bool = False,
        sequence: int | None = None,
        group: int = 0,
        ranks=None,
        axis: str = "world",
    ) -> int:
        """A collective call of a rank; `ended` None: it is in it still. Returns: its record's
        number."""
        flight = self.flights[rank]
        self.sequences[rank, group] = sequence or self.sequences.get((rank, group), 0) + 1
        with self.at(rank, begun):
            number = made(
                flight,
                group,
                self.sequences[rank, group],
                verb,
                "ring",
                op,
                None,
                dtype,
                shape,
                where,
                axis=axis,
                world_ranks=ranks or range(self.size),
            )
            flight.begun(number)
        if ended is not None:
            with self.at(rank, ended):
                flight.ended(number, 16, 2, failed=failed, blocking=True)
        return number

    def message(
        self, rank: int, begun: float, ended: float | None, sequence: int = 1, **way: int
    ) -> None:
        """A message of a rank, to `dst` or from `src`; one that stays open is waited for."""
        flight = self.flights[rank]
        with self.at(rank, begun):
            number = flight.message(
                0,
                sequence,
                "send" if "dst" in way else "recv",
                "<f4",
                (4,),
                "pipe.py:7",
                axis="world",
                world_ranks=range(self.size),
                **way,
            )
            if ended is None:
                flight.waiting("a message", [*way.values()])
        if ended is not None:
            with self.at(rank, ended):
                flight.ended(number, 16, 1)

    def waits(self, rank: int, since: float, *peers: int) -> None:
        """A rank waits for others, still."""
        with self.at(rank, since):
            self.flights[rank].waiting("a message", peers)

    def step(self, rank: int, number: int, now: float) -> None:
        """A rank begins a step."""
        with self.at(rank, now):
            self.flights[rank].start_step(number)

    def end(self, rank: int, now: float, why: str = "") -> None:
        """A rank leaves."""
        with self.at(rank, now):
            self.flights[rank].end(why)
