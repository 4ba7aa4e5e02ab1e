"""Assignment 3: a plan for a cluster and a model that are drawn.

Drawn: the model, the cluster, the batch, and how much of a device's memory the job may use. The
planner's estimates (minidist/plan/estimate.py) of all plans that the text allows are the answer
key: a plan must fit, and its step may take at most SLOWER times as long as the best one's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isclose
from string import Template
from types import ModuleType
from typing import Any

import numpy as np

from minidist.console import size_text
from minidist.grading import Result, TaskFailed, Tasks, expect, judge
from minidist.lessons.assignments.draws import StudentDraw
from minidist.nn import GPTConfig
from minidist.plan.candidates import Candidates, candidates
from minidist.plan.estimate import Estimates, Estimator
from minidist.simulate.cluster import Cluster

TITLE = "A plan for a cluster of your own"
SLOWER = 1.05  # how much slower than the best plan an answer may be
MORE = 1.06  # estimates of memory and the simulator's differ by up to 6 %: an answer may use either
GIB = 1 << 30
CHOSEN = ("dp", "pp", "tp", "zero", "rows")
"""What a plan chooses; `rows`: the sequences of a microbatch."""
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class PlanningTask:
    """One student's task. Attributes: limit: GiB of a device's memory that a plan may use."""

    layers: int
    heads: int
    vocabulary: int
    context: int
    cluster_name: str
    nodes: int
    batch: int
    limit: int

    @property
    def cluster(self) -> str:
        """Return the cluster as its text."""
        return f"{self.cluster_name}:{self.nodes}x8"

    @property
    def config(self) -> GPTConfig:
        """Return the model."""
        return GPTConfig(
            vocabulary=self.vocabulary,
            context=self.context,
            layers=self.layers,
            width=128 * self.heads,
            heads=self.heads,
            positions="rotary",
        )

    @cached_property
    def plans(self) -> Estimates:
        """Return the estimates of all plans that the text allows."""
        cluster = Cluster.parse(self.cluster)
        found = candidates(self.config, cluster, batch=self.batch, offload=False)
        return Estimator(self.config, cluster).of(found.only(self._allowed(found)))

    def _allowed(self, found: Candidates) -> np.ndarray:
        """Return a mask of the plans that the text allows: 1F1B, ZeRO-0 or 1, nothing
        recomputed."""
        usual = ("schedule", "recomputed", "sequence", "order", "shard")
        allowed = (found.rows(*usual) == 0).all(axis=1)
        allowed &= (found.column("zero") <= 1) & (found.column("cp") == 1)
        return np.asarray(allowed & (self.layers % found.column("pp") == 0))

    @cached_property
    def fits(self) -> np.ndarray:
        """Return a mask of the plans that fit."""
        return np.asarray(self.plans.total <= self.limit * GIB)

    @cached_property
    def best(self) -> int:
        """Return the row of the fastest plan that fits."""
        return int(np.argmin(np.where(self.fits, self.plans.step_seconds, np.inf)))

    def row_of(self, plan: Mapping[str, int]) -> int | None:
        """Return the row of a plan; None if the text does not allow it."""
        wanted = [plan[name] for name in CHOSEN]
        same = np.flatnonzero((self.plans.candidates.rows(*CHOSEN) == wanted).all(axis=1))
        return int(same[0]) if len(same) else None

    def state(self, row: int) -> float:
        """Return the bytes of weights, gradients and optimizer of a plan's fullest rank."""
        return float(sum(self.plans.memory[name][row] for name in STATE))


def drawn(draw: StudentDraw) -> PlanningTask:
    """Return a student's task.

    The limit is so low that the whole weights and gradients of the model do not fit on a device:
    a half or a fourth of them does, with the rank's share of the optimizer, and room for
    activations.
    """
    free = PlanningTask(
        layers=draw.choice((24, 32, 40, 48)),
        heads=draw.choice((20, 24, 28, 32, 36, 40)),
        vocabulary=draw.choice((32000, 50304, 64000)),
        context=draw.choice((1024, 2048)),
        cluster_name=draw.choice(("a100-80g", "h100", "h200")),
        nodes=draw.choice((2, 4)),
        batch=draw.choice((128, 192, 256, 384, 512)),
        limit=0,
    )
    cut = draw.choice((2, 4))
    numbers = free.config.numbers
    state = 4 * numbers // cut + 12 * numbers // (8 * free.nodes)
    limit = 4 + -(-5 * state // (4 * GIB))
    return replace(free, limit=limit)


TEXTS = {
    "task": """\
Assignment 3 of @STUDENT@: a plan for a cluster of your own.

The model is a GPT with learned norms and biases, rotary positions, and an output layer of its own:
$layers layers, width $width, $heads heads, a vocabulary of $vocabulary, an MLP of 4 times the width.
It is trained in bf16 with AdamW, a step on $batch sequences of $context tokens, on the cluster

    $cluster

of which another job uses a part: on each device there are $limit GiB for yours. A plan

    {"dp": 4, "pp": 2, "tp": 2, "zero": 1, "rows": 2}

has dp × pp × tp ranks, one per device, and microbatches of `rows` sequences (1, 2, 4 or 8), of
which each data rank has as many as its share of the batch needs: in a pipeline at least pp, of
1F1B. pp divides the layers, tp the heads, and tp is at most 8. ZeRO is 0 or 1. Nothing is
recomputed or moved to the host; sequence and context parallelism are not used.

Plan on paper, by lessons 00, 11, 12, 14 and 24, and try plans by

    minidist simulate --cluster $cluster --layers $layers --width $width --heads $heads \\\\
        --vocab $vocabulary --sequence $context --batch $batch --plan dp=…,pp=…,tp=… --zero … \\\\
        --microbatches … (a pipeline) or --accumulate … (no pipeline) --precision bf16

Replace each `hole(...)` by your own code. Each hole is graded alone.
"""
}
"""The texts that a student reads. texts.zh.toml has them in Chinese."""

CODE = '''\

from minidist.grading import hole


def plan():
    """Return a plan that fits and takes at most 5 % longer per step than the best one."""
    return hole(1, "a plan that fits and is fast")


def parameters():
    """Return the number of the model's parameters, to 0.5 %."""
    return hole(2, "how many parameters has the model?")


def state_bytes(dp, pp, tp, zero):
    """Return the bytes of weights, gradients and optimizer state on the rank that has most, to 3 %.

    Weights and gradients are bf16; the optimizer keeps 12 bytes per parameter. In a pipeline the
    embedding is on the first rank, the output layer on the last.
    """
    return hole(3, "bytes of weights, gradients and optimizer on a rank", dp, pp, tp, zero)


def step_seconds():
    """Return the seconds of a step of your plan, to 10 %."""
    return hole(4, "how long does a step of this plan take?")
'''


def task_file(task: PlanningTask, texts: Mapping[str, str] = TEXTS) -> str:
    """Return the student's Python file with holes. Args: texts: TEXTS, or its Chinese."""
    told = Template(texts["task"]).substitute(
        layers=task.layers,
        width=task.config.width,
        heads=task.heads,
        vocabulary=task.vocabulary,
        context=task.context,
        batch=task.batch,
        cluster=task.cluster,
        limit=task.limit,
    )
    return f'"""{told}"""\n' + CODE


def tasks(task: PlanningTask) -> dict[int, Tasks]:
    """Return what grades each hole."""
    return {
        1: lambda answer: _plan(task, answer),
        2: lambda answer: _parameters(task, answer),
        3: lambda answer: _state(task, answer),
        4: lambda answer: _seconds(task, answer),
    }


def _row(task: PlanningTask, answer: ModuleType) -> int:
    """Return the row of the student's plan. Raises: TaskFailed if the text does not allow it."""
    plan = answer.plan()
    target = "dp, pp, tp, zero, rows"
    advice = "read the text again: which numbers divide which?"
    named = isinstance(plan, dict) and {*plan} == {*CHOSEN}
    if not (named and all(type(plan[name]) is int for name in CHOSEN)):
        found = f"{plan!r:.80}"
        raise TaskFailed(
            judge("your plan", False, target, found, "no plan", "a dict of five whole numbers")
        )
    devices = 8 * task.nodes
    ranks = plan["dp"] * plan["pp"] * plan["tp"]
    row = task.row_of(plan) if max(plan.values()) < 1 << 20 else None
    if row is None:
        mistake = f"{ranks} ranks" if ranks != devices else "the text does not allow it"
        raise TaskFailed(judge("your plan", False, f"{devices} ranks", f"{plan}", mistake, advice))
    return row


def _plan(task: PlanningTask, answer: ModuleType) -> Iterator[Result]:
    row = _row(task, answer)
    total = float(task.plans.total[row])
    yield judge(
        "memory of the fullest rank",
        total <= MORE * task.limit * GIB,
        f"at most {task.limit} GiB",
        size_text(total),
        "it does not fit",
        "weights and gradients are divided by pp and tp, activations by tp; small microbatches "
        "keep less",
    )
    seconds = task.plans.step_seconds
    slower = float(seconds[row] / seconds[task.best])
    yield judge(
        "seconds of a step, compared with the best plan",
        slower <= SLOWER,
        f"at most {SLOWER:g} times",
        f"{slower:.3f} times",
        "there are faster plans",
        "weigh the bubble of pp, the waits of tp, and what large microbatches gain",
    )


def _parameters(task: PlanningTask, answer: ModuleType) -> Iterator[Result]:
    yield expect(
        "parameters of the model",
        task.config.numbers,
        answer.parameters(),
        "another number",
        "per layer 12 times the width squared, and the embedding and the output layer",
        same=partial(isclose, rel_tol=5e-3),
        show="{:,.0f}".format,
    )


def _state(task: PlanningTask, answer: ModuleType) -> Iterator[Result]:
    names = CHOSEN[:-1]
    cuts, rows = np.unique(task.plans.candidates.rows(*names), axis=0, return_index=True)
    for cut, row in zip(cuts.tolist(), rows.tolist(), strict=True):
        sizes = dict(zip(names, cut, strict=True))
        yield expect(
            f"state of a rank, {sizes}",
            task.state(row),
            answer.state_bytes(**sizes),
            "other bytes",
            "2 + 2 + 12 bytes per parameter of the rank; ZeRO-1 divides the 12 by dp",
            same=partial(isclose, rel_tol=0.03),
            show=size_text,
        )


def _seconds(task: PlanningTask, answer: ModuleType) -> Iterator[Result]:
    row = _row(task, answer)
    yield expect(
        "seconds of a step of your plan",
        float(task.plans.step_seconds[row]),
        answer.step_seconds(),
        "another time",
        "minidist simulate tells it: of the plan that hole 1 has",
        same=partial(isclose, rel_tol=0.1),
        show=_number,
    )


def _number(value: Any) -> str:
    return f"{value:.4g} s"
