"""The flight recorders of a job, read together: one RankFlight per rank, all times on one clock.

Records of one host share its monotonic clock. Records of several hosts are compared by each host's
time of day.
"""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.comm.flight.dumps import read_dump
from minidist.comm.flight.slots import END, Entry, newest_time, read_ring
from minidist.comm.health.process_state import has_ended, state_of
from minidist.errors import ConfigError

RUNS = "runs"
STOPPED = "is stopped"
GONE = "is gone"
UNKNOWN = "unknown"
DUMPED = "ran when it dumped"


@dataclass(frozen=True)
class RankFlight:
    """The flight recorder of one rank, and the state of its process.

    Attributes: entries  the records, oldest first; times are times of day
                groups   {group: (axis, world ranks)} of the groups that the rank has used
                process  RUNS, STOPPED or GONE, by this host's system; UNKNOWN for another host;
                         DUMPED if there is only a dump and the process is not stopped: its state
                         after the dump is not known
                seen     the time of day of this view of the rank
                whole    whether no record has been overwritten in the ring
    """

    rank: int
    host: str
    pid: int
    size: int
    groups: dict[int, tuple[str, list[int]]]
    entries: list[Entry]
    process: str
    seen: float

    @property
    def whole(self) -> bool:
        return not self.entries or self.entries[0]["number"] == 1

    @property
    def end(self) -> str | None:
        """Error with which the rank ended; "" if it ended well; None if it has recorded no end."""
        return next((str(entry["why"]) for entry in self.entries if entry["kind"] == END), None)

    def of_kind(self, *kinds: str) -> list[Entry]:
        """Return the records of these kinds."""
        return [entry for entry in self.entries if entry["kind"] in kinds]

    @property
    def newest(self) -> float:
        """Time of day of the last record."""
        return max(
            (max(entry["made"], entry["begun"], entry["ended"]) for entry in self.entries),
            default=0.0,
        )


def read_flights(place: str | Path) -> list[RankFlight]:
    """Return the flight recorders of a run folder, or of a folder of rings or dumps, by rank.

    Raises:  ConfigError, one line, if there are none.
    """
    folder = Path(place)
    if (folder / "flight").is_dir():
        folder = folder / "flight"
    if not folder.is_dir():
        raise ConfigError(
            f"{place}: there is no such folder; name a run folder of minidist train, or one of "
            "flight recorders"
        )
    found = [read_ring(path, member=True) for path in sorted(folder.glob("*.ring"))]
    known = {header["rank"] for header, _ in found}
    for path in sorted(folder.glob("*.json")):
        if path.with_suffix(".ring").exists() or path.name == "metrics.json":
            continue
        header, entries = read_dump(path, member=True)
        if header["rank"] not in known:
            found.append((header, entries))
    if not found:
        raise ConfigError(
            f"{place}: no flight recorder is here; minidist train writes some to RUN/flight, and "
            "minidist launch --flight DIR to DIR"
        )
    return flights_of(found)


def read_flight_files(files: Sequence[str | Path]) -> list[RankFlight]:
    """Return the flight recorders in these files, rings (`.ring`) or dumps, by rank.

    Raises:  ConfigError, one line.
    """
    return flights_of(
        [
            read_ring(Path(file)) if Path(file).suffix == ".ring" else read_dump(file)
            for file in files
        ]
    )


def flights_of(found: Sequence[tuple[dict[str, Any], list[Entry]]]) -> list[RankFlight]:
    """Return the flights of pairs (header, entries); only those of the job's newest generation."""
    newest = max((header for header, _ in found), key=lambda header: header["kept"])
    found = [pair for pair in found if pair[0]["size"] == newest["size"] or not newest["size"]]
    clocks: dict[str, float] = {}
    for header, _ in found:
        clocks.setdefault(header["host"], header["clock"])
    over = max(newest_time(header, entries) for header, entries in found)
    flights = [_flight(header, entries, clocks[header["host"]], over) for header, entries in found]
    return sorted(flights, key=lambda flight: flight.rank)


def _flight(header: dict[str, Any], entries: list[Entry], clock: float, over: float) -> RankFlight:
    process = _process(header)
    seen = header.get("dumped") or (time.time() if process in (RUNS, STOPPED) else over)
    dated = [
        {
            **entry,
            **{name: entry[name] and entry[name] + clock for name in ("made", "begun", "ended")},
        }
        for entry in entries
    ]
    groups = {group: (axis, [*ranks]) for group, (axis, ranks) in header["groups"].items()}
    return RankFlight(
        header["rank"], header["host"], header["pid"], header["size"], groups, dated, process, seen
    )


def _process(header: dict[str, Any]) -> str:
    if header["host"] != platform.node():
        return DUMPED if header.get("dumped") else UNKNOWN
    stopped = state_of(header["pid"]) in ("T", "t")
    if header.get("dumped"):
        return STOPPED if stopped else DUMPED
    if has_ended(header["pid"]):
        return GONE
    return STOPPED if stopped else RUNS
