"""docs/reference/command-line.md: every command with its options, from the parsers."""

import argparse
from collections.abc import Iterator

from minidist.bench.command import profile_path
from minidist.cli import COMMANDS, parser_for
from minidist.reference.markdown import block, code, head, page, table

PROFILE = "~/.config/minidist/profile.json"


def command_line_page() -> str:
    """Return the page."""
    lines = head(
        "Command line",
        "After this page you know every option of every command. `minidist COMMAND --help` prints "
        "the same. A wrong option or value ends with status 2 and one line, which names the "
        "nearest right one. [All exit statuses](errors.md#exit-statuses).",
    )
    names = [f"[`{name}`](#minidist-{name})" for name in COMMANDS]
    lines += table(["command", "what it does"], zip(names, COMMANDS.values(), strict=True))
    for name in COMMANDS:
        lines += _command(parser_for(name), "##")
    return page(lines)


def _command(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """Yield the part of one command: description, its options by group, its subcommands."""
    formatter = argparse.HelpFormatter(parser.prog)
    yield from ("", f"{level} {parser.prog}")
    paragraphs = (parser.description or "").strip().split("\n\n")
    for paragraph in paragraphs:
        if paragraph.startswith("    "):
            yield from block(paragraph)
        elif paragraph:
            yield from ("", " ".join(paragraph.split()))
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
                continue
            if action.help == argparse.SUPPRESS:
                continue
            told = formatter._expand_help(action) if action.help else ""
            rows.append((_words(action, formatter), told.replace(str(profile_path()), PROFILE)))
        if rows:
            yield from ("", f"**{group.title or 'options'}**")
            yield from table(["option", "what it does"], rows)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            what = {each.dest: each.help for each in action._choices_actions}
            for name, each in action.choices.items():
                each.description = each.description or f"{what.get(name) or ''}."
                yield from _command(each, level + "#")


def _words(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Return how an option is written: its names, then its value."""
    if not action.option_strings:
        usual = action.metavar if isinstance(action.metavar, str) else action.dest
        return code(formatter._format_args(action, usual))
    names = ", ".join(code(name) for name in action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices is not None and action.metavar is None:
        return f"{names} {' '.join(code(str(choice)) for choice in action.choices)}"
    return f"{names} {code(formatter._format_args(action, action.dest.upper()))}"
