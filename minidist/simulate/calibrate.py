"""Chapter 24 · The cost model's few constants, fitted to measured step times.

    runs = read_runs("runs.csv", "a100-80g")
    fitted = fit(runs, Predictor(), "a100-80g")
    fitted.profile.save("profile.json")             # for simulate and plan: --profile profile.json

Each constant begins at its default and is moved, by factors, to where the predicted step times come
closest to the measured ones: Gauss-Newton steps on the sum of

    (log predicted - log measured)² / 0.05²         over the runs: 5 % is what a step time is known
                                                    to
    (log constant - log default)²  / 0.5²           over the constants: a factor of 1.6 is not
                                                    unusual

so that a constant on which no run depends keeps its default. How well it fits is told by leaving
out each run in turn: the error of a run that the constants were not fitted to (from the last step's
derivatives, which is exact for a model that is linear between the two fits).

Source: Gauss-Newton and leave-one-out as in Björck 1996, Allen 1974 (PRESS).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import CostProfile, Rates
from minidist.simulate.runs import Run
from minidist.simulate.simulate import simulate
from minidist.simulate.trace import RankTrace

KNOWN_TO = 0.05  # relative standard deviation of a measured step time
USUAL = 0.5  # standard deviation of the log of a constant
STEPS = 6  # of Gauss and Newton, at most
ENOUGH = 1e-3  # change of every log at which no more steps are made
NUDGE = 0.05  # change of a log by which derivatives are taken
MOST = {"matmul_share": 1.0, "attention_share": 1.0, "memory_share": 1.0}

RATES = ("matmul_share", "half", "attention_share", "memory_share", "launch")
WIRES = ("inside.alpha", "inside.bandwidth", "between.alpha", "between.bandwidth")
CONSTANTS = (*RATES, *WIRES)
"""What is fitted: rates of the device (simulate/device.py), and the wires inside nodes and between
them."""
Predict = Callable[[Run, CostProfile], float]
"""Seconds of a run's step with a profile's constants."""


class CostFit(NamedTuple):
    """What a fit found; errors are predicted / measured - 1, one a run."""

    profile: CostProfile
    predicted: list[float]
    errors: list[float]
    left_out: list[float]  # of each run by constants that were fitted without it
    default: list[float]  # by the default constants

    def summary(self) -> dict[str, float]:
        """Return mean and worst absolute errors."""
        return {
            f"{name}_{kind}": float(reduce(np.abs(errors)))
            for name, errors in (
                ("fitted", self.errors),
                ("left_out", self.left_out),
                ("default", self.default),
            )
            for kind, reduce in (("mean", np.mean), ("worst", np.max))
        }


def fit(
    runs: Sequence[Run],
    predict: Predict,
    cluster: str,
    names: Sequence[str] = CONSTANTS,
    progress: Callable[[str], None] = lambda text: None,
) -> CostFit:
    """Fit the constants `names`. Raises: ConfigError for fewer than two runs, or a constant that
    there is not."""
    for name in names:
        if name not in CONSTANTS:
            raise ConfigError(
                f"no constant {name!r}{meant(name, CONSTANTS)}; there are {', '.join(CONSTANTS)}"
            )
    if len(runs) < 2:
        raise ConfigError(
            f"{len(runs)} measured steps are too few to fit and to check; give two or more, ten "
            "if possible"
        )
    start = _start(runs, names)
    measured = np.log([run.seconds for run in runs])
    logs = np.log(start)

    def predicted(at: np.ndarray, told: str) -> np.ndarray:
        progress(told)
        profile = _profile(cluster, runs[0].cluster, names, np.exp(at))
        return np.log([predict(run, profile) for run in runs])

    now = first = predicted(logs, "with the defaults")
    for step in range(1, STEPS + 1):
        slopes = np.stack(
            [
                (predicted(logs + NUDGE * unit, f"step {step}: {name}") - now) / NUDGE
                for name, unit in zip(names, np.eye(len(names)), strict=True)
            ],
            axis=1,
        )
        inner = slopes.T @ slopes / KNOWN_TO**2 + np.eye(len(names)) / USUAL**2
        pull = slopes.T @ (measured - now) / KNOWN_TO**2 - (logs - np.log(start)) / USUAL**2
        change = np.clip(np.linalg.solve(inner, pull), -1, 1)
        most = np.log([MOST.get(name, np.inf) for name in names])
        change = np.minimum(logs + change, most) - logs
        logs, now = logs + change, predicted(logs + change, f"step {step}")
        if np.abs(change).max() < ENOUGH:
            break
    leverage = np.einsum("ij,ji->i", slopes, np.linalg.solve(inner, slopes.T)) / KNOWN_TO**2
    left_out = np.expm1((now - measured) / np.maximum(1 - leverage, 1e-3))
    fitted = CostFit(
        _profile(cluster, runs[0].cluster, names, np.exp(logs)),
        np.exp(now).tolist(),
        np.expm1(now - measured).tolist(),
        left_out.tolist(),
        np.expm1(first - measured).tolist(),
    )
    return fitted._replace(
        profile=replace(fitted.profile, fit={"runs": len(runs), **fitted.summary()})
    )


def _start(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """Return the constants' defaults."""
    topology = runs[0].cluster.topology
    wires = {"inside": topology.inside, "between": topology.between or topology.inside}
    return np.array(
        [
            float(getattr(DEFAULT, name))
            if name in RATES
            else float(getattr(wires[name.split(".")[0]], name.split(".")[1]))
            for name in names
        ]
    )


def _profile(
    cluster: str, of: Cluster, names: Sequence[str], values: Sequence[float]
) -> CostProfile:
    """Return the profile of these constants."""
    topology = of.topology
    titles = {"inside": topology.inside.name, "between": (topology.between or topology.inside).name}
    rates = {}
    wires = dict[str, dict[str, float]]()
    for name, value in zip(names, map(float, values), strict=True):
        if name in RATES:
            rates[name] = value
        else:
            place, number = name.split(".")
            wires.setdefault(titles[place], {})[number] = value
    return CostProfile(cluster, replace(DEFAULT, **rates), wires)


# ---------------------------------------------------------------- predicted by the simulator


class Predictor:
    """Seconds of runs by the simulator. The ranks of a run are run once; then only the clock is
    turned again."""

    def __init__(self) -> None:
        self._ran: dict[tuple[Any, ...], RankTrace] = {}

    def __call__(self, run: Run, profile: CostProfile) -> float:
        cluster = profile.applied(run.cluster)
        return simulate(
            run.plan,
            run.config,
            cluster,
            batch=run.batch,
            rates=Rates.of(cluster.device, profile),
            traces=self._trace,
        ).step_seconds

    def _trace(self, plan: Plan, config: GPTConfig, rank: int, **options: Any) -> RankTrace:
        key = (plan, config, rank, *sorted(options.items()))
        if key not in self._ran:
            self._ran[key] = run_rank(plan, config, rank, **options)
        return self._ran[key]
