"""`minidist bench step`: reads the options, measures a step, shows and draws the result.

A step is measured in one of four ways, each with its own table and picture:

    --model, --device, --precision or --graph    one process on one device (device.py)
    --zero                                       each ZeRO stage (ranks.py)
    --plan                                       each plan (plan.py)
    none of them                                 one rank and several (ranks.py)
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from minidist import console
from minidist.bench.step import device, plots, tables
from minidist.bench.step.plan import measure_plan
from minidist.bench.step.ranks import MODELS, Model, measure_all, measure_stages
from minidist.console import plural
from minidist.errors import ConfigError
from minidist.launch.transports import current_name
from minidist.observe.room import training_bytes
from minidist.parallel.hybrid.plan import Plan
from minidist.progress import Progress

Result = dict[str, Any]


def measure(args: argparse.Namespace, progress: Progress) -> Result:
    """Measure a step by the options; return the result. Raises: ConfigError for options that
    contradict each other."""
    named = MODELS[args.model] if args.model else Model()
    model = Model(**{name: getattr(args, name) or value for name, value in vars(named).items()})
    require_memory(model, Plan(dp=1))  # refuse an impossible model before anything starts
    if args.model or args.device or args.precision or args.graph:
        return device.measure_asked(args, model, progress)
    plans = _plans(args, model)
    # the ranks are on this host
    transport = "shm" if args.transport == "auto" else current_name(args.transport)
    result = {
        "what": "step",
        "model": vars(model),
        "transport": transport,
        "zero": args.zero,
        "plans": [*plans],
        "left_out": [],
    }
    rows: list[Any] = []
    if plans and not args.zero:
        for axes, plan in plans.items():
            more, without = measure_plan(
                axes, plan, model, args.rounds, args.steps, transport, progress
            )
            rows = rows + more
            result["left_out"] = result["left_out"] + without
            if len(plans) > 1:
                progress.keep(tables.plan_line([vars(row) for row in more]))
    elif args.zero:
        ranks = [plan.size for plan in plans.values()] or args.ranks or [2, 4]
        if min(ranks) < 2:
            raise ConfigError("--zero: one rank divides nothing; choose -n of at least 2")
        require_memory(model, Plan(dp=max(ranks), zero=min(args.zero)))
        rows, result["left_out"] = measure_stages(
            model, ranks, args.zero, args.rounds, args.steps, transport, progress
        )
    else:
        require_memory(model, Plan(dp=max(args.ranks or [2])))
        rows = measure_all(
            model, args.ranks or [1, 2], args.rounds, args.steps, transport, progress
        )
    return {**result, "rows": [vars(row) for row in rows]}


def require_memory(model: Model, plan: Plan) -> None:
    """Raise MemoryLimitError if a step with the plan cannot fit on this machine, ConfigError if
    there is no such model."""
    needed = training_bytes(model.config(), plan, model.batch * plan.size)
    console.require_memory(
        f"a step of {plural(model.layers, 'layer')} of width {model.width} on "
        f"{plural(plan.size, 'rank')}",
        needed,
        processes=plan.size,
    )


def _plans(args: argparse.Namespace, model: Model) -> dict[str, Plan]:
    """Return {axes: plan} of the plans that the options ask for. Raises: ConfigError or
    MemoryLimitError for a plan that cannot be measured."""
    plans = {}
    for axes in args.plan:
        plan = Plan.parse(axes)
        if plan.size == 1:
            raise ConfigError(
                f"--plan {axes}: one rank is what each plan stands beside; cut an axis: pp=2"
            )
        if args.ranks not in (None, [plan.size]):
            raise ConfigError(f"--plan {axes} is for {plan.size} ranks; leave -n out")
        if args.zero and plan.dp < plan.size:
            raise ConfigError(
                f"--plan {axes} with --zero: its peers divide the data axis alone; leave "
                f"--zero out, or the other axes"
            )
        if plan.pp > 1:
            plan = replace(
                plan, schedule=args.schedule or plan.schedule, microbatches=args.microbatches
            )
        plan.require_model(model.config())
        require_memory(model, plan)
        plans[axes] = plan
    if (args.schedule or args.microbatches) and not any(plan.pp > 1 for plan in plans.values()):
        raise ConfigError("--schedule and --microbatches are a pipeline's; add --plan pp=2")
    return plans


def show(result: Result, to: Console) -> None:
    """Print the tables of a result of `measure`."""
    _way(result).show(result, to)


def draw(path: Path, result: Result) -> None:
    """Draw a result of `measure`. Raises: OSError if `path` cannot be written."""
    _way(result).draw(path, result)


class _Way(NamedTuple):
    """The table and the picture of one kind of measurement."""

    show: Callable[[Result, Console], None]
    draw: Callable[[Path, Result], None]


def _way(result: Result) -> _Way:
    if "device" in result:
        return _Way(tables.show_device, plots.draw_device)
    if result["zero"]:
        return _Way(tables.show_stages, plots.draw_stages)
    if result["plans"]:
        return _Way(tables.show_plans, plots.draw_plans)
    return _Way(tables.show_step, plots.draw_steps)
