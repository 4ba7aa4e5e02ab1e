"""`minidist bench`: time collectives and training steps, and compare them with other libraries in
one run.

    minidist bench all-reduce --sizes 1KiB:64MiB -n 2,4     our transports, gloo and MPI; also for
                                                            three other verbs
    minidist bench step                                     our training step and PyTorch eager's
    minidist bench step --zero 0,1,2,3 -n 2,4               each ZeRO stage and PyTorch's
                                                            counterpart
    minidist bench step --plan pp=2 --plan dp=2,tp=2        each plan and PyTorch's counterpart
    minidist bench step --model gpt2-124m --device cuda --precision bf16       on one GPU, with
    PyTorch and a roofline minidist bench overlap                                  an all-reduce
                                                            hidden behind matrix products
    minidist bench overlap-step --strategy zero2,zero3      a training step's communication hidden
                                                            behind its computation
    minidist bench overlap-step --why --what-if ahead=2     exposed communication and its causes; a
                                                            change, predicted, then run
    minidist bench compress                                 time to a loss, by compression scheme
                                                            and bandwidth
    minidist bench compress --advise --check                when not to compress, predicted, then
                                                            measured
    minidist bench save                                     our checkpoints and PyTorch's, blocking
                                                            and in the background
    minidist bench calibrate                                cost of messages and computation on this
                                                            machine
    minidist bench kernels                                  each rung of each kernel and PyTorch;
                                                            or --count

A peer that is not installed is left out, and the table says so. Contenders take turns; medians over
rounds are shown.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from minidist.bench import (
    calibrate,
    collectives,
    computation,
    overlap,
    overlap_step,
    plots,
    save,
    tables,
    what_if,
)
from minidist.bench.arguments import add_arguments
from minidist.bench.call_cost import with_steps
from minidist.bench.compress import command as compress
from minidist.bench.compress import plots as compress_plots
from minidist.bench.compress import tables as compress_tables
from minidist.bench.kernels.plots import draw_kernels
from minidist.bench.kernels.tables import show_kernels
from minidist.bench.step import command as step
from minidist.bench.step.ranks import Model
from minidist.comm.collectives.select import choose
from minidist.comm.cost.link_model import ComputationCost, Profile, profile_path, save_profile
from minidist.console import meant, require_memory, size_text, write_json, written
from minidist.errors import ConfigError
from minidist.files import DISK_FAILED, check_writable
from minidist.launch import detect, init
from minidist.launch.transports import current_name
from minidist.observe.machine import machine
from minidist.parallel.hybrid.plan import Plan
from minidist.progress import Progress, progress

__all__ = ["add_arguments", "profile_path", "run", "show_result"]

Result = dict[str, Any]

COMPUTATION = "computation"  # a name for --only, next to the links
MOST_SECONDS = 60  # largest seconds of a message over a delayed link


class Bench(NamedTuple):
    """The functions of one WHAT of `minidist bench`."""

    measure: Callable[[argparse.Namespace, Progress], Result | None]
    show: Callable[[Result, Console], None]
    draw: Callable[[Path, Result], None]


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the files that the options ask for.

    Returns: the exit status: 0; with --hold 1 unless every bound is held.
    Raises:  ConfigError for wrong options or a file that cannot be written; LaunchError if our
             ranks do not start.
    """
    for option in ("json", "figure"):
        check_writable(f"--{option}", getattr(args, option))
    # do not wrap a table in a log or a file
    console = Console(width=None if sys.stdout.isatty() else 200)
    bench = _BENCHES[args.what]
    with progress("starting the ranks") as show:
        result = bench.measure(args, show)
    if result is None:  # rank 0 has it
        return 0
    result["machine"] = machine()
    if args.json:
        write_json(args.json, result)  # first, so that an error in the table does not lose it
    bench.show(result, console)
    if args.figure:
        with written("--figure", args.figure) as draft:
            bench.draw(draft, result)
    return int(
        getattr(args, "hold", False) and not all(bound["held"] for bound in result["bounds"])
    )


LATER_KEYS: Result = {"zero": None, "plans": [], "left_out": []}
"""What the files of older versions mean where they lack a key."""


def show_result(result: Result, console: Console) -> None:
    """Print the table of a result. Args: result: as measured, or as read from the file of --json."""
    bench = _BENCHES[result["what"]]
    bench.show({**LATER_KEYS, **_with_numbers(result)}, console)


def _with_numbers(value: Any) -> Any:
    """Return what was read from JSON, where keys that are numbers have become texts."""
    if isinstance(value, dict):
        return {
            int(key) if isinstance(key, str) and key.isdecimal() else key: _with_numbers(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    return value


# ---------------------------------------------------------------- collectives


def _collective(args: argparse.Namespace, progress: Progress) -> Result:
    verb = collectives.VERBS[args.what]
    contenders = _chosen(verb, args.only)
    wrong = [size for size in args.sizes if size < 4 or size % 4]
    if wrong:
        raise ConfigError(
            f"--sizes: {wrong[0]} bytes; a size is one float32 number or more: a multiple of 4 "
            "bytes"
        )
    if min(args.ranks) < 2:
        raise ConfigError("one rank sends nothing; choose -n of at least 2")
    if not all(verb.block(min(args.sizes), ranks) for ranks in args.ranks):
        raise ConfigError(
            f"{min(args.sizes)} B are not one float32 number for each of {max(args.ranks)} "
            f"ranks; choose --sizes from {4 * max(args.ranks)} up"
        )
    require_memory(
        f"{verb.title} of {size_text(max(args.sizes))} on {max(args.ranks)} ranks",
        max(args.sizes) * max(args.ranks),
        processes=max(args.ranks),
    )
    seconds = {}
    left_out = _missing(verb, contenders, args.only)
    for count in args.ranks:
        seconds[count], without = collectives.measure_all(
            verb, args.sizes, count, args.rounds, contenders, args.only is not None, progress
        )
        left_out += [line for line in without if line not in left_out]
    return {
        "what": verb.title,
        "seconds": seconds,
        "contenders": contenders,
        "sizes": args.sizes,
        "left_out": left_out,
    }


def _chosen(verb: collectives.Verb, only: str | None) -> list[str]:
    """Return the contenders that --only names, or all that this machine can run."""
    here = collectives.contenders_here(verb)
    if only is None:
        return here
    chosen = [current_name(name) for name in only.split(",")]
    for name in chosen:
        base, _, algorithm = name.partition(":")
        if base not in (*collectives.OURS, *verb.peers):
            raise ConfigError(f"no contender {name!r}; choose from {', '.join(here)}")
        if base not in here:
            raise ConfigError(f"{name} is not installed here; {_install(base)}")
        if algorithm and base in verb.peers:
            raise ConfigError(f"{name}: a peer chooses its own algorithm; write {base}")
        # raises for an algorithm that the verb does not have
        choose(verb.name, algorithm or "auto", 0, 2, board=True)
    return chosen


def _missing(verb: collectives.Verb, contenders: list[str], only: str | None) -> list[str]:
    """Return a line for each peer that is not installed, unless --only chose the contenders."""
    return [
        f"{peer} was left out: {_install(peer)}"
        for peer in verb.peers
        if only is None and peer not in contenders
    ]


def _install(contender: str) -> str:
    if contender == collectives.NCCL:
        return "it needs a GPU, and pip install 'minidist[cuda13]'"
    return tables.INSTALL_GLOO if contender == collectives.GLOO else "pip install mpich mpi4py"


def _draw_collective(path: Path, result: Result) -> None:
    verb = collectives.VERBS[result["what"]]
    plots.draw_bus_bandwidth(
        path, f"{verb.title}, {verb.about}", result["seconds"], verb.bus_bandwidth
    )


# ---------------------------------------------------------------- overlap


def _overlap(args: argparse.Namespace, progress: Progress) -> Result:
    contenders = _known(args.only, overlap.CONTENDERS, overlap.contenders_here())
    if args.ranks < 2 or args.bytes < 4 or args.bytes % 4 or not args.bandwidth:
        raise ConfigError(
            "choose -n of at least 2, --bytes of whole float32 numbers, a --bandwidth"
        )
    require_memory(
        f"{size_text(args.bytes)} on {args.ranks} ranks",
        args.bytes * args.ranks,
        processes=args.ranks,
    )
    _require_speed(args.bytes, args)
    rows = overlap.measure_all(
        contenders, args.ranks, args.bytes, args.rounds, args.alpha, 1 / args.bandwidth, progress
    )
    return {
        "what": "overlap",
        "ranks": args.ranks,
        "nbytes": args.bytes,
        "alpha": args.alpha,
        "bandwidth": args.bandwidth,
        "rows": [row.as_json() for row in rows],
    }


def _require_speed(nbytes: int, args: argparse.Namespace) -> None:
    """Raise ConfigError if the delayed links need more than MOST_SECONDS for nbytes."""
    seconds = args.alpha + nbytes / args.bandwidth
    if seconds > MOST_SECONDS:
        raise ConfigError(
            f"{size_text(nbytes)} take {seconds:,.0f} s over links with --alpha {args.alpha:g} and "
            f"--bandwidth {args.bandwidth}; choose links that take {MOST_SECONDS} s at the most"
        )


# ---------------------------------------------------------------- overlap-step


def _overlap_step(args: argparse.Namespace, progress: Progress) -> Result:
    known = overlap_step.STRATEGIES
    links = overlap_step.LINKS
    chosen = overlap_step.contenders(
        _known(args.strategy, known, list(known)), _known(args.only, links, list(links))
    )
    if args.ranks < 2 or not args.bandwidth or not args.bucket:
        raise ConfigError("choose -n of at least 2, a --bandwidth and a --bucket above 0")
    model = Model.of(args)
    if args.what_if and not args.why:
        raise ConfigError("--what-if: predicts from a step that --why records; add --why")
    step.require_memory(model, Plan(dp=args.ranks, zero=3))
    _require_speed(4 * model.config().numbers, args)
    rows = overlap_step.measure_all(
        chosen,
        model,
        args.ranks,
        args.rounds,
        args.steps,
        args.bucket,
        args.alpha,
        1 / args.bandwidth,
        progress,
        explain=args.why,
    )
    if args.what_if:
        rows = what_if.follow(rows, chosen, args, progress)
    return {
        "what": "overlap-step",
        "ranks": args.ranks,
        "model": vars(model),
        "bucket": args.bucket,
        "alpha": args.alpha,
        "bandwidth": args.bandwidth,
        "rows": [asdict(row) for row in rows],
    }


# ---------------------------------------------------------------- save


def _save(args: argparse.Namespace, progress: Progress) -> Result:
    folder = Path(args.folder) if args.folder else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: there is no such folder")
    model = Model.of(args)
    step.require_memory(model, Plan(dp=args.ranks, zero=1))
    return {
        "what": "save",
        "ranks": args.ranks,
        "model": vars(model),
        "every": args.every,
        "left_out": []
        if save.PEER in save.contenders_here()
        else [f"{save.PEER} was left out: {tables.INSTALL_GLOO}"],
        **save.measure_all(
            model, args.ranks, args.rounds, args.every, args.saves, folder, progress
        ),
    }


# ---------------------------------------------------------------- calibrate


def _calibrate(args: argparse.Namespace, progress: Progress) -> Result | None:
    """Calibrate the links of this host; in a job started by a launcher, the job's own link (returns
    None on all ranks except rank 0)."""
    chosen = _known(
        args.only, (*calibrate.LINKS, COMPUTATION), [*calibrate.links_here(), COMPUTATION]
    )
    links = [name for name in chosen if name != COMPUTATION]
    if args.figure and not links:
        raise ConfigError("--figure draws links, and --only names none; leave one of the two out")
    if min(args.ranks) < 2 or len(args.sizes) < 2 or min(args.sizes) < 4:
        raise ConfigError("choose -n of at least 2, and two --sizes or more, of at least 4 bytes")
    require_memory(
        f"a message of {size_text(max(args.sizes))} on {max(args.ranks)} ranks",
        max(args.sizes) * max(args.ranks),
        processes=max(args.ranks),
    )
    out = Path(args.out) if args.out else profile_path()
    check_writable("--out", args.out)
    costs: list[ComputationCost] = []
    if detect().alone:
        fitted = calibrate.measure_all(links, args.ranks, args.sizes, args.rounds, progress)
        if COMPUTATION in chosen:
            costs = computation.measure_all(args.ranks, args.rounds, progress)
    else:
        world = init()
        fitted = calibrate.measure_job(world, args.sizes, args.rounds, progress)
        if world.rank:
            return None
    measured = Profile([each.cost for each in fitted], machine(), tuple(costs))
    known = replace(measured, computation=measured.beside(out).computation)
    measured = replace(
        measured,
        links=[
            with_steps(each.cost, each.steps, known) if each.steps else each.cost for each in fitted
        ],
    )
    try:
        save_profile(measured.beside(out), out)
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return {
        "what": "calibrate",
        "out": str(out),
        "misses": measured.misses(),
        "links": [asdict(cost) for cost in measured.links],
        "samples": [[[*sample.work, sample.seconds] for sample in each.samples] for each in fitted],
        "computation": [asdict(cost) for cost in costs],
    }


def _known(only: str | None, known: tuple[str, ...], here: list[str]) -> list[str]:
    """Return the contenders that --only names, or all that this machine can run."""
    chosen = here if only is None else [current_name(name) for name in only.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no {name!r}{meant(name, known)}; choose from {', '.join(here)}")
        if name not in here:
            raise ConfigError(f"{name} is not installed here; {_install(name)}")
    return chosen


# ---------------------------------------------------------------- kernels


def _kernels(args: argparse.Namespace, progress: Progress) -> Result:
    """Return the times or counts of the kernels; the kernels are imported only here."""
    if args.count:
        from minidist.bench.kernels.counting import counted

        return counted(args.names, args.seed, progress)
    from minidist.bench.kernels.timing import measured

    return measured(args.names, args.peers, args.rounds, args.seed, progress)


_BENCHES = {
    **dict.fromkeys(
        collectives.VERBS, Bench(_collective, tables.show_collective, _draw_collective)
    ),
    "overlap": Bench(_overlap, tables.show_overlap, plots.draw_overlap),
    "overlap-step": Bench(_overlap_step, tables.show_overlap_step, plots.draw_overlap_step),
    "compress": Bench(compress.measure, compress_tables.show, compress_plots.draw),
    "save": Bench(_save, tables.show_save, plots.draw_save),
    "calibrate": Bench(_calibrate, tables.show_calibration, plots.draw_calibration),
    "step": Bench(step.measure, step.show, step.draw),
    "kernels": Bench(_kernels, show_kernels, draw_kernels),
}
