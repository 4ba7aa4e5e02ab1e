"""The third part of `minidist bench calibrate`: the time of training beyond its messages and its
kernels.

link_model.py measures messages between ranks that do nothing else. In a training step a call also
takes Python time (verb, tape, flight recorder), and its ranks do not enter it at the same moment;
if ranks share cores, a rank that waited must also get a core again. computation.py measures ranks
that have a core each and wait for no other rank; in training they also take turns on cores, caches
and memory. So small models train over each link, with all its ranks:

    tp         tensor parallelism: a call every few kernels
    sequence   the same with sequence parallelism: twice the calls
    dp         data parallelism: many kernels between few calls
    pairs      from four ranks on: tensor and sequence parallelism of two, data parallelism for the
               rest. A call of two ranks need not wait until all ranks had a core

    seconds of a step = prediction of chapter 24 with all kernels `slowdown` times as long
                        + sum over its calls: `call` seconds if all ranks take part, `pair` if two
                          do, a value between the two if more do

Ranks that synchronize often wait for the slower rank each time, which is most of `call`; so it is
measured with passes as long as those of training. Seconds of a step are those of the slowest rank:
median over steps, and over rounds.

The speed of a virtual machine changes within minutes, and messages, steps and kernels are measured
minutes after each other. So before and after each step, ranks train without communication (ALONE):
each the same small model, and as many at once as there are cores. A step is measured in units of
these steps, and the length of a unit is the prediction of chapter 24.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from minidist.bench.computation import bounded_least_squares, kernels_of
from minidist.comm.cost.link_model import LinkCost, Profile
from minidist.comm.group import Group
from minidist.nn import GPTConfig
from minidist.observe.events import Start
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.group_ranks import group_ranks
from minidist.simulate.here import cores_here, device_of, here
from minidist.simulate.rates import Rates
from minidist.simulate.simulate import simulate

KINDS = ("tp", "sequence", "dp", "pairs")
STEPS = 10
WARM_UP = 2
SEQUENCES = 2  # per pass with tp; per rank with dp
PASSES = 2  # per step with tp
SLOWER = 1.25  # a second slowdown, next to 1, at which a step is predicted: gives the slope
LEAST = 0.8  # least slowdown: it is below 1 if kernels were predicted longer than they are
# width, context, sequences and passes of the model that each rank trains without communication
ALONE = (256, 128, SEQUENCES, 1)


def kinds(ranks: int) -> tuple[str, ...]:
    """Return the kinds of steps that this number of ranks measures."""
    return KINDS if ranks >= 4 and ranks % 2 == 0 else KINDS[:-1]


def small_step(kind: str, ranks: int) -> tuple[Plan, GPTConfig, int]:
    """Return plan, model and sequences of a step. With tp every rank has 128 columns and one or two
    heads."""
    if kind == "dp":
        plan = Plan(dp=ranks)
        columns = 2
        sequences = SEQUENCES * ranks
    else:
        tp = 2 if kind == "pairs" else ranks
        plan = Plan(dp=ranks // tp, tp=tp, accumulate=PASSES, sequence_parallel=kind != "tp")
        columns = tp
        sequences = SEQUENCES * PASSES * plan.dp
    return (
        plan,
        GPTConfig(
            vocabulary=128 * columns,
            context=128 // columns * columns,
            layers=2,
            width=128 * columns,
            heads=columns if columns > 2 else 4,
            positions="rotary",
        ),
        sequences,
    )


def step_seconds(kind: str, world: Group) -> list[float]:
    """Return the seconds of each step on this rank, without WARM_UP steps. Every rank calls it."""
    plan, config, sequences = small_step(kind, world.size)
    trainer = Trainer(plan, config, world)
    tokens = np.zeros((sequences, config.context), np.int64)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        trainer.step((tokens, tokens))
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def with_steps(link: LinkCost, steps: Mapping[str, Sequence[float]], profile: Profile) -> LinkCost:
    """Return the link with the cost of a call and the slowdown; unchanged if computation was never
    measured.

    Args:    steps: {kind: step of each round}, in units of the step without communication.
             profile: has the link, and computation.
    """
    if not profile.computation:
        return link
    alone = alone_seconds(link.ranks, profile)
    measured = np.array([alone * statistics.median(steps[kind]) for kind in kinds(link.ranks)])
    rows = [_predicted(kind, link, 1.0, profile) for kind in kinds(link.ranks)]
    slower = [_predicted(kind, link, SLOWER, profile)[0] for kind in kinds(link.ranks)]
    plain = np.array([row[0] for row in rows])
    columns = np.array(
        [
            [*calls, (more - least) / (SLOWER - 1)]
            for (least, calls), more in zip(rows, slower, strict=True)
        ]
    )
    if link.ranks == 2:
        columns[:, 0] += columns[:, 1]  # all ranks are a pair
    columns = columns if KINDS[-1] in kinds(link.ranks) else np.delete(columns, 1, axis=1)
    least = np.zeros(columns.shape[1])
    most = np.full(columns.shape[1], np.inf)
    least[-1] = LEAST - 1
    call, *pair, more = bounded_least_squares(
        columns / measured[:, None], 1 - plain / measured, least, most
    ).tolist()
    return replace(link, call=call, pair=pair[0] if pair else call, slowdown=1 + more)


def alone_seconds(ranks: int, profile: Profile) -> float:
    """Return the predicted seconds of the step without communication (ALONE), while as many ranks
    train as have a core each."""
    cores = cores_here()
    device = device_of(profile.computation, min(ranks, cores), cores, profile.machine)
    return Rates.of(device).segment(kernels_of(ALONE))


def _predicted(
    kind: str, link: LinkCost, slowdown: float, profile: Profile
) -> tuple[float, list[float]]:
    """Return the predicted seconds of a step whose calls take only their messages, and the number
    of a rank's calls of all ranks and of two ranks; a call of more than two counts partly as
    each."""
    plan, config, sequences = small_step(kind, link.ranks)
    bare = replace(profile, links=[replace(link, call=0.0, pair=0.0, slowdown=slowdown)])
    found = simulate(plan, config, here(link.ranks, link.link, bare), batch=sequences)
    trace = found.traces[0]
    calls = [0.0, 0.0]
    for event in trace.events[trace.steps[-1] :]:
        if isinstance(event, Start):
            size = (
                2
                if event.call.verb in ("send", "recv")
                else len(group_ranks(plan, config, event.call.axis, 0))
            )
            part = (size - 2) / max(1, link.ranks - 2)
            calls[0] += part
            calls[1] += 1 - part
    return found.step_seconds, calls
