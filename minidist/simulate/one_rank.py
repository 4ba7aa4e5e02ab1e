"""Chapter 24 · One rank of a plan, run alone to its end: the Trainer and its modules, on arrays
without data.

    trace = run_rank(Plan(dp=16, pp=8, tp=8, zero=1), config, rank=3, rows=1024)
    trace.events, trace.peak["total"], trace.ledger

What a rank does depends on its plan and on shapes, not on numbers. So each rank can run by itself:
no threads, no processes, no messages. What it would learn from the others is declared
(sim_rank.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.autograd.ops.experts import drawn_load
from minidist.device import account
from minidist.device.backend import index_range, simulated
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.state.state_map import Place, state_places
from minidist.simulate import recording
from minidist.simulate.recording import RecordedAccount
from minidist.simulate.shape_module import module
from minidist.simulate.sim_group import SimGroup
from minidist.simulate.sim_rank import SimRank
from minidist.simulate.trace import RankTrace

DEVICES = {"gpu": "cuda", "cpu": "cpu"}
KEYS = ("phase", "axis", "verb", "algorithm")  # of a row of the ledger


def run_rank(
    plan: Plan,
    config: GPTConfig,
    rank: int = 0,
    *,
    rows: int,
    tokens: int | None = None,
    steps: int = 2,
    seed: int = 0,
    optimizer: str = "adamw",
    device_kind: str = "gpu",
    batch: Any = None,
    load: Sequence[float] | None = None,
    first_rows: int | None = None,
    **options: Any,
) -> RankTrace:
    """Run `steps` steps of one rank, and return what it did.

    Args:    rows: sequences of the global batch, each of `tokens` (default: the model's context).
             device_kind: "gpu": as on a GPU, with the kernels of kernels/; "cpu": as with NumPy,
             pass by pass.
             batch: (inputs, targets) of integers, in place of rows of equal ones.
             load: in which proportion tokens choose the experts of a mixture (default: evenly).
             first_rows: sequences of all steps but the last (default: rows). The first step is
             there for the state that it makes: with one sequence a data rank it takes a fraction of
             the time.
             options: further ones of Trainer.
    Raises:  PlanError for what cannot run, or what cannot be known of a rank alone.
    """
    from minidist.parallel.hybrid.hybrid import Trainer

    if device_kind not in DEVICES:
        raise ConfigError(f"device_kind {device_kind!r}: choose gpu or cpu")
    _require(plan, config)
    length = tokens or config.context
    sim = SimRank(plan, config, rank, length, DEVICES[device_kind])
    memory = RecordedAccount(sim.recording)
    trace = RankTrace(rank)
    if batch is None:
        ids = index_range(length) * config.vocabulary // length
        batch = (
            np.broadcast_to(ids, (rows, length)),
            np.broadcast_to(np.roll(ids, -1), (rows, length)),
        )
    if plan.updates_each_microbatch:
        options = {"clip": None, **options}
    modules = {device: module(device) for device in ("cpu", "cuda")}
    with simulated(modules), drawn_load(load), account.use(memory), recording.begun(sim.recording):
        # what is computed before the first step is no part of any, and on the host
        with recording.pause():
            trainer = Trainer(
                plan,
                config,
                SimGroup.world_of(sim),
                seed=seed,
                optimizer=optimizer,
                device=DEVICES[device_kind],
                recorder=sim.recording,
                **options,
            )
        for step in range(steps):
            sim.recording.flush()
            trace.steps.append(len(sim.recording.events))
            before = sim.ledger.rows()
            last = step == steps - 1 or first_rows is None
            trainer.step(batch if last else (batch[0][:first_rows], batch[1][:first_rows]))
            sim.recording.sync()  # the caller reads the loss
        trace.last_step = _behind(before, sim.ledger.rows())
        trace.events = sim.recording.events
        trace.segments = sim.recording.segments
        trace.ledger = sim.ledger.rows()
        trace.peak, trace.now, trace.host_peak = memory.peak, memory.now, trainer.store.host.peak
        trace.lanes = dict(trainer.store.traffic.step)
        trace.parameters = sum(parameter.size for parameter in trainer.model.parameters())
        trainer.close()
    return trace


def rank_places(
    plan: Plan, config: GPTConfig, rank: int, *, optimizer: str = "adamw"
) -> list[Place]:
    """Return the places of the state that a rank of a plan has, without making its arrays."""
    from minidist.parallel.hybrid.hybrid import Trainer

    sim = SimRank(plan, config, rank, config.context, "cpu")
    modules = {device: module(device) for device in ("cpu", "cuda")}
    memory = RecordedAccount(sim.recording)
    with (
        simulated(modules),
        account.use(memory),
        recording.begun(sim.recording),
        recording.pause(),
    ):
        trainer = Trainer(plan, config, SimGroup.world_of(sim), optimizer=optimizer)
        places = state_places(trainer.strategy, trainer.optimizer)
        trainer.close()
    return places


def _behind(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a ledger counted between two looks."""
    counted = {tuple(row[key] for key in KEYS): row for row in before}
    rows = []
    for row in now:
        old = counted.get(tuple(row[key] for key in KEYS), {"nbytes": 0, "messages": 0})
        if row["messages"] > old["messages"]:
            rows.append(row | {count: row[count] - old[count] for count in ("nbytes", "messages")})
    return rows


def _require(plan: Plan, config: GPTConfig) -> None:
    """Raises: PlanError for a plan whose ranks do what depends on when the others come, or on
    measured times."""
    if config.mixture is not None and config.mixture.node_limit is not None:
        raise PlanError(
            f"simulate: node_limit={config.mixture.node_limit}: a simulated token is sent to each "
            "of its experts separately, whatever their nodes; leave the limit out"
        )
    if plan.attention == "all-to-all" and plan.cp > 1 and config.heads % (plan.tp * plan.cp):
        raise PlanError(
            f"simulate: attention=all-to-all with {config.heads} heads over tp={plan.tp} × "
            f"cp={plan.cp} gives ranks different numbers of heads; choose tp × cp that divides "
            f"{config.heads}, or ring"
        )
    if plan.strategy == "data-parallel":
        raise PlanError(
            "simulate: strategy=data-parallel drives several devices from one process; simulate "
            "the same as ranks: strategy=ddp with dp="
        )
    if plan.local_steps is not None:
        raise PlanError(
            f"simulate: with local_steps={plan.local_steps} steps differ, and one in so many has "
            f"all the traffic; simulate the step of ddp without, and add a {plan.local_steps}th "
            "of an all-reduce"
        )
    if plan.asynchronous:
        raise PlanError(
            "simulate: what an asynchronous server does depends on which worker arrives first; "
            "simulate a synchronous server"
        )
    if plan.server_device != "same":
        raise PlanError(
            f"simulate: server_device={plan.server_device}: all devices of a cluster are the "
            "same; simulate it with server_device=same"
        )
    if plan.algorithm in ("hierarchical", "shared"):
        raise PlanError(
            f"simulate: algorithm={plan.algorithm}: a rank that runs alone does not know which ranks "
            "share its node and memory; simulate it with algorithm=ring"
        )
    if plan.activation_memory is not None:
        raise PlanError(
            "simulate: activation_memory chooses the blocks to recompute by times measured on a "
            "machine; name them: checkpoint_blocks"
        )
    if plan.stage_layers == "measured":
        raise PlanError(
            "simulate: stage_layers=measured times the layers on a machine; give the numbers, or "
            "use even"
        )
