"""Shared by all commands: an argument parser that helps with spelling, parsers of option values,
number formats."""

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from minidist.device import cores
from minidist.errors import ConfigError, MemoryLimitError
from minidist.files import DISK_FAILED, as_utf8, whole

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")
"""The endings of pictures that matplotlib writes."""

SMALLEST = 1e-300  # of a number above 0: what is divided by it stays finite
MOST_RANKS = 1024  # of a node: each is a process, or a thread
MOST_BYTES = 2**62  # of a size
NEAR = 0.7  # likeness of two words, from 0 to 1, from which one may be a mistake for the other
PROCESS_BYTES = 24 << 20  # of a rank, without shared memory of processes: Python, NumPy, minidist


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line, which names the nearest option or
    value.

    Raises: ConfigError where argparse would print its usage and exit; `minidist` prints it and
    exits with status 2.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a word that may be left out may also stand behind an option, as
        FILE in `minidist check 03 --language zh FILE`.

        Before Python 3.12.7 argparse took it for left out where the option began.
        """
        found, left = super().parse_known_args(args, namespace)
        if self._subparsers is None and any(not word.startswith("-") for word in left):
            # it parses twice by this method: first the options, then the other words
            self.parse_known_args = super().parse_known_args  # type: ignore[method-assign]
            try:
                return self.parse_known_intermixed_args(args)
            finally:
                del self.parse_known_args
        return found, left

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the values as argparse does, but refuse --json=--, whose value argparse takes for
        the end of the options.

        It also refuses an empty word, unless this is the default: mostly it is a variable of the
        shell that is not set.
        """
        if action.option_strings and arg_strings == ["--"]:
            self.error(f"argument {'/'.join(action.option_strings)}: '--' is not a value")
        free = action.type is None and action.default != "" and action.nargs in (None, "?", "+")
        if free and arg_strings == [""]:
            self.error(f"argument {argparse._get_action_name(action)}: '' is not a value")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        message = readable(message)
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        unknown = re.match(r"unrecognized arguments: (--?[^ =]+)", message)
        if choice:
            message += meant(choice[1], [name.strip(" '") for name in choice[2].split(",")])
        elif unknown:
            message += meant(unknown[1], set(_options(self)) - {unknown[1]})
        raise ConfigError(
            f"{message}{'' if message.endswith('?') else ';'} see `{self.prog} --help`"
        )


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the option strings of the parser and of all its commands: the top parser reports
    unknown options of each."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def meant(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest of `known`, or the empty string if none is near.

    The dashes of an option do not count, because all options have them.
    """
    names = {name.lstrip("-"): name for name in known}
    word = word.lstrip("-")
    nearest = difflib.get_close_matches(word, names, 1, NEAR)
    # a short word, as tpc for tcp
    nearest = nearest or [name for name in names if sorted(name) == sorted(word)]
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""


def fail(message: str) -> NoReturn:
    """Report a user's mistake: one line on stderr and exit status 2. Raises: ConfigError,
    always."""
    raise ConfigError(message)


def number_of_bytes(text: str) -> int:
    """Return a size in bytes: '64MiB' -> 67108864. Units: B, KB, MB, GB, TB (powers of 1000); KiB,
    MiB, GiB, TiB and K, M, G, T (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a size; write 4096, 64KiB, 1.5MB or 2GiB"
        )
    value = float(match[1]) * UNITS[match[2].upper()]
    if value >= MOST_BYTES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is more than {size_text(MOST_BYTES)}, the largest size allowed"
        )
    return round(value)


def sizes(text: str) -> list[int]:
    """Return sizes in bytes: '1KiB:64MiB' -> doubling from the first to the last; '1KiB,3MB' ->
    these; '4KiB' -> one."""
    if ":" not in text:
        return [number_of_bytes(part) for part in text.split(",")]
    first, last = map(number_of_bytes, text.split(":", 1))
    if not 0 < first <= last:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a range is FIRST:LAST, with FIRST above 0 and LAST not smaller"
        )
    return [first << doublings for doublings in range((last // first).bit_length())]


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option whose value is a whole number within these bounds."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"\s*[+-]?0*([0-9]+)\s*", text, re.ASCII)
        beyond = least - 1 if "-" in text else most + 1  # int() takes no more than 4,300 digits
        value = least if match is None else int(text) if len(match[1]) <= 20 else beyond
        if match is None or value < least:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a whole number of at least {least}"
            )
        if value > most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is more than {most:,}, the maximum of this option"
            )
        return value

    return parse


positive = whole_number(1, 10**9)
rank_count = whole_number(1, MOST_RANKS)
seed_number = whole_number(-(2**63), 2**64 - 1)


def counts(text: str) -> list[int]:
    """Return numbers of ranks: '2,4' -> [2, 4]."""
    return [rank_count(part) for part in text.split(",")]


def core_list(text: str) -> list[int]:
    """Return cores of this machine that this process may use: '0-1,4' -> [0, 1, 4]. Raises:
    ArgumentTypeError."""
    usable = cores.usable()
    if usable is None:
        raise argparse.ArgumentTypeError(
            "this system does not let a process choose its cores; leave the option out"
        )
    parts = [
        re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        for part in text.split(",")
    ]
    chosen = {
        core for part in parts if part for core in range(int(part[1]), int(part[2] or part[1]) + 1)
    }
    if None in parts or not chosen:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a list of cores; write it as 0-1 or 0,2; this process may use "
            f"cores {cores.in_words(usable)}"
        )
    if missing := sorted(chosen - {*usable}):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} names core {missing[0]}, but this process may use only cores "
            f"{cores.in_words(usable)}"
        )
    return sorted(chosen)


def decimal(text: str) -> float:
    """Return the number that a text states.

    Raises:  ValueError, also for 1_000 and for digits beyond ASCII.
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"{shown(text)} is not a number")
    return float(text)


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option whose value is `what`: a number up to 1e12 that `fits`."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if abs(value := decimal(text)) <= 1e12 and fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)} is not {what}")

    return parse


positive_number = _number("a number above 0", lambda value: value >= SMALLEST)
not_negative = _number("a number of at least 0", lambda value: value >= 0)
fraction = _number("a fraction in [0, 1)", lambda value: 0 <= value < 1)


def picture(text: str) -> str:
    """Return the name of a picture's file, which ends in one of PICTURES or has no ending.

    Raises:  ArgumentTypeError.
    """
    ending = Path(text).suffix.lower()
    if not text or (ending and ending not in PICTURES):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not the name of a picture; it must end in .png, .svg or .pdf"
        )
    return text


def folder_to_write(text: str) -> Path:
    """Return a folder that can be written to; it is made if it is not there. Raises:
    ArgumentTypeError."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} cannot be made as a folder: {error.strerror}"
        ) from None
    if not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{shown(text)} is a folder without write permission")
    return Path(text)


def readable(message: str) -> str:
    """Return an error's message as one line, with its longest words cut off: a user may have
    written anything."""
    message = re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]",
        lambda found: ascii(found[0])[1:-1],
        message,
    )
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}…", message)


def shown(text: str) -> str:
    """Return a user's text in quotes, as far as an error shows it."""
    return repr(text if len(text) <= 60 else f"{text[:40]}…")


def memory_bytes() -> int:
    """Return the memory of this machine with its swap, or less if the container that we are in may
    have less."""
    import psutil

    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        with suppress(OSError, ValueError):  # there is none, or "max"
            limits.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return int(min(limits))


def require_memory(what: str, nbytes: int, *, processes: int = 0) -> None:
    """Raise MemoryLimitError if `what`, with `processes` processes of ranks, needs more bytes than
    this machine has."""
    needed = nbytes + processes * PROCESS_BYTES
    here = memory_bytes()
    if needed > here:
        raise MemoryLimitError(
            f"{what} needs {size_text(needed)} of memory, but this machine has {size_text(here)}"
        )


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: (1, "rank") -> "1 rank", (4, "rank") -> "4 ranks", (2, "pass")
    -> "2 passes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count} {noun}{ending}"


def exactly(number: float) -> str:
    """Return a number as text: 12.0 -> "12", 1234.5 -> "1,234.5"."""
    return f"{number:,.1f}".removesuffix(".0")


def size_text(nbytes: float) -> str:
    """Return a size as text: `3.1 TiB`, `3 MiB`, `1.5 KiB`, `12 B`."""
    for unit, scale in (
        ("EiB", 2**60),
        ("PiB", 2**50),
        ("TiB", 2**40),
        ("GiB", 2**30),
        ("MiB", 2**20),
        ("KiB", 2**10),
    ):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def write_json(file: str | Path, value: Any, *, member: bool = False) -> None:
    """Write `value` to the file of --json, whole or not at all.

    Args:   member: as of files.whole.
    Raises: ConfigError if the place cannot be written; OSError if the disk is full or fails.
    """
    with written("--json", file, member=member) as draft:
        draft.write_bytes(as_utf8(json.dumps(value, indent=1, ensure_ascii=False) + "\n"))


@contextmanager
def written(option: str, file: str | Path, *, member: bool = False) -> Iterator[Path]:
    """Context manager: the draft of a file that `option` names (files.whole). Raises: as
    write_json."""
    try:
        with whole(file, member=member) as draft:
            yield draft
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        raise ConfigError(f"{option} {file}: {error.strerror or error}") from error
