"""Chapter 25 · RUN/metrics.jsonl: one line of JSON per step, written during the run.

    log = StepLog(run / "metrics.jsonl", goes_on=False)
    log.write(StepState(step=1, …))             # one write() of less than MOST_BYTES
    read_step_log(run / "metrics.jsonl")        # while the run writes it, or after it was killed

A killed run leaves whole lines; only the last may be torn, and a reader ignores it. A run that
resumes from a checkpoint appends: it makes some steps again, and the later line of a step counts.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from minidist.comm.health.failure import say_line
from minidist.files import begin, open_regular, read_regular, read_rest
from minidist.reading import MOST_BYTES as MOST_OF_A_LOG
from minidist.reading import Count, Finite, Seconds, parse_line

STEP_LOG = "metrics.jsonl"
MOST_BYTES = 1024


class _LogLine(msgspec.Struct):
    """The fields of a line of the log; logs of older versions have fewer."""

    step: Count
    steps: Count = 0
    time: Finite = 0.0
    loss: float | None = None
    seconds: Seconds = 0.0
    tokens_per_second: Finite = 0.0
    joules: Finite = 0.0
    energy_source: str = ""
    memory: dict[str, Count] = {}
    sent_bytes: dict[str, dict[str, Count] | Count] = {}


@dataclass(frozen=True)
class StepState:
    """The state of one rank after a step.

    Attributes: step: from 1; steps: of the run; seconds: of this step; sent_bytes: of this rank so
                far, by axis and verb; memory: bytes that it holds now, by category, with "total";
                joules: so far, from its counters or its estimate (`energy_source`).
    """

    step: int
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    sent_bytes: dict[str, dict[str, int]]
    memory: dict[str, int]
    joules: float
    energy_source: str

    def line(self, moment: float) -> bytes:
        """Return the state as one line of JSON.

        If the line would be longer than MOST_BYTES, `sent_bytes` has one sum per axis instead of
        its verbs. A loss that is not finite becomes null, because JSON has no NaN.

        Args:    moment: seconds since 1970.
        """
        values: dict[str, Any] = {
            "step": self.step,
            "steps": self.steps,
            "time": round(moment, 3),
            "loss": self.loss if math.isfinite(self.loss) else None,
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "joules": round(self.joules, 6),
            "energy_source": self.energy_source,
            "memory": {name: nbytes for name, nbytes in self.memory.items() if nbytes},
            "sent_bytes": self.sent_bytes,
        }
        line = _packed(values)
        if len(line) > MOST_BYTES:
            line = _packed(
                values
                | {
                    "sent_bytes": {
                        axis: sum(verbs.values()) for axis, verbs in self.sent_bytes.items()
                    }
                }
            )
        return line


class StepLog:
    """A writer of the lines of one run. If the disk is full, it says so once, and the run
    continues.

    Args:    file: made with its first line; goes_on: append to the existing lines, else start a new
             file.
    """

    def __init__(self, file: Path, *, goes_on: bool) -> None:
        self.file = file
        self._goes_on = goes_on
        self._ended = False
        self._open: int | None = None

    def write(self, line: bytes) -> None:
        """Append a line, in one write()."""
        if self._ended:
            return
        try:
            if self._open is None:
                self._open = self._begin()
            os.write(self._open, line)
        except OSError as error:
            self.close()
            say_line(
                f"minidist train: {self.file}: {error.strerror}; later steps are not written there"
            )

    def close(self) -> None:
        """Stop writing; a second call does nothing."""
        self._ended = True
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _begin(self) -> int:
        """Return the opened file; a torn line of a killed run is ended."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        opened = (
            open_regular(self.file, member=True, flags=flags) if self._goes_on else begin(self.file)
        )
        size = os.fstat(opened).st_size
        if size and os.pread(opened, 1, size - 1) != b"\n":
            os.write(opened, b"\n")
        return opened


def read_step_log(file: str | Path) -> list[dict[str, Any]]:
    """Return the steps in order, each once; a torn line, or a line that is not a step, is left out.

    Raises:  OSError if the file cannot be read.
    """
    found = _steps_of(read_regular(file, most=MOST_OF_A_LOG, member=True))
    return [found[step] for step in sorted(found)]


class LogFollower:
    """A reader of a log that a run still writes; each poll reads only the new bytes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # the file's first bytes, which identify its run; number of bytes read
        self._begin = b""
        self._read = 0
        self._found: dict[int, dict[str, Any]] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the steps up to now, as read_step_log does; [] if there is no file."""
        try:
            with open(open_regular(self.file, member=True), "rb") as stream:
                begin = stream.read(128)
                if not self._begin or not begin.startswith(self._begin):  # a new log
                    self._begin = begin
                    self._read = 0
                    self._found = {}
                stream.seek(self._read)
                new = read_rest(stream, MOST_OF_A_LOG)
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._found.update(_steps_of(whole))
        return [self._found[step] for step in sorted(self._found)]


def _steps_of(lines: bytes) -> dict[int, dict[str, Any]]:
    """Return {step: values}; for a step that was made again, the later line."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines.splitlines():
        if (values := parse_line(line, _LogLine)) is not None:
            found[values["step"]] = values
    return found


def _packed(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def loss_text(loss: float | None) -> str:
    """Return a loss as text; None means that the run could not measure it."""
    return "unknown" if loss is None else f"{loss:.4f}"
