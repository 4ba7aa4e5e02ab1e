"""The `minidist` command: one file per command, imported when it is used.

The module of a command offers add_arguments(parser) and run(args) -> exit status. A user's mistake
(ConfigError) prints one line on stderr and gives exit status 2; a full disk or too little memory
prints one line and gives 1; an interrupt gives 130; a training that got SIGTERM and has saved its
state gives 75. Python handles any other error; on a rank of a larger job minidist.launch does,
which names the rank and ends the job everywhere. When the reader of stdout has gone (`| head`), the
command still does all its work.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType

from minidist.cli.process import interrupts_wait, own_process, refusal
from minidist.comm.health.failure import say_line
from minidist.errors import ConfigError
from minidist.files import home
from minidist.streams import standard_output

COMMANDS = {
    "demo": "a tour of two minutes: a ring drawn with its bytes, a killed rank named, DDP equal "
    "to one process",
    "train": "train a model under a plan; runs under mpirun, srun, minidist launch, or alone "
    "with -n N",
    "launch": "start N processes here, or on several nodes, as torchrun does",
    "simulate": "run a plan on a cluster that is not at hand: time, memory, traffic, price",
    "plan": "find the plan that fits a model on a cluster best, and say why",
    "storm": "break an elastic training on purpose, and see what becomes of it",
    "sample": "write text from a run, or from one of its checkpoints",
    "checkpoint": "look into a run's checkpoints: verify every byte, export, reshard",
    "watch": "show a run live: loss, each rank's time, bytes, memory, power, and the rank that "
    "is slow",
    "report": "make one HTML page of a run: losses, timeline, memory, traffic, overlap, energy",
    "diagnose": "find which rank broke a job, where and why, from its flight recorders",
    "bench": "time collectives and training steps, side by side with other libraries where "
    "installed",
    "calibrate": "fit simulate's cost model to step times that you measured",
    "lesson": "print, run or list lessons",
    "check": "grade the exercise of a lesson",
    "assignment": "write or grade an assignment whose numbers are drawn for one student",
    "cohort": "show the marks of many students, and what to teach again",
    "doctor": "draw this machine, and show what it has, what is missing, and how to get it",
    "completion": "print the script by which bash, zsh or fish completes this command",
}

BEGIN = """
where to begin:
  minidist demo            two minutes: bytes on a ring, a killed rank, DDP equal to one process
  minidist train -n 2      a minute: trains a GPT on two ranks, and shows what that cost
  minidist lesson          the lessons; minidist lesson 03 prints one
  minidist doctor          what this machine has"""

MODULES = {"train": "minidist.cli.train.command", "bench": "minidist.bench.command"}
"""Commands that are not a file minidist/cli/COMMAND.py."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:    argv: its words (default: those of this process).
    Returns: the exit status: 0 good, 1 failed, 2 bad input, 75 try again, 130 interrupted.
    """
    if argv is None:
        own_process()
    with suppress(ConfigError):
        os.environ.setdefault("HOME", str(home()))  # without it matplotlib prints lines, or fails
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and words[0] in COMMANDS else None
    prefix = f"minidist {command or ''}".rstrip()
    with standard_output() as output:
        try:
            status = _run(words, command, prefix)
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            if not output.lost:
                raise
            status = 0
    if output.lost:
        say_line(f"{prefix}: {output.lost}")
        if not status:
            from minidist import launch

            assert output.problem is not None
            launch.speaks_first(output.problem)  # so that the launcher prints nothing
    return status or int(bool(output.lost))


def _run(words: list[str], command: str | None, prefix: str) -> int:
    """Run a command and return its exit status; if that is not 0, the reason has been printed."""
    understood = False
    try:
        with interrupts_wait():
            modules = {command: _module(command)} if command else {}
            parser = _parser(modules)
        args = parser.parse_args(words)
        # bench: `minidist bench step`
        prefix = f"{prefix} {vars(args).get('what', '')}".rstrip()
        understood = True
        if command is None:
            parser.print_help()
            if not words:
                print(BEGIN)
            return 0
        return int(modules[command].run(args))
    except (ConfigError, KeyboardInterrupt, OSError, MemoryError) as error:
        refused = (str(error), 2) if isinstance(error, ConfigError) else refusal(error)
        if refused is None and not isinstance(error, KeyboardInterrupt):
            raise
        from minidist import launch

        told, status = refused or ("interrupted", 130)
        # All ranks end here for one reason at an interrupt or if the words cannot be parsed: only one
        # of them prints it.
        if launch.speaks_first(error, everywhere=not understood or status == 130):
            from minidist.console import readable
            from minidist.reading import visible

            say_line(f"{prefix}: {visible(readable(told))}")
        return status


def _parser(modules: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """Return the parser of `minidist`, with the options of the commands in `modules`.

    The command line loads only the requested command's module.
    """
    from minidist import __version__
    from minidist.console import Parser

    parser = Parser(
        prog="minidist",
        description="Distributed training from scratch: every chapter runs.",
        formatter_class=_help_formatter,
        epilog="`minidist COMMAND --help` lists a command's options",
    )
    parser.add_argument("--version", action="version", version=f"minidist {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, what in COMMANDS.items():
        if name in modules:
            story = (modules[name].__doc__ or what).split("\n\n")[0]
            modules[name].add_arguments(commands.add_parser(name, help=what, description=story))
        else:
            commands.add_parser(name, help=what)
    return parser


def _module(command: str) -> ModuleType:
    return importlib.import_module(MODULES.get(command, f"minidist.cli.{command}"))


def parser_for(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command alone, with its options and description."""
    from minidist.console import Parser

    module = _module(command)
    story = (module.__doc__ or COMMANDS[command]).split("\n\n")[0]
    parser = Parser(prog=f"minidist {command}", description=story)
    module.add_arguments(parser)
    return parser


def full_parser() -> argparse.ArgumentParser:
    """Return the parser of `minidist` with the options of every command."""
    return _parser({command: _module(command) for command in COMMANDS})


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter with room for the longest command: argparse counts its letters, but not
    its indentation."""
    formatter = argparse.HelpFormatter(prog)
    formatter._action_max_length = max(map(len, COMMANDS)) + 4
    return formatter
