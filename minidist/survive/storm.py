"""Chapter 26 · A storm: it injects one fault after another into an elastic job, and records every
fault.

    Storm                start the job ... fault ... fault ... the launcher, too, is killed, and
                         started again ... the job ends
    RUN/elastic.jsonl    the job's log: which ranks work, from which step, what broke
                         (launch/generation.py)
    RUN/storm.jsonl      the storm's log: {"event": "fault", "kind": "kill", "time": …, "pid": …,
                         "rank": 2}

Both use one clock; storm_report.py reads the two. The faults are those of faults.py. The job is any
program that launch.elastic_job runs, in a process of its own.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from minidist.comm.health.process_state import has_ended
from minidist.files import add_line, read_regular
from minidist.reading import MOST_BYTES, Count, Finite, Rank, parse_line
from minidist.survive.faults import FAULTS, cut_connection, damage, kill_all, set_disk

Event = dict[str, Any]
Job = subprocess.Popen[Any]

# files of a run folder
LOG = "elastic.jsonl"
NOTES = "storm.jsonl"
HOLD = 1.5  # seconds that a disk is full or slow, in addition to a save interval
READY = 10.0  # most seconds to wait until a fault is possible
END = 10.0  # seconds that ranks get to end when their launcher is gone
_LOOK = 0.02  # seconds between looks at the job

PLANTED = {
    "kill": "rank {rank} is killed",
    "stop": "rank {rank} is stopped",
    "cut": "a connection of rank {rank} is cut",
    "torn": "half of {shard} in {checkpoint} is cut off, and all ranks are killed",
    "flip": "a bit of {shard} in {checkpoint} is turned over, and all ranks are killed",
    "full": "for {hold:g} s the disk has no space left",
    "slow": "for {hold:g} s the disk is slow",
    "launcher": "the launcher is killed, and started again",
}
"""A sentence for each fault."""


class _EventTold(msgspec.Struct):
    """A line of LOG, with the fields that a storm reads."""

    event: str
    time: Finite = 0.0
    step: Count = 0
    rank: Rank | None = None
    processes: list[Count] = []
    pids: list[Annotated[int, msgspec.Meta(ge=2, le=2**31)]] = []


class Storm:
    """A source of faults for one job.

    Args:       start: starts the job; its argument is True if the job was interrupted and
                continues. run: the job's folder, with its log.
                every: mean seconds between faults; kinds: of faults, used in turn; seed: for times
                and ranks. disk: the folder of faults.disk_module(); save_seconds: approximate
                seconds between checkpoints.
                one_by_one: inject a fault only after the job has recovered from the previous one.
                noted: called after each fault.
                tell: called with a sentence on each fault, before the job can report its effects.
    Attributes: job: the present process. faults: the record of each fault.
    """

    def __init__(
        self,
        start: Callable[[bool], Job],
        run: Path,
        *,
        every: float,
        kinds: Sequence[str] = FAULTS,
        seed: int = 0,
        disk: Path | None = None,
        save_seconds: float = 0.0,
        one_by_one: bool = False,
        noted: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._start = start
        self._run = run
        self._every = every
        self._kinds = kinds
        self._chance = random.Random(seed)
        self._disk = disk
        self._hold = HOLD + save_seconds
        self._one_by_one = one_by_one
        self._noted = noted
        self._tell = tell
        self._before = len(events(run / LOG))  # number of events of an earlier job
        self.faults: list[Event] = []
        self._begun = time.time()  # when the present launcher was started
        self.job = start(False)

    def told(self) -> list[Event]:
        """Return the events that the job has logged so far."""
        return events(self._run / LOG)[self._before :]

    def rage(self, seconds: float, most: int | None = None) -> None:
        """Inject faults for `seconds` from the job's first step, at most `most` of them, or until
        the job ends."""
        while self.job.poll() is None and not any(
            event["event"] == "stepped" for event in self.told()
        ):
            time.sleep(_LOOK)
        end = time.monotonic() + seconds
        while (
            self.job.poll() is None
            and time.monotonic() < end
            and (most is None or len(self.faults) < most)
        ):
            due = time.monotonic() + self._every * self._chance.uniform(0.5, 1.5)
            while self.job.poll() is None and time.monotonic() < due:
                time.sleep(_LOOK)
            deadline = time.monotonic() + READY
            while self._one_by_one and not self._goes_on() and time.monotonic() < deadline:
                time.sleep(_LOOK)
            if self.job.poll() is None:
                self._strike(self._kinds[len(self.faults) % len(self._kinds)])

    def _goes_on(self) -> bool:
        """Return whether the job has ended, or has noticed the last fault and made a step since."""
        if self.job.poll() is not None or not self.faults:
            return True
        since = [
            event["event"]
            for event in self.told()
            if event.get("time", 0.0) > self.faults[-1]["time"]
        ]
        return "broken" in since and "stepped" in since[since.index("broken") :]

    def end(self) -> None:
        """End the job, if it still runs."""
        self.job.terminate()
        try:
            self.job.wait(END)
        except subprocess.TimeoutExpired:
            self.job.kill()
            self.job.wait()

    def _strike(self, kind: str) -> None:
        """Inject one fault; give up if it is not possible within READY seconds (for example,
        without a checkpoint)."""
        deadline = time.monotonic() + READY
        while self.job.poll() is None and time.monotonic() < deadline:
            try:
                self._try(kind)
                return
            except OSError:
                time.sleep(_LOOK)

    def _try(self, kind: str) -> None:
        pids = next(
            (
                list(event["pids"])
                for event in reversed(self.told())
                if event["event"] == "forming" and event["time"] > self._begun
            ),
            [],
        )
        if not pids:
            raise OSError("the job has no ranks yet")
        rank = self._chance.randrange(len(pids))
        fault = {"event": "fault", "kind": kind, "time": time.time()}
        match kind:
            case "kill" | "stop":
                os.kill(pids[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                self._say(kind, rank=rank)
                self._note(fault | {"rank": rank, "pid": pids[rank]})
            case "cut":
                cut_connection(pids[rank], self._chance)
                self._say(kind, rank=rank)
                self._note(fault | {"rank": rank, "pid": pids[rank]})
            case "torn" | "flip":
                found = damage(self._run, kind, self._chance)
                self._say(kind, **found)
                kill_all(pids)
                self._note(fault | found)
            case "full" | "slow":
                self._spoil_disk(fault)
            case "launcher":
                self._replace_launcher(fault, pids)

    def _spoil_disk(self, fault: Event) -> None:
        if self._disk is None:
            raise OSError("this job's processes have no disk that can be spoilt")
        self._say(fault["kind"], hold=self._hold)
        set_disk(self._disk, fault["kind"], on=True)
        try:
            end = time.monotonic() + self._hold
            while self.job.poll() is None and time.monotonic() < end:
                time.sleep(_LOOK)
        finally:
            set_disk(self._disk, fault["kind"], on=False)
        self._note(fault | {"until": time.time()})

    def _replace_launcher(self, fault: Event, pids: list[int]) -> None:
        """Kill the launcher and start it again, as a supervisor does.

        Meanwhile its ranks end without help.
        """
        self._say(fault["kind"])
        self.job.kill()
        self.job.wait()
        self._begun = time.time()
        self.job = self._start(True)
        deadline = time.monotonic() + END
        while not all(map(has_ended, pids)) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        left = [pid for pid in pids if not has_ended(pid)]
        kill_all(left)
        self._note(fault | {"until": time.time(), "left": len(left)})

    def _say(self, kind: str, **details: Any) -> None:
        self._tell(PLANTED[kind].format(**details))

    def _note(self, fault: Event) -> None:
        self.faults.append(fault)
        with contextlib.suppress(OSError):
            add_line(self._run / NOTES, json.dumps(fault))
        self._noted()


def events(log: Path) -> list[Event]:
    """Return the events of a log; a line that is still being written is left out."""
    with contextlib.suppress(OSError):
        told = read_regular(log, most=MOST_BYTES, member=True).split(b"\n")[:-1]
        return [event for line in told if (event := parse_line(line, _EventTold)) is not None]
    return []
