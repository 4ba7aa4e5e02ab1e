"""The state of an elastic job's launcher: the limits of the job, its present generation, and a log
of all generations.

{"event": "forming", "seconds": 12.1, "time": …, "generation": 2, "processes": [0, 1, 3],
 "pids": […]}
{"event": "formed", …, "step": 41}      all ranks have the state after 41 steps
{"event": "stepped", …, "step": 42}     the first step of this generation that counts
{"event": "at", …, "step": 45}          45 steps are made; written a few times per second
{"event": "trained", …, "step": 90}     all 90 steps are made
{"event": "broken", …, "rank": 2, "how": "was killed by SIGKILL"}
{"event": "left", …}                    instead of "broken": all ranks stopped to let more join
{"event": "reached", …, "step": 43}     the most steps that a rank had made when it left
{"event": "done", …}                    the work is finished
{"event": "end", …, "status": 0}        the job has ended
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.comm.health.acceptor import listen
from minidist.comm.health.failure import say_line
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.seats import Seat
from minidist.files import add_line
from minidist.launch.workers import HERE, Worker

# seconds that a process gets to leave a broken generation: it may compute in one long call
LEAVE_LIMIT = 60.0
COME_LIMIT = 20.0  # seconds until all processes of a generation must be at its monitor


@dataclass(frozen=True)
class Elastic:
    """The limits of an elastic job.

    Attributes: sizes     numbers of ranks that the plan allows; the last is what the job wants
                restarts  number of processes that may be started to replace lost ones
                spares    number of started processes that wait, in addition to those that work
                wait      seconds to wait for a replacement that is starting, before the job
                          continues with fewer ranks
    """

    sizes: tuple[int, ...]
    restarts: int = 0
    spares: int = 0
    wait: float = 0.0

    def size_of(self, count: int) -> int:
        """Return the largest allowed number of ranks for `count` processes.

        0 if they are too few.
        """
        return max((size for size in self.sizes if size <= count), default=0)


@dataclass
class Generation:
    """A generation: the processes that work together, in rank order, and its progress."""

    number: int
    members: list[Worker]
    monitor: Monitor
    record: dict[str, Any]
    begun: float = field(default_factory=time.monotonic)
    broken: float | None = None  # when; None while it works
    asked: float | None = None  # when its rank 0 was asked for a step to stop after
    boundary: int = 0  # that step
    reached: int = 0  # the most steps that one of its ranks had made when it left
    agreed: set[int] = field(default_factory=set)  # numbers of the processes that know that step

    def stop_after(self, step: int) -> None:
        """Send the step that rank 0 has named, after which all are to stop, to all other ranks."""
        self.agreed = set()
        self.boundary = step
        for other in self.members[1:]:
            other.send("stop", number=self.number, step=step)
        self.agree(self.members[0])

    def agree(self, worker: Worker) -> None:
        """Note that a process knows that step; when all do, let rank 0 continue."""
        self.agreed.add(worker.number)
        if len(self.agreed) == len(self.members):
            self.members[0].send("go", number=self.number)

    def kill_late(self, staying: Sequence[Worker], seconds: float, patience: float) -> None:
        """Kill members that have not left the generation, which broke `seconds` ago.

        A running one gets LEAVE_LIMIT seconds, a stopped one `patience`; the lost rank, if stopped,
        is killed at once.
        """
        for worker in staying:
            stopped = worker.stopped
            loss = self.monitor.loss
            lost = loss is not None and loss.world_rank == worker.rank
            if seconds > (patience if stopped and not lost else 0.0 if stopped else LEAVE_LIMIT):
                worker.kill()

    def kill_absent(self, seconds: float, patience: float) -> None:
        """Kill processes that have not reached the monitor `seconds` after the generation began.

        A running one gets COME_LIMIT seconds, a stopped one `patience`.
        """
        for worker in self.members:
            if not self.monitor.has_come(worker.rank) and seconds > (
                patience if worker.stopped else COME_LIMIT
            ):
                worker.kill()


def placed(size: int, ready: list[Worker], before: Generation | None) -> list[Worker]:
    """Return the processes of the next generation by rank: each keeps its rank if the size is the
    same, else its order."""
    last = [] if before is None else before.members
    known = [worker for worker in last if worker in ready][:size]
    new = [worker for worker in ready if worker not in known]
    if len(last) != size:
        return [*known, *new][:size]
    return [worker if worker in known else new.pop(0) for worker in last]


def start_monitor(members: Sequence[Worker], token: bytes, patience: float) -> Monitor:
    """Return the monitor of these ranks, which listens on this host."""

    def how(seat: Seat) -> str | None:
        """Return how a rank ended that is about to end; None if it still runs."""
        worker = members[seat.world_rank]
        code = worker.ended()
        return None if code is None else worker.how_it_ended(code)

    monitor = Monitor(len(members), token, listen(HERE, 0), how=how, patience=patience)
    monitor.start()
    return monitor


def tell_ranks(
    members: Sequence[Worker], *, number: int, token: str, port: int, begun: bool
) -> None:
    """Send each process its rank in this generation."""
    for rank, worker in enumerate(members):
        worker.send(
            "generation",
            number=number,
            world_rank=rank,
            world_size=len(members),
            token=token,
            port=port,
            begun=begun,
        )


class EventLog:
    """The events of a job, as one line of JSON each in a file, and one record per generation.

    Times are seconds since the job began.

    Args: file: the file; None: write none.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._start = time.monotonic()
        self.records: list[dict[str, Any]] = []

    def clock(self) -> float:
        """Return the seconds since the job began."""
        return round(time.monotonic() - self._start, 4)

    def note(self, event: str, generation: Generation, **content: Any) -> None:
        """Add an event of a generation to its record and to the file."""
        generation.record[event] = self.clock()
        if event == "formed":
            generation.record |= content
        shown = ("processes", "pids") if event == "forming" else ()
        told: dict[str, Any] = {key: generation.record[key] for key in shown}
        self.write(
            {
                "event": event,
                "seconds": generation.record[event],
                "time": time.time(),
                "generation": generation.number,
                **told,
                **content,
            }
        )

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the file. A full disk does not end the job."""
        try:
            if self._file is not None:
                add_line(self._file, json.dumps(line))
        except OSError as error:
            say_line(
                f"minidist: {self._file}: {error.strerror}; what follows is not recorded there"
            )
            self._file = None
