"""Reads the contents of a run folder for the report. Any part may be missing: the run died, or did
not write it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from minidist.errors import ConfigError
from minidist.observe.diagnose.flights import RankFlight, read_flights
from minidist.observe.rank_steps import FOLDER, RankSteps, read_rank_steps
from minidist.observe.read_trace import read_trace
from minidist.observe.step_log import STEP_LOG, read_step_log
from minidist.observe.timeline import Timeline
from minidist.reading import Count, Finite, Rank, Seconds, read_json

METRICS = "metrics.json"
TRACE = "trace.json"
FLIGHT = "flight"
STEPS = f"{FOLDER}/"
Sums = dict[str, Finite]  # by axis, or by verb


class _HeldBytes(msgspec.Struct):
    now: Count
    peak: Count


class _RankFigures(msgspec.Struct):
    rank: Rank
    sent_bytes: dict[str, Sums]
    messages: dict[str, Sums]
    memory: dict[str, _HeldBytes]
    host: str = ""
    sent_to: dict[str, Sums] = {}


class _TrafficFormula(msgspec.Struct):
    sent_bytes: Finite | None = None
    messages: Finite | None = None
    buckets: Count | None = None
    axes: Sums = {}
    plain: Sums = {}
    held: Count = 0
    held_experts: Count = 0
    by_rank: list[tuple[Finite, Finite]] = []


class _PlanFigures(msgspec.Struct):
    compress: str
    strategy: str
    zero: Count
    precision: str
    offload: str
    dp: Rank
    ep: Rank
    cp: Rank
    local_steps: Count | None = None
    shard: Count | None = None


class _MachineFigures(msgspec.Struct):
    command: str = ""
    versions: dict[str, str] = {}


class _Change(msgspec.Struct):
    line: str


class _Adapt(msgspec.Struct):
    changes: list[_Change] = []
    questions: Count = 0


class _MetricsFile(msgspec.Struct):
    """The fields of metrics.json: required ones, which are written first, and optional ones with
    defaults."""

    losses: list[float]
    validation_loss: float | None
    size: Rank
    transport: str
    parameters: Count
    step_seconds: float
    tokens_per_second: float
    steps: Count
    plan: _PlanFigures
    config: dict[str, Any]
    formula: _TrafficFormula = msgspec.field(default_factory=_TrafficFormula)
    ranks: list[_RankFigures] = []
    device: str = ""
    parameter_bytes: Count = 0
    optimizer_moments: Count = 0
    skipped_steps: Count = 0
    resumed_from: Seconds | None = None
    adapt: _Adapt = msgspec.field(default_factory=_Adapt)
    versions: dict[str, str] = {}
    machine: _MachineFigures = msgspec.field(default_factory=_MachineFigures)
    options: dict[str, Any] = {}


@dataclass
class RunFiles:
    """The contents of a run folder.

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
        """Return one line: a part of the report is missing because of a file, and how to get it."""
        return f"No {what}: {self.missing.get(file, f'{file} does not have it')}; {remedy}."

    @property
    def ranks(self) -> int:
        """Number of ranks of the run, as far as the folder shows it."""
        sizes = [flight.size for flight in self.flights] + [
            each.size for each in self.records.values()
        ]
        return int(self.metrics.get("size", 0)) or len(self.timelines) or max(sizes, default=0)

    @property
    def of_two_runs(self) -> bool:
        """True if metrics.jsonl and metrics.json are of different runs: their last steps or losses
        differ."""
        losses = self.metrics.get("losses", [])
        last = self.steps[-1] if self.steps else {}
        if not losses or last.get("loss") is None:
            return False
        return bool(last["step"] != len(losses) or last["loss"] != losses[-1])

    @property
    def step_seconds(self) -> float:
        """Median seconds of all steps; metrics.json has only the steps of the newest job."""
        if not self.steps or self.of_two_runs:
            return float(self.metrics["step_seconds"])
        return float(median(line["seconds"] for line in self.steps))


def read_run(folder: str | Path) -> RunFiles:
    """Read a run folder. Raises: ConfigError, one line, if it is none."""
    run = RunFiles(Path(folder))
    if not run.folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name a run folder of minidist train")
    if not any((run.folder / name).exists() for name in (METRICS, STEP_LOG, TRACE, FLIGHT, STEPS)):
        raise ConfigError(
            f"{folder} is no run folder: it has none of {METRICS}, {STEP_LOG}, {TRACE}, "
            f"{FLIGHT}/ and {STEPS}; minidist train --out DIR makes one"
        )
    _try(run, METRICS, lambda path: run.metrics.update(_metrics(path)))
    _try(
        run,
        STEP_LOG,
        lambda path: run.steps.extend(line for line in read_step_log(path) if "seconds" in line),
    )
    _try(run, TRACE, lambda path: run.timelines.extend(read_trace(path)))
    _try(run, FLIGHT, lambda path: run.flights.extend(read_flights(path)))
    _try(run, STEPS, lambda path: run.records.update(read_rank_steps(path)))
    return run


def _metrics(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path, _MetricsFile, member=True)
    except ConfigError as error:
        raise ConfigError(f"it is not of minidist train: {error}") from error
    return found


def _try(run: RunFiles, name: str, read: Any) -> None:
    """Read a part; if that fails, note the reason in run.missing."""
    path = run.folder / name
    try:
        if not os.path.lexists(path):
            run.missing[name] = f"{name} is not in the run folder"
            return
        read(path)
    except (OSError, ConfigError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        run.missing[name] = f"{name} cannot be read ({told})"
