"""`minidist completion bash`: print a script by which the shell completes commands, options, their
choices, lessons and files.

    eval "$(minidist completion bash)"       in ~/.bashrc
    eval "$(minidist completion zsh)"        in ~/.zshrc, after compinit
    minidist completion fish | source        in ~/.config/fish/config.fish

The script holds all names, so the tab key starts no Python.
"""

import argparse
from collections.abc import Iterator

import shtab

from minidist import lessons

SHELLS = ("bash", "zsh", "fish")

FILES = ("FILE", "FILE.png", "FILE.csv", "PATH", "file", "program")
FOLDERS = ("DIR", "FOLDER", "RUN")
"""The metavars of arguments that name a file and a folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `minidist completion` to the parser."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


def run(args: argparse.Namespace) -> int:
    """Print the script. Returns: 0."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell, as text."""
    from minidist.cli import full_parser

    parser = full_parser()
    for action in _arguments(parser):
        name = action.metavar or action.dest
        if action.dest == "lesson":
            action.choices = [lesson.number for lesson in lessons.every_lesson()]
        elif name in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's own attribute
        elif name in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments that take a value, of the parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        elif action.nargs != 0:
            yield action
