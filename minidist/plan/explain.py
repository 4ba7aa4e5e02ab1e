"""Chapter 24 · The reasons why a plan wins, its limit, and the gain from more hardware.

told = explain(ranking)
told.why            # seconds by which each term of the step is better than the runner-up's
told.binds          # the limit: memory, computing, or the largest other term
told.twice          # {"network": 0.93, "links in a node": …}: best step with one thing doubled,
                    # divided by today's
"""

from dataclasses import dataclass, replace

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.plan.estimate import TERMS
from minidist.plan.ranking import Choice, Ranking, plan_for
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device

TITLES = {
    "compute": "computing",
    "recompute": "computing again",
    "update": "the optimizer",
    "bubble": "the bubble",
    "tp": "tensor-parallel calls",
    "cp": "context-parallel calls",
    "ep": "expert-parallel calls",
    "pp": "hops between stages",
    "dp": "gradients and weights on the data axis",
    "offload": "offload",
    "host": "waiting for the host's launches",
}
NEARLY = 0.93  # computing is the limit above this share of the step without the longest other term


@dataclass(frozen=True)
class Explanation:
    """The reasons for the best plan of a ranking.

    Attributes: why: (term, seconds that the winner saves; negative: spends more), the largest
                first. binds: the limit of the plan. twice: best step with something doubled / best
                step. more: with one more node: the batch, seconds per sequence / today's, the ideal
                ratio.
    """

    winner: Choice
    runner_up: Choice | None
    why: list[tuple[str, float]]
    binds: str
    twice: dict[str, float]
    more: dict[str, float]


def explain(ranking: Ranking) -> Explanation:
    """Return an explanation: compare the best two plans, and rank again on larger clusters.

    Cost:    that of up to six rankings.
    """
    winner = ranking.best
    other = ranking.runner_up
    why = (
        []
        if other is None
        else [(term, other.seconds[term] - winner.seconds[term]) for term in TERMS]
    )
    why.sort(key=lambda part: -abs(part[1]))
    today = ranking.best.step_seconds
    twice = {
        name: _best(ranking, cluster) / today for name, cluster in _doubled(ranking.cluster).items()
    }
    bigger = replace(ranking.cluster, nodes=ranking.cluster.nodes + 1)
    return Explanation(
        winner, other, why, binding(ranking, winner), twice, _one_more(ranking, bigger, today)
    )


def binding(ranking: Ranking, choice: Choice) -> str:
    """Return the limit of a plan: memory if faster plans do not fit, else computing or the largest
    other term."""
    estimates = ranking.estimates
    faster = (~estimates.fits & (estimates.step_seconds < choice.step_seconds)).sum()
    longest = max(
        (term for term in TERMS if term != "compute"), key=lambda term: choice.seconds[term]
    )
    spent = choice.seconds[longest] / choice.step_seconds
    if faster:
        return (
            f"memory: {faster:,} plans would be faster and do not fit; then {TITLES[longest]}, "
            f"{spent:.1%} of the step"
        )
    if choice.seconds["compute"] > (1 - spent) * choice.step_seconds * NEARLY:
        return f"computing, {choice.seconds['compute'] / choice.step_seconds:.1%} of the step"
    return f"{TITLES[longest]}, {spent:.1%} of the step"


def _best(ranking: Ranking, cluster: Cluster) -> float:
    found = ranking.choice(0).plan
    return plan_for(
        ranking.config,
        cluster,
        batch=ranking.batch,
        objective=ranking.objective,
        precision=found.precision,
    ).best.step_seconds


def _doubled(cluster: Cluster) -> dict[str, Cluster]:
    """Return clusters with one thing doubled: {its name: cluster}."""
    device = cluster.device
    topology = cluster.topology
    found = {
        "memory": replace(cluster, device=replace(device, memory_bytes=2 * device.memory_bytes)),
        "FLOP/s": replace(cluster, device=_faster(device)),
        "links in a node": cluster.rewired(
            {topology.inside.name: {"bandwidth": 2 * topology.inside.bandwidth}}
        ),
    }
    between = topology.between
    if between is not None and cluster.nodes > 1:
        found["network"] = cluster.rewired({between.name: {"bandwidth": 2 * between.bandwidth}})
    return found


def _faster(device: Device) -> Device:
    return replace(
        device,
        peaks={name: 2 * peak for name, peak in device.peaks.items()},
        memory_bandwidth=2 * device.memory_bandwidth,
    )


def _one_more(ranking: Ranking, bigger: Cluster, today: float) -> dict[str, float]:
    """Return seconds per sequence with one more node / today's, with this batch or the next that
    divides among all devices."""
    found = {}
    for batch in {ranking.batch, _next_batch(ranking.batch, bigger.size)}:
        try:
            found[batch] = (
                _best(replace(ranking, batch=batch), bigger) / batch * ranking.batch / today
            )
        except ConfigError:
            continue
    if not found:
        return {}
    best = min(found, key=lambda batch: found[batch])
    return {
        "batch": float(best),
        "seconds of a sequence": found[best],
        "ideal": ranking.cluster.nodes / bigger.nodes,
    }


def _next_batch(batch: int, size: int) -> int:
    return -(-batch // size) * size


# ---------------------------------------------------------------------------- the notes' own advice


@dataclass(frozen=True)
class Advice:
    """The notes' advice for this case. Attributes: chart: boxes of the chart that apply (N2:35);
    row: of the table (N2 §12.1); differs: where the calculation differs, and why.
    """

    chart: list[str]
    row: str
    differs: list[str]


TABLE = (
    (10e9, "< 10B", "data parallelism with ZeRO-2, one node"),
    (100e9, "10B-100B", "3D parallelism with a good schedule, several nodes"),
    (1e12, "100B-1T", "3D parallelism with experts, a large cluster"),
    (float("inf"), "> 1T", "heterogeneous memory and automatic parallelism, a supercomputer"),
)
"""The table by model size: (number of weights up to which the row applies, row, advice)."""
LONG_SEQUENCE = 16384  # a sequence of as many tokens counts as too long; the notes give no number


def advice(ranking: Ranking) -> Advice:
    """Return the notes' advice by their chart of bottlenecks and their table, and how the winner
    differs."""
    config = ranking.config
    plan = ranking.best.plan
    cluster = ranking.cluster
    chart = chart_path(config, cluster)
    _, row, text = next(line for line in TABLE if config.numbers < line[0])
    differs = _differences(ranking, chart)
    if row == "< 10B" and (plan.size > plan.dp or plan.zero != 2):
        differs.append(
            f"the table says ZeRO-2 alone; the winner has {ranking.best.text}: ZeRO-2 reduces "
            "gradients in each pass, ZeRO-1 once a step"
        )
    if row in ("10B-100B", "100B-1T") and 1 in (plan.pp, plan.tp, plan.dp):
        alone = [axis for axis in ("dp", "pp", "tp") if plan.axes[axis] == 1]
        differs.append(
            f"the table says 3D; the winner does without {' and '.join(alone)}: on "
            f"{cluster.spec} memory suffices, and the axis would add its calls or a bubble"
        )
    return Advice(chart, f"{row}: {text}", differs)


def chart_path(config: GPTConfig, cluster: Cluster) -> list[str]:
    """Return the boxes of the notes' chart that apply. The chart's questions have no numbers, so
    they are compared with the device's memory."""
    memory = cluster.device.memory_bytes
    state = 16 * config.numbers
    layer = state / config.layers
    found = []
    if layer > memory / 2:
        found.append("a layer is too large: tensor parallelism")
    if state > memory:
        found.append("too many layers: pipeline parallelism")
    if config.context >= LONG_SEQUENCE:
        found.append("the sequence is too long: sequence parallelism")
    return found or ["the batch is the limit: data parallelism"]


def _differences(ranking: Ranking, chart: list[str]) -> list[str]:
    plan = ranking.best.plan
    found = []
    advised = {
        name: any(name in box for box in chart) for name in ("tensor", "pipeline", "sequence")
    }
    used = {
        "tensor": plan.tp > 1,
        "pipeline": plan.pp > 1,
        "sequence": plan.cp > 1 or plan.sequence_parallel,
    }
    for name, wanted in advised.items():
        if wanted and not used[name]:
            found.append(
                f"the chart says {name} parallelism; the winner divides the memory by "
                f"{f'ZeRO-{plan.zero}' if plan.zero else 'other axes'}, whose calls hide behind "
                "computing"
            )
        elif used[name] and not wanted and name != "sequence":
            found.append(
                f"the chart does not ask for {name} parallelism; the winner has it because it "
                "leaves fewer copies, so shorter calls on the data axis and more passes to fill"
            )
    return found
