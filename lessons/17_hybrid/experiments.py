"""Run what lesson 17, its figure and its break-its share: plans, their weights, traffic, layout,
memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.device import account
from minidist.lessons.lab import counting_batch
from minidist.nn import GPT, GPTConfig, MixtureConfig
from minidist.parallel.hybrid.hybrid_costs import elements_sent
from minidist.parallel.pipeline.schedule_checker import clock_of
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.parallel.step.step import Counted, gradient_norm

CONFIG = GPTConfig(
    vocabulary=32, context=16, layers=4, width=16, heads=4, tied=True, dtype="float64"
)
MIXED = replace(CONFIG, mixture=MixtureConfig(experts=4))
STEPS = 2
SEQUENCES = 16
MICROBATCHES = 4
CLIP = 0.2
ITEM = 8
AXES = ("dp", "pp", "ep", "cp", "tp")


def global_batch(
    step: int, config: GPTConfig = CONFIG, sequences: int = SEQUENCES
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    return counting_batch(config, step, sequences)


# -------------------------------------------------------------------------------------------- plans


def cube(ranks: int) -> dict[str, int]:
    """Return as many axes as the number of ranks allows: its prime factors, largest first, given to
    dp, pp, tp in turn."""
    axes = ("dp", "pp", "tp")
    factor = 2
    primes = []
    shape = dict.fromkeys(axes, 1)
    while ranks > 1:
        if ranks % factor == 0:
            primes.append(factor)
            ranks //= factor
        else:
            factor += 1
    for turn, prime in enumerate(sorted(primes, reverse=True)):
        shape[axes[turn % 3]] *= prime
    return shape


def shapes(ranks: int) -> Iterator[dict[str, int]]:
    """Yield every dp × pp × tp of `ranks` ranks into which CONFIG can be cut."""
    for dp in range(ranks, 0, -1):
        for pp in range(ranks // dp, 0, -1):
            tp, rest = divmod(ranks, dp * pp)
            if not rest and pp <= CONFIG.layers and tp <= CONFIG.heads:
                yield {"dp": dp, "pp": pp, "tp": tp}


def plans(ranks: int) -> Iterator[md.Plan]:
    """Yield dp only, dp with the smallest pipeline, with the least tensor parallelism, and all three;
    then with cp, and with ZeRO."""
    least = next((size for size in range(2, ranks + 1) if ranks % size == 0), 1)
    chosen = [
        {"dp": ranks, "pp": 1, "tp": 1},
        {"dp": ranks // least, "pp": least, "tp": 1},
        {"dp": ranks // least, "pp": 1, "tp": least},
        cube(ranks),
    ]
    possible = list(shapes(ranks))
    for place, shape in enumerate(chosen):
        if shape in possible and shape not in chosen[:place]:
            yield plan_of(shape)
    if ranks % 2 == 0:
        yield plan_of({**cube(ranks // 2), "cp": 2})
    if ranks > 1:
        yield from (plan_of(cube(ranks), zero=zero) for zero in (1, 3))


def expert_plans(ranks: int) -> Iterator[md.Plan]:
    """Yield, for an even number of ranks, plans that divide MIXED's experts, with dp and, on
    multiples of four, with tp."""
    if ranks % 2 == 0:
        yield plan_of({"dp": ranks // 2, "ep": 2})
    if ranks % 4 == 0:
        yield plan_of({"dp": ranks // 4, "ep": 2, "tp": 2})


def plan_of(shape: dict[str, int], **options: Any) -> md.Plan:
    """Return a plan of that mesh; a pipeline gets MICROBATCHES."""
    axes: dict[str, Any] = {**shape, **options}
    return md.Plan(microbatches=MICROBATCHES if shape.get("pp", 1) > 1 else None, **axes)


def words(shape: dict[str, int]) -> str:
    """Return the axes with several ranks as text, "dp=2,tp=2"."""
    return ",".join(f"{axis}={size}" for axis, size in shape.items() if size > 1) or "dp=1"


def name_of(plan: md.Plan) -> str:
    """Return a plan's axes and its other options as text."""
    return (
        words({axis: plan.axes[axis] for axis in AXES})
        + (f" zero={plan.zero}" if plan.zero else "")
        + " sequence" * plan.sequence_parallel
    )


def kind_of(axis: str) -> str:
    """Return the axis that a ledger's axis belongs to; with ep and cp the data axis is dp and these
    together."""
    return "dp" if axis.startswith("dp,") else axis


# ---------------------------------------------------------------------------------- a job, measured


def train(
    world: Group, plan: md.Plan, *, steps: int = STEPS, config: GPTConfig = CONFIG
) -> dict[str, Any]:
    """Return a Trainer's whole weights, its losses and what was measured.

    Measured are: the bytes that all ranks sent by axis; the norms of the first gradient; this
    rank's memory; its calls: collectives, sends and exchanges; the rows that all ranks sent to
    experts on other ranks.
    """
    before = sent_by_axis(world)
    calls: list[Any] = []
    norms: list[dict[str, float]] = []
    end = world.ledger.subscribe(
        lambda event: (
            calls.append(event)
            if kind_of(event.details["axis"]) in AXES
            and (event.kind == "call" or event.details["verb"] in ("send", "exchange"))
            else None
        )
    )
    with account.use(account.MemoryAccount()) as memory:
        trainer = md.Trainer(plan, config, world, lr=1e-2, clip=CLIP)
        watch_norm(trainer, norms)
        calls.clear()
        losses = [trainer.step(global_batch(step, config)) for step in range(steps)]
        if plan.zero in (1, 2):
            data: Any = trainer.strategy.data_axis
            data.arrivals.wait_for_all()  # the new weights travel on after the step
        made = len(calls)
        held = memory.snapshot()
        rows = int(trainer.loads.sent.sum()) // (2 * config.width)  # there, and the results back
        trainer.check_replicas()
        weights = trainer.state_dict()
        trainer.close()
    end()
    sent = {axis: nbytes - before[axis] for axis, nbytes in sent_by_axis(world).items()}
    return {
        "weights": weights,
        "losses": losses,
        "sent": {axis: add(world, nbytes) for axis, nbytes in sent.items()},
        "calls": made // steps,
        "memory": held,
        "own_sent": sum(sent.values()) // steps,
        "rows": add(world, rows),
        "norms": norms[0] if norms else {},
    }


def watch_norm(trainer: Any, norms: list[dict[str, float]]) -> None:
    """Keep the norm that each step finds, and two that are wrong: of this rank's gradients; of all
    ranks' added up."""
    if trainer.plan.zero:
        return
    update = trainer.precision.update
    parameters = list(trainer.model.parameters())

    def watched(optimizer: Any, counted: Counted, **options: Any) -> None:
        found = {
            "once": counted,
            "own": Counted(parameters),
            "all": Counted(parameters, trainer.world),
        }
        norms.append({name: float(gradient_norm(each)) for name, each in found.items()})
        update(optimizer, counted, **options)

    trainer.precision.update = watched


def sent_by_axis(world: Group) -> dict[str, int]:
    """Return the bytes that this rank has sent in training steps."""
    sent = dict.fromkeys(AXES, 0)
    for axis, verbs in world.ledger.sent_bytes("step").items():
        if kind_of(axis) in sent:
            sent[kind_of(axis)] += sum(verbs.values())
    return sent


def add(world: Group, number: float, op: str = "sum") -> int:
    """Return a number's sum (or largest) over the ranks; the ledger counts it as control."""
    with world.ledger.control():
        return int(world.all_reduce(np.array([float(number)]), op=op)[0])


def formula(
    plan: md.Plan,
    config: GPTConfig = CONFIG,
    sequences: int = SEQUENCES,
    *,
    steps: int = 1,
    rows: int = 0,
) -> dict[str, int]:
    """Return the bytes of all ranks in `steps` steps, by axis; rows: sent in these steps to experts
    on other ranks.

    dp: 2(dp·ep·cp-1) times what the ranks of one replica hold together, without experts. That is
    the model, its whole weights (norms, gates, biases of row linears, positions) tp times, a tied
    table at both ends of a pipeline. Experts: 2(dp·cp-1) times the experts' weights. ep: 4 h per
    row. Other axes: lessons 11 to 13.
    """
    sizes = {name: p.size for name, p in GPT(config).named_parameters() if p.requires_grad}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    whole = sum(
        size
        for name, size in sizes.items()
        if "norm" in name
        or "positions" in name
        or "scores" in name
        or name.endswith(("out.bias", "down.bias"))
    )
    held = sum(sizes.values()) - experts + (plan.tp - 1) * whole
    if plan.pp > 1 and config.tied:
        held += config.vocabulary * config.width
    gradients = (plan.copies - 1) * held + (plan.copies // plan.ep - 1) * experts
    numbers = {
        **dict.fromkeys(AXES, 0),
        "dp": 2 * gradients,
        **elements_sent(config, plan, sequences),
    }
    return {
        **{axis: ITEM * steps * count for axis, count in numbers.items()},
        "ep": ITEM * 4 * rows * config.width,
    }


def bubble(plan: md.Plan) -> float:
    """Return the share of idle time, by the checker's clock, if backward takes twice as long as
    forward."""
    return (
        clock_of(make_schedule(plan.schedule, plan.pp, plan.pieces)).bubble if plan.pp > 1 else 0.0
    )


# ------------------------------------------------------------------------------------------ layouts


def layouts(shape: dict[str, int]) -> list[tuple[str, ...]]:
    """Return every order, outermost first, of the axes that have several ranks."""
    return list(permutations([axis for axis, size in shape.items() if size > 1]))


def crossing(
    world: Group, shape: dict[str, int], order: tuple[str, ...], nodes: tuple[int, ...]
) -> list[dict[str, int]]:
    """Return the bytes by axis that one step sends from node to node, for each size of a node in
    `nodes`.

    A message's two ends say which nodes it joins. A node of size n holds n consecutive ranks.
    """
    counted = [dict.fromkeys(AXES, 0) for _ in nodes]

    def on_event(event: Any) -> None:
        ends = event.details
        if event.kind == "message" and ends["axis"] in AXES and world.ledger.phase == "step":
            for node, sent in zip(nodes, counted, strict=True):
                sent[ends["axis"]] += ends["nbytes"] * (ends["src"] // node != ends["dst"] // node)

    end = world.ledger.subscribe(on_event)
    trainer = md.Trainer(replace(plan_of(shape), order=",".join(order)), CONFIG, world, lr=1e-2)
    trainer.step(global_batch(0))
    trainer.close()
    end()
    return [{axis: add(world, nbytes) for axis, nbytes in sent.items()} for sent in counted]


def links(world: Group, shape: dict[str, int]) -> dict[str, Any]:
    """Return one step's bytes by (axis, from, to) and calls by axis, of this rank; ranks are world
    ranks."""
    sent: dict[str, int] = {}
    calls = dict.fromkeys(AXES, 0)

    def on_event(event: Any) -> None:
        axis = event.details["axis"]
        if axis in calls and event.kind == "message":
            name = f"{axis} {event.details['src']} {event.details['dst']}"
            sent[name] = sent.get(name, 0) + event.details["nbytes"]
        if axis in calls and (event.kind == "call" or event.details["verb"] == "send"):
            calls[axis] += 1

    trainer = md.Trainer(plan_of(shape), CONFIG, world, lr=1e-2)
    end = world.ledger.subscribe(on_event)
    trainer.step(global_batch(0))
    end()
    groups = {axis: list(trainer.mesh[axis].world_ranks) for axis in AXES}
    trainer.close()
    return {"sent": sent, "calls": calls, "groups": groups}
