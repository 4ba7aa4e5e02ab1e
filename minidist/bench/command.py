"""`minidist bench`: time collectives and training steps beside their peers, all contenders in one run.

    minidist bench all-reduce --sizes 1KiB:64MiB -n 2,4     our transports beside gloo and MPI; and three verbs more
    minidist bench step                                     our training step beside PyTorch eager
    minidist bench step --zero 0,1,2,3 -n 2,4               each ZeRO stage beside what PyTorch has for it
    minidist bench step --plan pp=2 --plan dp=2,tp=2        each plan beside what PyTorch has for it
    minidist bench step --model gpt2-124m --device cuda --precision bf16       on one GPU, beside PyTorch and a roofline
    minidist bench overlap                                  an all-reduce hidden behind matrix products
    minidist bench overlap-step --strategy zero2,zero3      a training step's communication behind its computation
    minidist bench calibrate                                what messages cost on this machine; auto goes by it
    minidist bench kernels                                  each rung of each kernel beside PyTorch; or --count

A peer that is not installed is left out, and the table says so. Contenders take turns; medians over rounds are shown.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status

from minidist.bench import (
    calibrate,
    collectives,
    kernels_tables,
    overlap,
    overlap_step,
    step,
    step_device,
    step_tables,
)
from minidist.bench import (
    plan as bench_plan,
)
from minidist.bench import (
    tables as bench_tables,
)
from minidist.bench.arguments import add_arguments
from minidist.comm.collectives.select import choose
from minidist.comm.cost.link_model import Profile, profile_path, save_profile
from minidist.console import meant, write_json
from minidist.errors import ConfigError
from minidist.launch import detect, init
from minidist.launch.transports import current_name
from minidist.observe import bench_plots, kernel_plots, step_plots
from minidist.observe.machine import machine
from minidist.parallel.hybrid.plan import Plan

__all__ = ["add_arguments", "run"]

Result = dict[str, Any]


class Progress:
    """What stands on a terminal while it is measured: called, one line that changes; and lines that stay."""

    def __init__(self, console: Console, status: Status) -> None:
        self.console, self.status = console, status

    def __call__(self, text: str) -> None:
        self.status.update(text)

    def keep(self, line: str) -> None:
        """Print what is known already, for who breaks off."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Bench(NamedTuple):
    """One WHAT of `minidist bench`."""

    measure: Callable[[argparse.Namespace, Progress], Result | None]
    show: Callable[[Result, Console], None]
    draw: Callable[[Path, Result], None]


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    console = Console(width=None if sys.stdout.isatty() else 200)  # a table in a log or a file is not folded
    bench = _BENCHES[args.what]
    with console.status("starting the ranks") as status:
        result = bench.measure(args, Progress(console, status))
    if result is None:          # another rank has it
        return 0
    result["machine"] = machine()
    bench.show(result, console)
    if args.figure:
        try:
            bench.draw(Path(args.figure), result)
        except OSError as error:
            raise ConfigError(f"bench --figure {args.figure}: {error.strerror}") from error
    if args.json:
        write_json(args.json, result)
    return 0


# ---------------------------------------------------------------- collectives


def _collective(args: argparse.Namespace, progress: Progress) -> Result:
    verb = collectives.VERBS[args.what]
    contenders = _chosen(verb, args.only)
    if min(args.sizes) < 4 or any(size % 4 for size in args.sizes):
        raise ConfigError(f"bench {verb.title}: sizes are whole float32 numbers; choose multiples of 4 bytes")
    if min(args.ranks) < 2:
        raise ConfigError(f"bench {verb.title}: one rank sends nothing; choose -n of at least 2")
    if not all(verb.block(min(args.sizes), ranks) for ranks in args.ranks):
        raise ConfigError(f"bench {verb.title}: {min(args.sizes)} B are not one float32 number for each of "
                          f"{max(args.ranks)} ranks; choose --sizes from {4 * max(args.ranks)} up")
    tables, left_out = {}, _missing(verb, contenders, args.only)
    for count in args.ranks:
        tables[count], without = collectives.measure_all(verb, args.sizes, count, args.rounds, contenders,
                                                               args.only is not None, progress)
        left_out += [line for line in without if line not in left_out]
    return {"what": verb.title, "seconds": tables, "contenders": contenders, "sizes": args.sizes, "left_out": left_out}


def _chosen(verb: collectives.Verb, only: str | None) -> list[str]:
    """The contenders asked for, or all that are here."""
    here = collectives.contenders_here(verb)
    if only is None:
        return here
    chosen = [current_name(name) for name in only.split(",")]
    for name in chosen:
        base, _, algorithm = name.partition(":")
        if base not in (*collectives.OURS, *verb.peers):
            raise ConfigError(f"bench {verb.title}: no contender {name!r}; choose from {', '.join(here)}")
        if base not in here:
            raise ConfigError(f"bench {verb.title}: {name} is not installed here; {_install(base)}")
        if algorithm and base in verb.peers:
            raise ConfigError(f"bench {verb.title}: {name}: a peer chooses its own algorithm; write {base}")
        choose(verb.name, algorithm or "auto", 0, 2, board=True)  # refuses a name that the verb does not take
    return chosen


def _missing(verb: collectives.Verb, contenders: list[str], only: str | None) -> list[str]:
    """A line for each peer that is not installed, where all that are here were to be measured."""
    return [f"{peer} was left out: {_install(peer)}" for peer in verb.peers if only is None and peer not in contenders]


def _install(contender: str) -> str:
    return bench_tables.INSTALL_GLOO if contender == collectives.GLOO else "pip install mpich mpi4py"


def _draw_collective(path: Path, result: Result) -> None:
    verb = collectives.VERBS[result["what"]]
    bench_plots.draw_bus_bandwidth(path, f"{verb.title}, {verb.about}", result["seconds"], verb.bus_bandwidth)


# ---------------------------------------------------------------- step


def _step(args: argparse.Namespace, progress: Progress) -> Result:
    named = step.MODELS[args.model] if args.model else step.Model()
    model = step.Model(**{name: getattr(args, name) or value for name, value in vars(named).items()})
    model.config()  # a model that cannot be is refused before anything starts
    if args.model or args.device or args.precision or args.graph:
        return step_device.measure_asked(args, model, progress)
    plans = _plans(args, model)
    transport = "shm" if args.transport == "auto" else current_name(args.transport)     # the ranks are on this host
    result = {"what": "step", "model": vars(model), "transport": transport, "zero": args.zero, "plans": [*plans],
              "left_out": []}
    rows: list[Any] = []
    if plans and not args.zero:
        for axes, plan in plans.items():
            more, without = bench_plan.measure_plan(axes, plan, model, args.rounds, args.steps, transport,
                                                    progress)
            rows, result["left_out"] = rows + more, result["left_out"] + without
            if len(plans) > 1:
                progress.keep(bench_tables.plan_line([vars(row) for row in more]))
    elif args.zero:
        ranks = [plan.size for plan in plans.values()] or args.ranks or [2, 4]
        if min(ranks) < 2:
            raise ConfigError("bench step --zero: one rank divides nothing; choose -n of at least 2")
        rows, result["left_out"] = step.measure_stages(model, ranks, args.zero, args.rounds, args.steps,
                                                       transport, progress)
    else:
        rows = step.measure_all(model, args.ranks or [1, 2], args.rounds, args.steps, transport, progress)
    return {**result, "rows": [vars(row) for row in rows]}


def _plans(args: argparse.Namespace, model: step.Model) -> dict[str, Plan]:
    """The plans asked for, by their axes, as far as they can be measured with this model."""
    plans = {}
    for axes in args.plan:
        plan = Plan.parse(axes)
        if plan.size == 1:
            raise ConfigError(f"bench step --plan {axes}: one rank is what each plan stands beside; cut an axis: pp=2")
        if args.ranks not in (None, [plan.size]):
            raise ConfigError(f"bench step: --plan {axes} is for {plan.size} ranks; leave -n out")
        if args.zero and plan.dp < plan.size:
            raise ConfigError(f"bench step: --plan {axes} with --zero: its peers divide the data axis alone; leave "
                              f"--zero out, or the other axes")
        if plan.pp > 1:
            plan = replace(plan, schedule=args.schedule or plan.schedule, microbatches=args.microbatches)
        plan.require_model(model.config())
        plans[axes] = plan
    if (args.schedule or args.microbatches) and not any(plan.pp > 1 for plan in plans.values()):
        raise ConfigError("bench step: --schedule and --microbatches are a pipeline's; add --plan pp=2")
    return plans


def _of_step(result: Result, plans: Any, stages: Any, plain: Any, device: Any) -> Any:
    """What fits the kind of step that was measured."""
    return device if "device" in result else stages if result["zero"] else plans if result["plans"] else plain


def _show_step(result: Result, console: Console) -> None:
    _of_step(result, bench_tables.show_plans, bench_tables.show_stages, bench_tables.show_step,
             step_tables.show_device)(result, console)


def _draw_step(path: Path, result: Result) -> None:
    _of_step(result, bench_plots.draw_plans, bench_plots.draw_stages, bench_plots.draw_steps,
             step_plots.draw_device)(path, result if "device" in result else result["rows"])


# ---------------------------------------------------------------- overlap


def _overlap(args: argparse.Namespace, progress: Progress) -> Result:
    contenders = _known("overlap", args.only, overlap.CONTENDERS, overlap.contenders_here())
    if args.ranks < 2 or args.bytes < 4 or args.bytes % 4 or not args.bandwidth:
        raise ConfigError("bench overlap: choose -n of at least 2, --bytes of whole float32 numbers, a --bandwidth")
    rows = overlap.measure_all(contenders, args.ranks, args.bytes, args.rounds, args.alpha, 1 / args.bandwidth,
                                     progress)
    return {"what": "overlap", "ranks": args.ranks, "nbytes": args.bytes, "alpha": args.alpha,
            "bandwidth": args.bandwidth, "rows": [row.as_json() for row in rows]}


# ---------------------------------------------------------------- overlap-step


def _overlap_step(args: argparse.Namespace, progress: Progress) -> Result:
    known, links = overlap_step.STRATEGIES, overlap_step.LINKS
    chosen = overlap_step.contenders(_known("overlap-step", args.strategy, known, list(known)),
                                           _known("overlap-step", args.only, links, list(links)))
    if args.ranks < 2 or not args.bandwidth or not args.bucket:
        raise ConfigError("bench overlap-step: choose -n of at least 2, a --bandwidth and a --bucket above 0")
    model = step.Model(**{name: getattr(args, name) for name in vars(step.Model())})
    model.config()
    rows = overlap_step.measure_all(chosen, model, args.ranks, args.rounds, args.steps, args.bucket, args.alpha,
                                          1 / args.bandwidth, progress)
    return {"what": "overlap-step", "ranks": args.ranks, "model": vars(model), "bucket": args.bucket,
            "alpha": args.alpha, "bandwidth": args.bandwidth, "rows": [asdict(row) for row in rows]}


# ---------------------------------------------------------------- calibrate


def _calibrate(args: argparse.Namespace, progress: Progress) -> Result | None:
    """In a job that a launcher started, its own link; rank 0 has the result."""
    links = _known("calibrate", args.only, calibrate.LINKS, calibrate.links_here())
    if min(args.ranks) < 2 or len(args.sizes) < 2 or min(args.sizes) < 4:
        raise ConfigError("bench calibrate: choose -n of at least 2, and two --sizes or more, of at least 4 bytes")
    out = Path(args.out) if args.out else profile_path()
    if detect().alone:
        fitted = calibrate.measure_all(links, args.ranks, args.sizes, args.rounds, progress)
    else:
        world = init()
        fitted = calibrate.measure_job(world, args.sizes, args.rounds, progress)
        if world.rank:
            return None
    profile = Profile([each.cost for each in fitted], machine()).beside(out)
    try:
        save_profile(profile, out)
    except OSError as error:
        raise ConfigError(f"bench calibrate --out {out}: {error.strerror}") from error
    return {"what": "calibrate", "out": str(out), "links": [asdict(each.cost) for each in fitted],
            "samples": [[[*sample.work, sample.seconds] for sample in each.samples] for each in fitted]}


def _known(what: str, only: str | None, known: tuple[str, ...], here: list[str]) -> list[str]:
    """The contenders asked for, or all that are here."""
    chosen = here if only is None else [current_name(name) for name in only.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"bench {what}: no {name!r}{meant(name, known)}; choose from {', '.join(here)}")
        if name not in here:
            raise ConfigError(f"bench {what}: {name} is not installed here; {_install(name)}")
    return chosen


# ---------------------------------------------------------------- kernels


def _kernels(args: argparse.Namespace, progress: Progress) -> Result:
    """Timed, or counted. The kernels are imported here: nobody else needs them."""
    if args.count:
        from minidist.bench.kernels_count import counted
        return counted(args.names, args.seed, progress)
    from minidist.bench.kernels import measured
    return measured(args.names, args.peers, args.rounds, args.seed, progress)


_BENCHES = {
    **dict.fromkeys(collectives.VERBS, Bench(_collective, bench_tables.show_collective, _draw_collective)),
    "overlap": Bench(_overlap, bench_tables.show_overlap, bench_plots.draw_overlap),
    "overlap-step": Bench(_overlap_step, bench_tables.show_overlap_step, bench_plots.draw_overlap_step),
    "calibrate": Bench(_calibrate, bench_tables.show_calibration, bench_plots.draw_calibration),
    "step": Bench(_step, _show_step, _draw_step),
    "kernels": Bench(_kernels, kernels_tables.show_kernels, kernel_plots.draw_kernels),
}
