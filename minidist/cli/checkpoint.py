"""`minidist checkpoint RUN`: what a run's checkpoints hold, every byte verified; status 1 if one is
damaged.

minidist checkpoint runs/one                                      # all checkpoints of the run;
                                                                  # or name one
minidist checkpoint runs/one --export model.safetensors           # the newest one's weights, as
                                                                  # one file
minidist checkpoint runs/one --export gpt2/model.safetensors --names gpt2
minidist checkpoint runs/one --reshard dp=2,tp=2 --out runs/two   # the newest one, as four ranks
                                                                  # would write it
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from minidist.cli.train.run_folder import save_weights
from minidist.console import MOST_RANKS, exactly, fail, plural, size_text, write_json, written
from minidist.errors import CheckpointError, ConfigError
from minidist.files import check_writable
from minidist.nn import GPTConfig
from minidist.nn.published_weights import NAMES, write_published
from minidist.parallel.hybrid.plan import ZERO_STAGES, Plan
from minidist.parallel.state.manifest import (
    MANIFEST,
    checkpoints,
    read_manifest,
    require_told,
    step_folder,
    step_of,
)
from minidist.progress import progress
from minidist.survive.reshard import reshard
from minidist.survive.whole import config_of, read_whole, verify
from minidist.terminal import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist checkpoint` to the parser."""
    parser.add_argument(
        "run", metavar="RUN", help="a run folder of minidist train, or one of its checkpoints"
    )
    parser.add_argument(
        "--export",
        metavar="FILE",
        help="write the weights (of mixed precision the masters), whole, as a safetensors file",
    )
    parser.add_argument(
        "--names",
        choices=NAMES,
        help="of --export: the names of a published model's weights, with config.json beside the "
        "file, if this model computes the same (default: the names here)",
    )
    parser.add_argument(
        "--reshard",
        metavar="dp=N,pp=N,…",
        help="write the checkpoint as the ranks of this plan would",
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=ZERO_STAGES,
        default=0,
        help="of the plan of --reshard: the ZeRO stage (default: 0)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="of --reshard: the new run folder")
    parser.add_argument("--json", metavar="FILE", help="also write what is printed as JSON")


def run(args: argparse.Namespace) -> int:
    """Verify and print; export, reshard.

    Returns: 0 if every byte is as written, else 1. Raises: ConfigError.
    """
    check_writable("--json", args.json)
    check_writable("--export", args.export)
    if args.names and not args.export:
        fail("--names: is for --export FILE; add it, or leave this out")
    plan = _plan(args)
    found = []
    folders = _folders(Path(args.run))
    with progress("reading every byte") as show:
        for number, folder in enumerate(folders):
            show.at(number, len(folders), f"reading {folder}")
            found.append(look_into(folder))
    console = Console(highlight=False, soft_wrap=True)
    for record in found:
        _show(console, record)
    good = not any(record["problems"] for record in found)
    newest = found[-1]
    if (args.export or plan) and newest["problems"]:
        fail(f"{newest['folder']}: is damaged, so nothing is written; name an older checkpoint")
    if args.export:
        with progress(f"writing {args.export}"):
            _export(Path(newest["folder"]), args.export, args.names)
        console.print(f"{args.export}: the weights after step {newest['step']}", markup=False)
    if plan:
        target = step_folder(Path(args.out), newest["step"])
        try:
            with progress(f"writing {target} for {plural(plan.size, 'rank')}"):
                reshard(Path(newest["folder"]), target, plan)
        except CheckpointError as error:
            fail(str(error))
        console.print(
            f"{target}: the same for {plural(plan.size, 'rank')}; minidist train --resume "
            f"{args.out} goes on",
            markup=False,
        )
    if args.json:
        write_json(args.json, {"good": good, "checkpoints": found})
    return 0 if good else 1


def look_into(folder: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint.

    Return its content, and the problems of each shard (none: it is as written).
    """
    record: dict[str, Any] = {"folder": str(folder), "step": step_of(folder), "problems": []}
    try:
        about = read_manifest(folder)["about"]
        require_told(folder, about, "steps_done", "ranks", "plan", "config", "optimizer", "seed")
        GPTConfig.of(about["config"])
        shards = [*verify(folder)]
    except (CheckpointError, ConfigError) as error:
        record["problems"] = [_short(error)]
        return record
    return record | {
        "step": about["steps_done"],
        "ranks": about["ranks"],
        "plan": about["plan"],
        "config": about["config"],
        "optimizer": about["optimizer"],
        "seed": about["seed"],
        "bytes": sum(shard.nbytes for shard in shards),
        "shards": [shard._asdict() for shard in shards],
        "problems": [_short(problem) for shard in shards for problem in shard.problems],
    }


def _short(problem: Exception | str) -> str:
    return (
        str(problem).removesuffix("; take an older checkpoint").removesuffix("; take an older one")
    )


def _folders(place: Path) -> list[Path]:
    """Return the checkpoints that `place` names, the oldest first.

    Raises: ConfigError if there is none.
    """
    if (place / MANIFEST).is_file() or step_of(place) is not None:
        return [place]
    try:
        there = {step_of(folder): folder for folder in checkpoints(place)}
        torn = [folder for folder in place.glob("step-*") if step_of(folder) not in {None, *there}]
    except OSError as error:
        fail(f"{place}: {error.strerror}")
    found = sorted([*there.values(), *torn], key=lambda folder: step_of(folder) or 0)
    if not found:
        fail(f"{place}: no checkpoint is here; minidist train --save-every K writes some")
    return found


def _plan(args: argparse.Namespace) -> Plan | None:
    if args.reshard is None:
        if args.out or args.zero:
            fail(
                f"{'--out' if args.out else '--zero'}: is for --reshard; add it, or leave this out"
            )
        return None
    if args.out is None:
        fail("--reshard: name a new run folder with --out")
    if Path(args.out).exists() and checkpoints(Path(args.out)):
        fail(f"--out {args.out}: holds checkpoints; name another folder")
    plan = Plan(**{**asdict(Plan.parse(args.reshard)), "zero": args.zero})
    if plan.size > MOST_RANKS:
        fail(
            f"--reshard: {plan.size:,} ranks are more than {MOST_RANKS:,}, the most that this "
            "command plays here"
        )
    return plan


def _export(folder: Path, file: str, names: str | None) -> None:
    try:
        weights = read_whole(folder)
    except CheckpointError as error:
        fail(str(error))
    if names is not None:
        config = config_of(folder, read_manifest(folder)["about"], map(np.size, weights.values()))
        try:
            write_published(file, names, config, weights)
        except OSError as error:
            fail(f"--export {file}: {error.strerror or error}")
        except ConfigError as error:
            fail(f"--names {names}: {error}")
        return
    with written("--export", file) as draft:
        save_weights(draft, weights, read_manifest(folder)["about"]["config"])


def _show(console: Console, record: dict[str, Any]) -> None:
    """Print a line on a checkpoint, one row per shard, and its problems."""
    if "shards" in record:
        plan = record["plan"]
        config = record["config"]
        cut = (
            ",".join(
                f"{axis}={plan[axis]}" for axis in ("dp", "pp", "ep", "cp", "tp") if plan[axis] > 1
            )
            or "dp=1"
        )
        zero = f", ZeRO-{plan['zero']}" if plan["zero"] else ""
        console.print(
            f"{record['folder']}: step {record['step']}, {plural(record['ranks'], 'rank')} "
            f"({cut}{zero}), {plural(config['layers'], 'layer')} of width {config['width']}, "
            f"{record['optimizer']}, {size_text(record['bytes'])}",
            markup=False,
        )
        table = Table(
            "shard",
            *(Column(name, justify="right") for name in ("arrays", "bytes")),
            "",
            header_style="bold",
        )
        for shard in record["shards"]:
            table.add_row(
                shard["file"],
                str(shard["arrays"]),
                exactly(shard["nbytes"]),
                "[bold red]damaged[/bold red]" if shard["problems"] else "every byte as written",
            )
        console.print(table)
    for problem in record["problems"]:
        console.print(f"[bold red]damaged[/bold red]: {escape(problem)}")
