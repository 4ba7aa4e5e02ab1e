"""`minidist bench calibrate`, behind its two halves: what training takes beside its messages and its kernels.

link_model.py measures messages between ranks that do nothing else. In a training step a call also takes Python (verb,
tape, flight recorder), and its ranks do not enter it at the same moment; where ranks share cores, a rank that waited
must also get a core again. computation.py measures ranks that have a core each and wait for no other; in training
they also take turns on cores, caches and memory. So two small models train over each link, with all its ranks:

    tp    tensor parallelism: a call every few kernels
    dp    data parallelism: many kernels between few calls

    seconds of a step = what chapter 24 predicts, with all kernels `slowdown` times as long, + calls · `call`

Two steps, two numbers. Seconds of a step are those of the slowest rank: median over steps, median over rounds.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from minidist.comm.cost.link_model import LinkCost, Profile
from minidist.comm.group import Group
from minidist.nn import GPTConfig
from minidist.observe.events import Start
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.here import here
from minidist.simulate.simulate import simulate

KINDS = ("tp", "dp")
STEPS, WARM_UP = 10, 2
SEQUENCES = 2                   # of a step with tp; with dp, of each rank
SLOWER = 1.25                   # the slowdown beside 1 at which a step is predicted, to see what it changes


def small_step(kind: str, ranks: int) -> tuple[Plan, GPTConfig, int]:
    """Plan, model and sequences of a step. With tp every rank has a head, 128 columns and 32 tokens of a sequence."""
    if kind == "dp":
        return Plan(dp=ranks), GPTConfig(vocabulary=256, context=128, layers=2, width=256, heads=4), SEQUENCES * ranks
    return (Plan(tp=ranks, sequence_parallel=True),
            GPTConfig(vocabulary=64 * ranks, context=32 * ranks, layers=2, width=128 * ranks, heads=ranks), SEQUENCES)


def step_seconds(kind: str, world: Group) -> list[float]:
    """Seconds of each step on this rank, but for the first ones. Every rank calls it."""
    plan, config, sequences = small_step(kind, world.size)
    trainer, tokens = Trainer(plan, config, world), np.zeros((sequences // plan.dp, config.context), np.int64)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        trainer.step((tokens, tokens))
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def with_steps(link: LinkCost, seconds: Mapping[str, Sequence[float]], profile: Profile) -> LinkCost:
    """The link with the cost of a call and the slowdown; unchanged if computation was never measured.

    Args:    seconds: of the small step of each kind, in each round. profile: has the link, and computation.
    """
    if not profile.computation:
        return link
    measured = np.array([statistics.median(seconds[kind]) for kind in KINDS])
    found = [_predicted(kind, link, 1.0, profile) for kind in KINDS]
    plain, calls = (np.array(column) for column in zip(*found, strict=True))
    slower = np.array([_predicted(kind, link, SLOWER, profile)[0] for kind in KINDS])
    columns = np.stack([calls, (slower - plain) / (SLOWER - 1)], axis=1)
    call, more = np.linalg.solve(columns, measured - plain)
    if more < 0:                                    # ranks do not slow each other: the calls explain it all
        call, more = (measured - plain)[0] / calls[0], 0.0
    if call < 0:
        call, more = 0.0, max(0.0, ((measured - plain) / columns[:, 1])[1])
    return replace(link, call=max(0.0, float(call)), slowdown=1 + float(more))


def _predicted(kind: str, link: LinkCost, slowdown: float, profile: Profile) -> tuple[float, int]:
    """Seconds of a step whose calls take only their messages, and how many calls a rank makes."""
    plan, config, sequences = small_step(kind, link.ranks)
    bare = replace(profile, links=[replace(link, call=0.0, slowdown=slowdown)])
    found = simulate(plan, config, here(link.ranks, link.link, bare), batch=sequences)
    trace = found.traces[0]
    return found.step_seconds, sum(isinstance(event, Start) for event in trace.events[trace.steps[-1]:])
