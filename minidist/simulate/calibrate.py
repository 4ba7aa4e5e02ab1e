"""Chapter 24 · The cost model's few constants, fitted to step times that somebody measured.

    runs = read_runs("runs.csv", "a100-80g")
    fitted = fit(runs, predictor(runs), "a100-80g")
    fitted.profile.save("profile.json")             # for simulate and plan: --profile profile.json

Each constant begins at its default and is moved, by factors, to where the predicted step times come closest to the
measured ones: Gauss-Newton steps on the sum of

    (log predicted - log measured)² / 0.05²         over the runs: 5 % is what a step time is known to
    (log constant - log default)²  / 0.5²           over the constants: a factor of 1.6 is not unusual

so that a constant on which no run depends keeps its default. How well it fits is told by leaving out each run in turn:
the error of a run that the constants were not fitted to (from the last step's derivatives, which is exact for a model
that is linear between the two fits).

Source: Gauss-Newton and leave-one-out as in Björck 1996, Allen 1974 (PRESS).
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT
from minidist.simulate.rates import CostProfile

KNOWN_TO = 0.05                 # relative standard deviation of a measured step time
USUAL = 0.5                     # standard deviation of the log of a constant
STEPS = 6                       # of Gauss and Newton, at most
ENOUGH = 1e-3                   # change of every log at which no more steps are made
NUDGE = 0.05                    # change of a log by which derivatives are taken
MOST = {"matmul_share": 1.0, "attention_share": 1.0, "memory_share": 1.0}

RATES = ("matmul_share", "half", "attention_share", "memory_share", "launch")
WIRES = ("inside.alpha", "inside.bandwidth", "between.alpha", "between.bandwidth")
CONSTANTS = (*RATES, *WIRES)
"""What is fitted: rates of the device (simulate/device.py), and the wires inside nodes and between them."""

SIZES = {"layers": 0, "width": 0, "heads": 0, "sequence": 0, "vocab": 0}
COLUMNS = {
    "seconds": "of a step, measured", "devices": "nodes x devices, as 8x8, or devices", "batch": "sequences a step",
    "model": "a name that simulate knows; or the columns layers, width, heads, sequence, vocab",
    "plan": "as dp=8,tp=8 (dp over all devices)", "zero": "0 to 3", "schedule": "as simulate takes it",
    "microbatches": "of a pipeline, each data rank", "accumulate": "passes a step", "precision": "fp32, fp16, bf16",
    "checkpoint": "1 where blocks are computed again", "sequence": "tokens of a sequence",
}
"""The columns of a file of runs; seconds, devices, batch and a model are needed."""


class Run(NamedTuple):
    """A step that was measured."""

    label: str
    plan: Plan
    config: GPTConfig
    batch: int
    cluster: Cluster
    seconds: float


Predict = Callable[[Run, CostProfile], float]
"""Seconds of a run's step with a profile's constants."""


class Fitted(NamedTuple):
    """What a fit found; errors are predicted / measured - 1, one a run."""

    profile: CostProfile
    predicted: list[float]
    errors: list[float]
    left_out: list[float]       # of each run by constants that were fitted without it
    default: list[float]        # by the default constants

    def summary(self) -> dict[str, float]:
        """Mean and worst absolute errors."""
        return {f"{name}_{kind}": float(reduce(np.abs(errors)))
                for name, errors in (("fitted", self.errors), ("left_out", self.left_out), ("default", self.default))
                for kind, reduce in (("mean", np.mean), ("worst", np.max))}


def fit(runs: Sequence[Run], predict: Predict, cluster: str, names: Sequence[str] = CONSTANTS,
        progress: Callable[[str], None] = lambda text: None) -> Fitted:
    """Fit the constants `names`. Raises: ConfigError for fewer than two runs, or a constant that there is not."""
    for name in names:
        if name not in CONSTANTS:
            raise ConfigError(f"no constant {name!r}{meant(name, CONSTANTS)}; there are {', '.join(CONSTANTS)}")
    if len(runs) < 2:
        raise ConfigError(f"{len(runs)} measured steps cannot be fitted and tried; give two or more, better ten")
    start, measured = _start(runs, names), np.log([run.seconds for run in runs])
    logs = np.log(start)

    def predicted(at: np.ndarray, told: str) -> np.ndarray:
        progress(told)
        profile = _profile(cluster, runs[0].cluster, names, np.exp(at))
        return np.log([predict(run, profile) for run in runs])

    now = first = predicted(logs, "with the defaults")
    for step in range(1, STEPS + 1):
        slopes = np.stack([(predicted(logs + NUDGE * unit, f"step {step}: {name}") - now) / NUDGE
                           for name, unit in zip(names, np.eye(len(names)), strict=True)], axis=1)
        inner = slopes.T @ slopes / KNOWN_TO ** 2 + np.eye(len(names)) / USUAL ** 2
        pull = slopes.T @ (measured - now) / KNOWN_TO ** 2 - (logs - np.log(start)) / USUAL ** 2
        change = np.clip(np.linalg.solve(inner, pull), -1, 1)
        most = np.log([MOST.get(name, np.inf) for name in names])
        change = np.minimum(logs + change, most) - logs
        logs, now = logs + change, predicted(logs + change, f"step {step}")
        if np.abs(change).max() < ENOUGH:
            break
    leverage = np.einsum("ij,ji->i", slopes, np.linalg.solve(inner, slopes.T)) / KNOWN_TO ** 2
    left_out = np.expm1((now - measured) / np.maximum(1 - leverage, 1e-3))
    fitted = Fitted(_profile(cluster, runs[0].cluster, names, np.exp(logs)), np.exp(now).tolist(),
                    np.expm1(now - measured).tolist(), left_out.tolist(), np.expm1(first - measured).tolist())
    return fitted._replace(profile=replace(fitted.profile, fit={"runs": len(runs), **fitted.summary()}))


def _start(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """The constants' defaults."""
    topology = runs[0].cluster.topology
    wires = {"inside": topology.inside, "between": topology.between or topology.inside}
    return np.array([float(getattr(DEFAULT, name)) if name in RATES else
                     float(getattr(wires[name.split(".")[0]], name.split(".")[1])) for name in names])


def _profile(cluster: str, of: Cluster, names: Sequence[str], values: Sequence[float]) -> CostProfile:
    """The profile of these constants."""
    topology = of.topology
    titles = {"inside": topology.inside.name, "between": (topology.between or topology.inside).name}
    rates, wires = {}, dict[str, dict[str, float]]()
    for name, value in zip(names, map(float, values), strict=True):
        if name in RATES:
            rates[name] = value
        else:
            place, number = name.split(".")
            wires.setdefault(titles[place], {})[number] = value
    return CostProfile(cluster, replace(DEFAULT, **rates), wires)


# ---------------------------------------------------------------- the file of runs


def read_runs(path: str | Path, cluster: str, model: Callable[[str], GPTConfig] | None = None) -> list[Run]:
    """The runs of a CSV file with the columns COLUMNS; lines that begin with # are left out.

    Args:    cluster: "h100", or "FILE:NAME"; each run says how many devices. model: the config of a name.
    Raises:  ConfigError with the line and what is wrong there.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip() and line.lstrip()[0] != "#"]
    except OSError as error:
        raise ConfigError(f"runs {path}: {error.strerror}") from error
    table = csv.DictReader(line for _, line in lines)
    unknown = [name for name in table.fieldnames or () if name not in {**COLUMNS, **SIZES}]
    if unknown:
        raise ConfigError(f"runs {path}: no column {unknown[0]!r}{meant(unknown[0], {**COLUMNS, **SIZES})}; columns are "
                          f"{', '.join({**COLUMNS, **SIZES})}")
    runs = []
    for (number, _), row in zip(lines[1:], table, strict=False):
        try:
            runs.append(_run({name: text.strip() for name, text in row.items() if text and text.strip()}, cluster, model))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"runs {path}, line {number}: {error}") from error
    return runs


def _run(row: Mapping[str, str], cluster: str, model: Callable[[str], GPTConfig] | None) -> Run:
    lacking = [name for name in ("seconds", "devices", "batch") if name not in row]
    if lacking or not ("model" in row or "layers" in row):
        raise ConfigError(f"it lacks {', '.join(lacking) or 'model, or layers, width and heads'}")
    machine = Cluster.parse(f"{cluster}:{row['devices']}")
    plan = Plan.parse(row["plan"]) if "plan" in row else Plan(dp=machine.size)
    options: dict[str, Any] = {name: int(row[name]) for name in ("zero", "microbatches", "accumulate") if name in row}
    options |= {name: row[name] for name in ("schedule", "precision") if name in row}
    if row.get("checkpoint", "0") not in ("0", "no", "false"):
        options["checkpoint_blocks"] = True
    seconds = float(row["seconds"])
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds={row['seconds']}: a step takes more than 0")
    label = f"{row.get('model', '{layers} x {width}'.format_map(_Blank(row)))} {row.get('plan', f'dp={machine.size}')}"
    return Run(label, replace(plan, **options), _config(row, model), int(row["batch"]), machine, seconds)


def _config(row: Mapping[str, str], model: Callable[[str], GPTConfig] | None) -> GPTConfig:
    names = {"layers": "layers", "width": "width", "heads": "heads", "sequence": "context", "vocab": "vocabulary"}
    given = {names[name]: int(row[name]) for name in SIZES if name in row}
    if "model" not in row:
        return GPTConfig(**given)       # type: ignore[arg-type]
    if model is None:
        raise ConfigError(f"no model {row['model']!r} is known here; give layers, width, heads, sequence and vocab")
    return replace(model(row["model"]), **given)    # type: ignore[arg-type]


class _Blank(dict[str, str]):
    """Words of a row; "?" for what it does not say."""

    def __missing__(self, name: str) -> str:
        return "?"


# ---------------------------------------------------------------- predicted by the simulator


@dataclass
class Predictor:
    """Seconds of runs by the simulator. A run's ranks run once; then only the clock is turned again."""

    def __post_init__(self) -> None:
        self._traces: dict[Run, Any] = {}
