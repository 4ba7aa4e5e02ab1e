"""docs/reference/errors.md: the tree of minidist.errors, and the exit statuses."""

import re
from typing import NamedTuple

from minidist import errors
from minidist.reference.markdown import block, code, head, page, table

STATUSES = {
    "0": "good",
    "1": "failed; of `diagnose` and `watch --once`: something is wrong; of `check`: not right yet",
    "2": "bad input: one line says what to change",
    "3": "of `simulate`: the plan does not fit",
    "75": "a training was told to stop (SIGTERM), has saved its state, and can continue",
    "130": "interrupted by Ctrl-C",
}
"""{exit status of a command: its meaning}."""


class ErrorEntry(NamedTuple):
    """An error of the tree: its name, the names of its bases, and when it is raised."""

    name: str
    bases: tuple[str, ...]
    when: str


def errors_page() -> str:
    """Return the page."""
    story = (errors.__doc__ or "").split("\n\n")
    lines = head(
        "Errors",
        "After this page you know what each error means. Every error is in `minidist.errors`, and "
        "every one is a `MinidistError`. Those with a second base can also be caught as that.",
    )
    rows = [
        (code(each.name), ", ".join(code(base) for base in each.bases), each.when)
        for each in error_entries()
    ]
    lines += table(["error", "is a", "when"], rows)
    for paragraph in story[2:]:
        lines += ["", " ".join(paragraph.split())]
    lines += ["", "## The tree", *block(story[1])]
    lines += ["", "## Exit statuses"]
    lines += table(["status", "meaning"], STATUSES.items())
    return page(lines)


def error_entries() -> list[ErrorEntry]:
    """Return the errors of the tree in the module's docstring, in its order.

    Bases are those of the classes.
    """
    tree = (errors.__doc__ or "").split("\n\n")[1]
    found: list[tuple[str, str]] = []
    for line in tree.splitlines()[1:]:
        if begun := re.match(r"[\s│]*[├└]── (\w+)(?: \([\w, ]+\))?\s*(.*)", line):
            found.append((begun[1], begun[2]))
        else:
            name, when = found.pop()
            found.append((name, f"{when} {line.strip(' │')}"))
    return [
        ErrorEntry(name, tuple(base.__name__ for base in getattr(errors, name).__bases__), when)
        for name, when in found
    ]
