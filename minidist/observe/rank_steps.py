"""Chapter 25 · RUN/steps/00003.jsonl: one line of JSON per step from every rank, from which
diagnosis finds the culprit.

    recorder = StepRecorder(world, run, first_step=0)     # on every rank, before the first step
    with recorder.input(): batch = next(batches)            # the wait for data
    trainer.step(batch)
    recorder.step_done(tokens=batch_tokens_of_this_rank)
    read_rank_steps(run)                                    # {rank: RankSteps}, during or after the
                                                            # run

The first line describes the rank: time, rank, size, host, pid, alike (see StepRecorder), and clock,
the seconds to add to its message times to get the time of day. Then follows one line of at most
MOST_BYTES per step; a missing value is not known.

    step        from 0, as the flight recorder counts
    time        the time of day when the step ended
    seconds     since the end of the previous step
    cpu         processor seconds of the program's thread outside of calls: its own computation
    others      processor seconds of all other threads of the process; missing if ranks are threads
    input       seconds in which the program waited for its data
    calls       seconds in which the program was in calls, or waited for calls
                (wait_state.spent_in_calls)
    rss         resident bytes of the process; missing if ranks are threads
    tokens      targets that this rank worked on; loss: their mean loss
    digest      {group: digest of the weights that all its ranks hold}, every few steps
    bad         the first number of this rank that is not finite: [layer, op, pass, "nan" or "inf",
                time of day]
    busy        "file:line" of another Python thread of the program, if the other threads used more
                time than this one
    out, in     one message of each link: comm/flight/message_times.py

Cost: about 30 µs per step, and 2 µs per message; a digest reads all weights once.
"""

import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
# share of a step: if other threads are busy for longer, and longer than this one, one is located
MUCH = 0.02
PAGE = os.sysconf("SC_PAGE_SIZE")


class _RankLine(msgspec.Struct):
    """The fields of the first line that a reader needs."""

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
    """Return the path of the file of a rank's steps."""
    return Path(run) / FOLDER / f"{world_rank:05d}.jsonl"


class StepRecorder:
    """A writer of one rank's steps; made and used by the thread that trains.

    Args:    run: the folder in which FOLDER is made; goes_on: append to the existing lines.
             alike: a word that is equal on ranks with the same kind of work; stages of a pipeline
             have different words.
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
        self._alone = world.transport.name not in THREADS  # the process has no other rank
        file = steps_file(run, world.world_rank)
        with suppress(OSError):  # the first write reports the error
            make_member_folder(file.parent)
        self._log = StepLog(file, goes_on=goes_on)
        self.step = first_step
        self._times = world.ledger.times = MessageTimes(
            world.world_rank, world.transport.world_size
        )
        self.about = {
            "time": round(time.time(), 3),
            "rank": world.world_rank,
            "size": world.transport.world_size,
            "pid": os.getpid(),
            "alike": alike,
            "host": platform.node(),
            "clock": time.time() - time.perf_counter(),
        }
        self._log.write(_packed(self.about))
        self._newest: deque[dict[str, Any]] | None = None
        self._rss = _ResidentBytes() if self._alone else None
        self._bad: list[str | float] | None = None
        self._input = 0.0
        self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._cpu = time.thread_time()
        self._all = time.process_time()
        self._calls, self._worked = spent_in_calls()

    def keep(self, newest: "deque[dict[str, Any]]") -> None:
        """From now on, also append the values of each step to `newest`, without its messages."""
        self._newest = newest

    def begin_anew(self, alike: str) -> None:
        """Leave out the time since the last step and the messages in it; from now on the rank's
        work is `alike`."""
        if alike != self.about["alike"]:
            self.about["alike"] = alike
            self._log.write(_packed(self.about))
        self._times.take()
        self._begin()

    @contextmanager
    def input(self) -> Iterator[None]:
        """Record the time of the block as waiting for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._input += time.perf_counter() - start

    def not_finite(self, layer: str, op: str, where: str, kind: str) -> None:
        """Record a number that is not finite; only the first of a step counts."""
        self._bad = self._bad or [layer, op, where, kind, round(time.time(), 6)]

    def step_done(
        self,
        *,
        tokens: int | None = None,
        loss: float | None = None,
        digest: dict[str, str] | None = None,
    ) -> None:
        """Write the line of a step that has ended. A missing or repeated call is no error."""
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
        if self._newest is not None:
            self._newest.append(values)
        self.step += 1
        self._input = 0.0
        self._bad = None
        self._begin()

    def close(self) -> None:
        """Stop writing."""
        self._log.close()
        if self._rss is not None:
            self._rss.close()


def _line(values: dict[str, Any], messages: dict[str, list[list[int]]]) -> bytes:
    """Return the line of a step, with as many links as fit into MOST_BYTES."""
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
    """Return "file:line" of the program in the first other thread that runs a line of the program;
    None if no thread does."""
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
    """A reader of the resident bytes of this process; 0 if the system does not report them."""

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
    """The lines of one rank: the values of its first line, and its steps in order, each once."""

    rank: int
    size: int
    host: str
    clock: float
    since: float
    alike: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, about: Mapping[str, Any], steps: list[dict[str, Any]]) -> "RankSteps":
        """Return the lines of a rank from the values of its first line, and its
        steps."""
        return cls(
            about["rank"],
            about["size"],
            about["host"],
            about["clock"],
            about["time"],
            about["alike"],
            steps,
        )


def read_rank_steps(run: str | Path) -> dict[int, RankSteps]:
    """Return the steps of all ranks of a run; {} if it has none. A torn line is left out; of two
    lines of one step the later counts.

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
    """Read more lines of a rank's file into `about` (the newest first line) and `steps` (by
    number).

    A step that is made again, after a resumption, replaces the earlier one and all later steps.
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
    """Return {rank: its steps in order} from the results of take_lines; for an elastic job only the
    ranks of its newest size."""
    ranks = {
        about["rank"]: RankSteps.of(about, [steps[step] for step in sorted(steps)])
        for about, steps in found
        if about
    }
    size = max(ranks.values(), key=lambda rank: rank.since).size if ranks else 0
    return {rank: each for rank, each in ranks.items() if rank < size}
