"""`minidist storm -n 8 --minutes 5 --every 10`: break an elastic training on purpose, and see what
becomes of it.

    minidist storm -n 4 --minutes 1 --every 5                  # all kinds of faults in turn
    minidist storm -n 4 --kinds kill --spares 1 -- --zero 1    # options of `minidist train` follow --
    minidist storm --minutes 30 --no-compare --out DIR         # make the undisturbed run later:
    minidist storm --compare DIR

Two short undisturbed runs are made first, one without and one with checkpoints. From the speed of
the second one the storm computes a number of steps that lasts for the minutes. A last run makes the
same steps undisturbed: if the plan did not change, its bits must be the same. The storm's speed is
reported relative to that run, and relative to its own speed between the faults.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from minidist.comm.health.failure import say_line
from minidist.console import (
    MOST_RANKS,
    fail,
    picture,
    plural,
    positive_number,
    rank_count,
    seed_number,
    shown,
    whole_number,
    write_json,
)
from minidist.errors import ConfigError
from minidist.files import check_writable, whole
from minidist.launch.own_python import module_command
from minidist.observe.machine import machine
from minidist.observe.storm_figure import draw_storm
from minidist.progress import Progress, progress
from minidist.reading import Count, Finite, Positive, Rank, Seconds, read_json
from minidist.survive.faults import FAULTS, WITHOUT_DISK, disk_module
from minidist.survive.storm import LOG, Storm, events
from minidist.survive.storm_report import spans, summary
from minidist.terminal import Console

TINY = ("--layers=2", "--width=64", "--heads=4", "--context=64", "--batch=16")
FIRST_STEPS = 60  # steps of the first undisturbed run
# seconds that a training may take to end after the storm: these, and for each second of it
LATEST = 120.0, 20.0
RESTARTS = 10**6
SAVE_SECONDS = 0.25  # approximate time between two checkpoints
PATIENCE = 0.2  # train's option; short, since only the storm stops ranks here
WAIT = 5.0  # train's --elastic-wait, if there are spares: the plan should not change


class _StormArguments(msgspec.Struct):
    """Options of a storm, as storm.json keeps them."""

    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    minutes: Positive
    every: Positive
    faults: str
    elastic: str | None
    spares: Rank
    transport: Literal["auto", "tcp", "shm"]
    seed: int
    options: list[str]


class _StormFault(msgspec.Struct):
    kind: str
    recovered: bool
    noticed: bool
    seconds: Seconds | None
    full_seconds: Seconds | None
    again: Count
    rank: int | str = "-"


class _StormFigures(msgspec.Struct):
    """The fields of storm.json."""

    arguments: _StormArguments
    exit_status: int
    steps: Count
    save_every: Count
    faults: Count
    recovered: Count
    happened: list[_StormFault]
    sizes: list[Rank]
    seconds: dict[str, list[Seconds]]
    full_seconds: dict[str, list[Seconds]]
    work_seconds: Positive | None
    kept: Finite | None
    participation: Finite | None
    calm_rate: Finite | None = None
    rate: Finite | None = None


class _StormMetrics(msgspec.Struct):
    losses: list[float]
    weights_sha256: str
    validation_loss: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist storm`; words after -- are for `minidist train`."""
    add = parser.add_argument
    add(
        "-n",
        "--ranks",
        type=rank_count,
        default=4,
        metavar="N",
        help="ranks of the training (default: 4)",
    )
    add(
        "--minutes",
        type=positive_number,
        default=1.0,
        metavar="M",
        help="length of the storm (default: 1)",
    )
    add(
        "--every",
        type=positive_number,
        default=10.0,
        metavar="SECONDS",
        help="from a fault to the next, on average (default: 10)",
    )
    add(
        "--kinds",
        "--faults",
        dest="faults",
        metavar="KIND,…",
        help=f"of {', '.join(FAULTS)} (default: all, in turn)",
    )
    add("--elastic", metavar="LEAST:MOST", help="as of train (default: half the ranks to all)")
    add(
        "--spares",
        type=whole_number(0, 1024),
        default=1,
        metavar="K",
        help="as of train (default: 1)",
    )
    add(
        "--transport",
        choices=("auto", "tcp", "shm"),
        default="tcp",
        help="as of train (default: tcp, whose connections can be cut)",
    )
    add("--seed", type=seed_number, default=0, metavar="S", help="of the faults (default: 0)")
    add("--no-compare", action="store_true", help="leave out the undisturbed run of the same steps")
    add(
        "--compare",
        metavar="DIR",
        help="no storm: make the undisturbed run for the one that --out DIR has kept, and "
        "compare the two; all other options but --json are that storm's",
    )
    add("--out", metavar="DIR", help="keep the run folder, with storm.png and storm.json, here")
    add(
        "--figure",
        type=picture,
        metavar="FILE",
        help="draw the storm here: which ranks took part, and when what broke",
    )
    add("--json", metavar="FILE", help="also write the figures here")
    add("options", nargs="*", metavar="-- OPTION", help="of `minidist train`")


def run(args: argparse.Namespace) -> int:
    """Run a storm, compare it with an undisturbed run, print the figures.

    Returns: 0 if the training ended well and survived every fault, with the same bits if the plan
             did not change; else the training's exit status, or 1. Raises: ConfigError.
    """
    if args.compare is not None:
        return _compare_later(args)
    named = {word.partition("=")[0] for word in args.options}
    if "--hosts" in named:
        fail("--hosts: a storm kills only processes of this host; leave it out")
    for option in ("--asynchronous", "--local-steps"):
        if option in named:
            fail(
                f"{option}: a storm breaks an elastic job, and such a job has no {option}; leave "
                "it out"
            )
    kinds = [*FAULTS] if args.faults is None else args.faults.split(",")
    if wrong := [kind for kind in kinds if kind not in FAULTS]:
        fail(f"--kinds: {shown(wrong[0])} is none of {', '.join(FAULTS)}")
    for option in ("json", "figure"):
        check_writable(f"--{option}", getattr(args, option))
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="minidist-storm-") as scratch:
        trainings = Trainings(args, kinds, Path(scratch))
        with (
            progress(f"{FIRST_STEPS} steps without a fault, to know how long one takes") as show,
            show.stderr() as trainings.stderr,
        ):
            status = trainings.undisturbed("first", FIRST_STEPS)
            if status:
                return status
            figures = _weather(trainings, args, kinds, show)
            _write(trainings, figures)
            if figures["exit_status"] == 0 and not args.no_compare:
                show(f"the same {figures['steps']:,} steps without a fault, to compare")
                figures["calm_status"] = _compare(trainings, figures)
                _write(trainings, figures)
        for picture, ours in [
            *([(trainings.out / "storm.png", True)] if args.out else []),
            *([(args.figure, False)] if args.figure else []),
        ]:
            with whole(picture, member=ours) as draft:
                draw_storm(
                    draft, trainings.told, trainings.works, figures["happened"], ranks=args.ranks
                )
    return _conclude(figures, args)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """In the block, SIGTERM ends the storm as Ctrl-C does; its training ends with it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare_later(args: argparse.Namespace) -> int:
    """Do --compare. Returns: as run(). Raises: ConfigError if the folder has no storm that has
    ended."""
    check_writable("--json", args.json)
    file = Path(args.compare) / "storm.json"
    try:
        figures = read_json(file, _StormFigures, member=True)
        kept = figures["arguments"]
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        fail(
            f"--compare {shown(args.compare)[1:-1]}: no figures of a storm are there "
            f"(storm.json: {why}); run one with --out"
        )
    if figures["exit_status"]:
        fail(
            f"--compare {shown(args.compare)[1:-1]}: that storm's training ended with status "
            f"{figures['exit_status']}, so there is nothing to compare"
        )
    vars(args).update(
        {name: kept[name] for name in _StormArguments.__struct_fields__}, out=args.compare
    )
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="minidist-storm-") as scratch:
        trainings = Trainings(args, kept["faults"].split(","), Path(scratch))
        with (
            progress(f"the {figures['steps']:,} steps of the storm without a fault") as show,
            show.stderr() as trainings.stderr,
        ):
            figures["calm_status"] = status = _compare(trainings, figures)
        if status:
            return status
        _write(trainings, figures)
    return _conclude(figures, args)


def _write(trainings: "Trainings", figures: dict[str, Any]) -> None:
    """Write the figures known so far, so that no later failure can lose them."""
    args = trainings.args
    if args.out:
        write_json(trainings.out / "storm.json", figures, member=True)
    if args.json:
        write_json(args.json, figures)


def _conclude(figures: dict[str, Any], args: argparse.Namespace) -> int:
    """Print the figures. Returns: as run()."""
    _print(figures, args)
    failed = figures["recovered"] < figures["faults"] or figures["bits"] == "differ"
    return int(figures["exit_status"]) or int(figures.get("calm_status", 0)) or int(failed)


@dataclass
class Trainings:
    """The runs of a storm: the same training, with and without faults.

    Attributes: told, works: events and spans() of the disturbed run, once it has ended; stderr: of
                all runs.
    """

    args: argparse.Namespace
    kinds: list[str]
    scratch: Path

    stderr: int | None = None

    def __post_init__(self) -> None:
        self.disk = None if {*self.kinds} <= {*WITHOUT_DISK} else self.scratch / "disk"
        self.out = Path(self.args.out or self.scratch / "storm")
        self.environment = {**os.environ}
        if self.disk is not None:
            self.disk.mkdir()
            self.environment |= disk_module(self.disk)
        self.told: list[dict[str, Any]] = []
        self.works: list[tuple[float, float, int, int]] = []

    def command(self, out: Path, steps: int, save_every: int, *, again: bool = False) -> list[str]:
        """Return the command of an elastic training.

        `again`: it resumes from its newest checkpoint, if it has one.
        """
        args = self.args
        words = module_command(
            "minidist",
            "train",
            f"-n{args.ranks}",
            f"--transport={args.transport}",
            "--quiet",
            f"--elastic={args.elastic or f'{-(-args.ranks // 2)}:{args.ranks}'}",
            f"--spares={args.spares}",
            f"--max-restarts={RESTARTS}",
            f"--elastic-wait={WAIT * bool(args.spares)}",
            f"--patience={PATIENCE}",
        )
        if again and any(out.glob("step-*")):
            return [*words, f"--resume={out}"]
        saves = [f"--save-every={save_every}", "--save-async"] if save_every else []
        return [*words, *TINY, *saves, f"--out={out}", f"--steps={steps}", *args.options]

    def undisturbed(self, name: str, steps: int, save_every: int = 0) -> int:
        """Run `steps` steps without faults, in a folder of their own; return the exit status."""
        with self.start(self.command(self.scratch / name, steps, save_every)) as training:
            try:
                return training.wait()
            except BaseException:
                training.kill()
                raise

    def start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """Start a training; its stderr is shown together with the progress of the storm."""
        return subprocess.Popen(command, env=self.environment, stderr=self.stderr)

    def tell_planted(self, fault: str) -> None:
        """Print a fault among the lines of the training, before the lines that it causes."""
        line = f"minidist storm: planted: {fault}"
        if self.stderr is None:
            say_line(line)
        else:
            os.write(self.stderr, f"{line}\n".encode())

    def metrics(self, folder: Path) -> dict[str, Any]:
        """Return the metrics of a run that has ended."""
        metrics: dict[str, Any] = read_json(folder / "metrics.json", _StormMetrics, member=True)
        return metrics


def _weather(
    trainings: Trainings, args: argparse.Namespace, kinds: list[str], show: Progress
) -> dict[str, Any]:
    """Run the storm and return its figures."""
    scratch = trainings.scratch
    out = trainings.out
    step_seconds = _step_seconds(scratch / "first", FIRST_STEPS, args.ranks)
    save_every = max(1, round(SAVE_SECONDS / step_seconds)) if trainings.disk else 0
    if save_every and trainings.undisturbed("saving", FIRST_STEPS, save_every) == 0:
        step_seconds = _step_seconds(scratch / "saving", FIRST_STEPS, args.ranks)
    steps = max(FIRST_STEPS, round(60 * args.minutes / step_seconds))
    storm = Storm(
        lambda again: trainings.start(trainings.command(out, steps, save_every, again=again)),
        out,
        every=args.every,
        kinds=kinds,
        seed=args.seed,
        disk=trainings.disk,
        save_seconds=SAVE_SECONDS,
        tell=trainings.tell_planted,
        noted=lambda: show(
            f"a storm of {args.minutes:g} minutes: {plural(len(storm.faults), 'fault')} so "
            f"far, the last {storm.faults[-1]['kind']}"
        ),
    )
    try:
        show(f"a storm of {args.minutes:g} minutes begins")
        storm.rage(60 * args.minutes)
        status = storm.job.wait(LATEST[0] + LATEST[1] * 60 * args.minutes)
    finally:
        storm.end()
    trainings.told, trainings.works = storm.told(), spans(storm.told(), storm.faults)
    figures = summary(storm.told(), storm.faults, args.ranks)
    figures |= {
        "steps": steps,
        "save_every": save_every,
        "step_seconds": step_seconds,
        "exit_status": status,
        "bits": None,
        "rate": None,
        "machine": machine(),
        "arguments": {
            "ranks": args.ranks,
            "minutes": args.minutes,
            "every": args.every,
            "faults": ",".join(kinds),
            "elastic": args.elastic,
            "spares": args.spares,
            "transport": args.transport,
            "seed": args.seed,
            "options": args.options,
        },
    }
    if status == 0:
        figures["rate"] = steps * step_seconds / figures["work_seconds"]
    return figures


def _step_seconds(run: Path, steps: int, ranks: int) -> float:
    """Return the seconds per step of an undisturbed run of `steps` steps."""
    return float(summary(events(run / LOG), [], ranks)["work_seconds"] / steps)


def _compare(trainings: Trainings, figures: dict[str, Any]) -> int:
    """Make the storm's steps without faults, and set bits and rate in the figures.

    Returns: the training's exit status.
    """
    args = trainings.args
    calm = trainings.scratch / "calm"
    steps = figures["steps"]
    status = trainings.undisturbed("calm", steps, figures["save_every"])
    if status:
        return status
    theirs = trainings.metrics(calm)
    ours = trainings.metrics(trainings.out)
    same = all(theirs[key] == ours[key] for key in ("losses", "weights_sha256"))
    figures["bits"] = (
        "equal" if same else "differ" if {*figures["sizes"]} == {args.ranks} else "other plans"
    )
    figures["validation_losses"] = [ours["validation_loss"], theirs["validation_loss"]]
    figures["rate"] = steps * _step_seconds(calm, steps, args.ranks) / figures["work_seconds"]
    shutil.rmtree(calm, ignore_errors=True)
    return 0


def _spread(values: list[float]) -> str:
    return (
        f"median {statistics.median(values):.2f} s, at most {max(values):.2f} s" if values else "-"
    )


def storm_lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures of a storm as lines, without the list of its faults."""
    lines = [
        f"{plural(figures['faults'], 'fault')}, {figures['recovered']} survived; the training of "
        f"{figures['steps']:,} steps ended with status {figures['exit_status']}"
    ]
    after = figures["seconds"]
    full = figures["full_seconds"]
    rows = [(kind, after[kind], full.get(kind, [])) for kind in sorted(after)]
    for kind, values, later in (
        [*rows, ("all", sum(after.values(), []), sum(full.values(), []))] if rows else []
    ):
        lines.append(
            f"  {kind:<8} {len(values):>4} times; to the next step that counts: "
            f"{_spread(values)}; to full strength: {_spread(later)}"
        )
    if figures["kept"] is not None and figures["participation"] is not None:
        lines.append(
            f"steps kept {figures['kept']:.2%}, ranks that took part {figures['participation']:.1%}"
            + (
                f", speed {figures['calm_rate']:.0%} of that between the faults"
                if figures.get("calm_rate")
                else ""
            )
            + (f", {figures['rate']:.0%} of an undisturbed run's" if figures["rate"] else "")
        )
    return lines


def _print(figures: dict[str, Any], args: argparse.Namespace) -> None:
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    def seconds(value: float | None) -> str:
        return "      -" if value is None else f"{value:6.2f}s"

    say("fault      rank   next useful step   full strength   steps made again")
    for fault in figures["happened"]:
        note = "" if fault["recovered"] else "   NOT SURVIVED"
        note = note or ("" if fault["noticed"] else "   the steps went on")
        say(
            f"{fault['kind']:<9} {fault.get('rank', '-'):>5} {seconds(fault['seconds']):>18} "
            f"{seconds(fault['full_seconds']):>15} {fault['again']:>18}{note}"
        )
    for line in storm_lines(figures):
        say(line)
    words = {
        "equal": "losses and weights have the bits of the undisturbed run",
        "differ": "losses or weights DIFFER from the undisturbed run, and the plan was the same",
        "other plans": "the plan changed, so the bits are not those of the undisturbed run",
    }
    if figures["bits"] is not None:
        say(words[figures["bits"]])
    if args.out:
        say(f"{args.out}/: storm.png, storm.json, storm.jsonl, elastic.jsonl, metrics.json")
