"""`minidist watch RUN`: a run, live: step, loss, each rank's time, bytes, memory, power, and the
rank that is slow.

    minidist watch runs/one                 # from another terminal; Ctrl-C leaves the view, and
                                            # the run continues
    minidist watch runs/one --once          # one look, also at a run that has ended

It reads only the run folder. If stdout is no terminal, it prints a line every five seconds.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from rich.console import Group
from rich.live import Live

from minidist.cli.watch_view import lines_of, one_line, signs_for
from minidist.console import positive_number, write_json
from minidist.files import check_writable
from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import DIED, OVER, STALLED, STOPPED_RUN, RunNow
from minidist.reading import visible
from minidist.terminal import Console

# seconds between looks: on a terminal, and as lines
EVERY = 1.0
LINES_EVERY = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist watch` to the parser."""
    parser.add_argument(
        "run", metavar="RUN", help="a run folder of minidist train, or a folder of flight recorders"
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument(
        "--every",
        type=positive_number,
        metavar="SECONDS",
        help=f"between looks (default: {EVERY:g} on a terminal, else {LINES_EVERY:g})",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the last look as JSON")
    parser.add_argument("--beside-train", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Watch until the run has ended, or Ctrl-C.

    Returns: 1 if it died (with --once also if it has stalled), else 0.
    Raises:  ConfigError if there is no run.
    """
    check_writable("--json", args.json)
    looking = Looking(args.run)
    console = Console(highlight=False)
    end = threading.Event()
    if args.beside_train:
        os.nice(10)  # the ranks come first
    now = looking.look()
    try:
        if args.once:
            show(console, now)
        elif console.is_terminal and not console.is_dumb_terminal:
            now = live(
                looking, now, console, args.every or EVERY, end, beside_train=args.beside_train
            )
        else:
            if args.beside_train:
                end_with_stdin(end, print_line)
            now = lines(looking, now, args.every or LINES_EVERY, end)
    except KeyboardInterrupt:
        pass  # it leaves the view; the run continues
    if args.json:
        write_json(args.json, asdict(now))
    return int(now.state == DIED or (args.once and now.state in (STALLED, STOPPED_RUN)))


def show(console: Console, now: RunNow) -> None:
    """Print the view, once."""
    for line in lines_of(now, width=console.width, signs=signs_for(console.encoding)):
        console.print(line, soft_wrap=True)


def live(
    looking: Looking,
    now: RunNow,
    console: Console,
    every: float,
    end: threading.Event,
    *,
    beside_train: bool,
) -> RunNow:
    """Update the view in place on the terminal, until the run has ended, or `end` is set.

    Returns: the last look.
    """

    def view() -> Group:
        return Group(
            *lines_of(
                now, width=console.width, height=console.height, signs=signs_for(console.encoding)
            )
        )

    with Live(view(), console=console, auto_refresh=False, vertical_overflow="crop") as screen:
        if beside_train:
            end_with_stdin(end, lambda line: console.print(line, markup=False, soft_wrap=True))
        while now.state not in OVER and not end.wait(max(every, looking.rest)):
            now = looking.look()
            screen.update(view(), refresh=True)
        if end.is_set():
            now = looking.look()
            screen.update(view(), refresh=True)
    return now


def lines(looking: Looking, now: RunNow, every: float, end: threading.Event) -> RunNow:
    """Print a line for each look that shows something new, until the run has ended.

    Returns: the last look.
    """
    last = ""
    while True:
        if (line := one_line(now)) != last:
            print_line(last := line)
        if now.state in OVER or end.is_set():
            return now
        end.wait(max(every, looking.rest))
        now = looking.look()


def print_line(line: str) -> None:
    """Print a line in one write: two threads print, and `print` writes a line's end separately from
    its text."""
    sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()


def end_with_stdin(end: threading.Event, say: Callable[[str], None]) -> None:
    """Print each line that arrives on stdin, from `minidist train --watch`.

    At its end set `end`: the steps have ended.
    """

    def hear() -> None:
        with suppress(OSError, ValueError):
            for line in sys.stdin:
                say(line.rstrip("\n"))
        end.set()

    threading.Thread(target=hear, daemon=True).start()
