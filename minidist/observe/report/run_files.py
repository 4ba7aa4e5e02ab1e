"""What a run folder holds, read for the report. Any part may be missing: the run died, or was made without it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from minidist.errors import ConfigError
from minidist.observe.diagnose.flights import RankFlight, read_flights
from minidist.observe.rank_steps import FOLDER, RankSteps, read_rank_steps
from minidist.observe.read_trace import read_trace
from minidist.observe.step_log import STEP_LOG, read_step_log
from minidist.observe.timeline import Timeline

METRICS, TRACE, FLIGHT, STEPS = "metrics.json", "trace.json", "flight", f"{FOLDER}/"
NEEDED = ("losses", "validation_loss", "size", "transport", "parameters", "step_seconds", "tokens_per_second", "steps",
          "plan", "formula", "ranks", "config")
"""What metrics.json of every run has."""


@dataclass
class RunFiles:
    """A run folder.

    Attributes: metrics    metrics.json; {} if it is missing
                steps      the lines of metrics.jsonl
                timelines  of trace.json, by rank
                flights    the ranks' flight recorders
                records    the ranks' records of their steps, by rank
                missing    {file: why it could not be read, one line}
    """

    folder: Path
    metrics: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    flights: list[RankFlight] = field(default_factory=list)
    records: dict[int, RankSteps] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def lacks(self, file: str, what: str, remedy: str) -> str:
        """One line: a part of the report is missing because of a file, and how to get it."""
        return f"No {what}: {self.missing.get(file, f'{file} does not have it')}; {remedy}."

    @property
    def ranks(self) -> int:
        """How many ranks the run had, as far as the folder tells."""
        sizes = [flight.size for flight in self.flights] + [each.size for each in self.records.values()]
        return int(self.metrics.get("size", 0)) or len(self.timelines) or max(sizes, default=0)


def read_run(folder: str | Path) -> RunFiles:
    """Read a run folder. Raises: ConfigError, one line, if it is none."""
    run = RunFiles(Path(folder))
    if not run.folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name a run folder of minidist train")
    if not any((run.folder / name).exists() for name in (METRICS, STEP_LOG, TRACE, FLIGHT, STEPS)):
        raise ConfigError(f"{folder} is no run folder: it has none of {METRICS}, {STEP_LOG}, {TRACE}, {FLIGHT}/ and "
                          f"{STEPS}; minidist train --out DIR makes one")
    _try(run, METRICS, lambda path: run.metrics.update(_metrics(path)))
    _try(run, STEP_LOG, lambda path: run.steps.extend(line for line in read_step_log(path) if "seconds" in line))
    _try(run, TRACE, lambda path: run.timelines.extend(read_trace(path)))
    _try(run, FLIGHT, lambda path: run.flights.extend(read_flights(path)))
    _try(run, STEPS, lambda path: run.records.update(read_rank_steps(path)))
    return run


def _metrics(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    lacking = [name for name in NEEDED if not isinstance(found, dict) or name not in found]
    if lacking:
        raise ConfigError(f"it is not of minidist train: it has no {lacking[0]}")
    return cast(dict[str, Any], found)


def _try(run: RunFiles, name: str, read: Any) -> None:
    """Read a part; if that fails, note why."""
    path = run.folder / name
    try:
        if not path.exists():
            run.missing[name] = f"{name} is not in the run folder"
            return
        read(path)
    except (OSError, ConfigError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        run.missing[name] = f"{name} cannot be read ({told})"
