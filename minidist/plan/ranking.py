"""Chapter 24 · The best plan: enumerate, estimate, rank, and let the replay confirm the best few.

1  candidates.py   every plan as a row of numbers; Estimator.may_fit drops plans whose state is too
                   large
2  estimate.py     seconds and memory of all rows, by formulas: kernels and waits of a layer are
                   from cells.py, seconds of calls from layouts.py, both as columns from
                   call_columns.py
3  plan_for        plans that fit, sorted
4  _confirmed      the replay (md.simulate) runs the best few: their times take the place of the
                   estimates, and a plan that does not fit there loses its place

    found = plan_for(config, "a100-80g:64x8", batch=1536, confirm=None)
    found.best.plan, found.best.order, found.best.step_seconds
    found.top(10)                                   # Choices, the best first
    print(command(found.best, ["--model", "gpt3-175b"], found))

notes: N2 §10.1, §12.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf
from typing import Any

import numpy as np

from minidist.errors import ConfigError, PlanError
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.plan_checks import AXES, words
from minidist.plan.candidates import candidates
from minidist.plan.estimate import TERMS, Estimates, Estimator
from minidist.progress import SILENT, Progress
from minidist.simulate.cluster import Cluster
from minidist.simulate.model_flops import PRODUCT_DTYPES, flops_a_token
from minidist.simulate.rates import Rates
from minidist.simulate.results import Simulation
from minidist.simulate.simulate import simulate

OBJECTIVES = ("time", "cost", "energy", "memory")
MOST_TRIED = 3  # plans that the replay runs at most, per plan to confirm
MOST_CONFIRMED = 3  # plans that confirm=None confirms, or more if estimates were too good
AFFORDABLE = 20.0  # seconds of replays (replay_seconds) that confirm=None spends at most
MOST_DOUBLED = 8  # times that the nodes are doubled in search of a cluster that is large enough


@dataclass(frozen=True)
class Choice:
    """A plan of the ranking. Attributes: seconds: of a step by TERMS; memory: bytes by category
    on the fullest rank; confirmed: the replay's result, if it ran this plan.
    """

    plan: Plan
    order: tuple[str, ...]
    seconds: dict[str, float]
    memory: dict[str, float]
    dollars: float | None
    joules: float | None
    confirmed: Simulation | None = None

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step."""
        return fsum(self.seconds.values())

    @property
    def total(self) -> float:
        """Estimated bytes of the fullest rank at its peak."""
        return fsum(self.memory.values())

    @property
    def known_seconds(self) -> float:
        """Seconds of a step: by the replay if it ran this plan, else estimated."""
        return self.confirmed.step_seconds if self.confirmed else self.step_seconds

    @property
    def known_total(self) -> float:
        """Bytes of the fullest rank at its peak: by the replay if it ran this plan, else
        estimated."""
        found = self.confirmed
        return float(found.peak(found.fullest)["total"]) if found else self.total

    @property
    def fits(self) -> bool:
        """True unless the replay found that the plan does not fit into memory."""
        return self.confirmed is None or self.confirmed.fits

    @property
    def known_by(self) -> str:
        """Return the source of known_seconds and known_total: "replayed" or "estimated"."""
        return "replayed" if self.confirmed else "estimated"

    @property
    def text(self) -> str:
        """The plan in a few words."""
        plan = self.plan
        told = [words(plan.axes)] + [f"ZeRO-{plan.zero}"] * (plan.zero > 0)
        told += [f"a copy on {plan.shard} ranks"] * (plan.shard is not None)
        told += [f"{plan.schedule}, {plan.pieces} microbatches"] * (plan.pp > 1)
        told += [f"{plan.accumulate} passes"] * (plan.accumulate > 1) + [
            "sequence parallel"
        ] * plan.sequence_parallel
        told += ["recompute"] * (plan.checkpoint_blocks == "all") + ["offload"] * (
            plan.offload != "none"
        )
        inner = [axis for axis in self.order if plan.axes[axis] > 1]
        usual = [axis for axis in AXES if plan.axes[axis] > 1]
        return ", ".join(told + [f"order {','.join(inner)}"] * (inner != usual))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "plan": self.plan.as_dict(),
            "order": list(self.order),
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "memory": self.memory,
            "dollars": self.dollars,
            "joules": self.joules,
            "confirmed_seconds": self.confirmed and self.confirmed.step_seconds,
            "confirmed_bytes": self.confirmed and self.known_total,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Ranking:
    """All plans that fit, the best first.

    Attributes: order: numbers of candidates; enumerated: number of plans before pruning; confirmed:
                plans that the replay ran, the best first; refused: plans that do not fit there, and
                so lost their places; mixed: plans that the replay ran stand among the others by
                known figures, else before them. float32_gradients: as plan_for's.
    """

    config: GPTConfig
    cluster: Cluster
    batch: int
    objective: str
    estimates: Estimates
    order: np.ndarray
    enumerated: int
    confirmed: tuple[Choice, ...] = ()
    refused: tuple[Choice, ...] = ()
    mixed: bool = False
    float32_gradients: bool = False

    def __len__(self) -> int:
        return len(self.order)

    def choice(self, place: int) -> Choice:
        """Return the plan at a place of the ranking, from 0."""
        number = int(self.order[place])
        found = self.estimates
        return Choice(
            found.candidates.plan(number),
            found.candidates.order(number),
            {term: float(found.seconds[term][number]) for term in TERMS},
            {name: float(held[number]) for name, held in found.memory.items()},
            None if found.dollars is None else float(found.dollars[number]),
            None if found.joules is None else float(found.joules[number]),
        )

    def top(self, count: int) -> list[Choice]:
        """Return the best plans; if not `mixed`, first the plans that the replay ran."""
        ran = {(choice.plan, choice.order) for choice in self.confirmed}
        others = [
            choice
            for choice in map(self.choice, range(min(count + len(ran), len(self))))
            if (choice.plan, choice.order) not in ran
        ]
        found = [*self.confirmed, *others]
        if self.mixed:
            found.sort(key=lambda choice: _figure(choice, self.objective))
        return found[:count]

    @cached_property
    def best(self) -> Choice:
        """The best plan: top(1)."""
        return self.top(1)[0]

    @cached_property
    def runner_up(self) -> Choice | None:
        """The next plan of the ranking with other axes or another ZeRO stage than the best."""
        best = self.best
        for place in range(len(self)):
            choice = self.choice(place)
            if choice.plan.axes != best.plan.axes or choice.plan.zero != best.plan.zero:
                return choice
        return None

    def tied(self, choice: Choice) -> bool:
        """Return True if it is not known whether the best plan is faster than this one."""
        return not self.estimates.sure.tells(self.best.known_seconds, choice.known_seconds)

    def mfu(self, choice: Choice) -> float:
        """Return the model FLOPs utilisation of a plan, counted as in results.py."""
        peak = self.cluster.device.peak(PRODUCT_DTYPES[choice.plan.precision])
        tokens = self.batch * self.config.context
        return (
            tokens * flops_a_token(self.config) / (choice.known_seconds * choice.plan.size * peak)
        )


def plan_for(
    config: GPTConfig,
    cluster: Cluster | str,
    *,
    batch: int,
    objective: str = "time",
    precision: str = "bf16",
    optimizer: str = "adamw",
    rates: Rates | None = None,
    float32_gradients: bool = False,
    confirm: int | None = 0,
    show: Progress = SILENT,
) -> Ranking:
    """Rank all plans of a model on a cluster, by formulas (estimate.py).

    Args:    config: the model. cluster: a Cluster or its text, "h100:128x8". batch: sequences per
             step of the whole job, each of config.context tokens. objective: the figure to
             minimise, one of OBJECTIVES.
             precision: of all plans, as Plan's. optimizer: as Trainer's.
             rates: seconds of kernels (default: of the cluster's device). float32_gradients: as
             simulate's. confirm: number of the
             best plans that the replay (md.simulate) runs too, and places first; None:
             MOST_CONFIRMED, and more until no estimate is better than the best of them, as long as
             their replays take less than about AFFORDABLE seconds; all are ranked by what is known.
             show: of the plans that are replayed.
    Returns: a Ranking of the plans that fit into memory.
    Raises:  ConfigError, one line: an unknown cluster, a batch that does not divide, or a model
             that fits nowhere, with the nearest that works.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    options = {
        "rates": rates,
        "precision": precision,
        "optimizer": optimizer,
        "float32_gradients": float32_gradients,
    }
    enumerated, estimates = _estimated(config, cluster, batch, options)
    if not estimates.fits.any():
        raise ConfigError(_nowhere(config, cluster, batch, options))
    fits = np.flatnonzero(estimates.fits)
    order = fits[np.lexsort((estimates.step_seconds[fits], _wanted(estimates, objective)[fits]))]
    ranking = Ranking(
        config,
        cluster,
        batch,
        objective,
        estimates,
        order,
        enumerated,
        float32_gradients=float32_gradients,
    )
    return ranking if confirm == 0 else _confirmed(ranking, confirm, rates, optimizer, show)


def _wanted(found: Estimates, objective: str) -> np.ndarray:
    columns = {
        "time": found.step_seconds,
        "memory": found.total,
        "cost": found.dollars,
        "energy": found.joules,
    }
    column = columns[objective]
    if column is None:
        raise ConfigError(
            f"objective={objective}: no {'price' if objective == 'cost' else 'watts'} of "
            f"{found.cluster.device.name} stands in the cluster's file; add it, or use "
            "objective=time"
        )
    return column


def _nowhere(config: GPTConfig, cluster: Cluster, batch: int, options: dict[str, Any]) -> str:
    """Return one line that names the smallest cluster on which some plan fits, found by doubling
    the nodes."""
    told = (
        f"the model ({config.numbers / 1e9:,.3g} billion weights) fits into "
        f"{cluster.spec} with no plan"
    )
    if cluster.topology.torus or cluster.topology.between is None:
        return f"{told}; choose fewer layers, or a larger cluster"
    for nodes in (cluster.nodes << doubled for doubled in range(1, MOST_DOUBLED + 1)):
        larger = replace(cluster, nodes=nodes, spec=f"{cluster.name}:{nodes}x{cluster.per_node}")
        for rows in dict.fromkeys((batch, larger.size)):
            try:
                fits = _estimated(config, larger, rows, options)[1].fits.any()
            except ConfigError:
                continue
            if fits:
                return (
                    f"{told}; choose "
                    f"{larger.spec}{f' with a batch of {rows}' * (rows != batch)}, or "
                    "fewer layers"
                )
    return f"{told}, nor into {cluster.nodes << MOST_DOUBLED} nodes; choose fewer layers"


def _estimated(
    config: GPTConfig, cluster: Cluster, batch: int, options: dict[str, Any]
) -> tuple[int, Estimates]:
    """Return the number of plans, and the estimates of the plans whose state fits."""
    model = Estimator(config, cluster, **options)
    found = candidates(config, cluster, batch=batch, precision=options["precision"])
    return len(found), model.of(found.only(model.may_fit(found)))


def replay_seconds(plan: Plan, config: GPTConfig) -> float:
    """Return about how many seconds of a processor the replay of a plan takes.

    110 plans of 16 devices took between 0.6 and 2 times as long, on one core of an Intel Xeon, and
    five of 64 to 256 up to 2 times. It runs each layer once per microbatch, and prices each call of
    a layer; with an offload, whose moves come between, one took 16 times as long as without.
    """
    layers = plan.pieces * plan.accumulate * config.layers
    again = 1.5 if plan.checkpoint_blocks == "all" else 1.0
    tensor = (8 if plan.sequence_parallel else 4) * again if plan.tp > 1 else 0
    data = {2: 3, 3: 4}.get(plan.zero, 0)
    away = 8 if plan.offload != "none" else 1
    return 0.2 + away * layers * (4e-3 * again + 1e-3 * (tensor + data))


def replayed(
    choice: Choice, ranking: Ranking, *, rates: Rates | None = None, optimizer: str = "adamw"
) -> Choice:
    """Return a plan of the ranking, confirmed by the replay. Args: rates, optimizer: as plan_for.
    Raises: PlanError, ConfigError for what the replay cannot run."""
    found = simulate(
        choice.plan,
        ranking.config,
        ranking.cluster,
        batch=ranking.batch,
        order=choice.order,
        rates=rates,
        optimizer=optimizer,
        float32_gradients=ranking.float32_gradients,
    )
    return replace(choice, confirmed=found)


def _confirmed(
    ranking: Ranking, count: int | None, rates: Rates | None, optimizer: str, show: Progress
) -> Ranking:
    """Return the ranking with its best few plans confirmed by the replay; plans that the replay
    finds too large, or cannot run, are removed."""
    ran: list[Choice] = []
    refused: list[Choice] = []
    removed: list[int] = []
    wanted = MOST_CONFIRMED if count is None else count
    left = AFFORDABLE if count is None else inf
    for place in range(min(MOST_TRIED * wanted, len(ranking))):
        choice = ranking.choice(place)
        best = min((_figure(other, ranking.objective) for other in ran), default=inf)
        if len(ran) >= wanted and (count is not None or _figure(choice, ranking.objective) >= best):
            break
        left -= replay_seconds(choice.plan, ranking.config)
        if left < 0:
            break
        show.at(len(ran), wanted, f"simulating {choice.text}")
        try:
            choice = replayed(choice, ranking, rates=rates, optimizer=optimizer)
        except (PlanError, ConfigError):
            removed.append(place)
            continue
        if choice.fits:
            ran.append(choice)
        else:
            removed.append(place)
            refused.append(choice)
    ran.sort(key=lambda choice: _figure(choice, ranking.objective))
    return replace(
        ranking,
        order=np.delete(ranking.order, removed),
        confirmed=tuple(ran),
        refused=tuple(refused),
        mixed=count is None,
    )


def _figure(choice: Choice, objective: str) -> float:
    """Return what a ranking minimises: by the replay if it ran the plan, else estimated."""
    found = choice.confirmed or choice
    values: dict[str, float | None] = {
        "time": choice.known_seconds,
        "cost": found.dollars,
        "energy": found.joules,
        "memory": choice.known_total,
    }
    return values[objective] or 0.0


def command(choice: Choice, model: Sequence[str], ranking: Ranking) -> str:
    """Return the command line that runs the plan: for `here` `minidist train`, for other clusters
    `minidist simulate`, whose options after --batch are those of train.

    Args:    model: the options that name the model, as ["--model", "gpt3-175b"].
    """
    plan = [
        *plan_words(choice.plan),
        *(["--order", ",".join(choice.order)] if choice.order != AXES else []),
    ]
    if ranking.cluster.name == "here":
        return " ".join(["minidist train -n", str(choice.plan.size), *model_words(ranking), *plan])
    return " ".join(
        [
            "minidist simulate --cluster",
            ranking.cluster.spec,
            *model,
            "--batch",
            str(ranking.batch),
            *plan,
            *["--float32-gradients"] * ranking.float32_gradients,
        ]
    )


def plan_words(plan: Plan) -> list[str]:
    """Return a plan as options of `minidist train` and `minidist simulate`."""
    found = ["--plan", words(plan.axes), "--precision", plan.precision]
    found += ["--zero", str(plan.zero)] if plan.zero else []
    found += ["--shard", str(plan.shard)] if plan.shard is not None else []
    if plan.pp > 1:
        found += ["--schedule", plan.schedule, "--microbatches", str(plan.pieces)]
    found += ["--accumulate", str(plan.accumulate)] if plan.accumulate > 1 else []
    found += ["--checkpoint-blocks", "all"] if plan.checkpoint_blocks == "all" else []
    found += ["--offload", plan.offload] if plan.offload != "none" else []
    return found + ["--sequence-parallel"] * plan.sequence_parallel


MIXTURE_WORDS = {
    "top_k": "--top-k",
    "capacity": "--capacity",
    "noise": "--gate-noise",
    "balance": "--balance",
    "balance_weight": "--balance-weight",
    "bias_rate": "--bias-rate",
    "shared": "--shared-experts",
    "hidden": "--expert-width",
}
"""Fields of a MixtureConfig as options of `minidist train`; the places of experts are left out:
they do not matter on one machine."""


def model_words(ranking: Ranking) -> list[str]:
    """Return model and batch as options of `minidist train`."""
    config = ranking.config
    return [
        "--layers",
        str(config.layers),
        "--width",
        str(config.width),
        "--heads",
        str(config.heads),
        "--vocab",
        str(config.vocabulary),
        "--context",
        str(config.context),
        "--positions",
        config.positions,
        "--batch",
        str(ranking.batch),
        *pattern_words(config),
        *mixture_words(config),
    ]


def pattern_words(config: GPTConfig) -> list[str]:
    """Return the attention pattern as an option of `minidist train`."""
    return (
        []
        if config.attention_pattern is None
        else ["--attention-pattern", config.attention_pattern]
    )


def mixture_words(config: GPTConfig) -> list[str]:
    """Return the mixture of experts as options of `minidist train`, without default values."""
    mixture = config.mixture
    if mixture is None:
        return []
    usual = MixtureConfig(mixture.experts)
    found = {
        option: getattr(mixture, name)
        for name, option in MIXTURE_WORDS.items()
        if getattr(mixture, name) != getattr(usual, name)
    }
    return [
        "--experts",
        str(mixture.experts),
        *(word for option, value in found.items() for word in (option, str(value))),
    ]
