"""Chapter 24 · A plan that changes while training: measure, estimate, compare the gain with the
price.

    look = look_at(records)                     # seconds of a step, of computing, of messages
    advice = adviser.advise(plan, look, left=400)
    advice.gain, advice.price, advice.pays      # seconds; whether the run should change

Which plan is best depends on the machine, and the machine may change during a run: another job
uses the network, a card falls back to a lower speed, a processor becomes hot. The planner answers
again with what is measured now:

    compute     the planner's seconds of kernels, scaled so that the present plan's are the measured
                ones of the slowest rank
    links       α and β of the slowest measured link, inside nodes and between them (link_times.py)
    stages      another division of a pipeline's layers: measured seconds of each stage, divided by its
                layers
    a plan      estimated seconds (estimate.py) × ratio; ratio: measured / estimated. A plan that
                this run has trained under has its own, and NOISE more; another has the largest, at
                least 1, and DOUBT more
    gain        steps left · (measured seconds of a step - the other plan's)
    price       the state that moves, over the slowest link; and `first`: the seconds in which the
                trainer is made, and those that its first step takes longer, as at the run's begin,
                or as the last change measured them

The bytes are exact: each rank of both plans is made without data, and says which numbers it has
(state_map.py). All other options of the plan stay, as recomputation, passes and the schedule.

Cost: rank 0 plans, the others wait: 0.1 s or more at each question, and before the first step the
      seconds in which one rank of each way of cutting a layer runs (cells.py).

notes:   N2 §10.1 动态负载均衡 (N2:360)
"""

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from minidist.errors import ConfigError, PlanError, ShardError
from minidist.nn import GPTConfig
from minidist.nn.config import divisors
from minidist.observe.link_times import Link, LinkProfile, link_profiles
from minidist.observe.rank_steps import RankSteps
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.plan_checks import axis_order, words
from minidist.parallel.state.state_map import overlap
from minidist.plan.candidates import COLUMNS, RECOMPUTED, ROWS, SCHEDULES, Candidates, candidates
from minidist.plan.estimate import Estimator
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device
from minidist.simulate.one_rank import rank_places
from minidist.simulate.rates import Rates
from minidist.simulate.topology import Topology, Wire

OWN = ("compute", "recompute", "update")
"""Terms of an estimate that a rank spends in its own kernels."""
DOUBT = 0.2
"""Part by which a plan that was never measured may take longer than estimated, and by which other
stages may gain less: the largest error of benchmarks/results/twenty-plans-intel.md."""
NOISE = 0.1
"""The same for a plan that this run has measured earlier, when other programs may have been running."""
CHANGED = 0.2, 2.0
"""Part by which a step must have changed since the last question, or factor of a message."""
MUCH_CHANGED = 0.5, 4.0
PRICED = 4  # plans, the fastest first, whose moved bytes are counted
SAMPLED = 16  # ranks at most for which they are counted
LONG = 1 << 10  # bytes of a message that shows the bandwidth of a link
TYPICAL = 1 << 20  # bytes of the message by which links are compared


def plain_choice(
    now: Hashable, seconds: Mapping[Any, float], prices: Mapping[Any, float], left: int
) -> Any:
    """Return the plan under which the rest of a run ends first, the price of the change included.

    Args:    now: the present plan; seconds: of a step, by plan; prices: of changing to each other
             plan, in seconds; left: steps.
    """
    best = now
    for plan, price in prices.items():
        if left * seconds[plan] + price < left * seconds[best] + prices.get(best, 0.0):
            best = plan
    return best


# ---------------------------------------------------------------------------------- what is measured


class Look(NamedTuple):
    """What the ranks measured over some steps, in seconds of a step: `seconds`, the median;
    `compute`, outside of calls, of the slowest rank of each pipeline stage; and the links."""

    seconds: float
    compute: tuple[float, ...]
    links: Mapping[Link, LinkProfile]
    nodes: Mapping[int, Hashable]

    def slowest(self, *, inside: bool) -> LinkProfile | None:
        """Return the slowest measured link inside nodes, or between nodes."""
        links = [
            profile
            for (src, dst), profile in self.links.items()
            if (self.nodes[src] == self.nodes[dst]) == inside
        ]
        return max(links, key=lambda link: link.seconds(TYPICAL), default=None)


def look_at(ranks: Mapping[int, RankSteps]) -> Look:
    """Return what the records of some steps of all ranks say. Records without seconds have only
    messages."""
    seconds = []
    compute = dict.fromkeys(sorted({each.alike for each in ranks.values()}, key=_by_number), 0.0)
    for each in ranks.values():
        steps = [step for step in each.steps if "seconds" in step]
        seconds.append(statistics.median(step["seconds"] for step in steps))
        own = statistics.median(
            max(0.0, step["seconds"] - step.get("calls", 0.0) - step.get("input", 0.0))
            for step in steps
        )
        compute[each.alike] = max(compute[each.alike], own)
    return Look(
        max(seconds),
        tuple(compute.values()),
        with_latency(link_profiles(ranks)),
        {rank: each.host for rank, each in ranks.items()},
    )


def _by_number(alike: str) -> int:
    """Return the stage of a rank, by the word that its records have ("pp3")."""
    return int(alike.removeprefix("pp"))


def with_latency(links: Mapping[Link, LinkProfile]) -> dict[Link, LinkProfile]:
    """Return the links that had long messages; those whose messages were all of one size get the
    largest latency of the others, and the rest of their seconds as seconds per byte."""
    short = [link.alpha for link in links.values() if link.beta or link.large < LONG]
    latency = max(short, default=0.0)
    found = {}
    for name, link in links.items():
        if link.large < LONG:
            continue
        alpha = min(latency, link.alpha)
        found[name] = (
            link
            if link.beta
            else replace(link, alpha=alpha, beta=(link.alpha - alpha) / link.large)
        )
    return found


# ------------------------------------------------------------------------------------ what is advised


@dataclass(frozen=True)
class PlanChange:
    """The answer of a question: the best other plan, and whether it pays to change to it.

    Attributes: now, then: seconds of a step under the present plan, measured, and under the other,
                expected; gain: over the steps left; price: of the change; nbytes: that the rank
                which receives most receives.
    """

    plan: Plan
    now: float
    then: float
    left: int
    gain: float
    price: float
    nbytes: int

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the price."""
        return self.gain > self.price


@dataclass
class Adviser:
    """The planner of one run, on rank 0.

    Args:       config: the model; batch: sequences of a step; device: rates of a rank's processor,
                before they are scaled; nodes: of each rank; optimizer, stage_layers: of the run;
                ends: seconds of the embedding, and of output and loss, in those of a block
                (layer_timing.py).
    Attributes: first: the seconds of a change beside those of the state that moves;
                ratios: measured seconds / estimated ones, of the row of each plan that was
                measured.
    """

    config: GPTConfig
    batch: int
    device: Device
    nodes: Sequence[Hashable]
    optimizer: str = "adamw"
    stage_layers: str = "even"
    ends: tuple[float, float] = (0.0, 0.0)
    first: float = 0.0
    ratios: dict[tuple[int, ...], float] = field(default_factory=dict)
    _wires: dict[bool, Wire] = field(default_factory=dict)
    _answered: Look | None = None

    def is_news(self, look: Look, *, dear: bool = False) -> bool:
        """Return whether what is measured differs from what the last question was about. Args:
        dear: questions have taken long, so that only much counts."""
        before = self._answered
        if before is None:
            return True
        part, factor = MUCH_CHANGED if dear else CHANGED
        if abs(look.seconds / before.seconds - 1) > part:
            return True
        for inside in (True, False):
            old = before.slowest(inside=inside)
            new = look.slowest(inside=inside)
            if old is not None and new is not None:
                ratio = new.seconds(TYPICAL) / old.seconds(TYPICAL)
                if not 1 / factor < ratio < factor:
                    return True
        return False

    def advise(
        self, plan: Plan, look: Look, *, left: int, layers: Sequence[int] = ()
    ) -> PlanChange | None:
        """Return the best other plan for the steps left, or None if there is none, or no link has
        been measured yet.

        Args:    layers: of each pipeline stage.
        """
        for inside in (True, False):
            if (link := look.slowest(inside=inside)) is not None:
                self._wires[inside] = Wire("measured", link.alpha, 1 / max(link.beta, 1e-12))
        if not self._wires:
            return None
        self._answered = look
        seconds = self._expected(plan, look)
        if (balanced := self._balanced(plan, look, layers)) is not None:
            seconds[balanced[0]] = balanced[1]
        moved = {
            other: moved_bytes(plan, other, self.config, optimizer=self.optimizer)
            for other in list(seconds)[1:]
        }
        if not moved:
            return None
        wire = slowest(self._wires)
        prices = {
            other: self.first + (plan.size - 1) * wire.alpha + nbytes / wire.bandwidth
            for other, nbytes in moved.items()
        }
        best = plain_choice(plan, seconds, prices, left)
        if best == plan:  # the best of those that do not pay
            best = min(prices, key=lambda other: left * seconds[other] + prices[other])
        gain = left * (look.seconds - seconds[best])
        return PlanChange(best, look.seconds, seconds[best], left, gain, prices[best], moved[best])

    def prepare(self, plan: Plan) -> None:
        """Run one rank of each way of cutting a layer, so that the first question is as short as
        the later ones: cells.py keeps what the ranks did."""
        cluster = self._cluster({True: Wire("any", 0.0, 1e9)})
        self._estimated(self._rows(plan, cluster), cluster, 1.0)

    def _expected(self, plan: Plan, look: Look) -> dict[Plan, float]:
        """Return the seconds of a step of the present plan, as measured, and of the PRICED others
        that are expected to be the fastest."""
        cluster = self._cluster(self._wires)
        rows = self._rows(plan, cluster)
        keys = [tuple(row) for row in rows.table.tolist()]
        # row 0 is the present plan
        alone = self._estimated(rows.only(np.array([0])), cluster, 1.0)
        slowdown = max(look.compute) / sum(float(alone.seconds[term][0]) for term in OWN)
        found = self._estimated(rows, cluster, slowdown)
        self.ratios[keys[0]] = look.seconds / float(found.step_seconds[0])
        unknown = max(1.0, *self.ratios.values()) * (1 + DOUBT)
        expected = found.step_seconds * [
            self.ratios[key] * (1 + NOISE) if key in self.ratios else unknown for key in keys
        ]
        seconds = {plan: look.seconds}
        for number in np.argsort(expected, kind="stable").tolist():
            if len(seconds) > PRICED:
                break
            if keys[number] == keys[0] or not found.fits[number]:
                continue
            other = self._plan(rows, number, plan)
            if other is not None:
                seconds[other] = float(expected[number])
        return seconds

    def _balanced(self, plan: Plan, look: Look, layers: Sequence[int]) -> tuple[Plan, float] | None:
        """Return the plan whose stages have layers in proportion to their measured speed, and its
        seconds of a step; None if the stages have these layers already."""
        if plan.pp == 1 or plan.stages != plan.pp or len(look.compute) != plan.pp:
            return None
        beside = [0.0] * plan.pp
        beside[0] += self.ends[0]
        beside[-1] += self.ends[1]
        pace = [
            seconds / (count + more)
            for seconds, count, more in zip(look.compute, layers, beside, strict=True)
        ]
        found = by_pace(sum(layers), pace, beside)
        if found == list(layers):
            return None
        slowest = max(
            each * (count + more) for each, count, more in zip(pace, found, beside, strict=True)
        )
        # that the bubble becomes shorter too is left out
        seconds = look.seconds - (1 - DOUBT) * (max(look.compute) - slowest)
        return replace(plan, stage_layers=",".join(map(str, found))), seconds

    def changed(self, cost: float, moving: float) -> None:
        """Note the seconds that a change has cost. Args: cost: with the slower first step; moving:
        the part of them in which state was moved."""
        self.first = max(0.0, cost - moving)
        self._answered = None

    def _cluster(self, wires: Mapping[bool, Wire]) -> Cluster:
        """Return the run's ranks as a cluster. Args: wires: inside nodes (True), and between them;
        one stands for both."""
        counts = Counter(self.nodes)
        even = len(set(counts.values())) == 1
        per_node = len(self.nodes) // len(counts) if even else len(self.nodes)
        nodes = len(self.nodes) // per_node
        # uneven nodes: as one, whose links are as slow as the slowest
        inside = wires.get(True, slowest(wires)) if even else slowest(wires)
        between = wires.get(False, inside) if nodes > 1 else None
        topology = Topology(per_node, inside, between=between)
        return Cluster("job", f"job:{nodes}x{per_node}", self.device, nodes, per_node, topology)

    def _rows(self, plan: Plan, cluster: Cluster) -> Candidates:
        """Return the present plan, then the candidates that keep its recomputation, passes,
        schedule and sequence parallelism."""
        parts = {self.batch // copies // plan.accumulate for copies in divisors(plan.size)}
        found = candidates(
            self.config,
            cluster,
            batch=self.batch,
            precision=plan.precision,
            offload=False,
            rows=sorted({*ROWS, *parts} - {0}),
        )
        mine = row_of(plan, self.batch, found.orders)
        piped = found.column("pp") > 1
        kept = (found.column("recomputed") == mine[COLUMNS.index("recomputed")]) & np.where(
            piped,
            found.column("schedule") == SCHEDULES.index(plan.schedule),
            found.column("pieces") == plan.accumulate,
        )
        if plan.tp > 1:
            kept &= (found.column("tp") == 1) | (found.column("sequence") == plan.sequence_parallel)
        found = found.only(kept)
        return replace(found, table=np.concatenate([np.array([mine], np.int32), found.table]))

    def _estimated(self, rows: Candidates, cluster: Cluster, slowdown: float) -> Any:
        rates = Rates(cluster.device, cluster.device.efficiency, slowdown)
        return Estimator(
            self.config, cluster, rates=rates, precision=rows.precision, optimizer=self.optimizer
        ).of(rows)

    def _plan(self, rows: Candidates, number: int, plan: Plan) -> Plan | None:
        """Return a candidate with the present plan's other options; None if it cannot train."""
        try:
            found = replace(
                rows.plan(number),
                order=",".join(rows.order(number)),
                placement=plan.placement,
                bucket_bytes=plan.bucket_bytes,
                algorithm=plan.algorithm,
                attention=plan.attention,
                schedule=plan.schedule,
                stage_layers=self.stage_layers if rows.column("pp")[number] > 1 else "even",
                device_memory=plan.device_memory,
            )
            found.require(plan.size, self.config)
            found.require_model(self.config)
        except (PlanError, ShardError, ConfigError):
            return None
        return found


def by_pace(layers: int, pace: Sequence[float], beside: Sequence[float]) -> list[int]:
    """Return the layers of each stage such that the slowest stage is as fast as possible; each has
    one at least.

    Args:    pace: seconds of a layer on each stage; beside: what else a stage computes, in layers.
    """
    found = [1] * len(pace)
    for _ in range(layers - len(pace)):
        after = [
            each * (count + 1 + more) for each, count, more in zip(pace, found, beside, strict=True)
        ]
        found[after.index(min(after))] += 1
    return found


def slowest(wires: Mapping[bool, Wire]) -> Wire:
    """Return the wire of the lowest bandwidth."""
    return min(wires.values(), key=lambda wire: wire.bandwidth)


def row_of(plan: Plan, batch: int, orders: Sequence[tuple[str, ...]]) -> list[int]:
    """Return a plan as a row of candidates. A part that does not divide evenly is rounded up."""
    pieces = plan.pieces * plan.accumulate
    row = {
        **plan.axes,
        "zero": plan.zero,
        "rows": -(-batch // (plan.dp * plan.ep * pieces)),
        "pieces": pieces,
        "schedule": SCHEDULES.index(plan.schedule),
        "recomputed": RECOMPUTED.index(plan.checkpoint_blocks),
        "offload": 0,
        "sequence": int(plan.sequence_parallel),
        "order": orders.index(axis_order(plan.order)) if axis_order(plan.order) in orders else 0,
        "shard": plan.shard or 0,
    }
    return [row[name] for name in COLUMNS]


def moved_bytes(old: Plan, new: Plan, config: GPTConfig, *, optimizer: str = "adamw") -> int:
    """Return the bytes that a rank receives when the plan changes: of the rank that receives most,
    of at most SAMPLED ranks."""
    ranks = sorted({rank * old.size // min(old.size, SAMPLED) for rank in range(SAMPLED)})
    most = 0
    for rank in (rank for rank in ranks if rank < old.size):
        have: dict[str, list[np.ndarray]] = {}
        for place in rank_places(old, config, rank, optimizer=optimizer):
            have.setdefault(place.key, []).append(place.runs)
        lacks = 0
        for place in rank_places(new, config, rank, optimizer=optimizer):
            there = sum(
                int(overlap(runs, place.runs)[:, 2].sum()) for runs in have.get(place.key, ())
            )
            lacks += (place.size - there) * place.dtype.itemsize
        most = max(most, lacks)
    return most


def in_words(plan: Plan) -> str:
    """Return a plan in a few words, as the line of a change names it."""
    told = [words(plan.axes)] + [f"ZeRO-{plan.zero}"] * (plan.zero > 0)
    told += [f"{plan.schedule} with {plan.pieces} microbatches"] * (plan.pp > 1)
    return ", ".join(told)
