"""`minidist bench calibrate`, behind its two halves: what a call of a training step costs beside its messages.

link_model.py measures messages between ranks that do nothing else. In a training step a call also takes Python (verb,
tape, flight recorder), and its ranks do not enter it at the same moment; where ranks share cores, a rank that waited
must also get a core again. So a small model trains by tensor parallelism over each link, with a call every few kernels:

    call = (seconds of the step - what chapter 24 predicts for kernels and messages) / calls of the step

Seconds of the step are those of the slowest rank: median over steps, median over rounds.
"""

import statistics
import time
from collections.abc import Sequence
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

KIND = "step"
STEPS, WARM_UP = 10, 2
SEQUENCES = 2


def small_step(ranks: int) -> tuple[Plan, GPTConfig]:
    """Plan and model of the step: every rank has a head, 128 columns and 32 tokens of each sequence."""
    return (Plan(tp=ranks, sequence_parallel=True),
            GPTConfig(vocabulary=64 * ranks, context=32 * ranks, layers=2, width=128 * ranks, heads=ranks))


def step_seconds(world: Group) -> list[float]:
    """Seconds of each step on this rank, but for the first ones. Every rank calls it."""
    plan, config = small_step(world.size)
    trainer, tokens = Trainer(plan, config, world), np.zeros((SEQUENCES, config.context), np.int64)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        trainer.step((tokens, tokens))
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def with_call(link: LinkCost, seconds: Sequence[float], profile: Profile) -> LinkCost:
    """The link with the cost of a call; unchanged if computation was never measured.

    Args:    seconds: of the small step, in each round. profile: has the link, and computation.
    """
    if not profile.computation:
        return link
    plan, config = small_step(link.ranks)
    bare = replace(profile, links=[replace(link, call=0.0)])
    found = simulate(plan, config, here(link.ranks, link.link, bare), batch=SEQUENCES)
    trace = found.traces[0]
    calls = sum(isinstance(event, Start) for event in trace.events[trace.steps[-1]:])
    return replace(link, call=max(0.0, (statistics.median(seconds) - found.step_seconds) / calls))
