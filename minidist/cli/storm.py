"""`minidist storm -n 8 --minutes 5 --every 10`: break an elastic training on purpose, and see what becomes of it.

    minidist storm -n 4 --minutes 1 --every 5                  # ranks are killed, stopped and cut off in turn
    minidist storm -n 4 --faults kill --spares 1 -- --zero 1   # options of `minidist train` come after --

A short undisturbed run comes first: by its speed the second one has enough steps for the minutes, and is judged.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from minidist.console import (
    fail,
    plural,
    positive_number,
    rank_count,
    seed_number,
    shown,
    whole_number,
    write_json,
)
from minidist.files import check_writable
from minidist.observe.plots import draw_storm
from minidist.survive.storm import FAULTS, Storm, events, spans, summary

TINY = ("--layers=2", "--width=64", "--heads=4", "--context=64", "--batch=16")
FIRST_STEPS = 60        # of the undisturbed run
LATEST = 120.0, 20.0    # seconds that the training may take to end after the storm: these, and for each second of it
RESTARTS = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minidist storm`; words after -- are for `minidist train`."""
    add = parser.add_argument
    add("-n", "--ranks", type=rank_count, default=4, metavar="N", help="ranks of the training (default: 4)")
    add("--minutes", type=positive_number, default=1.0, metavar="M", help="length of the storm (default: 1)")
    add("--every", type=positive_number, default=10.0, metavar="SECONDS",
        help="from a fault to the next, on average (default: 10)")
    add("--faults", default=",".join(FAULTS), metavar="KIND,…", help=f"of {', '.join(FAULTS)} (default: all, in turn)")
    add("--elastic", metavar="LEAST:MOST", help="as of train (default: half the ranks to all)")
    add("--spares", type=whole_number(0, 1024), default=1, metavar="K", help="as of train (default: 1)")
    add("--transport", choices=("auto", "tcp", "shm"), default="tcp",
        help="as of train (default: tcp, whose connections can be cut)")
    add("--seed", type=seed_number, default=0, metavar="S", help="of the faults (default: 0)")
    add("--out", metavar="DIR", help="keep the run folder, with storm.png and storm.json, here")
    add("--json", metavar="FILE", help="also write the figures here")
    add("options", nargs="*", metavar="-- OPTION", help="of `minidist train`")


def run(args: argparse.Namespace) -> int:
    """Returns: 0 if the training ended well; else its exit status. Raises: ConfigError."""
    kinds = args.faults.split(",")
    if wrong := [kind for kind in kinds if kind not in FAULTS]:
        fail(f"--faults: {shown(wrong[0])} is none of {', '.join(FAULTS)}")
    check_writable("--json", args.json)
    with tempfile.TemporaryDirectory(prefix="minidist-storm-") as scratch:
        folder = Path(args.out or Path(scratch) / "storm")
        train = [sys.executable, "-m", "minidist", "train", f"-n{args.ranks}", f"--transport={args.transport}",
                 "--quiet", *TINY, *args.options]
        calm = Path(scratch) / "calm"
        status = subprocess.call([*train, f"--steps={FIRST_STEPS}", f"--out={calm}"])
        if status:
            return status
        step_seconds = json.loads((calm / "metrics.json").read_text())["step_seconds"]
        steps = max(FIRST_STEPS, round(60 * args.minutes / step_seconds))
        job = subprocess.Popen([
            *train, f"--elastic={args.elastic or f'{-(-args.ranks // 2)}:{args.ranks}'}", f"--spares={args.spares}",
            f"--max-restarts={RESTARTS}", f"--steps={steps}", f"--out={folder}"])
        log = folder / "elastic.jsonl"
        storm = Storm(log, every=args.every, kinds=kinds, seed=args.seed)
        try:
            storm.rage(job, 60 * args.minutes)
            status = job.wait(LATEST[0] + LATEST[1] * 60 * args.minutes)
        finally:
            job.terminate()
            job.wait()
        figures = {**summary(events(log), storm.faults, args.ranks), "steps": steps, "step_seconds": step_seconds,
                   "exit_status": status, "happened": storm.faults}
        figures["rate"] = _rate(events(log), steps, step_seconds)
        if args.out:
            write_json(folder / "storm.json", figures)
            start = next((event["time"] - event["seconds"] for event in events(log) if "time" in event), time.time())
            draw_storm(folder / "storm.png", spans(events(log)),
                       [(fault["time"] - start, fault["kind"]) for fault in storm.faults], ranks=args.ranks)
    if args.json:
        write_json(args.json, figures)
    _print(figures, args)
    return int(status)


def _rate(told: list[dict[str, Any]], steps: int, step_seconds: float) -> float | None:
    """The speed beside an undisturbed run's: all steps, over the time from the first state to the end of the work."""
    times = {event["event"]: event["seconds"] for event in reversed(told)}
    done = [event["seconds"] for event in told if event["event"] == "done"]
    return steps * step_seconds / (done[-1] - times["formed"]) if done else None


def _print(figures: dict[str, Any], args: argparse.Namespace) -> None:
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{plural(figures['faults'], 'fault')}, {figures['recovered']} survived; the training of {figures['steps']:,} "
        f"steps ended with status {figures['exit_status']}")
    for kind, seconds in sorted(figures["seconds"].items()):
        ordered = sorted(seconds)
        say(f"  {kind:<5} {len(ordered):>4} times; to the next step that counts: median "
            f"{ordered[len(ordered) // 2]:.2f} s, at most {ordered[-1]:.2f} s")
    if figures["kept"] is not None and figures["participation"] is not None:
        say(f"steps kept {figures['kept']:.2%}, ranks that took part {figures['participation']:.1%}"
            + (f", speed {figures['rate']:.0%} of an undisturbed run's" if figures["rate"] else ""))
    if args.out:
        say(f"{args.out}/: storm.png, storm.json, elastic.jsonl, metrics.json")
