"""Reads the present state of a run from its folder only; the run does not know that it is watched.

looking = Looking(run)
now = looking.look()        # once a second, say
now.state, now.what         # RUNNING, "step 120 of 500"
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from minidist.errors import ConfigError
from minidist.files import lock_holder
from minidist.observe.diagnose.fault import ranks_text, span
from minidist.observe.diagnose.flights import (
    GONE,
    STOPPED,
    UNKNOWN,
    RankFlight,
    flights_of,
    read_flights,
)
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.live.ring_follower import RingFollower
from minidist.observe.live.run_now import (
    DIED,
    ENDED,
    FINISHED,
    NOT_BEGUN,
    RUNNING,
    STALLED,
    STOPPED_RUN,
    WINDOW,
    RunNow,
    with_ranks,
)
from minidist.observe.live.steps_follower import StepsFollower
from minidist.observe.rank_steps import read_rank_steps
from minidist.observe.step_log import STEP_LOG, LogFollower, loss_text
from minidist.reading import consistent, read_json

STALL = 5.0  # seconds
SHARE = 0.05  # of a core
MANIFEST = "metrics.json"
NEEDED = {"time", "loss", "seconds", "tokens_per_second"}  # of a line of the log


class _EndedRun(msgspec.Struct):
    """The required fields of metrics.json of an ended run."""

    losses: list[Any]
    validation_loss: float | None


class Looking:
    """A watcher that reads the state of one run at each `look`.

    Args:    run: a run folder of minidist train, or a folder of flight recorders.
    Attributes: rest: least seconds to wait before the next look, so that looks take at most SHARE
                of a core, which the ranks may need.
    Raises:  ConfigError, one line, if there is no such folder.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        if not self.run.is_dir():
            raise ConfigError(
                f"{run}: there is no such folder; name a run folder of minidist train"
            )
        self.rest = 0.0
        self.log = LogFollower(self.run / STEP_LOG)
        self.steps = StepsFollower(self.run)
        self._followers: dict[Path, RingFollower] = {}
        self._thorough = (0.0, "", "")  # when whole rings were read, for which state, the cause

    def look(self) -> RunNow:
        """Return the run's present state. Raises: ConfigError if the folder has no records of a
        run."""
        begun = time.process_time()
        try:
            with consistent(f"the records of {self.run}"):
                return self._look()
        finally:
            self.rest = (time.process_time() - begun) / SHARE

    def _look(self) -> RunNow:
        flights = self._flights()
        lines = [line for line in self.log.poll() if line.keys() >= NEEDED]
        kept = max(
            (follower.header["kept"] for follower in self._followers.values() if follower.header),
            default=0.0,
        )
        if lines and lines[-1]["time"] < kept:  # of an earlier run
            lines = []
        state, what = self._state(flights, lines, kept)
        step = lines[-1]["step"] if lines else 0
        now = RunNow(
            str(self.run),
            state,
            what,
            step,
            lines[-1].get("steps") if lines else None,
            tuple(line["loss"] for line in lines[-200:]),
            None,
            None,
            (),
            (),
            None,
            (),
            None,
            False,
            time.time(),
        )
        if lines:
            newest = lines[-WINDOW:]
            now = replace(
                now,
                step_seconds=sum(line["seconds"] for line in newest) / len(newest),
                tokens_per_second=sum(line["tokens_per_second"] for line in newest) / len(newest),
            )
        links = [
            follower.header.get("link") for follower in self._followers.values() if follower.header
        ]
        records = self.steps.poll()
        # they may be of an earlier run
        return with_ranks(
            now,
            flights,
            {} if state == NOT_BEGUN else records,
            link=next(filter(None, links), "one host"),
        )

    def _flights(self) -> list[RankFlight]:
        """Return the newest records of the ranks of the newest generation."""
        home = self.run / "flight" if (self.run / "flight").is_dir() else self.run
        paths = sorted(home.glob("*.ring"))
        self._followers = {path: self._followers.get(path) or RingFollower(path) for path in paths}
        found = [
            (follower.header, follower.entries())
            for follower in self._followers.values()
            if follower.poll()
        ]
        return (
            flights_of([(header, entries) for header, entries in found if header is not None])
            if found
            else []
        )

    def _state(
        self, flights: list[RankFlight], lines: list[dict[str, Any]], kept: float
    ) -> tuple[str, str]:
        if (manifest := self._manifest(kept)) is not None:
            validation = loss_text(manifest["validation_loss"])
            return FINISHED, f"{len(manifest['losses'])} steps; validation loss {validation}"
        if not flights:
            return self._without_rings(lines)
        if all(flight.end is not None or flight.process == GONE for flight in flights):
            return self._over(flights, lines)
        if any(flight.process == STOPPED for flight in flights):
            return STOPPED_RUN, self._why(STOPPED_RUN, _steps_text(lines, flights))
        return self._alive(flights, lines)

    def _over(self, flights: list[RankFlight], lines: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the state of a run whose ranks have all ended without metrics.json."""
        if all(flight.end == "" for flight in flights):
            return (
                ENDED if lines else FINISHED,
                f"{_steps_text(lines, flights)}; every rank ended without an error",
            )
        return DIED, self._why(DIED, _steps_text(lines, flights))

    def _alive(self, flights: list[RankFlight], lines: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the state of a run in which some ranks still run."""
        told = _steps_text(lines, flights)
        usual = lines[-1]["seconds"] if lines else 0.0
        quiet = max(flight.seen for flight in flights) - max(flight.newest for flight in flights)
        if all(flight.process == UNKNOWN for flight in flights):
            return (
                RUNNING,
                f"{told}; the ranks are on other hosts, so a run that died shows as one that runs",
            )
        if quiet > max(STALL, 5 * usual):
            return STALLED, self._why(STALLED, f"nothing was recorded for {span(quiet)}")
        lost = [
            flight.rank
            for flight in flights
            if flight.end or (flight.end is None and flight.process == GONE)
        ]
        if lost:
            return RUNNING, f"{told}; {ranks_text(lost)} ended with an error"
        begun = lines or _newest_step(flights)
        return (
            (RUNNING, told)
            if begun
            else (NOT_BEGUN, "the ranks have met, and make their first step")
        )

    def _without_rings(self, lines: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the state of a run without flight recorders: it was stopped without an error, runs
        without recorders, or is about to begin."""
        folder = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY)
        try:
            process = lock_holder(folder)
        finally:
            os.close(folder)
        if process and lines:
            return (
                RUNNING,
                f"{_steps_text(lines)}; there are no flight recorders, so nothing is known of "
                "its ranks",
            )
        if process:
            return NOT_BEGUN, f"process {process} has the folder, and no rank has made a step"
        if lines:
            return (
                ENDED,
                f"{_steps_text(lines)}; it was told to stop while it went well (Ctrl-C, SIGTERM)",
            )
        raise ConfigError(
            f"{self.run}: nothing of a run is here; name a run folder of minidist train, or a "
            "folder of flight recorders"
        )

    def _manifest(self, kept: float) -> dict[str, Any] | None:
        """Return metrics.json; None if there is none, or if it is older than the newest run."""
        file = self.run / MANIFEST
        with suppress(OSError, ValueError):
            if os.lstat(file).st_mtime >= kept:
                found: dict[str, Any] = read_json(file, _EndedRun, member=True)
                return found
        return None

    def _why(self, state: str, otherwise: str) -> str:
        """Return the first finding of `minidist diagnose`, or `otherwise`. It reads whole rings, so
        in one state it runs at most every two seconds."""
        since, known, what = self._thorough
        if known != state or time.monotonic() - since > 2.0:
            found: Sequence[Any] = []
            with suppress(ConfigError):
                found = diagnose(
                    read_flights(self.run), read_rank_steps(self.run), stuck=STALL
                ).findings
            what = found[0].what if found else ""
            self._thorough = time.monotonic(), state, what
        return what or otherwise


def _newest_step(flights: Sequence[RankFlight]) -> int:
    """Return the newest step in the recorders."""
    steps = [
        entry["step"] for flight in flights for entry in flight.entries if entry["step"] is not None
    ]
    return max(steps, default=0)


def _steps_text(lines: list[dict[str, Any]], flights: Sequence[RankFlight] = ()) -> str:
    if not lines:
        return f"step {made}" if (made := _newest_step(flights)) else "the first step"
    return f"step {lines[-1]['step']}" + (
        f" of {lines[-1]['steps']}" if "steps" in lines[-1] else ""
    )
