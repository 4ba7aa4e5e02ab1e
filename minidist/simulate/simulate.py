"""Chapter 24 · A plan on a cluster that is not there: the same modules, a thousand virtual devices,
one clock.

    plan = md.Plan(dp=16, pp=8, tp=8, zero=1, microbatches=64, precision="bf16")
    found = md.simulate(plan, config, "h100:128x8", batch=1024)

1  roles.py      ranks that do the same share a role: these 1,024 have 8
2  one_rank.py   one rank of each role runs two steps alone, by the very modules that train, on
                 arrays without data; the first step has few rows and makes the optimizer's state,
                 only the second is reported
3  rates.py      seconds of kernels; busy_times.py keeps them for each segment of a role's trace
   library.py    seconds of collectives on GPUs and TPUs: a model of NCCL and of XLA's
   walk.py       seconds of all other calls; its call_cost chooses between the two
4  replay.py     all ranks' events on one clock
5  results.py    what that amounts to
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from minidist.errors import PlanError
from minidist.nn import GPTConfig
from minidist.observe.events import GroupCall
from minidist.observe.replay import Replayed, replay
from minidist.parallel.hybrid.plan import ORDER, Plan
from minidist.parallel.hybrid.plan_checks import axis_order
from minidist.simulate.busy_times import BusyTimes
from minidist.simulate.cluster import Cluster
from minidist.simulate.group_ranks import group_ranks
from minidist.simulate.here import without_overlap
from minidist.simulate.main_gradients import with_float32_gradients
from minidist.simulate.one_rank import run_rank
from minidist.simulate.placement import RankPlaces
from minidist.simulate.rates import Rates
from minidist.simulate.results import Simulation
from minidist.simulate.roles import first_of, roles
from minidist.simulate.trace import RankTrace
from minidist.simulate.walk import call_cost


def simulate(
    plan: Plan | str,
    config: GPTConfig,
    cluster: Cluster | str,
    *,
    batch: int,
    order: Sequence[str] = (),
    stragglers: Mapping[int, float] | None = None,
    slow_links: Mapping[str, float] | None = None,
    folded: bool = True,
    rates: Rates | None = None,
    optimizer: str = "adamw",
    float32_gradients: bool = False,
    traces: Callable[..., RankTrace] = run_rank,
) -> Simulation:
    """Return a step of a plan on a cluster, simulated without the cluster.

    Args:    plan: as md.Plan, or as its text, "dp=16,tp=8". cluster: as its text, "h100:128x8", or
             made.
             batch: sequences a step of the whole job, each of config.context tokens.
             order: axes, the innermost last: it lies inside nodes (default: the plan's).
             stragglers: {rank: how many times longer its computing takes}.
             slow_links: {name or pattern of links: how many times longer a byte takes}, as
             {"node3.nic0-out": 4.0}.
             folded: ranks that nothing tells apart share one clock. The result is the same, and is
             there sooner.
             rates: seconds of kernels (default: of the cluster's device). optimizer: as Trainer's.
             float32_gradients: as Megatron's main gradients (main_gradients.py), beside weights of
             two bytes.
             traces: no list, but the function that runs one rank and returns its trace (run_rank,
             or a function that remembers what it ran).
    Returns: a Simulation (results.py).
    Raises:  ConfigError: an unknown cluster, or a link that is not there. PlanError: a plan that
             the model or the cluster cannot have.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    require(plan, config, cluster, batch)
    if wrong := [rank for rank in stragglers or {} if not 0 <= rank < plan.size]:
        raise PlanError(
            f"no rank {wrong[0]} can be slow: the plan has {plan.size} ranks; choose one below "
            f"{plan.size}"
        )
    cluster = cluster.slowed(slow_links) if slow_links else cluster
    placement = RankPlaces(plan, cluster, order or axis_order(plan.order))
    # a rank is run without the plan's order, which only says where it lies, and without its memory
    # limit: a rank that needs too much runs on, and the report says how much
    unlimited = replace(plan, order=ORDER, device_memory=None)
    role_of = roles(plan, config, batch, norm=False)
    role_traces = [
        traces(
            unlimited,
            config,
            rank,
            rows=batch,
            first_rows=plan.dp * plan.ep,
            optimizer=optimizer,
            device_kind=cluster.device.kind,
        )
        for rank in first_of(role_of)
    ]
    if float32_gradients and plan.precision != "fp32":
        passes = plan.pieces * plan.accumulate
        role_traces = [with_float32_gradients(trace, passes) for trace in role_traces]
    if not cluster.overlaps:
        role_traces = [without_overlap(trace) for trace in role_traces]
    used = rates or Rates.of(cluster.device)
    replay_traces = partial(
        replay_on,
        cluster,
        placement,
        plan,
        config,
        stragglers=stragglers or {},
        folded=folded,
        rates=used,
        alone=None if rates or not cluster.alone else Rates.of(cluster.alone),
    )
    replayed = replay_traces(role_traces, role_of)
    if slow_links:
        cluster.topology.check_slow()
    return Simulation(
        plan,
        config,
        cluster,
        batch,
        role_traces,
        role_of,
        placement,
        replayed,
        replay_traces,
        used.sure,
    )


def require(plan: Plan, config: GPTConfig, cluster: Cluster, batch: int) -> None:
    """Raises: PlanError, one line with the nearest that works, for a plan that model, batch or
    cluster cannot have."""
    if plan.size != cluster.size:
        inner = plan.size // plan.dp
        near = (
            f"dp={cluster.size // inner}"
            if cluster.size % inner == 0
            else f"axes whose product is {cluster.size}"
        )
        nodes, rest = divmod(plan.size, cluster.per_node)
        other = (
            f"{cluster.name}:{plan.size}" if rest else f"{cluster.name}:{nodes}x{cluster.per_node}"
        )
        cut = " × ".join(f"{axis}={size}" for axis, size in plan.axes.items() if size > 1) or "dp=1"
        raise PlanError(
            f"{cut} are {plan.size} ranks, {cluster.spec} has {cluster.size} devices; choose "
            f"{near}, or the cluster {other}"
        )
    plan.require(plan.size, config)
    if plan.compress != "none":
        raise PlanError(
            f"plan compress={plan.compress}: a simulated rank has shapes, and no numbers to "
            "compress; use compress=none, and measure what the scheme gains"
        )
    least = plan.dp * plan.ep * plan.pieces * plan.accumulate
    if batch < least:
        raise PlanError(
            f"a batch of {batch} sequences for {plan.dp * plan.ep} data ranks of {plan.pieces} "
            f"microbatches each; choose at least {least}, or fewer microbatches"
        )


def replay_on(
    cluster: Cluster,
    placement: RankPlaces,
    plan: Plan,
    config: GPTConfig,
    traces: Sequence[RankTrace],
    role_of: Sequence[int],
    *,
    stragglers: Mapping[int, float],
    folded: bool,
    rates: Rates,
    alone: Rates | None,
) -> Replayed:
    """Replay the traces on one clock; price kernels by rates, calls by the links between the ranks'
    places.

    Args:    alone: rates while all other ranks wait, where ranks share cores; None: each has its
             own cores.
    """
    busy_times = BusyTimes(rates, alone, traces, role_of, stragglers)

    @cache
    def priced(call: GroupCall, ranks: tuple[int, ...]) -> tuple[float, dict[int, float]]:
        """Return seconds of a call without a name, and its share of each link's capacity.

        Calls that differ only in their names get the same dict: fold.py reads each dict once.
        """
        found = call_cost(call, tuple(placement.places[rank] for rank in ranks), cluster)
        if not found.seconds:
            return 0.0, {}
        links = cluster.links
        # share of each link's capacity that the call uses while it runs alone
        return found.seconds, {
            link: min(1.0, nbytes / (found.seconds * links[link].bandwidth))
            for link, nbytes in found.link_bytes.items()
        }

    def cost(call: GroupCall, ranks: tuple[int, ...]) -> tuple[float, dict[int, float]]:
        return priced(call._replace(name=""), ranks)

    def members(axis: str, rank: int) -> tuple[int, ...]:
        return group_ranks(plan, config, axis, rank)

    return replay(
        [trace.events for trace in traces],
        role_of,
        members,
        busy_times.seconds,
        cost,
        folded=folded,
        move_seconds=lambda rank, move: cluster.move_seconds(move.lane, move.nbytes),
        core_share=busy_times.core_share if alone else None,
        issue_seconds=busy_times.issue,
    )
