"""Chapter 24 · The cost model's few constants, fitted to measured step times.

    runs = read_runs("runs.csv", "a100-80g")
    fitted = fit(runs, FewPasses(), "a100-80g")
    fitted.profile.save("profile.json")             # for simulate and plan: --profile profile.json

Each constant begins at its default and is moved, by factors, to where the predicted step times come
closest to the measured ones: Gauss-Newton steps, shortened until they come closer, on the sum of

    (log predicted - log measured)² / 0.05²         over the runs: 5 % is what a step time is known
                                                    to
    (log constant - log default)²  / usual²         over the constants: how far each is from its
                                                    default on one machine or another (USUAL)

so that a constant on which no run depends keeps its default. `scores` and `logits`, whose defaults
are 0, are moved by bytes. Whether the host or the device is the slower one, and whether scores and
logits pass through memory, are questions of either-or, which no slope answers: the fit begins at
the best of several answers. How well it fits is told by leaving out each run in turn: the error of
a run that the constants were not fitted to (from the last step's derivatives, which is exact for a
model that is linear between the two fits). Two figures of these errors go into the profile, and
with it into every answer that is made by it (sure.py):

    spread    of ten runs left out, nine were measured within this factor of the prediction
    apart     of ten pairs of runs, nine differ as predicted within this factor: errors that both
              runs of a pair have do not count

Source: Gauss-Newton and leave-one-out as in Björck 1996, Allen 1974 (PRESS).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
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
from minidist.simulate.sure import sureness
from minidist.simulate.trace import RankTrace

KNOWN_TO = 0.05  # relative standard deviation of a measured step time
STEPS = 12  # of Gauss and Newton, at most
ENOUGH = 1e-3  # change of every log at which no more steps are made
LENGTHS = (1.0, 0.5, 0.25, 0.1)  # of a step, the first that comes closer
NUDGE = 0.05  # change of a log by which derivatives are taken
MOST = {"matmul_share": 1.0, "attention_share": 1.0, "memory_share": 1.0}
BYTES = {"scores": 8.0, "logits": 32.0}
"""Bytes of a score and of a logit by which the fit moves them, where it moves another constant by a
factor of e."""
USUAL = {
    "matmul_share": 0.15,
    "half": 0.7,
    "attention_share": 0.3,
    "scores": 1.0,
    "logits": 1.0,
    "memory_share": 0.2,
    "host": 1.0,
    "launch": 1.0,
    "inside.alpha": 0.5,
    "inside.bandwidth": 0.3,
    "between.alpha": 0.5,
    "between.bandwidth": 0.3,
}
"""Standard deviation of the log of each constant, of machines and frameworks; assumed."""
BEGINNINGS = [
    {"host": np.log(host), "scores": passes, "logits": passes}
    for host in (10e-6, 20e-6, 40e-6)
    for passes in (0.0, 1.0)
]
"""Where the fit may begin: seconds of the host a kernel, scores and logits that stay on the chip or
pass through memory."""

RATES = (
    *("matmul_share", "half", "attention_share", "scores", "logits", "memory_share"),
    *("host", "launch"),
)
WIRES = ("inside.alpha", "inside.bandwidth", "between.alpha", "between.bandwidth")
CONSTANTS = (*RATES, *WIRES)
"""The constants that a fit may change: rates of the device (simulate/device.py), and the wires
inside and between nodes."""
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
    sources: Sequence[str] = (),
) -> CostFit:
    """Fit the constants `names`.

    Args:    sources: of each run, where it is from; runs of one source are left out together
             (default: each run is left out by itself).
    Raises:  ConfigError for fewer than two runs, or a constant that there is not.
    """
    _check(runs, names)
    begin = _begin(runs, names)
    usual = np.array([USUAL[name] for name in names])
    measured = np.log([run.seconds for run in runs])

    def predicted(at: np.ndarray, told: str) -> np.ndarray:
        progress(told)
        profile = _profile(cluster, runs[0].cluster, names, at)
        return np.log([predict(run, profile) for run in runs])

    def off(at: np.ndarray, now: np.ndarray) -> float:
        """Return what the fit minimises."""
        return float(
            np.sum((now - measured) ** 2) / KNOWN_TO**2 + np.sum(((at - begin) / usual) ** 2)
        )

    at = begin
    now = first = predicted(at, "with the defaults")
    for there in _beginnings(begin, names):
        then = predicted(there, "where to begin")
        if off(there, then) < off(at, now):
            at, now = there, then
    for step in range(1, STEPS + 1):
        slopes = np.stack(
            [
                (predicted(at + NUDGE * unit, f"step {step}: {name}") - now) / NUDGE
                for name, unit in zip(names, np.eye(len(names)), strict=True)
            ],
            axis=1,
        )
        inner = slopes.T @ slopes / KNOWN_TO**2 + np.diag(usual**-2)
        pull = slopes.T @ (measured - now) / KNOWN_TO**2 - (at - begin) / usual**2
        change = np.clip(np.linalg.solve(inner, pull), -0.5, 0.5)
        best = off(at, now)
        for length in LENGTHS:
            there = np.clip(at + length * change, *_limits(names))
            then = predicted(there, f"step {step}")
            if off(there, then) < best:
                break
        else:
            break
        moved = np.abs(there - at).max()
        at, now = there, then
        if moved < ENOUGH:
            break
    leverage = slopes @ np.linalg.solve(inner, slopes.T) / KNOWN_TO**2
    left_out = _left_out(now - measured, leverage, sources or range(len(runs)))
    told = sureness(left_out.tolist(), [_job(run) for run in runs])
    fitted = CostFit(
        _profile(cluster, runs[0].cluster, names, at),
        np.exp(now).tolist(),
        np.expm1(now - measured).tolist(),
        np.expm1(left_out).tolist(),
        np.expm1(first - measured).tolist(),
    )
    about = {"runs": len(runs), **fitted.summary(), **told}
    return fitted._replace(profile=replace(fitted.profile, fit=about))


def _check(runs: Sequence[Run], names: Sequence[str]) -> None:
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


def _left_out(errors: np.ndarray, leverage: np.ndarray, sources: Sequence[Hashable]) -> np.ndarray:
    """Return the error of each run by constants that were fitted without its source.

    Args:    leverage: how much each run's prediction moves with each measurement.
    """
    found = np.zeros(len(errors))
    for source in dict.fromkeys(sources):
        mine = np.array([other == source for other in sources])
        others = np.eye(mine.sum()) - leverage[np.ix_(mine, mine)]
        found[mine] = np.linalg.solve(others, errors[mine])
    return found


def _job(run: Run) -> Hashable:
    """Return what a run computed on what, whatever its plan: its plans compete."""
    return run.config, run.batch, run.cluster.spec


def _begin(runs: Sequence[Run], names: Sequence[str]) -> np.ndarray:
    """Return where the defaults are: their logs; of `scores` and `logits` their bytes."""
    topology = runs[0].cluster.topology
    wires = {"inside": topology.inside, "between": topology.between or topology.inside}
    defaults = [
        float(getattr(DEFAULT, name))
        if name in RATES
        else float(getattr(wires[name.split(".")[0]], name.split(".")[1]))
        for name in names
    ]
    return np.array(
        [
            value / BYTES[name] if name in BYTES else np.log(value)
            for name, value in zip(names, defaults, strict=True)
        ]
    )


def _beginnings(begin: np.ndarray, names: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the places where the fit may begin, beside the defaults."""
    for given in BEGINNINGS:
        there = [given.get(name, value) for name, value in zip(names, begin, strict=True)]
        if there != begin.tolist():
            yield np.array(there)


def _limits(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the most of each constant, as the fit moves it."""
    least = [0.0 if name in BYTES else -np.inf for name in names]
    return np.array(least), np.log([MOST.get(name, np.inf) for name in names])


def _profile(cluster: str, of: Cluster, names: Sequence[str], at: np.ndarray) -> CostProfile:
    """Return the profile of the constants where the fit is."""
    topology = of.topology
    values = [
        value * BYTES[name] if name in BYTES else np.exp(value)
        for name, value in zip(names, at, strict=True)
    ]
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
    turned again. Args: traces: as simulate's."""

    def __init__(self, traces: Callable[..., RankTrace] = run_rank) -> None:
        self._traces = traces
        self._ran: dict[tuple[Any, ...], RankTrace] = {}

    def __call__(self, run: Run, profile: CostProfile) -> float:
        cluster = profile.applied(run.cluster)
        rates = Rates.of(cluster.device, profile)
        if run.scores or run.logits:
            own = rates.efficiency
            passing = replace(own, scores=own.scores + run.scores, logits=own.logits + run.logits)
            rates = replace(rates, efficiency=passing)
        return simulate(
            run.plan,
            run.config,
            cluster,
            batch=run.batch,
            rates=rates,
            float32_gradients=run.float32_gradients,
            traces=self._trace,
        ).step_seconds

    def _trace(self, plan: Plan, config: GPTConfig, rank: int, **options: Any) -> RankTrace:
        key = (plan, config, rank, *sorted(options.items()))
        if key not in self._ran:
            self._ran[key] = self._traces(plan, config, rank, **options)
        return self._ran[key]
