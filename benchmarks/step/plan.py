"""`minidist bench step --plan pp=2 --plan tp=2`: the step with each plan, compared with one rank
and with PyTorch.

    minidist    the plan over its ranks; and one rank
    separate    as many of our processes that train without communication: the limit of this
                machine's cores
    PyTorch     the same plan by PyTorch's own modules, over gloo (plan_peers.py); and one process

Each contender has `batch` sequences and one BLAS thread per rank, and one turn per round. PyTorch's
ranks start with our weights and use our rows in the same number of microbatches. PyTorch is timed
only if its first losses equal ours: then both do the same work.
"""

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidist.bench.jobs import Job, answer, join_gloo, start_workers, worker_arguments
from minidist.bench.step.ranks import (
    CLIP,
    OURS,
    PEER,
    SEPARATE,
    Model,
    random_batch,
    take_turns,
    timed,
)
from minidist.bench.step.ranks import start_job as start_ranks
from minidist.errors import LaunchError, PeerLostError
from minidist.launch.membership import limit_blas_threads
from minidist.nn import GPT
from minidist.parallel.hybrid.plan import Plan

MODULE = "minidist.bench.step.plan"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""Pipeline schedules that PyTorch has too, with the same number of stages per rank."""
TOLERANCE = 1e-5  # relative difference of a loss: float32, summed in another order
SEED = 0


@dataclass(frozen=True)
class PlanRow:
    """The result of one contender of a plan. `cut`: its division of the job; None if each of its
    ranks trains separately."""

    plan: str
    name: str
    cut: str | None
    ranks: int
    step_seconds: float
    tokens_per_second: float


def words(plan: Plan) -> str:
    """Return the plan as text for a table: "dp=2,pp=2, 1f1b × 8"."""
    axes = ",".join(f"{axis}={size}" for axis, size in plan.axes.items() if size > 1)
    return f"{axes}, {plan.schedule} × {plan.pieces}" if plan.pp > 1 else axes


def plan_label(row: dict[str, Any]) -> str:
    """Return the name of a contender for tables and pictures: "PyTorch 1F1B + DTensor"."""
    return (
        f"{row['name']} {row['cut']}"
        if row["cut"] and row["name"] == "PyTorch"
        else str(row["name"])
    )


def replicates(plan: Plan) -> str:
    """Return PyTorch's wrapper for the data axis: DDP accepts no DTensor, and its reducer miscounts
    with GPipe (2.13)."""
    return "DDP" if plan.tp == 1 and (plan.pp == 1 or plan.schedule != "gpipe") else "FSDP2 keep"


def peer_of(plan: Plan) -> str:
    """Return PyTorch's counterpart of a plan, axis by axis."""
    kinds = (
        (plan.dp, replicates(plan)),
        (plan.pp, SCHEDULES.get(plan.schedule, plan.schedule)),
        (plan.tp, "DTensor"),
    )
    return " + ".join(kind for ranks, kind in kinds if ranks > 1)


def lacks(plan: Plan, model: Model) -> str | None:
    """Return the reason why PyTorch cannot run this plan, or None."""
    rows = model.batch * plan.size // plan.dp
    if plan.pp > 1 and plan.schedule not in SCHEDULES:
        return f"it is compared under the schedules {', '.join(SCHEDULES)}"
    if plan.pp > 1 and rows % plan.pieces:
        return (
            f"a PipelineStage's microbatches are all alike, and {rows} rows are not "
            f"{plan.pieces} equal parts"
        )
    if model.heads % plan.tp:
        return (
            f"DTensor's shards are whole heads, and {model.heads} heads are not {plan.tp} "
            "equal parts"
        )
    return None


def start_job(contender: str, plan: Plan, axes: str, model: Model, transport: str) -> Job:
    """Start the ranks of minidist, or of PyTorch."""
    options = [
        *model.arguments(),
        f"--plan={axes}",
        f"--schedule={plan.schedule}",
        f"--transport={transport}",
        *([f"--microbatches={plan.microbatches}"] if plan.microbatches else []),
    ]
    return start_workers(
        MODULE, contender, plan.size, options, by="launch" if contender == OURS else "rank"
    )


def measure_plan(
    axes: str,
    plan: Plan,
    model: Model,
    rounds: int,
    steps: int,
    transport: str,
    progress: Callable[[str], None],
) -> tuple[list[PlanRow], list[str]]:
    """Measure all contenders of a plan, which take turns within every round.

    Returns: a row for each, ours first; and a line with the reason if PyTorch's was left out.
    """
    jobs: list[Job] = []
    left_out: list[str] = []
    try:
        progress(f"{words(plan)}: starting")
        jobs = [
            start_job(OURS, plan, axes, model, transport),
            start_ranks(OURS, 1, model, transport),
            start_ranks(SEPARATE, plan.size, model, transport),
        ]
        cuts: list[str | None] = [words(plan), None, None]
        if importlib.util.find_spec("torch"):
            jobs.append(start_ranks(PEER, 1, model, transport))
            peer, why = _start_peer(jobs[0], plan, axes, model, transport)
            if why:
                left_out.append(f"PyTorch {peer_of(plan)} beside {words(plan)}: {why}")
            jobs += [peer] if peer else []
            cuts += [None, peer_of(plan)][: 1 + bool(peer)]
    except BaseException:
        for job in jobs:
            job.close()
        raise
    rows = []
    for job, cut, answers in zip(
        jobs, cuts, take_turns(jobs, rounds, steps, progress), strict=True
    ):
        median = statistics.median(answers.seconds)
        rows.append(
            PlanRow(
                words(plan),
                job.name,
                cut,
                job.size,
                median,
                model.batch * model.context * job.size / median,
            )
        )
    return rows, left_out


def _start_peer(
    ours: Job, plan: Plan, axes: str, model: Model, transport: str
) -> tuple[Job | None, str | None]:
    """Return (PyTorch's ranks, None) if their first losses equal ours, else (None, the reason)."""
    why = lacks(plan, model)
    if why:
        return None, why
    job = None
    try:
        job = start_job(PEER, plan, axes, model, transport)
        theirs = first_losses(job)
        expected = first_losses(ours)
    except (LaunchError, PeerLostError) as error:
        if job is not None:
            job.close()
        return None, str(error).splitlines()[-1]
    if len(theirs) == len(expected) and np.allclose(theirs, expected, rtol=TOLERANCE, atol=0):
        return job, None
    job.close()
    return None, f"its first losses {theirs} are not ours, {expected}: other work"


def first_losses(job: Job) -> list[float]:
    """Return the losses of the warm-up steps and one more step: means over the ranks that know the
    loss of their rows."""
    known = [
        answered["losses"] for answered in job.ask(steps=1) if answered["losses"][0] is not None
    ]
    return [float(np.mean(losses)) for losses in zip(*known, strict=True)]


# ---------------------------------------------------------------- the ranks' side


def our_step(model: Model, plan: Plan, transport: str) -> tuple[int, Callable[[], float]]:
    """Return rank and step of one of our ranks, with weight decay on all weights, as in PyTorch's
    AdamW."""
    import minidist as md

    limit_blas_threads(1, local_size=1)
    world = md.init(transport=transport, threads=1)
    trainer = md.Trainer(
        plan,
        model.config(),
        world,
        seed=SEED,
        clip=CLIP,
        optimizer_options={"weight_decay": 0.01, "decay": lambda weights: True},
    )
    batch = random_batch(model.vocab, model.batch * world.size, model.context)
    return world.rank, lambda: trainer.step(batch)


def torch_step(model: Model, plan: Plan, folder: str, rank: int) -> Callable[[], float | None]:
    """Return the step of one of PyTorch's ranks, from our weights."""
    import torch

    from minidist.bench.step.plan_peers import plan_step

    join_gloo(folder, rank, plan.size)
    gpt = GPT(model.config())
    gpt.initialize(SEED)
    step = plan_step(model.config(), plan, clip=CLIP, weights=gpt.state_dict())
    batch = random_batch(model.vocab, model.batch * plan.size, model.context)
    ids, targets = map(torch.from_numpy, batch)
    return lambda: step(ids, targets)


def main() -> None:
    """Run as one rank of a contender."""
    parser = worker_arguments()
    for name in ("--transport", "--plan", "--schedule"):
        parser.add_argument(name)
    parser.add_argument("--microbatches", type=int)
    Model.add_options(parser)
    options: Any = parser.parse_args()
    model = Model.of(options)
    plan = replace(
        Plan.parse(options.plan), schedule=options.schedule, microbatches=options.microbatches
    )
    if options.contender == OURS:
        rank, step = our_step(model, plan, options.transport)
        answer(options.meet, rank, timed(step))
    else:
        answer(
            options.meet, options.rank, timed(torch_step(model, plan, options.meet, options.rank))
        )


if __name__ == "__main__":
    main()
