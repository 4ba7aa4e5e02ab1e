"""Chapter 25 · RUN/steps/00003.jsonl: a line of JSON a step from every rank, from which diagnosis
names the culprit.

    recorder = StepRecorder(world, run, first_step=0)     # on every rank, before the first step
    with recorder.input(): batch = next(batches)            # the wait for data
    trainer.step(batch)
    recorder.step_done(tokens=batch_tokens_of_this_rank)
    read_rank_steps(run)                                    # {rank: RankSteps}, while the run goes
                                                            on or after it

The first line tells about the rank: time, rank, size, host, pid, alike (below), and clock, what to
add to its times for the time of day. Then a line of at most MOST_BYTES a step; what is left out is
not known.

    step        from 0, as the flight recorder counts
    time        the time of day when the step ended
    seconds     since the end of the step before
    cpu         processor seconds of the program's thread outside of calls: its own computation
    others      processor seconds of all other threads of the process; not of ranks that are threads
    input       seconds in which the program waited for its data
    calls       seconds in which the program was in calls, or waited for calls
                (wait_state.spent_in_calls)
    rss         bytes of memory that the process holds; not of ranks that are threads
    tokens      targets that this rank worked on; loss: their mean loss
    digest      {group: digest of the weights that its ranks hold alike}, every few steps
    bad         the first number of this rank that is not finite: [layer, op, pass, "nan" or "inf",
                time of day]
    busy        where another Python thread of the program was, "file:line", if the others used more
                time than this one
    out, in     one message of each link: comm/flight/message_times.py

Cost: about 30 µs a step, and 2 µs for each message; a digest reads all weights once.
"""

import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec

from minidist.comm.call_site import frames, in_program
from minidist.comm.flight.message_times import MessageTimes
from minidist.comm.group import Group
from minidist.comm.health.wait_state import spent_in_calls
from minidist.errors import ConfigError
from minidist.files import make_member_folder, read_regular
from minidist.launch.transports import THREADS
from minidist.observe.step_log import StepLog
from minidist.reading import MOST_BYTES as MOST_OF_A_FILE
from minidist.reading import Count, Finite, Rank, Seconds, parse_line

FOLDER = "steps"
MOST_BYTES = 1000
# of a step: other threads that are busy for longer, and longer than this one, are looked at
MUCH = 0.02
PAGE = os.sysconf("SC_PAGE_SIZE")


class _RankLine(msgspec.Struct):
    """What a reader needs of the first line."""

    time: Finite
    rank: Rank
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    host: str
    clock: Finite
    alike: str


class _StepLine(msgspec.Struct, rename={"received": "in", "sent": "out"}):
    step: Count
    seconds: Seconds
    time: Finite = 0.0
    cpu: Seconds = 0.0
    others: Seconds = 0.0
    input: Seconds = 0.0
    calls: Finite = 0.0
    rss: Count = 0
    tokens: Count = 0
    loss: float | None = None
    digest: dict[str, str] = {}
    bad: tuple[str, str, str, str, Finite] | None = None
    busy: str | None = None
    sent: list[tuple[Rank, Count, Count, Count, Count]] = []
    received: list[tuple[Rank, Count, Count, Count, Count, Count]] = []


def steps_file(run: str | Path, world_rank: int) -> Path:
    """The file of a rank's steps."""
    return Path(run) / FOLDER / f"{world_rank:05d}.jsonl"


class StepRecorder:
    """Writes the steps of one rank; made and used by the thread that trains.

    Args:    run: the folder in which FOLDER is made; goes_on: append to the lines that are there.
             alike: the same word on ranks that do the same kind of work, as stages of a pipeline do
             not.
    """

    def __init__(
        self,
        world: Group,
        run: str | Path,
        *,
        goes_on: bool = False,
        first_step: int = 0,
        alike: str = "",
    ) -> None:
        self._alone = world.transport.name not in THREADS  # the process is this rank's
        file = steps_file(run, world.world_rank)
        with suppress(OSError):  # then the first write tells it
            make_member_folder(file.parent)
        self._log = StepLog(file, goes_on=goes_on)
        self.step = first_step
        self._times = world.ledger.times = MessageTimes(
            world.world_rank, world.transport.world_size
        )
        self._log.write(
            _packed(
                {
                    "time": round(time.time(), 3),
                    "rank": world.world_rank,
                    "size": world.transport.world_size,
                    "pid": os.getpid(),
                    "alike": alike,
                    "host": platform.node(),
                    "clock": time.time() - time.perf_counter(),
                }
            )
        )
        self._rss = _ResidentBytes() if self._alone else None
        self._bad: list[str | float] | None = None
        self._input = 0.0
        self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._cpu = time.thread_time()
        self._all = time.process_time()
        self._calls, self._worked = spent_in_calls()

    @contextmanager
    def input(self) -> Iterator[None]:
        """The program waits for its data in the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._input += time.perf_counter() - start

    def not_finite(self, layer: str, op: str, where: str, kind: str) -> None:
        """A number is not finite; the first of the run counts."""
        self._bad = self._bad or [layer, op, where, kind, round(time.time(), 6)]

    def step_done(
        self,
        *,
        tokens: int | None = None,
        loss: float | None = None,
        digest: dict[str, str] | None = None,
    ) -> None:
        """The step has ended: write its line. A step that is not told of, or told twice, is no
        error."""
        now = time.perf_counter()
        cpu = time.thread_time()
        whole = time.process_time()
        calls, worked = spent_in_calls()
        seconds = now - self._start
        others = whole - self._all - (cpu - self._cpu)
        values: dict[str, Any] = {
            "step": self.step,
            "time": round(time.time(), 3),
            "seconds": round(seconds, 6),
            "cpu": round(max(0.0, cpu - self._cpu - (worked - self._worked)), 6),
            "input": round(self._input, 6),
            "calls": round(calls - self._calls, 6),
            "tokens": tokens,
            "loss": loss,
            "digest": digest,
            "bad": self._bad,
        }
        if self._rss is not None:
            values |= {"others": round(max(0.0, others), 6), "rss": self._rss.read()}
            if others > max(values["cpu"], MUCH * seconds):
                values["busy"] = _other_thread()
        self._log.write(_line(values, self._times.take()))
        self.step += 1
        self._input = 0.0
        self._bad = None
        self._begin()

    def close(self) -> None:
        """Write no more."""
        self._log.close()
        if self._rss is not None:
            self._rss.close()


def _line(values: dict[str, Any], messages: dict[str, list[list[int]]]) -> bytes:
    """The line of a step, with as many links as fit into MOST_BYTES."""
    values = {name: value for name, value in values.items() if value is not None}
    line = _packed(values | {name: rows for name, rows in messages.items() if rows})
    while len(line) > MOST_BYTES and any(messages.values()):
        messages = {name: rows[:-1] for name, rows in messages.items()}
        line = _packed(values | {name: rows for name, rows in messages.items() if rows})
    return (
        line
        if len(line) <= MOST_BYTES
        else _packed({name: values[name] for name in ("step", "time", "seconds")})
    )


def _packed(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _other_thread() -> str | None:
    """Where the program is in the first thread, other than this one, that has a line of the
    program's own."""
    here = threading.get_ident()
    for ident, innermost in frames().items():
        frame: FrameType | None = innermost if ident != here else None
        # CPython 3.11.7 gives a cell as the next frame of a thread that returns
        with suppress(AttributeError):
            while frame is not None and not in_program(frame):
                frame = frame.f_back
            if frame is not None:
                return f"{frame.f_code.co_filename[-60:]}:{frame.f_lineno}"
    return None


class _ResidentBytes:
    """The memory that this process holds, by the system; 0 where it does not tell."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def read(self) -> int:
        return 0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) * PAGE

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class RankSteps:
    """The lines of one rank: what the first says, and its steps in order, each once."""

    rank: int
    size: int
    host: str
    clock: float
    since: float
    alike: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read_rank_steps(run: str | Path) -> dict[int, RankSteps]:
    """The steps of all ranks of a run; empty if it has none. A torn line is left out; of a step the
    later line holds.

    Args:    run: the run folder, or FOLDER in it.
    """
    folder = Path(run) / FOLDER if (Path(run) / FOLDER).is_dir() else Path(run)
    found = []
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        about = dict[str, Any]()
        steps = dict[int, dict[str, Any]]()
        take_lines(_content(path).splitlines(), about, steps)
        found.append((about, steps))
    return of_newest_job(found)


def _content(path: Path) -> bytes:
    """Return the bytes of a rank's file. Raises: ConfigError if they cannot be read."""
    try:
        return read_regular(path, most=MOST_OF_A_FILE, member=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; remove it, or name another run") from error


def take_lines(
    lines: Iterable[bytes], about: dict[str, Any], steps: dict[int, dict[str, Any]]
) -> None:
    """Read further lines of a rank's file into what is known of it: its newest first line, and its
    steps by number.

    A step that is made again, after a resumption, replaces the earlier one and those after it.
    """
    last = max(steps, default=-1)
    for line in lines:
        if (values := parse_line(line, _StepLine)) is not None:
            step = values["step"]
            if step <= last:
                for later in [number for number in steps if number >= step]:
                    del steps[later]
            steps[step] = values
            last = step
        elif (values := parse_line(line, _RankLine)) is not None:
            about.clear()
            about.update(values)


def of_newest_job(
    found: Iterable[tuple[dict[str, Any], dict[int, dict[str, Any]]]],
) -> dict[int, RankSteps]:
    """{rank: its steps in order}, of what take_lines has read; of an elastic job the ranks of its
    newest size."""
    ranks = {
        about["rank"]: RankSteps(
            about["rank"],
            about["size"],
            about["host"],
            about["clock"],
            about["time"],
            about["alike"],
            [steps[step] for step in sorted(steps)],
        )
        for about, steps in found
        if about
    }
    size = max(ranks.values(), key=lambda rank: rank.since).size if ranks else 0
    return {rank: each for rank, each in ranks.items() if rank < size}
